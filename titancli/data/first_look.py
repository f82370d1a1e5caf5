"""Look at the first files of a dataset before a run starts, as code that builds it will do, with the same
errors. Torch-free.

A look is cheap however large the data are: it lists, opens and reads a bounded number of files, and stops
after some seconds. What it leaves out the run reports when it begins.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, islice
from typing import Any

from titancli.data import (
    Chat,
    HFDataset,
    JsonLines,
    Parquet,
    RowsOfExamples,
    SeveralDatasets,
    TextFiles,
    TokenShards,
    hf_look,
)
from titancli.data.compressed import Damaged
from titancli.data.files import TextFile, files_of, pieces, require_content
from titancli.data.formats import format_of, kind_of_rows, refuse_rows
from titancli.data.jsonl import BadRow, BadRows, LineReader, parse, text_of
from titancli.data.parquet_file import try_parquet
from titancli.data.row_files import row_files
from titancli.data.row_formats import SAMPLED, Names, Talk, detected, require_answer, talk_of
from titancli.data.tables import read_rows
from titancli.data.template_trial import try_template
from titancli.data.tokenizer_files import TEMPLATES
from titancli.errors import EnvironmentProblem
from titancli.files import read_json
from titancli.recipe.find import url_of
from titancli.registry.component import component_info

LISTED, OPENED, SECONDS, READ = 10_000, 64, 2.0, 256
"""Limits of a look at a dataset: files listed, files opened, the time for that, and rows read."""
Located = tuple[str, bytes | None]
"""The place of a row, as shown to users, and its JSON; None: it is too long."""
WITHOUT_TEMPLATE = ("text", "prompt_completion")
"""Formats of rows that a tokenizer without a chat template can encode."""


def look(config: Any, tokenizer: Any = None) -> None:
    """Look at the files that a dataset's config names; a plugin's own datasets are not known here.

    Args:
        tokenizer: the run's tokenizer; None: it is not known, and nothing that needs it is checked.

    Raises:
        TitanError: there is nothing to read, or it cannot be read as this dataset.
    """
    if isinstance(config, SeveralDatasets):
        for one in config.datasets.values():
            look(one, tokenizer)
    elif isinstance(config, RowsOfExamples):
        _examples(config, tokenizer)
    elif (looks := _LOOKS.get(type(config))) is not None:
        looks(config)


def _first(files: Sequence[TextFile]) -> Iterator[TextFile]:
    end = time.monotonic() + SECONDS
    for file in files[:OPENED]:
        if time.monotonic() > end:
            return
        yield file


def _require_content(label: str, files: list[TextFile]) -> None:
    if len(files) < LISTED:  # otherwise there may be more
        require_content(label, files)


def _text(config: TextFiles) -> None:
    files = files_of(config.paths, LISTED)
    if config.skip_damaged:  # all are read at the start
        return
    if config.format == "auto":
        for file in _first(files):
            refuse_rows(file.path, format_of(file.path).name)
    _require_content("dataset text_files", files)
    for file in _first(files):
        next(pieces(file, 0, 0), None)


def _rows(config: JsonLines) -> None:
    files, label = files_of(config.paths, LISTED), "dataset jsonl"
    _require_content(label, files)
    kinds = _kinds(files, skip_damaged=config.skip_damaged)
    whole = len(kinds) == len(files)
    _require_good(label, config, _read(config, kinds), partial(text_of, config=config), whole)


def _kinds(files: Sequence[TextFile], *, skip_damaged: bool) -> dict[TextFile, str]:
    """Return the formats of the first files."""
    found = {}
    for file in _first(files):
        try:
            found[file] = kind_of_rows(file.path)
        except Damaged:
            if not skip_damaged:
                raise
    return found


def _parquet(config: Parquet) -> None:
    from titancli.data.parquet import row_groups  # what a look does not need costs it nothing

    files = files_of(config.paths, LISTED)
    _require_content("dataset parquet", files)
    try_parquet(file.path for file in files[:OPENED])  # in one process
    for file in _first(files):
        row_groups(file, config.text)


def _shards(config: TokenShards) -> None:
    from titancli.data.shards import read_index

    if config.format != "titan":
        files_of((path for path in config.paths if url_of(path) is None), LISTED)
        return
    for path in config.paths:
        if url_of(path) is None:
            read_index(path)


def _hf(config: HFDataset) -> None:
    hf_look.look(config, SECONDS, column=True)


def _examples(config: RowsOfExamples, tokenizer: Any) -> None:
    files = row_files(config, LISTED)
    if files is None:
        hf_look.look(HFDataset(path=config.path, split=config.split), SECONDS, column=False)
        return
    label = f"dataset {component_info(config).name} ({config.path})"
    _require_content(label, files)
    kinds = _kinds(files, skip_damaged=config.skip_damaged)
    rows = _read(config, kinds)
    check: Callable[[bytes | None], Any] = partial(parse, max_bytes=config.max_bytes)
    if isinstance(config, Chat):
        first = list(islice(rows, SAMPLED))
        rows = chain(first, rows)
        chosen: str = config.format
        if chosen == "auto":
            if not first:
                return
            chosen = detected(((where, _parsed(data, config)) for where, data in first), Names.of(config))
        if tokenizer is not None and chosen not in WITHOUT_TEMPLATE:
            _require_template(tokenizer)
            try_template(tokenizer, _good(config, chosen, (data for _, data in first)))
        check = partial(_talk, config, chosen)
    _require_good(label, config, rows, check, len(kinds) == len(files))


def _read(config: JsonLines | RowsOfExamples, kinds: Mapping[TextFile, str]) -> Iterator[Located]:
    """Yield the rows of files, none of which is converted for that."""
    if config.skip_damaged:  # all files are read at the start
        return
    try_parquet(file.path for file, kind in kinds.items() if kind == "parquet")  # in one process
    for file, kind in kinds.items():
        if kind in ("jsonl", "text"):
            reader = LineReader([file], shuffle=False, seed=0, max_bytes=config.max_bytes)
            yield from ((reader.where(file, row), row.data) for _, row, _ in reader.in_order(None))
        else:
            for number, line in enumerate(read_rows(file, kind), 1):
                row = line.rstrip(b"\r\n")
                yield f"{file.path}, row {number}", row if len(row) <= config.max_bytes else None


def _parsed(data: bytes | None, config: RowsOfExamples) -> dict[str, Any] | BadRow:
    try:
        return parse(data, config.max_bytes)
    except BadRow as reason:
        return reason


def _talk(config: Chat, chosen: str, data: bytes | None) -> Talk:
    talk = talk_of(parse(data, config.max_bytes), chosen, Names.of(config))
    if config.train_on != "all":
        require_answer(talk)
    return talk


def _good(config: Chat, chosen: str, rows: Iterable[bytes | None]) -> Iterator[Talk]:
    for data in rows:
        with suppress(BadRow):
            yield _talk(config, chosen, data)


def _require_good(
    label: str,
    config: JsonLines | RowsOfExamples,
    rows: Iterable[Located],
    check: Callable[[bytes | None], Any],
    whole: bool,
) -> None:
    """Read rows up to the first good one; with `strict`, up to `READ` of them.

    Args:
        check: raises BadRow if a row is bad.
        whole: these are all rows of the dataset.

    Raises:
        EnvironmentProblem: a row is bad with `strict`, or there are fewer than `READ`, and none is good.
    """
    end, bad, good, number = time.monotonic() + SECONDS, "", False, 0
    for number, (where, data) in enumerate(rows, 1):
        if number > READ or time.monotonic() > end or (good and not config.strict):
            return
        try:
            check(data)
            good = True
        except BadRow as reason:
            if config.strict:
                BadRows(strict=True).log(where, reason)
            bad = bad or f": {where}: {reason}"
    if whole and number and not good:
        keys = "text" if isinstance(config, JsonLines) else "fields"
        raise EnvironmentProblem(
            f"{label} has no rows to train on{bad}",
            hint=f"correct the rows, or name the keys that they have: dataset.{keys}",
        )


def _require_template(tokenizer: Any) -> None:
    """
    Raises:
        RecipeError: the tokenizer has no chat template.
    """
    files = tokenizer.files
    if "chat_template.jinja" in files or any(name.startswith(TEMPLATES) for name in files):
        return
    with suppress(KeyError, OSError, ValueError, AttributeError):  # transformers says what is wrong
        if read_json(files["tokenizer_config.json"]).get("chat_template"):
            return
    tokenizer.chat_fingerprint  # noqa: B018 - it raises; and imports transformers


_LOOKS: dict[type, Any] = {
    TextFiles: _text,
    JsonLines: _rows,
    Parquet: _parquet,
    TokenShards: _shards,
    HFDataset: _hf,
}
