"""`digests/`: the results of each optimizer step of a run, small enough to keep all of them. Torch-free.

`digests/ATTEMPT.RESTART/rank-N.bin` begins with one line of JSON (`Header`), and goes on with one `RECORD` a
step, each at its own place: what a disk that was full for a while left out is a hole, and what a killed
process has cut off ends the file. A resumed run begins new files; `read_digests` puts them together.
"""

from __future__ import annotations

import json
import logging
import os
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from titancli.errors import EnvironmentProblem
from titancli.files import parse_json, read_bytes, regular
from titancli.seal import Seal

FORMAT = 2
FOLDER = "digests"
LARGEST = 1 << 32
"""Bytes of a file: a hundred million steps."""
SEAL = Seal('{"xxh3_64":"', '",')
"""Start of the header."""
RECORD = np.dtype(
    [
        ("skipped", "<u4"),
        ("loss", "<f4"),
        ("grad_norm", "<f4"),
        ("rows", "<u8"),
        ("gradients", "<u4", 2),
        ("weights", "<u4", 2),
        ("step", "<u4"),
        ("crc32", "<u4"),
    ]
)
"""44 bytes, their checksum last: a record of which only a part was written has none. `rows` is of this
rank's rows, whatever their order; `gradients` (before clipping) and `weights` (after the step) are of what
lies on this rank, each two sums over its tensors: see `named`."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Header:
    """The run and rank that the records of one file belong to."""

    attempt: int
    restart: int
    start: int
    """The step before the first of the file."""
    rank: int
    world: int
    dp_rank: int
    """Ranks of the same one have the same rows."""
    mesh: dict[str, int]
    """The degrees of parallelism."""
    names: list[str]
    """The trained parameters on this rank, in the order in which they were hashed."""
    weights: list[int] | None = None
    """Of the weights before the first record, as the `weights` of a `RECORD` of step `start`."""
    sampled: bool = True
    """Whether only a part of some tensor is read at each step."""
    format: int = FORMAT


class DigestWriter:
    """Writes one rank's digests; the file is made with its first record.

    A file that cannot be written (a full disk) is reported once and does not end the run.
    """

    def __init__(self, folder: Path, header: Mapping[str, Any]) -> None:
        """
        Args:
            folder: the run folder.
            header: the fields of `Header` except `start`.
        """
        self._path = path_of(folder, header["attempt"], header["restart"], header["rank"])
        self._header, self._file, self._begin, self._start = header, -1, 0, 0
        self._healthy = True

    def start_with(self, weights: Sequence[int], *, sampled: bool) -> None:
        """Set `weights` and `sampled` of the header, before the first record."""
        self._header = {**self._header, "weights": list(weights), "sampled": sampled}

    def write(self, step: int, **values: Any) -> None:
        """Write the record of a step; see `RECORD`."""
        record = np.zeros((), RECORD)
        for name, value in (("step", step), *values.items()):
            record[name] = value
        try:
            if self._file < 0:
                self._open(step - 1)
            place = self._begin + (step - self._start - 1) * RECORD.itemsize
            record["crc32"] = checksum_of(record.tobytes())
            if os.pwrite(self._file, record.tobytes(), place) < RECORD.itemsize:
                raise OSError("the disk is full")
        except OSError as error:
            if self._healthy:
                self._healthy = False
                logger.warning("cannot write %s (%s); the run continues without it", self._path, error)

    def _open(self, start: int) -> None:
        head = Header(**self._header, start=start)
        line = SEAL.put(json.dumps(asdict(head), separators=(",", ":")).removeprefix("{")).encode() + b"\n"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = regular(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            if os.write(file, line) < len(line):
                raise OSError("the disk is full")
        except OSError:
            os.close(file)
            raise
        self._file, self._begin, self._start = file, len(line), start

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


@dataclass(frozen=True)
class StepDigest:
    """One step of a run, all ranks together."""

    step: int
    loss: float
    grad_norm: float
    """Before clipping."""
    skipped: bool
    rows: int
    """Of all rows of the step; the same for the same rows on any layout."""
    ranks: dict[int, tuple[tuple[int, int], tuple[int, int]]]
    """By rank, `gradients` and `weights` of its `RECORD`."""
    layout: Layout = field(repr=False)
    attempt: int = field(compare=False)
    """The number of the run's attempt, from 1, that did it."""


@dataclass(frozen=True)
class Layout:
    """The properties that must be equal for hashes to be comparable."""

    world: int
    mesh: dict[str, int]
    names: dict[int, list[str]] = field(repr=False)
    """By rank, the parameters that were hashed."""
    sampled: bool = field(default=True, compare=False)
    """See `Header`."""


@dataclass(frozen=True)
class Start:
    """The weights that an attempt began with."""

    ranks: dict[int, tuple[int, int]]
    """By rank, `Header.weights`."""
    layout: Layout = field(repr=False)


def read_digests(folder: Path, first: int = 1, last: int | None = None) -> dict[int, StepDigest]:
    """Return the digests of a run by step: of a step that was repeated, the last time. Steps that some rank
    has not written are left out.

    Args:
        folder: the run folder.
        first: the first step, and `last` the last one, that are returned; None: there is no last.

    Raises:
        EnvironmentProblem: a file cannot be read, or is of another version of titan.
    """
    steps: dict[int, StepDigest] = {}
    for _, files in sorted(_by_attempt(folder).items(), key=lambda item: item[0]):
        start = min(header.start for header, _ in files)
        steps = {step: digest for step, digest in steps.items() if step <= start}
        steps |= _joined(files, first, last)
    return steps


def read_starts(folder: Path) -> dict[int, Start]:
    """Return by step the weights that attempts began with: of several from one step the last attempt's.

    Raises:
        EnvironmentProblem: as for `read_digests`.
    """
    found: dict[int, Start] = {}
    for _, files in sorted(_by_attempt(folder).items(), key=lambda item: item[0]):
        headers = {header.rank: header for header, _ in files}
        first = files[0][0]
        known = {rank: header.weights for rank, header in sorted(headers.items()) if header.weights}
        if len(known) == first.world and len({header.start for header in headers.values()}) == 1:
            layout = _layout([header for header, _ in files])
            found = {step: start for step, start in found.items() if step < first.start}
            found[first.start] = Start({rank: (pair[0], pair[1]) for rank, pair in known.items()}, layout)
    return found


def _by_attempt(folder: Path) -> dict[tuple[int, int], list[tuple[Header, np.ndarray]]]:
    found: dict[tuple[int, int], list[tuple[Header, np.ndarray]]] = {}
    for path in (folder / FOLDER).glob("*/rank-*.bin"):
        if (one := _read(path)) is not None:
            found.setdefault((one[0].attempt, one[0].restart), []).append(one)
    return found


def _layout(headers: Sequence[Header]) -> Layout:
    names = {header.rank: header.names for header in sorted(headers, key=lambda header: header.rank)}
    return Layout(headers[0].world, headers[0].mesh, names, any(header.sampled for header in headers))


def _joined(files: list[tuple[Header, np.ndarray]], begin: int, end: int | None) -> dict[int, StepDigest]:
    files.sort(key=lambda item: item[0].rank)
    first = files[0][0]
    if len(files) < first.world:
        return {}
    layout = _layout([header for header, _ in files])
    tables = []
    for _, records in files:
        chosen = records[(records["step"] >= begin) & (records["step"] <= (2**32 if end is None else end))]
        tables.append({int(record["step"]): record for record in chosen})
    once = {header.dp_rank: index for index, (header, _) in reversed(list(enumerate(files)))}
    found = {}
    for step in sorted(set.intersection(*(set(table) for table in tables))):
        own = [table[step] for table in tables]
        found[step] = StepDigest(
            step=step,
            loss=float(own[0]["loss"]),
            grad_norm=float(own[0]["grad_norm"]),
            skipped=bool(own[0]["skipped"]),
            rows=sum(int(own[index]["rows"]) for index in once.values()) % 2**64,
            ranks={
                header.rank: (_pair(record["gradients"]), _pair(record["weights"]))
                for (header, _), record in zip(files, own, strict=True)
            },
            layout=layout,
            attempt=first.attempt,
        )
    return found


def differences(a: StepDigest, b: StepDigest) -> list[str]:
    """Return the differences between two digests of a step: of "rows", "loss", "gradient norm", and on the
    same layout "gradients" and "weights", each with the parameter if it is a single one of a rank.

    On another layout, losses and norms that are not bitwise equal may still be so up to rounding.
    """
    found = ["rows"] if a.rows != b.rows else []
    names = {"loss": "loss", "gradient norm": "grad_norm"}
    found += [label for label, name in names.items() if not _same(getattr(a, name), getattr(b, name))]
    if a.skipped != b.skipped:
        found.append("whether it was skipped")
    if a.layout == b.layout:
        found += [
            f"{label}{_where([(rank, a.ranks[rank][i], b.ranks[rank][i]) for rank in a.ranks], a.layout)}"
            for i, label in enumerate(("gradients", "weights"))
            if any(a.ranks[rank][i] != b.ranks[rank][i] for rank in a.ranks)
        ]
    return found


def named(names: Sequence[str], a: tuple[int, int], b: tuple[int, int]) -> str | None:
    """Return the one tensor in which two hashes differ; None if there are several.

    Of the tensors' hashes h_i the sums of h_i and of (i + 1)·h_i are kept, modulo 2^32: if only one h_i
    differs, the second sum differs by i + 1 times as much as the first.
    """
    first, second = (a[0] - b[0]) % 2**32, (a[1] - b[1]) % 2**32
    found = [name for i, name in enumerate(names) if (i + 1) * first % 2**32 == second]
    return found[0] if first and len(found) == 1 else None


def path_of(folder: Path, attempt: int, restart: int, rank: int) -> Path:
    """Return the file of a rank's digests in a run folder."""
    return folder / FOLDER / f"{attempt}.{restart}" / f"rank-{rank}.bin"


def _where(pairs: list[tuple[int, tuple[int, int], tuple[int, int]]], layout: Layout) -> str:
    other = [(rank, named(layout.names[rank], a, b)) for rank, a, b in pairs if a != b]
    places = [f"{name or 'several tensors'}{f' on rank {rank}' * (layout.world > 1)}" for rank, name in other]
    return f" ({', '.join(places[:3])}{f' and {len(places) - 3} more ranks' * (len(places) > 3)})"


def _same(a: float, b: float) -> bool:
    return a == b or (a != a and b != b)


def _pair(numbers: np.ndarray) -> tuple[int, int]:
    return int(numbers[0]), int(numbers[1])


def _read(path: Path) -> tuple[Header, np.ndarray] | None:
    """Return the header and the complete records of a file; None if a killed process has not even left the
    header."""
    try:
        data = read_bytes(path, LARGEST)
    except OSError as error:
        raise EnvironmentProblem(f"cannot read {path}: {error.strerror}") from error
    line, newline, rest = data.partition(b"\n")
    try:
        if not newline:
            with suppress(ValueError):
                if json.JSONDecoder().raw_decode(data.decode("latin-1"))[1] == len(data):
                    return None
                raise EnvironmentProblem(f"{path} is damaged: its first line has no end", hint="delete it")
            return None
        head = parse_json(line)
        if head.get("format") != FORMAT:
            raise ValueError(f"format {head.get('format')!r}")
        if not SEAL.holds(line):
            raise ValueError("its first line is damaged")
        del head["xxh3_64"]
        header = Header(**head)
    except (ValueError, AttributeError, TypeError) as error:
        raise EnvironmentProblem(
            f"{path} has no digests that this version of titan reads ({error})",
            hint="use the version of titan that wrote it, or delete the file",
        ) from error
    records = np.frombuffer(rest, RECORD, count=len(rest) // RECORD.itemsize)
    size = RECORD.itemsize
    sums = np.array([checksum_of(rest[at : at + size]) for at in range(0, len(records) * size, size)], "<u4")
    written = records["crc32"] != 0
    if (wrong := np.flatnonzero(written & (records["crc32"] != sums))).size:
        raise EnvironmentProblem(
            f"{path} is damaged: the checksum of step {header.start + 1 + int(wrong[0])} does not match",
            hint="restore the file, or delete it",
        )
    expected = header.start + 1 + np.arange(len(records))
    return header, records[written & (records["step"] == expected)]


def checksum_of(record: bytes) -> int:
    """Return the checksum of all other bytes of a record; never 0, which stands for none."""
    return zlib.crc32(record[:-4]) or 1
