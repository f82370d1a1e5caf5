"""Sources of Hugging Face datasets: on disk, or as a stream.

A dataset on disk is read by index, so its documents can be shuffled and any position is reached at once. A
stream is read in order; its own state, taken at every 64th document, leads back to a position exactly, since
streams are never shuffled here. How fast a stream resumes within one of its files is up to `datasets`.
`datasets` is imported when one of these is built.
"""

from __future__ import annotations

import glob
import itertools
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any, NoReturn

from titancli.data import HFDataset
from titancli.data.hf_files import require_small
from titancli.data.paths import hub_keys, is_saved
from titancli.data.source import Piece, Size, document_order
from titancli.data.unchanged import Stamp, require_unchanged
from titancli.errors import EnvironmentProblem, RecipeError, TitanError
from titancli.fingerprint import Contents, chunk_sums, corpus_fingerprint, full_check
from titancli.protocols import Dataset

GROUP = 64
"""Documents fetched by index at once, or between two states of a stream."""

CHECKED = 32
"""Maximum number of files checked for changes at once."""
CHECKED_FOR_ONE = 4
"""The same for a single row, which takes less time to read than many files to check."""
READERS = {
    ".json": "json",
    ".jsonl": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".txt": "text",
    ".arrow": "arrow",
}
"""The library's reader for each suffix; `.gz`, `.zst` and the like may follow."""


class IndexedSource:
    """Documents of a dataset on disk: a `titancli.data.source.Source`."""

    def __init__(self, config: HFDataset, dataset: Any, seed: int) -> None:
        self.label = label_of(config)
        self._column = config.text
        self._shuffle = config.shuffles_source
        self._seed = seed
        require_column(config, dataset.column_names)
        if len(dataset) == 0:
            raise EnvironmentProblem(
                f"{self.label}: split {config.split!r} has no rows", hint="use another split"
            )
        self.identity: dict[str, Any] = {
            "rows": len(dataset),
            "column": config.text,
            "contents": contents_of(config.path, dataset),
            "order": f"shuffled by seed {seed}" if self._shuffle else "as listed",
            **at_revision(config),
        }
        self._mapped = MappedFiles(dataset)
        self._dataset = dataset.select_columns([config.text])
        self.size = Size(len(dataset), "documents")

    def _texts(self, rows: list[int]) -> list[str]:
        try:
            with self._mapped.unchanged(len(rows)):
                found = self._dataset[rows][self._column]
        except TitanError:
            raise
        except Exception as error:  # any error of the file system or Arrow
            failed(self.label, "cannot be read", error)
        return [_text(self.label, self._column, text) for text in found]

    def read(self, epoch: int, mark: dict[str, Any] | None) -> Iterator[Piece]:
        """Yield the epoch's documents; a mark is a document's position in the order."""
        order = document_order(self._seed, epoch, self.size.amount, shuffle=self._shuffle)
        for first in range(mark["document"] if mark else 0, len(order), GROUP):
            for i, text in enumerate(self._texts(order[first : first + GROUP].tolist())):
                yield Piece(text, True, True, {"document": first + i})


def contents_of(path: str, dataset: Any) -> str:
    """Return a digest that differs if the rows of datasets differ.

    The library's own fingerprint of a folder of `save_to_disk` is merely a text in it, so the bytes are
    hashed too.

    Raises:
        EnvironmentProblem: a file cannot be read.
    """
    own: str = dataset._fingerprint
    folder = os.path.join(os.path.realpath(path), "") if os.path.isabs(path) else None
    files = [os.path.realpath(file["filename"]) for file in dataset.cache_files]
    try:
        if folder is None or not files or not all(file.startswith(folder) for file in files):
            for file in files if full_check() else ():
                chunk_sums(file)
            return own
        found = corpus_fingerprint([(file, os.path.basename(file), os.stat(file).st_size) for file in files])
    except OSError as error:
        failed(f"dataset {path}", "cannot be read", error)
    contents = Contents(f"{own} {found}")
    contents.ends = own
    return contents


class MappedFiles:
    """The files that a dataset maps into memory: writing to them changes its rows at once.

    A file that is removed or replaced stays as it was for processes that have it mapped.
    """

    def __init__(self, dataset: Any) -> None:
        self._paths = [file["filename"] for file in dataset.cache_files]
        self._stamps = {path: Stamp.of(path) for path in self._paths}
        self._next = 0

    @contextmanager
    def unchanged(self, rows: int) -> Iterator[None]:
        """Check that files are unchanged around reading this many rows: 4 to 32 files, in turn.

        They are also checked before: reading a mapped part that was truncated kills the process.

        Raises:
            EnvironmentProblem: a file has changed.
        """
        end = self._next + min(CHECKED, CHECKED_FOR_ONE * rows)
        self._require(self._paths[self._next : end])
        yield
        self._require(self._paths[self._next : end])
        self._next = end if end < len(self._paths) else 0

    def _require(self, paths: Sequence[str]) -> None:
        for path in paths:
            with suppress(FileNotFoundError):
                require_unchanged(path, self._stamps[path])


class StreamedSource:
    """Documents of a dataset that is streamed during training: a `titancli.data.source.Source`."""

    def __init__(self, config: HFDataset, dataset: Any) -> None:
        self.label = label_of(config)
        if (check := full_check()) is not None:
            check.left_out.append(f"{self.label} is a stream")
        self._column = config.text
        if dataset.column_names is not None:  # not every reader knows its columns in advance
            require_column(config, dataset.column_names)
        self.identity: dict[str, Any] = {
            "path": config.path,
            "name": config.name,
            "revision": config.revision,
            "split": config.split,
            "column": config.text,
        }
        self._dataset = dataset

    def read(self, epoch: int, mark: dict[str, Any] | None) -> Iterator[Piece]:
        """Yield the documents; a mark is the stream's own state, and the number of documents since then."""
        dataset = self._dataset
        state, past = (mark["state"], mark["past"]) if mark else (None, 0)
        dataset.load_state_dict(state)  # also None, or it would begin at the last state loaded
        rows = iter(dataset)
        for number in itertools.count():
            if number and number % GROUP == 0:
                state = dataset.state_dict()
            try:
                row = next(rows, None)
            except Exception as error:  # any error of the network, the file system or a reader
                failed(self.label, "broke off", error)
            if row is None:
                return
            if number >= past:
                if self._column not in row:
                    _no_column(self.label, self._column, sorted(row))
                text = _text(self.label, self._column, row[self._column])
                yield Piece(text, True, True, {"state": state, "past": number % GROUP})


def at_revision(config: Any) -> dict[str, Any]:
    """Return the part of a dataset's identity for its revision; empty if none is set."""
    return {} if config.revision is None else {"revision": config.revision}


def _text(label: str, column: str, value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise RecipeError(
            f"{label}: column {column!r} holds {type(value).__name__}, not a string",
            hint="set dataset.text to the column that contains the text",
        )
    return value


def label_of(config: HFDataset) -> str:
    """Return the name of a dataset in messages."""
    return f"dataset {config.path}" + (f" ({config.name})" if config.name else "")


def require_column(config: HFDataset, columns: list[str]) -> None:
    """
    Raises:
        RecipeError: the column with the text is not one of them.
    """
    if config.text not in columns:
        _no_column(label_of(config), config.text, columns)


def _no_column(label: str, column: str, columns: list[str]) -> NoReturn:
    raise RecipeError(
        f"{label} has no column {column!r}", hint=f"dataset.text may be one of: {', '.join(columns)}"
    )


def require_split(config: HFDataset, splits: Iterable[str], named: Iterable[str]) -> None:
    """
    Raises:
        RecipeError: a split that is named is not one of them.
    """
    splits = list(splits)
    for name in named:
        if name not in splits:
            raise RecipeError(
                f"{label_of(config)} has no split {name!r}",
                hint=f"dataset.split may be one of: {', '.join(splits)}",
            )


def failed(label: str, what: str, error: Exception) -> NoReturn:
    """Report an error of the library, of which the first line is shown.

    Raises:
        EnvironmentProblem: always.
    """
    reason = next(iter(str(error).strip().splitlines()), "")
    raise EnvironmentProblem(
        f"{label} {what}: {type(error).__name__}: {reason}",
        hint="check dataset.path, name and split; for the Hub also the network and `hf auth login`",
    ) from error


def load(config: HFDataset, *, progress: bool = False) -> Any:
    """Return the `datasets` object that a config names.

    Raises:
        EnvironmentProblem: the dataset cannot be found, reached or read.
        RecipeError: the name is a local folder and possibly one on the Hub, or a reader of the library (one
            of which unpickled files before datasets 5); or a saved dataset is to be streamed.
    """
    import datasets

    if not progress:
        datasets.disable_progress_bars()
    label = label_of(config)
    try:
        if os.path.isabs(config.path):
            return _load_local(config, datasets)
        if os.path.exists(config.path):
            raise RecipeError(
                f"dataset.path = {config.path!r} could be a local folder or a name on the Hub",
                hint=f"use './{config.path}' for the folder; for the Hub, run the command in another folder",
            )
        if config.path.isidentifier() and find_spec(f"datasets.packaged_modules.{config.path}") is not None:
            raise RecipeError(
                f"dataset.path = {config.path!r} is a reader of the datasets library, which would read "
                f"any files in the current folder",
                hint="give the file or the folder: './data.jsonl'",
            )
        return datasets.load_dataset(
            config.path,
            config.name,
            revision=config.revision,
            split=config.split,
            streaming=config.streaming,
        )
    except TitanError:
        raise
    except Exception as error:  # the library's, the Hub's and the network's errors, and bare ValueErrors
        failed(label, "cannot be loaded", error)


def refuse_hub_keys(config: Any) -> None:
    """Check that local data have no configuration name or revision, which only the Hub has.

    Raises:
        RecipeError: one is set.
    """
    for key, reason in hub_keys(config):
        raise RecipeError(f"dataset.{key}: {reason}", hint=f"remove {key}")


def local_extension(config: HFDataset) -> str | None:
    """Return the extension of the local file that a config names; None: it names a folder.

    Raises:
        EnvironmentProblem: there is no file, the folder is empty, or no reader knows the extension.
    """
    path, label = config.path, label_of(config)
    if not os.path.exists(path):
        raise EnvironmentProblem(f"{label} does not exist", hint="correct dataset.path")
    if os.path.isdir(path):
        if not os.listdir(path):
            raise EnvironmentProblem(f"{label}: the folder is empty", hint="correct dataset.path")
        return None
    if not os.path.isfile(path):
        raise EnvironmentProblem(f"{label} is not a regular file", hint="correct dataset.path")
    stem, extension = os.path.splitext(path)
    if extension in (".gz", ".zst", ".xz", ".bz2"):
        extension = os.path.splitext(stem)[1]
    if extension not in READERS:
        raise EnvironmentProblem(
            f"{label}: files with the extension {extension or '(none)'} are not supported",
            hint=f"supported: {', '.join(READERS)}; for whole text files, use the text_files dataset",
        )
    return extension


def _load_local(config: HFDataset, datasets: Any) -> Any:
    local_extension(config)
    refuse_hub_keys(config)
    require_small(config.path)
    if is_saved(config.path):
        return _load_saved(config, datasets)
    return open_local(config, datasets, split=config.split, streaming=config.streaming)


def open_local(config: HFDataset, datasets: Any, **options: Any) -> Any:
    """Return what the library reads from a file or a folder; `options` are others of `load_dataset`."""
    if (extension := local_extension(config)) is None:
        return datasets.load_dataset(config.path, **options)
    files = {"train": glob.escape(config.path)}
    return datasets.load_dataset(READERS[extension], data_files=files, **options)


def refuse_saved_stream(config: HFDataset) -> None:
    """
    Raises:
        RecipeError: a folder of `save_to_disk` is to be streamed.
    """
    if config.streaming:
        raise RecipeError(
            f"{label_of(config)} was saved by save_to_disk and cannot be streamed",
            hint="set dataset.streaming = false",
        )


def _load_saved(config: HFDataset, datasets: Any) -> Any:
    refuse_saved_stream(config)
    loaded = datasets.load_from_disk(config.path)
    if isinstance(loaded, datasets.DatasetDict):
        splits = dict(loaded)
    else:  # one split, possibly unnamed; the key's default then stands for it
        splits = {str(loaded.split or "train"): loaded}
    require_split(config, splits, [config.split])
    return splits[config.split]


def build(config: HFDataset, *, seed: int, dp_rank: int, **runtime: Any) -> Dataset:
    """Build `[dataset] type = "hf"`."""
    from titancli.data.text import text_dataset  # imports torch

    dataset = load(config, progress=dp_rank == 0 and sys.stderr.isatty())
    source: IndexedSource | StreamedSource
    source = StreamedSource(config, dataset) if config.streaming else IndexedSource(config, dataset, seed)
    return text_dataset(source, config, seed=seed, dp_rank=dp_rank, **runtime)
