"""`titan convert-checkpoint SRC OUT.gguf --to gguf`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import click

from titancli.commands import FolderOrURL, note, on_disk

TYPES = ("f32", "f16", "bf16", "q8_0", "q6_k", "q4_k_m")


@click.command("convert-checkpoint --to gguf", short_help="Convert a checkpoint to a GGUF file.")
@click.argument("src", type=FolderOrURL(file_okay=True))
@click.argument("dst", type=click.Path(path_type=Path))
@click.option(
    "--type",
    "file_type",
    type=click.Choice(TYPES),
    default="f16",
    show_default=True,
    help="Type of the matrices; the mix q4_k_m is Q4_K and Q6_K. Norms and routers stay float32.",
)
@click.option("--pre", metavar="NAME", help="llama.cpp's name of the pre-tokenizer, if it is not recognized.")
@click.option(
    "--verify",
    is_flag=True,
    help="Read the file back and compare every tensor; with llama.cpp, also logits and tokens.",
)
def command(src: Path, dst: Path, file_type: str, pre: str | None, verify: bool) -> int:
    """Convert a checkpoint to a GGUF file, with its tokenizer and chat template, for llama.cpp.

    SRC is RUN/checkpoints/step-N, RUN (its newest good checkpoint), or the URL of either. Adapters of the
    lora converter are merged into the base model. DST must not exist.

    llama.cpp takes part in --verify if the package llama-cpp-python is installed, or the variable
    TITAN_LLAMACPP names a Python that has it.
    """
    from titan_gguf.convert import convert

    with on_disk(src, dst.absolute().parent, say=note) as folder:
        lines, good = convert(
            folder, dst.absolute(), file_type, pre=pre, verify=verify, progress=_progress(), say=note
        )
    for line in lines:
        print(line)
    return 0 if good else 1


def _progress() -> Callable[[str, int, int], None]:
    if not sys.stderr.isatty():
        return lambda name, done, total: None

    def show(name: str, done: int, total: int) -> None:
        end = "\n" if done == total else ""
        print(f"\r\x1b[K{done}/{total} {name}", end=end, file=sys.stderr, flush=True)

    return show
