"""Checkpoints of a pipeline: each rank has some names, and any other layout takes all of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.checkpoint.tensors import RUN
from tests.engine.cases import Layout, my_batches, recipe, whole, wholes
from tests.ranks.refused import refused
from tests.rows import rows
from titancli.checkpoint import (
    Checkpointer,
    CheckpointReader,
    load_checkpoint,
    read_manifest,
    save_checkpoint,
)
from titancli.checkpoint.hf.folder import export_hf
from titancli.checkpoint.hf.load import load_hf_weights
from titancli.engine import Engine
from titancli.errors import EnvironmentProblem, TitanError
from titancli.models.blocks.hf import DecoderHF
from titancli.recipe.schema import Checkpoint

pytestmark = pytest.mark.ranks

LAYOUTS = {
    "one": (1, Layout()),
    "PP2": (2, Layout({"pp": 2})),
    "PP2, V": (2, Layout({"pp": 2}, pipeline={"schedule": "ZBVZeroBubble"})),
    "PP4": (4, Layout({"pp": 4})),
    "PP2xFSDP2": (4, Layout({"pp": 2, "dp_shard": 2}, pipeline={"schedule": "Interleaved1F1B"})),
    "PP2xTP2": (4, Layout({"pp": 2, "tp": 2})),
    "FSDP2": (2, Layout({"dp_shard": 2})),
}


def state(engine: Engine) -> dict[str, Tensor]:
    return wholes(engine.save_state()[0].items())


def step(engine: Engine, number: int) -> Tensor:
    metrics = engine.forward_backward(my_batches(engine, number))
    engine.optim_step()
    return metrics["loss"].clone()


def save(layout: Layout, folder: str, async_mode: str = "disabled") -> tuple[dict[str, Tensor], Tensor]:
    """Two steps, a checkpoint, and the loss of the third."""
    engine = Engine.build(recipe(layout))
    for number in range(2):
        step(engine, number)
    section = Checkpoint(async_mode=async_mode)
    degrees = dataclasses.asdict(engine.mesh.degrees)
    checkpoints = Checkpointer(Path(folder), section, lock_text="x = 1\n", run_id=RUN, mesh=degrees)
    saved = state(engine)
    tensors, counters = engine.save_state()
    checkpoints.save(2, tensors, {"engine": counters})
    loss = step(engine, 2)  # under an asynchronous save while it is written
    checkpoints.wait()
    return saved, loss


def load(layout: Layout, folder: str) -> tuple[dict[str, Tensor], Tensor]:
    engine = Engine.build(recipe(layout, seed=11))  # other initial values
    engine.load(Path(folder) / "step-2")
    assert engine.status == {"step": 2, "version": 2, "accumulated": 0, "tokens_seen": 2 * 8 * 16}
    return state(engine), step(engine, 2)


def together(results: list[tuple[dict[str, Tensor], Tensor]]) -> dict[str, Tensor]:
    return {name: tensor for tensors, _ in results for name, tensor in tensors.items()}


BEFORE = ["one", "PP2, V", "PP4", "PP2xFSDP2", "PP2xTP2"]


@pytest.fixture(scope="module")
def checkpoints(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Tensor]]:
    """For each layout before: a folder with a checkpoint and all it holds, and the loss of the next step."""
    made = {}
    for before in BEFORE:
        count, layout = LAYOUTS[before]
        if refused(layout):
            continue
        folder = tmp_path_factory.mktemp("before")
        results = ranks(count, save, layout, str(folder))
        saved = together(results)
        assert len(saved) == 39 + 3 * 39  # 4 blocks of 9, and 3; each with two moments and a count of steps
        torch.save(saved, folder / "all.pt")
        made[before] = folder, results[0][1]
    return made


def load_each(layout: Layout, folders: list[Path]) -> list[tuple[set[str], list[str], Tensor]]:
    """For each checkpoint, loaded by one engine: the names this rank has, what differs, and the next loss."""
    engine = Engine.build(recipe(layout, seed=11))  # other initial values
    found = []
    for number, folder in enumerate(folders, 1):
        engine.load(folder / "step-2")
        version = 2 * number  # it never falls: a step and another load are two more
        assert engine.status == {"step": 2, "version": version, "accumulated": 0, "tokens_seen": 2 * 8 * 16}
        loaded, saved = state(engine), torch.load(folder / "all.pt")
        unlike = [name for name in loaded if not torch.equal(loaded[name], saved[name])]
        found.append((set(loaded), unlike, step(engine, 2)))
    return found


@pytest.mark.parametrize("after", rows(LAYOUTS, slow=("PP2, V", "PP2xFSDP2", "FSDP2", "PP4", "PP2xTP2")))
def test_every_layout_goes_on_from_every_other(
    ranks: Any, checkpoints: dict[str, tuple[Path, Tensor]], after: str
) -> None:
    count, layout = LAYOUTS[after]
    first = [*LAYOUTS].index(after) % len(checkpoints)  # another one meets the engine as it was built
    befores = [*checkpoints][first:] + [*checkpoints][:first]
    results = ranks(count, load_each, layout, [checkpoints[before][0] for before in befores])
    for number, before in enumerate(befores):
        folder, loss = checkpoints[before]
        of_ranks = [found[number] for found in results]
        assert set().union(*(names for names, _, _ in of_ranks)) == torch.load(folder / "all.pt").keys()
        assert [unlike for _, unlike, _ in of_ranks] == [[]] * count, before
        for _, _, other_loss in of_ranks:
            torch.testing.assert_close(other_loss, loss, rtol=0 if after == before else 1e-5, atol=0)


def test_a_save_beside_training_holds_every_stage(ranks: Any, tmp_path: Path) -> None:
    results = ranks(2, save, LAYOUTS["PP2"][1], str(tmp_path), "async")
    saved = together(results)
    loaded = together(ranks(1, load, Layout(), str(tmp_path)))
    assert loaded.keys() == saved.keys() and all(torch.equal(loaded[n], saved[n]) for n in saved)


def test_the_manifest_tells_the_stages_and_one_process_reads_them(ranks: Any, tmp_path: Path) -> None:
    saved = together(ranks(4, save, LAYOUTS["PP2xFSDP2"][1], str(tmp_path)))
    degrees = {"pp": 2, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 1, "ep": 1}
    assert read_manifest(tmp_path / "step-2").layout == {"ranks": 4, "mesh": degrees}
    reader = CheckpointReader(tmp_path / "step-2")
    assert set(reader.names()) == saved.keys()
    assert all(torch.equal(reader.read(name), tensor) for name, tensor in saved.items())


def _save_parts(folder: str) -> None:
    rank = dist.get_rank()
    save_checkpoint(Path(folder), {f"model.{rank}": torch.ones(3)}, {}, lock_text="", run_id=RUN)


def _load_parts(folder: str, names: list[str], size: int) -> str:
    try:
        load_checkpoint(Path(folder), {names[dist.get_rank()]: torch.zeros(size)})
    except TitanError as error:
        return str(error)
    return "loaded"


def test_names_are_compared_over_all_ranks(ranks: Any, tmp_path: Path) -> None:
    """What one rank lacks, another has; what none has is missed on all."""
    folder = str(tmp_path / "step-1")
    ranks(2, _save_parts, folder)
    assert ranks(2, _load_parts, folder, ["model.1", "model.0"], 3) == ["loaded", "loaded"]
    for said in ranks(2, _load_parts, folder, ["model.1", "model.2"], 3):
        assert "model.0" in said and "model.2" in said
    for said in ranks(2, _load_parts, folder, ["model.0", "model.1"], 4):
        assert "model.0 is [3] in the checkpoint and [4] in the model" in said and "model.1 is [3] in" in said


# ------------------------------------------------------------------------------------ first weights


def _weights(layout: Layout, weights: str | None) -> dict[str, Tensor]:
    made = recipe(layout, seed=0 if weights is None else 5)
    engine = Engine.build(dataclasses.replace(made, weights=None if weights is None else Path(weights)))
    return {name: whole(p) for name, p in engine.named_parameters()}


def _export(out: str) -> dict[str, Tensor]:
    engine = Engine.build(recipe(Layout(), seed=0))
    tensors = {name: whole(p) for name, p in engine.named_parameters()}
    export_hf(tensors, engine.hf_form, {}, Path(out))
    engine.save(Path(out).parent / "step-0")
    return tensors


@pytest.mark.parametrize("layout", rows(["PP2, V", "PP4", "PP2xFSDP2", "PP2xTP2"], slow=("PP4", "PP2xFSDP2")))
def test_first_weights_go_to_their_stages(ranks: Any, tmp_path: Path, layout: str) -> None:
    expected = ranks(1, _export, str(tmp_path / "hf"))[0]
    for folder in ("hf", "step-0"):
        results = ranks(LAYOUTS[layout][0], _weights, LAYOUTS[layout][1], str(tmp_path / folder))
        assert set().union(*results) == expected.keys()
        assert all(torch.equal(value, expected[n]) for result in results for n, value in result.items())


def _deeper(weights: str) -> str:
    meant = Checkpoint(model_differs=["n_layers"])  # so that the folder's config.json alone is no reason
    made = recipe(Layout({"pp": 2}, model={"n_layers": 5}))
    try:
        Engine.build(dataclasses.replace(made, weights=Path(weights), checkpoint=meant))
    except EnvironmentProblem as error:
        return str(error)
    return "loaded"


def test_weights_of_another_model_are_told_on_every_rank(ranks: Any, tmp_path: Path) -> None:
    ranks(1, _export, str(tmp_path / "hf"))
    for said in ranks(2, _deeper, str(tmp_path / "hf")):
        assert "it lacks: model.layers.4" in said


def test_one_process_still_misses_what_nobody_asks_for(ranks: Any, tmp_path: Path) -> None:
    tensors = ranks(1, _export, str(tmp_path / "hf"))[0]
    some = {name: tensor for name, tensor in tensors.items() if "layers.3" not in name}
    with pytest.raises(EnvironmentProblem, match=r"the model lacks: model\.layers\.3"):
        load_hf_weights(tmp_path / "hf", DecoderHF(recipe(Layout()).model), some)
