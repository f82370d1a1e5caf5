"""Saved on one layout, loaded on another: FSDP2, HSDP, tensor-parallel-like cuts, one process."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tests.checkpoint import partial
from tests.checkpoint.tensors import RUN, bits, parts
from titancli.checkpoint import (
    Checkpointer,
    CheckpointReader,
    load_checkpoint,
    newest,
    read_manifest,
    save_checkpoint,
)
from titancli.checkpoint.format.metadata import open_metadata
from titancli.errors import TitanError
from titancli.recipe.schema import Checkpoint

pytestmark = pytest.mark.ranks


def whole() -> dict[str, Tensor]:
    """Odd sizes, sizes below the number of ranks, bf16, and a step without dimensions."""
    generator = torch.Generator().manual_seed(0)
    return {
        "model.a": torch.randn(7, 6, generator=generator),
        "model.b": torch.randn(2, 5, generator=generator).bfloat16(),
        "model.c": torch.randn(1, generator=generator),
        "model.d": torch.randn(8, 8, generator=generator),
        "optimizer.a.step": torch.tensor(17.0),
    }


def cut(tensors: dict[str, Tensor], shape: tuple[int, ...], placements: list[Any]) -> dict[str, Tensor]:
    """DTensors on a mesh of a shape; what has no dimensions stays plain."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard")[-len(shape) :])
    return {
        name: distribute_tensor(tensor, mesh, _fit(tensor, placements)) if tensor.ndim else tensor.clone()
        for name, tensor in tensors.items()
    }


def _fit(tensor: Tensor, placements: list[Any]) -> list[Any]:
    return [p if not isinstance(p, Shard) or p.dim < tensor.ndim else Replicate() for p in placements]


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


LAYOUTS: dict[str, tuple[tuple[int, ...], list[Any]]] = {
    "fsdp": ((2,), [Shard(0)]),
    "columns": ((2,), [Shard(1)]),
    "ddp": ((2,), [Replicate()]),
    "one": ((1,), [Shard(0)]),
    "fsdp4": ((4,), [Shard(0)]),
    "hsdp": ((2, 2), [Replicate(), Shard(0)]),
    "grid": ((2, 2), [Shard(0), Shard(1)]),
}


def ranks_of(layout: str) -> int:
    return torch.Size(LAYOUTS[layout][0]).numel()


def _save(folder: str, layout: str) -> None:
    save_checkpoint(
        Path(folder),
        cut(whole(), *LAYOUTS[layout]),
        {"rank": dist.get_rank()},
        lock_text="x = 1\n",
        run_id=RUN,
    )


def _load_shared(folder: str, layout: str) -> dict[str, bytes]:
    """What several ranks need is read once, and sent, however small it is."""
    from titancli.checkpoint.format import replicas

    replicas.WORTH, usual = 1, replicas.WORTH
    try:
        return _load(folder, layout)
    finally:
        replicas.WORTH = usual


def _load(folder: str, layout: str) -> dict[str, bytes]:
    expected = whole()
    tensors = cut({name: torch.zeros_like(tensor) for name, tensor in expected.items()}, *LAYOUTS[layout])
    state = load_checkpoint(Path(folder), tensors)
    assert state == {"rank": 0}
    return {name: bits(full(tensor)) for name, tensor in tensors.items()}


@pytest.mark.parametrize("before", LAYOUTS)
def test_every_layout_loads_on_every_other_bit_for_bit(ranks: Any, tmp_path: Path, before: str):
    folder = tmp_path / "step-1"
    ranks(ranks_of(before), _save, str(folder), before)
    expected = {name: bits(tensor) for name, tensor in whole().items()}
    for after in LAYOUTS:
        assert ranks(ranks_of(after), _load_shared, str(folder), after) == [expected] * ranks_of(after), after


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_process_reads_what_ranks_wrote(ranks: Any, tmp_path: Path, layout: str):
    folder = tmp_path / "step-1"
    ranks(ranks_of(layout), _save, str(folder), layout)
    reader = CheckpointReader(folder)
    assert {name: bits(reader.read(name)) for name in reader.names()} == {
        name: bits(tensor) for name, tensor in whole().items()
    }
    tensors = {name: torch.zeros_like(tensor) for name, tensor in whole().items()}
    load_checkpoint(folder, tensors)
    assert all(bits(tensors[name]) == bits(tensor) for name, tensor in whole().items())
    assert read_manifest(folder).layout["ranks"] == ranks_of(layout)


def test_replicas_are_written_once(ranks: Any, tmp_path: Path):
    ranks(4, _save, str(tmp_path / "step-1"), "hsdp")
    size = sum(tensor.nbytes for tensor in whole().values())
    chunks = [chunk for t in open_metadata(tmp_path / "step-1").everything().values() for chunk in t.chunks]
    assert len({(chunk.file, chunk.key) for chunk in chunks}) == len(chunks)
    data = sum(path.stat().st_size for path in (tmp_path / "step-1").glob("*.safetensors"))
    headers = sum(
        8 + int.from_bytes(p.read_bytes()[:8], "little") for p in (tmp_path / "step-1").glob("*.s*")
    )
    assert data - headers == size
    assert read_manifest(tmp_path / "step-1").layout == {
        "ranks": 4,
        "mesh": {"dp_replicate": 2, "dp_shard": 2},
    }


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        model(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    tensors = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            tensors[f"optimizer.{name}.{key}"] = value
    return tensors


def _fsdp() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = fully_shard(_model())
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def _train_and_save(folder: str, mode: str) -> list[bytes]:
    model, optimizer = _fsdp()
    checkpointer = Checkpointer(
        Path(folder),
        Checkpoint(interval=2, async_mode=mode),
        lock_text="",
        run_id=RUN,  # type: ignore[arg-type]
    )
    for step in range(1, 5):
        _train(model, optimizer, range(step, step + 1))
        if checkpointer.due(step):
            checkpointer.save(step, _state(model, optimizer), {"step": step})
    checkpointer.wait()
    return [bits(full(tensor)) for tensor in _state(model, optimizer).values()]


def _resume(folder: str) -> list[bytes]:
    model, optimizer = _fsdp()
    _train(model, optimizer, range(100, 101))  # other values everywhere, and a full optimizer state
    state = load_checkpoint(Path(folder) / "step-2", _state(model, optimizer))
    _train(model, optimizer, range(state["step"] + 1, 5))
    return [bits(full(tensor)) for tensor in _state(model, optimizer).values()]


@pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])
def test_a_sharded_model_resumed_is_bitwise_the_uninterrupted_one(ranks: Any, tmp_path: Path, mode: str):
    assert ranks(2, _resume_setup, str(tmp_path), mode) == [True, True]


def _resume_setup(folder: str, mode: str) -> bool:
    uninterrupted = _train_and_save(folder, mode)
    return _resume(folder) == uninterrupted


def _errors(function: Any) -> str:
    """The error of a rank; that every rank has it, and none hangs, is what is tested."""
    try:
        function()
    except TitanError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _save_where_one_rank_cannot_write(folder: str, mode: str) -> list[str]:
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    tensors = cut({"model.a": torch.ones(2, 1 << 16)}, (2,), [Shard(0)])
    checkpointer = Checkpointer(
        Path(folder),
        Checkpoint(interval=1, async_mode=mode),
        lock_text="",
        run_id=RUN,  # type: ignore[arg-type]
    )

    def save(step: int) -> None:
        checkpointer.save(step, tensors, {"step": step})
        checkpointer.wait()

    save(1)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        told = [_errors(lambda: save(2))]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    dist.barrier()
    told += sorted(path.name for path in Path(folder).iterdir())
    dist.barrier()
    save(3)
    return told


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_failure_on_one_rank_is_told_on_all_and_the_run_goes_on(ranks: Any, tmp_path: Path, mode: str):
    one, other = ranks(2, _save_where_one_rank_cannot_write, str(tmp_path), mode)
    assert one == other
    assert one[0].startswith("EnvironmentProblem: ")
    assert "File too large" in one[0]
    assert one[1:] == ["step-1"]
    assert newest(tmp_path) == tmp_path / "step-3"


def _load_all(folder: str) -> str:
    return _errors(lambda: _load(folder, "fsdp"))


def test_damage_is_told_alike_on_every_rank(ranks: Any, tmp_path: Path):
    """The ranks share the files among them, so only one of them sees it."""
    folder = tmp_path / "step-1"
    ranks(2, _save, str(folder), "fsdp")
    for name in (
        *(f"rank-0000{n}.safetensors" for n in (0, 1)),
        *(f"metadata-0000{n}.json.gz" for n in (0, 1)),
        "metadata.json",
        "manifest.json",
    ):
        copy = tmp_path / name.partition(".")[0] / "step-1"
        shutil.copytree(folder, copy)
        data = bytearray((copy / name).read_bytes())
        data[-3] ^= 1
        (copy / name).write_bytes(data)
        one, other = ranks(2, _load_all, str(copy))
        assert one == other
        assert "damaged" in one
        assert name in one


def _load_wrong_shape(folder: str) -> str:
    tensors = cut({**whole(), "model.a": torch.zeros(7, 7)}, (2,), [Shard(0)])
    return _errors(lambda: load_checkpoint(Path(folder), tensors))


def test_a_mismatch_is_told_alike_on_every_rank(ranks: Any, tmp_path: Path):
    ranks(2, _save, str(tmp_path / "step-1"), "fsdp")
    one, other = ranks(2, _load_wrong_shape, str(tmp_path / "step-1"))
    assert one == other
    assert "model.a is [7, 6] in the checkpoint and [7, 7] in the model" in one


def _save_partial(folder: str) -> str:
    mesh = init_device_mesh("cpu", (2,))
    tensors = {"model.a": DTensor.from_local(torch.ones(2), mesh, [Partial()])}
    return _errors(lambda: save_checkpoint(Path(folder), tensors, {}, lock_text="", run_id=RUN))


def test_sums_that_are_not_reduced_are_refused(ranks: Any, tmp_path: Path):
    one, other = ranks(2, _save_partial, str(tmp_path / "step-1"))
    assert one == other
    assert "model.a" in one


def _save_where_nothing_can_be_purged(folder: str, mode: str) -> tuple[int | None, list[int]]:
    """Rank 0 cannot list the folder once step 1 is saved."""
    from titancli.checkpoint import checkpointer as module

    def broken(folder: Path) -> None:
        raise OSError(5, "Input/output error")

    told: list[int] = []
    checkpointer = Checkpointer(
        Path(folder),
        Checkpoint(interval=1, async_mode=mode, keep_latest_k=1),  # type: ignore[arg-type]
        lock_text="",
        run_id=RUN,
        on_saved=lambda step, path: told.append(step),
    )
    really, module.steps = module.steps, broken  # type: ignore[assignment]
    try:
        for step in (1, 2):
            checkpointer.save(step, cut(whole(), (2,), [Shard(0)]), {"step": step})
        checkpointer.wait()
    finally:
        module.steps = really
    return checkpointer._saved, told


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_purge_that_fails_changes_nothing_for_the_ranks(ranks: Any, tmp_path: Path, mode: str):
    assert ranks(2, _save_where_nothing_can_be_purged, str(tmp_path), mode) == [(2, [1, 2])] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-2"]


def _load_own(folders: str) -> tuple[str, bool]:
    """Each rank has its own view of the disk."""
    from titancli.distributed import shared_folder

    tensors = {name: torch.zeros_like(tensor) for name, tensor in whole().items()}
    usual, shared_folder.PATIENCE = shared_folder.PATIENCE, 0.3
    try:
        told = _errors(lambda: load_checkpoint(Path(folders) / f"node{dist.get_rank()}" / "step-1", tensors))
    finally:
        shared_folder.PATIENCE = usual
    return told, all(bits(tensors[name]) == bits(tensor) for name, tensor in whole().items())


@pytest.mark.parametrize("node", [0, 1])
def test_a_bit_that_one_node_alone_sees_flipped_is_found(ranks: Any, tmp_path: Path, node: int):
    save_checkpoint(tmp_path / "node0/step-1", whole(), {}, lock_text="", run_id=RUN)
    shutil.copytree(tmp_path / "node0", tmp_path / "node1")
    assert ranks(2, _load_own, str(tmp_path)) == [("no error", True)] * 2
    path = tmp_path / f"node{node}/step-1/rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    for told, _ in ranks(2, _load_own, str(tmp_path)):
        assert f"node{node}/step-1 is damaged: rank-00000.safetensors is damaged" in told


def test_a_node_with_a_stale_view_is_found(ranks: Any, tmp_path: Path):
    """It still sees the checkpoint that had this name before."""
    for node in (0, 1):
        tensors = whole() | {"model.a": torch.full((7, 6), float(node))}
        save_checkpoint(tmp_path / f"node{node}/step-1", tensors, {}, lock_text="", run_id=RUN)
    for told, _ in ranks(2, _load_own, str(tmp_path)):
        assert "the ranks read different checkpoints" in told
        assert "rank 1 on " in told


def _through_small_pieces(folder: str, before: str, after: str) -> dict[str, bytes]:
    """Saved and loaded with a checksum for every 32 bytes."""
    from titancli.checkpoint.format import hashed, metadata, storage

    modules, usual = (hashed, metadata, storage), hashed.PIECE
    for module in modules:
        module.PIECE = 32
    try:
        _save(folder, before)
        return _load(folder, after)
    finally:
        for module in modules:
            module.PIECE = usual


@pytest.mark.parametrize("before, after", [("fsdp", "columns"), ("columns", "fsdp"), ("ddp", "fsdp")])
def test_a_rank_reads_the_pieces_that_hold_its_part(ranks: Any, tmp_path: Path, before: str, after: str):
    expected = {name: bits(tensor) for name, tensor in whole().items()}
    assert ranks(2, _through_small_pieces, str(tmp_path / "step-1"), before, after) == [expected] * 2
    tables = parts(tmp_path / "step-1").values()
    counts = [len(row["xxh3_64"]) for table in tables for rows in table["tensors"].values() for row in rows]
    assert max(counts) > 3 and min(counts) == 1


# ------------------------------------------------------------------------------------- Hugging Face folders


@pytest.mark.parametrize(
    ("case", "placements", "most"),
    [
        ("bf16", [Shard(0)], 1.1),
        ("bf16", [Shard(1)], 1.1),
        ("bf16", [Shard(0), Shard(1)], 1.1),
        ("mxfp4", [Shard(0)], 1.1),
        ("mxfp4", [Shard(1)], 1.1),
        ("fp8", [Shard(0)], 1.1),
        ("fp8", [Shard(1)], 1.1),
        ("fp8", [Replicate(), Shard(0)], 1.1),
        ("bf16", [Shard(0), Shard(2)], 1.1),
    ],
    ids=str,
)
def test_each_rank_reads_its_own_part(
    ranks: Any, tmp_path: Path, case: str, placements: list[Any], most: float
) -> None:
    path = str(partial.folder(tmp_path / "hf", case))
    for read, share in ranks(4, partial.load, path, case, placements):
        assert share <= read + 4096
        assert read <= most * share + 4096  # headers
    if placements == [Shard(0)]:
        ((read, share),) = ranks(1, partial.load, path, case, placements)
        assert read <= 1.1 * share


@pytest.mark.slow
@pytest.mark.parametrize("case", ["bf16", "mxfp4"])
def test_a_load_takes_little_more_memory_than_the_shard(
    ranks: Any, tmp_path: Path, case: str, monkeypatch: Any
):
    shapes = {partial.W13: (4, 8192, 1024)}  # 128 MiB in float32
    _, tensors_of, _, method = partial.CASES[case]
    monkeypatch.setitem(
        partial.CASES, case, (lambda: partial.gpt_oss(1024, 4096), tensors_of, shapes, method)
    )
    path = str(partial.folder(tmp_path / "hf", case))
    for world in (1, 4):
        for more, _ in ranks(world, partial.peak, path, case, shapes):
            assert more <= 64 * partial.MIB


@pytest.mark.parametrize(("case", "dim"), [("mxfp4", 0), ("bf16", 1)])
def test_a_disk_that_fails_on_one_rank_stops_them_all(
    ranks: Any, tmp_path: Path, case: str, dim: int
) -> None:
    said = ranks(2, partial.failing, str(partial.folder(tmp_path / "hf", case)), case, dim)
    assert said[0] == said[1]
    assert "model.safetensors cannot be read: Input/output error" in said[0]
