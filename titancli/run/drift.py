"""Find the differences between the recipe of a run and the one to continue it with. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

GUARDED = ("model", "tokenizer", "dataset")
"""Sections that a resumed run may not change: its weights and its position would mean something else."""


@dataclass(frozen=True)
class Change:
    """A key whose value in the recipe differs from the previous one."""

    key: str
    before: Any
    after: Any

    @property
    def guarded(self) -> bool:
        return self.key.split(".")[0] in GUARDED

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.before)} -> {_shown(self.after)}"


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[Change]:
    """Return the leaves in which two resolved recipes differ, by dotted key; None means that the key is
    missing."""
    old, new = dict(_leaves(before)), dict(_leaves(after))
    # An empty table or array is not a leaf if the other recipe has values in it.
    for one, other in ((old, new), (new, old)):
        for key in [key for key, value in one.items() if value in ([], {})]:
            if any(name.startswith(f"{key}.") for name in other):
                del one[key]
    keys = [*old, *(key for key in new if key not in old)]
    return [Change(key, old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)]


def _leaves(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        items = value.items()
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        items = {str(number): item for number, item in enumerate(value)}.items()
    else:
        return [(prefix, value)]
    return [leaf for key, item in items for leaf in _leaves(item, f"{prefix}.{key}" if prefix else str(key))]


def sections(changed: list[Change]) -> list[str]:
    """Return the sections of `GUARDED` that changes are in."""
    return sorted({change.key.split(".")[0] for change in changed}, key=GUARDED.index)


def _shown(value: Any) -> str:
    return "(not set)" if value is None else repr(value) if isinstance(value, str) else str(value)
