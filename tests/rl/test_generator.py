"""The generator `local`: what it samples, and its log-probabilities beside the trainer's own forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.engine.cases import Layout, recipe
from tests.ranks import Ranks
from titancli.data.byte_tokenizer import ByteTokenizer
from titancli.engine import Engine
from titancli.errors import TitanError
from titancli.protocols.samples import Sample
from titancli.registry.component import build
from titancli.rl import Local

PROMPTS = [list(b"two plus two is"), list(b"?"), list(b"hello wor"), list(b"a")]
SEEDS = [[1, 2, 3], [4, 5], [6], [7, 8]]
LENGTH = 48


def engine_of(**mesh: int) -> Engine:
    layout = Layout(mesh=mesh, model={"vocab_size": 300, "n_layers": 2})
    return Engine.build(recipe(layout, seq_len=LENGTH, local_batch_size=4, global_batch_size=None))


def sampled(mesh: dict[str, int], mine: bool) -> dict[str, Any]:
    """Completions before a training step and after it; under data parallel those of this rank's prompts."""
    engine = engine_of(**mesh)
    first, step = (dist.get_rank() * 2, 2) if mine else (0, 4)
    prompts, seeds = PROMPTS[first : first + step], SEEDS[first : first + step]
    generator = build(
        Local(max_new_tokens=17, temperature=1.3, top_k=250, stop=["z\n"]),
        engine=engine,
        tokenizer=ByteTokenizer(),
    )
    found, worst, kl = [], 0.0, 0.0
    for _ in range(2):
        made = generator.sample(prompts, seeds, [LENGTH] * step)
        found.append([[(c.tokens, c.text, c.finish) for c in row] for row in made])
        samples = [Sample.of(p, c) for p, row in zip(prompts, made, strict=True) for c in row]
        own = engine.forward(samples, shared=False, temperature=1.3)
        pairs = zip(samples, own, strict=True)
        away = torch.cat([(torch.tensor(s.logprobs) - o)[torch.tensor(s.mask) > 0] for s, o in pairs])
        worst, kl = max(worst, away.abs().max().item()), max(kl, abs(away.mean().item()))
        engine.forward_backward(samples, shared=False)
        engine.optim_step(0.5)
    return {"found": found, "worst": worst, "kl": kl}


def test_its_log_probabilities_are_the_trainers(ranks: Ranks) -> None:
    """Ragged prompts, several samples of each, packed rows; on one rank, and on two with FSDP2, each with its
    share of the prompts."""
    (alone,) = ranks(1, sampled, {}, False)
    both = ranks(2, sampled, {"dp_shard": 2}, True)
    for one in (alone, *both):
        assert one["kl"] < 1e-6 and one["worst"] < 1e-5  # of log-probabilities around -8
    assert both[0]["found"][0] + both[1]["found"][0] == alone["found"][0]
    assert alone["found"][0] != alone["found"][1]
    texts = [made for row in alone["found"][0] for made in row]
    assert len({tuple(tokens) for tokens, _, _ in texts}) == 8
    assert all(len(tokens) == 17 or finish == "eos" for tokens, _, finish in texts)


@pytest.mark.parametrize("name", ["tp", "cp"])
def test_ranks_that_share_a_model_or_rows_sample_what_one_does(ranks: Ranks, name: str) -> None:
    (alone,) = ranks(1, sampled, {}, False)
    both = ranks(2, sampled, {name: 2}, False)
    for one in both:
        assert one["kl"] < 1e-6 and one["worst"] < 1e-5
        assert one["found"][0] == alone["found"][0]
    assert both[0]["found"] == both[1]["found"]


def test_what_is_drawn_follows_from_the_seed_and_the_prompt_alone() -> None:
    with engine_of() as engine:
        draw(engine)


def draw(engine: Engine) -> None:
    tokenizer = ByteTokenizer()
    together = build(Local(max_new_tokens=9), engine=engine, tokenizer=tokenizer)
    by_two = build(Local(max_new_tokens=9, batch_size=2), engine=engine, tokenizer=tokenizer)
    limits = [9, 9, 4, 9]
    whole = together.sample(PROMPTS, SEEDS, limits)
    tokens = [[c.tokens for c in row] for row in whole]
    assert [[c.tokens for c in row] for row in by_two.sample(PROMPTS, SEEDS, limits)] == tokens
    (alone,) = by_two.sample(PROMPTS[3:], [[8]], [9])
    assert alone[0].tokens == tokens[3][1]
    assert len(tokens[2][0]) == 4 and whole[2][0].finish == "length"
    greedy = together.sample(PROMPTS[:1], [[1, 2]], [9], greedy=True)
    assert greedy[0][0].tokens == greedy[0][1].tokens


def refused(mesh: dict[str, int]) -> str:
    with pytest.raises(TitanError) as error:
        build(Local(), engine=engine_of(**mesh), tokenizer=ByteTokenizer())
    return str(error.value)


def test_a_model_cut_into_stages_is_refused_by_name(ranks: Ranks) -> None:
    assert all("mesh.pp = 2" in words for words in ranks(2, refused, {"pp": 2, "dp_shard": 1}))
