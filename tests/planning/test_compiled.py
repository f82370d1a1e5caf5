"""What compiled code keeps for backward: what torch's partitioner chooses, without generating code for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.planning.measure import planned, recipe
from tests.rows import rows
from titancli.models.blocks.rope import inverse_frequencies, rotation
from titancli.parallel.activation_checkpoint import apply_activation_checkpoint
from titancli.parallel.compile import compile_model
from titancli.recipe.schema import Compile
from titancli.registry.component import build


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("mode", rows(["none", "selective", "full"], slow=["none"]))
def test_a_compiled_block_keeps_as_much(mode: str) -> None:
    found = recipe(
        "training.mixed_precision_param=bfloat16",
        "training.dtype=bfloat16",  # else blocks on one device keep what they cast
        f"activation_checkpoint.mode={mode}",
        "training.local_batch_size=2",
        "training.seq_len=512",
        "compile.enable=true",
    )
    work = planned(found, 1, "H100").work
    expected = work.piece(0, work.recomputed(0)).kept
    assert kept(found) == pytest.approx(expected, rel=0.03)


def kept(found: Any) -> float:
    """Bytes that autograd saves of the first block, parameters and the angles of the rotation left out."""
    section = Compile(enable=True, backend="aot_eager_decomp_partition")
    model: Any = build(replace(found.model, n_layers=1), seq_len=512).to(torch.bfloat16)
    apply_activation_checkpoint(model.layers, found.activation_checkpoint)
    compile_model(model, section, found.activation_checkpoint, torch.device("cpu"))
    (block,) = model.layers.values()
    width = found.model.dim // found.model.n_heads
    angles = rotation(torch.arange(512).expand(2, -1), inverse_frequencies(width, 500000.0, None))
    x = torch.randn(2, 512, found.model.dim, dtype=torch.bfloat16, requires_grad=True)
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block(x, *angles, None)
    for other in [*block.parameters(), *angles]:
        saved.pop(other.untyped_storage().data_ptr(), None)
    return float(sum(storage.nbytes() for storage in saved.values()))
