"""`digests/`: the results of each optimizer step of a run, small enough to keep all of them. Torch-free.

`digests/ATTEMPT.RESTART/rank-N.bin` begins with one line of JSON (`Header`), and goes on with one `RECORD` a
step, each at its own place: what a disk that was full for a while left out is a hole, and what a killed
process has cut off ends the file. A resumed run begins new files.
`titan_proof.digests` reads and compares them.
"""

from __future__ import annotations

import json
import logging
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from titancli.checksum import Checksum
from titancli.files import regular

FORMAT = 2
FOLDER = "digests"
CHECKSUM = Checksum('{"xxh3_64":"', '",')
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
lies on this rank: of its tensors' hashes h_1, h_2, … the sums of h_i and of i·h_i, modulo 2^32."""

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
        line = (
            CHECKSUM.put(json.dumps(asdict(head), separators=(",", ":")).removeprefix("{")).encode() + b"\n"
        )
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


def path_of(folder: Path, attempt: int, restart: int, rank: int) -> Path:
    """Return the file of a rank's digests in a run folder."""
    return folder / FOLDER / f"{attempt}.{restart}" / f"rank-{rank}.bin"


def checksum_of(record: bytes) -> int:
    """Return the checksum of all other bytes of a record; never 0, which stands for none."""
    return zlib.crc32(record[:-4]) or 1
