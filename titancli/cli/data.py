"""`titan data show|verify`: the contents of token shards, and whether they are undamaged."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from titancli.cli.completion import RecipeOrOverride
from titancli.cli.output import note, print_json, table
from titancli.errors import EXIT_ENVIRONMENT, EXIT_OK, UsageError
from titancli.terminal import printable

if TYPE_CHECKING:
    from titancli.data.shards import Index

FOLDER = click.Path(path_type=Path)
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
BAR = 40
NOTE_SECONDS = 30.0
"""Seconds between two lines of progress."""


@click.command("show", short_help="Show token shards, or rows as a model sees them.")
@click.argument("out", type=FOLDER, metavar="OUT|FILE")
@click.option("--document", type=click.IntRange(0), metavar="N", help="Print the tokens of document N.")
@click.option("--tokenizer", metavar="DIR", help="Decode them with this tokenizer.")
@click.option(
    "--recipe",
    type=RecipeOrOverride(),
    metavar="RECIPE",
    help="Decode them with its tokenizer; make rows of FILE as it does.",
)
@click.option("-n", "count", type=click.IntRange(1), default=3, show_default=True, help="Rows of FILE.")
@click.option("--ids", is_flag=True, help="Print the ids of the tokens of FILE too.")
@click.option("--check", is_flag=True, help="Check all rows of FILE instead of printing the first.")
@click.option("--strict", is_flag=True, help="With --check, exit with 5 if anything is found.")
@JSON
def show(
    out: Path,
    document: int | None,
    tokenizer: str | None,
    recipe: str | None,
    count: int,
    ids: bool,
    check: bool,
    strict: bool,
    as_json: bool,
) -> int:
    """Show the token shards in OUT: their tokenizer, sources, counts and a histogram of document lengths.

    With --document, print one document instead, counted from 0: its text, if its tokenizer is given, else its
    ids.

    For any other FILE or folder, with --recipe: its first rows, as the recipe's dataset makes them and the
    model sees them: where each document ends, the roles of messages, and which tokens are targets. With
    --check, all rows of conversations or pairs are checked as a run checks the first 100 at its start: rows
    that are skipped or truncated, contents that the chat template leaves out, turns that do not end, BOS
    twice, special tokens in texts.
    """
    from titancli.data.shards import INDEX, read_index

    if recipe is not None and document is None and not (out / INDEX).is_file():
        if as_json or tokenizer is not None:
            raise UsageError("rows of a file are shown as text, with the tokenizer of the recipe")
        from titancli.cli.show_rows import check_rows, show_rows

        if strict and not check:
            raise UsageError("--strict goes with --check")
        if check:
            return check_rows(out, recipe, strict=strict)
        show_rows(out, recipe, count, ids=ids)
        return EXIT_OK
    if check or strict:
        raise UsageError("rows of a file are checked: titan data show FILE --recipe RECIPE --check")
    if ids:
        raise UsageError("--ids goes with rows of a file: titan data show FILE --recipe RECIPE --ids")
    if document is None and (tokenizer is not None or recipe is not None):
        raise UsageError("--tokenizer and --recipe decode a document: add --document N")
    if out.is_file():
        raise UsageError(
            f"{out} is a file, not a folder of token shards",
            hint="to see its rows, name the recipe that reads them: --recipe RECIPE",
        )
    index = read_index(out)
    if document is not None:
        _print_document(index, document, tokenizer, recipe, as_json)
        return EXIT_OK
    from titancli.data.shards.reader import lengths

    counts = lengths(index)
    if as_json:
        print_json("token-shards", {**index.facts(), "lengths": counts})
        return EXIT_OK
    rows = [
        ("tokens", f"{index.tokens:,} ({index.dtype})"),
        ("documents", f"{index.documents:,}, {index.tokens / index.documents:,.1f} tokens each on average"),
        ("shards", str(len(index.shards))),
        ("tokenizer", f"{index.tokenizer}, {index.vocab_size:,} ids, end marker {index.eos_id}"),
        *(("source", ", ".join(f"{key}: {value}" for key, value in one.items())) for one in index.sources),
        ("skipped rows", f"{index.skipped:,}"),
        ("digest", index.digest),
    ]
    table(("token shards", str(out)), rows)
    print()
    most = max(counts.values())
    table(
        ("tokens of a document", "documents", ""),
        [(name, f"{count:,}", "#" * -(-BAR * count // most)) for name, count in counts.items()],
    )
    return EXIT_OK


@click.command("verify", short_help="Read every byte of token shards, or of the data of a run or recipe.")
@click.argument("target", metavar="OUT|RUN|RECIPE")
@JSON
def verify(target: str, as_json: bool) -> int:
    """Read every byte of data, whatever sizes and times of change say, and compare it with what is known.

    OUT is a folder of token shards: sizes and checksums are compared with its index.

    RUN is the folder of a run, RECIPE a recipe: all files of its datasets are read. Token shards are compared
    with their index; files of corpora above 256 MiB with the checksums that were kept when they were read
    last; and the data of a run with its run.json, where the date of the check and the result are recorded.

    The exit code is 5 if anything is damaged or has changed.
    """
    from titancli.runs import RunFolder

    out = Path(target)
    if RunFolder.is_run(out) or not out.is_dir():
        return _verify_data(target, as_json)
    from titancli.data.shards import faults, read_index

    index = read_index(out)
    found = []
    for fault in faults(index, whole=True):
        found.append(fault)
        if not as_json:
            print(f"bad:  {fault}", flush=True)
    if as_json:
        print_json("shard-verification", {"ok": not found, "path": str(out), "faults": found})
    elif not found:
        count = len(index.shards)
        print(f"good: {out} ({index.tokens:,} tokens in {count} shard{'s' if count > 1 else ''})")
    return EXIT_ENVIRONMENT if found else EXIT_OK


def _verify_data(target: str, as_json: bool) -> int:
    from titancli.recipe import load_recipe
    from titancli.run.verification import verify_data
    from titancli.runs import RunFolder, timestamp

    folder = RunFolder.open(target) if RunFolder.is_run(Path(target)) else None
    recipe = load_recipe(target if folder is None else str(folder.recipe_lock)).recipe
    attempts = [] if folder is None else folder.record().get("attempts", [])
    recorded = next((one["data"] for one in reversed(attempts) if one.get("data")), None)
    said = time.monotonic()

    def report(read: int) -> None:
        nonlocal said
        if time.monotonic() - said >= NOTE_SECONDS:
            said = time.monotonic()
            note(f"{read / 1e9:,.1f} GB read")

    found = verify_data(recipe, recorded, report)
    facts = found.facts()
    if attempts and folder is not None:
        if folder.in_use():
            note(f"{folder.path} is in use, so that the date is not recorded in its run.json")
        else:
            hold = folder.hold()
            try:
                folder.update_attempt(data_verified={"time": timestamp(), **facts})
            finally:
                hold.release()
    if as_json:
        print_json("data-verification", {"target": target, **facts})
        return EXIT_ENVIRONMENT if found.faults else EXIT_OK
    for fault in found.faults:
        print(f"bad:  {fault}")
    for name in found.not_read:
        print(f"not checked: {name}")
    against = ["the record of the run"] if found.of_run else []
    against += [f"kept checksums of {found.compared:,} of them"] if found.compared else []
    words = f"{found.files:,} file{'s' if found.files != 1 else ''}, {found.bytes:,} bytes read"
    print(
        f"{'bad: ' if found.faults else 'good:'} {target} ({words}; compared with "
        f"{' and '.join(against) or 'nothing but the indexes of token shards: it is the first time'})"
    )
    return EXIT_ENVIRONMENT if found.faults else EXIT_OK


def _print_document(index: Index, number: int, folder: str | None, recipe: str | None, as_json: bool) -> None:
    from titancli.data.shards.reader import document_of

    if number >= index.documents:
        raise UsageError(f"--document {number}: there are {index.documents:,} documents, counted from 0")
    ids, shard = document_of(index, number)
    text = None
    if folder is not None or recipe is not None:
        from titancli.cli.tokenize import tokenizer_of
        from titancli.data.packing import tokenizer_identity
        from titancli.registry.component import build

        tokenizer = build(tokenizer_of(folder, recipe))
        if tokenizer_identity(tokenizer) != index.tokenizer:
            raise UsageError(
                f"the shards were written with another tokenizer: {index.tokenizer}, not "
                f"{tokenizer_identity(tokenizer)}"
            )
        text = tokenizer.decode(ids)
    if as_json:
        print_json("document", {"document": number, "shard": shard, "ids": ids, "text": text})
    elif text is None:
        print(" ".join(map(str, ids)))
    else:
        print("\n".join(map(printable, text.split("\n"))))
