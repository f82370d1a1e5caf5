"""What titan writes of other people's text: the result parses to the same value, and to nothing more."""

from __future__ import annotations

import ast
import html.parser
import importlib
import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import tomli

from tests.cli.run_folders import began, event, make, step
from tests.security.test_doors import MODULES
from tests.security.writers import COMMENTS, HOSTILE, WRITERS
from titancli.recipe.toml import comment, inline
from titancli.terminal import clean, printable

UTF8 = [text for text in HOSTILE if "\ud800" not in text]
"""The texts that a file can hold."""


@pytest.mark.parametrize("row", WRITERS, ids=lambda row: row.format)
def test_rows_name_what_there_is(row: Any) -> None:
    module, _, name = row.function.partition(":")
    assert callable(getattr(importlib.import_module(module), name))
    for pattern in row.modules.split():
        assert any(fnmatchcase(known, pattern) for known in MODULES), pattern


def test_every_comment_goes_through_its_function() -> None:
    """A text with values that begins as a comment is made by `comment`, or its module is listed with a
    reason."""
    found = set()
    for name, tree in MODULES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr) and any(
                isinstance(part, ast.Constant)
                and str(part.value).lstrip("\n ").startswith(("# ", "## ", "#:"))
                for part in node.values
            ):
                found.add(name)
    assert found <= COMMENTS.keys() | {"recipe.toml"}, found - COMMENTS.keys()


@pytest.mark.parametrize("text", HOSTILE)
def test_a_comment_is_one_comment(text: str) -> None:
    made = f"a = 1 {comment(text)}\nb = 2\n"
    assert tomli.loads(made) == {"a": 1, "b": 2}
    assert made.count("\n") == 2 and made.replace("\n", "").isprintable()


@pytest.mark.parametrize("text", UTF8)
def test_a_value_is_the_same_value(text: str) -> None:
    for value in (text, [text], {text: text}, [{"x": {text: [text]}}]):
        made = f"x = {inline(value)}\ny = 1\n"
        assert tomli.loads(made) == {"x": value, "y": 1}


@pytest.mark.parametrize("text", HOSTILE)
def test_a_terminal_is_not_steered(text: str) -> None:
    assert printable(text).isprintable()
    assert clean({text: [text]}) == {clean(text): [clean(text)]}
    assert clean(text).replace("\n", "").replace("\t", "").isprintable()


@pytest.mark.parametrize("text", HOSTILE)
def test_a_folder_adds_no_sections(text: str, tmp_path: Path) -> None:
    """`recipe new --from-hf`, from a config.json whose keys and values are a stranger's."""
    from titancli.cli.finetune import as_toml, finetune_sections
    from titancli.cli.finetune_data import Task
    from titancli.errors import TitanError
    from titancli.registry import current

    def sections(config: dict[str, Any]) -> dict[str, Any]:
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        (folder / "tokenizer.json").write_text("{}")
        (folder / "config.json").write_text(json.dumps(config))
        made = as_toml(finetune_sections(folder, "x", current(), Task("pretrain", None), None))
        return tomli.loads(made)

    llama = {
        **dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 64),
        **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 2),
        "model_type": "llama",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
    }
    plain = {name: set(table) for name, table in sections(llama).items() if isinstance(table, dict)}
    for hostile in (
        {**llama, "model_type": text},
        {**llama, "rope_scaling": {"rope_type": text}},
        {**llama, "rope_scaling": {"rope_type": "llama3", text: 1}},
        {**llama, "hidden_act": text, "dtype": text},
        {**llama, text: text, "architectures": [text]},
    ):
        try:
            made = sections(hostile)
        except TitanError as error:
            assert text not in (str(error),) or not text  # refused
            continue
        added = {"model": {"type", "config"}}
        for name, table in made.items():
            if isinstance(table, dict):
                assert set(table) <= plain.get(name, set()) | added.get(name, set())


@pytest.mark.parametrize("text", UTF8)
def test_the_converters_of_other_files(text: str) -> None:
    from titan_migrate import account
    from titan_torchtitan import job, translate

    recipe = {"name": text, "training": {"steps": 1}, "loggers": [{"type": text}]}
    remarks = [account.Remark(text, line, text, text) for line in (None, 3)]
    found = account.Translation("", [text], remarks, remarks, remarks, remarks)
    assert tomli.loads(account.as_text(text, recipe, found, text or "x")) == recipe
    theirs = [job.Remark(text, line, text, text) for line in (None, 3)]
    told = translate.Translation("", [text], theirs, theirs, theirs)
    assert tomli.loads(translate._text(recipe, Path(text.replace("\0", "") or "x"), told)) == recipe


@pytest.mark.parametrize("text", UTF8)
def test_a_model_card(text: str) -> None:
    from titan_hub.card import _fenced, _line

    assert _line(text).isprintable() and not set(_line(text)) & set("|<>`[]\\")
    first, *body, last = _fenced(f"x = {inline(text)}\n").split("\n")
    assert first.removesuffix("toml") == last and set(last) == {"`"}
    assert not any(line.lstrip().startswith(last) for line in body)
    assert tomli.loads("\n".join(body)) == {"x": text}


@pytest.mark.parametrize("text", HOSTILE)
def test_an_option_of_sbatch_is_one_line(text: str) -> None:
    from titan_slurm.jobs import _quoted
    from titancli.errors import EnvironmentProblem

    try:
        made = _quoted(text)
    except EnvironmentProblem:
        assert not text.isprintable()
        return
    assert made.isprintable()
    assert made == text or made[1:-1].replace('\\"', '"').replace("\\\\", "\\") == text


@pytest.mark.parametrize("text", HOSTILE)
def test_events_are_read_as_written(text: str, tmp_path: Path) -> None:
    from titancli.observe.events import EventLog, read_events

    log = EventLog(tmp_path / "events.jsonl")
    for message in (text, "after"):
        log.write("log", level="info", message=message)
    log.close()
    assert [found["message"] for found in read_events(tmp_path / "events.jsonl")] == [text, "after"]


class Tags(html.parser.HTMLParser):
    """The tags of a page, in order, with the names of their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, tuple[str, ...]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, tuple(name for name, _ in attrs)))


def test_a_page_has_the_same_tags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from titancli.cli import main

    def tags(name: str, text: str) -> list[tuple[str, tuple[str, ...]]]:
        messages = [event("log", 5, level="warning", message=text)]
        lock = f"name = {inline(text)}\n[model]\ntype = {inline(text)}\n"
        run = make(tmp_path / name, [began(), step(1, 5), *messages], lock=lock)
        assert main(["report", str(run), "-o", str(tmp_path / f"{name}.html")]) == 0, capsys.readouterr().err
        parser = Tags()
        parser.feed((tmp_path / f"{name}.html").read_text())
        return parser.found

    plain = tags("plain", "plain")
    for number, text in enumerate(UTF8[1:-1]):
        assert tags(str(number), text) == plain
