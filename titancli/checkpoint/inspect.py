"""The contents of a folder of checkpoints, and what is wrong with them: `titan checkpoint`. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from titancli.checkpoint.format.layout import TensorLayout
from titancli.checkpoint.format.manifest import (
    SET_ASIDE,
    STEP_NAME,
    Manifest,
    Verify,
    faults,
    is_checkpoint,
    read_manifest,
)
from titancli.checkpoint.format.metadata import Described, Metadata, open_metadata
from titancli.checkpoint.format.tensorfile import ITEM_SIZE, read_header
from titancli.errors import EnvironmentProblem


@dataclass(frozen=True)
class Found:
    """A checkpoint, good or not."""

    path: Path
    manifest: Manifest | None
    """The manifest; None: it cannot be read."""
    faults: list[str]
    """One phrase for each faulty file; empty: the checkpoint is good, as far as it was checked."""

    @property
    def set_aside(self) -> bool:
        """Return whether another checkpoint has replaced it: it is never loaded, and may be deleted."""
        return SET_ASIDE.match(self.path.name) is not None

    @property
    def size(self) -> int:
        """Return the bytes of all files but the manifest."""
        return sum(digest.size for digest in self.manifest.files.values()) if self.manifest else 0

    @property
    def mesh(self) -> dict[str, int]:
        return dict(self.manifest.layout.get("mesh") or {}) if self.manifest else {}

    @property
    def ranks(self) -> int | None:
        """Return the number of ranks that wrote it."""
        return self.manifest.layout.get("ranks") if self.manifest else None


def look_at(path: Path, verify: Verify) -> Found:
    """Return a checkpoint with what is wrong with it."""
    try:
        manifest = read_manifest(path)
    except EnvironmentProblem as error:
        return Found(path, None, [error.message])
    found = faults(path, manifest, verify=verify)
    if verify == "full" and not found:
        found = _contradictions(path, manifest)
    return Found(path, manifest, found)


def folders(path: Path) -> list[Path]:
    """Return the checkpoints that a path names: itself, those of a run, or those of a folder; oldest step
    first.

    Raises:
        EnvironmentProblem: there is no such folder, or it is none of these.
    """
    path = path.absolute()
    if is_checkpoint(path) or STEP_NAME.match(path.name):
        if not path.is_dir():
            raise EnvironmentProblem(f"checkpoint {path} does not exist")
        return [path]
    parent = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    try:
        below = [entry for entry in parent.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    except OSError as error:
        raise EnvironmentProblem(f"{parent} cannot be read: {error.strerror}") from error
    found = [entry for entry in below if STEP_NAME.match(entry.name) or is_checkpoint(entry)]
    if not found and parent is path:
        raise EnvironmentProblem(
            f"{path} is neither a run nor a checkpoint", hint="give RUN or RUN/checkpoints/step-100"
        )
    return sorted(found, key=_order)


def _order(path: Path) -> tuple[int, str]:
    match = STEP_NAME.match(path.name)
    return (int(match[1]) if match else -1), path.name


def metadata_of(path: Path) -> Metadata:
    """Return a checkpoint's tensors, and where they lie.

    Raises:
        EnvironmentProblem: it is not a checkpoint, or its metadata.json is damaged.
    """
    manifest = read_manifest(path)
    if found := faults(path, manifest, only={"metadata.json"}):
        raise EnvironmentProblem(
            f"checkpoint {path} is damaged: {'; '.join(found)}", hint=f"titan checkpoint verify {path}"
        )
    return open_metadata(path, manifest.files)


def nbytes(tensor: TensorLayout | Described) -> int:
    return math.prod(tensor.shape) * ITEM_SIZE[tensor.dtype]


def _contradictions(path: Path, manifest: Manifest) -> list[str]:
    """Return where metadata.json and the data files, each undamaged, contradict each other."""
    try:
        return list(_between(path, manifest, open_metadata(path, manifest.files).everything()))
    except EnvironmentProblem as error:
        return [error.message]


def _between(path: Path, manifest: Manifest, layouts: dict[str, TensorLayout]) -> Iterator[str]:
    pieces: dict[str, list[tuple[str, str, tuple[int, ...], int]]] = {}
    for layout in layouts.values():
        for chunk in layout.chunks:
            if math.prod(chunk.shape):
                pieces.setdefault(chunk.file, []).append((chunk.key, layout.dtype, chunk.shape, chunk.start))
    for file, expected in pieces.items():
        if file not in manifest.files:
            yield f"metadata.json names {file}, which is not in the manifest"
            continue
        header = read_header(path / file)
        for key, dtype, shape, start in expected:
            entry = header.get(key)
            if entry is None or (entry.dtype, entry.shape, entry.start) != (dtype, shape, start):
                yield f"{file} does not hold {key!r} as {dtype} {list(shape)} at byte {start}"
                break
