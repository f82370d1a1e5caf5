"""A layout that a model cannot be cut into is told with degrees that fit, before anything is made."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import pytest

from tests.recipe.components import TARGET, registry_of
from titancli.errors import Problem, RecipeError
from titancli.layout.degrees import near
from titancli.layout.stages import SCHEDULES
from titancli.recipe import Loaded, load_recipe
from titancli.registry.component import component
from titancli.registry.fields import Component
from titancli.run.fit import check_world


@component("model", "decoder_of_any_size", target=TARGET)
class Sizes:
    n_layers: int = 8
    n_heads: int = 32
    n_kv_heads: int = 8
    hidden_dim: int = 96
    vocab_size: int = 384
    tied: bool = False
    n_experts: int | None = None


@component("parallelize", "plan", target=TARGET)
class Plan:
    reshard_after_forward: str = "default"
    context_parallel: str = "allgather"


RECIPE = """\
[model]
type = "decoder_of_any_size"
[tokenizer]
type = "chars"
[dataset]
type = "lines"
[parallelize]
type = "plan"
[lr_scheduler]
warmup_steps = 0
[mesh]
dp_shard = 2
[training]
steps = 9
seq_len = 256
"""


def install_torch(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """As far as the metadata of installed packages say."""
    of = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: version if name == "torch" else of(name))


@pytest.fixture(autouse=True)
def a_torch_that_runs_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    install_torch(monkeypatch, "2.13.0")


@pytest.fixture
def loaded(tmp_path: Any) -> Any:
    def load(*overrides: str) -> Loaded:
        (tmp_path / "r.toml").write_text(RECIPE)
        registry = registry_of(("sizes", Sizes), ("sizes", Plan))
        return load_recipe(tmp_path / "r.toml", overrides, registry=registry)

    return load


@pytest.fixture
def told(loaded: Any) -> Any:
    def problems(*overrides: str) -> list[Problem]:
        with pytest.raises(RecipeError) as caught:
            loaded(*overrides)
        assert all(problem.location for problem in caught.value.problems)
        return caught.value.problems

    return problems


@pytest.mark.parametrize(
    ("overrides", "message", "hint"),
    [
        (
            ["mesh.tp=3"],
            "mesh.tp = 3 does not divide n_heads 32, n_kv_heads 8 and training.seq_len 256",
            "1, 2, 4 or 8 can",
        ),
        (["mesh.tp=16"], "mesh.tp = 16 does not divide n_kv_heads 8", "1, 2, 4 or 8 can"),
        (["mesh.tp=2", "model.hidden_dim=97"], "does not divide hidden_dim 97", "1 can"),
        (
            ["mesh.tp=4", "mesh.cp=4", "training.seq_len=40"],
            "mesh.tp = 4 does not divide training.seq_len / mesh.cp 10",
            "1 or 2 can",
        ),
        (["mesh.cp=3"], "mesh.cp = 3 does not divide half of training.seq_len 128", "1, 2, 4 or 8 can"),
        (["mesh.cp=2", "training.seq_len=33"], "mesh.cp needs an even training.seq_len, not 33", None),
        (
            ["mesh.cp=8", "mesh.tp=2", "parallelize.context_parallel=ulysses"],
            "mesh.cp = 8 does not divide n_kv_heads / mesh.tp 4",
            "1, 2 or 4 can",
        ),
        (["mesh.ep=2"], "mesh.ep = 2: the model has no experts", "set ep = 1"),
        (["mesh.ep=3", "model.n_experts=8"], "mesh.ep = 3 does not divide n_experts 8", "1 or 2 can"),
        (
            ["mesh.ep=8", "model.n_experts=8", "mesh.tp=2"],
            "mesh.ep = 8 does not divide the number of ranks that experts are spread over, dp_shard 2 x "
            "cp 1 x tp 2 = 4",
            "1, 2 or 4 can",
        ),
        (["mesh.pp=16"], "8 layers are too few for 16 stages", "mesh.pp = 10 at most"),
        (
            ["mesh.pp=8", "pipeline.schedule=LoopedBFS"],
            "8 layers are too few for 16 stages",
            "mesh.pp = 5 at most",
        ),
        (["mesh.pp=2", "model.tied=true"], "tied weights cannot be split into pipeline stages", "set pp = 1"),
        (
            ["mesh.pp=2", "pipeline.layers_per_stage=1"],
            "1F1B cannot run 10 stages on 2 pipeline ranks",
            "use 2 stages",
        ),
        (
            ["mesh.pp=2", "pipeline.microbatch_size=3"],
            "pipeline.microbatch_size = 3 does not divide a rank's 8 rows",
            "1, 2, 4 or 8 can",
        ),
        (
            ["mesh.pp=4", "training.local_batch_size=3"],
            "1F1B over 4 stages needs at least 4 micro-batches, not 3",
            "more rows",
        ),
        (
            ["mesh.pp=4", "training.local_batch_size=11", "pipeline.schedule=Interleaved1F1B"],
            "runs in rounds of equal length, which 11 micro-batches cannot form",
            "10 or 12 micro-batches fit",
        ),
        (
            [
                "mesh.pp=2",
                "pipeline.schedule=DualPipeV",
                "parallelize.reshard_after_forward=always",
                "activation_checkpoint.mode=none",
            ],
            "DualPipeV would lose the gradients of parameters that are freed after forward",
            'use "default" or "never"',
        ),
        (
            [
                "mesh.pp=2",
                "pipeline.schedule=ZBVZeroBubble",
                "compile.enable=true",
                "activation_checkpoint.mode=none",
            ],
            "which compiled blocks cannot",
            "GPipe, 1F1B, Interleaved1F1B, LoopedBFS",
        ),
        (
            ["mesh.pp=2", "pipeline.schedule=InterleavedZeroBubble"],  # selective by default
            "blocks would be recomputed for each of them",
            'use "none", or one of GPipe, 1F1B, Interleaved1F1B, LoopedBFS',
        ),
        (
            ["mesh.pp=2", 'pipeline.module_fqns_per_model_part=[["tok_embeddings"], ["norm", "output"]]'],
            "no part has layers.0, layers.1, layers.2, layers.3, layers.4 and 3 more",
            "every module must be in exactly one part",
        ),
    ],
)
def test_what_does_not_fit_is_told_with_what_does(
    told: Any, overrides: list[str], message: str, hint: str | None
) -> None:
    (problem,) = told(*overrides)
    assert message in problem.message
    assert (problem.hint is None) if hint is None else hint in problem.hint


@pytest.mark.parametrize(
    "overrides",
    [
        ["mesh.tp=8", "mesh.cp=4", "mesh.pp=2"],
        ["mesh.cp=2", "mesh.tp=4", "parallelize.context_parallel=ulysses", "training.seq_len=264"],
        ["mesh.ep=4", "mesh.tp=2", "model.n_experts=8"],
        ["mesh.pp=4", "pipeline.schedule=GPipe", "training.local_batch_size=1"],
        [
            "mesh.pp=2",
            "pipeline.schedule=DualPipeV",
            "parallelize.reshard_after_forward=never",
            "activation_checkpoint.mode=none",
        ],
        ["mesh.pp=2", "compile.enable=true"],
        ["model.tied=true", "mesh.tp=2"],
        ["mesh.pp=2", "training.global_batch_size=16", "training.local_batch_size=1"],
    ],
)
def test_what_just_fits_is_taken(loaded: Any, overrides: list[str]) -> None:
    loaded(*overrides)


SPLIT = ["mesh.pp=2", "activation_checkpoint.mode=none", "training.local_batch_size=8"]


@pytest.mark.parametrize("schedule", [name for name, kind in SCHEDULES.items() if kind.splits_backward])
@pytest.mark.parametrize("version", ["2.11.0", "2.12.1+cu130"])
def test_a_torch_whose_split_backward_is_wrong_is_told_at_the_schedule(
    told: Any, monkeypatch: pytest.MonkeyPatch, version: str, schedule: str
) -> None:
    install_torch(monkeypatch, version)
    # What the schedule would also ask for is left out: it cannot be had at all.
    (problem,) = told("mesh.pp=2", "compile.enable=true", f"pipeline.schedule={schedule}")
    assert f"torch {version} cannot split backward, as {schedule} requires" in problem.message
    assert "install torch 2.13 or newer, or use Interleaved1F1B or LoopedBFS" in problem.hint
    assert problem.location.source == f"pipeline.schedule={schedule}"


@pytest.mark.parametrize("version", ["2.11.0", "2.12.1+cu130"])
@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "LoopedBFS"])
def test_what_is_named_instead_is_taken_on_an_old_torch(
    loaded: Any, monkeypatch: pytest.MonkeyPatch, version: str, schedule: str
) -> None:
    install_torch(monkeypatch, version)
    loaded(*SPLIT, f"pipeline.schedule={schedule}")
    loaded("pipeline.schedule=ZBVZeroBubble")  # without a pipeline no schedule is run


@pytest.mark.parametrize("version", ["2.13.0", "2.13.0.dev20260401+cpu", "2.15.0"])
def test_a_newer_torch_runs_what_splits_backward(
    loaded: Any, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    install_torch(monkeypatch, version)
    loaded(*SPLIT, "pipeline.schedule=ZBVZeroBubble")


def test_where_no_torch_is_installed_the_version_is_no_question(
    loaded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    loaded(*SPLIT, "pipeline.schedule=ZBVZeroBubble")


def test_too_few_rows_are_told_at_the_rows(told: Any) -> None:
    (problem,) = told("mesh.pp=4", "training.local_batch_size=3")
    assert problem.location.source == "training.local_batch_size=3"
    assert problem.hint == "more rows: 4 or more in a rank's step"
    (problem,) = told("mesh.pp=4", "training.local_batch_size=2", "pipeline.microbatch_size=2")
    assert problem.location.source == "training.local_batch_size=2"
    (problem,) = told("mesh.pp=4", "training.local_batch_size=12", "pipeline.microbatch_size=6")
    assert problem.location.source == "pipeline.microbatch_size=6" and problem.hint == "1, 2 or 3 can"


def test_all_degrees_are_told_at_once(told: Any) -> None:
    found = told("mesh.tp=3", "mesh.cp=5", "mesh.ep=2", "mesh.pp=16")
    assert [problem.message.partition(" ")[0] for problem in found] == ["mesh.tp", "mesh.cp", "mesh.ep", "8"]


@pytest.mark.parametrize(
    ("overrides", "world", "message"),
    [
        (["mesh.tp=-1", "mesh.dp_shard=1"], 3, "mesh.tp = 3 does not divide n_heads 32"),
        (["mesh.cp=-1", "mesh.dp_shard=1"], 3, "mesh.cp = 3 does not divide half of training.seq_len"),
        (["mesh.pp=-1", "mesh.dp_shard=1"], 16, "8 layers are too few for 16 stages"),
        (["mesh.dp_shard=-1", "mesh.ep=4", "model.n_experts=8"], 6, "experts are spread over, dp_shard 6"),
        (
            ["mesh.dp_shard=-1", "mesh.pp=4", "training.local_batch_size=1", "training.global_batch_size=12"],
            16,
            "1F1B over 4 stages needs at least 4 micro-batches, not 3",
        ),
    ],
)
def test_a_free_degree_is_checked_once_the_ranks_are_known(
    loaded: Any, overrides: list[str], world: int, message: str
) -> None:
    recipe = loaded(*overrides)
    with pytest.raises(RecipeError) as caught:
        check_world(recipe, world)
    (problem,) = caught.value.problems
    assert message in problem.message and problem.location


def test_the_checks_of_components_see_the_degrees_too(tmp_path: Any) -> None:
    @component("model", "picky", target=TARGET)
    class Picky:
        def check(self, recipe: Component) -> Any:
            if recipe.mesh.tp > 2:
                yield "", f"no more than 2, not {recipe.mesh.tp}"

    (tmp_path / "r.toml").write_text(RECIPE.replace("decoder_of_any_size", "picky"))
    registry = registry_of(("sizes", Picky), ("sizes", Plan))
    recipe = load_recipe(tmp_path / "r.toml", ["mesh.tp=-1"], registry=registry)
    check_world(recipe, 4)
    with pytest.raises(RecipeError, match="no more than 2, not 4"):
        check_world(recipe, 8)


@pytest.mark.parametrize(
    ("overrides", "world", "hint"),
    [
        (["mesh.dp_shard=4", "mesh.tp=4"], 8, "start 16 ranks, or set mesh.dp_shard = 2"),
        (
            ["mesh.dp_shard=-1", "mesh.tp=8", "mesh.pp=2"],
            24,
            "start a multiple of 16 ranks, or set mesh.pp = 1 or 3",
        ),
        (["mesh.tp=4"], 6, "start 8 ranks"),  # tp = 3 would make 6, and does not divide the heads
        (["mesh.dp_shard=-1", "mesh.tp=4"], 6, "start a multiple of 4 ranks, or set mesh.tp = 1 or 2"),
        (["mesh.dp_shard=1", "mesh.tp=1"], 8, "start 1 rank, or set one degree = -1"),
    ],
)
def test_degrees_that_do_not_make_the_ranks_come_with_some_that_do(
    loaded: Any, overrides: list[str], world: int, hint: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        check_world(loaded(*overrides), world)
    assert caught.value.problems[0].hint == hint


def test_numbers_near_a_wrong_one() -> None:
    assert near(3, [1, 2, 4]) == "1, 2 or 4"
    assert near(9, [1, 2, 4, 8, 16, 32, 64]) == "4, 8, 16 or 32"
    assert near(9, [1]) == "1"
