"""`engine.sample`: completions of prompts, the same on every layout and in every batch."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.engine.cases import Layout, my_batches, recipe
from tests.ranks import Ranks
from tests.ranks.layouts import EIGHT
from titancli import Engine, TitanError
from titancli.data import ByteTokenizer
from titancli.protocols.samples import SamplingParams

pytestmark = pytest.mark.ranks

PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5], [35], [8, 9, 7, 9]]
PARAMS = SamplingParams(max_tokens=10, temperature=1.2, top_k=50, seed=5)


def ids(made: Any) -> list[list[list[int]]]:
    return [[one.tokens for one in row] for row in made]


def trained(layout: Layout, **more: Any) -> Engine:
    """After a step, so that weights are not those that it began with."""
    engine = Engine.build(recipe(layout, **more))
    engine.forward_backward(my_batches(engine))
    engine.optim_step()
    return engine


def on_a_layout(layout: Layout) -> tuple[Any, Any, list[float]]:
    with trained(layout) as engine:
        found = ids(engine.sample(PROMPTS, 3, PARAMS))
        again = engine.sample(PROMPTS[:2], 2, replace(PARAMS, temperature=0.0))
        loss = engine.forward_backward(my_batches(engine, 1))["loss"]
        return found, ids(again), [round(float(loss), 5)]


LAYOUTS = {
    "TP2": Layout({"tp": 2}),
    "TP2, odd vocabulary": Layout({"tp": 2}, model={"vocab_size": 65}),
    "CP2": Layout({"cp": 2}),
    "CP2, ulysses, FSDP2": Layout({"cp": 2, "dp_shard": 2}, context_parallel="ulysses"),
    "EP2": Layout({"dp_shard": 2, "ep": 2}, config=EIGHT),
    "EP2 of TP2": Layout({"tp": 2, "ep": 2}, config=EIGHT),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_draws_what_one_rank_draws(ranks: Ranks, name: str) -> None:
    layout = LAYOUTS[name]
    ((made, greedy, loss),) = ranks(1, on_a_layout, replace(layout, mesh={}))
    assert len({tuple(one) for row in made for one in row}) == 12
    world = 1
    for degree in (layout.mesh.get(key, 1) for key in ("tp", "cp", "dp_shard")):
        world *= degree
    assert ranks(world, on_a_layout, layout) == [(made, greedy, loss)] * world


def one_rank() -> dict[str, Any]:
    with trained(Layout(), seq_len=16) as engine:
        found = engine.sample(PROMPTS, 3, PARAMS)
        batches = [ids(engine.sample(PROMPTS, 3, PARAMS, batch_size=size)) for size in (1, 2, 5)]
        alone = [ids(engine.sample([prompt], 3, PARAMS))[0] for prompt in PROMPTS]
        more = ids(engine.sample(PROMPTS, 5, PARAMS))
        far = 0.0
        for prompt, row in zip(PROMPTS, found, strict=True):
            for one in row:
                text = torch.tensor([[*prompt, *one.tokens]])
                batch = {"tokens": text[:, :-1], "targets": text[:, 1:]}
                own = engine.forward(batch, temperature=PARAMS.temperature)[0, len(prompt) - 1 :]
                far = max(far, float((own - torch.tensor(one.logprobs)).abs().max()))
        facts = {(one.version, one.finish, one.text, len(one.tokens)) for row in found for one in row}
        ended = engine.sample(PROMPTS[:1], 1, replace(PARAMS, stop_ids=[found[0][0].tokens[4]]))
        return {
            "found": ids(found),
            "batches": batches,
            "alone": alone,
            "more": more,
            "far": far,
            "facts": facts,
            "ended": (ended[0][0].tokens, ended[0][0].finish),
            "nothing": engine.sample([], 2, PARAMS),
            "version": engine.version,
        }


def test_a_completion_follows_from_seed_prompt_and_number_alone(ranks: Ranks) -> None:
    (told,) = ranks(1, one_rank)
    made = told["found"]
    assert told["batches"] == [made] * 3 and told["alone"] == made
    assert [row[:3] for row in told["more"]] == made
    assert told["far"] < 1e-5, "log-probabilities are those of the model at the temperature"
    assert told["facts"] == {(told["version"], "length", "", 10)}
    first = made[0][0]
    assert told["ended"] == (first[: first.index(first[4]) + 1], "eos")
    assert told["nothing"] == []


REFUSED: list[tuple[Any, Any, str]] = [
    ([[1], []], {}, "prompt 1 is empty"),
    ([[1], [2, 64]], {}, "prompt 1 contains the token id 64, but the model's vocab_size is 64"),
    ([[-1]], {}, "prompt 0 contains the token id -1"),
    ([[1], "text"], {}, "prompt 1 is text: 'text'"),
    ([[1.5]], {}, "prompt 0 contains 1.5, which is no token id"),
    ([[1] * 65], {}, "prompt 0 has 65 tokens"),
    ([[1]], {"n": 0}, "n is 0"),
    ([[1]], {"batch_size": 0}, "batch_size is 0"),
    ([[1]], {"params": SamplingParams(stop=["a"])}, "need a tokenizer"),
]


def refusals() -> list[str]:
    found = []
    with trained(Layout(model={"max_seq_len": 64})) as engine:
        before = ids(engine.sample(PROMPTS, 1, PARAMS))
        for prompts, how, _ in REFUSED:
            try:
                engine.sample(prompts, **how)
                found.append("no error")
            except TitanError as error:
                found.append(str(error))
        assert ids(engine.sample(PROMPTS, 1, PARAMS)) == before
        with torch.no_grad():
            kept = engine.model.norm.weight.clone()
            engine.model.norm.weight.fill_(torch.nan)
        try:
            engine.sample(PROMPTS)
        except TitanError as error:
            found.append(str(error))
        with torch.no_grad():
            engine.model.norm.weight.copy_(kept)
        assert ids(engine.sample(PROMPTS, 1, PARAMS)) == before
    return found


def test_what_cannot_be_continued_is_named_and_the_engine_goes_on(ranks: Ranks) -> None:
    (found,) = ranks(1, refusals)
    for message, (_, _, words) in zip(found, REFUSED, strict=False):
        assert words in message
    assert "not finite" in found[-1]


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"max_tokens": True},
        {"stop": "a"},
        {"stop": [""]},
        {"stop_ids": [-1]},
        {"seed": -1},
    ],
    ids=str,
)
def test_an_option_out_of_its_range_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(TitanError, match=f"sampling: {next(iter(wrong))} is"):
        SamplingParams(**wrong)


def unlike(tp: int) -> tuple[str, str, Any]:
    """Rows that differ where ranks have the same; a bad prompt on one rank; other rows on each, or none."""
    with trained(Layout({"tp": 2} if tp > 1 else {"dp_shard": 2})) as engine:
        messages = []
        for prompts in (PROMPTS[dist.get_rank() :], [[1], []] if dist.get_rank() else [[1]]):
            try:
                engine.sample(prompts, 1, PARAMS)
                messages.append("")
            except TitanError as error:
                messages.append(str(error))
        made = engine.sample(PROMPTS if tp > 1 or dist.get_rank() else [], 2, PARAMS)
        return messages[0], messages[1], ids(made)


@pytest.mark.parametrize("tp", [1, 2])
def test_ranks_that_disagree_raise_together_and_go_on(ranks: Ranks, tp: int) -> None:
    first, second = ranks(2, unlike, tp)
    if tp > 1:
        assert "differently" in first[0] and "differently" in second[0]
        assert first[2] == second[2]
    else:
        assert (first[0], second[0]) == ("", "")
        assert first[2] == [] and len(second[2]) == 4
    assert "rank 1 failed in sample" in first[1] and "prompt 1 is empty" in second[1]


def with_bytes() -> dict[str, Any]:
    layout = Layout(model={"vocab_size": 300, "n_layers": 2})
    with Engine.build(replace(recipe(layout), tokenizer=ByteTokenizer())) as engine:
        prompts, params = [list(b"two"), list(b"plus")], SamplingParams(max_tokens=30, seed=2)
        free = engine.sample(prompts, 1, params)
        text = free[0][0].text
        stopped = engine.sample(prompts, 1, replace(params, stop=[text[5:8]]))[0][0]
        third = free[1][0].tokens[2]
        engine.kept = {"generation_config.json": json.dumps({"eos_token_id": [256, third]}).encode()}
        kept = engine.sample(prompts, 1, params)[1][0]
        engine.kept = {"generation_config.json": json.dumps({"eos_token_id": [third]}).encode()}
        others = engine.sample(prompts, 1, params)[1][0]
        return {
            "text": text,
            "stopped": (stopped.text, stopped.finish),
            "kept": (kept.tokens == free[1][0].tokens[: free[1][0].tokens.index(third) + 1], kept.finish),
            "others": others.tokens == free[1][0].tokens,
            "below": max(max(row[0].tokens) for row in free),
        }


def test_texts_and_all_end_markers_of_the_model_end_a_completion(ranks: Ranks) -> None:
    """A text spans tokens; markers are those of generation_config.json too, if the tokenizer's is one of
    them."""
    (told,) = ranks(1, with_bytes)
    assert told["stopped"] == (told["text"][: told["text"].index(told["text"][5:8])], "stop")
    assert told["kept"] == (True, "eos") and told["others"]
    assert told["below"] < 260
