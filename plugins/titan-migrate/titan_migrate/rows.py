"""Several data sets of a config as one of a recipe."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_migrate.config import Config
from titan_migrate.parts import held_out
from titancli.files import read_json, regular

LONGEST = 1 << 26
"""Bytes of a file whose rows are counted."""


@dataclass
class Rows:
    """A data set of a config."""

    at: str
    """Where the config names it."""
    table: dict[str, Any]
    """Its table in the recipe."""
    count: int | None = None
    """Rows that are used of it, if they are known."""


def merged(config: Config, found: list[Rows], shares: list[float] | None = None) -> dict[str, Any]:
    """Return one table: of several data sets a `mix` if the config gives shares, else a `concat`."""
    if len(found) == 1:
        return found[0].table
    places = [f"{row.at}{end}" for row in found[1:] for end in ("", ".path")]
    later = next((place for place in places if place in config.entries), found[1].at)
    if found[0].table["type"] not in ("chat", "hf", "jsonl"):
        config.lose(later, "pairs are not mixed: put the rows of all data sets into one folder of files")
        return found[0].table
    names = [f"rows{number}" for number in range(len(found))]
    datasets = {name: row.table for name, row in zip(names, found, strict=True)}
    if shares is not None:
        config.change(later, f"a mix of {len(found)} data sets, in the given shares")
        return {"type": "mix", "weights": dict(zip(names, shares, strict=True)), "datasets": datasets}
    config.change(later, f"a concat of {len(found)} data sets: each row of each once in an epoch")
    return {"type": "concat", "datasets": datasets}


def count(path: str) -> int | None:
    """Return the rows of a local file of JSON or JSON Lines; None if they are not known, or it is too large
    to be read here."""
    file = Path(os.path.expanduser(path))
    try:
        if file.suffix == ".jsonl":
            with open(file, "rb", opener=regular) as opened:
                if os.fstat(opened.fileno()).st_size > LONGEST:
                    return None
                return sum(1 for line in opened if line.strip())
        if file.suffix == ".json":
            rows = read_json(file, LONGEST)
            return len(rows) if isinstance(rows, list) else None
    except (OSError, ValueError):
        return None
    return None


def hold_out(config: Config, found: list[Rows], source: str) -> dict[str, Any] | None:
    """Hold the last rows of a data set out; return the table of these."""
    size = config.value(source)
    if not size:
        config.ignore(source)
        return None
    if len(found) > 1:
        config.lose(source, "rows are held out of one data set: name [validation.datasets.NAME]")
        return None
    splits = held_out(str(found[0].table.get("split", "train")), size)
    if splits is None:
        config.lose(source, "dataset.split cuts at whole percents or at rows: set it, and that of "
                    "[validation.datasets.NAME]")  # fmt: skip
        return None
    held = {**found[0].table, "split": splits[1]}
    found[0].table["split"] = splits[0]
    config.change(source, f"the last rows are held out: {splits[1]}, and trained on are {splits[0]}")
    return held
