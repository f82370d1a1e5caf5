"""Grain. This file has the config and imports nothing; `dataset.py` has the code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from annotated_types import MinLen

from titancli import component, hookimpl


@component("dataset", "grain", target="titan_grain.dataset:GrainDataset")
class Grain:
    """ArrayRecord files, read by Grain at any place; each record is one row."""

    paths: Annotated[list[Path], MinLen(1)]
    """Files, folders (all non-hidden files in them) and globs (`"data/*.array_record"`)."""
    records: Literal["text", "uint16", "uint32"] = "text"
    """What a record is: text in UTF-8, which is tokenized, or ids, little-endian. What is longer than a row
    is cut (and counted in the metric `grain_cut_rows`), what is shorter filled up."""
    shuffle: bool = True
    """Shuffle records by (training.seed, epoch); false: keep the order in which they are listed."""
    repeat: bool = True
    """Start over at the end of the data, as often as needed; false: end the run there."""


@hookimpl
def titan_components() -> list[type]:
    return [Grain]
