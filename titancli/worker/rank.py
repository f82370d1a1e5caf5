"""The program of a rank: it runs a resolved recipe and returns the outcome.

`python -m titancli.worker.rank RUN_DIR` is one rank of several, started by a launcher; `main` runs the only
rank inside the command. `Rank.run` meets the other ranks, and `Rank.train` builds the recipe's components and
runs its loop. Nothing at the top imports torch, so that signals are handled from the first moment.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from titancli.checkpoint.format.manifest import DamagedCheckpoint
from titancli.checkpoint.start_from import start_from
from titancli.errors import EXIT_FAILED, EXIT_OK
from titancli.launch import rank_options
from titancli.observe import failures
from titancli.observe.console import Console
from titancli.observe.events import Listener, plain
from titancli.process import (
    Place,
    determinism,
    die_with_parent,
    log_into,
    quiet,
    rank_log,
    tell_where_stopped,
)
from titancli.provenance import code_hashes
from titancli.recipe.find import url_of
from titancli.registry.component import build
from titancli.runs import Claim, RunFolder, timestamp
from titancli.signals import ASKED_TO_STOP, EXIT_NODES_JOIN, NODES_JOIN, Stop, leave
from titancli.worker.attempt import take_part
from titancli.worker.resume import Resume
from titancli.worker.run_context import RunContext

if TYPE_CHECKING:
    import torch

    from titancli.engine import Engine
    from titancli.loops.run import Run
    from titancli.observe.observers import Observers
    from titancli.protocols import Copies
    from titancli.recipe.schema import Checkpoint, Recipe

logger = logging.getLogger("titancli.worker.rank")  # its __name__ may be __main__


def main(
    run_dir: Path,
    *,
    lock_file: Path | None = None,
    checkpoint: Path | None = None,
    store: Path | None = None,
    plugin_files: Sequence[Path] = (),
    place: Place | None = None,
    stop: Stop | None = None,
    listeners: tuple[Listener, ...] = (),
) -> dict[str, Any]:
    """Run one rank to its end and return the outcome (see `Rank.train`).

    Without `lock_file`, the run folder is ready and held by the caller. With it, rank 0 makes the folder from
    that file and the `run.json` beside it. `store` is a folder in which the ranks of one machine meet.
    `listeners` receive rank 0's events.

    Raises:
        Exception: any error, after `logs/rank-N.error.json` was written.
    """
    from titancli import registry

    quiet()
    with ExitStack() as stack:
        rank = Rank(RunFolder(run_dir.absolute()), place or Place(), stack, plugin_files, store)
        if stop is None:
            stop = stack.enter_context(Stop().listening(leave=rank.record_leaving))
        try:
            registry.configure(files=plugin_files, checks=False)
            return rank.run(lock_file, checkpoint, stop, listeners)
        except BaseException as error:
            failures.write(
                rank.folder.logs, error, rank=rank.place.rank, world=rank.place.world, step=rank.current_step
            )
            if failures.is_communication(error):
                rank.dump_flight_recorder()
            raise


class Rank:
    """The life of one rank, from a lock file to an outcome. The stack closes what it opens."""

    def __init__(
        self,
        folder: RunFolder,
        place: Place,
        stack: ExitStack,
        plugin_files: Sequence[Path] = (),
        store: Path | None = None,
    ) -> None:
        self.folder, self.place, self._plugin_files = folder, place, plugin_files
        self._stack, self._store = stack, store
        self._resume = Resume(folder, place)
        self._observers: Observers | None = None
        self._engine: Engine | None = None
        self._copies: Copies | None = None

    @property
    def is_main(self) -> bool:
        return self.place.rank == 0

    @property
    def current_step(self) -> int | None:
        """The current step; None before the first."""
        return self._observers.step + 1 if self._observers else None

    def run(
        self, lock_file: Path | None, checkpoint: Path | None, stop: Stop, listeners: tuple[Listener, ...]
    ) -> dict[str, Any]:
        """Run the rank; see `main`."""
        from titancli.distributed.together import Ranks
        from titancli.recipe import load_recipe
        from titancli.worker import saving
        from titancli.worker.observing import open_loggers

        source = lock_file or RunFolder.open(self.folder.path).lock_to_start
        lock_text = source.read_text(encoding="utf-8")
        loaded = load_recipe(source)
        recipe, section = loaded.recipe, loaded.recipe.checkpoint
        device = self._enter(recipe, lock_file, lock_text)
        chosen = self._choose(section, checkpoint)
        # Rank 0 reads it: on a shared disk the others may not see yet what it wrote.
        record = Ranks().broadcast_call("reading run.json", self._resume.record)
        loggers = open_loggers(
            recipe,
            self.folder,
            self.place,
            self._stack,
            restart=self._resume.restart,
            several_nodes=lock_file is not None,
            listeners=listeners,
        )
        if self.is_main:
            for change in record["attempts"][-1].get("code_drift", ()):
                logger.warning("changed since the run was last started: %s", change)
        self._copies = saving.open_copies(recipe, self.folder, record, self._stack)
        newest = record["attempts"][-1].get("step") is None
        copy = self._copies.newest(wanted=newest) if self._copies else None
        context = RunContext(
            loaded,
            lock_text,
            record,
            self._resume.not_lost(copy or chosen, section),
            device,
            self.folder,
            self.place,
            self._resume.restart,
            self._copies,
        )
        outcome = self._train_from_sound(context, chosen, loggers, stop)
        if outcome["signal"] == NODES_JOIN.name:
            logger.info("more nodes join: all ranks restart from step %d", outcome["step"])
            return outcome
        return self._ended(outcome, record)

    def _choose(
        self,
        section: Checkpoint,
        checkpoint: Path | None,
        damaged: Mapping[Path, str] = MappingProxyType({}),
    ) -> Path | None:
        """Return the checkpoint to continue from, as rank 0 finds it. Collective."""
        from titancli.distributed import process_group
        from titancli.distributed.together import Ranks

        patient = Ranks(process_group.patient_group() if section.remote else None)  # for downloads
        return patient.broadcast_call(
            "choosing the checkpoint", lambda: self._resume.checkpoint(checkpoint, section, damaged)
        )

    def _train_from_sound(
        self, context: RunContext, chosen: Path | None, loggers: list[Any], stop: Stop
    ) -> dict[str, Any]:
        """Call `train`, from another checkpoint if the chosen one is damaged; explain memory that has run
        out."""
        from titancli.worker.memory_advice import advised

        section, damaged = context.recipe.checkpoint, dict[Path, str]()
        try:
            while (outcome := self._train_unless_damaged(context, loggers, stop, damaged)) is None:
                other = self._choose(section, chosen, damaged)
                if other is not None:
                    logger.warning("the run continues from %s", other.name)
                context = replace(context, checkpoint=self._resume.not_lost(other, section))
        except Exception as error:
            explained = advised(error, context, self._engine, self.current_step)
            if explained is None:
                raise
            raise explained from error
        return outcome

    def _ended(self, outcome: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
        """Report and record the outcome, and return it with the latest metrics."""
        if self._observers is not None:
            self._observers.run_end(outcome)
            outcome = {**outcome, "metrics": self._observers.latest}
        if self.is_main:
            Claim.of(self.folder, record).check()  # the newest attempt may be another one by now
            self.folder.update_attempt(outcome=plain(outcome), ended=timestamp())
        return outcome

    def _enter(self, recipe: Recipe, lock_file: Path | None, lock_text: str) -> torch.device:
        """Meet the other ranks, which run the same, in a run folder that all see; return this rank's device.

        Args:
            lock_file: this node's recipe, if each node starts by itself.
        """
        from titancli.distributed.shared_folder import require_shared
        from titancli.distributed.together import require_same
        from titancli.worker.joining import join

        self._stack.enter_context(determinism(recipe.debug.deterministic))
        device = join(
            recipe,
            hashlib.sha256(lock_text.encode()).hexdigest(),
            self.folder.logs,
            self.place,
            self._stack,
            store=self._store,
            plugin_files=self._plugin_files,
        )
        if lock_file is not None:
            code = ", ".join(f"{name} {digest[:12]}" for name, digest in code_hashes().items())
            require_same("code of titan or its plugins", code, socket.gethostname())
            own, first = lock_file.parent, self.place.local_rank == 0
            taken = take_part(self.folder, own, lock_text, self._stack, first_of_node=first)
            self._resume.restart, self._resume.plan_is_stale = taken
        require_shared(self.folder.logs, socket.gethostname(), first_of_node=self.place.local_rank == 0)
        self._stack.callback(self.folder.join().release)
        return device

    def _train_unless_damaged(
        self, context: RunContext, loggers: list[Any], stop: Stop, damaged: dict[Path, str]
    ) -> dict[str, Any] | None:
        """Call `train`; return None if the run's own checkpoint is damaged, after adding it to `damaged`.
        All ranks find the same, and everything that was built is released with the error."""
        try:
            return self.train(context, loggers, stop)
        except DamagedCheckpoint as error:
            chosen = context.attempt.get("step")
            stays = f"step-{chosen}" == error.folder.name
            final = context.recipe.checkpoint.remote is None or error.folder in damaged
            if self._copies is not None and error.folder == self._copies.folder:
                logger.warning("the copy in memory cannot be used: %s", error.why)
                self._copies.discard()
            elif error.folder != context.checkpoint or (stays and final):
                raise
            else:
                damaged[error.folder] = error.why
                logger.warning("checkpoint %s is skipped: %s", error.folder.name, error.why)
        self._engine = None
        gc.collect()  # a device does not hold two engines
        return None

    def train(self, context: RunContext, loggers: list[Any], stop: Stop) -> dict[str, Any]:
        """Build the recipe's components, in the initialized process group, and run its loop.

        Returns:
            `{"why", "signal", "step", "checkpoint"}`; why is finished, stopped, interrupted or data_ended.

        Raises:
            TitanError: a component of the recipe is missing or does not fit.
        """
        from titancli.distributed.together import Ranks
        from titancli.engine import Engine
        from titancli.loops.run import garbage_between_steps
        from titancli.worker.data import check_vocabulary, open_data, open_validation
        from titancli.worker.epochs import with_steps
        from titancli.worker.hooks import open_run
        from titancli.worker.observing import observe
        from titancli.worker.saving import saved

        context = with_steps(context)
        recipe = context.recipe
        tokenizer = None if recipe.tokenizer is None else build(recipe.tokenizer)
        check_vocabulary(recipe, tokenizer)
        if (first := start_from(recipe, context.checkpoint)).kind == "weights" and first.source is not None:
            logger.info("loading weights from %s", url_of(first.source) or first.source)
        loop = recipe.loop
        checkpoint = context.checkpoint or loop.checkpoint
        engine = Engine.build(recipe, device=context.device, checkpoint=checkpoint, frozen=not loop.trains)
        self._engine = engine
        run = open_run(context, engine, tokenizer, stop)
        with ExitStack() as failed:
            failed.push(run.hooks)
            drift = context.attempt.get("allow_drift", False)
            data = run.data = open_data(recipe, tokenizer, engine, context.checkpoint, allow_drift=drift)
            copied = self._copies is not None and self._copies.loaded()
            observers = self._observers = observe(context, engine, loggers, data)
            if context.checkpoint is not None and not copied:
                run.saved_step = engine.step
            run.validation = open_validation(recipe, tokenizer, engine, observers)
            if run.validation is not None and run.hooks.has("validated"):
                run.validation.on_metrics = partial(run.hooks.call, "validated")
            failed.pop_all()
        data_closed = nullcontext() if data is None else closing(data)
        with saved(context, engine, run, observers), data_closed, run.hooks:
            known = {"engine": engine, "data": data, "tokenizer": tokenizer}
            go = build(recipe.loop, **known, observers=observers, run=run)
            if recipe.checkpoint.create_seed_checkpoint and data is not None:
                go = partial(run.save_seed, engine, data)
            with garbage_between_steps():
                ranks = Ranks()
                ranks.call("beginning the run", lambda: run.hooks.call("run_start", engine.step))
                ranks.broadcast_call(
                    "replacing the recipe of the run", lambda: self._adopt(context.lock_text, run)
                )
                observers.run_start({"step": engine.step})
                go()
                run.end()
        name = f"checkpoints/step-{run.saved_step}" if run.saved_step is not None else None
        return {"why": run.why, "signal": run.signal, "step": engine.step, "checkpoint": name}

    def _adopt(self, lock_text: str, run: Run) -> None:
        """Make the recipe that all ranks have loaded that of the run: until here, a start that fails changes
        nothing."""
        self.folder.adopt_recipe_lock(lock_text)
        self.folder.update_attempt(loaded=True, closing=run.closing and run.closing.known)

    def record_leaving(self) -> None:
        """Write the outcome of a run that the user did not wait for."""
        step = self._observers.step if self._observers else None
        outcome = {"why": "interrupted", "signal": "SIGINT", "step": step, "checkpoint": None}
        self.folder.update_attempt(outcome={**outcome, "metrics": {}}, ended=timestamp())

    def dump_flight_recorder(self) -> None:
        """Write the collectives of a rank that waited for another in vain, beside its log."""
        from titancli.distributed import process_group

        try:
            process_group.dump_flight_recorder(self.folder.logs, self.place.rank)
        except OSError as error:  # a full disk must not hide why the run failed
            print(f"cannot write the flight recorder trace: {error}", file=sys.stderr)


# ------------------------------------------------------------------------------------ one of several


def run_rank(arguments: Sequence[str] | None = None) -> int:
    """Run `python -m titancli.worker.rank`; the exit code is 0 if the rank stopped in good order."""
    options = rank_options(arguments)
    place = Place.from_environment()
    with Stop(os.environ.get(ASKED_TO_STOP)).listening(also=[NODES_JOIN]) as stop:
        die_with_parent()
        folder = RunFolder(options["run_dir"].absolute())
        log_into(rank_log(folder.logs, place.rank), f"rank {place.rank} of {place.world}")
        tell_where_stopped()
        failures.error_file(folder.logs, place.rank).unlink(missing_ok=True)
        try:
            outcome = main(**options, place=place, stop=stop, listeners=(Console(sys.stdout, live=False),))
        except BaseException:
            traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            # No clean exit: threads and collectives may hang, and the launcher is waiting for the cause.
            os._exit(EXIT_FAILED)
    return EXIT_NODES_JOIN if outcome["signal"] == NODES_JOIN.name else EXIT_OK


if __name__ == "__main__":
    sys.exit(leave(run_rank()))
