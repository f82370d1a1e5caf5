"""Read and compare the digests of a run, which `titancli.observe.digests` writes. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from titancli.errors import EnvironmentProblem
from titancli.files import parse_json, read_bytes
from titancli.observe.digests import CHECKSUM, FOLDER, FORMAT, RECORD, Header, checksum_of

LARGEST = 1 << 32
"""Maximum bytes of a file: a hundred million steps."""


@dataclass(frozen=True)
class StepDigest:
    """The digests of one step, all ranks together."""

    step: int
    loss: float
    grad_norm: float
    """The norm before clipping."""
    skipped: bool
    rows: int
    """A hash of all rows of the step; equal for the same rows on any layout."""
    ranks: dict[int, tuple[tuple[int, int], tuple[int, int]]]
    """The fields `gradients` and `weights` of each rank's `RECORD`."""
    layout: Layout = field(repr=False)
    attempt: int = field(compare=False)
    """The number, from 1, of the run's attempt that did the step."""


@dataclass(frozen=True)
class Layout:
    """The properties that must be equal for hashes to be comparable."""

    world: int
    mesh: dict[str, int]
    names: dict[int, list[str]] = field(repr=False)
    """The parameters that each rank hashed."""
    sampled: bool = field(default=True, compare=False)
    """See `Header`."""


@dataclass(frozen=True)
class Start:
    """The weights that an attempt began with."""

    ranks: dict[int, tuple[int, int]]
    """`Header.weights` of each rank."""
    layout: Layout = field(repr=False)


def read_digests(folder: Path, first: int = 1, last: int | None = None) -> dict[int, StepDigest]:
    """Return the digests of a run by step; a repeated step has its newest digest. A step that some rank has
    not written is left out.

    Args:
        folder: the run folder.
        first: the first step to return.
        last: the last step to return; None: no limit.

    Raises:
        EnvironmentProblem: a file cannot be read, or another version of titan wrote it.
    """
    steps: dict[int, StepDigest] = {}
    for _, files in sorted(_by_attempt(folder).items(), key=lambda item: item[0]):
        start = min(header.start for header, _ in files)
        steps = {step: digest for step, digest in steps.items() if step <= start}
        steps |= _joined(files, first, last)
    return steps


def read_starts(folder: Path) -> dict[int, Start]:
    """Return the weights that attempts began with, by step; of several attempts from one step, the last
    counts.

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


def differing_values(a: StepDigest, b: StepDigest) -> list[str]:
    """Return the differences between two digests of a step: "rows", "loss", "gradient norm", and on the same
    layout "gradients" and "weights", each with the parameter's name if it is the only one of a rank.

    On different layouts, losses and norms that are not bitwise equal may still agree up to rounding.
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

    A hash consists of the sums of h_i and of (i + 1)·h_i modulo 2^32, where h_i is the hash of tensor i: if
    only one h_i differs, the second sum differs by i + 1 times as much as the first.
    """
    first, second = (a[0] - b[0]) % 2**32, (a[1] - b[1]) % 2**32
    found = [name for i, name in enumerate(names) if (i + 1) * first % 2**32 == second]
    return found[0] if first and len(found) == 1 else None


def _where(pairs: list[tuple[int, tuple[int, int], tuple[int, int]]], layout: Layout) -> str:
    other = [(rank, named(layout.names[rank], a, b)) for rank, a, b in pairs if a != b]
    places = [f"{name or 'several tensors'}{f' on rank {rank}' * (layout.world > 1)}" for rank, name in other]
    return f" ({', '.join(places[:3])}{f' and {len(places) - 3} more ranks' * (len(places) > 3)})"


def _same(a: float, b: float) -> bool:
    return a == b or (a != a and b != b)


def _pair(numbers: np.ndarray) -> tuple[int, int]:
    return int(numbers[0]), int(numbers[1])


def _read(path: Path) -> tuple[Header, np.ndarray] | None:
    """Return the header and the complete records of a file; None if its process was killed before the
    header was complete."""
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
                raise EnvironmentProblem(f"{path} is damaged: its first line does not end", hint="delete it")
            return None
        head = parse_json(line)
        if head.get("format") != FORMAT:
            raise ValueError(f"format {head.get('format')!r}")
        if not CHECKSUM.holds(line):
            raise ValueError("its first line is damaged")
        del head["xxh3_64"]
        header = Header(**head)
    except (ValueError, AttributeError, TypeError) as error:
        raise EnvironmentProblem(
            f"{path} has no digests that this version of titan can read ({error})",
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
