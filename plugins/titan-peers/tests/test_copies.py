"""Copies of the state in the memory of nodes: here each node is a folder, and is lost with it."""

from __future__ import annotations

import errno
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.checkpoint.tensors import bits
from titan_peers import copies as module
from titan_peers import memory
from titan_peers.copies import Copies
from titan_peers.memory import Copy, Memory, outdated, read_record, write_record
from titan_peers.nodes import Nodes
from titancli.checkpoint import Checkpointer, load_checkpoint, save_checkpoint
from titancli.checkpoint.format import replicas
from titancli.checkpoint.format.manifest import DamagedCheckpoint
from titancli.distributed.mesh import init_device_mesh
from titancli.errors import EnvironmentProblem, TitanError
from titancli.recipe.schema import Checkpoint

RUN, OTHER = "a" * 32, "b" * 32


def whole(step: int) -> dict[str, Tensor]:
    """Odd sizes, one below the number of ranks, one that is replicated, a step without dimensions."""
    generator = torch.Generator().manual_seed(step)
    return {
        "model.a": torch.randn(37, 6, generator=generator),
        "model.b": torch.randn(2, 5, generator=generator).bfloat16(),
        "model.c": torch.randn(400, 130, generator=generator),
        "model.replicated": torch.randn(3, 3, generator=generator),
        "optimizer.a.step": torch.tensor(float(step)),
    }


def sharded(tensors: dict[str, Tensor], dim: int = 0) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    return {
        name: distribute_tensor(tensor, mesh, [Replicate() if "replicated" in name else Shard(dim)])
        if tensor.ndim
        else tensor.clone()
        for name, tensor in tensors.items()
    }


class Cluster:
    """Ranks on nodes whose memories are folders below `base`."""

    def __init__(self, base: Path, ranks_of_a_node: int = 1) -> None:
        self.base, self.each = base, ranks_of_a_node
        self.checkpoints = base / "run/checkpoints"

    def memory(self, node: int) -> Path:
        return self.base / f"node{node}"

    def make(self) -> None:
        self.checkpoints.mkdir(parents=True)
        for node in range(4):
            self.memory(node).mkdir()

    def lose(self, node: int) -> None:
        shutil.rmtree(self.memory(node))
        self.memory(node).mkdir()

    def flip(self, node: int, name: str) -> None:
        """Flip the last byte of a file that a node holds."""
        [path] = self.memory(node).glob(f"titan-*/step-*/{name}")
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))

    def copies(self, attempt: int = 1) -> Copies:
        return Copies(self.memory(dist.get_rank() // self.each), self.checkpoints, RUN, attempt)


def copy(cluster: Cluster, steps: list[int], mode: str = "disabled") -> None:
    """Copy states, without a checkpoint on the disk."""
    copies = cluster.copies()
    section = Checkpoint(interval=100, async_mode=mode)  # type: ignore[arg-type]
    checkpointer = Checkpointer(cluster.checkpoints, section, lock_text="x = 1\n", run_id=RUN, copies=copies)
    checkpointer.reserve(sharded(whole(0)))
    for step in steps:
        assert checkpointer.due(step) or mode != "disabled"
        checkpointer.save(step, sharded(whole(step)), {"step": step})
        checkpointer.wait()
    copies.close()


def load_columns(cluster: Cluster) -> str:
    """On a layout that reads rows together, and sends columns."""
    replicas.WORTH, usual = 1, replicas.WORTH
    try:
        return load(cluster, dim=1)
    finally:
        replicas.WORTH = usual


def load(cluster: Cluster, attempt: int = 1, wanted: bool = True, dim: int = 0) -> str:
    """Return what a resume gets; or what the ranks say, each the same."""
    copies = cluster.copies(attempt)
    try:
        if (folder := copies.newest(wanted=wanted)) is None:
            return "nothing"
        tensors = sharded({name: torch.zeros_like(tensor) for name, tensor in whole(0).items()}, dim)
        try:
            state = load_checkpoint(folder, tensors)
        except DamagedCheckpoint as error:
            assert copies.folder is not None and error.folder.name == copies.folder.name
            copies.discard()
            return f"damaged: {error.why}"
        sent = copies._sources.sent  # type: ignore[union-attr]
        assert copies.loaded() and not copies.loaded()
        dist.barrier()
        assert not folder.exists()
        for name, tensor in whole(state["step"]).items():
            found = tensors[name].full_tensor() if tensor.ndim else tensors[name]  # type: ignore[attr-defined]
            assert bits(found) == bits(tensor), name
        return f"step {state['step']}, {'some' if sent else 'none'} sent"
    finally:
        copies.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    made = Cluster(tmp_path)
    made.make()
    return made


@pytest.mark.ranks
@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_any_node_may_be_lost_and_all_ranks_load_bit_for_bit(ranks: Any, cluster: Cluster, mode: str) -> None:
    ranks(3, copy, cluster, [1, 2], mode)
    held = [{p.name for p in cluster.memory(n).glob("titan-*/step-2/rank-*")} for n in range(3)]
    assert held == [{f"rank-0000{r}.safetensors" for r in (n, (n - 1) % 3)} for n in range(3)]
    assert not list(cluster.base.glob("node*/titan-*/step-1")) and not list(cluster.checkpoints.glob("step*"))
    for lost in range(3):
        saved = cluster.base / "saved"
        shutil.copytree(cluster.base / f"node{lost}", saved)
        cluster.lose(lost)
        assert ranks(3, load, cluster) == ["step 2, some sent"] * 3, lost
        if lost == 2:
            assert ranks(2, load, cluster) == ["step 2, some sent"] * 2  # with one node fewer
        shutil.rmtree(cluster.memory(lost))
        saved.rename(cluster.memory(lost))
    for lost in (0, 1):
        cluster.lose(lost)
    assert ranks(3, load, cluster) == ["nothing"] * 3
    assert read_record(cluster.checkpoints) is None


@pytest.mark.ranks
def test_ranks_of_one_node_share_its_memory(ranks: Any, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 2)
    cluster.make()
    ranks(4, copy, cluster, [3])
    cluster.lose(0)
    assert ranks(4, load, cluster) == ["step 3, some sent"] * 4
    alone = Cluster(tmp_path / "alone", 2)
    alone.make()
    ranks(2, copy, alone, [4])
    assert ranks(2, load, alone) == ["step 4, none sent"] * 2
    alone.lose(0)
    assert ranks(2, load, alone) == ["nothing"] * 2


@pytest.mark.ranks
def test_a_flipped_byte_is_found_by_all_ranks_wherever_it_is(ranks: Any, cluster: Cluster) -> None:
    ranks(2, copy, cluster, [5])
    cluster.flip(0, "manifest.json")  # the other node's is taken
    assert ranks(2, load, cluster) == ["step 5, some sent"] * 2
    cluster.flip(1, "metadata.json")
    assert ranks(2, load, cluster) == ["nothing"] * 2
    for name in ("rank-00000.safetensors", "metadata-00000.json.gz"):
        ranks(2, copy, cluster, [6])
        cluster.flip(0, name)
        assert ranks(2, load, cluster) == ["step 6, some sent"] * 2  # from the other node
        if name.startswith("rank"):
            cluster.flip(0, name)  # what was sent has mended it
        assert ranks(2, load_columns, cluster) == ["step 6, some sent"] * 2
        ranks(2, copy, cluster, [7])
        cluster.flip(0, name)
        cluster.flip(1, name)
        [first, second] = ranks(2, load, cluster)
        assert first == second and first.startswith("damaged: " if "rank" in name else "nothing")
        assert ranks(2, load, cluster) == ["nothing"] * 2  # it does not count any longer


def _failing(cluster: Cluster, what: str) -> str:
    """Step 2 fails on rank 1 after step 1 was copied."""
    copies, really = cluster.copies(), (module.write_pieces, module._compare, module.write_record)

    def refuses(*given: Any) -> Any:
        raise OSError(28, "No space left on device")

    def dies(*given: Any) -> Any:
        raise RuntimeError("a connection was closed")

    section = Checkpoint(interval=100)
    checkpointer = Checkpointer(cluster.checkpoints, section, lock_text="", run_id=RUN, copies=copies)
    told: list[str] = []
    module.logger.warning = lambda *words: told.append(str(words))  # type: ignore[method-assign]
    try:
        checkpointer.due(1)
        checkpointer.save(1, sharded(whole(1)), {"step": 1})
        if dist.get_rank() == 1 and what in ("write", "compare"):
            setattr(module, {"write": "write_pieces", "compare": "_compare"}[what], refuses)
        if what == "record":
            module.write_record = refuses
        checkpointer.due(2)
        tensors, step = sharded(whole(2)), 2
        try:
            checkpointer.save(step, tensors, {"step": step})
            return "went on"
        except TitanError as error:
            return error.message
    finally:
        module.write_pieces, module._compare, module.write_record = really
        del module.logger.warning
        copies.close()


@pytest.mark.ranks
@pytest.mark.parametrize("what", ["write", "compare", "record"])
def test_a_copy_that_fails_on_one_rank_leaves_the_one_before(ranks: Any, cluster: Cluster, what: str) -> None:
    assert ranks(2, _failing, cluster, what) == ["went on"] * 2
    assert {path.name for path in cluster.base.glob("node*/titan-*/*step*")} == {"step-1"}
    cluster.lose(0)
    assert ranks(2, load, cluster) == ["step 1, some sent"] * 2


def _another(cluster: Cluster) -> None:
    """Rank 1's node has another state of the same step, and of the same names and sizes."""
    other = Cluster(cluster.base / "other")
    if dist.get_rank() == 0:
        other.make()
    dist.barrier()
    copies = other.copies()
    section = Checkpoint(interval=100)
    checkpointer = Checkpointer(other.checkpoints, section, lock_text="x = 1\n", run_id=RUN, copies=copies)
    checkpointer.due(7)
    checkpointer.save(7, sharded(whole(8)), {"step": 7})
    copies.close()


@pytest.mark.ranks
def test_copies_of_different_states_are_never_mixed(ranks: Any, cluster: Cluster) -> None:
    ranks(3, copy, cluster, [7])
    ranks(3, _another, cluster)
    shutil.rmtree(cluster.memory(1))
    shutil.copytree(cluster.base / "other/node1", cluster.memory(1))
    assert ranks(3, load, cluster) == ["step 7, some sent"] * 3
    ranks(3, copy, cluster, [7])
    for node in (1, 2):
        shutil.rmtree(cluster.memory(node))
        shutil.copytree(cluster.base / f"other/node{node}", cluster.memory(node))
    assert ranks(3, load, cluster) == ["nothing"] * 3


@pytest.mark.ranks
def test_an_attempt_that_was_asked_for_a_step_takes_its_own_copies_alone(
    ranks: Any, cluster: Cluster
) -> None:
    """However often its ranks are started anew, and wherever the start before was interrupted."""
    ranks(2, copy, cluster, [3])
    assert ranks(2, load, cluster, 1, False) == ["step 3, none sent"] * 2
    assert ranks(2, load, cluster, 2, False) == ["nothing"] * 2


# -------------------------------------------------------------------------------------------- one process


def test_nodes_are_told_apart_by_their_memory() -> None:
    nodes = Nodes.of(["x", "x", "y", "x", "z"])
    assert nodes.ranks == ((0, 1, 3), (2,), (4,))
    assert [nodes.partner(rank) for rank in range(5)] == [2, 2, 4, 2, 0]
    assert nodes.written_for(0) == {0, 1, 3, 4} and nodes.is_first(2) and not nodes.is_first(3)
    assert Nodes.of(["x", "x"]).partner(1) is None


def test_a_copy_counts_until_a_later_checkpoint_is_saved_or_one_is_removed(tmp_path: Path) -> None:
    def save(step: int) -> None:
        save_checkpoint(tmp_path / f"step-{step}", {"model.a": torch.ones(1)}, {}, lock_text="", run_id=RUN)

    assert outdated(tmp_path, Copy(3, "", 0, 1)) is None
    save(4)
    assert outdated(tmp_path, Copy(3, "", 0, 1)) and outdated(tmp_path, Copy(4, "", 0, 1)) is None
    assert outdated(tmp_path, Copy(6, "", 1, 1)) is None
    save(8)
    assert outdated(tmp_path, Copy(6, "", 1, 1)) and outdated(tmp_path, Copy(4, "", 0, 1))
    assert outdated(tmp_path, Copy(9, "", 2, 1)) is None
    shutil.rmtree(tmp_path / "step-8")  # to go back to step 4
    assert outdated(tmp_path, Copy(9, "", 2, 1))


def test_runs_share_a_node_and_only_what_is_forgotten_is_deleted(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    mine, other = Memory(tmp_path, RUN, run), Memory(tmp_path, OTHER, run)
    os.utime(other.folder, (0, 0))
    mine.sweep()  # it is held
    other.close()
    assert other.folder.is_dir()
    os.utime(other.folder)
    mine.sweep()  # its ranks may just be starting again
    assert other.folder.is_dir()
    os.utime(other.folder, (time.time() - 7200,) * 2)
    mine.sweep()
    assert not other.folder.exists()
    gone = Memory(tmp_path, OTHER, tmp_path / "deleted")
    gone.close()
    Copies(tmp_path, run, RUN, 1)  # as each run does when it starts
    assert not gone.folder.exists() and mine.folder.is_dir()


def test_a_memory_that_is_small_missing_or_another_users_is_refused_by_name(tmp_path: Path) -> None:
    memory = Memory(tmp_path, RUN, tmp_path)
    with pytest.raises(
        EnvironmentProblem, match=r"copies of the state need 1000.0 TB in .* is free"
    ) as caught:
        memory.need(10**15)
    assert "--shm-size" in str(caught.value.hint) and "checkpoint.copies.folder" in str(caught.value.hint)
    with pytest.raises(EnvironmentProblem, match="No such file"):
        Memory(tmp_path / "none", RUN, tmp_path)
    (tmp_path / f"titan-{OTHER}").symlink_to(tmp_path)
    with pytest.raises(EnvironmentProblem, match="belongs to another user"):
        Memory(tmp_path, OTHER, tmp_path)


def test_a_memory_that_is_emptied_meanwhile_costs_copies_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By systemd, where its user logs out; or by the end of another run, in a copy of the run folder."""
    cluster = Cluster(tmp_path)
    cluster.make()
    copies = Copies(cluster.memory(0), cluster.checkpoints, RUN, 1)
    section = Checkpoint(interval=100)
    checkpointer = Checkpointer(cluster.checkpoints, section, lock_text="", run_id=RUN, copies=copies)
    for step in (1, 2):
        assert checkpointer.due(step)
        checkpointer.save(step, {"model.a": torch.ones(2)}, {"step": step})
        cluster.lose(0)
    assert "step 2 was not copied into memory: " in caplog.text
    copies.end()
    copies.close()
    assert read_record(cluster.checkpoints) is None


def test_a_disk_that_fails_for_a_moment_does_not_cost_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(tmp_path)
    cluster.make()
    write_record(cluster.checkpoints, Copy(3, "x", 1, 1))
    fails = [OSError(errno.ESTALE, "Stale file handle")]
    opened = os.open

    def stale(path: Any, *given: Any) -> int:
        if Path(path).name == memory.RECORD and fails:
            raise fails.pop()
        return opened(path, *given)

    monkeypatch.setattr(os, "open", stale)
    assert read_record(cluster.checkpoints) == Copy(3, "x", 1, 1) and not fails


def test_what_cannot_be_copied_is_named_at_the_start(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    cluster.make()
    copies = Copies(cluster.memory(0), cluster.checkpoints, RUN, 1)
    section = Checkpoint()
    checkpointer = Checkpointer(cluster.checkpoints, section, lock_text="", run_id=RUN, copies=copies)
    with pytest.raises(TitanError, match=r"the checkpoint's entry 'optimizer\.note' is not a tensor"):
        checkpointer.reserve({"model.a": torch.ones(2), "optimizer.note": "text"})  # type: ignore[dict-item]
    copies.close()


def test_the_memory_of_a_container_is_what_its_cgroup_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not memory._is_memory(Path("/dev/shm")):
        pytest.skip("/dev/shm is no tmpfs here")
    monkeypatch.setattr(memory, "CGROUPS", tmp_path)
    before = memory._available()
    assert before > 10**6
    for name, text in {"max": "max\n", "current": "900000\n", "stat": "anon 7\nactive_file 200000\n"}.items():
        (tmp_path / f"memory.{name}").write_text(text)
    assert memory._available() > 10**6
    (tmp_path / "memory.max").write_text("1000000\n")
    assert memory._available() == 300_000
