"""titan-hub: a card has the same structure and the same metadata, whatever its texts are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tomli
import yaml

from tests.security.writers import HOSTILE, UTF8, Writer, check_comments, check_rows
from titan_hub.card import _fenced, _line, card_of
from titan_hub.source import Source
from titancli.files import utf8
from titancli.recipe import inline

WRITERS = [
    Writer("a line of Markdown", "titan_hub.card:_line", "titan_hub.card"),
    Writer("a block of Markdown", "titan_hub.card:_fenced", "titan_hub.card"),
    Writer("a model card", "titan_hub.card:card_of", "titan_hub.card titan_hub.command"),
]
COMMENTS = {"titan_hub.card": "a heading of Markdown; the header of a lock file"}


def test_what_writes_has_a_row() -> None:
    check_rows("titan_hub", WRITERS)
    check_comments("titan_hub", COMMENTS)


@pytest.mark.parametrize("text", UTF8)
def test_the_parts_of_a_card(text: str) -> None:
    assert _line(text).isprintable() and not set(_line(text)) & set("|<>`[]\\")
    first, *body, last = _fenced(f"x = {inline(text)}\n").split("\n")
    assert first.removesuffix("toml") == last and set(last) == {"`"}
    assert not any(line.lstrip().startswith(last) for line in body)
    assert tomli.loads("\n".join(body)) == {"x": text}


@pytest.mark.parametrize("text", UTF8)
def test_no_line_ends_a_block(text: str) -> None:
    markdown_it = pytest.importorskip("markdown_it")
    shown = text.replace("\0", "").replace(
        "\r", ""
    )  # CommonMark replaces the one, and ends a line at the other
    made = _fenced(f"{shown}\n")
    assert [(token.type, token.content) for token in markdown_it.MarkdownIt("commonmark").parse(made)] == [
        ("fence", f"{shown}\n")
    ]


def source(folder: Path, text: str) -> Source:
    """Make an exported folder whose config, run and recipe have these values."""
    config = {"architectures": [text, "xForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    known = utf8(text)  # a recipe is UTF-8
    recipe = {"name": known, "model": {"type": known}, "weights": f"hf://{known}", "assets": known}
    recipe |= {"converters": [{"type": known}], "dataset": {"type": "hf", "path": known}}
    attempt = {"versions": {"titancli": text}, "git": {"commit": text or "x"}, "data": {"x": text, text: 1}}
    scores = {text: {text: 2.0}}
    return Source(folder, "hf", None, 3, recipe, attempt, metrics={text: 1.0}, evaluations=scores)


def parts(card: str) -> tuple[Any, list[tuple[str, ...]], list[str]]:
    """Return the metadata of a card, its structure, and its blocks of code."""
    markdown_it = pytest.importorskip("markdown_it")
    front = re.match(r"---\n(.*?)\n---\n", card, re.DOTALL)
    assert front is not None
    tokens = markdown_it.MarkdownIt("commonmark").enable("table").parse(card[front.end() :])
    shape = [(token.type, token.tag, token.info) for token in tokens]
    shape += [(one.type, one.tag) for token in tokens for one in token.children or () if one.type != "text"]
    return yaml.safe_load(front[1]), shape, [token.content for token in tokens if token.type == "fence"]


@pytest.mark.parametrize("text", HOSTILE)
def test_a_card_has_the_same_parts(text: str, tmp_path: Path) -> None:
    plain = parts(card_of(source(tmp_path, "plain"), "mit"))
    card = card_of(source(tmp_path, text), "mit")
    meta, shape, blocks = parts(card.encode().decode())
    assert (meta, shape) == plain[:2]
    known = utf8(text)
    data, recipe = map(tomli.loads, blocks)
    assert recipe["model"] == {"type": known}
    assert data == {"x": known, known: 1}


@pytest.mark.parametrize("text", [text for text in UTF8 if text])
def test_metadata_is_the_same_value(text: str, tmp_path: Path) -> None:
    """`--license` and `--base-model`."""
    meta, _, _ = parts(card_of(source(tmp_path, "plain"), license=text, base_model=text))
    assert (meta["license"], meta["base_model"]) == (text, text)
