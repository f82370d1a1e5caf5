"""`titan data show FILE --recipe RECIPE`: rows as a model sees them."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from tests import absent
from tests.cli.conftest import Titan
from titancli.cli.show_rows import Roles, reading
from titancli.data import FillInTheMiddle, JsonLines
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
    assert done.out.splitlines() == [
        "c.jsonl, as chat with rows of 256 tokens; messages, from `messages`",
        "",
        "row 1: 2 documents, 95 tokens, of which 13 are targets",
        " document 1",
        "  context user          12  user⏎",
        "                            3 + 4?<256>",
        "  context assistant     10  assistant⏎",
        "  target  assistant      6  7⏎",
        "                            yes<256>",
        " document 2",
        "  context system        17  system⏎",
        "                            Be short.<256>",
        "  context user          12  user⏎",
        "                            1 + 1?<256>",
        "  context assistant     10  assistant⏎",
        "  target  assistant      2  2<256>",
        "  context user          11  user⏎",
        "                            sure?<256>",
        "  context assistant     10  assistant⏎",
        "  target  assistant      5  Yes.<256>",
    ]
    done = titan("data", "show", chats, "--recipe", "sft_debug", "-n", "1", "--ids")
    assert "  target  assistant      2  2<256>\n                            50 256\n" in done.out


def test_pairs_take_two_rows_and_text_is_all_targets(titan: Titan) -> None:
    absent.need("titan-preference")
    Path("p.jsonl").write_text(json.dumps({"prompt": "3 + 4?", "chosen": "7", "rejected": "8"}) + "\n")
    out = titan("data", "show", "p.jsonl", "--recipe", "dpo_debug").out
    assert "target  assistant      2  7<256>" in out and "target  assistant      2  8<256>" in out
    assert "row 1, chosen: " in out and "row 2, rejected: " in out
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
        ([chats], 2, "name the recipe that reads them: --recipe RECIPE"),
        ([".", "--ids"], 2, "--ids goes with rows of a file"),
    ):
        done = titan("data", "show", *words)
        assert (done.code, said in " ".join(done.err.split())) == (code, True), done.err


def test_labels_are_shown_and_no_token_that_is_not_there(titan: Titan) -> None:
    absent.need("titan-heads", "titan-preference")
    Path("l.toml").write_text(
        'extends = "titan:llama3_debug"\n[dataset]\ntype = "labelled"\npath = "./x.jsonl"\n'
        'classes = ["no", "yes"]\n[loss]\ntype = "classification"\nclasses = ["no", "yes"]\n'
    )
    Path("l.jsonl").write_text('{"text": "rain", "label": "yes"}\n')
    done = titan("data", "show", "l.jsonl", "--recipe", "l.toml")
    assert done.out.splitlines()[2:] == [
        "row 1: 4 tokens, of which 1 is a target",
        " document 1, labels 1",
        "  context     3  rai",
        "  target      1  n",
    ]
    Path("u.toml").write_text('extends = "l.toml"\n[dataset]\ntype = "unpaired"\npath = "./x.jsonl"\n')
    Path("u.jsonl").write_text('{"prompt": "3 + 4?", "completion": "7", "label": true}\n')
    assert "2 are targets, desirable 1" in titan("data", "show", "u.jsonl", "--recipe", "u.toml").out


def test_a_message_without_a_boundary_shares_the_roles_of_the_next() -> None:
    class Thinking(ByteTokenizer):
        """Puts a thought before the last answer."""

        def chat(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
            *before, last = messages
            if last["role"] == "assistant":
                return super().chat(before) + list(b"think") + super().chat([last])
            return super().chat(messages)

    tokenizer = Thinking()
    roles = Roles(tokenizer)
    talk = [{"role": role, "content": role[0]} for role in ("user", "assistant", "user", "assistant")]
    ids = tokenizer.chat(talk)
    found = [(role, len(list(run))) for role, run in groupby(roles.of(ids[:-1]))]
    assert found == [("user", 7), ("assistant+user", 19), ("assistant", 16)]
    assert set(roles.of([1, 2])) == {""}


def test_middles_are_filled_in_as_in_training(tmp_path: Path) -> None:
    fim = FillInTheMiddle(prefix="a", middle="b", suffix="c")
    config: Any = JsonLines(paths=[tmp_path], packing="best_fit", cache_tokens=True, fim=fim)
    read = reading(config, tmp_path)
    assert read.cache_tokens and read.fim == fim and not read.shuffle
    assert not reading(JsonLines(paths=[tmp_path], cache_tokens=True), tmp_path).cache_tokens


def test_special_tokens_have_names() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode_special([104, 256, 256, 105, 300]) == "h<256><256>i<300>"


def test_check_all_rows(titan: Titan, chats: str) -> None:
    done = titan("data", "show", chats, "--recipe", "sft_debug", "--check", "--strict")
    assert done.code == 0, done.err
    assert done.out.splitlines() == [f"checked 2 rows of {chats}: no findings"]
    with open(chats, "a") as file:
        file.write('{"messages": [{"role": "user", "content": "a"}]}\n' * 3)
        file.write(json.dumps({"messages": [{"role": "assistant", "content": "a" * 300}]}) + "\n")
    lines = [
        f"checked 6 rows of {chats}:",
        f"3 of 6 rows: {Path(chats).absolute()}, line 3: it is skipped: it has no assistant message",
        f"1 of 6 rows: {Path(chats).absolute()}, line 6: it is truncated: it has 311 tokens, and a row holds "
        "257 (training.seq_len)",
    ]
    for more, code in ((), 0), (("--strict",), 5):
        done = titan("data", "show", chats, "--recipe", "sft_debug", "--check", *more)
        assert (done.code, done.out.splitlines()) == (code, lines)


def test_check_needs_conversations(titan: Titan, chats: str) -> None:
    dataset = "[dataset]\ntype = 'jsonl'\npaths = ['c.jsonl']\ntext = 'messages'\n"
    Path("text.toml").write_text(f"extends = 'titan:llama3_debug'\n{dataset}")
    done = titan("data", "show", chats, "--recipe", "text.toml", "--check")
    assert done.code == 2 and "does not read conversations or pairs" in done.err
    done = titan("data", "show", chats, "--recipe", "sft_debug", "--strict")
    assert done.code == 2 and "--strict goes with --check" in done.err
    done = titan("data", "show", chats, "--check")
    assert done.code == 2 and "--recipe RECIPE --check" in done.err
