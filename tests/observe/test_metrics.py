"""Reported metrics: folded on a rank, then over ranks."""

from __future__ import annotations

import math

import pytest
import torch

from titancli.errors import TitanError
from titancli.observe.metrics import Collector, Reading, reduce_over_ranks, report
from titancli.observe.pace import Pace, slowest


def read(collector: Collector) -> dict[str, float]:
    return reduce_over_ranks(collector.drain())


def test_reports_are_folded_by_their_reduction() -> None:
    collector = Collector()
    for value in (1.0, 2.0, 6.0):
        collector.add("mean", value, "mean")
        collector.add("max", value, "max")
        collector.add("sum", value, "sum")
    assert read(collector) == {"max": 6.0, "mean": 3.0, "sum": 9.0}
    assert read(collector) == {}


def test_tensors_and_floats_mix_and_keep_no_graph() -> None:
    collector = Collector()
    value = torch.tensor(2.0, requires_grad=True)
    for kind in ("mean", "max"):
        collector.add(kind, value * 2, kind)  # type: ignore[arg-type]
        collector.add(kind, 8.0, kind)  # type: ignore[arg-type]
    readings = collector.drain()
    assert not readings["mean"].value.requires_grad
    assert reduce_over_ranks(readings) == {"max": 8.0, "mean": 6.0}


def test_a_tensor_that_is_changed_after_its_report_counts_as_it_was() -> None:
    collector = Collector()
    value = torch.tensor(1.0)
    collector.add("x", value, "mean")
    value.fill_(100.0)
    assert read(collector) == {"x": 1.0}


def test_a_nan_is_not_lost_in_a_maximum() -> None:
    collector = Collector()
    for value in (torch.tensor(1.0), torch.tensor(math.nan), torch.tensor(3.0)):
        collector.add("x", value, "max")
    assert math.isnan(read(collector)["x"])


def test_a_nan_among_floats_of_one_rank_is_not_lost_in_a_maximum_and_spoils_no_other_name() -> None:
    collector = Collector()
    for value in (1.0, math.nan, 2.0):
        collector.add("broken", value, "max")
        collector.add("whole", 3.0, "max")
    found = reduce_over_ranks(collector.drain())
    assert math.isnan(found["broken"]) and found["whole"] == 3.0


def test_the_slowest_rank_is_named_with_what_it_takes_longer() -> None:
    assert slowest({0: 0.5}) == {}
    assert slowest({0: 0.10, 1: 0.15}) == {"slow_rank": 1.0, "slow_rank_seconds": pytest.approx(0.05)}
    several = slowest({0: 0.10, 1: 0.11, 2: 0.30, 3: 0.12})
    assert several == {"slow_rank": 2.0, "slow_rank_seconds": pytest.approx(0.19)}


def test_a_pace_is_the_mean_of_the_steps_that_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1.0, 1.5, 4.0, 4.1, 9.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    own, cpu = Pace(), torch.device("cpu")
    assert own.drain() is None
    for _ in range(2):
        own.begin(cpu)
        own.mark(cpu)
        own.mark(cpu)  # of the first micro-batch alone
    own.begin(cpu)
    assert own.drain() == pytest.approx(0.3)
    assert own.drain() is None


def test_what_is_no_number_is_refused() -> None:
    with pytest.raises(TitanError, match=r"one number, not a tensor of shape \[2\]"):
        report("x", torch.zeros(2))
    with pytest.raises(TitanError, match="reduce is 'mean', 'max' or 'sum'"):
        report("x", 1.0, reduce="min")  # type: ignore[arg-type]


def test_one_name_has_one_reduction() -> None:
    collector = Collector()
    collector.add("x", 1.0, "mean")
    with pytest.raises(TitanError, match="'x' is reported with"):
        collector.add("x", 1.0, "sum")


def reduced_on_a_rank() -> dict[str, float]:
    import torch.distributed as dist

    rank = dist.get_rank()
    readings = {
        "mean": Reading("mean", 10.0 * rank, count=rank + 1),
        "max": Reading("max", float(rank)),
        "sum": Reading("sum", 2.0),
    }
    if rank == 1:
        readings["only here"] = Reading("mean", 5.0)
    return reduce_over_ranks(readings)


@pytest.mark.ranks
def test_ranks_agree_and_may_report_different_names(ranks) -> None:  # type: ignore[no-untyped-def]
    first, second = ranks(2, reduced_on_a_rank)
    assert first == second == {"max": 1.0, "mean": 10.0 / 3, "only here": 5.0, "sum": 4.0}
