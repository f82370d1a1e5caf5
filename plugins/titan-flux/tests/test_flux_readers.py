"""What titan-flux reads of images, their texts and shards of latents, within bounds: see
`tests/security/readers.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.security.readers import BRACKETS, HUGE, Reader, fifo, require_bounds, sparse, text

pytest.importorskip("PIL.Image", reason="the extra [encode] installs it")
DOOR = "images and what is made of them"
SIDE = 13_000
"""Its pixels take 500 MB, and Pillow only warns."""


def white(path: Path) -> None:
    """Write an image of half a megabyte with 169 million pixels."""
    from PIL import Image

    Image.new("RGB", (SIDE, SIDE), "white").save(path, format="PNG")


def one_row(path: Path) -> None:
    """Write a sample of a terabyte that takes no space on the disk."""
    size = 1 << 40
    shapes = {"latents": [1, 2, size >> 3, 2], "text": [1, 1, 1], "pooled": [1, 1]}
    table, at = {}, 0
    for name, shape in shapes.items():
        end = at + 2
        for length in shape:
            end = at + (end - at) * length
        table[name] = {"dtype": "F16", "shape": shape, "data_offsets": [at, end]}
        at = end
    header = json.dumps(table).encode()
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + at)


def image(path: Path) -> Any:
    from titan_flux.encode import open_image

    return open_image(path, 64)


def texts(path: Path) -> Any:
    from titan_flux.encode import pairs_of

    (path.parent / "a.png").touch()
    return pairs_of(path.parent)


def latents(path: Path) -> Any:
    from titan_flux.shards import Shards

    return Shards([path], None, shuffle=False, seed=0).read(0)


READERS = {
    "image": Reader(
        DOOR,
        image,
        "x.png",
        white,
        text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 100000 100000\n%%EndComments\n(%pipe%id) run\n"),
        fifo,
        "titan_flux.encode PIL.Image",
    ),
    "text of an image": Reader(
        DOOR, texts, "a.txt", sparse, text(b"\xff" + BRACKETS.encode()), fifo, "titan_flux.encode"
    ),
    "metadata": Reader(
        DOOR, texts, "metadata.jsonl", sparse, text(f'{{"file_name": {BRACKETS}'), fifo, "titan_flux.encode"
    ),
    "latents": Reader(
        DOOR,
        latents,
        "x.safetensors",
        one_row,
        text((100_000).to_bytes(8, "little") + BRACKETS.encode()),
        text(HUGE + b"{}"),
        "titan_flux.shards",
    ),
}


@pytest.mark.e2e
@pytest.mark.parametrize("name", READERS)
def test_small_files_cost_little(tmp_path: Path, name: str) -> None:
    require_bounds(__file__, name, tmp_path)
