"""Choose the checkpoint from which the ranks of a run continue. Torch-free at the top."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from titancli.checkpoint.format.files import waiting_for_late_files
from titancli.checkpoint.format.manifest import names_and_sizes, newest_good, none_newer
from titancli.process import Place
from titancli.runs import Claim, RunFolder
from titancli.worker import remote

if TYPE_CHECKING:
    from titancli.recipe.schema import Checkpoint

logger = logging.getLogger(__name__)


class Resume:
    """Chooses checkpoints for one rank; only rank 0 searches."""

    def __init__(self, folder: RunFolder, place: Place) -> None:
        self.folder, self.place = folder, place
        self.restart, self.plan_is_stale = place.restart, False
        """How often the ranks have been restarted, and whether there may be checkpoints that are newer
        than the command's choice."""
        self._requested: set[Path] = set()
        """Damaged checkpoints that were already requested from the store."""

    def record(self) -> dict[str, Any]:
        """Return the contents of run.json if its newest attempt is this one."""
        record = self.folder.begun()
        Claim.of(self.folder, record).check()
        return record

    def checkpoint(
        self,
        checkpoint: Path | None,
        section: Checkpoint,
        damaged: Mapping[Path, str] = MappingProxyType({}),
    ) -> Path | None:
        """Return the checkpoint to continue from: the given one, or after a restart the newest one of the
        attempt.

        After a restart a checkpoint that existed before the attempt may be newer than the one that the user
        chose; it is not used, unless the chosen one is among the `damaged` ones, which the ranks have tried
        to load. A damaged checkpoint is downloaded from the store once, before an older one is used.

        Raises:
            TitanError: no checkpoint can be used, or the store does not answer.
        """
        from titancli.distributed import shared_folder

        attempt = self.record()["attempts"][-1]
        if not (self.restart or self.plan_is_stale or damaged):
            if attempt.get("from_scratch") and (aside := self.folder.set_checkpoints_aside()) is not None:
                logger.warning("the earlier checkpoints are in %s", aside)
            return checkpoint
        chosen = self.folder.checkpoints / f"step-{attempt.get('step')}"
        if chosen in damaged:
            remote.take_step(self.folder, section, attempt["step"], logger.warning, damaged=damaged[chosen])
            remote.lower_serial(self.folder)
            return chosen
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
        anew = not damaged or not damaged.keys() <= self._requested
        here = found or checkpoint
        best = here is not None and none_newer(self.folder.checkpoints, here, how["newer_than"])
        gone = here is None and remote.recorded_step(self.folder) is not None
        if section.remote is not None and (skipped or gone) and anew and not best:
            self._requested |= damaged.keys()
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
        """Return the checkpoint, after checking that none was lost. Collective.

        Raises:
            EnvironmentProblem: there is none, although the run has saved some.
        """
        from titancli.distributed.together import Ranks

        if checkpoint is None:  # the same on all ranks
            Ranks().broadcast_call(
                "looking for checkpoints", lambda: remote.refuse_lost(self.folder, section)
            )
        return checkpoint
