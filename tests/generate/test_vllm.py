"""Greedy completions beside vLLM's, of an exported model, where the environment that has vLLM is named."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import pytest
import torch

from titancli import Engine, SamplingParams
from titancli.models import Llama3

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from vllm_completions import Vllm

PYTHON = os.environ.get("TITAN_VLLM", "")
MAKE = "sh benchmarks/vllm_environment.sh FOLDER, then TITAN_VLLM=FOLDER/bin/python"
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
there = pytest.mark.skipif(not PYTHON, reason=f"needs the Python of an environment with vLLM: {MAKE}")


@there
@pytest.mark.needs("lscpu", install="apt install util-linux")  # by which vLLM knows the cores
@pytest.mark.parametrize("tied", [False, True])
def test_tokens_and_log_probabilities_are_those_of_vllm(tied: bool, tmp_path: Path) -> None:
    """Prompts of unequal length, more than are continued together, on both sides."""
    model = Llama3(
        dim=128,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        hidden_dim=192,
        vocab_size=272,
        max_seq_len=256,
        tied=tied,
    )
    draw = random.Random(1)
    prompts = [[draw.randrange(272) for _ in range(length)] for length in (1, 3, 17, 16, 33, 90, 5, 64)]
    with Engine.of(model) as engine:
        generator = torch.Generator().manual_seed(5)
        for name, parameter in engine.named_parameters():
            if not name.endswith("norm.weight"):  # values wide apart, so that no rounding decides a token
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
        engine.export(tmp_path / "hf")
        params = SamplingParams(max_tokens=40, temperature=0.0)
        ours = [one for (one,) in engine.sample(prompts, 1, params, batch_size=4)]
    with Vllm(PYTHON, tmp_path / "hf", together=4) as vllm:
        assert vllm.version == "0.32.0"
        theirs = vllm.complete(prompts, [40] * len(prompts))
    assert [one.tokens for one in ours] == theirs.tokens
    assert len({token for one in ours for token in one.tokens}) > 50
    for one, expected in zip(ours, theirs.logprobs, strict=True):
        assert one.logprobs == pytest.approx(expected, abs=1e-5)


def test_what_it_says_last_is_told_where_it_cannot_start(tmp_path: Path) -> None:
    """Such as by a Python that has no vLLM."""
    with pytest.raises(RuntimeError, match=r"vLLM has ended with code 1; [\s\S]*No module named 'vllm'"):
        Vllm(sys.executable, tmp_path)
