"""Saving and loading in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.tensors import RUN, bits, same, save, some_tensors, zeros
from titancli.checkpoint import (
    CheckpointReader,
    load_checkpoint,
    newest,
    newest_good,
    read_manifest,
    save_checkpoint,
)
from titancli.checkpoint.exclude import Exclusion
from titancli.checkpoint.format.manifest import DamagedCheckpoint, hidden_prefix, remove
from titancli.engine import optimizer_state
from titancli.engine.optimizer_state import optimizer_tensors
from titancli.errors import EnvironmentProblem, RecipeError, TitanError


def test_everything_comes_back_bit_for_bit(tmp_path: Path):
    tensors = save(tmp_path / "step-1", state={"step": 1, "data": {"offset": [3, 4]}})
    loaded = zeros(tensors)
    assert load_checkpoint(tmp_path / "step-1", loaded) == {"step": 1, "data": {"offset": [3, 4]}}
    assert same(loaded, tensors)


def test_tensors_are_filled_in_place(tmp_path: Path):
    save_checkpoint(tmp_path / "step-1", {"model.a": torch.ones(3)}, {}, lock_text="", run_id=RUN)
    parameter = torch.nn.Parameter(torch.zeros(3))
    before = parameter.data_ptr()
    load_checkpoint(tmp_path / "step-1", {"model.a": parameter})
    assert parameter.data_ptr() == before
    assert parameter.tolist() == [1, 1, 1]
    assert parameter.requires_grad


def test_a_reader_gives_whole_tensors(tmp_path: Path):
    tensors = save(tmp_path / "step-1")
    reader = CheckpointReader(tmp_path / "step-1")
    assert sorted(reader.names()) == sorted(tensors)
    assert same({name: reader.read(name) for name in reader.names()}, tensors)
    assert reader.shape("model.transposed") == (7, 3)
    assert reader.dtype("model.norm.weight") == torch.bfloat16
    with pytest.raises(TitanError, match="no tensor 'nonsense'"):
        reader.read("nonsense")


def test_a_reader_of_a_part_names_it_plainly(tmp_path: Path):
    save(tmp_path / "step-1")
    names = CheckpointReader(tmp_path / "step-1", prefix="model.").names()
    assert sorted(names) == ["layers.0.weight", "norm.weight", "nothing", "transposed"]


def test_what_a_reader_gives_outlives_the_checkpoint(tmp_path: Path):
    """It may be mapped; a purge deletes files, and never cuts or overwrites one."""
    tensors = save(tmp_path / "step-1")
    read = CheckpointReader(tmp_path / "step-1").read("model.layers.0.weight")
    remove(tmp_path / "step-1", RUN)
    assert not (tmp_path / "step-1").exists()
    assert torch.equal(read, tensors["model.layers.0.weight"])


def test_large_data_is_split_over_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("titancli.checkpoint.format.tensorfile.SHARD_BYTES", 100)
    tensors = save(tmp_path / "step-1")
    files = sorted(path.name for path in (tmp_path / "step-1").glob("*.safetensors"))
    assert files[0] == "rank-00000-1.safetensors"
    assert files[-1] == "rank-00000.safetensors"
    loaded = zeros(tensors)
    load_checkpoint(tmp_path / "step-1", loaded)
    assert same(loaded, tensors)


def test_all_differences_of_names_shapes_and_dtypes_are_told_at_once(tmp_path: Path):
    tensors = save(tmp_path / "step-1")
    wanted = zeros(tensors)
    del wanted["model.transposed"]
    wanted["model.new"] = torch.zeros(1)
    wanted["model.layers.0.weight"] = torch.zeros(6, 5)
    wanted["model.norm.weight"] = torch.zeros(5)
    with pytest.raises(TitanError) as caught:
        load_checkpoint(tmp_path / "step-1", wanted)
    assert "it lacks: model.new" in caught.value.message
    assert "the model lacks: model.transposed" in caught.value.message
    assert "model.layers.0.weight is [6, 4] in the checkpoint and [6, 5] in the model" in caught.value.message
    assert "model.norm.weight is bfloat16 in the checkpoint and float32 in the model" in caught.value.message
    assert "weights" in str(caught.value.hint)
    assert all(bits(tensor) == bits(torch.zeros_like(tensor)) for tensor in wanted.values())


def test_many_differences_are_counted_not_listed(tmp_path: Path):
    save_checkpoint(tmp_path / "step-1", {"model.a": torch.ones(1)}, {}, lock_text="", run_id=RUN)
    wanted = {f"model.{i:03d}": torch.zeros(1) for i in range(100)}
    with pytest.raises(TitanError, match="and 94 more"):
        load_checkpoint(tmp_path / "step-1", wanted)


def test_weights_alone_leave_the_optimizer_unread_and_are_cast(tmp_path: Path):
    saved = {"model.a": torch.tensor([1.0, 2.0]), "optimizer.a.step": torch.tensor(3.0)}
    save_checkpoint(tmp_path / "step-1", saved, {}, lock_text="", run_id=RUN)
    weights = {"model.a": torch.zeros(2, dtype=torch.bfloat16)}
    load_checkpoint(tmp_path / "step-1", weights)
    assert weights["model.a"].tolist() == [1, 2]
    with pytest.raises(TitanError, match=r"the model lacks: model\.a"):
        load_checkpoint(tmp_path / "step-1", {"model.b": torch.zeros(2)})


def test_what_is_excluded_is_left_as_it_is_whatever_its_shape(tmp_path: Path):
    tensors = save(tmp_path / "step-1")
    mine = zeros(tensors) | {"model.norm.weight": torch.ones(9)}
    exclude = Exclusion(("optimizer", "model.norm.*"))
    load_checkpoint(tmp_path / "step-1", mine, exclude=exclude)
    assert torch.equal(mine["model.norm.weight"], torch.ones(9))
    assert not mine["optimizer.layers.0.weight.exp_avg"].any()
    assert torch.equal(mine["model.layers.0.weight"], tensors["model.layers.0.weight"])
    assert [exclude.has(name) for name in ("optimizer", "model", "data", "optimizers.x")] == [
        True,
        False,
        False,
        False,
    ]


def test_an_exclusion_of_what_is_not_there_is_told(tmp_path: Path):
    tensors = save(tmp_path / "step-1")
    with pytest.raises(RecipeError, match=r"'model\.head\.\*' matches nothing in the checkpoint"):
        load_checkpoint(tmp_path / "step-1", zeros(tensors), exclude=Exclusion(("data", "model.head.*")))


def test_a_checkpoint_that_was_saved_under_an_exclusion_is_loaded_whole(tmp_path: Path):
    save(tmp_path / "step-1")
    assert Exclusion.once(["data"], tmp_path / "step-1").patterns == ("data",)
    assert Exclusion.once(["data"], tmp_path / "missing").patterns == ("data",)
    (tmp_path / "step-1/recipe.lock.toml").write_text('[checkpoint]\nexclude_from_loading = ["data"]\n')
    assert Exclusion.once(["data"], tmp_path / "step-1").patterns == ()
    assert Exclusion.once(["step"], tmp_path / "step-1").patterns == ("step",)
    (tmp_path / "step-1/recipe.lock.toml").write_text("[checkpoint\n")
    assert Exclusion.once([], tmp_path / "step-1").patterns == ()
    with pytest.raises(DamagedCheckpoint, match=r"step-1 is damaged: recipe\.lock\.toml cannot be read"):
        Exclusion.once(["data"], tmp_path / "step-1")


def test_what_is_no_tensor_is_refused(tmp_path: Path):
    with pytest.raises(TitanError, match="'counter' is not a tensor"):
        save_checkpoint(tmp_path / "step-1", {"counter": 3}, {}, lock_text="", run_id=RUN)  # type: ignore[dict-item]
    assert list(tmp_path.iterdir()) == []


def test_what_an_optimizer_keeps_and_no_checkpoint_can_hold_is_named():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    optimizer.state[weight] = {"momentum_buffer": torch.ones(2), "averaged": None}
    assert list(optimizer_tensors(optimizer, [("w", weight)])) == ["optimizer.w.momentum_buffer"]
    optimizer.state[weight]["seen"] = 3
    with pytest.raises(TitanError, match=r"SGD keeps optimizer\.w\.seen, of type int"):
        optimizer_tensors(optimizer, [("w", weight)])


def test_what_an_optimizer_keeps_on_itself_is_warned_of_once(caplog: pytest.LogCaptureFixture):
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    optimizer.means, optimizer.cache, optimizer.inner = {}, [torch.ones(2)], torch.optim.Adam([weight])  # type: ignore[attr-defined]
    optimizer.best = float("nan")  # type: ignore[attr-defined]
    optimizer_state.remember(optimizer)
    optimizer.param_groups[0]["lr"] = 0.2
    optimizer_tensors(optimizer, [("w", weight)])
    assert not caplog.messages
    optimizer.means[weight] = torch.ones(2)  # type: ignore[attr-defined]
    optimizer.param_groups[0]["k"] = 1
    optimizer.cache[0].add_(1)  # type: ignore[attr-defined]
    optimizer.inner.state[weight] = {"step": torch.ones(())}  # type: ignore[attr-defined]
    for _ in range(2):
        optimizer_tensors(optimizer, [("w", weight)])
    [said] = caplog.messages
    assert "the optimizer SGD keeps cache, inner, means, param_groups[0]['k'] on itself" in said


def test_what_a_checkpoint_has_and_what_torch_notes_is_not_warned_of(caplog: pytest.LogCaptureFixture):
    """Nor is it an error that an optimizer knows the one that it is in, or has tensors without a version."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer: Any = torch.optim.SGD([weight], lr=0.1, momentum=0.9, fused=True)
    optimizer.named, optimizer.moments = {"w": weight}, []
    optimizer.inner = torch.optim.Adam([weight])
    optimizer.inner.outer = optimizer
    with torch.inference_mode():
        optimizer.fixed = torch.ones(2)
    optimizer_state.remember(optimizer)
    weight.grad = torch.ones(2)
    optimizer.step()
    optimizer.moments.append(optimizer.state[weight]["momentum_buffer"])
    optimizer_tensors(optimizer, [("w", weight)])
    assert not caplog.messages


def test_a_tensor_at_the_address_of_the_one_before_is_another(monkeypatch: pytest.MonkeyPatch):
    before = optimizer_state._mark(torch.ones(1))
    now = torch.ones(1)
    monkeypatch.setattr(optimizer_state, "id", lambda tensor: 0, raising=False)
    assert optimizer_state._mark(now) != before
    assert optimizer_state._mark(now) == optimizer_state._mark(now)


def test_a_group_is_left_alone_where_the_state_is_made():
    """A count in a group, which a step at a learning rate of 0 moves too."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([{"params": [weight], "k": 3}], lr=0.1)
    optimizer.register_step_post_hook(lambda *a: optimizer.param_groups[0].update(k=4))
    optimizer_tensors(optimizer, [("w", weight)])
    assert optimizer.param_groups[0]["k"] == 3 and optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("state", [{"x": torch.ones(1)}, {"x": float("nan")}, {"x": {1, 2}}])
def test_a_state_that_is_no_json_is_refused_before_anything_is_written(tmp_path: Path, state: dict):
    with pytest.raises(TitanError, match="not plain JSON"):
        save_checkpoint(tmp_path / "step-1", some_tensors(), state, lock_text="", run_id=RUN)
    assert list(tmp_path.iterdir()) == []


def test_a_step_saved_again_replaces_the_old(tmp_path: Path):
    save(tmp_path / "step-1", seed=1)
    newer = save(tmp_path / "step-1", seed=2)
    loaded = zeros(newer)
    assert load_checkpoint(tmp_path / "step-1", loaded) == {"seed": 2}
    assert same(loaded, newer)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_a_folder_that_was_renamed_to_another_step_is_neither_loaded_nor_resumed_from(tmp_path: Path):
    for step in (1, 2):
        save(tmp_path / f"step-{step}")
    renamed = (tmp_path / "step-2").rename(tmp_path / "step-7777")
    words = "is named for step 7777, but its manifest.json says step 2"
    with pytest.raises(EnvironmentProblem, match=words):
        load_checkpoint(renamed, {})
    told: list[str] = []
    assert newest_good(tmp_path, rejected=told.append) == tmp_path / "step-1"
    assert len(told) == 1 and words in told[0]
    # Of what has no step in its name nothing is asked.
    load_checkpoint(renamed.rename(tmp_path / "best"), {})


def test_another_runs_checkpoint_is_never_replaced(tmp_path: Path):
    save(tmp_path / "step-1", seed=1, run_id="theirs")
    with pytest.raises(EnvironmentProblem, match="written by another run"):
        save(tmp_path / "step-1", seed=2)
    assert read_manifest(tmp_path / "step-1").run_id == "theirs"
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_a_folder_of_unknown_origin_is_set_aside_not_deleted(tmp_path: Path):
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "precious").write_text("mine")
    save(tmp_path / "step-1")
    (aside,) = tmp_path.glob("step-1.unknown-*")
    assert (aside / "precious").read_text() == "mine"
    assert newest(tmp_path) == tmp_path / "step-1"
    save(tmp_path / "step-2")
    assert aside.exists()


@pytest.mark.parametrize("name", ["step-1", "my-weights"])
def test_a_failure_between_the_renames_gives_the_old_one_its_name_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    save(tmp_path / name, seed=1)
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if ".tmp-" in self.name:
            raise PermissionError(13, "Permission denied")
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", failing)
        with pytest.raises(EnvironmentProblem, match="Permission denied"):
            save(tmp_path / name, seed=2)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert read_manifest(tmp_path / name).state == {"seed": 1}


def test_a_kill_between_the_renames_loses_nothing(tmp_path: Path):
    save(tmp_path / "step-1", seed=1)
    (tmp_path / "step-1").rename(tmp_path / ".step-1.old-0a1b2c3d")  # as it stands at that moment
    (tmp_path / f"{hidden_prefix('step-1', RUN)}01234567").mkdir()
    found = newest(tmp_path)
    assert found is not None
    assert read_manifest(found).state == {"seed": 1}
    assert newest_good(tmp_path) == found
    save(tmp_path / "step-2", seed=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-2"]
    assert read_manifest(tmp_path / "step-1").state == {"seed": 1}


def test_leftovers_of_this_run_go_at_the_next_save_and_others_stay(tmp_path: Path):
    save(tmp_path / "step-1", seed=1)
    mine = tmp_path / f"{hidden_prefix('step-5', RUN)}01234567"
    theirs = tmp_path / f"{hidden_prefix('step-5', 'theirs')}01234567"
    replaced = tmp_path / ".step-1.old-01234567"
    foreign = [tmp_path / ".step-1.old-mine", tmp_path / ".cache", tmp_path / "my-best-step-1"]
    for folder in (mine, theirs, *foreign):
        folder.mkdir()
    save(tmp_path / "other" / "step-1", seed=9)
    (tmp_path / "other" / "step-1").rename(replaced)
    save(tmp_path / "step-2")
    assert not mine.exists()
    assert not replaced.exists()
    assert all(folder.exists() for folder in (theirs, *foreign))


def test_an_empty_folder_may_be_saved_to(tmp_path: Path):
    (tmp_path / "weights").mkdir()
    tensors = save(tmp_path / "weights")
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]
    assert sorted(CheckpointReader(tmp_path / "weights").names()) == sorted(tensors)
