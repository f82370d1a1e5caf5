"""The losses of samples against the functions of TRL's trainers, in float64: values and gradients."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from titan_rl import Cispo, Grpo, Gspo
from titancli.protocols.batch import Batch
from titancli.registry.component import build

LENGTHS = [7, 3, 1, 9, 5]
WIDTH = max(LENGTHS)
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "grpo": (Grpo(), {"loss_type": "grpo"}),
    "grpo kl": (Grpo(kl_coef=0.3), {"loss_type": "grpo", "beta": 0.3}),
    "dapo": (
        Grpo(clip_high=0.28, length_norm="token"),
        {"loss_type": "dapo", "epsilon_high": 0.28},
    ),
    "dr. grpo": (
        Grpo(length_norm="constant", constant=11),
        {"loss_type": "dr_grpo", "max_completion_length": 11},
    ),
    "grpo dual clip": (Grpo(delta=1.5), {"loss_type": "grpo", "delta": 1.5}),
    "dapo entropy": (
        Grpo(length_norm="token", entropy_coef=0.07),
        {"loss_type": "dapo", "entropy_coef": 0.07},
    ),
    "gspo": (
        Gspo(clip_low=0.1, clip_high=0.15),
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon_low": 0.1,
            "epsilon_high": 0.15,
        },
    ),
    "cispo": (Cispo(clip_high=0.2), {"loss_type": "cispo", "epsilon_high": 1.2}),
    **{
        f"grpo {mode}": (Grpo(importance=mode, importance_max=1.3), {"loss_type": "grpo", "mode": mode})
        for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    },
}


def trainer(log_probs: torch.Tensor, entropy: torch.Tensor, fields: dict[str, Any]) -> Any:
    """What `GRPOTrainer._compute_loss` reads from its trainer."""
    values = {
        "beta": 0.0,
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "importance_sampling_level": "token",
        "entropy_coef": 0.0,
        "delta": None,
        "max_completion_length": None,
        **fields,
    }
    return SimpleNamespace(
        **values,
        args=SimpleNamespace(
            delta=values["delta"],
            use_bias_correction_kl=False,
            steps_per_generation=1,
        ),
        accelerator=SimpleNamespace(
            num_processes=1,
            sync_gradients=True,
            gather=lambda x: x,
            reduce=lambda x, reduction: x,
        ),
        current_gradient_accumulation_steps=1,
        model=SimpleNamespace(training=True),
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        use_adaptive_entropy=False,
        _entropy_bonus_enabled=values["entropy_coef"] > 0,
        use_vllm="mode" in fields,
        vllm_importance_sampling_correction="mode" in fields,
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (log_probs, entropy, None),
    )


def ratio(difference: torch.Tensor, mode: str, most: float) -> torch.Tensor:
    """As `GRPOTrainer._generate_and_score_completions` computes it, inside of a longer function."""
    if mode.startswith("sequence"):
        difference = difference.sum(-1, keepdim=True)
    found = difference.exp()
    return found.clamp(max=most) if mode.endswith("truncate") else found.masked_fill(found > most, 0.0)


def test_the_ratio_of_a_whole_sample_is_that_of_trls_rloo() -> None:
    from trl.trainer.rloo_trainer import RLOOTrainer

    generator = torch.Generator().manual_seed(4)
    mask = torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]
    out, old = (
        torch.where(mask, -2 + scale * torch.randn(mask.shape, generator=generator, dtype=torch.float64), 0.0)
        for scale in (0.1, 0.1)
    )
    advantages = torch.tensor([1.3, -0.7, 0.4, -1.1, 2.0], dtype=torch.float64)
    theirs, ours = (out.clone().requires_grad_() for _ in range(2))
    given = {
        **dict.fromkeys(("prompt_ids", "prompt_mask"), torch.zeros(len(LENGTHS), 0, dtype=torch.long)),
        "completion_ids": torch.ones_like(mask, dtype=torch.long),
        "completion_mask": mask.double(),
        "advantages": advantages,
        "old_logps": old.sum(1),
    }
    them = trainer(theirs, torch.zeros_like(out), {"epsilon_low": 0.2, "epsilon_high": 0.2})
    expected = RLOOTrainer._compute_loss(them, None, given)
    batch = {
        "targets": torch.where(mask, 5, -100),
        "advantages": advantages[:, None].expand_as(out),
        "old_logprobs": old,
    }
    result = build(Gspo(clip_low=0.2, clip_high=0.2, per_token=False))(ours, Batch(batch))
    torch.testing.assert_close(result.sum / result.weight, expected, rtol=1e-6, atol=1e-9)
    (ours_grad,) = torch.autograd.grad(result.sum / result.weight, ours)
    (theirs_grad,) = torch.autograd.grad(expected, theirs)
    torch.testing.assert_close(ours_grad, theirs_grad, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_a_loss_equals_trls(name: str) -> None:
    from trl.trainer.grpo_trainer import GRPOTrainer

    config, fields = CASES[name]
    generator = torch.Generator().manual_seed(3)

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(len(LENGTHS), WIDTH, generator=generator, dtype=torch.float64)

    mask = torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]
    out = torch.where(mask, -2 + noise(0.7), 0.0)
    entropy = torch.where(mask, 2 + noise(0.3), 0.0)
    old, reference, sampler = (torch.where(mask, out + noise(0.3), 0.0) for _ in range(3))
    advantages = torch.tensor([1.3, -0.7, 0.4, -1.1, 2.0], dtype=torch.float64)

    theirs, their_entropy = (x.clone().requires_grad_() for x in (out, entropy))
    given = {
        **dict.fromkeys(("prompt_ids", "prompt_mask"), torch.zeros(len(LENGTHS), 0, dtype=torch.long)),
        "completion_ids": torch.ones_like(mask, dtype=torch.long),
        "completion_mask": mask.double(),
        "advantages": advantages,
        "old_per_token_logps": old,
        "ref_per_token_logps": reference,
        "num_items_in_batch": mask.sum(),
    }
    if "mode" in fields:
        given["importance_sampling_ratio"] = ratio(old - sampler, fields["mode"], 1.3)
    them = trainer(theirs, their_entropy, fields)
    expected = GRPOTrainer._compute_loss(them, None, given)
    expected.backward()

    ours, our_entropy = (x.clone().requires_grad_() for x in (out, entropy))
    batch = {
        "targets": torch.where(mask, 5, -100),
        "advantages": advantages[:, None].expand_as(out),
        "old_logprobs": old,
        "reference_logprobs": reference,
        "sampler_logprobs": sampler,
        "entropy": our_entropy,
    }
    result = build(config)(ours, Batch(batch))
    found = result.sum / result.weight
    found.backward()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-6, atol=1e-9)
    if config.entropy_coef:
        torch.testing.assert_close(our_entropy.grad, their_entropy.grad, rtol=1e-6, atol=1e-9)
