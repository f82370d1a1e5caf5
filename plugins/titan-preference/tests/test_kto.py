"""KTO: the loss against NumPy and TRL's trainer, mismatched answers against TRL's data, and bad rows."""

from __future__ import annotations

import json
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_trl_pairs import ASK, CHATML, said, tokenizer_folder

from tests.data.helpers import global_rows, make
from titan_preference import ApoZeroUnpaired, Kto, Unpaired
from titan_preference.kto import Compared, another, answers_of, mismatched
from titan_testing import check_plugin
from titancli import IGNORE, Batch, build
from titancli.data import HFTokenizer
from titancli.distributed.together import Ranks
from titancli.errors import EnvironmentProblem
from titancli.observe.metrics import collector

CASES = {
    "kto": Kto(beta=0.3, desirable_weight=1.33, undesirable_weight=0.7),
    "apo_zero_unpaired": ApoZeroUnpaired(beta=0.4, desirable_weight=0.9),
}
LENGTHS = [5, 3, 1, 7, 4]
DESIRABLE = [True, False, False, True, False]
WIDTH = 9


@pytest.fixture(autouse=True)
def nothing_reported():
    collector.drain()
    yield
    collector.drain()


def test_the_plugin_is_sound(tmp_path: Path) -> None:
    """The losses of KTO alone train in no loop but their own."""
    rows = [{"prompt": "q", "chosen": f"{i}", "rejected": f"{i + 1}"} for i in range(64)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    check_plugin(
        "titan-preference",
        configs={"dataset/preference": {"path": str(path)}},
        seq_len=48,
        skip=dict.fromkeys(("loss/kto", "loss/apo_zero_unpaired"), ("engine",)),
    )


def problem(kl: float) -> tuple[torch.Tensor, Batch]:
    """Log-probabilities, float64; of the sixth row nothing is there, and rubbish beside it."""
    generator = torch.Generator().manual_seed(0)
    rows = len(LENGTHS) + 1
    targets = torch.where(torch.arange(WIDTH) < torch.tensor([*LENGTHS, 0])[:, None], 5, IGNORE)
    out = -3 * torch.rand(rows, WIDTH, generator=generator, dtype=torch.float64) - 0.01
    out = torch.where(targets == IGNORE, 0.0, out)
    reference = out.sum(1) + 3 * torch.randn(rows, generator=generator, dtype=torch.float64)
    reference[-1] = torch.nan
    batch = {
        "targets": targets,
        "reference_row_logprobs": reference,
        "desirable": torch.tensor([*DESIRABLE, True]).float(),
        "kl": torch.tensor([kl] * len(LENGTHS) + [torch.nan], dtype=torch.float64),
    }
    return out.requires_grad_(), Batch(batch)


def by_hand(name: str, config: Kto, out: torch.Tensor, batch: Batch) -> float:
    total = 0.0
    zero = batch["kl"][0].item() if name == "kto" else 0.0
    for row, desirable in enumerate(DESIRABLE):
        ratio = (out[row].sum() - batch["reference_row_logprobs"][row]).item()
        gain = config.beta * (ratio - zero)
        weight = config.desirable_weight if desirable else config.undesirable_weight
        total += weight * (1 - 1 / (1 + np.exp(-gain if desirable else gain)))
    return total


def trls(name: str, config: Kto, out: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the mean over answers, by TRL's own function."""
    from trl.trainer.kto_trainer import KTOTrainer

    rows = len(LENGTHS)
    mask = (batch["targets"][:rows] != IGNORE).long()
    outputs = SimpleNamespace(log_probs=out[:rows], entropy=torch.zeros(rows, WIDTH))
    outputs.mean_logits = torch.zeros(rows, WIDTH)
    # Log-ratios of mismatched answers, whose mean is the divergence.
    mismatch = batch["kl"][0] + torch.tensor([1.0, -1.0, 2.0, -2.0, 0.0], dtype=torch.float64)
    them: Any = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(device="cpu", gather_for_metrics=lambda x: x),
        _compute_kl_logps=lambda model, batch: mismatch,
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        calculate_KL=name == "kto",
        loss_type=name,
        beta=config.beta,
        desirable_weight=config.desirable_weight,
        undesirable_weight=config.undesirable_weight,
        _total_train_tokens=0,
        _tp_size=1,
        _metrics={"train": defaultdict(list)},
    )
    completion = torch.cat((torch.zeros(rows, 1, dtype=torch.long), mask), 1)
    inputs = {
        "input_ids": completion,
        "attention_mask": completion,
        "completion_mask": completion,
        "label": torch.tensor(DESIRABLE),
        "ref_logps": batch["reference_row_logprobs"][:rows],
        "ref_KL_logps": torch.zeros(rows, dtype=torch.float64),
    }
    return KTOTrainer._compute_loss(them, lambda **kwargs: outputs, inputs, False)


@pytest.mark.parametrize("kl", [0.0, 1.7])
@pytest.mark.parametrize("name", CASES)
def test_a_loss_equals_numpy_and_trl_with_its_gradient(name: str, kl: float) -> None:
    out, batch = problem(kl)
    result = build(CASES[name])(out, batch)
    assert result.sum.item() == pytest.approx(by_hand(name, CASES[name], out, batch), rel=1e-12)
    assert result.weight.item() == len(LENGTHS)
    expected = trls(name, CASES[name], out, batch)
    assert (result.sum / result.weight).item() == pytest.approx(expected.item(), rel=1e-12)
    (ours,) = torch.autograd.grad(result.sum / result.weight, out)
    (theirs,) = torch.autograd.grad(expected, out)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    assert ours.abs().max() > 1e-4


def test_metrics_are_means_over_the_answers_that_they_are_of() -> None:
    out, batch = problem(1.7)
    result = build(CASES["kto"])(out, batch)
    rewards = 0.3 * (out.sum(1) - batch["reference_row_logprobs"])[:5].detach()
    right = (rewards > 0.3 * 1.7) == torch.tensor(DESIRABLE)
    assert result.metrics["reward_accuracy"] == right.sum()
    assert result.metrics["kl"].item() == pytest.approx(5 * 1.7)
    told = {name: float(reading.value) / float(reading.count) for name, reading in collector.drain().items()}
    assert told["reward_desirable"] == pytest.approx(rewards[[0, 3]].mean().item())
    assert told["reward_undesirable"] == pytest.approx(rewards[[1, 2, 4]].mean().item())


@pytest.mark.parametrize("name", CASES)
def test_no_answer_is_no_loss(name: str) -> None:
    out, batch = problem(0.5)
    none = Batch({**batch, "targets": torch.full_like(batch["targets"], IGNORE)})
    zeros = torch.zeros_like(out).requires_grad_()
    result = build(CASES[name])(zeros, none)
    (gradient,) = torch.autograd.grad(result.sum, zeros)
    assert (result.sum, result.weight) == (0, 0)
    assert not gradient.any()


# -------------------------------------------------------------------------------------- mismatched answers

ROWS: list[dict[str, Any]] = [
    {"prompt": [said("user", f"of {n}")], "completion": [said("assistant", text)], "label": n % 2 == 0}
    for n, text in enumerate(["return it", "no!", "the end of the document", "def", "it\n"])
]


def write(folder: Path, rows: list[dict[str, Any]]) -> str:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "rows.jsonl")


def rows_of(batch: Batch) -> list[tuple[list[int], list[int]]]:
    """Return the tokens of each row up to its last target, and its targets."""
    found = []
    for answer in answers_of(batch):
        assert answer is not None
        found.append(([*answer.prompt, *answer.tokens], answer.tokens[answer.trained].tolist()))
    return found


def test_answers_and_mismatched_answers_are_those_of_trl(tmp_path: Path) -> None:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast
    from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference, KTOTrainer

    folder = tokenizer_folder(tmp_path, CHATML)
    config = Unpaired(path=write(tmp_path, ROWS), repeat=False, shuffle=False, trailing_newline=True)
    tokenizer = build(HFTokenizer(path=folder))
    [batch] = list(make(config, tokenizer=tokenizer, seq_len=64, rows=len(ROWS)))
    [other] = mismatched([batch], Ranks(), 0, batch["tokens"].shape[1])

    args = SimpleNamespace(dataset_num_proc=None, max_length=None, per_device_train_batch_size=len(ROWS))
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    them: Any = SimpleNamespace(
        _tokenizer=theirs, calculate_KL=True, desirable_weight=1.0, undesirable_weight=1.0
    )
    made = KTOTrainer._prepare_dataset(them, Dataset.from_list(ROWS), theirs, args, "train")
    inputs = DataCollatorForUnpairedPreference(pad_token_id=0)(list(made))
    assert batch["desirable"].tolist() == inputs["label"].float().tolist()
    for ours, prefix in ((batch, ""), (other, "KL_")):
        columns = (inputs[f"{prefix}{name}"] for name in ("input_ids", "attention_mask", "completion_mask"))
        expected = [
            (ids[mask > 0].tolist(), ids[said_ > 0].tolist())
            for ids, mask, said_ in zip(*columns, strict=True)
        ]
        assert rows_of(ours) == expected


def test_a_prompt_gets_the_answer_to_another_one_if_there_is_one(tmp_path: Path) -> None:
    """Pairs give two answers to the same prompt, one after the other."""
    pairs = [{"prompt": f"q{n}", "chosen": f"yes {n}", "rejected": f"no {n}"} for n in range(3)]
    config = Unpaired(path=write(tmp_path, pairs), repeat=False, shuffle=False, pairs=True)
    [batch] = list(make(config, seq_len=32, rows=6))
    assert batch["desirable"].tolist() == [1, 0] * 3

    def said_in(some: Batch) -> list[str]:
        return [bytes(i for i in targets if i < 256).decode() for _, targets in rows_of(some)]

    assert said_in(batch) == ["yes 0", "no 0", "yes 1", "no 1", "yes 2", "no 2"]
    [other] = mismatched([batch], Ranks(), 0, batch["tokens"].shape[1])
    assert said_in(other) == ["no 2", "no 2", "no 0", "no 0", "no 1", "no 1"]
    prompts = [answer.prompt.tolist() for answer in answers_of(batch) if answer is not None]
    assert [answer.prompt.tolist() for answer in answers_of(other) if answer is not None] == prompts
    # All answers to one prompt: the one before.
    same = [answer for answer in answers_of(batch) if answer is not None][:1] * 3
    assert another(same) == [2, 0, 1]
    assert another(same[:1]) == [None]


def test_an_answer_that_does_not_fit_behind_another_prompt_is_cut(tmp_path: Path) -> None:
    rows = [
        {"prompt": "q" * 11, "completion": "a", "label": True},
        {"prompt": "q", "completion": "b" * 11, "label": False},
    ]
    config = Unpaired(path=write(tmp_path, rows), repeat=False, shuffle=False)
    [batch] = list(make(config, seq_len=29, rows=2))
    [other] = mismatched([batch], Ranks(), 0, batch["tokens"].shape[1])
    [(tokens, targets), _] = rows_of(other)
    assert len(tokens) == 30  # as many as a row holds
    assert targets == [98] * 3
    alone = Batch({name: tensor[:1] for name, tensor in batch.items()})
    [nothing] = mismatched([alone], Ranks(), 0, 29)
    assert (nothing["targets"] == IGNORE).all()


class Told:
    """An engine, or a reference, that gives each row's targets the same log-probability, by the row's
    number."""

    def __init__(self, *sums: float) -> None:
        self._sums, self.device = torch.tensor(sums, dtype=torch.float64), torch.device("cpu")
        self.mesh = SimpleNamespace(dp_group=None, dp_rank=0)
        self.loss = build(CASES["kto"])

    def call(self, verb: str) -> Any:
        return SimpleNamespace(agreed=nullcontext, given=lambda words: None)

    def forward(self, batch: Batch) -> torch.Tensor:
        there = (batch["targets"] != IGNORE).double()
        shares = self._sums[: len(there), None] / there.sum(1, keepdim=True).clamp(min=1)
        return there * shares

    log_probs = forward


@pytest.mark.parametrize("shift", [-2.0, -0.01, 0.8])
def test_the_divergence_is_never_negative(tmp_path: Path, shift: float) -> None:
    """The estimate is a mean of log-ratios, which may be below 0; TRL's, as the paper's, is 0 then."""
    config = Unpaired(path=write(tmp_path, ROWS), repeat=False, shuffle=False)
    [batch] = list(make(config, seq_len=64, rows=len(ROWS) + 1))  # the last row is empty
    assert not (batch["targets"][-1] != IGNORE).any()
    spread = torch.tensor([1.0, -1.0, 2.0, -2.0, 0.0, 9.0], dtype=torch.float64)
    engine, reference = Told(*(spread + shift).tolist()), Told(*[0.0] * 6)
    [found] = Compared(engine, reference, 64)([batch])  # type: ignore[arg-type]
    assert found["kl"].tolist() == pytest.approx([max(0.0, shift)] * 6, abs=1e-6)
    # The same number in TRL's trainer: its own clamp is applied to what `trls` gives it.
    out, given = problem(shift)
    expected = trls("kto", CASES["kto"], out, given)
    kl = torch.full_like(given["kl"], found["kl"][0].item())
    result = engine.loss(out, Batch({**given, "kl": kl}))
    assert (result.sum / result.weight).item() == pytest.approx(expected.item(), rel=1e-6)


# -------------------------------------------------------------------------------------------------- the data

GOOD = {"prompt": "q", "completion": "yes", "label": True}
BAD = {
    "no label": ({"prompt": "q", "completion": "a"}, "it has no key 'label'"),
    "a number": ({**GOOD, "label": 1}, "'label' is 1, neither true nor false"),
    "a word": ({**GOOD, "label": "good"}, "'label' is 'good', neither true nor false"),
    "no prompt": ({"completion": "a", "label": True}, "it has no key 'prompt'"),
    "a pair": ({"prompt": "q", "chosen": "a", "rejected": "b"}, "it has no key 'completion'"),
    "no answer": ({**GOOD, "completion": [said("user", "q")]}, "'completion' has no assistant message"),
    "too long": ({**GOOD, "completion": "a" * 99}, "'completion' has 117 tokens, but a row holds 33"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_told_with_file_line_and_reason(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    row, reason = BAD[name]
    path = write(tmp_path, [GOOD, row])
    [batch] = list(make(Unpaired(path=path, repeat=False), seq_len=32, rows=2))
    assert f"skipped a row: {path}, line 2: {reason}" in caplog.text
    assert (batch["targets"] != IGNORE).any(1).sum() == 1
    with pytest.raises(EnvironmentProblem, match="line 2"):
        list(make(Unpaired(path=path, repeat=False, strict=True), seq_len=32, rows=2))


FORMS: dict[str, dict[str, Any]] = {
    "messages": {"prompt": [ASK], "completion": [said("assistant", "yes")], "label": False},
    "text": {"prompt": ASK["content"], "completion": "yes", "label": False},
    "a conversation": {"completion": [ASK, said("assistant", "yes")], "label": False},
}


@pytest.mark.parametrize("form", FORMS)
def test_an_answer_is_the_same_in_all_forms(tmp_path: Path, form: str) -> None:
    config = Unpaired(path=write(tmp_path, [FORMS[form]]), repeat=False)
    [batch] = list(make(config, seq_len=64, rows=1))
    [(tokens, targets)] = rows_of(batch)
    assert bytes(i for i in targets if i < 256) == b"yes" and batch["desirable"].tolist() == [0]
    assert bytes(i for i in tokens if i < 256) == b"user\n" + ASK["content"].encode() + b"assistant\nyes"


def test_answers_are_the_same_on_any_number_of_ranks_and_over_a_resume() -> None:
    for indexed in (False, True):
        config = Unpaired(path="titan:sums_pairs", pairs=True, length_index=indexed)
        alone, _ = global_rows(config, 60, dp_size=1, rows=1, seq_len=64)
        first, state = global_rows(config, 5, dp_size=2, rows=3, seq_len=64)
        rest, _ = global_rows(config, 10, dp_size=1, rows=3, seq_len=64, state=state)
        assert first + rest == alone
