"""What tensor parallelism makes of modules, beyond the answer (tests/ranks/test_same_answer.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tests.engine import cases
from tests.engine.cases import Layout
from titancli.distributed.collectives import Group, gather_same
from titancli.distributed.local import SEQUENCE, local
from titancli.errors import TitanError
from titancli.parallel.tensor import on_local_parameters, tensor_parallel

pytestmark = pytest.mark.ranks


def graphs(layout: Layout) -> int:
    """How many graphs torch.compile made for a step."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    cases.gradients(layout)
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("mode", ["none", pytest.param("full", marks=pytest.mark.slow)])
def test_blocks_share_their_compiled_code(ranks, mode):
    """Ten blocks: torch gives up on a function that it has compiled eight times."""
    layout = Layout(
        {"tp": 2}, compile="aot_eager", model={"n_layers": 10}, activation_checkpoint={"mode": mode}
    )
    assert ranks(2, graphs, layout) == [1, 1]


class Block(nn.Module):
    tensor_plan = {"layers.0.weight": "column"}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"0": nn.Linear(4, 4, bias=False)})
        self.layers["0"].forward = lambda x: x


def cut_one_with_a_forward_of_its_own() -> str:
    with pytest.raises(TitanError) as caught:
        tensor_parallel(Block(), init_device_mesh("cpu", (2,)))
    return str(caught.value)


def test_a_forward_that_would_be_passed_by_is_told(ranks):
    for said in ranks(2, cut_one_with_a_forward_of_its_own):
        assert "layers.0 (Linear) has its own forward" in said


# ------------------------------------------------------------------------------------------- biases, errors


class Biased(nn.Module):
    """A region with a bias before it and one after, which is given rows, or the tokens of rows."""

    def __init__(self, flat: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8)
        self.inner, self.flat = Inner(), flat

    def forward(self, x: Tensor) -> Tensor:
        given = self.norm(x)
        return x + self.inner(given.flatten(0, 1) if self.flat else given).view_as(x)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class Small(nn.Module):
    tensor_plan = {  # noqa: RUF012
        "embedding.weight": "vocab",
        "layers.*.inner.up.*": "column",
        "layers.*.inner.down.*": "row",
        "layers.*norm.weight": "norm",
    }

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.ModuleDict({str(n): Biased(n == 1) for n in range(2)})

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return x


def biased(compiled: bool) -> dict[str, Tensor]:
    """Output and gradients: of one process, or of the ranks together."""
    torch.manual_seed(0)
    model, tokens, weights = Small(), torch.randint(0, 16, (3, 8)), torch.randn(3, 8, 8)
    world = torch.distributed.get_world_size()
    if world > 1:
        mesh = init_device_mesh("cpu", (world,))
        values = model.state_dict()
        tensor_parallel(model, mesh)
        for name, parameter in model.named_parameters():
            part = torch.distributed.tensor.distribute_tensor(values[name], mesh, parameter.placements)
            parameter.data.to_local().copy_(part.to_local())
        if compiled:
            torch._dynamo.reset()
            for layer in model.layers.values():
                layer.forward = torch.compile(layer.forward, backend="aot_eager", fullgraph=True)
                on_local_parameters(layer, mesh)
    out = model(tokens)
    if world > 1:
        out = gather_same(out, SEQUENCE, Group.of(torch.distributed.group.WORLD))
    (out * weights).sum().backward()
    found: dict[str, Any] = {"out": out.detach()} | {name: p.grad for name, p in model.named_parameters()}
    return {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in found.items()}


@pytest.mark.parametrize(("world", "compiled"), [(2, False), (4, False), (2, True)])
def test_biases_are_added_once(ranks, world, compiled):
    expected = ranks(1, biased, False)[0]
    assert expected["layers.0.inner.down.bias"].norm() > 1
    for found in ranks(world, biased, compiled):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert (found[name] - value).norm() <= 1e-5 * value.norm(), name


class Scale(nn.Module):
    """A module that the plan does not know."""

    takes_local_parameters = False

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * local(self.weight)


class Knows(Scale):
    takes_local_parameters = True


def told(model: nn.Module, plan: dict[str, str]) -> str:
    model.tensor_plan = plan  # type: ignore[assignment]
    try:
        tensor_parallel(model, init_device_mesh("cpu", (2,)))
    except TitanError as error:
        return str(error)
    return "cut"


def cut_others() -> list[str]:
    known, words = nn.ModuleDict({"a": Knows()}), nn.Embedding(6, 4)
    said = [
        told(nn.ModuleDict({"a": Scale()}), {"*": "norm"}),
        told(nn.ModuleDict({"a": Scale()}), {"b.*": "norm"}),
        told(nn.ModuleDict({"a": Scale()}), {"*": "colum"}),
        told(nn.ModuleDict({"a": nn.Linear(4, 7)}), {"*": "column"}),
        told(known, {"*": "norm"}) + f" {known['a'](torch.ones(4)).sum().item()}",
        told(nn.ModuleDict({"a": words}), {"*": "vocab"}),
    ]
    try:
        words(torch.zeros(4, 3, dtype=torch.int64))
    except TitanError as error:
        said.append(str(error))
    return said


def test_what_cannot_be_cut_is_told(ranks):
    for class_, no_style, style, uneven, known, even, odd in ranks(2, cut_others):
        assert (
            "a (Scale) has parameters in the tensor_plan, but is not a Linear, RMSNorm or Embedding"
        ) in class_
        assert "takes_local_parameters = True" in class_
        assert "the model's tensor_plan has no style for a.weight" in no_style
        assert "'colum' for a.weight" in style and "column, row, vocab" in style
        assert "a.weight [7, 4] cannot be sharded into 2 equal parts along dimension 0" in uneven
        assert known == "cut 4.0"
        assert even == "cut"
        assert "rows of 3 tokens cannot be sharded over the 2 ranks of mesh.tp" in odd
