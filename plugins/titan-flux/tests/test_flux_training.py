"""Flux trains alike on every layout that it can have, learns, and goes on as if it had not stopped."""

from __future__ import annotations

import json
from pathlib import Path

import flux_cases
import pytest
from safetensors import safe_open

from tests.rows import rows
from titan_flux import FlowMatching, RandomLatents
from titan_flux.shards import write_shard
from titan_testing import Example, check_plugin, run_cli
from titancli.registry.component import build

RECIPE = "titan-flux:flux_debug"
WHOLE = ["training.local_batch_size=8"]
TWO, FOUR = ["training.local_batch_size=4"], ["training.local_batch_size=2"]
REPLICAS = "mesh.dp_replicate=2"
COMPILED = ["compile.enable=true", 'compile.backend="aot_eager"']
LAYOUTS = {
    "FSDP2": (2, [*TWO, "mesh.dp_shard=2"]),
    "FSDP4, recomputed": (4, [*FOUR, "mesh.dp_shard=4", "activation_checkpoint.mode=full"]),
    "DDP2, by operation": (2, [*TWO, REPLICAS, "activation_checkpoint.mode=selective"]),
    "HSDP2x2, never freed": (
        4,
        [*FOUR, REPLICAS, "mesh.dp_shard=2", "parallelize.reshard_after_forward=never"],
    ),
    "FSDP2, accumulated": (2, [*FOUR, "mesh.dp_shard=2", "training.accumulate=unsharded"]),
    "FSDP2, compiled": (2, [*TWO, "mesh.dp_shard=2", *COMPILED, "activation_checkpoint.mode=selective"]),
}


@pytest.fixture(scope="module")
def alone(ranks) -> dict:
    return ranks(1, flux_cases.trained, WHOLE)[0]


SISTERS = ("HSDP2x2, never freed", "FSDP2, accumulated", "FSDP4, recomputed", "FSDP2, compiled")
"""What the others prove as well, each a part of it."""


@pytest.mark.ranks
@pytest.mark.parametrize("name", rows(LAYOUTS, slow=SISTERS))
def test_a_layout_trains_as_one_rank_does(ranks, alone: dict, name: str) -> None:
    world, overrides = LAYOUTS[name]
    for found in ranks(world, flux_cases.trained, overrides):
        assert found.keys() == alone.keys()
        distances = {key: (found[key] - alone[key]).norm() / alone[key].norm() for key in alone}
        worst = max(distances, key=lambda key: distances[key])
        assert distances[worst] <= 1e-5, f"{worst}: {distances[worst]:.2e}"


@pytest.mark.ranks
def test_tokens_are_those_of_text_and_image(alone: dict) -> None:
    assert alone["tokens"] == 3 * flux_cases.ROWS * (8 + 16)


def test_the_plugin_is_sound(tmp_path: Path) -> None:
    encoded = {"context_dim": 3, "pooled_dim": 2}
    image = {"height": 4, "width": 4, "channels": 1, "text_length": 12, **encoded}
    model = {"dim": 32, "n_heads": 2, "double_blocks": 1, "single_blocks": 1, "axes_dim": [4, 6, 6]}

    def example(rows: int) -> Example:
        shape = {"seq_len": 16, "rows": rows, "dp_rank": 0, "dp_size": 1, "seed": 0}
        batch = next(iter(build(RandomLatents(**image), tokenizer=None, **shape)))
        return Example(batch, loss=FlowMatching(), out=batch["velocity"].flip(0))

    check_plugin(
        "titan-flux",
        configs={"dataset/random_latents": image, "model/flux": {**model, "in_channels": 4, **encoded}},
        examples={"model/flux": example, "loss/flow_matching": example},
    )


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [line["metrics"]["loss"] for line in lines if line.get("event") == "step"]


FEW = ["dataset.count=8", "dataset.text_dropout=0.0", "training.local_batch_size=8"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the debug recipe on fewer samples by the command."""
    folder = tmp_path_factory.mktemp("flux")
    done = run_cli("train", RECIPE, "--run-dir", "r", *FEW, cwd=folder)
    assert done.code == 0, done.stderr
    return folder / "r"


def test_the_loss_falls(run: Path) -> None:
    found = losses(run)
    assert found[0] == pytest.approx(2, abs=0.2)
    assert min(found[-2:]) < 0.9 * found[0], found


REFUSED = {
    ("generate", "{run}", "a cat"): "the model flux cannot generate: it has no new_cache",
    ("convert-checkpoint", "{run}", "x", "--to", "hf", "--verify"): "this model belongs to diffusers",
    ("plan", RECIPE, "--check"): "a dry run can only make rows of tokens, but the model takes latents",
}


@pytest.mark.parametrize("arguments", REFUSED, ids=lambda arguments: arguments[0])
def test_what_there_is_not_is_said_in_words(run: Path, arguments: tuple[str, ...], tmp_path: Path) -> None:
    done = run_cli(*(argument.format(run=run) for argument in arguments), cwd=tmp_path)
    assert done.code != 0 and REFUSED[arguments] in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_plan_draws_the_mesh_and_says_why_no_more(tmp_path: Path) -> None:
    done = run_cli("plan", RECIPE, cwd=tmp_path)
    assert done.code == 0 and "the model flux does not take rows of tokens" in " ".join(done.stdout.split())


def test_diffusers_loads_an_export_and_what_comes_back_is_the_same(run: Path, tmp_path: Path) -> None:
    done = run_cli("convert-checkpoint", run, "hf", "--to", "hf", cwd=tmp_path)
    assert done.code == 0 and "from diffusers import FluxTransformer2DModel;" in done.stdout, done.stderr
    saved = tensors(run / "checkpoints" / "step-60")
    before = {name: value for name, value in saved.items() if name.startswith("model.")}
    ours, theirs = flux_cases.both(before, tmp_path / "hf")
    assert (ours - theirs).norm() / theirs.norm() < 1e-5 and theirs.std() > 0.1
    done = run_cli("convert-checkpoint", "hf", "back", "--to", "titan", cwd=tmp_path)
    assert done.code == 0, done.stderr
    after = tensors(tmp_path / "back")
    assert after.keys() == before.keys() and all((after[name] == before[name]).all() for name in before)
    # A run that begins with these weights knows its samples.
    small = [*FEW, "training.steps=1", "lr_scheduler.warmup_steps=0", "checkpoint.enable=false"]
    for number, weights in enumerate(("hf", "back")):
        done = run_cli("train", RECIPE, *small, f"weights={weights}", "--run-dir", f"{number}", cwd=tmp_path)
        assert done.code == 0, done.stderr
    assert losses(tmp_path / "0") == losses(tmp_path / "1") != []
    assert losses(tmp_path / "0")[0] < 0.95 * losses(run)[0]


def test_a_resumed_run_is_bitwise_the_one_that_did_not_stop(tmp_path: Path) -> None:
    """Across the end of an epoch, from shards on disk."""
    small = ["model.double_blocks=1", "model.single_blocks=1", "metrics.log_freq=1"]
    settings = [*shards(tmp_path), *small, "lr_scheduler.total_steps=6"]
    for run, steps in {"whole": 6, "part": 3}.items():
        done = run_cli("train", RECIPE, "--run-dir", run, f"training.steps={steps}", *settings, cwd=tmp_path)
        assert done.code == 0, done.stderr
    done = run_cli("train", "part", "--resume", "training.steps=6", cwd=tmp_path)
    assert done.code == 0, done.stderr
    one, other = (tensors(tmp_path / run / "checkpoints" / "step-6") for run in ("whole", "part"))
    assert one.keys() == other.keys() and all((one[name] == other[name]).all() for name in one)
    assert losses(tmp_path / "whole") == losses(tmp_path / "part")


def shards(folder: Path) -> list[str]:
    import torch

    draw = torch.Generator().manual_seed(0)
    shapes = {"latents": (4, 8, 8), "text": (8, 32), "pooled": (16,)}
    for name, count in {"a": 5, "b": 6}.items():
        samples = [{k: torch.randn(v, generator=draw) for k, v in shapes.items()} for _ in range(count)]
        write_shard(folder / f"{name}.safetensors", samples)
    fields = ['type = "latents"', 'paths = ["*.safetensors"]', "guidance = 1.0"]
    return ["dataset={" + ", ".join(fields) + "}", "training.local_batch_size=4"]


def tensors(checkpoint: Path) -> dict:
    (file,) = checkpoint.glob("*.safetensors")
    with safe_open(file, framework="pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping


WRONG = {
    "mesh.tp=2": "mesh.tp = 2: the model flux can only be sharded by dp_replicate and dp_shard",
    "mesh.cp=2": "mesh.cp = 2: the model flux can only be sharded by",
    "mesh.pp=2": "mesh.pp = 2: the model flux can only be sharded by",
    "loss=cross_entropy": 'set loss = "flow_matching"',
    "dataset=python_stdlib  tokenizer=byte": "flux needs latents, but this dataset returns text",
    "tokenizer=byte": "the dataset random_latents does not use a tokenizer",
    "model.flavor=flux-schnell": "this model has no guidance input",
    "model.dim=66": "n_heads 4 times sum(axes_dim) 16 must equal dim 66",
    "model.axes_dim=[3, 7, 6]": "must be even",
    'dataset={type="latents", paths=["x"]}': "set guidance = 1.0",
    'dataset={type="latents", paths=["x"], text_dropout=0.1}': "the empty text is needed",
}


@pytest.mark.parametrize("override", WRONG)
def test_what_does_not_go_together_is_said_by_validate(override: str, tmp_path: Path) -> None:
    done = run_cli("validate", RECIPE, *override.split("  "), cwd=tmp_path)
    assert done.code == 3 and WRONG[override] in done.stdout + done.stderr, done.stdout + done.stderr


def test_a_bad_shard_ends_a_run_with_its_name(tmp_path: Path) -> None:
    data = shards(tmp_path)
    (tmp_path / "b.safetensors").write_bytes((tmp_path / "b.safetensors").read_bytes()[:-8])
    done = run_cli("train", RECIPE, "--run-dir", "r", *data, cwd=tmp_path)
    assert done.code == 5 and "b.safetensors is not a valid shard of latents" in done.stderr
    assert "Traceback" not in done.stderr
