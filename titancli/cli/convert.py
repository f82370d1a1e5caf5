"""`titan convert-checkpoint`: a checkpoint as a Hugging Face folder, and the other way round."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from titancli.cli.output import note


@click.command("convert-checkpoint", short_help="Turn a checkpoint into a Hugging Face folder, or back.")
@click.argument("src", type=click.Path(path_type=Path))
@click.argument("dst", type=click.Path(path_type=Path))
@click.option("--to", "to", type=click.Choice(["hf", "titan"]), required=True, help="What DST will be.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    help="Cast the weights. Default: keep them.",
)
@click.option("--verify", is_flag=True, help="Compare the logits with transformers' on random tokens.")
@click.option(
    "--model-component",
    metavar="NAME",
    help="The model that reads SRC, with --to titan. Default: the one of config.json's model_type.",
)
def command(
    src: Path, dst: Path, to: str, dtype: str | None, verify: bool, model_component: str | None
) -> int:
    """Turn a checkpoint into a Hugging Face folder (--to hf), or back (--to titan).

    To hf, SRC is RUN/checkpoints/step-N, or RUN for its newest good checkpoint; transformers loads DST as it
    is. To titan, SRC is a folder with config.json and *.safetensors; a recipe starts from DST with
    weights=DST. DST must not exist.
    """
    from titancli.checkpoint import convert

    show = _progress if sys.stderr.isatty() else None
    if to == "hf":
        result = convert.to_hf(src, dst, dtype=dtype, verify=verify, progress=show, say=note)
    else:
        result = convert.to_titan(
            src, dst, dtype=dtype, verify=verify, component=model_component, progress=show, say=note
        )
    for line in result.lines:
        print(line)
    return 0 if result.good else 1


def _progress(name: str, done: int, total: int) -> None:
    end = "\n" if done == total else ""
    print(f"\r\x1b[K{done}/{total} {name}", end=end, file=sys.stderr, flush=True)
