"""The bytes of tensors alive, counted."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from tests.engine.cases import MODEL
from tests.rows import rows
from titan_qwen3_next.delta_rule import gated_delta_rule
from titancli.models import Llama3
from titancli.models.blocks.decoder import build
from titancli.parallel.activation_checkpoint import apply_activation_checkpoint
from titancli.planning.meter import Meter
from titancli.recipe.schema import ActivationCheckpoint

KIB = 256  # float32 numbers


def test_counts_what_is_alive_and_the_most_there_was():
    with Meter() as meter:
        a = torch.empty(4 * KIB)
        b = a.view(2, -1)  # the same memory
        c = a + 1
        assert (meter.now, meter.peak) == (8192, 8192)
        del a
        assert meter.now == 8192
        del b, c
        assert (meter.now, meter.peak) == (0, 8192)


def test_counts_memory_that_is_freed_and_taken_by_resizing():
    with Meter() as meter:
        a = torch.empty(4 * KIB)
        a.untyped_storage().resize_(0)
        assert (meter.now, meter.peak) == (0, 4096)
        a.untyped_storage().resize_(6 * KIB * 4)
        assert (meter.now, meter.peak) == (6144, 6144)


def test_leaves_resizing_as_it_was():
    before = torch.UntypedStorage.resize_
    with pytest.raises(ZeroDivisionError), Meter():
        raise ZeroDivisionError
    assert torch.UntypedStorage.resize_ is before


def test_a_number_read_from_a_fake_tensor_is_one():
    with FakeTensorMode(), Meter():
        values = torch.zeros(3), torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.bool)
        assert [v[0].item() for v in values] == [1.0, 1, True]
        assert values[1].tolist() == [1, 1, 1]
    with Meter():
        assert torch.tensor(7).item() == 7


def test_counts_what_an_operator_takes_inside_each_time():
    with FakeTensorMode(), Meter() as meter:
        q, k, v = torch.empty(1, 128, 2, 16), torch.empty(1, 128, 2, 16), torch.empty(1, 128, 2, 1, 16)
        rates = torch.zeros(1, 128, 2, 1)
        given = (q, k, v, rates, rates, None, None)
        before = meter.now
        gated_delta_rule._init_fn(*given)  # operation by operation
        inside = meter.peak - before
        assert meter.now == before and inside > 10 * v.nbytes
        for there in range(3):
            held = [torch.empty(KIB * 1024) for _ in range(there)]
            meter.peak = meter.now
            out, state = gated_delta_rule(*given)
            assert meter.peak == before + there * 2**20 + inside
            assert meter.now == before + there * 2**20 + out.nbytes + state.nbytes
            del held, out, state


@pytest.mark.parametrize("mode", rows(["none", "full", "selective"], slow=("none", "full")))
def test_the_peak_is_that_of_torchs_own_tracker(mode):
    """A step on fake tensors, in which `torch.distributed._tools.MemTracker` is exact."""
    peaks = []
    for meter in (Meter(), MemTracker()):
        with FakeTensorMode(), meter:
            model = build(Llama3(**MODEL), seq_len=512)
            apply_activation_checkpoint(model.layers, ActivationCheckpoint(mode=mode))
            if isinstance(meter, MemTracker):
                meter.track_external(model)
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            model(torch.zeros(2, 512, dtype=torch.int64)).sum().backward()
            optimizer.step()
        peak = meter.peak if isinstance(meter, Meter) else _total(meter)
        peaks.append(peak)
    assert peaks[0] == pytest.approx(peaks[1], rel=0.01)


def _total(tracker: MemTracker) -> int:
    (by_class,) = tracker.get_tracker_snapshot("peak").values()
    return by_class["Total"]
