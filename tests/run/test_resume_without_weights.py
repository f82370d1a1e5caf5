"""A run goes on from its own checkpoint: the weights that it began with are read only where something of them
is not in it, and are then required by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.run.conftest import Finished, losses
from titancli.checkpoint import read_manifest
from titancli.checkpoint.exclude import Exclusion
from titancli.cli import main
from titancli.engine import Engine, first_weights
from titancli.errors import RecipeError, TitanError
from titancli.recipe import load_recipe

Train = Callable[..., Finished]

WITHOUT_MODEL = """\
recipe = 1
name = "without_model"
weights = "w"
[tokenizer]
type = "byte"
[dataset]
type = "text_files"
paths = ["text.txt"]
[lr_scheduler]
warmup_steps = 1
[training]
steps = 4
seq_len = 32
local_batch_size = 2
[metrics]
log_freq = 1
[checkpoint]
interval = 2
last_save_in_hf = true
"""
GENERATION = {"temperature": 0.7}
LORA = 'converters=[{type="lora", rank=2}]'
HALF = ("training.steps=2", "lr_scheduler.total_steps=4")


def bits(checkpoint: Path) -> dict[str, str]:
    """Checksums of the data files: equal ones hold the same bits."""
    return {n: d.xxh3_64 for n, d in read_manifest(checkpoint).files.items() if n.endswith(".safetensors")}


@pytest.fixture
def base(train: Train, here: Path) -> Path:
    """A checkpoint to begin with."""
    done = train("tiny.toml", "--run-dir", "base", "training.steps=2", "training.seed=3")
    assert done.code == 0, done.err
    return here / "base/checkpoints/step-2"


def test_a_run_that_began_with_a_hugging_face_folder_goes_on_bitwise_without_it(
    train: Train, here: Path, base: Path
) -> None:
    (here / "without_model.toml").write_text(WITHOUT_MODEL)
    assert main(["convert-checkpoint", str(base), "w", "--to", "hf"]) == 0
    (here / "w/generation_config.json").write_text(json.dumps(GENERATION))
    assert train("without_model.toml", "--run-dir", "whole").code == 0
    assert train("without_model.toml", "--run-dir", "r", *HALF).code == 0
    shutil.copytree(here / "r", here / "again")
    shutil.copytree(here / "r", here / "by_recipe")
    shutil.rmtree(here / "w")
    job = ("without_model.toml", "--run-dir", "by_recipe", "--resume", "training.steps=4", "--dry-run")
    done = train(*job)
    assert done.code == 0 and "step-2" in done.out, done.err
    for change in ("weights=other", "model.rope_theta=7.0"):  # another model's, or another model
        done = train(*job, change)
        assert done.code == (3 if change.startswith("weights") else 5), done.err
    assert train("without_model.toml", "--run-dir", "new", "--resume").code == 3
    done = train("r", "--resume", "training.steps=4")
    assert done.code == 0, done.err
    assert losses(here / "r") == losses(here / "whole")
    assert bits(here / "r/checkpoints/step-4") == bits(here / "whole/checkpoints/step-4")
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        exported = [(here / run / "exports/step-4-hf" / name).read_bytes() for run in ("whole", "r")]
        assert exported[0] == exported[1], name
    assert json.loads(exported_generation(here / "r"))["temperature"] == 0.7
    # Nor are they looked at where they lie there: these could not be read.
    (here / "w").mkdir()
    for name in ("config.json", "model.safetensors", "manifest.json"):
        (here / "w" / name).write_bytes(b"\0")
    done = train("again", "--resume", "training.steps=4")
    assert done.code == 0, done.err
    assert bits(here / "again/checkpoints/step-4") == bits(here / "whole/checkpoints/step-4")


def exported_generation(run: Path) -> str:
    return (run / "exports/step-4-hf/generation_config.json").read_text()


@pytest.mark.ranks
def test_two_ranks_go_on_bitwise_without_the_checkpoint_that_they_began_with(
    train_on: Callable[..., Finished], here: Path, base: Path
) -> None:
    line = ("tiny.toml", f"weights={base}", "training.steps=4")
    assert train_on(2, *line, "--run-dir", "whole").code == 0
    assert train_on(2, *line, *HALF, "--run-dir", "r").code == 0
    shutil.rmtree(base)
    done = train_on(2, *line, "--run-dir", "r", "--resume")
    assert done.code == 0, done.err
    assert losses(here / "r") == losses(here / "whole")
    assert bits(here / "r/checkpoints/step-4") == bits(here / "whole/checkpoints/step-4")
    # A run that has saved nothing begins with them.
    shutil.rmtree(here / "r/checkpoints")
    done = train_on(2, *line, "--run-dir", "r", "--resume", "--from-scratch")
    assert done.code == 5 and f"weights: {base} does not exist\n" in done.err


def test_adapters_need_their_base(train: Train, here: Path, base: Path) -> None:
    line = ("tiny.toml", f"weights={base}", LORA, "training.steps=4")
    assert train(*line, "--run-dir", "whole").code == 0
    assert train(*line, *HALF, "--run-dir", "r").code == 0
    shutil.move(base, here / "moved")
    before = (here / "r/run.json").read_bytes()
    done = train(*line, "--run-dir", "r", "--resume")
    assert done.code == 5 and "Traceback" not in done.err
    assert f"weights: {base} does not exist" in done.err
    assert "step-2 holds adapters, and these weights are their base" in done.err
    assert (here / "r/run.json").read_bytes() == before  # nothing was started
    moved = ("tiny.toml", f"weights={here / 'moved'}", *line[2:])
    assert train(*moved, "--run-dir", "r", "--resume").code == 0  # it is the same base, elsewhere
    assert losses(here / "r") == losses(here / "whole")
    assert bits(here / "r/checkpoints/step-4") == bits(here / "whole/checkpoints/step-4")


def test_what_is_left_out_of_the_checkpoint_is_as_when_the_run_began(
    train: Train, here: Path, base: Path
) -> None:
    line = ("tiny.toml", f"weights={base}")
    assert train(*line, "training.steps=2", "--run-dir", "r").code == 0
    left_out = 'checkpoint.exclude_from_loading=["model.layers.1.*"]'
    own, recipe = here / "r/checkpoints/step-2", load_recipe("tiny.toml", [line[1], left_out]).recipe
    with Engine.build(recipe) as first, Engine.build(recipe, checkpoint=own) as engine:
        engine.load(own, exclude=Exclusion(("model.layers.1.*",)))
        begun = dict(first.named_parameters())
        same = {name for name, tensor in engine.named_parameters() if torch.equal(tensor, begun[name])}
        assert {name for name in begun if name.startswith("layers.1.")} <= same
        assert "output.weight" not in same
    shutil.rmtree(base)
    done = train("r", "--resume", "training.steps=3", left_out)
    assert done.code == 5 and "Traceback" not in done.err
    assert f"{base} does not exist, but checkpoint.exclude_from_loading leaves out weights of" in done.err
    done = train("r", "--resume", "training.steps=3", 'checkpoint.exclude_from_loading=["optimizer", "data"]')
    assert done.code == 0, done.err


DPO = (
    *("dpo_debug", "training.steps=4", "lr_scheduler.warmup_steps=1", "model.dim=32", "model.n_layers=1"),
    *("model.hidden_dim=64", "training.local_batch_size=4", "metrics.log_freq=1", "checkpoint.interval=2"),
)


def test_a_reference_needs_the_weights_that_the_run_began_with(train: Train, here: Path) -> None:
    assert train(*DPO, *HALF, "training.seed=3", "--run-dir", "base").code == 0
    weights = here / "base/checkpoints/step-2"
    line = (*DPO, f"weights={weights}")
    assert train(*line, "--run-dir", "whole").code == 0
    assert train(*line, *HALF, "--run-dir", "r").code == 0
    shutil.move(weights, here / "moved")
    done = train(*line, "--run-dir", "r", "--resume")
    assert done.code == 5 and "Traceback" not in done.err
    assert f"weights: {weights} does not exist" in done.err
    assert "the loop dpo compares with the model that the run began with" in done.err
    shutil.move(here / "moved", weights)
    assert train(*line, "--run-dir", "r", "--resume").code == 0
    assert losses(here / "r") == losses(here / "whole")


@pytest.mark.parametrize(
    ("line", "needed"),
    [
        (("dpo_debug",), True),
        (("dpo_debug", "dataset.reference_logps=true"), False),
        (
            (
                "dpo_debug",
                "dataset.reference_logps=true",
                'validation.datasets.held_out={type="preference", path="titan:sums_pairs", repeat=false}',
            ),
            True,
        ),
        (("grpo_digit", "loss.kl_coef=0.0"), False),
        (("grpo_digit", "loss.kl_coef=0.1"), True),
        (("llama3_debug",), False),
    ],
)
def test_which_loops_compare_with_a_reference(line: tuple[str, ...], needed: bool) -> None:
    recipe = load_recipe(line[0], line[1:]).recipe
    assert recipe.loop.needs_reference(recipe) is needed


def test_until_it_is_loaded_such_an_engine_is_unusable(
    train: Train, here: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = here / "base/checkpoints/step-2"
    recipe = replace(load_recipe("tiny.toml").recipe, weights=here / "nothing")
    monkeypatch.setattr(first_weights, "load_weights", lambda *_: pytest.fail("read in vain"))
    with Engine.build(recipe, checkpoint=own) as engine:
        with pytest.raises(TitanError, match=r"weights: the engine is unusable: .*step-2 is not loaded yet"):
            list(engine.weights())
        with pytest.raises(TitanError, match="is not loaded yet"):  # it would leave values that nobody gave
            engine.load(own, exclude=Exclusion(("model.layers.1.*",)))
        with pytest.raises(RecipeError, match="matches nothing in the checkpoint"):
            engine.load(own, exclude=Exclusion(("optimizer.nothing",)))
        with pytest.raises(TitanError, match="is not loaded yet"):
            list(engine.weights())
        engine.load(own, exclude=Exclusion(("optimizer",)))
        assert all(tensor.isfinite().all() for _, tensor in engine.weights() if tensor is not None)
