"""What each rank runs: a resolved recipe in, an outcome out.

`python -m titancli.run.worker RUN_DIR` is one rank of several, started by a launcher; `main` runs the only
rank inside the command. `Rank.run` meets the other ranks, and `Rank.train` builds what the recipe names and
runs its loop. Nothing at the top imports torch, so that signals are handled from the first moment.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import os
import socket
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from titancli.checkpoint.format.files import waiting_for_late_files
from titancli.checkpoint.format.manifest import DamagedCheckpoint, names_and_sizes, newest_good, none_newer
from titancli.checkpoint.start_from import start_from
from titancli.distributed import shared_folder
from titancli.errors import EXIT_FAILED, EXIT_OK, TitanError
from titancli.launch import rank_options
from titancli.observe import failures
from titancli.observe.console import Console
from titancli.observe.events import EventLog, EventLogger, Listener, logs_as_events, plain
from titancli.observe.phases import RAISED_IN
from titancli.observe.profiler import is_out_of_memory
from titancli.process import (
    Place,
    determinism,
    die_with_parent,
    environment,
    leave_process_group,
    leaving_if_orphaned,
    log_into,
    loopback_only,
    quiet,
    rank_log,
    tell_where_stopped,
)
from titancli.provenance import code_hashes, file_hash, package_versions
from titancli.recipe.find import url_of
from titancli.registry.component import build
from titancli.registry.defaults import LoopConfigDefaults, with_defaults
from titancli.run import remote
from titancli.run.attempt import take_part
from titancli.runs import REPLAY_REQUEST, Claim, RunFolder, timestamp
from titancli.signals import ASKED_TO_STOP, EXIT_NODES_JOIN, NODES_JOIN, Stop, leave

if TYPE_CHECKING:
    import torch

    from titancli.checkpoint.peers.copies import Copies
    from titancli.engine import Engine
    from titancli.engine.digest import Digests
    from titancli.loops.run import Run
    from titancli.observe.observers import Observers
    from titancli.observe.profiler import Profiler
    from titancli.recipe import Loaded
    from titancli.recipe.schema import Checkpoint, Recipe
    from titancli.run.probe import Probe

logger = logging.getLogger("titancli.run.worker")  # its __name__ may be __main__


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

    Without `lock_file` the run folder is ready and held by the caller. With it rank 0 makes the folder, from
    that file and the `run.json` beside it. `store` is a folder in which the ranks of one machine meet.
    `listeners` are handed rank 0's events.

    Raises:
        Exception: whatever went wrong, after `logs/rank-N.error.json` was written.
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


@dataclass(frozen=True)
class Start:
    """What the ranks have agreed on before anything is built."""

    loaded: Loaded
    lock_text: str
    record: dict[str, Any]
    """`run.json`."""
    checkpoint: Path | None
    """The one to continue from; None starts at step 0."""
    device: torch.device

    @property
    def recipe(self) -> Recipe:
        return self.loaded.recipe

    @property
    def run_id(self) -> str:
        run_id: str = self.record["run_id"]
        return run_id


class Rank:
    """One rank's way from a lock file to an outcome. What it opens is closed by the stack."""

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
        self.restart = place.restart
        """How often the ranks of this attempt have been started anew."""
        self.several_nodes = self._plan_is_stale = False
        self._asked_store: set[Path] = set()
        """Damaged checkpoints that the store has been asked for."""
        self._observers: Observers | None = None
        self._engine: Engine | None = None
        self._copies: Copies | None = None

    @property
    def is_main(self) -> bool:
        return self.place.rank == 0

    @property
    def current_step(self) -> int | None:
        """The step under way; None before the first."""
        return self._observers.step + 1 if self._observers else None

    def run(
        self, lock_file: Path | None, checkpoint: Path | None, stop: Stop, listeners: tuple[Listener, ...]
    ) -> dict[str, Any]:
        """See `main`."""
        from titancli.distributed import process_group
        from titancli.distributed.shared_folder import require_shared
        from titancli.recipe import load_recipe
        from titancli.run import saving

        source = lock_file or RunFolder.open(self.folder.path).recipe_lock
        lock_text = source.read_text(encoding="utf-8")
        loaded = load_recipe(source)
        recipe = loaded.recipe
        self._stack.enter_context(determinism(recipe.debug.deterministic))
        device = self._join(recipe, hashlib.sha256(lock_text.encode()).hexdigest())
        self.several_nodes = lock_file is not None
        if lock_file is not None:
            code = ", ".join(f"{name} {digest[:12]}" for name, digest in code_hashes().items())
            process_group.require_same("code of titan or its plugins", code, socket.gethostname())
            own, first = lock_file.parent, self.place.local_rank == 0
            taken = take_part(self.folder, own, lock_text, self._stack, first_of_node=first)
            self.restart, self._plan_is_stale = taken
        require_shared(self.folder.logs, socket.gethostname(), first_of_node=self.place.local_rank == 0)
        self._stack.callback(self.folder.join().release)
        section = recipe.checkpoint
        patient = process_group.patient_group() if section.remote else None  # it may be downloaded
        checkpoint = process_group.on_rank_zero(lambda: self._continue_from(checkpoint, section), patient)
        # Asked of rank 0: on a shared disk the others may not see yet what it wrote.
        record = process_group.on_rank_zero(self._own_record)
        loggers = self._loggers(recipe, listeners)
        if self.is_main:
            for change in record["attempts"][-1].get("code_drift", ()):
                logger.warning("changed since the run was last started: %s", change)
        self._copies = saving.open_copies(recipe, self.folder, record, self._stack)
        newest = record["attempts"][-1].get("step") is None
        copy = self._copies.newest(wanted=newest) if self._copies else None
        start = Start(loaded, lock_text, record, self._not_lost(copy or checkpoint, section), device)
        damaged: dict[Path, str] = {}
        try:
            while (outcome := self._train_unless_damaged(start, loggers, stop, damaged)) is None:
                other = process_group.on_rank_zero(
                    lambda: self._continue_from(checkpoint, section, damaged), patient
                )
                if other is not None:
                    logger.warning("the run continues from %s", other.name)
                start = replace(start, checkpoint=self._not_lost(other, section))
        except Exception as error:
            if is_out_of_memory(error):
                try:
                    told = self._out_of_memory(error, start)
                except Exception:  # no advice is worth the error itself
                    logger.debug("no advice on memory", exc_info=True)
                    raise error from None
                raise told from error
            raise
        if outcome["signal"] == NODES_JOIN.name:
            logger.info("more nodes join: all ranks are started anew from step %d", outcome["step"])
            return outcome
        if self._observers is not None:
            self._observers.run_end(outcome)
            outcome = {**outcome, "metrics": self._observers.latest}
        if self.is_main:
            Claim.of(self.folder, record).check()  # the newest attempt may be another's by now
            self.folder.update_attempt(outcome=plain(outcome), ended=timestamp())
        return outcome

    def _train_unless_damaged(
        self, start: Start, loggers: list[Any], stop: Stop, damaged: dict[Path, str]
    ) -> dict[str, Any] | None:
        """Call `train`; None where the run's own checkpoint turned out to be damaged, which is put into
        `damaged`. All ranks find it alike, and all that was built goes with the error."""
        try:
            return self.train(start, loggers, stop)
        except DamagedCheckpoint as error:
            asked_for = start.record["attempts"][-1].get("step")
            stays = f"step-{asked_for}" == error.folder.name
            final = start.recipe.checkpoint.remote is None or error.folder in damaged
            if self._copies is not None and error.folder == self._copies.folder:
                logger.warning("the copy in memory cannot be used: %s", error.why)
                self._copies.discard()
            elif error.folder != start.checkpoint or (stays and final):
                raise
            else:
                damaged[error.folder] = error.why
                logger.warning("checkpoint %s is skipped: %s", error.folder.name, error.why)
        self._engine = None
        gc.collect()  # a device does not hold two engines
        return None

    def train(self, start: Start, loggers: list[Any], stop: Stop) -> dict[str, Any]:
        """Build what the recipe names, in the process group that is initialised, and run its loop.

        Returns:
            `{"why", "signal", "step", "checkpoint"}`; why is finished, stopped, interrupted or data_ended.

        Raises:
            TitanError: something that the recipe names is missing or does not fit.
        """
        from titancli.engine import Engine
        from titancli.run import saving
        from titancli.run.data import check_vocabulary, open_data, open_validation

        recipe = start.recipe
        tokenizer = None if recipe.tokenizer is None else build(recipe.tokenizer)
        check_vocabulary(recipe, tokenizer)
        if (first := start_from(recipe, start.checkpoint)).kind == "weights" and first.source is not None:
            logger.info("loading weights from %s", url_of(first.source) or first.source)
        loop = with_defaults(LoopConfigDefaults, recipe.loop)
        checkpoint = start.checkpoint or loop.checkpoint
        engine = Engine.build(recipe, device=start.device, checkpoint=checkpoint, frozen=not loop.trains)
        self._engine = engine
        allow_drift = start.record["attempts"][-1].get("allow_drift", False)
        data = open_data(recipe, tokenizer, engine, start.checkpoint, allow_drift=allow_drift)
        copied = self._copies is not None and self._copies.loaded()
        observers = self._observers = self._observe(start, engine, loggers, data)
        digests = None
        if recipe.debug.digests and loop.trains:
            engine.hooks.add(digests := self._digests(start, engine))
        run = self._run_of(start, engine, tokenizer, stop)
        if start.checkpoint is not None and not copied:
            run.saved_step = engine.step
        run.validation = open_validation(recipe, tokenizer, engine, observers)
        uploads = saving.open_uploads(recipe, self.folder, start.run_id, run) if loop.trains else None
        if recipe.checkpoint.enable and loop.trains:
            run.checkpoints = saving.open_checkpoints(
                recipe,
                self.folder,
                engine,
                run,
                observers,
                uploads,
                lock_text=start.lock_text,
                record=start.record,
                from_zero=start.checkpoint is None,
                copies=self._copies,
            )
            if self._copies is not None or recipe.checkpoint.async_mode == "async_with_pinned_mem":
                run.checkpoints.reserve(engine.live_state()[0])
        probe = self._probe(engine, tokenizer, data)
        if probe is not None:
            run.steps = probe.asked.step
            engine.hooks.add(probe)
        go = build(recipe.loop, engine=engine, data=data, tokenizer=tokenizer, observers=observers, run=run)
        if recipe.checkpoint.create_seed_checkpoint and data is not None:
            go = partial(run.save_seed, engine, data)
        run.profiler = self._profiler(start)
        closed = closing(data) if data else nullcontext()
        with closed, _garbage_between_steps(), saving.settled(uploads), run.profiler:
            go()
            if digests is not None:
                digests.write(wait=True)
            saving.leave_behind(recipe, engine, run, self.folder)
        if self._copies is not None:
            self._copies.end()
        if probe is not None and run.signal is None:
            probe.finish(engine, recipe, self.folder)
        name = f"checkpoints/step-{run.saved_step}" if run.saved_step is not None else None
        return {"why": run.why, "signal": run.signal, "step": engine.step, "checkpoint": name}

    def _out_of_memory(self, error: Exception, start: Start) -> TitanError:
        """What was live, and what would make it fit."""
        from titancli.observe.memory import live_bytes
        from titancli.observe.peaks import device_name
        from titancli.planning import out_of_memory

        phase = getattr(error, RAISED_IN, None)
        where = f"in step {self.current_step}" if self.current_step else "before the first step"
        cause = str(error).partition(" GPU ")[0].partition("\n")[0]
        message = f"out of memory {where}{f' ({phase})' if phase else ''}: {cause}"
        recipe, degrees = start.recipe, start.recipe.degrees(self.place.world)
        engine = self._engine
        parameters = [] if engine is None else [tensor for _, tensor in engine.named_parameters()]
        live = live_bytes(parameters, None if engine is None else engine.optimizer, start.device)
        device = device_name(start.device)
        more = out_of_memory.told(recipe, degrees, device, live)
        change = out_of_memory.advice(recipe, degrees, device)
        hint = "make training.local_batch_size or seq_len smaller" if change is None else f"add {change}"
        return TitanError(f"{message}\n{more}" if more else message, hint=hint)

    def record_leaving(self) -> None:
        """Write the outcome of a run that the user would not wait for."""
        step = self._observers.step if self._observers else None
        outcome = {"why": "interrupted", "signal": "SIGINT", "step": step, "checkpoint": None}
        self.folder.update_attempt(outcome={**outcome, "metrics": {}}, ended=timestamp())

    def dump_flight_recorder(self) -> None:
        """Leave the collectives of a rank that waited for another in vain beside its log."""
        from titancli.distributed import process_group

        try:
            process_group.dump_flight_recorder(self.folder.logs, self.place.rank)
        except OSError as error:  # a full disk must not hide why the run failed
            print(f"cannot write the flight recorder trace: {error}", file=sys.stderr)

    def _join(self, recipe: Recipe, digest: str) -> torch.device:
        """Take a device, meet the other ranks, and make sure that all are there for the same run."""
        from titancli.distributed import process_group

        on_one_machine = self._store is not None or self.place.world == 1
        if on_one_machine and not with_defaults(LoopConfigDefaults, recipe.loop).joins_other_runs:
            self._stack.enter_context(environment(loopback_only()))
        device = process_group.choose_device(self.place.local_rank)
        process_group.start_flight_recorder(self.folder.logs, recipe.comm.trace_buf_size)
        with leaving_if_orphaned():
            process_group.init_process_group(
                device,
                rank=self.place.rank,
                world=self.place.world,
                restart=self.place.restart,
                folder=self._store,
                timeout_seconds=recipe.comm.init_timeout_seconds,
            )
        self._stack.push(leave_process_group)
        process_group.require_same("resolved recipes", digest, socket.gethostname())
        installed = ", ".join(f"{name} {version}" for name, version in package_versions().items())
        process_group.require_same("versions", installed, socket.gethostname())
        files = ", ".join(f"{path.name} (SHA-256 {file_hash(path)[:12]})" for path in self._plugin_files)
        process_group.require_same("plugin files", files or "none", socket.gethostname())
        return device

    def _own_record(self) -> dict[str, Any]:
        """What run.json says, as long as its newest attempt is this one."""
        record = self.folder.begun()
        Claim.of(self.folder, record).check()
        return record

    def _continue_from(
        self,
        checkpoint: Path | None,
        section: Checkpoint,
        damaged: Mapping[Path, str] = MappingProxyType({}),
    ) -> Path | None:
        """Ranks that were started anew go on from the newest checkpoint that the ranks before them wrote.

        One that was there before them may be newer than that which the user chose to begin with; but not
        where that is among the `damaged` ones, which the ranks have tried to load. What is damaged is taken
        from the store, once, before one that is older.

        Raises:
            TitanError: no checkpoint can be used, or the store does not answer.
        """
        attempt = self._own_record()["attempts"][-1]
        if not (self.restart or self._plan_is_stale or damaged):
            if attempt.get("from_scratch") and (aside := self.folder.set_checkpoints_aside()) is not None:
                logger.warning("the earlier checkpoints are in %s", aside)
            return checkpoint
        asked_for = self.folder.checkpoints / f"step-{attempt.get('step')}"
        if asked_for in damaged:
            remote.take_step(
                self.folder, section, attempt["step"], logger.warning, damaged=damaged[asked_for]
            )
            remote.lower_serial(self.folder)
            return asked_for
        skipped: list[str] = []
        how: dict[str, Any] = {
            "verify": names_and_sizes(section.verify),  # each rank hashes what it loads
            "rejected": skipped.append,
            "newer_than": attempt.get("serial", 0) if self.restart and checkpoint not in damaged else 0,
            "damaged": damaged,
        }
        checkpoint = None if checkpoint in damaged else checkpoint
        with waiting_for_late_files(shared_folder.PATIENCE if self.place.world > 1 else 0.0):
            found = newest_good(self.folder.checkpoints, **how)
        anew = not damaged or not damaged.keys() <= self._asked_store
        here = found or checkpoint
        best = here is not None and none_newer(self.folder.checkpoints, here, how["newer_than"])
        gone = here is None and remote.recorded_step(self.folder) is not None
        if section.remote is not None and (skipped or gone) and anew and not best:
            self._asked_store |= damaged.keys()
            found = remote.newest(self.folder, section, say=logger.warning, **how)
            remote.lower_serial(self.folder)
        skipped = list(dict.fromkeys(skipped)) or list(damaged.values())
        if not (found or checkpoint):
            remote.refuse_unusable(self.folder.path, skipped, section)
        known = {f"checkpoint {path.name} is skipped: {why}" for path, why in damaged.items()}
        for line in skipped:
            if line not in known:
                logger.warning(line)
        return found or checkpoint

    def _not_lost(self, checkpoint: Path | None, section: Checkpoint) -> Path | None:
        """Return what the run goes on from. Collective.

        Raises:
            EnvironmentProblem: nothing, though it has saved.
        """
        from titancli.distributed import process_group

        if checkpoint is None:  # the ranks agree
            process_group.on_rank_zero(lambda: remote.refuse_lost(self.folder, section))
        return checkpoint

    def _loggers(self, recipe: Recipe, listeners: tuple[Listener, ...]) -> list[Any]:
        """Built before the engine, so that a package that is missing is said at once."""
        own: list[Any] = []
        if self.is_main:
            events = EventLog(self.folder.events, listeners)
            self._stack.callback(events.close)
            self._stack.enter_context(logs_as_events(events))
            if self.restart:
                cause = "a node or a rank was lost" if self.several_nodes else "a rank failed"
                logger.warning("%s; all ranks were restarted (restart %d)", cause, self.restart)
            own = [EventLogger(events, recipe.training.steps)]
        return own + [
            build(config, run_folder=self.folder.path, is_main=self.is_main) for config in recipe.loggers
        ]

    def _observe(self, start: Start, engine: Engine, loggers: list[Any], data: Any) -> Observers:
        from titancli.distributed import process_group
        from titancli.observe.machine import machine
        from titancli.observe.observers import Observers
        from titancli.observe.peaks import device_name, device_peak
        from titancli.run.data import digest_of, epochs, identity_of

        recipe, attempts = start.recipe, start.record["attempts"]
        checkpoint = str(start.checkpoint) if start.checkpoint else None
        found = {
            "world": self.place.world,
            "mesh": asdict(engine.mesh.degrees),
            "device": device_name(start.device),
            "restarts": self.restart,
        }
        identity = None if data is None else identity_of(data.state)
        process_group.require_same("data", json.dumps(identity, sort_keys=True), socket.gethostname())
        if self.is_main:
            here = {"machine": machine(), "data": identity, "data_digest": digest_of(identity)}
            self.folder.update_attempt(**found, checkpoint=checkpoint, **here)
            found["epochs"] = epochs(recipe, data, engine)
        known = {"attempt": len(attempts), "checkpoint": checkpoint, "recipe": start.loaded.data}
        # The peaks are bf16's; a run that computes in fp32 has no utilisation of them.
        peak = device_peak(start.device) if recipe.training.mixed_precision_param == "bfloat16" else None
        observers = Observers(
            loggers,
            device=start.device,
            log_freq=recipe.metrics.log_freq,
            total_steps=recipe.training.steps,
            info={**start.record, **known, **found},
            world=self.place.world,
            flops_per_token=engine.flops_per_token,
            peak_flops=peak,
        )
        observers.run_start({"step": engine.step})
        return observers

    def _probe(self, engine: Engine, tokenizer: Any, data: Any) -> Probe | None:
        """What looks at a step, in the folder of a replay."""
        if not (self.folder.path / REPLAY_REQUEST).is_file():
            return None
        from titancli.run.probe import Asked, Probe

        return Probe(Asked.read(self.folder.path), engine, tokenizer, data)

    def _digests(self, start: Start, engine: Engine) -> Digests:
        from titancli.engine.digest import Digests
        from titancli.observe.digests import DigestWriter

        named = engine.trained_parameters()
        header = {
            "attempt": len(start.record["attempts"]),
            "restart": self.restart,
            "rank": self.place.rank,
            "world": self.place.world,
            "dp_rank": engine.mesh.dp_rank,
            "mesh": asdict(engine.mesh.degrees),
            "names": [name for name, _ in named],
        }
        writer = DigestWriter(self.folder.path, header)
        self._stack.callback(writer.close)
        digests = Digests(writer, named, engine.converters)
        digests.begin(engine.step)
        return digests

    def _run_of(self, start: Start, engine: Engine, tokenizer: Any, stop: Stop) -> Run:
        from titancli.distributed import process_group
        from titancli.engine import Engine
        from titancli.loops.run import Run
        from titancli.run.data import open_dataset

        recipe = start.recipe
        return Run(
            steps=recipe.training.steps,
            stop=stop,
            gc_freq=recipe.training.gc_freq,
            save_or_stop=recipe.checkpoint.on_error == "stop",
            guard=engine.guard,
            on_first_step=lambda: process_group.tighten_timeouts(recipe.comm.train_timeout_seconds),
            open_dataset=partial(open_dataset, recipe, tokenizer, engine),
            reference=partial(Engine.frozen, recipe, device=start.device),
            batch_shape=(recipe.training.local_batch_size, recipe.training.seq_len),
            folder=self.folder.path,
        )

    def _profiler(self, start: Start) -> Profiler:
        from titancli.observe.profiler import Profiler

        return Profiler(
            start.recipe.profiling,
            self.folder.path,
            rank=self.place.rank,
            world=self.place.world,
            device=start.device,
            total_steps=start.recipe.training.steps,
        )


@contextmanager
def _garbage_between_steps() -> Iterator[None]:
    """What stands now stays; garbage is collected by `Run`, at times that are the same on all ranks.

    What whoever called this has frozen stays frozen: there is no way to thaw the rest alone.
    """
    ours = gc.get_freeze_count() == 0
    gc.collect()
    if ours:
        gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if ours:
            gc.unfreeze()


# ------------------------------------------------------------------------------------ one of several


def run_rank(arguments: Sequence[str] | None = None) -> int:
    """`python -m titancli.run.worker`: the exit code is 0 whenever the rank stopped in good order."""
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
            # No tidy exit: threads and collectives may hang, and the launcher is waiting for the cause.
            os._exit(EXIT_FAILED)
    return EXIT_NODES_JOIN if outcome["signal"] == NODES_JOIN.name else EXIT_OK


if __name__ == "__main__":
    sys.exit(leave(run_rank()))
