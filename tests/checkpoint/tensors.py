"""Tensors that a checkpoint must keep bit for bit: all dtypes, no dimensions, no elements, odd strides."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titancli.checkpoint import read_manifest, save_checkpoint
from titancli.checkpoint.format.disk import write_file
from titancli.checkpoint.format.hashed import Digest, file_digest
from titancli.checkpoint.format.manifest import MANIFEST, manifest_bytes

RUN = "run-1"


def some_tensors(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "model.layers.0.weight": random(6, 4),
        "model.norm.weight": random(5).bfloat16(),
        "model.transposed": random(3, 7).t(),
        "model.nothing": torch.empty(0, 4),
        "optimizer.layers.0.weight.exp_avg": random(6, 4),
        "optimizer.layers.0.weight.step": torch.tensor(float(seed)),
        "other.pages": random(70, 60),
        "other.bytes": torch.arange(7, dtype=torch.uint8),
        "other.flag": torch.tensor(True),
        "other.half": random(2, 2).half(),
        "other.float8": random(3, 3).to(torch.float8_e4m3fn),
        "other.double": torch.tensor([float("nan"), float("inf"), -0.0], dtype=torch.float64),
    }


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def zeros(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[name].shape == b[name].shape and a[name].dtype == b[name].dtype and bits(a[name]) == bits(b[name])
        for name in a
    )


def save(folder: Path, seed: int = 0, *, run_id: str = RUN, state: dict | None = None) -> dict[str, Tensor]:
    tensors = some_tensors(seed)
    save_checkpoint(folder, tensors, state or {"seed": seed}, lock_text="recipe = 1\n", run_id=run_id)
    return tensors


def parts(folder: Path) -> dict[str, Any]:
    """The tables of all ranks' parts, by file."""
    return {p.name: json.loads(gzip.decompress(p.read_bytes())) for p in sorted(folder.glob("metadata-*.gz"))}


def rewritten(folder: Path, name: str, data: bytes) -> None:
    """Write a file of a checkpoint anew, and the manifest so that every checksum is right."""
    (folder / name).write_bytes(data)
    manifest = read_manifest(folder)
    files: dict[str, Digest] = {n: d for n, d in manifest.files.items() if (folder / n).exists()}
    files[name] = file_digest(folder / name)
    (folder / MANIFEST).unlink()
    write_file(folder / MANIFEST, manifest_bytes(replace(manifest, files=files)))
