"""`titan convert-checkpoint`: a checkpoint as a Hugging Face folder, and the other way round."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, Literal

import click

from titancli.cli.output import note
from titancli.cli.path_types import FolderOrURL, on_disk
from titancli.cli.plugin_commands import offered, offers
from titancli.errors import EnvironmentProblem, UsageError
from titancli.recipe.assets import hub_hint
from titancli.registry.first_party import COMMANDS

SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([kmgt]?)(i?)b", re.IGNORECASE)


class Size(click.ParamType):
    """A size in bytes, with an optional unit: 5GB, 512MiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = SIZE.fullmatch(str(value))
        if match is None:
            self.fail(f"{value!r} is not a size; use 5GB or 512MiB, for example", param, ctx)
        number, prefix, binary = match.groups()
        size = int(float(number) * (1024 if binary else 1000) ** " kmgt".index(prefix.lower() or " "))
        if size < 1:
            self.fail("it must be at least one byte", param, ctx)
        return size


class Convert(click.Command):
    """Leaves the format of a plugin to its command, `convert-checkpoint --to NAME`, which has own options."""

    def make_context(self, info_name: str | None, args: list[str], *more: Any, **extra: Any) -> Any:
        found = re.fullmatch(r"(.*\0)?--to[=\0]([^\0]+)\0(.*)", "".join(f"{arg}\0" for arg in args))
        if found and (other := offered(f"convert-checkpoint --to {found[2]}")):
            rest = f"{found[1] or ''}{found[3]}".split("\0")[:-1]
            return other.make_context(f"{info_name} --to {found[2]}", rest, *more, **extra)
        return super().make_context(info_name, args, *more, **extra)


class Format(click.Choice[str]):
    """The formats of DST: titan's, and in help and messages those of plugins too."""

    def __init__(self) -> None:
        super().__init__(["hf", "titan", "peft"])

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return f"[{'|'.join([*self.choices, *self._others()])}]"

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        names = ", ".join(map(repr, [*self.choices, *self._others()]))
        return f"{value!r} is not one of {names}."

    @staticmethod
    def _others() -> list[str]:
        begin = "convert-checkpoint --to "
        return sorted(name.removeprefix(begin) for name in {*offers(), *COMMANDS} if name.startswith(begin))


@click.command("convert-checkpoint", cls=Convert, short_help="Write a Hugging Face folder, or read one.")
@click.argument("src", type=FolderOrURL(file_okay=True))
@click.argument("dst", type=click.Path(path_type=Path))
@click.option("--to", "to", type=Format(), required=True, help="Format of DST.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    help="Cast the weights.  [default: keep their dtype]",
)
@click.option(
    "--max-shard-size",
    "max_shard",
    type=Size(),
    default="5GB",
    show_default=True,
    help="Maximum file size; a larger tensor gets a file of its own.",
)
@click.option(
    "--quantise",
    type=click.Choice(["fp8", "mxfp4"]),
    help="With --to hf: write the matrices quantized: in blocks of fp8, or (gpt_oss) MXFP4.",
)
@click.option("--verify", is_flag=True, help="Compare the logits with those of transformers (or peft).")
@click.option(
    "--model-component",
    metavar="NAME",
    help="With --to titan: the model component for SRC.  [default: by config.json's model_type]",
)
def command(
    src: Path,
    dst: Path,
    to: str,
    dtype: str | None,
    max_shard: int,
    quantise: Literal["fp8", "mxfp4"] | None,
    verify: bool,
    model_component: str | None,
) -> int:
    """Convert a checkpoint to a Hugging Face folder (--to hf), or back (--to titan).

    Quantized folders are read as bfloat16; --quantise writes them. Adapters of the lora converter are merged
    into the base model (--to hf) or exported for peft (--to peft).

    With --to hf, SRC is RUN/checkpoints/step-N, RUN (its newest good checkpoint), or the URL of either;
    transformers (or diffusers, for its models) loads DST directly. With --to titan, SRC is a folder with
    config.json and *.safetensors; to start a run from DST, set weights=DST. DST must not exist.
    For --to gguf see --to gguf --help.
    """
    from titancli.checkpoint.format.stream import no_progress
    from titancli.checkpoint.hf import convert

    if quantise and to != "hf":
        raise UsageError(f"--quantise cannot be used with --to {to}", hint="remove it, or use --to hf")
    show = _progress if sys.stderr.isatty() else no_progress
    if to == "hf":
        with on_disk(src, dst.absolute().parent, say=note) as folder:
            result = convert.to_hf(
                folder,
                dst,
                dtype=dtype,
                quantise=quantise,
                max_shard=max_shard,
                verify=verify,
                progress=show,
                say=note,
            )
    elif to == "peft":
        from titancli.checkpoint.hf.peft import to_peft

        with on_disk(src, dst.absolute().parent, say=note) as folder:
            made = to_peft(folder, dst, dtype=convert.dtype_of(dtype), verify=verify, progress=show, say=note)
        result = convert.Result(*made)
    else:
        _require_local(src)
        result = convert.to_titan(
            src,
            dst,
            dtype=dtype,
            max_shard=max_shard,
            verify=verify,
            component=model_component,
            progress=show,
            say=note,
        )
    for line in result.lines:
        print(line)
    return 0 if result.good else 1


def _require_local(src: Path) -> None:
    """
    Raises:
        TitanError: the source is a URL, or looks like a repository of the Hub.
    """
    if not isinstance(src, Path):
        raise UsageError("--to titan reads a local folder", hint=f"copy {src} first")
    if not src.exists() and (hint := hub_hint(src)):
        raise EnvironmentProblem(f"folder {src} does not exist", hint=hint)


def _progress(name: str, done: int, total: int) -> None:
    print(f"\r\x1b[K{done}/{total} {name}", end="\n" * (done == total), file=sys.stderr, flush=True)
