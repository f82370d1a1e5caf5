"""Look for the split and the column of a Hugging Face dataset here, without loading it. Torch-free.

A folder of `save_to_disk` describes itself, and the head of a file shows its columns. Only where these leave
a doubt is the library `datasets` imported, which takes seconds: it opens the data as a stream.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from titancli.data import HFDataset
from titancli.data.files import find_files
from titancli.data.formats import kind_of_rows
from titancli.data.hf_datasets import (
    failed,
    label_of,
    local_extension,
    open_local,
    refuse_saved_stream,
    require_column,
    require_split,
)
from titancli.data.hf_files import SMALL, names_addresses, require_small
from titancli.data.jsonl import BadRow, parse
from titancli.data.paths import is_saved
from titancli.data.tables import LONGEST, read_rows
from titancli.errors import EnvironmentProblem, TitanError
from titancli.files import read_json

ALL = "all"
"""The library's name for all splits together."""


def look(config: HFDataset, seconds: float, *, column: bool) -> None:
    """Look at the data that a config names, if they are on this machine.

    Args:
        seconds: the time to find out what compressed files expand to; with more of them, nothing is read.
        column: also look for the column.

    Raises:
        RecipeError: there is no such split or column.
        EnvironmentProblem: there are no data.
    """
    if not os.path.isabs(config.path):
        return
    extension = local_extension(config)
    if is_saved(config.path):
        _saved(config, column=column)
    elif extension is None or not _is_plain(config, extension, column=column):
        _stream(config, seconds, column=column)


def _saved(config: HFDataset, *, column: bool) -> None:
    refuse_saved_stream(config)
    folder = Path(config.path)
    with suppress(OSError, ValueError, KeyError, TypeError):  # the library says what is damaged
        if (folder / "dataset_dict.json").exists():
            splits = {str(name): folder / name for name in read_json(folder / "dataset_dict.json")["splits"]}
        else:
            splits = {str(read_json(folder / "state.json", SMALL)["_split"] or "train"): folder}
        require_split(config, splits, [config.split])
        features = read_json(splits[config.split] / "dataset_info.json", SMALL)["features"]
        if column and features:
            require_column(config, list(features))


def _is_plain(config: HFDataset, extension: str, *, column: bool) -> bool:
    """Return whether the head of a file shows that it has what is asked for."""
    if set(_splits(config)) != {"train"}:
        return False
    if not column:
        return True
    if extension == ".txt":
        return config.text == "text"
    with suppress(EnvironmentProblem, BadRow):
        [file] = find_files(Path(config.path))
        kind = kind_of_rows(config.path)
        if kind != "text":
            return config.text in parse(_first_line(read_rows(file, kind)), 0)
    return False


def _first_line(blocks: Iterable[bytes]) -> bytes:
    line = b""
    for block in blocks:
        line += block
        if b"\n" in block or len(line) > LONGEST:
            break
    return line.partition(b"\n")[0]


def _splits(config: HFDataset) -> list[str]:
    """Return the splits that a config names, without their slices."""
    return [part.partition("[")[0].strip() for part in config.split.split("+")]


def _stream(config: HFDataset, seconds: float, *, column: bool) -> None:
    if names_addresses(config.path) or not require_small(config.path, seconds):
        return
    import datasets

    datasets.disable_progress_bars()
    try:
        streams: dict[str, Any] = open_local(config, datasets, streaming=True)
        named = [name for name in _splits(config) if name != ALL]
        require_split(config, streams, named)
        for name in named if column else ():
            found = streams[name].column_names or list(next(iter(streams[name]), ()))
            if found:
                require_column(config, found)
    except TitanError:
        raise
    except FileNotFoundError as error:  # the library finds no data in the folder
        failed(label_of(config), "cannot be loaded", error)
    except Exception:
        return  # a stream need not open all that can be loaded; if it cannot, the start says so
