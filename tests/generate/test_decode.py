"""The loop: beside transformers' own, and rows together beside rows alone."""

from __future__ import annotations

import pytest
import torch

from tests.generate.models import VARIANTS, in_transformers, small, tokens
from titancli.errors import TitanError
from titancli.protocols.samples import SamplingParams
from titancli.rl.decode import Row, decode

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0)
WARM = SamplingParams(temperature=1.2, top_k=60, top_p=0.95)
PROMPTS = [tokens(1, n, seed=n)[0].tolist() for n in (5, 1, 12, 5, 8)]


def run(model, prompts, rows, sampling, *, stop: frozenset[int] = frozenset(), **how):
    """The tokens of each row; `stop` ends it."""
    made: list[list[int]] = [[] for _ in rows]

    def on_token(row: int, token: int) -> bool:
        made[row].append(token)
        return token not in stop

    decode(model, prompts, rows, sampling, on_token, device=CPU, **how)
    return made


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_equals_transformers(variant: str) -> None:
    model = small(variant)
    theirs = in_transformers(model)
    prompt = tokens(1, 11)
    made = run(model, prompt.tolist(), [Row(0, 0, 40)], GREEDY)
    with torch.no_grad():
        expected = theirs.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=40,
            pad_token_id=0,
            eos_token_id=None,
        )
    assert made[0] == expected[0, 11:].tolist()
    assert len(set(made[0])) > 8  # not one token again and again, which would show nothing


@pytest.mark.parametrize(
    ("prompts", "row", "words"),
    [
        ([[]], Row(0, 0, 1), "prompt 0 is empty"),
        (
            [[1], [2, 10**6]],
            Row(0, 0, 1),
            "prompt 1 contains the token id 1000000, but the model's vocab_size",
        ),
        ([[-1]], Row(0, 0, 1), "token id -1"),
        ([[1]], Row(1, 0, 1), "continues prompt 1 of 1"),
        ([[1]], Row(0, 0, 0), "by 0 tokens"),
        ([[1]], Row(0, 0, 10**7), r"the model's context \(max_seq_len\) is"),
    ],
)
def test_what_cannot_be_continued_is_told(prompts: list[list[int]], row: Row, words: str) -> None:
    with pytest.raises(TitanError, match=words):
        run(small(), prompts, [row], GREEDY)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_k": 0},
        {"top_k": 1.5},
        {"top_p": 0.0},
        {"top_p": 2},
    ],
)
def test_a_way_to_sample_that_is_none_is_told(settings: dict[str, float]) -> None:
    with pytest.raises(TitanError, match=f"sampling: {next(iter(settings))} is"):
        SamplingParams(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_a_row_among_others_equals_the_row_alone(sampling: SamplingParams) -> None:
    model = small()
    rows = [Row(prompt, 10 * prompt + sample, 25) for prompt in range(5) for sample in range(2)]
    together = run(model, PROMPTS, rows, sampling)
    alone = [run(model, [PROMPTS[r.prompt]], [Row(0, r.seed, 25)], sampling)[0] for r in rows]
    assert together == alone
    assert all(len(row) == 25 for row in together)
    equal = together[0] == together[1]
    assert equal == (sampling is GREEDY)


@pytest.mark.parametrize("page", [1, 5, 64])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 100])
def test_neither_batch_nor_pages_change_what_is_drawn(
    page: int, batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More completions of a prompt than are made together; prompts that are read in turn; unequal ends."""
    model = small()
    rows = [Row(n % 5, n, 3 + 5 * (n % 4)) for n in range(15)] + [Row(2, n, 12) for n in range(20, 26)]
    expected = run(model, PROMPTS, rows, WARM)
    assert [len(row) for row in expected] == [row.limit for row in rows]
    monkeypatch.setattr("titancli.models.blocks.cache.PAGE", page)
    monkeypatch.setattr("titancli.rl.decode.READ_AT_ONCE", 13)
    assert run(model, PROMPTS, rows, WARM, batch_size=batch_size) == expected


class Apart:
    """A model whose rows must begin together."""

    def __init__(self, model) -> None:
        self._model, self.config = model, model.config
        self.modules = model.modules
        self.sizes: list[int] = []

    def __call__(self, tokens, cache):
        return self._model(tokens, cache=cache)

    def new_cache(self):
        cache = self._model.new_cache()
        cache.apart, extend = True, cache.extend

        def watched(rows, counts, device):
            assert len(set(cache.table.pages)) == len(rows), "rows are left out of a call"
            assert (
                len(
                    {
                        count == 1 and cache.table.lengths[row] > 0
                        for row, count in zip(rows, counts, strict=True)
                    }
                )
                == 1
            )
            self.sizes.append(len(rows))
            return extend(rows, counts, device)

        cache.extend = watched
        return cache


def test_rows_that_must_begin_together_draw_the_same() -> None:
    rows = [Row(n % 5, n, 3 + 5 * (n % 4)) for n in range(15)]
    model = Apart(small())
    assert run(model, PROMPTS, rows, WARM, batch_size=4) == run(small(), PROMPTS, rows, WARM)
    assert max(model.sizes) == 4


def test_rows_end_at_different_times_and_leave_the_others_alone() -> None:
    model = small()
    rows = [Row(prompt, prompt, limit) for prompt, limit in enumerate([9, 25, 3, 1, 17])]
    free = run(model, PROMPTS, [Row(r.prompt, r.seed, 25) for r in rows], WARM)
    assert run(model, PROMPTS, rows, WARM) == [f[: r.limit] for f, r in zip(free, rows, strict=True)]
    stop = frozenset({free[0][4], free[1][11]})
    for found, whole in zip(
        run(model, PROMPTS, [Row(r.prompt, r.seed, 25) for r in rows], WARM, stop=stop), free, strict=True
    ):
        end = next((i + 1 for i, token in enumerate(whole) if token in stop), 25)
        assert found == whole[:end]


def test_a_limit_does_not_change_what_comes_before_it() -> None:
    model = small()
    long, short = (run(model, PROMPTS[:1], [Row(0, 3, n)], WARM)[0] for n in (30, 7))
    assert long[:7] == short


def test_ids_beyond_the_tokenizers_vocabulary_are_never_chosen() -> None:
    made = run(
        small(), PROMPTS, [Row(i, i, 40) for i in range(5)], SamplingParams(temperature=3.0), vocab_size=20
    )
    assert max(max(row) for row in made) == 19


def test_weights_that_have_diverged_are_named() -> None:
    model = small()
    with torch.no_grad():
        model.norm.weight.fill_(torch.nan)
    for sampling in (GREEDY, WARM):
        with pytest.raises(TitanError, match="not finite"):
            run(model, PROMPTS, [Row(0, 0, 3)], sampling)


def on_a_rank(ranks: int) -> list[list[int]]:
    from tests.engine.cases import Layout, recipe
    from titancli.engine import Engine

    engine = Engine.build(recipe(Layout(mesh={"dp_shard": ranks})))
    prompts = [[3, 1, 4], [1, 5, 9, 2, 6, 5]]
    return run(engine.model, prompts, [Row(0, 1, 8), Row(0, 2, 8), Row(1, 3, 8)], WARM, vocab_size=64)


@pytest.mark.ranks
def test_a_sharded_model_says_the_same(ranks) -> None:
    [alone] = ranks(1, on_a_rank, 1)
    assert ranks(2, on_a_rank, 2) == [alone, alone]
