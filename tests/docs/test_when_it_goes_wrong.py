"""docs/when-it-goes-wrong.md: each failure is provoked, and prints what the page shows."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.docs.markdown import ROOT, Block, blocks
from tests.run.conftest import RECIPE, Command, Finished, here, in_this_process  # noqa: F401
from titancli.engine.runners import WholeModel

PAGE = ROOT / "docs" / "when-it-goes-wrong.md"
TITLES = re.findall(r"^## (.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
Titan = Callable[..., Finished]


def shown(title: str) -> list[Block]:
    """The blocks of a section."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    begin = lines.index(f"## {title}") + 1
    end = next((n for n, line in enumerate(lines, 1) if n > begin and line.startswith("## ")), len(lines))
    return [block for block in blocks(PAGE) if begin < block.line < end]


def matches(block: Block, said: str) -> None:
    """Compare what the page shows with what is printed; `…` is any text, on a line of its own any lines."""
    expected = block.text.splitlines()[1:]
    parts = [".*?" if line == "…" else re.escape(line).replace("…", "[^\\n]*") for line in expected]
    said = "\n".join(line.rstrip() for line in said.splitlines())
    found = re.search("(?:^|\n)" + "\n".join(parts), said, re.DOTALL)
    assert found, f"{PAGE.name}:{block.line} shows\n{block.text}\nprinted is\n{said}"


@pytest.fixture
def titan(here: Path, capfd: pytest.CaptureFixture[str]) -> Titan:  # noqa: F811
    (here / "mine.toml").write_text(RECIPE)
    return in_this_process(capfd)


FAULTY = ("train", "mine.toml", "-p", "./faulty.py", "--run-dir", "runs/mine", "loss=faulty")


def test_a_key(titan: Titan, here: Path) -> None:  # noqa: F811
    matches(
        shown("A key or a value is wrong")[0],
        told(titan, "validate", "llama3_debug", "training.stpes=100", "optimizer.lr=fast"),
    )


def told(titan: Titan, *arguments: str, code: int | None = None) -> str:
    """What a command prints that fails, or ends with this code."""
    done = titan(*arguments)
    assert done.code == code if code is not None else done.code != 0, done.err
    return done.out + done.err


def test_a_plugin(titan: Titan, here: Path) -> None:  # noqa: F811
    text = 'recipe = 1\nextends = "titan:llama3_debug"\n[requires]\nplugins = ["titan-lab>=0.1"]\n'
    (here / "mine.toml").write_text(text)
    matches(shown("A plugin is missing")[0], told(titan, "validate", "mine.toml", code=4))


def test_a_row(titan: Titan, here: Path) -> None:  # noqa: F811
    (here / "rows.jsonl").write_text('{"content": "a text under another key"}\n')
    data = 'dataset={type="jsonl", paths=["rows.jsonl"]}'
    matches(shown("A row lacks the field")[0], told(titan, "train", "mine.toml", data))
    text = (*data.split("}"),)
    assert (
        titan(
            "train", "mine.toml", text[0] + ', text="content"}', "training.steps=1", "training.seq_len=8"
        ).code
        == 0
    )


def test_a_tokenizer(titan: Titan) -> None:
    matches(
        shown("The tokenizer is not the model's")[0],
        told(titan, "train", "mine.toml", "model.vocab_size=128", code=5),
    )


def test_a_loss_that_does_not_fall(titan: Titan, here: Path) -> None:  # noqa: F811
    turns = [{"from": "human", "value": "What is 3 + 4?"}, {"from": "gpt", "value": "7"}]
    (here / "chats.jsonl").write_text(json.dumps({"conversations": turns}) + "\n")
    matches(
        shown("The loss does not fall")[0],
        told(titan, "data", "show", "chats.jsonl", "--recipe", "sft_debug", code=0),
    )


def test_nan(titan: Titan) -> None:
    nan = ("loss.fault=not_finite", "loss.until=100", "stability.max_skips=3", "training.steps=20")
    matches(shown("The loss is NaN")[0], told(titan, *FAULTY, *nan, code=1))


def test_out_of_memory(titan: Titan, monkeypatch: pytest.MonkeyPatch) -> None:
    first, plan = shown("Out of memory")
    calls = []
    forward = WholeModel.forward

    def full(self: Any, *arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has less")
        return forward(self, *arguments)

    monkeypatch.setattr(WholeModel, "forward", full)
    matches(
        first, told(titan, "train", "mine.toml", "training.local_batch_size=8", "training.seq_len=64", code=1)
    )
    matches(plan, told(titan, *plan.text.splitlines()[0].split()[2:], code=0))


def test_machines(titan: Titan) -> None:
    how = ("--nnodes", "2", "--run-dir", "runs/mine", "launcher.join_timeout_seconds=1")
    matches(shown("Machines do not find each other")[0], told(titan, "train", "mine.toml", *how))


def test_a_damaged_checkpoint_and_another_recipe(titan: Titan, here: Path) -> None:  # noqa: F811
    assert titan("train", "mine.toml", "--run-dir", "runs/mine").code == 0
    other = told(titan, "train", "runs/mine", "--resume", "model.dim=64", code=5)
    matches(shown("A run is resumed with another recipe")[0], other)
    file = here / "runs/mine/checkpoints/step-6/rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[5000] ^= 1
    file.write_bytes(data)
    assert titan("checkpoint", "verify", "runs/mine").code == 5
    resumed = told(titan, "train", "runs/mine", "--resume", "training.steps=8", code=0)
    matches(shown("A checkpoint is damaged")[0], resumed)


@pytest.mark.e2e
@pytest.mark.parametrize("title", ["A rank dies", "A rank hangs", "The disk is full"])
def test_of_ranks_and_of_the_kernel(here: Path, title: str) -> None:  # noqa: F811
    """In processes of their own: one ends, one waits, one may write no more."""
    (here / "mine.toml").write_text(RECIPE)
    faults = {
        "A rank dies": ("loss.fault=kill", "loss.rank=1", "--nproc", "2"),
        "A rank hangs": ("loss.fault=hang", "loss.rank=1", "--nproc", "2", "comm.train_timeout_seconds=5"),
        "The disk is full": ("loss.fault=full_disk", "loss.until=100"),
    }
    done = Command(here, *FAULTY[1:], *faults[title]).wait()
    assert done.code != 0
    matches(shown(title)[0], done.err)


def test_every_failure_of_the_page_is_provoked() -> None:
    tests = Path(__file__).read_text(encoding="utf-8")
    assert len(TITLES) >= 10
    for title in TITLES:
        assert f'"{title}"' in tests
        assert shown(title), title
