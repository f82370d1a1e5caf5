"""What tensor parallelism makes of modules, beyond the answer (tests/ranks/test_same_answer.py)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.engine import cases
from tests.engine.cases import Layout
from titancli.errors import TitanError

pytestmark = pytest.mark.ranks


def graphs(layout: Layout) -> int:
    """How many graphs torch.compile made for a step."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    cases.gradients(layout)
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("mode", ["none", "full"])
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
    from torch.distributed.device_mesh import init_device_mesh

    from titancli.parallel.tensor import tensor_parallel

    with pytest.raises(TitanError) as caught:
        tensor_parallel(Block(), init_device_mesh("cpu", (2,)))
    return str(caught.value)


def test_a_forward_that_would_be_passed_by_is_told(ranks):
    for said in ranks(2, cut_one_with_a_forward_of_its_own):
        assert "layers.0 (Linear) has a forward that its class has not" in said
