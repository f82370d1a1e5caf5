"""`titan flux-encode`: encode a folder of images and their texts to shards of latents."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
from torch import Tensor

from titan_flux.shards import write_shard
from titancli import TitanError
from titancli.errors import EnvironmentProblem, UsageError
from titancli.files import parse_json, read_bytes, regular

SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff"}
METADATA = "metadata.jsonl"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF")
"""Pillow would start Ghostscript for a file that begins like one of PostScript, whatever its name."""
SMALL, FOLD = 1 << 26, 250
"""The pixels of an image take at most `SMALL` bytes, or `FOLD` times its file's size if that is more."""
TEXT, ROWS = 1 << 20, 1 << 28
"""Bytes of a text file of an image, and of metadata.jsonl."""
PARTS = ("vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")
"""Subfolders of a FLUX.1 folder that are needed; its transformer is not."""


class Pair(NamedTuple):
    image: Path
    text: str


@click.command("flux-encode")
@click.argument("images", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--model", type=click.Path(path_type=Path), required=True, help="FLUX.1 folder, as diffusers has it."
)
@click.option(
    "--size", type=click.IntRange(16), default=1024, show_default=True, help="Side of a square image."
)
@click.option("--text-length", type=click.IntRange(1), default=512, show_default=True, help="Tokens for T5.")
@click.option(
    "--per-shard", type=click.IntRange(1), default=256, show_default=True, help="Samples in a shard."
)
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="bfloat16", show_default=True)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the latents' noise.")
@click.option(
    "--empty",
    type=click.Path(path_type=Path),
    help="Also write the empty text to this file, for text_dropout.",
)
def command(
    images: Path,
    out: Path,
    model: Path,
    size: int,
    text_length: int,
    per_shard: int,
    dtype: str,
    seed: int,
    empty: Path | None,
) -> None:
    """Encode the folder IMAGES, with the texts of its images, to shards in the new folder OUT.

    The text of a.jpg is in a.txt, or in metadata.jsonl ({"file_name": "a.jpg", "text": "..."}). Images are
    resized to cover a square of --size pixels and cut to its middle.
    """
    if size % 16:
        raise UsageError(
            f"--size {size} is not a multiple of 16", hint="8 pixels are one of the latent, 2 x 2 a token"
        )
    pairs = pairs_of(images)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise EnvironmentProblem(f"{out} exists", hint="use a new folder, or remove it")
    if empty is not None and (empty.exists() or empty.resolve().is_relative_to(out.resolve())):
        raise UsageError(f"--empty {empty}: it exists, or lies among the shards", hint="name another file")
    encoder = Encoder(model, text_length, DTYPES[dtype])
    out.mkdir(parents=True, exist_ok=True)
    digits = max(5, len(str(len(pairs))))
    for number, first in enumerate(range(0, len(pairs), per_shard)):
        part = pairs[first : first + per_shard]
        samples = [
            encoder.sample(open_image(pair.image, size), pair.text, seed + first + n)
            for n, pair in enumerate(part)
        ]
        path = out / f"{number:0{digits}}.safetensors"
        _write(path, samples)
        print(path, flush=True)
    if empty is not None:
        _write(empty, [encoder.sample(torch.zeros(3, size, size), "", seed)])
        print(empty)


def _write(path: Path, samples: Sequence[dict[str, Tensor]]) -> None:
    """Write a shard atomically."""
    unfinished = path.with_name(f".{path.name}.tmp")
    write_shard(unfinished, samples)
    os.replace(unfinished, path)


# ----------------------------------------------------------------------------------------------- the folder


def pairs_of(folder: Path) -> list[Pair]:
    """Return the images of a folder, sorted by name, each with its text.

    Raises:
        EnvironmentProblem: there are no images, or one has no text.
    """
    images = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
    if not images:
        raise EnvironmentProblem(f"{folder} has no images", hint=f"it reads {', '.join(sorted(SUFFIXES))}")
    said = dict(_metadata(folder / METADATA))
    pairs = []
    for image in images:
        text = said.get(image.relative_to(folder).as_posix())
        beside = image.with_suffix(".txt")
        if text is None and not beside.is_file():
            raise EnvironmentProblem(
                f"{image} has no text", hint=f"write {beside.name} beside it, or a row of {METADATA}"
            )
        pairs.append(Pair(image, _text(beside, TEXT).strip() if text is None else text))
    return pairs


def _text(path: Path, limit: int) -> str:
    """Return the text of a file.

    Raises:
        EnvironmentProblem: it cannot be read, is larger than `limit` bytes, or is not UTF-8.
    """
    try:
        return read_bytes(path, limit).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror or error if isinstance(error, OSError) else error
        raise EnvironmentProblem(
            f"{path} cannot be read: {reason}", hint="write it again, as UTF-8"
        ) from error


def _metadata(path: Path) -> Iterator[tuple[str, str]]:
    if not path.is_file():
        return
    for number, line in enumerate(_text(path, ROWS).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
            yield str(row["file_name"]), str(row["text"])
        except (ValueError, KeyError, TypeError) as error:
            hint = '{"file_name": "a.jpg", "text": "..."}'
            raise EnvironmentProblem(f"{path}:{number} has no file_name and text", hint=hint) from error


def open_image(path: Path, size: int) -> Tensor:
    """Return the central square of an image, from -1 to 1: [3, size, size].

    Raises:
        EnvironmentProblem: it cannot be read.
    """
    from PIL import Image, ImageOps

    try:
        with open(path, "rb", opener=regular) as file, Image.open(file, formats=FORMATS) as opened:
            _require_small(opened, os.fstat(file.fileno()).st_size)
            upright = ImageOps.exif_transpose(opened).convert("RGB")
            square = ImageOps.fit(upright, (size, size), Image.Resampling.LANCZOS)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # PIL's, if damaged
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise EnvironmentProblem(
            f"{path} cannot be read: {reason}", hint="repair it, or remove it"
        ) from error
    flat = torch.frombuffer(bytearray(square.tobytes()), dtype=torch.uint8)
    return flat.view(size, size, 3).permute(2, 0, 1).float() / 127.5 - 1


def _require_small(image: Any, size: int) -> None:
    """Check the memory that an image takes before it is decoded.

    Raises:
        ValueError: its pixels take more than its file's size allows.
    """
    needed = image.width * image.height * len(image.getbands())
    if needed > (limit := max(SMALL, FOLD * size)):
        raise ValueError(
            f"its {image.width:,} x {image.height:,} pixels take {needed:,} bytes, and a file of {size:,} "
            f"bytes may have {limit:,}; if that is right, make it smaller first"
        )


# --------------------------------------------------------------------------------------------- the encoders


class Encoder:
    """The autoencoder, CLIP and T5 of a FLUX.1 folder.

    Raises:
        TitanError: diffusers is not installed, or the folder is not one of FLUX.1.
    """

    def __init__(self, folder: Path, text_length: int, dtype: torch.dtype) -> None:
        try:
            import PIL  # noqa: F401
            from diffusers import FluxPipeline
        except ImportError as error:
            raise EnvironmentProblem(
                f"encoding needs a package that is missing: {error}", hint="pip install 'titan-flux[encode]'"
            ) from error
        if missing := [part for part in PARTS if not (folder / part).is_dir()]:
            raise EnvironmentProblem(
                f"{folder} is not a folder of FLUX.1: it has no {', '.join(missing)}",
                hint="it is what diffusers reads: black-forest-labs/FLUX.1-dev on the Hub, for one",
            )
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            loaded = FluxPipeline.from_pretrained(folder, transformer=None)
        except (OSError, ValueError, KeyError) as error:
            raise EnvironmentProblem(f"{folder} cannot be loaded: {error}") from error
        # fp32 on a CPU, where bf16 is slow; the output has the requested dtype.
        self.pipe: Any = loaded.to(
            self.device, torch.bfloat16 if self.device.type == "cuda" else torch.float32
        )
        self.text_length, self.dtype = text_length, dtype

    @torch.no_grad()
    def sample(self, image: Tensor, text: str, seed: int) -> dict[str, Tensor]:
        """Return `latents` [C, H, W], `text` [T, context_dim] and `pooled` [pooled_dim] on the CPU.

        Raises:
            TitanError: a number is not finite.
        """
        vae = self.pipe.vae
        states, pooled, _ = self.pipe.encode_prompt(
            prompt=text, prompt_2=text, max_sequence_length=self.text_length
        )
        noise = torch.Generator(self.device).manual_seed(seed)
        found = vae.encode(image[None].to(self.device, vae.dtype)).latent_dist.sample(noise)
        latents = (found - vae.config.shift_factor) * vae.config.scaling_factor
        sample = {"latents": latents[0], "text": states[0], "pooled": pooled[0]}
        for name, tensor in sample.items():
            sample[name] = tensor.to("cpu", self.dtype)
            if not torch.isfinite(sample[name]).all():
                raise TitanError(f"{name} of {text!r} is not finite in {self.dtype}", hint="--dtype float32")
        return sample
