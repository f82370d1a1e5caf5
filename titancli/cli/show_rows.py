"""`titan data show FILE --recipe RECIPE`: the first rows of data as a model sees them, or a check of all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import wraps
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import click

from titancli.errors import EXIT_ENVIRONMENT, EXIT_OK, UsageError
from titancli.recipe import load_recipe
from titancli.terminal import printable

CONTEXT, TARGET = "context", "target"
COLOURS = {CONTEXT: "bright_black", TARGET: "green"}
INPUTS = ("tokens", "targets", "positions", "document_ids")
"""What every batch of tokens may have; anything else is shown with its value."""


class Document(NamedTuple):
    """A document of a row, or the piece of one that the row has."""

    tokens: list[int]
    targets: list[bool]
    """Whether each token is a target."""
    last: int
    """Position of its last target in the row."""


def show_rows(path: Path, recipe: str, count: int, *, ids: bool) -> None:
    """Print the first rows that the recipe's dataset makes of a file or folder.

    Args:
        ids: print the ids of tokens too.

    Raises:
        UsageError: the recipe has no dataset that reads files.
        TitanError: the data cannot be read.
    """
    loaded, config = _read_as(path, recipe)
    training = loaded.training
    from titancli.registry.component import build, component_info

    tokenizer = build(loaded.tokenizer)
    roles = Roles(tokenizer)
    dataset = _dataset(config, training, tokenizer)
    rows = f"rows of {training.seq_len} tokens"
    print(f"{path}, as {component_info(config).name} with {rows}{_format(config)}")
    shown = 0
    for batch in dataset:
        for number in range(batch.rows):
            row = {name: batch[name][number].tolist() for name in batch}
            if shown < count and any(one >= 0 for one in row["targets"]):
                shown += 1
                documents = list(_documents(row, ahead=config.predicts_tokens))
                name = f"{shown}, {('chosen', 'rejected')[number % 2]}" if config.gives_pairs else f"{shown}"
                _print_row(name, row, documents, tokenizer, roles, ids=ids)
        if shown >= count:
            break
    if not shown:
        raise UsageError(f"{path} has no row with targets for this recipe", hint="check the skipped rows")


def check_rows(path: Path, recipe: str, *, strict: bool) -> int:
    """Check all rows that the recipe's dataset makes of a file or folder, and print what is found.

    Args:
        strict: return the exit code of damaged data if anything but truncated rows is found.

    Raises:
        UsageError: the recipe has no dataset of conversations or pairs.
        TitanError: the data cannot be read.
    """
    loaded, config = _read_as(path, recipe)
    from titancli.observe.metrics import collector
    from titancli.registry.component import build

    if hasattr(config, "strict"):
        config = replace(config, strict=False)  # all findings, not the first
    with collector.muted():  # the first rows are not checked on their own
        dataset = _dataset(config, loaded.training, build(loaded.tokenizer))
        check = getattr(dataset, "check", lambda: None)()
    if check is None:
        raise UsageError(
            f"{recipe} does not read conversations or pairs, which alone are checked",
            hint='give a recipe whose dataset is "chat", "preference" or "unpaired"',
        )
    rows = f"{check.rows:,} row{'s' * (check.rows != 1)} of {path}"
    print("\n".join([f"checked {rows}: {'' if check.lines() else 'no findings'}".rstrip(), *check.lines()]))
    return EXIT_ENVIRONMENT if strict and (check.faults or not check.rows) else EXIT_OK


def _read_as(path: Path, recipe: str) -> tuple[Any, Any]:
    """Return a recipe, and the config of its dataset for a file or folder."""
    loaded = load_recipe(recipe, runnable=False).recipe
    if loaded.dataset is None or loaded.tokenizer is None:
        lacks = "dataset" if loaded.dataset is None else "tokenizer"
        raise UsageError(f"{recipe} has no {lacks}", hint="give a recipe with [dataset] and [tokenizer]")
    return loaded, reading(loaded.dataset, path)


def _dataset(config: Any, training: Any, tokenizer: Any) -> Any:
    from titancli.registry.component import build

    shape = {"seq_len": training.seq_len, "rows": training.local_batch_size}
    return build(config, tokenizer=tokenizer, **shape, dp_rank=0, dp_size=1, seed=training.seed)


def reading(config: Any, path: Path) -> Any:
    """Return the dataset's config for another file or folder, read in order and once."""
    names = {field.name for field in fields(config)}
    absolute = str(path.absolute())
    changes: dict[str, Any] = {"repeat": False, "length_index": False}
    if getattr(config, "shuffle", None) is True:
        changes["shuffle"] = False
    if getattr(config, "fim", None) is None:  # middles are filled in where tokens are cached
        changes["cache_tokens"] = False
    if "paths" in names:
        changes["paths"] = [Path(absolute)]
    elif "path" in names:
        changes |= {"path": absolute, "name": None, "revision": None, "split": "train"}
    else:
        raise UsageError(
            "the recipe's dataset reads no files, whose place this one could take",
            hint="give a recipe whose dataset has paths or a path; of a mix, one with one of its datasets",
        )
    return replace(config, **{name: value for name, value in changes.items() if name in names})


class Roles:
    """The roles of the messages that a tokenizer encodes from now on."""

    def __init__(self, tokenizer: Any) -> None:
        self._chat = tokenizer.chat
        self._encoded: dict[tuple[int, ...], tuple[list[dict[str, Any]], dict[str, Any]]] = {}
        for name in ("chat", "chat_with_mask"):
            if (call := getattr(tokenizer, name)) is not None:
                setattr(tokenizer, name, self._remembering(call))

    def _remembering(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)  # whoever calls it looks at its parameters
        def remembering(messages: list[dict[str, Any]], **options: Any) -> Any:
            found = call(messages, **options)
            given = {name: value for name, value in options.items() if name == "options"}
            self._encoded[tuple(found[0] if isinstance(found, tuple) else found)] = messages, given
            return found

        return remembering

    def of(self, tokens: list[int]) -> list[str]:
        """Return the role of each token of a conversation, or of its beginning; "" for other text.

        Where a message is encoded differently when others follow, it has no boundary to the next: their
        tokens have the roles of both.
        """
        from titancli.data.chat_template import ChatRefused

        start = tuple(tokens)
        whole = next((ids for ids in self._encoded if ids[: len(start)] == start), None)
        if whole is None:
            return [""] * len(tokens)
        messages, options = self._encoded[whole]
        roles: list[str] = []
        begun: list[str] = []
        for count, message in enumerate(messages, start=1):
            begun += [message["role"]] if message["role"] not in begun else []
            try:
                ids = whole if count == len(messages) else tuple(self._chat(messages[:count], **options))
            except ChatRefused:
                continue
            if len(ids) > len(roles) and whole[: len(ids)] == ids:
                roles += ["+".join(begun)] * (len(ids) - len(roles))
                begun = []
        return roles[: len(tokens)]


def _format(config: Any) -> str:
    """Return the format of the rows of conversations, as a run says it at its start; "" of other rows."""
    from titancli.data import Chat

    if not isinstance(config, Chat):
        return ""
    from titancli.data.chat import reader_of
    from titancli.data.chat_source import rows_of
    from titancli.data.row_formats import Names, words

    chosen, _ = reader_of(config, rows_of(config, "chat", seed=0, dp_rank=0), say=False)
    return f"; {words(chosen, Names.of(config))}"


def _print_row(
    name: str, row: dict[str, Any], documents: list[Document], tokenizer: Any, roles: Roles, *, ids: bool
) -> None:
    """Print a row's documents, each as runs of tokens of one role that are targets, or are not."""
    tokens = sum(len(one.tokens) for one in documents)
    targets = sum(sum(one.targets) for one in documents)
    several = f"{len(documents)} documents, " if len(documents) > 1 else ""
    others = {name: value for name, value in row.items() if name not in INPUTS}
    by_place = [name for name, value in others.items() if isinstance(value, list)]
    said = [f"{name} {value:g}" for name, value in others.items() if name not in by_place]
    counted = f"of which {targets:,} {'is a target' if targets == 1 else 'are targets'}"
    print("\n" + ", ".join([f"row {name}: {several}{tokens:,} tokens, {counted}", *said]))
    for place, one in enumerate(documents, start=1):
        said = [f"{name} {others[name][one.last]}" for name in by_place]
        if len(documents) > 1 or said:
            print(f" document {place}{''.join(f', {each}' for each in said)}")
        spoken = roles.of(one.tokens)
        width = max(map(len, spoken)) + 2 if any(spoken) else 0
        runs = groupby(zip(one.targets, spoken, one.tokens, strict=True), lambda token: token[:2])
        for (is_target, role), run in runs:
            kind = TARGET if is_target else CONTEXT
            numbers = [token for *_, token in run]
            head = f"  {kind:<8}{role:<{width}}{len(numbers):>5}  "
            text = _lines(tokenizer, numbers, " " * len(head))
            click.echo(click.style(f"{head}{text}", fg=COLOURS[kind]))
            if ids:
                print(f"{' ' * len(head)}{' '.join(map(str, numbers))}")


def _lines(tokenizer: Any, ids: list[int], indent: str) -> str:
    text = tokenizer.decode_special(ids)
    text = tokenizer.decode(ids) if text is None else text
    *lines, last = (printable(line) for line in text.split("\n"))
    return f"⏎\n{indent}".join(lines + ([last] if last else [])) + ("" if last else "⏎" * bool(lines))


def _documents(row: dict[str, Any], *, ahead: bool) -> Iterator[Document]:
    """Yield the documents of a row, each to its last target.

    Args:
        ahead: a target is the token after its position; false: it marks the token at its position.
    """
    tokens, targets = row["tokens"], row["targets"]
    owners = row.get("document_ids") or [0] * len(tokens)
    for _, places in groupby(range(len(tokens)), lambda place: owners[place]):
        here = list(places)
        last = max((place for place in here if targets[place] >= 0), default=None)
        if last is None:
            continue
        here = here[: last - here[0] + 1]
        flags = [targets[place] >= 0 for place in here]
        found = [tokens[place] for place in here]
        if ahead:
            found.append(targets[last])
            flags.insert(0, False)
        yield Document(found, flags, last)
