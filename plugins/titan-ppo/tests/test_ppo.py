"""Advantages and losses against the formulae in NumPy, and the lines of TRL's PPOTrainer, in float64.

TRL 1.16 has no PPO any more; the lines are those of earlier versions, `trl/trainer/ppo_trainer.py` and the
masked functions that it calls.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from titan_ppo import Gae, Ppo
from titan_ppo.advantages import gae
from titan_testing import Example, check_plugin
from titancli import Batch, Sample, TitanError, build
from titancli.models import Llama3
from titancli.registry.component import build_offered

LENGTHS = [7, 3, 1, 9, 5]
"""Completions, each after a prompt of two tokens."""
WIDTH, DIM = max(LENGTHS), 6
MODEL = Llama3(dim=DIM, n_layers=1, n_heads=2, hidden_dim=8, vocab_size=16)


def drawn(seed: int = 0, **scales: float) -> dict[str, torch.Tensor]:
    """Numbers per token, [N, T], with NaN behind the end."""
    generator = torch.Generator().manual_seed(seed)
    there = torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]
    made = {name: torch.randn(there.shape, generator=generator, dtype=torch.float64) for name in scales}
    return {name: torch.where(there, x * scales[name], torch.nan) for name, x in made.items()} | {
        "there": there
    }


# ------------------------------------------------------------------------------------------- advantages


def samples_of(numbers: dict[str, torch.Tensor], scores: list[float]) -> list[Sample]:
    def placed(name: str, row: int) -> list[float]:
        return [0.0, 0.0, *numbers[name][row, : LENGTHS[row]].tolist()]

    return [
        Sample(
            tokens=[1] * (length + 2),
            mask=[0.0, 0.0, *([1.0] * length)],
            logprobs=placed("logprobs", row),
            reference=placed("reference", row),
            advantages=scores[row],
            extra={"old_values": placed("values", row)},
        )
        for row, length in enumerate(LENGTHS)
    ]


def by_definition(rewards: Any, values: Any, gamma: float, lam: float) -> Any:
    """Σ (γλ)^k δ, each sum by itself."""
    after = np.append(values[1:], 0.0)
    delta = rewards + gamma * after - values
    return np.array([sum((gamma * lam) ** k * d for k, d in enumerate(delta[t:])) for t in range(len(delta))])


def trl_lines(
    numbers: dict[str, torch.Tensor], scores: list[float], config: Gae
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns as in `PPOTrainer.train`, section 4 to 6, for answers that fill their rows:
    after others there is one more position, which has the score, and a value."""
    padding_mask = ~numbers["there"]
    values = torch.masked_fill(numbers["values"], padding_mask, 0)
    logprobs = torch.masked_fill(numbers["logprobs"], padding_mask, 1.0)
    ref_logprobs = torch.masked_fill(numbers["reference"], padding_mask, 1.0)
    kl = logprobs - ref_logprobs
    rewards = -config.kl_coef * kl
    rewards[torch.arange(len(LENGTHS)), torch.tensor(LENGTHS) - 1] += torch.tensor(scores).double()
    lastgaelam: Any = 0
    advantages_reversed = []
    gen_length = WIDTH
    for t in reversed(range(gen_length)):
        nextvalues = values[:, t + 1] if t < gen_length - 1 else 0.0
        delta = rewards[:, t] + config.gamma * nextvalues - values[:, t]
        lastgaelam = delta + config.gamma * config.lam * lastgaelam
        advantages_reversed.append(lastgaelam)
    advantages = torch.stack(advantages_reversed[::-1], axis=1)  # type: ignore[call-overload]
    returns = advantages + values
    if config.whiten:
        advantages = masked_whiten(advantages, ~padding_mask)
    return torch.masked_fill(advantages, padding_mask, 0), torch.masked_fill(returns, padding_mask, 0)


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (values * mask).sum() / mask.sum()


def masked_whiten(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """As there: the quotient of integers is float32, which is 3e-8 off."""
    mean = masked_mean(values, mask)
    variance = masked_mean((values - mean) ** 2, mask)
    mask_sum = mask.sum()
    variance = variance * (mask_sum / (mask_sum - 1))
    return (values - mean) * torch.rsqrt(variance + 1e-8)


@pytest.mark.parametrize(
    "config",
    [Gae(whiten=False), Gae(), Gae(gamma=0.9, lam=0.7, kl_coef=0.3), Gae(lam=0.0, kl_coef=0.1, whiten=False)],
    ids=str,
)
def test_advantages_are_those_of_trl_and_of_the_formulae(config: Gae) -> None:
    numbers = drawn(values=2.0, logprobs=1.0, reference=1.0)
    scores = [1.0, 0.0, -2.0, 0.5, 3.0]
    found = build(config).of_tokens(samples_of(numbers, scores), lambda x: x)
    advantages, returns = trl_lines(numbers, scores, config)
    by_hand = []
    for row, length in enumerate(LENGTHS):
        made = {name: x[row, :length].numpy() for name, x in numbers.items()}
        rewards = -config.kl_coef * (made["logprobs"] - made["reference"])
        rewards[-1] += scores[row]
        by_hand.append(by_definition(rewards, made["values"], config.gamma, config.lam))
        assert np.allclose(
            found[row].extra["returns"][2:], by_hand[-1] + made["values"], rtol=1e-12, atol=1e-12
        )
        assert np.allclose(found[row].extra["returns"][2:], returns[row, :length], rtol=1e-12, atol=1e-12)
        assert np.allclose(found[row].advantages[2:], advantages[row, :length], rtol=1e-7, atol=1e-12)  # type: ignore[index]
        assert not np.any(found[row].advantages[:2])  # type: ignore[index]
    if config.whiten:
        flat = np.concatenate(by_hand)
        whole = np.concatenate([one.advantages[2:] for one in found])  # type: ignore[index]
        assert np.allclose(whole, (flat - flat.mean()) / np.sqrt(flat.var(ddof=1) + 1e-8), rtol=1e-11)


def test_ranks_with_few_samples_or_none_have_the_same_advantages() -> None:
    """`over_ranks` is given the sums of each; a rank without samples adds 0."""
    numbers, advantage = drawn(values=2.0, logprobs=1.0, reference=1.0), build(Gae())
    samples = samples_of(numbers, [1.0, 0.0, -2.0, 0.5, 3.0])
    sums: list[list[torch.Tensor]] = []
    whole = advantage.of_tokens(samples, lambda x: sums.append([x]) or x)
    parts = [samples[:2], [], samples[2:]]
    totals = iter([one for (one,) in sums])
    again = [advantage.of_tokens(parts[0], lambda x: next(totals))]
    totals = iter([one for (one,) in sums])
    again += [advantage.of_tokens(parts[2], lambda x: next(totals))]
    assert advantage.of_tokens([], lambda x: x) == []
    for one, other in zip([*again[0], *again[1]], whole, strict=True):
        assert np.allclose(one.advantages, other.advantages, rtol=1e-12, atol=1e-14)


def test_tokens_between_turns_are_passed_over() -> None:
    """Those that the model did not write have no value."""
    config = Gae(whiten=False, gamma=0.9, lam=0.8)
    one = Sample([1] * 6, [0, 1, 0, 0, 1, 1], advantages=2.0, extra={"old_values": [9, 1, 9, 9, 3, 4]})
    (found,) = build(config).of_tokens([one], lambda x: x)
    expected = by_definition(np.array([0.0, 0.0, 2.0]), np.array([1.0, 3.0, 4.0]), 0.9, 0.8)
    assert np.allclose(found.advantages, [0, expected[0], 0, 0, *expected[1:]])
    assert gae(np.zeros((0, 0)), np.zeros((0, 0)), 1.0, 1.0).shape == (0, 0)


def test_completions_without_tokens_have_no_advantages() -> None:
    empty = Sample(
        [1, 2], [0, 0], advantages=1.0, logprobs=[0, 0], reference=[0, 0], extra={"old_values": [5, 6]}
    )
    (alone,) = build(Gae(kl_coef=0.1)).of_tokens([empty], lambda x: x)
    assert not np.any(alone.advantages) and not np.any(alone.extra["returns"])
    other = samples_of(drawn(values=2.0, logprobs=1.0, reference=1.0), [1.0, 0.0, -2.0, 0.5, 3.0])
    expected = build(Gae()).of_tokens(other, lambda x: x)
    for one, found in zip(expected, build(Gae()).of_tokens([*other, empty], lambda x: x), strict=False):
        assert np.array_equal(one.advantages, found.advantages)


# ------------------------------------------------------------------------------------------------- loss


def loss_of(config: Ppo) -> Any:
    loss = build_offered(config, model=MODEL).double()
    with torch.no_grad():
        loss.value.weight.copy_(torch.randn(1, DIM, generator=torch.Generator().manual_seed(3)).double())
        loss.value.bias.fill_(0.3)
    return loss


@pytest.mark.parametrize(
    "config",
    [
        Ppo(),
        Ppo(clip_low=0.1, clip_high=0.3, value_clip=0.05, value_coef=0.7),
        Ppo(value_clip=10.0, value_coef=0.0),
    ],
    ids=str,
)
def test_the_loss_and_its_gradients_are_those_of_trl(config: Ppo) -> None:
    given = drawn(old=0.5, new=0.5, advantages=1.0, old_values=1.0, returns=2.0)
    there = given["there"]
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(*there.shape, DIM, generator=generator, dtype=torch.float64)
    loss = loss_of(config)

    def leaves() -> tuple[torch.Tensor, torch.Tensor]:
        loss.zero_grad()
        out = torch.where(there, given["new"], 0.0)
        return out.requires_grad_(), hidden.clone().requires_grad_()

    out, states = leaves()
    batch = Batch(
        {
            "targets": torch.where(there, 1, -100),
            "hidden": states,
            "old_logprobs": given["old"],
            "entropy": torch.where(there, 1.0, 0.0),
            **{name: given[name] for name in ("advantages", "old_values", "returns")},
        }
    )
    result = loss(out, batch)
    average = result.sum / result.weight
    average.backward()
    found = [out.grad, states.grad, loss.value.weight.grad.clone(), loss.value.bias.grad.clone()]

    out, states = leaves()
    padding_mask = ~there
    zeros = {name: torch.masked_fill(x, padding_mask, 0) for name, x in given.items() if name != "there"}
    vpred = torch.masked_fill(loss.value(states)[..., 0], padding_mask, 0)
    vpredclipped = torch.clamp(
        vpred, zeros["old_values"] - config.value_clip, zeros["old_values"] + config.value_clip
    )
    vf_losses1 = torch.square(vpred - zeros["returns"])
    vf_losses2 = torch.square(vpredclipped - zeros["returns"])
    vf_loss = 0.5 * masked_mean(torch.max(vf_losses1, vf_losses2), ~padding_mask)
    logprobs_diff = out - zeros["old"]
    ratio = torch.exp(logprobs_diff)
    pg_losses = -zeros["advantages"] * ratio
    pg_losses2 = -zeros["advantages"] * torch.clamp(ratio, 1.0 - config.clip_low, 1.0 + config.clip_high)
    pg_loss = masked_mean(torch.max(pg_losses, pg_losses2), ~padding_mask)
    expected = pg_loss + config.value_coef * vf_loss
    expected.backward()
    theirs = [out.grad, states.grad, loss.value.weight.grad, loss.value.bias.grad]

    assert abs(average - expected) <= 1e-12 * abs(expected)
    for one, other in zip(found, theirs, strict=True):
        assert other is not None and one is not None
        assert (one - other).abs().max() <= 1e-9
    assert torch.isclose(result.metrics["value_loss"] / result.weight, vf_loss)
    by_hand = np.exp(given["new"].numpy() - given["old"].numpy())[there]
    a = given["advantages"].numpy()[there]
    bound = np.clip(by_hand, 1 - config.clip_low, 1 + config.clip_high)
    policy = np.maximum(-a * by_hand, -a * bound).mean()
    v, old, goal = (x.detach().numpy()[there] for x in (vpred, given["old_values"], given["returns"]))
    near = old + np.clip(v - old, -config.value_clip, config.value_clip)
    critic = 0.5 * np.maximum((v - goal) ** 2, (near - goal) ** 2).mean()
    assert np.isclose(average.item(), policy + config.value_coef * critic, rtol=1e-12)


def test_a_batch_without_targets_adds_nothing() -> None:
    loss = loss_of(Ppo())
    nothing = torch.full((2, 4), torch.nan, dtype=torch.float64)
    out = torch.zeros(2, 4, dtype=torch.float64, requires_grad=True)
    names = ("old_logprobs", "advantages", "old_values", "returns")
    batch = Batch(
        {
            "targets": torch.full((2, 4), -100),
            "hidden": torch.ones(2, 4, DIM, dtype=torch.float64),
            **dict.fromkeys(names, nothing),
        }
    )
    result = loss(out, batch)
    result.sum.backward()
    assert result.sum == 0 and result.weight == 0 and not loss.value.weight.grad.any()


def test_the_plugin_is_sound() -> None:
    def example(rows: int) -> Example:
        generator = torch.Generator().manual_seed(0)
        names = ("old_logprobs", "advantages", "old_values", "returns", "entropy")
        batch = {name: torch.rand(rows, WIDTH, generator=generator) for name in names}
        batch["hidden"] = torch.randn(rows, WIDTH, 64, generator=generator)  # of the kit's model
        batch["targets"] = torch.ones(rows, WIDTH, dtype=torch.int64)
        return Example(Batch(batch), out=-torch.rand(rows, WIDTH, generator=generator))

    check_plugin("titan-ppo", examples={"loss/ppo": example})


def test_a_model_without_a_width_is_refused() -> None:
    with pytest.raises(TitanError, match="config has no `dim`"):
        build_offered(Ppo(), model=SimpleNamespace(dim=None))


def test_it_is_sampled_at_the_generators_temperature() -> None:
    loss = build_offered(Ppo(), model=MODEL)
    loss.sampled_at(0.7)
    assert loss.temperature == 0.7
    fixed = build_offered(replace(Ppo(), temperature=1.5), model=MODEL)
    fixed.sampled_at(0.7)
    assert fixed.temperature == 1.5
