"""The cut of a model into pipeline stages."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from titancli.layout.stages import (
    AFTER,
    BEFORE,
    SCHEDULES,
    StageError,
    check_microbatches,
    cut,
    layer_counts,
    stage_ranks,
    stages_of,
)
from titancli.recipe.schema import Pipeline


def test_lighter_ends_count_as_layers() -> None:
    assert cut(Pipeline(schedule="1F1B"), 2, 6) == [
        ["tok_embeddings", "layers.0", "layers.1", "layers.2"],
        ["layers.3", "layers.4", "layers.5", "norm", "output"],
    ]


@pytest.mark.parametrize(
    ("layers", "stages", "less", "counts"),
    [
        (6, 1, (1, 1), [6]),
        (6, 4, (1, 1), [1, 2, 2, 1]),
        (6, 8, (1, 1), [0, 1, 1, 1, 1, 1, 1, 0]),
        (32, 4, (1, 1), [8, 9, 8, 7]),
        (32, 4, (0, 0), [8, 8, 8, 8]),
        (126, 16, (1, 1), [7, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 7]),
        (126, 16, (0, 2), [8] * 15 + [6]),
        (7, 3, (0, 0), [3, 2, 2]),
        (2, 2, (0, 0), [1, 1]),
    ],
)
def test_layers_are_spread_evenly_and_the_rest_goes_to_the_front(
    layers: int, stages: int, less: tuple[int, int], counts: list[int]
) -> None:
    assert layer_counts(layers, stages, *less) == counts


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pp", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("layers", [14, 32, 126])
def test_every_module_is_in_one_stage_and_in_order(schedule: Any, pp: int, layers: int) -> None:
    parts = cut(Pipeline(schedule=schedule), pp, layers)
    assert len(parts) == pp * SCHEDULES[schedule].usual_stages
    whole = [*BEFORE, *(f"layers.{i}" for i in range(layers)), *AFTER]
    assert [name for part in parts for name in part] == whole
    held = [stages_of(schedule, pp, rank, len(parts)) for rank in range(pp)]
    assert sorted(stage for mine in held for stage in mine) == list(range(len(parts)))
    assert {len(mine) for mine in held} == {SCHEDULES[schedule].usual_stages}


def test_which_rank_holds_which_stage() -> None:
    assert stage_ranks("Interleaved1F1B", 2, 6) == [0, 1, 0, 1, 0, 1]
    assert stage_ranks("DualPipeV", 4, 8) == [0, 1, 2, 3, 3, 2, 1, 0]
    assert stages_of("ZBVZeroBubble", 2, 0, 4) == [0, 3]


@pytest.mark.parametrize("end", ["first", "last"])
def test_the_most_that_an_end_can_be_lighter_is_the_most(end: str) -> None:
    for layers, stages in ((8, 4), (9, 4), (5, 2), (30, 7)):
        with pytest.raises(StageError, match="cannot be") as caught:
            layer_counts(layers, stages, **{f"{end}_less": 50})
        most = int(str(caught.value.hint).split()[1])
        layer_counts(layers, stages, **{f"{end}_less": most})
        with pytest.raises(StageError, match="cannot be"):
            layer_counts(layers, stages, **{f"{end}_less": most + 1})


def test_layers_per_stage_says_how_many_stages() -> None:
    pipeline = Pipeline(schedule="Interleaved1F1B", layers_per_stage=3)
    assert [len(part) for part in cut(pipeline, 2, 16)] == [3, 3, 3, 3, 3, 5 - 1]
    with pytest.raises(StageError, match="Interleaved1F1B cannot run 5 stages") as caught:
        cut(Pipeline(schedule="Interleaved1F1B", layers_per_stage=4), 2, 16)
    assert (caught.value.key, caught.value.hint) == ("pipeline.layers_per_stage", "use 4, 6, 8, … stages")


@pytest.mark.parametrize(
    ("pipeline", "pp", "layers", "key", "said"),
    [
        (Pipeline(), 8, 5, "mesh.pp", "5 layers are too few for 8 stages"),
        (Pipeline(schedule="LoopedBFS"), 4, 5, "mesh.pp", "5 layers are too few for 8 stages"),
        (Pipeline(first_stage_less_layers=9), 4, 8, "pipeline.first_stage_less_layers", "at most"),
        (Pipeline(last_stage_less_layers=9), 4, 8, "pipeline.last_stage_less_layers", "at most"),
        (Pipeline(layers_per_stage=1), 2, 6, "pipeline.layers_per_stage", "use 2 stages"),
        (
            Pipeline(schedule="DualPipeV", layers_per_stage=1),
            2,
            6,
            "pipeline.layers_per_stage",
            "use 4 stages",
        ),
    ],
)
def test_what_cannot_be_cut_is_told_with_what_can(
    pipeline: Pipeline, pp: int, layers: int, key: str, said: str
) -> None:
    with pytest.raises(StageError) as caught:
        cut(pipeline, pp, layers)
    assert caught.value.key == key and said in str(caught.value)


def explicit(*parts: list[str], schedule: Any = "1F1B") -> Pipeline:
    return Pipeline(schedule=schedule, module_fqns_per_model_part=list(parts))


def test_explicit_parts_are_taken_in_the_models_order() -> None:
    parts = cut(explicit(["layers.0", "tok_embeddings"], ["output", "norm", "layers.1", "layers.2"]), 2, 3)
    assert parts == [["tok_embeddings", "layers.0"], ["layers.1", "layers.2", "norm", "output"]]


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([["tok_embeddings", "layers.0"], ["norm", "output"]], "no part has layers.1"),
        ([["tok_embeddings", "layers.0"], ["layers.0", "layers.1", "norm", "output"]], "more than one part"),
        ([["tok_embeddings", "layers.0", "layers.7"], ["layers.1", "norm", "output"]], "has no layers.7"),
        ([["layers.0"], ["tok_embeddings", "layers.1", "norm", "output"]], "layers.0 comes too early"),
        ([["tok_embeddings", "layers.0", "layers.1", "norm", "output"], []], "part 1 has no modules"),
        ([["tok_embeddings"], ["layers.0", "layers.1"], ["norm", "output"]], "1F1B cannot run 3 stages"),
    ],
)
def test_explicit_parts_that_are_no_cut_of_the_model(parts: list[list[str]], said: str) -> None:
    with pytest.raises(StageError, match=said) as caught:
        cut(explicit(*parts), 2, 2)
    assert caught.value.key == "pipeline.module_fqns_per_model_part"


def test_micro_batches_that_do_not_fit_are_told_with_those_that_do() -> None:
    with pytest.raises(StageError, match="needs at least 4 micro-batches, not 3"):
        check_microbatches("1F1B", 4, 4, 3)
    with pytest.raises(StageError, match="10 or 12 micro-batches fit"):
        check_microbatches("Interleaved1F1B", 4, 8, 11)


def test_the_error_survives_a_process_boundary() -> None:
    error = pickle.loads(pickle.dumps(StageError("schedule", "no", "yes")))
    assert (error.key, error.message, error.hint) == ("schedule", "no", "yes")
