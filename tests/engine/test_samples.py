"""Lists of samples: what comes back is theirs, and the step is the same however they are dealt."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.engine.cases import LENGTH, Layout, recipe, small, whole_batch, wholes
from tests.ranks import Ranks
from titan_rl import Grpo
from titancli import Batch, Engine, LossResult, Sample, TitanError
from titancli.losses import CrossEntropy, CrossEntropyFull
from titancli.models import Llama3
from titancli.optimizers import AdamW
from titancli.recipe.schema import Training

TINY: dict[str, Any] = dict(
    dim=32, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=48, vocab_size=64, max_seq_len=512
)


def drawn(lengths: tuple[int, ...] = (5, 17, 1, 12, 2, 9, 17, 3), seed: int = 0) -> list[Sample]:
    """Samples of unequal length: some have no targets, one has a hole in its mask."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number, length in enumerate(lengths):
        tokens = torch.randint(0, 64, (length,), generator=generator).tolist()
        near = (-4.2 + 0.4 * torch.randn(2, length, generator=generator)).tolist()
        mask = [0.0] * (length // 3) + [1.0] * (length - length // 3)
        if length > 10:
            mask[length // 2] = 0.0
        found.append(Sample(tokens, mask, near[0], float(number % 3) - 1.1, reference=near[1]))
    return found


def weighted(samples: list[Sample]) -> list[Sample]:
    return [dataclasses.replace(s, mask=[m * (0.25 + i % 4) for i, m in enumerate(s.mask)]) for s in samples]


def engine_of(**parts: Any) -> Engine:
    return Engine.of(Llama3(**TINY), optimizer=AdamW(lr=1e-2, eps=1e-4), **parts)


# --------------------------------------------------------------------------------------- beside others


def test_log_probabilities_are_those_of_transformers() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    samples = drawn()
    with engine_of() as engine:
        known = LlamaConfig.from_dict(engine.hf_form.config_json())
        theirs = LlamaForCausalLM(known).eval()
        theirs.load_state_dict(dict(engine.weights()), strict=False)
        ours, trained = engine.forward(samples), engine.forward_backward(samples, "grpo")
    for sample, one, other, entropy in zip(samples, ours, trained.logprobs, trained.entropy, strict=True):
        tokens, mask = torch.tensor(sample.tokens), torch.tensor(sample.mask)
        with torch.no_grad():
            logits = theirs(tokens[None]).logits[0, :-1].float().log_softmax(-1)
        expected = torch.zeros(len(tokens))
        expected[1:] = logits.gather(1, tokens[1:, None])[:, 0] * mask[1:]
        assert one.shape == tokens.shape and one.dtype == torch.float32 and not other.requires_grad
        torch.testing.assert_close(one, expected, atol=2e-6, rtol=0)
        assert torch.equal(other, one)
        of_places = -(logits.exp() * logits).sum(-1) * mask[1:]
        torch.testing.assert_close(entropy[1:], of_places, atol=2e-6, rtol=0)


def test_gradients_and_numbers_are_those_of_plain_arithmetic() -> None:
    """Weights of targets, by the loss sft, beside NumPy; and what they weigh in GRPO's own average."""
    samples = weighted(drawn())
    with engine_of() as engine:
        log_probs = [one.numpy() for one in engine.forward(samples)]
        masks = [np.array([0.0, *s.mask[1:]]) for s in samples]
        found = engine.forward_backward(samples, "sft")
        total = sum(m.sum() for m in masks)
        expected = -sum((m * x).sum() for m, x in zip(masks, log_probs, strict=True)) / total
        assert float(found.metrics["loss"]) == pytest.approx(expected, rel=1e-6) and found.entropy is None
        engine.clear_gradients()
        metrics = engine.forward_backward(samples, Grpo(clip_high=0.3)).metrics
    means = []
    for sample, mask, own in zip(samples, masks, log_probs, strict=True):
        if mask.any():
            ratio, a = np.exp(own - np.array(sample.logprobs)), sample.advantages
            value = np.minimum(ratio * a, ratio.clip(0.8, 1.3) * a)
            means.append((mask * value).sum() / mask.sum())
    assert float(metrics["loss"]) == pytest.approx(-np.mean(means), rel=2e-6)


def clipped(log_probs: list[Tensor], samples: list[Sample]) -> LossResult:
    """GRPO as a function of all samples."""
    total, count = log_probs[0].new_zeros(()), 0
    for own, sample in zip(log_probs, samples, strict=True):
        mask = torch.tensor([0.0, *sample.mask[1:]])
        if mask.any():
            ratio, a = (own - torch.tensor(sample.logprobs)).exp(), sample.advantages
            value = torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
            total, count = total - (mask * value).sum() / mask.sum(), count + 1
    return LossResult(total, torch.tensor(float(count)), {"doubled": 2 * total.detach()})


# ------------------------------------------------------------------------------------------ on layouts

LOSSES: dict[str, Any] = {
    "grpo": Grpo(kl_coef=0.1),
    "sft": "sft",
    "full": CrossEntropyFull(),
    "of all": clipped,
}


def gradients(layout: Layout, shared: bool = True, budget: int | None = None) -> dict[str, Tensor]:
    """Gradients, metrics, and log-probabilities of samples, in two calls of one step."""
    samples, how = drawn(), {"shared": shared, "budget": budget}
    with Engine.build(recipe(layout)) as engine:
        if not shared:  # the last rank has none
            ranks = max(1, engine.dp_size - 1)
            samples = samples[engine.dp_rank :: ranks] if engine.dp_rank < ranks else []
        found: dict[str, Tensor] = {}
        for name, loss in LOSSES.items():
            result = engine.forward_backward(samples, loss, **how)
            again = engine.forward_backward(samples, loss, **how)
            found |= {f"{name} {key}": torch.as_tensor(result.metrics[key]).clone() for key in ("loss",)}
            if name == "of all":
                found["doubled"] = result.metrics["doubled"].clone()
            found |= wholes((f"{name} {key}", p.grad) for key, p in engine.named_parameters())
            found[f"{name} weight"] = engine.pending.weight.clone()
            engine.clear_gradients()
            for one, other, plain in zip(
                result.logprobs, again.logprobs, engine.forward(samples, **how), strict=True
            ):
                assert torch.equal(one, other)
                torch.testing.assert_close(one, plain, atol=1e-6, rtol=0)
            found |= {f"{name} {i}": one for i, one in enumerate(result.logprobs)} if shared else {}
            assert (result.entropy is None) == (name != "grpo")
        return found


@pytest.fixture(scope="module")
def alone(ranks: Ranks) -> dict[str, Tensor]:
    return ranks(1, gradients, small())[0]


@pytest.mark.parametrize(
    ("count", "mesh", "shared", "budget"),
    [
        (1, {}, False, LENGTH),
        (2, {"dp_shard": 2}, True, None),
        (2, {"dp_replicate": 2}, False, LENGTH),
        (4, {"dp_shard": 4}, False, None),
        (2, {"tp": 2}, True, 2 * LENGTH),
        (2, {"cp": 2}, True, None),
        (2, {"pp": 2}, True, LENGTH),
        (4, {"pp": 2, "dp_shard": 2}, False, None),
    ],
    ids=["one row", "FSDP2", "DDP2, own", "FSDP4, own", "TP2", "CP2", "PP2", "PP2xFSDP2, own"],
)
def test_a_step_is_the_same_on_every_layout_and_however_samples_are_dealt(
    ranks: Ranks,
    alone: dict[str, Tensor],
    count: int,
    mesh: dict[str, int],
    shared: bool,
    budget: int | None,
) -> None:
    found = ranks(count, gradients, small(mesh), shared, budget)
    wanted = {name for name in alone if shared or not name.split()[-1].isdigit()}
    assert set().union(*found) == wanted  # a stage has its own
    for name, value in (named for one in found for named in one.items()):
        assert (value - alone[name]).norm() <= 3e-6 * alone[name].norm() + 1e-9, name


def experts(mesh: dict[str, int]) -> dict[str, Tensor]:
    from titan_families import Mixtral
    from titancli.models.sections import MoE

    model = Mixtral(
        dim=32,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        vocab_size=64,
        moe=MoE(num_experts=4, top_k=2, hidden_dim=48),
    )
    with Engine.build(recipe(Layout(mesh, config=model))) as engine:
        engine.forward_backward(drawn(), "grpo")
        found = wholes((key, p.grad) for key, p in engine.named_parameters())
        engine.clear_gradients()
        engine.forward_backward(drawn(), clipped)
        return found | wholes((f"of all {key}", p.grad) for key, p in engine.named_parameters())


def test_experts_on_other_ranks_change_nothing(ranks: Ranks) -> None:
    one = ranks(1, experts, {})[0]
    for found in ranks(2, experts, {"dp_shard": 2, "ep": 2}):
        for name, value in one.items():
            assert (found[name] - value).norm() <= 3e-6 * value.norm() + 1e-9, name
            if name.startswith("of all "):
                assert (value - one[name[7:]]).norm() <= 3e-6 * value.norm() + 1e-9, name


# -------------------------------------------------------------------------------------------- bad input

GOOD = Sample([1, 2, 3, 4], [0, 0, 1, 1], [0, 0, -1.0, -2.0], 1.0)


def bad(**changes: Any) -> list[Sample]:
    return [GOOD, dataclasses.replace(GOOD, **changes), GOOD]


WRONG: list[tuple[list[Any], Any, str]] = [
    (bad(tokens=[]), "sft", "sample 1 has no tokens"),
    (
        bad(tokens=[1, 2, 3, 64]),
        "sft",
        "sample 1 contains the token id 64 at 3, but the model's vocab_size is 64",
    ),
    (bad(tokens=[1, -1, 3, 4]), "sft", "sample 1 contains the token id -1 at 1"),
    (bad(tokens=[1.0, 2.0, 3.0, 4.0]), "sft", "sample 1: its tokens are torch.float32"),
    (
        bad(tokens=[[1, 2], [3, 4]]),
        "sft",
        r"sample 1: its tokens must be a list of numbers, not of shape \[2, 2\]",
    ),
    (bad(tokens="abcd"), "sft", "sample 1: its tokens must be a list of numbers"),
    (bad(mask=[1.0] * 3), "sft", "sample 1: its mask has 3 numbers, but it has 4 tokens"),
    (bad(mask=[0, 0, float("nan"), 1]), "sft", "sample 1: its mask has nan at 2"),
    (bad(mask=[0, 0, -1, 1]), "sft", "sample 1: its mask has -1, but a weight must be at least 0"),
    (bad(logprobs=[-1.0]), "grpo", "sample 1: its logprobs has one number, but it has 4 tokens"),
    (bad(logprobs=[0, 0, -1.0, float("-inf")]), "grpo", "sample 1: its logprobs has -inf at 3"),
    (bad(logprobs=None), "grpo", "sample 0 has logprobs, but sample 1 has not"),
    (bad(logprobs=-1.0), "grpo", "sample 1: its logprobs must be a list of numbers, not of shape"),
    (bad(advantages=float("nan")), "grpo", "sample 1: its advantages has nan at 2"),
    (bad(advantages=[1.0, 2.0]), "grpo", "sample 1: its advantages has 2 numbers, but it has 4 tokens"),
    (bad(reference=[0.0] * 4), "grpo", "sample 1 has reference, but sample 0 has not"),
    (bad(extra={"tokens": 1.0}), "sft", "sample 1: 'tokens' cannot be a name in extra"),
    (bad(extra={"x": [1.0]}), "sft", "sample 1: its x has one number, but it has 4 tokens"),
    ([GOOD], Grpo(kl_coef=0.1), "the loss Grpo needs reference, which sample 0 has not"),
    ([GOOD, Batch({"tokens": torch.zeros(1, 4)})], "sft", "sample 1 is a Batch, not a titancli.Sample"),
    (
        [dataclasses.replace(GOOD, mask=[0, 0, 0.5, 1])],
        CrossEntropy(),
        "sample 0: its mask has other numbers",
    ),
    (
        [Sample([1] * 40, [1.0] * 40)],
        "sft",
        "sample 0 has 40 tokens, but there is room for 17",
    ),
    ([], "sft", "no batch was passed"),
    (GOOD, "sft", "a sample was passed, not a list of samples"),
]


def test_what_is_wrong_is_told_by_the_index_and_nothing_has_happened() -> None:
    with engine_of(training=Training(steps=9, seq_len=16)) as engine:
        engine.forward_backward([GOOD], "sft")
        before = [p.grad.clone() for _, p in engine.named_parameters()]
        for samples, loss, words in WRONG:
            with pytest.raises(TitanError, match=words):
                engine.forward_backward(samples, loss)
        for budget in (0, 16.0, "many"):
            with pytest.raises(TitanError, match=f"the budget {budget!r} is not a number of tokens"):
                engine.forward([GOOD], budget=budget)
        with pytest.raises(TitanError, match="sample 0 has 4 tokens, but there is room for 3") as caught:
            engine.forward([GOOD], budget=2)
        assert "budget" in str(caught.value.hint)
        with pytest.raises(TitanError, match="budget and shared are for lists of samples"):
            engine.forward_backward({"tokens": torch.ones(1, 4)}, budget=16)
        assert engine.status["accumulated"] == 1
        assert all(
            torch.equal(a, p.grad) for a, (_, p) in zip(before, engine.named_parameters(), strict=True)
        )


def one_rank_is_wrong() -> list[str]:
    """Rank 1 passes what it must not; then both what they may."""
    found, mine = [], dist.get_rank()
    with Engine.build(recipe(small({"dp_shard": 2}))) as engine:
        for samples, loss, how in (
            (bad(tokens=[1, 2, 3, 64]) if mine else [GOOD], "sft", {"shared": False}),
            (bad(mask=[1.0])[:2] if mine else [GOOD], "sft", {"shared": False}),
            (drawn()[: 2 + mine], "sft", {}),
            ([GOOD], "sft", {"shared": False} if mine else {}),
            ([GOOD], "sft", {"budget": 16 if mine else None}),
            ([GOOD], "grpo" if mine else "sft", {"shared": False}),
            ([dataclasses.replace(GOOD, logprobs=None)] if mine else [GOOD], "sft", {"shared": False}),
            ([GOOD] if mine else dict.fromkeys(("tokens", "targets"), torch.ones(1, 4).long()), "sft", {}),
            ([], "sft", {}),
        ):
            try:
                engine.forward_backward(samples, loss, **how)
                found.append("no error")
            except TitanError as error:
                found.append(str(error))
        for losses in ("sft", clipped):  # neither has a sample, then one of them
            empty = engine.forward_backward([], losses, shared=False)
            assert empty.logprobs == [] and float(empty.metrics["loss"]) == 0.0
            assert engine.forward([], shared=False) == []
            skipped = float(engine.optim_step()["skipped_steps"])
            engine.forward_backward([GOOD] * mine, losses, shared=False)
            assert float(engine.optim_step()["skipped_steps"]) == skipped
    return found


def raising(log_probs: list[Tensor], samples: list[Sample]) -> LossResult:
    raise ValueError("no such loss")


def test_every_rank_hears_of_what_one_of_them_passes(ranks: Ranks) -> None:
    first, second = ranks(2, one_rank_is_wrong)
    words = [
        "sample 1 contains the token id 64",
        "sample 1: its mask has one number",
        "samples of checksum",
        "samples of each rank",
        "with budget=16",
        "with the loss Grpo",
        "logprobs",
        "differently",
        "no batch was passed",
    ]
    for one, other, part in zip(first, second, words, strict=True):
        assert part in one and part in other, (part, one, other)


def test_a_function_that_raises_takes_the_gradients_of_the_step_with_it() -> None:
    def of_nothing(log_probs: list[Tensor], samples: list[Sample]) -> LossResult:
        return LossResult(torch.zeros(()), torch.ones(()))

    with engine_of() as engine, engine_of() as other:
        engine.forward_backward([GOOD], clipped)
        with pytest.raises(ValueError, match="no such loss"):
            engine.forward_backward([GOOD], raising)
        assert engine.status["accumulated"] == 0
        with pytest.raises(TitanError, match="the sum of the loss of_nothing has no gradient"):
            engine.forward_backward([GOOD], of_nothing)
        with pytest.raises(TitanError, match="the engine is in the middle of forward_backward"):
            engine.forward_backward([GOOD], lambda *_: engine.forward([GOOD]))
        for one in (engine, other):
            one.forward_backward(drawn(), clipped)
            one.optim_step()
        assert all(
            torch.equal(x, y) for x, y in zip(engine.forward([GOOD]), other.forward([GOOD]), strict=True)
        )


# ---------------------------------------------------------------------------------------------- the rest


class Reads:
    """A loss that reads what samples have in `extra`."""

    output = "logprobs"
    needs = ("twice",)

    def __call__(self, out: Tensor, batch: Batch) -> LossResult:
        there = batch["targets"] >= 0
        return LossResult(-(out * batch["twice"]).sum(), there.sum(), {"twice": batch["twice"].sum()})


def test_extra_numbers_reach_a_loss_and_those_beside_targets_do_not() -> None:
    samples = [
        dataclasses.replace(GOOD, extra={"twice": [9.0, float("nan"), 2.0, 3.0]}),
        dataclasses.replace(GOOD, extra={"twice": np.array([1.0, 1.0, 4.0, 5.0])}),
    ]
    with engine_of() as engine:
        assert float(engine.forward_backward(samples, Reads()).metrics["twice"]) == (2 + 3 + 4 + 5) / 4
        everywhere = [dataclasses.replace(GOOD, extra={"twice": 2})]
        assert float(engine.forward_backward(everywhere, Reads()).metrics["twice"]) == 2.0
        with pytest.raises(TitanError, match="the loss Reads needs twice, which sample 0 has not"):
            engine.forward_backward([GOOD], Reads())


def test_numbers_may_be_arrays_and_tensors_and_lists_iterators() -> None:
    arrays = Sample(np.array(GOOD.tokens), np.array(GOOD.mask), torch.tensor(GOOD.logprobs), np.float32(1.0))
    with engine_of() as engine:
        both = engine.forward_backward(iter([GOOD, arrays]), "grpo")
        assert torch.equal(*both.logprobs)
        own = dataclasses.replace(GOOD, reference=both.logprobs[0])
        assert float(engine.forward_backward([own], Grpo(kl_coef=1.0)).metrics["reference_kl"]) == 0.0


def test_a_budget_gives_micro_batches_one_shape_and_without_it_they_fit_the_samples() -> None:
    shapes: list[list[int]] = []

    class Shapes(Reads):
        needs = ()

        def __call__(self, out: Tensor, batch: Batch) -> LossResult:
            shapes.append(list(out.shape))
            return LossResult(-out.sum(), (batch["targets"] >= 0).sum())

    with engine_of(training=Training(steps=1, seq_len=128, local_batch_size=2)) as engine:
        engine.forward_backward([GOOD], Shapes())
        engine.forward_backward([GOOD] * 50, Shapes())  # 150 places: two rows
        engine.forward_backward([GOOD] * 100, Shapes())  # three rows of 126 at most
        assert shapes == [[1, 64], [2, 128], [2, 128], [2, 128]]
        shapes.clear()
        engine.forward_backward([GOOD], Shapes(), budget=300)
        engine.forward_backward([GOOD] * 100, Shapes(), budget=130)
        assert shapes == [[2, 128], *[[1, 128]] * 3]
    shapes.clear()
    with engine_of() as engine:  # nobody has said how long rows are
        engine.forward_backward([GOOD, Sample([1] * 300, [1.0] * 300, [-1.0] * 300)], Shapes())
        assert shapes == [[1, 320]]


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_a_temperature_divides_the_logits(temperature: float) -> None:
    with engine_of() as engine:
        samples = [Sample(tokens=[1, 2, 3, 4], mask=[0, 1, 1, 1]), Sample(tokens=[5, 6], mask=[0, 1])]
        found = engine.forward(samples, temperature=temperature)
        for sample, own in zip(samples, found, strict=True):
            tokens = torch.tensor([list(sample.tokens)])
            batch = Batch({"tokens": tokens, "positions": torch.arange(tokens.shape[1])[None]})
            logits = engine.forward(batch, return_logits=True)[0, :-1].float() / temperature
            expected = torch.log_softmax(logits, -1).gather(-1, tokens[0, 1:, None])[:, 0]
            torch.testing.assert_close(own[1:], expected, rtol=0, atol=2e-6)
        with pytest.raises(TitanError, match="temperature is 0, not a number above 0"):
            engine.forward(samples, temperature=0)


class Outputs:
    """A loss of hidden states, which keeps the most probable tokens."""

    output = "logprobs"
    outputs = ("topk:3", "hidden:-1")

    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}

    def __call__(self, out: Tensor, batch: Batch) -> LossResult:
        there = batch["targets"] >= 0
        self.found = {name: batch[name].detach() for name in ("topk_logprobs", "topk_ids", "hidden")}
        total = (batch["hidden"].float()[..., ::2].sum(-1) * there).sum() + 0 * out.sum()
        return LossResult(total, there.sum())


def further_outputs(mesh: dict[str, int]) -> dict[str, Tensor]:
    loss = Outputs()
    batch = whole_batch()
    with Engine.build(recipe(small(mesh))) as engine:
        loss_value = engine.forward_backward(batch, loss)["loss"].clone()
        found = wholes((f"grad {name}", p.grad) for name, p in engine.named_parameters())
        found |= {} if "pp" in mesh else loss.found  # of the last micro-batch alone
        engine.clear_gradients()
        if "hidden" in found and not mesh:
            logits = engine.forward(batch, return_logits=True).log_softmax(-1)
            best = logits.topk(3)
            torch.testing.assert_close(found["topk_logprobs"], best.values)
            assert torch.equal(found["topk_ids"], best.indices)
            rebuilt = found["hidden"] @ engine.model.output.weight.t()
            torch.testing.assert_close(rebuilt.log_softmax(-1), logits)
        by_sample = engine.forward_backward(drawn(), loss)
        return found | {"loss": loss_value, "samples": by_sample.metrics["loss"].clone()}


def odd(mesh: dict[str, int]) -> dict[str, Tensor]:
    """Everything that a loss of samples reads, with a vocabulary that two ranks do not divide."""
    layout = replace(small(mesh), model={"n_layers": 2, "vocab_size": 65})
    with Engine.build(recipe(layout)) as engine:
        result = engine.forward_backward(drawn(), Grpo(kl_coef=0.1))
        found = wholes((f"grad {name}", p.grad) for name, p in engine.named_parameters())
        engine.clear_gradients()
        loss = Outputs()
        engine.forward_backward(whole_batch(), loss)
        engine.clear_gradients()
        logits = engine.forward(whole_batch(), return_logits=True)
        return found | loss.found | {"logits": logits, "log_probs": torch.cat(result.logprobs)}


def test_two_ranks_that_do_not_divide_the_vocabulary_compute_the_same(ranks: Ranks) -> None:
    one = ranks(1, odd, {})[0]
    for found in ranks(2, odd, {"tp": 2}):
        assert found.keys() == one.keys()
        assert torch.equal(found.pop("topk_ids"), one["topk_ids"])
        for name, value in found.items():
            assert (value - one[name]).norm() <= 3e-6 * one[name].norm() + 1e-9, name


def test_a_loss_reads_the_most_probable_tokens_and_hidden_states(ranks: Ranks) -> None:
    one = ranks(1, further_outputs, {})[0]
    loss_found = {"topk_logprobs", "topk_ids", "hidden"}
    for mesh in ({"tp": 2}, {"cp": 2}, {"pp": 2}):
        both = ranks(2, further_outputs, mesh)
        assert set().union(*both) | (loss_found if "pp" in mesh else set()) == set(one)
        for name, value in (named for found in both for named in found.items()):
            if value.dtype == torch.int64:
                assert torch.equal(value, one[name]), (mesh, name)
            else:
                assert (value - one[name]).norm() <= 3e-6 * one[name].norm() + 1e-9, (mesh, name)


def test_an_output_that_a_model_does_not_have_is_refused() -> None:
    with engine_of() as engine:
        for outputs in (("topk:0",), ("topk:many",), ("hidden:3",), ("attention",)):
            loss = Outputs()
            loss.outputs = outputs
            with pytest.raises(
                TitanError, match=f"declares the output {outputs[0]!r}, which a model does not"
            ):
                engine.forward_backward([GOOD], loss)

        def of_all(log_probs: list[Tensor], samples: list[Sample]) -> LossResult:
            return clipped(log_probs, samples)

        of_all.outputs = ("topk:3",)  # type: ignore[attr-defined]
        with pytest.raises(TitanError, match="of_all is a function of samples"):
            engine.forward_backward([GOOD], of_all)


def test_a_function_has_the_temperature_that_it_declares() -> None:
    def at(temperature: float) -> Any:
        def loss(log_probs: list[Tensor], samples: list[Sample]) -> LossResult:
            return LossResult(-sum(own.square().sum() for own in log_probs), torch.ones(()))

        loss.temperature = temperature  # type: ignore[attr-defined]
        return loss

    with engine_of() as engine:
        (plain, hot) = (engine.forward_backward([GOOD], at(t)).logprobs[0] for t in (1.0, 2.0))
        tokens = torch.tensor([GOOD.tokens])
        logits = engine.forward({"tokens": tokens[:, :-1]}, return_logits=True)
        for found, temperature in ((plain, 1.0), (hot, 2.0)):
            expected = (logits[0] / temperature).log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
            torch.testing.assert_close(found[2:], expected[1:], atol=2e-6, rtol=0)
