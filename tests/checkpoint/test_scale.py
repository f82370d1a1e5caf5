"""Metadata at the size of Llama 3.1 405B, simulated; plans that are made once; bytes that are read once."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.checkpoint.tensors import RUN, bits, same
from tests.checkpoint.test_layouts import cut, full, whole
from titancli.checkpoint import Checkpointer, CheckpointReader, load_checkpoint, save_checkpoint
from titancli.checkpoint.format import plan
from titancli.checkpoint.format.hashed import Digest
from titancli.checkpoint.format.manifest import DamagedCheckpoint
from titancli.checkpoint.format.metadata import open_metadata
from titancli.checkpoint.format.plan import SavePlan
from titancli.errors import EnvironmentProblem, TitanError
from titancli.recipe.schema import Checkpoint


def _benchmark() -> Any:
    path = Path(__file__).parents[2] / "benchmarks" / "metadata.py"
    spec = importlib.util.spec_from_file_location("benchmark_of_metadata", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("ranks", "shards", "megabytes"),
    [
        (1024, 512, 1.0),
        pytest.param(8192, 8192, 2.0, marks=pytest.mark.slow),
        pytest.param(8192, 512, 2.0, marks=pytest.mark.slow),
    ],
)
def test_what_a_rank_reads_and_what_rank_zero_plans_stay_small(
    tmp_path: Path, ranks: int, shards: int, megabytes: float
) -> None:
    big = _benchmark()
    given = big.told(ranks, shards)
    made, tasks = big.plan(given)
    assert made.needed == sum(4 * torch.Size(shape).numel() for shape in big.tensors().values())
    rank = 1
    big.write(tmp_path, made, given, tasks, big.needed_parts(made, given, rank))
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < megabytes * 1e6
    # With HSDP one of the replicas has written each, and which one differs from tensor to tensor.
    assert big.load(tmp_path, rank, shards) == len(big.tensors())


def _agreed(everyones: list[dict[str, tuple[tuple[int, ...], int, int]]]) -> tuple[SavePlan, list[list[str]]]:
    """The plan for ranks that hold rows of tensors, (shape, first, count) by name; and what each writes."""
    told, names = [], {}
    for tensors in everyones:
        boxes: dict[plan.Box, list[str]] = {}
        for name, (shape, first, count) in tensors.items():
            box = plan.Box("F32", shape, (first, *(0 for _ in shape[1:])), (count, *shape[1:]))
            boxes.setdefault(box, []).append(name)
        rows = []
        for box, found in boxes.items():
            names["/".join(sorted(found))] = tuple(sorted(found))
            rows.append((box, "/".join(sorted(found))))
        told.append(rows)
    made = SavePlan()
    tasks = made._divide(told, names)
    return made, [
        sorted(name for name, _ in plan._mine(task, rows, names))
        for task, rows in zip(tasks, told, strict=True)
    ]


def test_each_tensor_is_written_once_whatever_the_ranks_have_in_common(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole_one = ((4, 2), 0, 4)
    _, small = _agreed([dict.fromkeys("abc", whole_one), dict.fromkeys("bcd", whole_one)])
    assert small == [["a", "b", "c"], ["d"]]  # what is small is written by the first that has it
    monkeypatch.setattr(plan, "SHARED", 32)
    _, shared = _agreed([dict.fromkeys("abcdef", whole_one)] * 3)
    assert sorted(shared) == [["a", "b"], ["c", "d"], ["e", "f"]]
    made, parts = _agreed([{"a": ((4, 2), 0, 3), "b": whole_one}, {"a": ((4, 2), 3, 1), "b": whole_one}])
    assert parts in ([["a"], ["a", "b"]], [["a", "b"], ["a"]]) and made.needed == 64


def test_ranks_that_contradict_each_other_are_told_the_tensor() -> None:
    with pytest.raises(TitanError, match="the parts of a that the ranks hold overlap or leave gaps"):
        _agreed([{"a": ((4, 2), 0, 2)}, {"a": ((4, 2), 1, 3)}])
    with pytest.raises(TitanError, match="the parts of a that the ranks hold overlap or leave gaps"):
        _agreed([{"a": ((4, 2), 0, 2)}, {"a": ((4, 2), 3, 1)}])
    with pytest.raises(TitanError, match="a has different dtypes or shapes on the ranks"):
        _agreed([{"a": ((4, 2), 0, 4)}, {"a": ((5, 2), 0, 5)}])


def _saves(folder: str) -> list[int]:
    """How often a plan was made: by the first save, and by none after it while the tensors are the same."""
    counts = [0]
    divide = SavePlan._divide

    def counting(self: SavePlan, *given: Any) -> Any:
        counts[-1] += 1
        return divide(self, *given)

    SavePlan._divide = counting  # type: ignore[method-assign]
    try:
        made = Checkpointer(Path(folder), Checkpoint(interval=1, keep_latest_k=0), lock_text="", run_id=RUN)
        for step, layout in enumerate((Shard(0), Shard(0), Shard(1), Shard(1)), start=1):
            made.save(step, cut({n: t + step for n, t in whole().items()}, (2,), [layout]), {})
            made.wait()
            counts.append(0)
        # One rank alone comes with another tensor: all plan again, and it is refused on all of them.
        bad = whole() | ({"model.a": torch.zeros(9)} if dist.get_rank() else {})
        for _ in range(2):
            with pytest.raises(TitanError, match=r"model\.a has different dtypes or shapes"):
                made.save(9, bad, {})
                made.wait()
        made.save(10, cut(whole(), (2,), [Shard(1)]), {})
        made.wait()
    finally:
        SavePlan._divide = divide  # type: ignore[method-assign]
    return counts


@pytest.mark.ranks
def test_a_plan_is_made_once_and_again_when_something_changes(ranks: Any, tmp_path: Path) -> None:
    first, other = ranks(2, _saves, str(tmp_path))
    assert first == [1, 0, 1, 0, 3] and other == [0, 0, 0, 0, 0]
    for step in (1, 2, 3, 4):
        reader = CheckpointReader(tmp_path / f"step-{step}")
        assert same({n: reader.read(n) for n in reader.names()}, {n: t + step for n, t in whole().items()})
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-1",
        "step-10",
        *(f"step-{n}" for n in (2, 3, 4)),
    ]


# ----------------------------------------------------------------------------------------------------- bytes

LAYOUTS: dict[str, tuple[tuple[int, ...], list[Any]]] = {
    "one": ((1,), [Shard(0)]),
    "fsdp": ((2,), [Shard(0)]),
    "fsdp4": ((4,), [Shard(0)]),
    "ddp": ((2,), [Replicate()]),
    "hsdp": ((2, 2), [Replicate(), Shard(0)]),
    "tp": ((4,), [Shard(1)]),
    "fsdp, tp": ((2, 2), [Shard(0), Shard(1)]),
    "ddp, tp": ((2, 2), [Replicate(), Shard(1)]),
}


def _state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    shapes = {f"model.{n}": (128, 100 + n) for n in range(4)} | {
        "optimizer.0.odd": (97, 64),
        "model.v": (4096,),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def _save_in_pieces(folder: str, layout: str) -> None:
    from titancli.checkpoint.format import hashed, metadata, storage

    usual = hashed.PIECE
    hashed.PIECE = metadata.PIECE = storage.PIECE = 256
    try:
        save_checkpoint(Path(folder), cut(_state(), *LAYOUTS[layout]), {}, lock_text="", run_id=RUN)
    finally:
        hashed.PIECE = metadata.PIECE = storage.PIECE = usual


def _bytes_of_a_load(folder: str, layout: str) -> tuple[bool, int, int]:
    """Whether all is right, and how many bytes of data files this rank has read, and hashed."""
    from titancli.checkpoint.format import reader, replicas

    read, hashed = [0], [0]
    really = reader.read_into, reader.checksum, replicas.WORTH

    def reading(path: Path, start: int, memory: memoryview) -> None:
        read.append(memory.nbytes)
        really[0](path, start, memory)

    def hashing(memory: memoryview) -> str:
        hashed.append(memory.nbytes)
        return really[1](memory)

    reader.read_into, reader.checksum, replicas.WORTH = reading, hashing, 1
    try:
        tensors = cut({n: torch.zeros_like(t) for n, t in _state().items()}, *LAYOUTS[layout])
        load_checkpoint(Path(folder), tensors)
    finally:
        reader.read_into, reader.checksum, replicas.WORTH = really
    right = all(bits(full(tensors[name])) == bits(tensor) for name, tensor in _state().items())
    return right, sum(read), sum(hashed)


@pytest.mark.ranks
@pytest.mark.parametrize("before", ["one", "fsdp", "hsdp"])
def test_a_rank_reads_and_hashes_its_share_once(ranks: Any, tmp_path: Path, before: str) -> None:
    folder = tmp_path / "step-1"
    ranks(torch.Size(LAYOUTS[before][0]).numel(), _save_in_pieces, str(folder), before)
    data = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    for after, (shape, _) in LAYOUTS.items():
        count = torch.Size(shape).numel()
        results = ranks(count, _bytes_of_a_load, str(folder), after)
        assert all(right for right, _, _ in results), after
        # Replicas share: the whole is read once. A rank's own share is not exactly one in `count`: odd rows.
        assert all(read == hashed for _, read, hashed in results)
        assert sum(read for _, read, _ in results) <= 1.1 * data, after
        alone = 4096 * 4 if "tp" in after else 0  # model.v has no columns: one of the ranks reads it
        assert max(read for _, read, _ in results) <= 1.15 * data / count + alone, after


def _damaged_load(folder: str) -> str:
    try:
        return str(_bytes_of_a_load(folder, "tp")[0])
    except DamagedCheckpoint as error:
        return error.why


@pytest.mark.ranks
def test_damage_in_rows_that_a_rank_reads_for_others_is_found_by_all(ranks: Any, tmp_path: Path) -> None:
    ranks(1, _save_in_pieces, str(tmp_path / "step-1"), "one")
    path = tmp_path / "step-1/rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-20000] ^= 1
    path.write_bytes(data)
    told = ranks(4, _damaged_load, str(tmp_path / "step-1"))
    assert len(set(told)) == 1 and "rank-00000.safetensors is damaged" in told[0]


def _load_apart(folder: str) -> bool:
    """Replicas by their mesh, of which one has more to load than the other."""
    from titancli.checkpoint.format import replicas

    replicas.WORTH, usual = 1, replicas.WORTH
    try:
        names = sorted(_state())[dist.get_rank() :]
        mesh = init_device_mesh("cpu", (2,))
        tensors = {
            n: DTensor.from_local(torch.zeros_like(_state()[n]), mesh, [Replicate()], run_check=False)
            for n in names
        }
        load_checkpoint(Path(folder), tensors)
    finally:
        replicas.WORTH = usual
    return all(bits(tensors[name].to_local()) == bits(_state()[name]) for name in names)


@pytest.mark.ranks
def test_replicas_that_load_different_tensors_do_not_wait_for_each_other(ranks: Any, tmp_path: Path) -> None:
    ranks(2, _save_in_pieces, str(tmp_path / "step-1"), "ddp")
    assert ranks(2, _load_apart, str(tmp_path / "step-1")) == [True, True]


def _load_another_shape(folder: str) -> str:
    tensors = {"model.v": torch.zeros(4096 + dist.get_rank())}
    with pytest.raises(TitanError) as caught:
        load_checkpoint(Path(folder), tensors)
    return caught.value.message


@pytest.mark.ranks
def test_ranks_that_want_different_shapes_are_all_told(ranks: Any, tmp_path: Path) -> None:
    ranks(1, _save_in_pieces, str(tmp_path / "step-1"), "one")
    words = "model.v has different dtypes or shapes on the ranks and cannot be loaded"
    assert ranks(2, _load_another_shape, str(tmp_path / "step-1")) == [words, words]


def _readers() -> list[tuple[str, tuple[int, ...], int]]:
    from titancli.checkpoint.format.replicas import shared_among_replicas

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "tp"))
    ways = {"norm": [Shard(0), Replicate()], "up": [Replicate(), Shard(0)]}
    names = [f"model.{layer}.{way}" for layer in range(3) for way in ways]
    tensors = {name: distribute_tensor(torch.ones(256, 256), mesh, ways[name[8:]]) for name in names}
    shared = shared_among_replicas(tensors, [""] * 4)
    return [
        (name, tuple(dist.get_process_group_ranks(found.group)), found.reader)
        for name, found in shared.items()
    ]


@pytest.mark.ranks
def test_replicas_agree_on_who_reads_where_their_groups_cross(ranks: Any) -> None:
    everyones = [found for of_rank in ranks(4, _readers) for found in of_rank]
    groups = {(name, group) for name, group, _ in everyones}
    assert len(groups) == 12
    assert len(set(everyones)) == len(groups)  # one reader each
    assert {reader for _, _, reader in everyones} == {0, 1, 2, 3}


def test_what_a_part_says_is_compared_with_the_manifest_and_the_index(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "step-1", whole(), {}, lock_text="", run_id=RUN)
    name = "metadata-00000.json.gz"
    (tmp_path / "step-1" / name).write_bytes(bytes((tmp_path / "step-1" / name).stat().st_size))
    with pytest.raises(EnvironmentProblem, match=r"metadata-00000\.json\.gz is damaged"):
        load_checkpoint(tmp_path / "step-1", whole())
    files = {"metadata.json": Digest(0, "")}
    with pytest.raises(EnvironmentProblem, match=r"metadata\.json is damaged"):
        open_metadata(tmp_path / "step-1", files)
    with pytest.raises(EnvironmentProblem, match=r"metadata-00000\.json\.gz is malformed"):
        open_metadata(tmp_path / "step-1").everything()
