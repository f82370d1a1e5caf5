"""Which checkpoint the ranks of a run continue from, once they run. Torch-free but for `not_lost`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from titancli.checkpoint.format.files import waiting_for_late_files
from titancli.checkpoint.format.manifest import names_and_sizes, newest_good, none_newer
from titancli.distributed import shared_folder
from titancli.process import Place
from titancli.runs import Claim, RunFolder
from titancli.worker import remote

if TYPE_CHECKING:
    from titancli.recipe.schema import Checkpoint

logger = logging.getLogger(__name__)


class Continuing:
    """One rank's; rank 0 looks."""

    def __init__(self, folder: RunFolder, place: Place) -> None:
        self.folder, self.place = folder, place
        self.restart, self.plan_is_stale = place.restart, False
        """How often the ranks have been started anew; whether checkpoints may have come since the command
        chose one."""
        self._asked: set[Path] = set()
        """Damaged checkpoints that the store has been asked for."""

    def record(self) -> dict[str, Any]:
        """What run.json says, as long as its newest attempt is this one."""
        record = self.folder.begun()
        Claim.of(self.folder, record).check()
        return record

    def checkpoint(
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
        attempt = self.record()["attempts"][-1]
        if not (self.restart or self.plan_is_stale or damaged):
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
        anew = not damaged or not damaged.keys() <= self._asked
        here = found or checkpoint
        best = here is not None and none_newer(self.folder.checkpoints, here, how["newer_than"])
        gone = here is None and remote.recorded_step(self.folder) is not None
        if section.remote is not None and (skipped or gone) and anew and not best:
            self._asked |= damaged.keys()
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

    def not_lost(self, checkpoint: Path | None, section: Checkpoint) -> Path | None:
        """Return what the run goes on from. Collective.

        Raises:
            EnvironmentProblem: nothing, though it has saved.
        """
        from titancli.distributed.together import Ranks

        if checkpoint is None:  # the ranks agree
            Ranks().one("looking for checkpoints", lambda: remote.refuse_lost(self.folder, section))
        return checkpoint
