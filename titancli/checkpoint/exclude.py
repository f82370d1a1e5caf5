"""`checkpoint.exclude_from_loading`: the parts of a checkpoint that are not loaded. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from titancli.errors import RecipeError
from titancli.recipe.check import PARTS


@dataclass(frozen=True)
class Exclusion:
    """Names of parts, and patterns of tensors' names, such as `model.output.*`."""

    patterns: tuple[str, ...] = ()

    @classmethod
    def once(cls, patterns: Sequence[str], checkpoint: Path) -> Exclusion:
        """Return what to leave out of this checkpoint: nothing if it was saved under the same exclusion.

        So the exclusion applies when a run starts from a checkpoint, and not again when the run is resumed.

        Raises:
            DamagedCheckpoint: its lock file cannot be read.
        """
        if not patterns:
            return cls()
        import tomllib

        from titancli.checkpoint.format.manifest import LOCK, DamagedCheckpoint
        from titancli.files import read_bytes

        try:
            lock = tomllib.loads(read_bytes(checkpoint / LOCK).decode())
        except (FileNotFoundError, NotADirectoryError):  # weights alone have no lock file
            lock = {}
        except (OSError, ValueError, RecursionError) as error:
            raise DamagedCheckpoint(checkpoint, f"{LOCK} cannot be read: {error}", LOCK) from error
        section = lock.get("checkpoint")
        before = section.get("exclude_from_loading") if isinstance(section, dict) else None
        return cls(() if before == list(patterns) else tuple(patterns))

    def has(self, name: str) -> bool:
        """Return whether a part or a tensor is left out."""
        return any(
            fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")
            for pattern in self.patterns
            if pattern in PARTS or "." in pattern
        )

    @property
    def may_have_weights(self) -> bool:
        """Return whether the exclusion may match tensors of the model, as `*.weight` may."""
        others = PARTS.keys() - {"model"}
        return any(pattern.partition(".")[0] not in others for pattern in self.patterns)

    def check(self, names: Iterable[str]) -> None:
        """Check that each pattern matches something.

        Args:
            names: the names of the checkpoint's tensors.

        Raises:
            RecipeError: a pattern matches nothing.
        """
        names = list(names)
        for pattern in self.patterns:
            if pattern not in PARTS and not any(Exclusion((pattern,)).has(name) for name in names):
                looks = f"; its tensors have names such as {names[0]!r} and {names[-1]!r}" if names else ""
                raise RecipeError(
                    f"checkpoint.exclude_from_loading: {pattern!r} matches nothing in the checkpoint",
                    hint=f"its parts are {', '.join(PARTS)}{looks}",
                )


NOTHING = Exclusion()
