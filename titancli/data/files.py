"""Sources of text files: listing them, identifying their content, and reading it piece by piece.

A file is one document. It is read in pieces of at most 1 MiB that end at a line (or, without one, at a
character), so that a file of any size takes little memory; where pieces begin depends on the file alone.
Torch-free until a dataset is built.
"""

from __future__ import annotations

import codecs
import glob
import itertools
import logging
import os
import stat
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from titancli.data import PythonStdlib, TextFiles
from titancli.data.compressed import Damaged, is_compressed, open_plain, unreadable
from titancli.data.formats import format_of, require_text
from titancli.data.source import Piece, Size, document_order
from titancli.data.unchanged import Stamp, require_unchanged
from titancli.errors import EnvironmentProblem
from titancli.fingerprint import corpus_fingerprint
from titancli.observe.metrics import report
from titancli.protocols import Dataset

logger = logging.getLogger(__name__)

PIECE_BYTES = 1 << 20

NOT_SOURCE = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
"""Folders of the standard library's that are not part of it, or are its tests."""


class TextFile(NamedTuple):
    path: str
    name: str
    """Path relative to the recipe's entry, so that a corpus may be moved as a whole."""
    size: int
    modified: int
    """Time of the last write in nanoseconds, as of when the contents were identified."""

    @property
    def stamp(self) -> Stamp:
        return Stamp(self.size, self.modified)


class FileSource:
    """Documents from text files: a `titancli.data.source.Source`.

    Raises:
        EnvironmentProblem: a file cannot be read or is not UTF-8, or all files are empty.
    """

    def __init__(self, label: str, files: list[TextFile], *, shuffle: bool, seed: int) -> None:
        self.label = label
        self._files = files
        self._shuffle = shuffle
        self._seed = seed
        self.identity = corpus_identity(label, files, shuffle=shuffle, seed=seed)
        if not any(_compressed(file) for file in files):
            self.size = Size(self.identity["bytes"], "bytes")

    def read(self, epoch: int, mark: dict[str, Any] | None) -> Iterator[Piece]:
        """Yield the epoch's pieces; a mark is a document's position in the order, and a byte in its file."""
        order = document_order(self._seed, epoch, len(self._files), shuffle=self._shuffle)
        first, byte = (mark["document"], mark["byte"]) if mark else (0, 0)
        for document in range(first, len(order)):
            yield from pieces(self._files[order[document]], document, byte)
            byte = 0


def pieces(known: TextFile, document: int, start: int) -> Iterator[Piece]:
    """Yield the pieces of a file from a byte on.

    Raises:
        EnvironmentProblem: it cannot be read, has changed, or is not UTF-8.
    """
    path = known.path
    try:
        with open_plain(path) as file:
            file.seek(start)
            held, ends = b"", False
            while not ends:
                data = held + file.read(PIECE_BYTES + 1 - len(held))
                require_unchanged(path, known.stamp, file.fileno())
                ends, held = len(data) <= PIECE_BYTES, b""
                if not ends:
                    cut = _cut(data)
                    data, held = data[:cut], data[cut:]
                text = data.decode()
                if start == 0:
                    text = text.removeprefix("\ufeff")
                yield Piece(text, start == 0, ends, {"document": document, "byte": start})
                start += len(data)
    except OSError as error:
        unreadable(path, error)
    except UnicodeDecodeError as error:
        _not_text(path, start + error.start)


def _read_through(file: TextFile) -> None:
    format_of(file.path)
    for _ in pieces(file, 0, 0):
        pass


def _compressed(file: TextFile) -> bool:
    try:
        return is_compressed(file.path)
    except OSError as error:
        unreadable(file.path, error)


def undamaged(files: list[TextFile], read: Callable[[TextFile], Any]) -> list[TextFile]:
    """Return the files that can be read; log and count the others (`damaged_files`).

    Args:
        read: reads a file, and raises Damaged if that is what it is.

    Raises:
        EnvironmentProblem: all files are damaged.
    """
    good = []
    for file in files:
        try:
            read(file)
            good.append(file)
        except Damaged as error:
            logger.warning("skipped a file: %s", error.message)
    if not good:
        raise EnvironmentProblem(
            f"all {len(files)} files are damaged, for example {files[0].path}", hint="restore them"
        )
    if len(good) < len(files):
        report("damaged_files", len(files) - len(good), reduce="max")  # every rank reads all files
    return good


def _cut(data: bytes) -> int:
    """Return the end of a piece: after its last line, or before a character that does not fit whole."""
    line = data.rfind(b"\n", 0, PIECE_BYTES) + 1
    if line:
        return line
    cut = PIECE_BYTES
    while cut > PIECE_BYTES - 4 and data[cut] & 0xC0 == 0x80:
        cut -= 1
    return cut


def require_content(label: str, files: Sequence[TextFile]) -> int:
    """Return the bytes of all files.

    Raises:
        EnvironmentProblem: all files are empty.
    """
    total = sum(file.size for file in files)
    if total == 0:
        raise EnvironmentProblem(
            f"{label} contains no text: every file is empty, for example {files[0].path}",
            hint="choose files with text",
        )
    return total


def corpus_identity(
    label: str, files: list[TextFile], *, shuffle: bool, seed: int, text: bool = True
) -> dict[str, Any]:
    """Return a source's `identity`: facts that differ if the files or the order of their documents differ.

    Raises:
        EnvironmentProblem: all files are empty, one cannot be read, or, with `text`, one is not UTF-8.
    """
    total = require_content(label, files)
    named = [(file.path, file.name, file.size) for file in files]
    try:
        contents = corpus_fingerprint(named, _utf8) if text else corpus_fingerprint(named)
    except OSError as error:
        unreadable(error.filename, error)
    return {
        "files": len(files),
        "bytes": total,
        "contents": contents,
        "order": f"shuffled by seed {seed}" if shuffle else "as listed",
    }


def _utf8(path: str, blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the blocks unchanged; raise if they are not UTF-8."""
    if is_compressed(path):
        yield from blocks
        with open_plain(path) as file:
            for _ in _decoded(path, iter(partial(file.read, PIECE_BYTES), b"")):
                pass
    else:
        yield from _decoded(path, blocks)


def _decoded(path: str, blocks: Iterable[bytes]) -> Iterator[bytes]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    at = 0
    try:
        for block in blocks:
            yield block
            held = len(decoder.getstate()[0])
            decoder.decode(block)
            at += len(block)
        held = len(decoder.getstate()[0])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        _not_text(path, at - held + error.start)


def _not_text(path: str, byte: int) -> NoReturn:
    raise Damaged(
        f"{path} is not UTF-8 text: byte {byte} is invalid",
        hint="convert it (`iconv -t UTF-8`), select only text files, as in 'corpus/**/*.txt', or skip such "
        "files: dataset.skip_damaged = true",
    ) from None


# ------------------------------------------------------------------------------------ which files there are


def _walk(
    folder: str, *, skip: Callable[[str], bool], suffix: str = "", most: int | None = None
) -> list[TextFile]:
    """Return the regular files below a folder, sorted by their relative names; at most about `most`."""

    def stop(error: OSError) -> NoReturn:
        raise EnvironmentProblem(
            f"cannot list the folder {error.filename}: {error.strerror}", hint="make it readable"
        ) from error

    found = []
    for parent, folders, names in os.walk(folder, onerror=stop):
        folders[:] = [name for name in folders if not skip(name)]
        for name in names:
            if name.endswith(suffix) and not skip(name):
                path = os.path.join(parent, name)
                found += _regular(path, os.path.relpath(path, folder))
        if most is not None and len(found) >= most:
            break
    return sorted(found, key=lambda file: file.name)


def _regular(path: str, name: str) -> list[TextFile]:
    try:
        status = os.stat(path)
    except OSError as error:
        unreadable(path, error)
    return [TextFile(path, name, status.st_size, status.st_mtime_ns)] if stat.S_ISREG(status.st_mode) else []


def find_files(path: Path, most: int | None = None) -> list[TextFile]:
    """Return the files that an entry of `paths` stands for, sorted by name.

    Args:
        most: stop the search after about so many files; None: find all.

    Raises:
        EnvironmentProblem: the path does not exist, or has no files.
    """
    entry = os.path.abspath(path)
    if os.path.isdir(entry):
        found = _walk(entry, skip=lambda name: name.startswith("."), most=most)
        nothing = f"folder {entry} has no files"
    elif os.path.lexists(entry):
        found = _regular(entry, os.path.basename(entry))
        nothing = f"{entry} is not a regular file"
    elif glob.has_magic(entry):
        matches = sorted(itertools.islice(glob.iglob(entry, recursive=True), most))
        found = [file for match in matches for file in _regular(match, os.path.relpath(match, _base(entry)))]
        nothing = f"no file matches {entry}"
    else:
        found, nothing = [], f"{entry} does not exist"
    if not found:
        raise EnvironmentProblem(
            f"dataset: {nothing}",
            hint="correct dataset.paths; relative paths start at the current folder",
        )
    return found


def files_of(paths: Iterable[Path], most: int | None = None) -> list[TextFile]:
    """Return the files of all entries, in their order, without duplicates; `most`: see `find_files`.

    Raises:
        EnvironmentProblem: an entry has no files.
    """
    files: dict[str, TextFile] = {}
    for path in paths:
        for file in find_files(path, most):
            files.setdefault(file.path, file)
    return list(files.values())


def _base(pattern: str) -> str:
    """Return the folder that a glob begins in: its leading parts without wildcards."""
    base = pattern
    while glob.has_magic(base):
        base = os.path.dirname(base)
    return base


def build_text_files(config: TextFiles, *, seed: int, **runtime: Any) -> Dataset:
    """Build `[dataset] type = "text_files"`; a file listed twice is read once."""
    files = files_of(config.paths)
    if config.skip_damaged:
        files = undamaged(files, _read_through)
    if config.format == "auto":
        require_text([file.path for file in files])
    return _packed("dataset text_files", files, config, seed, runtime)


def build_python_stdlib(config: PythonStdlib, *, seed: int, **runtime: Any) -> Dataset:
    """Build `[dataset] type = "python_stdlib"`."""
    folder = sysconfig.get_paths()["stdlib"]
    files = _walk(folder, skip=NOT_SOURCE.__contains__, suffix=".py") if os.path.isdir(folder) else []
    if not files:
        raise EnvironmentProblem(
            f"dataset python_stdlib: this Python has no source files of the standard library in {folder}",
            hint="use a Python whose standard library is installed as files, or the text_files dataset",
        )
    return _packed("dataset python_stdlib", files, config, seed, runtime)


def _packed(
    label: str, files: list[TextFile], config: TextFiles | PythonStdlib, seed: int, runtime: dict[str, Any]
) -> Dataset:
    from titancli.data.text import text_dataset  # imports torch

    source = FileSource(label, files, shuffle=config.shuffles_source, seed=seed)
    return text_dataset(source, config, seed=seed, **runtime)
