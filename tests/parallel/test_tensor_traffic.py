"""What tensor parallelism sends: once each, with selective activation checkpointing too."""

from __future__ import annotations

from collections import Counter

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from tests.engine import cases
from tests.engine.cases import Layout
from titancli.engine import Engine

pytestmark = pytest.mark.ranks


class Counted(TorchDispatchMode):
    """Counts the collectives that run."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "_c10d_functional":
            self.calls[func.__name__.split(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def collectives(mode):
    engine = Engine.build(cases.recipe(Layout({"tp": 2}, activation_checkpoint=mode)))
    with Counted() as counted:
        engine.forward_backward(cases.my_batches(engine))
    return counted.calls


def test_checkpointing_by_op_keeps_what_was_reduced(ranks):
    none, by_op, full = (
        ranks(2, collectives, mode)[0]
        for mode in (
            {"mode": "none"},
            {"mode": "selective", "selective_ac_option": "op"},
            {"mode": "full"},
        )
    )
    regions = 2 * 4  # attention and feed-forward of four blocks
    # Forward reduces each region and the embedding; backward each gather's gradient, the head's too.
    assert none["reduce_scatter_tensor"] == by_op["reduce_scatter_tensor"] == 2 * regions + 2
    # What the second region of a block makes is needed by nothing in its own backward.
    assert full["reduce_scatter_tensor"] == none["reduce_scatter_tensor"] + regions // 2
