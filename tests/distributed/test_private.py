"""Each private name of torch that titan uses is there, and means what titan takes it for.

What fails here on a new torch says what has changed in it; see `titancli/distributed/private.py`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import titancli
from tests.ranks import Ranks
from titancli.distributed import private
from titancli.torch_version import older_than

pytestmark = pytest.mark.ranks


# ----------------------------------------------------------------------------------------- process groups


def the_groups() -> None:
    before = set(private.groups())
    assert dist.group.WORLD in before
    made = dist.new_group([0, 1])
    assert set(private.groups()) - before == {made}


def a_timeout() -> None:
    world: Any = dist.group.WORLD
    private.set_timeout(world, timedelta(seconds=77))
    assert private.timeout_of(world) == timedelta(seconds=77)


def collectives() -> None:
    world: Any = dist.group.WORLD
    before = private.collectives_begun(world)
    dist.all_reduce(torch.ones(1))
    assert private.collectives_begun(world) == before + 1


def a_store() -> None:
    store, rank = private.default_store(), dist.get_rank()
    store.set(f"of {rank}", str(rank))
    assert store.get(f"of {1 - rank}") == str(1 - rank).encode()


def a_flight_record() -> None:
    assert isinstance(private.flight_record(), bytes)


# ------------------------------------------------------------------------------------------------- DTensor


def offsets() -> None:
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    for placement, expected in ((Shard(0), (2 * rank, 0)), (Shard(1), (0, 3 * rank)), (Replicate(), (0, 0))):
        tensor = distribute_tensor(torch.zeros(3, 6), mesh, [placement])
        assert tuple(private.offsets_of(tensor)) == expected


def shards() -> None:
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    parameter = distribute_tensor(torch.zeros(3, 6), mesh, [Shard(0)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceMesh, "device_type", "meta")
        made: Any = private.sharded_as(parameter, torch.full((2 - rank, 1), rank), (3, 1))
        whole: Any = private.sharded_as(parameter, torch.ones(1, 6), (1, 6), [Replicate()])
    assert made.full_tensor().flatten().tolist() == [0, 0, 1] and not made.requires_grad
    assert torch.equal(whole.full_tensor(), torch.ones(1, 6))
    assert private.sharded_as(torch.zeros(2), made, (3, 1)) is made


def boxes() -> None:
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    tensor = distribute_tensor(torch.zeros(3, 6), mesh, [Shard(0)])
    assert private.boxes_of(tensor) == [((2 * rank, 0), (2 - rank, 6))]
    assert private.boxes_of(torch.zeros(4)) == [((0,), (4,))]


def meshes() -> None:
    """Another group over the same ranks, whose result would come from the one that is gone."""
    mesh = init_device_mesh("cpu", (2,))
    tensor = distribute_tensor(torch.ones(2, 2), mesh, [Shard(0)])
    assert tensor.full_tensor().sum() == 4
    private.forget_meshes()
    again = distribute_tensor(torch.ones(2, 2), init_device_mesh("cpu", (2,)), [Shard(0)])
    assert (again + again).full_tensor().sum() == 8


# --------------------------------------------------------------------------------------------------- FSDP2


class Breaks(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        raise ZeroDivisionError


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.breaks: str | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number == 1 and self.breaks == "forward":
                raise ZeroDivisionError
            if number == 1 and self.breaks == "backward":
                x = Breaks.apply(x)
        return x


def sharded() -> Model:
    model, mesh = Model(), init_device_mesh("cpu", (2,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return model


def gradients(model: Model) -> list[torch.Tensor]:
    return [p.grad.full_tensor() for p in model.parameters() if isinstance(p.grad, DTensor)]


def an_error(where: str, synchronize: bool) -> None:
    """After an iteration that raised, gradients are those of before it, and the next adds to them."""
    rows = torch.arange(8.0).view(2, 4) + dist.get_rank()
    expected = sharded()
    for _ in range(2):
        expected(rows).sum().backward()
    model = sharded()
    model(rows).sum().backward()
    before = gradients(model)
    if synchronize and where == "backward":
        before = before[:4]  # the last layer's are reduced by then, and stay
    if not synchronize:
        model.set_requires_gradient_sync(False)
        model(rows * 9).sum().backward()  # not reduced: of the iteration that will raise
    model.breaks = where
    with suppress(ZeroDivisionError):
        model(rows * 5).sum().backward()
    model.breaks = None
    model.set_requires_gradient_sync(True)
    private.forget_iteration(model)
    for found, value in zip(gradients(model), before, strict=False):
        assert torch.equal(found, value)
    model(rows).sum().backward()
    for found, value in zip(gradients(model)[: len(before)], gradients(expected), strict=False):
        assert torch.equal(found, value)


def an_error_in_forward() -> None:
    an_error("forward", synchronize=True)


def an_error_in_backward() -> None:
    an_error("backward", synchronize=True)


def an_error_before_gradients_are_reduced() -> None:
    an_error("backward", synchronize=False)


CASES: list[Callable[[], None]] = [
    the_groups,
    a_timeout,
    collectives,
    a_store,
    a_flight_record,
    offsets,
    shards,
    boxes,
    meshes,
    an_error_in_forward,
    an_error_in_backward,
    an_error_before_gradients_are_reduced,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_it_means_what_titan_takes_it_for(case: Callable[[], None], ranks: Ranks) -> None:
    ranks(2, case)


def test_pipelines_wait_by_a_function_that_can_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.pipelining import schedules

    if older_than("2.12"):
        pytest.skip("torch 2.11 waits under no name")
    assert callable(vars(schedules)["_wait_batch_p2p"])
    monkeypatch.setattr(schedules, "_wait_batch_p2p", None)  # is put back
    private.wait_in_pipelines_by(print)
    assert vars(schedules)["_wait_batch_p2p"] is print


# -------------------------------------------------------------------------------------------- torchelastic


def test_what_the_agent_replaces_in_torchelastic_is_there() -> None:
    """By `titancli/launchers/agent.py`: without it nodes would be lost, or not be noticed."""
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend, dynamic_rendezvous
    from torch.distributed.launcher import api

    assert vars(api)["LocalElasticAgent"] is LocalElasticAgent
    for name in ("_restart_workers", "_monitor_workers"):
        assert callable(getattr(LocalElasticAgent, name))
    assert callable(dynamic_rendezvous._BackendRendezvousStateHolder._sanitize)
    assert {"get_method_name", "construct_and_record_rdzv_event"} <= vars(dynamic_rendezvous).keys()
    assert isinstance(dynamic_rendezvous.DynamicRendezvousHandler.num_nodes_waiting, Callable)  # type: ignore[arg-type]
    assert callable(c10d_rendezvous_backend._create_tcp_store)


def test_an_agent_has_the_fields_that_are_read() -> None:
    import inspect

    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    text = "".join(inspect.getsource(kind) for kind in LocalElasticAgent.__mro__[:2])
    for name in ("self._remaining_restarts", "self._shutdown_timeout"):
        assert name in text, name
    holder = inspect.getsource(dynamic_rendezvous._BackendRendezvousStateHolder)
    handler = inspect.getsource(dynamic_rendezvous.DynamicRendezvousHandler)
    assert "self._state" in holder and "self._state_holder" in handler
    state = dynamic_rendezvous._RendezvousState()
    assert vars(state).keys() >= {"complete", "participants", "last_heartbeats"}


# --------------------------------------------------------------------------------------------- nowhere else


def private_names(tree: ast.AST) -> Iterator[str]:
    """Underscored names that are imported from torch.distributed, and those that are read of its modules."""
    modules: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
            path = [*str(node.module).split("."), *(one.name for one in node.names)]
            yield from (f"{node.module}: {name}" for name in path if name.startswith("_"))
            modules |= {one.asname or one.name for one in node.names}
    attributes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    for node in attributes:
        if isinstance(node.value, ast.Name) and node.value.id in modules and node.attr.startswith("_"):
            yield f"{node.value.id}.{node.attr}"


def test_no_other_module_uses_private_names_of_torch_distributed() -> None:
    root = Path(titancli.__file__).parent
    allowed = {"distributed/private.py", "launchers/agent.py"}
    found = {
        f"{path.relative_to(root)}: {name}"
        for path in root.rglob("*.py")
        if str(path.relative_to(root)) not in allowed
        for name in private_names(ast.parse(path.read_text()))
    }
    assert found == {"parallel/async_tp.py: torch.distributed._symmetric_memory: _symmetric_memory"}


def test_a_mesh_of_nobody_cuts_tensors_without_a_process_group() -> None:
    mesh = private.mesh_of_nobody("tp", 4)
    group = mesh.get_group()
    assert (mesh.size(), group.group_name, group.size(), group.rank()) == (4, "tp", 4, 0)
    whole = torch.empty(8, 6, device="meta")
    for place, shape in ((Shard(0), (2, 6)), (Replicate(), (8, 6))):
        cut = distribute_tensor(whole, mesh, [place], src_data_rank=None)
        assert isinstance(cut, DTensor) and tuple(cut.to_local().shape) == shape
    assert not dist.is_initialized()


@torch.no_grad()
def test_onednn_multiplies_by_a_matrix_in_either_order() -> None:
    draw = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(24, 40, generator=draw), torch.randn(24, generator=draw)
    for x in (torch.randn(1, 40, generator=draw), torch.randn(2, 7, 40, generator=draw)):
        for given in (None, bias):
            expected = nn.functional.linear(
                x.double(), weight.double(), None if given is None else bias.double()
            )
            for matrix in (weight, private.order_of_onednn(weight)):
                found = private.linear_of_onednn(x, matrix, given)
                torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
