"""Grain datasets. This file has the config and imports nothing; `dataset.py` has the code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from annotated_types import MinLen

from titancli import component, hookimpl


@component("dataset", "grain", target="titan_grain.dataset:GrainDataset")
class Grain:
    """ArrayRecord files, read by Grain at any position; each record is one row."""

    paths: Annotated[list[Path], MinLen(1)]
    """Files, folders (all non-hidden files in them) and globs (`"data/*.array_record"`)."""
    records: Literal["text", "uint16", "uint32"] = "text"
    """Content of a record: UTF-8 text, which is tokenized, or little-endian ids. Records longer than a row
    are cut (and counted in the metric `grain_cut_rows`), shorter ones padded."""
    shuffle: bool = True
    """Shuffle records by (training.seed, epoch); false: keep their order."""
    repeat: bool = True
    """Start over at the end of the data, as often as needed; false: end the run there."""


@hookimpl
def titan_components() -> list[type]:
    return [Grain]
