"""What each rank runs: a resolved recipe in, an outcome out.

`python -m titancli.run.worker RUN_DIR` is one rank of several, started by a launcher; `main` runs the only
rank inside the command. Nothing at the top imports torch, so that signals are handled from the first moment.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titancli.errors import EXIT_FAILED, EXIT_OK
from titancli.launch import rank_options
from titancli.observe import failures
from titancli.observe.events import EventLog, EventLogger, Listener, LogHandler, plain
from titancli.process import (
    Place,
    determinism,
    die_with_parent,
    leave_process_group,
    log_into,
    quiet,
    tell_where_stopped,
)
from titancli.provenance import package_versions
from titancli.runs import RECORD_NAME, RunFolder, timestamp
from titancli.signals import ASKED_TO_STOP, Stop

if TYPE_CHECKING:
    import torch

    from titancli.checkpoint.format.manifest import Verify
    from titancli.observe.observers import Observers
    from titancli.recipe.schema import Recipe

logger = logging.getLogger("titancli.run.worker")  # its __name__ may be __main__


def main(
    run_dir: Path,
    *,
    lock_file: Path | None = None,
    checkpoint: Path | None = None,
    plugin_files: Sequence[Path] = (),
    place: Place | None = None,
    stop: Stop | None = None,
    listeners: tuple[Listener, ...] = (),
) -> dict[str, Any]:
    """Run one rank to its end and return the outcome (see `titancli.run.session.run`).

    Without `lock_file` the run folder is ready and held by the caller. With it rank 0 makes the folder, from
    that file and the `run.json` beside it. `listeners` are handed rank 0's events.

    Raises:
        Exception: whatever went wrong, after `logs/rank-N.error.json` was written.
    """
    from titancli import registry

    quiet()
    with ExitStack() as stack:
        rank = Rank(RunFolder(run_dir.absolute()), place or Place(), stack)
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
    """One rank's way from a lock file to an outcome. What it opens is closed by the stack."""

    def __init__(self, folder: RunFolder, place: Place, stack: ExitStack) -> None:
        self.folder, self.place = folder, place
        self._stack = stack
        self._observers: Observers | None = None

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
        from titancli.recipe import load_recipe

        source = lock_file or RunFolder.open(self.folder.path).recipe_lock
        lock_text = source.read_text(encoding="utf-8")
        loaded = load_recipe(source)
        recipe = loaded.recipe
        self._stack.enter_context(determinism(recipe.debug.deterministic))
        device = self._join(recipe, hashlib.sha256(lock_text.encode()).hexdigest())
        if lock_file is not None:
            process_group.on_rank_zero(lambda: self._prepare(lock_file, lock_text))
        self._stack.callback(self.folder.join().release)
        checkpoint = process_group.on_rank_zero(
            lambda: self._continue_from(checkpoint, recipe.checkpoint.verify)
        )
        # Asked of rank 0: on a shared disk the others may not see yet what it wrote.
        record = process_group.on_rank_zero(self.folder.record)
        loggers = self._loggers(recipe, listeners)

        def observers_for(engine: Any) -> Observers:
            start = str(checkpoint) if checkpoint else None
            known = {**record, "attempt": len(record["attempts"]), "checkpoint": start, "recipe": loaded.data}
            self._observers = self._observe(engine, recipe, device, loggers, known)
            return self._observers

        from titancli.run import session

        outcome = session.run(
            recipe,
            run_folder=self.folder.path,
            lock_text=lock_text,
            run_id=record["run_id"],
            checkpoint=checkpoint,
            observers_for=observers_for,
            stop=stop,
            device=device,
            on_first_step=lambda: process_group.tighten_timeouts(recipe.comm.train_timeout_seconds),
            allow_drift=record["attempts"][-1].get("allow_drift", False),
        )
        if self._observers is not None:
            self._observers.run_end(outcome)
            outcome = {**outcome, "metrics": self._observers.latest}
        if self.is_main:
            self.folder.update_attempt(outcome=plain(outcome), ended=timestamp())
        return outcome

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

        device = process_group.choose_device(self.place.local_rank)
        process_group.start_flight_recorder(self.folder.logs, recipe.comm.trace_buf_size)
        process_group.init_process_group(
            device,
            rank=self.place.rank,
            world=self.place.world,
            restart=self.place.restart,
            timeout_seconds=recipe.comm.init_timeout_seconds,
        )
        self._stack.push(leave_process_group)
        process_group.require_same("resolved recipes", digest, socket.gethostname())
        installed = ", ".join(f"{name} {version}" for name, version in package_versions().items())
        process_group.require_same("versions", installed, socket.gethostname())
        return device

    def _prepare(self, lock_file: Path, lock_text: str) -> None:
        """On several nodes rank 0 makes the run folder, and holds it until the run is over."""
        self.folder.make()
        self._stack.callback(self.folder.hold().release)
        record = json.loads(lock_file.with_name(RECORD_NAME).read_text(encoding="utf-8"))
        if len(self.folder.record().get("attempts", [])) >= len(record["attempts"]):
            return  # after a restart: rank 0 may be on another node, whose command has made up another run_id
        self.folder.write_recipe_lock(lock_text)
        self.folder.write_record(record)

    def _continue_from(self, checkpoint: Path | None, verify: Verify) -> Path | None:
        """Ranks that were started anew go on from the newest checkpoint that the ranks before them wrote.

        One that was there before them may be newer than that which the user chose to begin with.
        """
        attempt = self.folder.record()["attempts"][-1]
        if not self.place.restart:
            if attempt.get("from_scratch"):
                aside = self.folder.set_checkpoints_aside()
                logger.warning("the earlier checkpoints are in %s", aside)
            return checkpoint
        from titancli.checkpoint.format.manifest import newest_good, none_usable

        skipped: list[str] = []
        found = newest_good(
            self.folder.checkpoints,
            verify=verify,
            rejected=skipped.append,
            newer_than=attempt.get("serial", 0),
        )
        if skipped and not (found or checkpoint):
            raise none_usable(self.folder.path, skipped)
        for line in skipped:
            logger.warning(line)
        return found or checkpoint

    def _loggers(self, recipe: Recipe, listeners: tuple[Listener, ...]) -> list[Any]:
        """Built before the engine, so that a package that is missing is said at once."""
        from titancli.registry.component import build

        own: list[Any] = []
        if self.is_main:
            events = EventLog(self.folder.events, listeners)
            self._stack.callback(events.close)
            self._stack.enter_context(_logs_as_events(events))
            if self.place.restart:
                logger.warning("a rank failed; all ranks were restarted (restart %d)", self.place.restart)
            own = [EventLogger(events, recipe.training.steps)]
        return own + [
            build(config, run_folder=self.folder.path, is_main=self.is_main) for config in recipe.loggers
        ]

    def _observe(
        self, engine: Any, recipe: Recipe, device: torch.device, loggers: list[Any], known: dict[str, Any]
    ) -> Observers:
        from titancli.observe.observers import Observers
        from titancli.observe.peaks import device_peak

        found = {
            "world": self.place.world,
            "mesh": asdict(engine.mesh.degrees),
            "device": _device_name(device),
            "restarts": self.place.restart,
        }
        if self.is_main:
            self.folder.update_attempt(**found, checkpoint=known["checkpoint"])
        # The peaks are bf16's; a run that computes in fp32 has no utilisation of them.
        peak = device_peak(device) if recipe.training.mixed_precision_param == "bfloat16" else None
        observers = Observers(
            loggers,
            device=device,
            log_freq=recipe.metrics.log_freq,
            total_steps=recipe.training.steps,
            info={**known, **found},
            world=self.place.world,
            flops_per_token=engine.flops_per_token,
            peak_flops=peak,
        )
        observers.run_start({"step": engine.step})
        return observers


def _device_name(device: torch.device) -> str:
    if device.type != "cuda":
        return "CPU"
    import torch

    return torch.cuda.get_device_name(device)


@contextmanager
def _logs_as_events(events: EventLog) -> Iterator[None]:
    titan = logging.getLogger("titancli")
    handler = LogHandler(events)
    titan.addHandler(handler)
    propagate, titan.propagate = titan.propagate, False
    level = titan.level
    titan.setLevel(min(level or logging.INFO, logging.INFO))
    try:
        yield
    finally:
        titan.removeHandler(handler)
        titan.propagate = propagate
        titan.setLevel(level)


# ------------------------------------------------------------------------------------ one of several


def run_rank(arguments: Sequence[str] | None = None) -> int:
    """`python -m titancli.run.worker`: the exit code is 0 whenever the rank stopped in good order."""
    options = rank_options(arguments)
    place = Place.from_environment()
    with Stop(os.environ.get(ASKED_TO_STOP)).listening() as stop:
        die_with_parent()
        folder = RunFolder(options["run_dir"].absolute())
        log_into(folder.logs / f"rank-{place.rank}.log", f"rank {place.rank} of {place.world}")
        tell_where_stopped()
        failures.error_file(folder.logs, place.rank).unlink(missing_ok=True)
        try:
            main(**options, place=place, stop=stop)
        except BaseException:
            traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            # No tidy exit: threads and collectives may hang, and the launcher is waiting for the cause.
            os._exit(EXIT_FAILED)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(run_rank())
