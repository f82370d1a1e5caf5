"""Selection and order of runs: `titan runs list --filter --sort --limit`. Torch-free."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from titancli.errors import UsageError, nearest_name
from titancli.observe.summary import Summary

FIELDS = ("name", "state", "step", "steps", "created", "updated", "recipe", "host", "note")
ALSO = {"run": "name", "age": "created", "tokens/s": "tokens_per_second"}
"""Titles of columns that are another name of a key."""
_CONDITION = re.compile(r"([^=!<>]+)(!=|<=|>=|=|<|>)(.*)", re.DOTALL)


def matching(runs: Sequence[Summary], conditions: Sequence[str]) -> list[Summary]:
    """Return the runs that meet all conditions: `KEY=PATTERN`, `KEY!=PATTERN`, `KEY<NUMBER`, …

    A comparison with a value that a run does not have is false, `!=` is true.

    Raises:
        UsageError: one is none of these, or no run has such a value.
    """
    found = list(runs)
    for condition in conditions:
        parts = _CONDITION.fullmatch(condition)
        if parts is None:
            raise UsageError(
                f"--filter {condition}: it is no condition",
                hint="write KEY=PATTERN, KEY!=PATTERN, KEY<NUMBER or KEY>NUMBER: state=failed, 'loss<2.5'",
            )
        key, how, wanted = _known(parts[1].strip(), runs), parts[2], parts[3].strip()
        if how not in ("=", "!=") and _number(wanted) is None:
            raise UsageError(f"--filter {condition}: {wanted!r} is no number")
        found = [run for run in found if _is(_value(run, key), how, wanted)]
    return found


def ordered(runs: Sequence[Summary], key: str, *, reverse: bool = False) -> list[Summary]:
    """Return the runs in the order of a value, those without it, or where it is NaN, last.

    Raises:
        UsageError: no run has such a value.
    """
    key = _known(key, runs)
    values = [(_value(run, key), run) for run in runs]
    there = [pair for pair in values if pair[0] is not None and pair[0] == pair[0]]
    there.sort(key=lambda pair: pair[0], reverse=reverse)  # type: ignore[arg-type, return-value]
    return [run for _, run in there] + [run for value, run in values if value is None or value != value]


def _known(key: str, runs: Sequence[Summary]) -> str:
    key = ALSO.get(key, key)
    names = [*FIELDS, *sorted({name for run in runs for name in run.metrics})]
    if key in names or not runs:
        return key
    near = nearest_name(key, names)
    hint = f"did you mean {near!r}?" if near else f"there are: {', '.join(names)}"
    raise UsageError(f"no run has {key!r}", hint=hint)


def _value(run: Summary, key: str) -> str | float | None:
    """Return a text or a number, the same of all runs."""
    if key in FIELDS:
        return run.path.name if key == "name" else getattr(run, key)
    return run.metrics.get(key)


def _is(value: str | float | None, how: str, wanted: str) -> bool:
    number = _number(wanted)
    if how in ("=", "!="):
        if isinstance(value, str) or value is None or number is None:
            same = fnmatchcase("" if value is None else str(value), wanted)
        else:
            same = value == number or (math.isnan(value) and math.isnan(number))
        return same == (how == "=")
    if not isinstance(value, (int, float)) or number is None:
        return False
    return {"<": value < number, "<=": value <= number, ">": value > number, ">=": value >= number}[how]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
