"""`titan data show FILE --recipe RECIPE`: the first rows of data as a model sees them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import click

from titancli.errors import UsageError
from titancli.recipe import load_recipe
from titancli.terminal import printable

CONTEXT, TARGET = "context", "target"
COLOURS = {CONTEXT: "bright_black", TARGET: "green"}


def show_rows(path: Path, recipe: str, count: int) -> None:
    """Print the first rows that the recipe's dataset makes of a file or folder.

    Raises:
        UsageError: the recipe has no dataset that reads files.
        TitanError: the data cannot be read.
    """
    loaded = load_recipe(recipe, runnable=False).recipe
    if loaded.dataset is None or loaded.tokenizer is None:
        raise UsageError(f"{recipe} has no {'dataset' if loaded.dataset is None else 'tokenizer'}")
    config = _reading(loaded.dataset, path)
    from titancli.registry.component import build, component_info

    tokenizer = build(loaded.tokenizer)
    shape = {"seq_len": loaded.training.seq_len, "rows": 2 if config.gives_pairs else 1}
    dataset = build(config, tokenizer=tokenizer, **shape, dp_rank=0, dp_size=1, seed=loaded.training.seed)
    print(f"{path}, as {component_info(config).name} with rows of {shape['seq_len']} tokens")
    shown = 0
    for batch in dataset:
        for row in range(batch.rows):
            arrays = {name: batch[name][row].tolist() for name in batch if batch[name].ndim == 2}
            if shown < count and any(one >= 0 for one in arrays["targets"]):
                shown += 1
                _print_row(shown, arrays, tokenizer)
        if shown >= count:
            break
    if not shown:
        raise UsageError(f"{path} has no row with targets for this recipe")


def _reading(config: Any, path: Path) -> Any:
    """Return the dataset's config for another file or folder, read in order and once."""
    names = {field.name for field in fields(config)}
    absolute = str(path.absolute())
    changes: dict[str, Any] = {"repeat": False, "length_index": False, "cache_tokens": False}
    if getattr(config, "shuffle", None) is True:
        changes["shuffle"] = False
    if "paths" in names:
        changes["paths"] = [Path(absolute)]
    elif "path" in names:
        changes |= {"path": absolute, "name": None, "revision": None, "split": "train"}
    else:
        raise UsageError("the recipe's dataset reads no files, whose place this one could take")
    return replace(config, **{name: value for name, value in changes.items() if name in names})


def _print_row(number: int, row: dict[str, list[int]], tokenizer: Any) -> None:
    """Print a row's documents, each as runs of tokens that are targets, or are not."""
    documents = list(_documents(row))
    tokens = sum(len(one) for one in documents)
    targets = sum(target for one in documents for _, target in one)
    several = f"{len(documents)} documents, " if len(documents) > 1 else ""
    print(f"\nrow {number}: {several}{tokens:,} tokens, of which {targets:,} are targets")
    for place, document in enumerate(documents, start=1):
        if len(documents) > 1:
            print(f" document {place}")
        for is_target, run in groupby(document, lambda one: one[1]):
            ids = [token for token, _ in run]
            text = tokenizer.decode_special(ids)
            text = tokenizer.decode(ids) if text is None else text
            kind = TARGET if is_target else CONTEXT
            lines = [printable(line) for line in text.split("\n")]
            shown = f"⏎\n{' ' * 17}".join(lines[:-1] + ([lines[-1]] if lines[-1] else []))
            shown += "⏎" if not lines[-1] else ""
            click.echo(click.style(f"  {kind:<8}{len(ids):>5}  {shown}", fg=COLOURS[kind]))


def _documents(row: dict[str, list[int]]) -> Iterator[list[tuple[int, bool]]]:
    """Yield each document of a row as its tokens, and whether they are targets; padding is left out."""
    tokens, targets = row["tokens"], row["targets"]
    owners = row.get("document_ids") or [0] * len(tokens)
    for _, places in groupby(range(len(tokens)), lambda place: owners[place]):
        here = list(places)
        last = max((place for place in here if targets[place] >= 0), default=None)
        if last is None:
            continue
        document = [(tokens[here[0]], False)]
        for place in range(here[0], last + 1):
            following = targets[place] if targets[place] >= 0 else tokens[place + 1]
            document.append((following, targets[place] >= 0))
        yield document
