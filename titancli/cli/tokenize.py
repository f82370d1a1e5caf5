"""`titan data tokenize`: documents of text to token shards."""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from titancli.cli.common import Common
from titancli.cli.completion import RecipeOrOverride
from titancli.cli.output import note, print_json
from titancli.errors import EXIT_OK, TitanError, UsageError

if TYPE_CHECKING:
    from titancli.data.shards.tokenize import Progress

SHARD_TOKENS = 1 << 29
NOTE_SECONDS = 30.0
"""Seconds between two lines of progress where there is no terminal."""


@click.command("tokenize", short_help="Tokenize text into shards for training.")
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@click.argument("out", type=click.Path(path_type=Path), metavar="OUT")
@click.option("--tokenizer", metavar="DIR", help="`byte`, a folder with tokenizer.json, or hf://OWNER/NAME.")
@click.option("--recipe", type=RecipeOrOverride(), metavar="RECIPE", help="Take the tokenizer of a recipe.")
@click.option("--text", default="text", show_default=True, metavar="KEY", help="Key or column of the text.")
@click.option(
    "--format",
    type=click.Choice(["text", "jsonl", "parquet"]),
    help="Read all files as this.  [default: as their content says]",
)
@click.option("--name", metavar="NAME", help="Configuration of a dataset on the Hub.")
@click.option("--revision", metavar="REV", help="Commit, tag or branch of a dataset on the Hub.")
@click.option("--split", default="train", show_default=True, help="Split of a Hugging Face dataset.")
@click.option(
    "--bos/--no-bos",
    "add_bos",
    default=None,
    help="Begin documents with BOS.  [default: as the tokenizer does]",
)
@click.option("--strict", is_flag=True, help="Stop at a bad row instead of skipping it.")
@click.option("--workers", type=click.IntRange(1), help="Processes that tokenize.  [default: one per core]")
@click.option(
    "--shard-tokens",
    type=click.IntRange(1),
    default=SHARD_TOKENS,
    show_default=True,
    help="Tokens of a shard; it ends with the document that reaches them.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_obj
def command(
    common: Common,
    sources: tuple[str, ...],
    out: Path,
    tokenizer: str | None,
    recipe: str | None,
    workers: int | None,
    shard_tokens: int,
    add_bos: bool | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Tokenize the documents of SOURCEs into token shards in the folder OUT, for the dataset token_shards.

    A SOURCE is a file, a folder or a glob: rows (JSON Lines, lists in JSON, CSV and Parquet; each is a
    document), or text (each file is one), all but Parquet also compressed by gzip or zstd. Which of them a
    file is follows from its content; .txt and .md are always text, and files of other formats are refused. It
    may also be a Hugging Face dataset: hf://datasets/OWNER/NAME, or a folder of save_to_disk.

    If the command is interrupted, run it again: it continues, and the result is the same. It does not depend
    on the number of workers either. `titan data verify OUT` checks the shards.
    """
    from titancli.data.shards.sources import Options, open_inputs
    from titancli.data.shards.tokenize import Job, tokenize

    config = tokenizer_of(tokenizer, recipe)
    for source in sources:
        if os.path.isdir(source) and out.resolve().is_relative_to(Path(source).resolve()):
            raise UsageError(
                f"OUT ({out}) lies in the source {source}, which would then hold its own shards",
                hint="name a folder outside of the sources",
            )
    count = workers or len(os.sched_getaffinity(0))
    begun = time.monotonic()
    with _own_words(), _reporter() as report:
        inputs = open_inputs(sources, Options(**options))
        job = Job(inputs, config, out, shard_tokens, count, (common.plugin_files, common.blocked), add_bos)
        index = tokenize(job, report)
    if as_json:
        print_json("tokenization", {**index.facts(), "seconds": round(time.monotonic() - begun, 3)})
        return EXIT_OK
    rows = "row" if index.skipped == 1 else "rows"
    skipped = f", {index.skipped:,} bad {rows} skipped" if index.skipped else ""
    print(
        f"{index.tokens:,} tokens of {index.documents:,} documents in {len(index.shards)} shard"
        f"{'s' if len(index.shards) > 1 else ''}{skipped}"
    )
    if index.bos_id is not None:
        note(f"documents begin with BOS ({index.bos_id})")
    from titancli.recipe.toml import inline

    paths = inline([str(out)])
    note(f'to train on them: dataset.type = "token_shards", dataset.paths = {paths}')
    note(f"to check them: titan data verify {shlex.quote(str(out))}")
    return EXIT_OK


def tokenizer_of(folder: str | None, recipe: str | None) -> Any:
    """Return the config of the tokenizer that the options name."""
    if recipe is not None and folder is None:
        from titancli.recipe import load_recipe

        config = load_recipe(recipe).recipe.tokenizer
        if config is None:
            raise UsageError(f"the recipe {recipe} has no tokenizer")
        return config
    from titancli.data import ByteTokenizer, HFTokenizer
    from titancli.data.hub import Hosted

    if folder is None or recipe is not None:
        raise UsageError(
            "name the tokenizer with --tokenizer or with --recipe",
            hint="--tokenizer byte, --tokenizer FOLDER, or --recipe RECIPE",
        )
    if folder == "byte":
        return ByteTokenizer()
    hosted = Hosted.of(Path(folder))
    return HFTokenizer(
        path=Path(os.path.abspath(folder)) if hosted is None else hosted.fetch(weights=False).folder
    )


@contextmanager
def _own_words() -> Iterator[None]:
    """Rewrite errors about a recipe's keys in terms of this command's arguments and options."""
    try:
        yield
    except TitanError as error:
        error.message = _translated(error.message)
        error.hint = error.hint and _translated(error.hint)
        raise


def _translated(words: str) -> str:
    words = words.removeprefix("dataset: ").replace("set dataset.strict = false", "leave out --strict")
    words = words.replace("the paths of the dataset", "the sources").replace(" (dataset.max_bytes)", "")
    words = re.sub(r"(?<![\w/.-])dataset\.paths?\b", "SOURCE", words)  # not in a path
    words = words.replace('dataset.format = "text"', "--format text")
    return re.sub(r"(?<![\w/.-])dataset\.(text|name|revision|split)\b( =)?", r"--\1", words)


@contextmanager
def _reporter() -> Iterator[Callable[[Progress], None]]:
    """Return a function that shows progress: a bar on a terminal, else a line now and then."""
    begun = time.monotonic()
    if not sys.stderr.isatty():
        last = begun

        def line(progress: Progress) -> None:
            nonlocal last
            if time.monotonic() - last >= NOTE_SECONDS:
                last = time.monotonic()
                note(_words(progress, last - begun))

        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn
    from rich.progress import Progress as Bar

    columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"))
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=1.0)
        yield lambda progress: bar.update(
            task, completed=progress.share, description=_words(progress, time.monotonic() - begun)
        )


def _words(progress: Progress, seconds: float) -> str:
    rate = progress.new_tokens / max(seconds, 1e-9)
    left = ""
    if progress.new_share > 0.0:
        rest = round(seconds * (1.0 - progress.share) / progress.new_share)
        left = f", {rest // 3600}:{rest // 60 % 60:02d}:{rest % 60:02d} left"
    return f"{progress.tokens:,} tokens ({progress.share:.1%}), {rate:,.0f} tokens/s{left}"
