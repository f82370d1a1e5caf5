"""Pairs token for token as TRL's DPOTrainer makes them, with the line break after the end marker and
without."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.data.helpers import make
from tests.data.test_chat import lines, said
from titan_preference import Preference
from titancli.data import HFTokenizer
from titancli.errors import EnvironmentProblem, RecipeError
from titancli.protocols.batch import IGNORE
from titancli.registry.component import build

TURN = "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>"
ASKED = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = "{% for m in messages %}" + TURN + "\n{% endfor %}" + ASKED
WITHOUT_BREAK = "{% for m in messages %}" + TURN + "{% endfor %}" + ASKED

ASK = said("user", "the end of def?")
ROWS: list[dict[str, Any]] = [
    {"prompt": [ASK], "chosen": [said("assistant", "return it")], "rejected": [said("assistant", "no!")]},
    {  # empty lines at both ends, several turns
        "prompt": [said("system", "be\n"), ASK, said("assistant", "what?\n\n"), ASK],
        "chosen": [said("assistant", "the end \n\n")],
        "rejected": [said("assistant", "")],
    },
    {  # no prompt of its own
        "chosen": [ASK, said("assistant", "document")],
        "rejected": [ASK, said("assistant", "of the")],
    },
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tokenizer_folder(tmp_path, CHATML)


def tokenizer_folder(folder: Path, template: str) -> Path:
    """Make a byte-level BPE tokenizer with ChatML's markers, and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(["user assistant system\n\n def document the end of it\n" * 20], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_template(folder, template)
    return folder


def write_template(folder: Path, template: str) -> None:
    config = {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def of_titan(folder: Path, rows: list[dict[str, Any]], **fields: Any) -> list[tuple[list[int], list[int]]]:
    """Return the tokens of each answer's row, up to its last target, and its targets."""
    path = lines(folder / "pairs.jsonl", rows)
    config = Preference(path=path, repeat=False, shuffle=False, strict=True, **fields)
    [batch] = list(make(config, tokenizer=build(HFTokenizer(path=folder)), seq_len=128, rows=2 * len(rows)))
    found = []
    for tokens, targets in zip(batch["tokens"].tolist(), batch["targets"].tolist(), strict=True):
        places = [place for place, target in enumerate(targets) if target != IGNORE]
        found.append(([*tokens[: places[-1] + 1], targets[places[-1]]], [targets[at] for at in places]))
    return found


def of_trl(folder: Path, rows: list[dict[str, Any]]) -> list[tuple[list[int], list[int]]]:
    """Return the same, by TRL."""
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast
    from trl.trainer.dpo_trainer import DPOTrainer

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    args = SimpleNamespace(dataset_num_proc=None, max_length=None, truncation_mode="keep_start")
    found = []
    for row in rows:
        them: Any = SimpleNamespace(_tokenizer=tokenizer)
        [made] = list(DPOTrainer._prepare_dataset(them, Dataset.from_list([row]), tokenizer, args, "train"))
        for key in ("chosen_ids", "rejected_ids"):
            found.append((made["prompt_ids"] + made[key], made[key]))
    return found


def test_with_the_line_break_pairs_are_those_of_trl(folder: Path) -> None:
    assert of_titan(folder, ROWS, trailing_newline=True) == of_trl(folder, ROWS)


def test_without_it_they_are_those_of_trl_but_for_the_line_break(folder: Path) -> None:
    newline = build(HFTokenizer(path=folder)).encode("\n")
    expected = of_trl(folder, ROWS)
    assert all(targets[-1:] == newline for _, targets in expected)
    assert of_titan(folder, ROWS) == [(tokens[:-1], targets[:-1]) for tokens, targets in expected]


@pytest.mark.parametrize("trailing_newline", [False, True])
def test_a_template_without_one_gives_the_pairs_of_trl_either_way(
    folder: Path, trailing_newline: bool
) -> None:
    write_template(folder, WITHOUT_BREAK)
    assert of_titan(folder, ROWS, trailing_newline=trailing_newline) == of_trl(folder, ROWS)


def test_another_choice_is_another_data_set_and_needs_a_template_that_is_known(folder: Path) -> None:
    path, tokenizer = lines(folder / "pairs.jsonl", ROWS), build(HFTokenizer(path=folder))
    state = make(Preference(path=path), tokenizer=tokenizer).state_dict()
    with pytest.raises(EnvironmentProblem, match="trailing_newline was False and is True"):
        make(Preference(path=path, trailing_newline=True), tokenizer=tokenizer).load_state_dict(state)
    with pytest.raises(RecipeError, match="trailing_newline: the chat template of ByteTokenizer"):
        make(Preference(path=path, trailing_newline=True))
