"""`titan data show FILE --recipe RECIPE`: rows as a model sees them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Titan
from titancli.data.byte_tokenizer import ByteTokenizer

CHAT = [
    [("user", "3 + 4?"), ("assistant", "7\nyes")],
    [
        ("system", "Be short."),
        ("user", "1 + 1?"),
        ("assistant", "2"),
        ("user", "sure?"),
        ("assistant", "Yes."),
    ],
]


@pytest.fixture
def chats() -> str:
    rows = [{"messages": [{"role": role, "content": text} for role, text in talk]} for talk in CHAT]
    Path("c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return "c.jsonl"


def test_documents_and_targets_of_a_packed_row_are_shown(titan: Titan, chats: str) -> None:
    done = titan("data", "show", chats, "--recipe", "sft_debug")
    assert done.code == 0, done.err
    assert done.out.splitlines()[1:] == [
        "",
        "row 1: 2 documents, 95 tokens, of which 13 are targets",
        " document 1",
        "  context    22  user⏎",
        "                 3 + 4?<256>assistant⏎",
        "  target      6  7⏎",
        "                 yes<256>",
        " document 2",
        "  context    39  system⏎",
        "                 Be short.<256>user⏎",
        "                 1 + 1?<256>assistant⏎",
        "  target      2  2<256>",
        "  context    21  user⏎",
        "                 sure?<256>assistant⏎",
        "  target      5  Yes.<256>",
    ]


def test_pairs_take_two_rows_and_text_is_all_targets(titan: Titan) -> None:
    Path("p.jsonl").write_text(json.dumps({"prompt": "3 + 4?", "chosen": "7", "rejected": "8"}) + "\n")
    out = titan("data", "show", "p.jsonl", "--recipe", "dpo_debug").out
    assert "target      2  7<256>" in out and "target      2  8<256>" in out
    Path("t.toml").write_text(
        'extends = "titan:llama3_debug"\n[dataset]\ntype = "text_files"\npaths = ["x"]\n'
    )
    Path("t.txt").write_text("rain " * 200)
    done = titan("data", "show", "t.txt", "--recipe", "t.toml", "-n", "1")
    assert "row 1: 257 tokens, of which 256 are targets" in done.out and "row 2" not in done.out


def test_what_cannot_be_shown_is_refused(titan: Titan, chats: str) -> None:
    Path("empty.jsonl").write_text("")
    for words, code, said in (
        (["empty.jsonl", "--recipe", "sft_debug"], 5, "contains no text"),
        (["nothing.jsonl", "--recipe", "sft_debug"], 5, "does not exist"),
        ([chats, "--recipe", "llama3_debug"], 2, "reads no files"),
        ([chats, "--recipe", "sft_debug", "--json"], 2, "rows of a file are shown as text"),
        ([chats, "--recipe", "grpo_digit"], 2, "grpo_digit has no dataset"),
    ):
        done = titan("data", "show", *words)
        assert (done.code, said in " ".join(done.err.split())) == (code, True), done.err


def test_special_tokens_have_names() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode_special([104, 256, 256, 105, 300]) == "h<256><256>i<300>"
