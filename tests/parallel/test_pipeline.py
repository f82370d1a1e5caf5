"""What a pipeline does beside a training step (that is in `tests/ranks/test_same_answer.py`)."""

from __future__ import annotations

from contextlib import nullcontext
from importlib import metadata
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.engine import cases
from tests.engine.cases import ROWS, Layout, my_batches, recipe, whole, whole_batch
from tests.rows import rows
from titancli.distributed.process_group import set_timeouts
from titancli.engine import Engine
from titancli.engine.build import refuse_unfit
from titancli.engine.pipelined import SHORT
from titancli.errors import RecipeError, TitanError
from titancli.layout.degrees import Degrees
from titancli.layout.stages import SCHEDULES, StageError
from titancli.models.blocks.decoder import Decoder
from titancli.parallel.pipeline import split
from titancli.protocols.batch import Batch
from titancli.protocols.result import LossResult
from titancli.recipe.schema import Pipeline
from titancli.registry.component import completed, component

ranks_only = pytest.mark.ranks
ONE = Layout()
PLACED_ALIKE = ("GPipe", "LoopedBFS", "InterleavedZeroBubble")
"""Without gradients they do what 1F1B and Interleaved1F1B do, whose stages lie where theirs do."""
SPLIT_BACKWARD = [name for name, kind in SCHEDULES.items() if kind.splits_backward]


def pp(ranks: int = 2, schedule: str = "1F1B", **options: Any) -> Layout:
    mesh = {"pp": ranks, **options.pop("mesh", {})}
    return Layout(mesh=mesh, pipeline={"schedule": schedule, **options.pop("pipeline", {})}, **options)


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> bool:
    return float((found - expected).norm() / expected.norm().clamp(min=1e-12)) <= tolerance


# -------------------------------------------------------------------------------------------- cutting


def model(**sizes: Any) -> Decoder:
    with torch.device("meta"):
        return completed("model", Decoder(recipe(Layout(**sizes)).model))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("count", [2, 4])
def test_the_parts_of_all_ranks_are_the_model_once(schedule: str, count: int) -> None:
    names = [name for name, _ in model(model={"n_layers": 8}).named_parameters()]
    found: dict[int, list[str]] = {}
    for rank in range(count):
        parts, placement = split(model(model={"n_layers": 8}), Pipeline(schedule=schedule), count, rank)
        assert placement.rank == rank and len(parts) == len(placement.mine)
        for stage, part in zip(placement.mine, parts, strict=True):
            found[stage] = [name for name, _ in part.named_parameters()]
            assert (part.tok_embeddings is None) == (stage > 0)
            assert (part.output is None) == (part.norm is None) == (stage + 1 < len(placement))
    assert [name for stage in sorted(found) for name in found[stage]] == names


def test_parts_share_no_registry() -> None:
    (first, second), _ = split(model(), Pipeline(schedule="ZBVZeroBubble"), 2, 0)
    first.register_forward_hook(lambda *_: None)
    first.layers = first.layers
    assert not second._forward_hooks and second.layers is not first.layers


def test_tied_weights_are_refused() -> None:
    with pytest.raises(StageError, match="tied weights cannot be split into stages"):
        split(model(tied=True), Pipeline(), 2, 0)


def test_a_parameter_of_the_model_itself_is_refused() -> None:
    whole_model = model()
    whole_model.scale = torch.nn.Parameter(torch.ones(()))
    with pytest.raises(TitanError, match="Decoder cannot be split into pipeline stages"):
        split(whole_model, Pipeline(), 2, 0)


# -------------------------------------------------------------------------------------- without gradients


def forwarded(layout: Layout, rows: int = ROWS) -> tuple[Tensor, dict[str, Tensor]]:
    """log p of the first rows, and what evaluate says of them, on an engine that cannot train."""
    engine = Engine.build(recipe(layout), frozen=True)
    batch = Batch({name: tensor[:rows] for name, tensor in whole_batch().items()})
    mine = batch.split(rows // engine.mesh.degrees.dp)[engine.mesh.dp_rank]
    return engine.forward(mine).clone(), engine.evaluate([mine, mine])


@ranks_only
@pytest.mark.parametrize(
    ("count", "layout"),
    [
        *rows(
            ((2, pp(schedule=name)) for name in SCHEDULES),
            slow=[(2, pp(schedule=name)) for name in PLACED_ALIKE],
        ),
        (4, pp(4)),
        pytest.param(4, pp(mesh={"dp_shard": 2}, schedule="Interleaved1F1B"), marks=pytest.mark.slow),
        (4, pp(mesh={"tp": 2}, schedule="DualPipeV")),
        (4, pp(mesh={"cp": 2})),
        (2, pp(pipeline={"microbatch_size": 4})),
    ],
    ids=lambda value: str(value.mesh | value.pipeline) if isinstance(value, Layout) else str(value),
)
def test_forward_and_evaluate_are_those_of_one_rank_on_every_rank(ranks, count, layout) -> None:
    log_probs, scores = ranks(1, forwarded, ONE)[0]
    results = ranks(count, forwarded, layout)
    dp = layout.mesh.get("dp_shard", 1)
    for rank, (found, metrics) in enumerate(results):
        expected = log_probs.chunk(dp)[rank % dp if dp > 1 else 0]
        assert close(found, expected)
        assert close(metrics["loss"], scores["loss"]) and metrics["weight"] == scores["weight"]


@ranks_only
def test_rows_that_make_no_micro_batches_are_forwarded_in_smaller_ones(ranks) -> None:
    log_probs, _ = ranks(1, forwarded, ONE, 6)[0]
    for found, _ in ranks(2, forwarded, pp(pipeline={"microbatch_size": 4}), 6):
        assert close(found, log_probs)


# ------------------------------------------------------------------------------------------------ training


def in_calls(layout: Layout, pieces: list[int]) -> dict[str, Tensor]:
    """Two steps of gradients and weights, each step's rows in several calls; with evaluations in between."""
    engine = Engine.build(recipe(layout))
    result: dict[str, Tensor] = {}
    for step in range(2):
        batch = whole_batch(step)
        losses = []
        for piece in torch.arange(ROWS).split(pieces):
            call = Batch({name: tensor[piece] for name, tensor in batch.items()})
            mine = call.split(call.rows // engine.mesh.degrees.dp)[engine.mesh.dp_rank]
            engine.evaluate(mine)
            losses.append(engine.forward_backward(mine)["loss"].clone())
        result[f"loss {step}"] = losses[-1]
        result |= {
            f"gradient {step} {n}": whole(p.grad) / engine.pending.weight
            for n, p in engine.named_parameters()
        }
        result[f"norm {step}"] = engine.optim_step()["grad_norm"].clone()
        result |= {f"weight {step} {n}": whole(p) for n, p in engine.named_parameters()}
    return result


@ranks_only
@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param({}, id="PP2", marks=pytest.mark.slow),
        pytest.param({"dp_shard": 2}, id="PP2xFSDP2"),
        pytest.param({"dp_replicate": 2}, id="PP2xDDP2", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("schedule", rows(["1F1B", "LoopedBFS", "ZBVZeroBubble"], slow=("1F1B", "LoopedBFS")))
def test_calls_before_a_step_add_up(ranks, mesh, schedule) -> None:
    reference = ranks(1, in_calls, ONE, [4, 4])[0]
    results = ranks(4 if mesh else 2, in_calls, pp(mesh=mesh, schedule=schedule), [4, 4])
    assert set().union(*results) == reference.keys()
    for name, value in ((name, value) for result in results for name, value in result.items()):
        assert close(value, reference[name]), name


@ranks_only
@pytest.mark.parametrize("schedule", [name for name in SHORT if name != "InterleavedZeroBubble"])
def test_a_step_too_short_for_its_schedule_is_run_all_the_same(ranks, schedule) -> None:
    """As the last one before the data ends."""
    pieces = [5, 3] if schedule == "Interleaved1F1B" else [7, 1]  # 5 micro-batches make no rounds of 2 ranks
    reference = ranks(1, in_calls, ONE, pieces)[0]
    results = ranks(2, in_calls, pp(schedule=schedule), pieces)
    for name, value in ((name, value) for result in results for name, value in result.items()):
        assert close(value, reference[name]), name


@component("loss", "pairs", target=f"{__name__}:Pairs")
class PairsConfig:
    """A loss of pairs of rows, as of preferences, which reports a metric."""


class Pairs:
    output = "logprobs"

    def __init__(self, config: PairsConfig) -> None:
        pass

    def __call__(self, out: Tensor, batch: Any) -> LossResult:
        assert batch.unit == 2 and batch["margin"].shape == (out.shape[0],)
        chosen, rejected = out.sum(1).view(-1, 2).unbind(1)
        margins = chosen - rejected - batch["margin"].view(-1, 2).sum(1)
        won = (margins > 0).sum().float()
        return LossResult(
            -torch.nn.functional.logsigmoid(margins).sum(), torch.tensor(float(len(margins))), {"won": won}
        )


def pairs(layout: Layout) -> dict[str, Tensor]:
    engine = Engine.build(recipe(layout))
    batch = Batch({**whole_batch(), "margin": torch.linspace(-2, 2, ROWS)}, unit=2)
    metrics = engine.forward_backward(batch)
    gradients = {name: whole(p.grad) for name, p in engine.named_parameters()}
    return {**gradients, **{name: metrics[name].clone() for name in ("loss", "won")}}


@ranks_only
@pytest.mark.parametrize("schedule", ["1F1B", "InterleavedZeroBubble"])
def test_units_stay_together_and_every_rank_has_the_metrics(ranks, schedule) -> None:
    reference = ranks(1, pairs, Layout(loss=PairsConfig()))[0]
    results = ranks(2, pairs, pp(schedule=schedule, loss=PairsConfig(), pipeline={"microbatch_size": 2}))
    assert set().union(*results) == reference.keys()
    for result in results:
        assert {"loss", "won"} <= result.keys()
        for name, value in result.items():
            assert close(value, reference[name]), name


@ranks_only
def test_a_micro_batch_never_splits_a_unit(ranks) -> None:
    with pytest.raises(
        AssertionError,
        match=r"8 rows \(units of 2\) cannot be split into micro-batches "
        r"of 1",
    ):
        ranks(2, pairs, pp(loss=PairsConfig()))


def micro_batches(layout: Layout) -> dict[str, Tensor]:
    engine = Engine.build(recipe(layout))
    engine.forward_backward(my_batches(engine))
    return {name: whole(p.grad) for name, p in engine.named_parameters()}


@ranks_only
def test_rows_of_several_batches_make_one_micro_batch(ranks) -> None:
    reference = ranks(1, micro_batches, ONE)[0]
    for result in ranks(2, micro_batches, pp(micro_batches=8, pipeline={"microbatch_size": 2})):
        assert all(close(value, reference[name]) for name, value in result.items())


# ------------------------------------------------------------------------------------------------ the rest


def exported(layout: Layout) -> list[tuple[str, Tensor | None]]:
    engine = Engine.build(recipe(layout))
    return [(name, None if value is None else value.clone()) for name, value in engine.weights()]


@ranks_only
@pytest.mark.parametrize(
    ("count", "layout"),
    [(2, pp(schedule="DualPipeV")), (4, pp(4)), (4, pp(mesh={"dp_shard": 2})), (4, pp(mesh={"tp": 2}))],
)
def test_weights_come_whole_and_in_order_to_rank_zero(ranks, count, layout) -> None:
    reference = ranks(1, exported, ONE)[0]
    first, *others = ranks(count, exported, layout)
    assert [name for name, _ in first] == [name for name, _ in reference]
    assert all(
        torch.equal(value, expected) for (_, value), (_, expected) in zip(first, reference, strict=True)
    )
    for other in others:
        assert [name for name, _ in other] == [name for name, _ in first]
        assert all(value is None for _, value in other)


def built(layout: Layout) -> str:
    try:
        Engine.build(recipe(layout))
    except RecipeError as error:
        return str(error)
    return "built"


@ranks_only
@pytest.mark.parametrize("schedule", SPLIT_BACKWARD)
def test_what_would_spoil_gradients_is_refused_when_an_engine_is_built(ranks, schedule) -> None:
    wrong = pp(
        schedule=schedule, reshard="always", compile="aot_eager", activation_checkpoint={"mode": "full"}
    )
    for said in ranks(2, built, wrong):
        assert (
            "would lose the gradients" in said and "compiled blocks cannot" in said and "recomputed" in said
        )


def test_no_engine_is_built_with_a_schedule_that_the_torch_runs_wrongly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of = metadata.version
    for version in ("2.13.0", "2.12.0"):
        monkeypatch.setattr(metadata, "version", lambda name, v=version: v if name == "torch" else of(name))
        refused = pytest.raises(
            RecipeError, match=r"torch 2\.12\.0 cannot split backward, as ZBVZeroBubble requires"
        )
        with refused if version == "2.12.0" else nullcontext():
            refuse_unfit(recipe(pp(schedule="ZBVZeroBubble")), Degrees(dp_shard=1, pp=2))


def no_decay(layout: Layout, pattern: str) -> str:
    import dataclasses

    from titancli.optimizers import AdamW

    changed = dataclasses.replace(recipe(layout), optimizer=AdamW(no_decay=[pattern]))
    engine = Engine.build(changed)
    return " ".join(str(len(group["params"])) for group in engine.optimizer.param_groups)


@ranks_only
def test_a_pattern_may_match_on_another_stage(ranks) -> None:
    first, second = ranks(2, no_decay, pp(), "output.weight")
    assert len(first.split()) == 1 and second.split()[-1] == "1"
    assert all(len(sizes.split()) == 1 for sizes in ranks(2, no_decay, pp(), "putout.*"))


def the_whole_model() -> str:
    engine = Engine.build(recipe(pp()))
    with pytest.raises(TitanError, match=r"mesh\.pp is not 1"):
        engine.model  # noqa: B018
    return f"{engine.parameter_count} {engine.flops_per_token} {dist.get_rank()}"


@ranks_only
def test_figures_are_of_the_whole_model(ranks) -> None:
    one = ranks(1, cases.initial_weights, ONE)[0]
    first, second = ranks(2, the_whole_model)
    assert first.split()[:2] == second.split()[:2] and first.split()[0] == str(
        sum(w.numel() for w in one.values())
    )


class Refusing:
    """A schedule in which a stage raises, in torch's wrapping."""

    def step(self, **batch: Any) -> None:
        try:
            raise TitanError("this loss needs pairs")
        except TitanError as error:
            raise RuntimeError("[Stage 1] failed to run forward") from error


def refusal() -> str:
    engine = Engine.build(recipe(pp()))
    engine.runner._schedule = lambda *_: Refusing()
    with pytest.raises(TitanError) as caught:
        engine.forward_backward(my_batches(engine))
    return str(caught.value)


@ranks_only
def test_what_a_stage_refuses_is_said_in_its_own_words(ranks) -> None:
    assert ranks(2, refusal) == ["this loss needs pairs"] * 2


def too_wide() -> str:
    set_timeouts(2)
    engine = Engine.build(recipe(pp()))
    engine.runner._width += 1
    with pytest.raises(TitanError) as caught:
        engine.forward(whole_batch())
    return str(caught.value)


@ranks_only
def test_hidden_states_of_another_shape_are_not_sent(ranks) -> None:
    said, echo = ranks(2, too_wide)
    assert echo.startswith("rank 0 failed in forward: TitanError: a stage of")
    assert "returned hidden states [1, 16, 32] torch.float32, but the next stage expects [1, 16, 33]" in said
