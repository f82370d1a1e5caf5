"""What `titan train --dry-run` says of a layout is what its ranks would have."""

from __future__ import annotations

import json

import pytest

from tests.models.specs import size_of
from titancli.cli import main
from titancli.engine.dry_run import dry_run
from titancli.recipe import load_recipe
from titancli.run.preview import count_parameters

LAYOUTS = {
    "sharded": (4, []),
    "replicated": (4, ["mesh.dp_replicate=2"]),
    "a pipeline, whose ends are heavier": (4, ["mesh.pp=2", "model.vocab_size=65536"]),
    "rows and matrices cut": (8, ["mesh.tp=2", "mesh.cp=2"]),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name == "sharded" else name for name in LAYOUTS],
)
def test_the_memory_of_a_rank_is_that_of_the_one_with_the_most(name):
    world, overrides = LAYOUTS[name]
    recipe = load_recipe("llama3_debug", ["model.n_layers=2", "training.seq_len=64", *overrides]).recipe
    most = max(rank.parameters for rank in dry_run(recipe, world).ranks)
    whole, told, _ = count_parameters(recipe, recipe.degrees(world))
    assert told == pytest.approx(most, rel=0.001) and whole == size_of(recipe.model)


def test_rows_under_a_pipeline_come_in_micro_batches(capsys):
    line = ["train", "llama3_debug", "--dry-run", "--nproc", "2", "mesh.pp=2", "pipeline.microbatch_size=2"]
    assert main(line) == 0
    assert "2 rows at a time per rank, 4 times per step" in capsys.readouterr().out
    assert main([*line, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["microbatch_size"] == 2
