"""Inputs of `titan data tokenize`: files of several formats and Hugging Face datasets, as documents."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from titancli.data import HFDataset, JsonLines, Parquet
from titancli.data.files import FileSource, TextFile, find_files
from titancli.data.formats import formats_of
from titancli.data.hf_datasets import IndexedSource, load
from titancli.data.jsonl import JsonLinesSource
from titancli.data.parquet import ParquetSource
from titancli.data.paths import is_saved
from titancli.data.shards.inputs import Input
from titancli.data.source import Source
from titancli.errors import UsageError

HUB = "hf://datasets/"


class Options(NamedTuple):
    """How sources are read."""

    text: str = "text"
    """Key or column of a document's text."""
    format: str | None = None
    """Format that files are read as (see `titancli.data.formats.READ`); None: detected from their content."""
    strict: bool = False
    """Whether a bad row is an error."""
    name: str | None = None
    revision: str | None = None
    split: str = "train"
    """Split of a dataset on the Hub, or in a folder of `save_to_disk`."""


def open_inputs(names: Sequence[str], options: Options) -> list[Input]:
    """Open all sources, in their order; consecutive files of one format form one source.

    Raises:
        TitanError: a source does not exist, or cannot be read.
    """
    inputs: list[Input] = []
    for kind, entries in groupby(_entries(names, options.format), key=lambda entry: entry[0]):
        found = [entry for _, entry in entries]
        inputs += (
            [_dataset(str(name), options) for name in found]
            if kind == "hf"
            else [_files(kind, found, options)]
        )
    if not any(isinstance(one.source, IndexedSource) for one in inputs):
        for key, default in Options._field_defaults.items():
            if key in ("name", "revision", "split") and getattr(options, key) != default:
                raise UsageError(f"--{key} is for Hugging Face datasets, and no source is one: remove it")
    if options.format and all(isinstance(one.source, IndexedSource) for one in inputs):
        raise UsageError("--format is for files, and no source is one: remove it")
    return inputs


def _entries(names: Sequence[str], chosen: str | None) -> Iterator[tuple[str, Any]]:
    seen: set[str] = set()
    for name in names:
        if name.startswith(HUB) or is_saved(name):
            yield "hf", name
            continue
        files = [file for file in find_files(Path(name)) if file.path not in seen]
        seen.update(file.path for file in files)
        kinds = [chosen] * len(files) if chosen else formats_of([file.path for file in files])
        rows = {"json": "jsonl", "csv": "jsonl"}
        yield from ((rows.get(kind, kind), file) for kind, file in zip(kinds, files, strict=True))


def _files(kind: str, files: list[TextFile], options: Options) -> Input:
    paths = [Path(file.path) for file in files]
    label = f"{kind}: {files[0].name}" + (f" and {len(files) - 1} more" if len(files) > 1 else "")
    size = float(sum(file.size for file in files))
    source: Source
    if kind == "parquet":
        config = Parquet(paths=paths, text=options.text, shuffle=False)
        source = ParquetSource(config, files, 0)
        return Input(label, source, size, source.progress)
    if kind == "jsonl":
        source = JsonLinesSource(
            JsonLines(paths=paths, text=options.text, strict=options.strict, shuffle=False), files, 0
        )
    else:
        source = FileSource(label, files, shuffle=False, seed=0)
    before = np.cumsum([0, *(file.size for file in files)])

    def progress(mark: dict[str, Any]) -> float:
        number = mark["file"] if "file" in mark else mark["document"]
        return float(before[number] + min(mark["byte"], files[number].size)) / max(size, 1.0)

    return Input(label, source, size, progress)


def _dataset(name: str, options: Options) -> Input:
    path = name.removeprefix(HUB) if name.startswith(HUB) else os.path.abspath(name)
    config = HFDataset(
        path=path, name=options.name, revision=options.revision, split=options.split, text=options.text
    )
    source = IndexedSource(config, load(config), 0)
    rows = source.size.amount
    return Input(name, source, float(rows), lambda mark: mark["document"] / rows)
