"""What ranks do together: values exchanged, and errors raised on all ranks, whatever goes wrong where."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import Ranks as Pool
from titancli.checkpoint.format.manifest import DamagedCheckpoint
from titancli.distributed.together import Disagreement, Ranks, require_same
from titancli.errors import EnvironmentProblem, ExitCode, RankFailure, TitanError


class Counted:
    """Counts the collectives of torch.distributed that are called inside."""

    NAMES = ("all_gather", "all_reduce", "broadcast", "gather", "scatter")

    def __enter__(self) -> Counted:
        self.count = 0
        self._real = {name: getattr(dist, name) for name in self.NAMES}
        for name, real in self._real.items():
            setattr(dist, name, self._counting(real))
        return self

    def _counting(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            self.count += 1
            return real(*arguments, **more)

        return call

    def __exit__(self, *error: object) -> None:
        for name, real in self._real.items():
            setattr(dist, name, real)


def raised(call: Callable[[], Any]) -> BaseException:
    try:
        call()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


# ------------------------------------------------------------------------------------------------- values


def values() -> list[Any]:
    ranks = Ranks()
    assert [*dist.get_process_group_ranks(dist.group.WORLD)] == list(range(ranks.size))
    everyones = ranks.allgather_call(
        "counting", lambda: {"rank": ranks.rank, "long": "x" * 1000 * ranks.rank}
    )
    assert [len(one["long"]) for one in everyones] == [0, 1000, 2000]
    assert ranks.allgather_call("nothing", lambda: None) == [None] * 3
    assert ranks.gather(None if ranks.rank else "first") == ["first", None, None]
    assert ranks.call("keeping", threading.Lock) is not None  # not picklable, and sent to nobody
    assert ranks.numbers([2**63 - 1, ranks.rank]) == [[2**63 - 1, rank] for rank in range(3)]
    assert ranks.broadcast(ranks.rank, 2) == 2
    return [
        ranks.broadcast_call("making", lambda: ranks.rank),
        ranks.broadcast_call("making", lambda: ranks.rank, rank=1),
        ranks.reduce("adding", lambda: ranks.rank + 1, lambda found: (sum(found), ranks.rank)),
        ranks.reduce("adding", lambda: None, len),
    ]


@pytest.mark.ranks
def test_results_come_by_rank_and_reach_every_rank(ranks: Pool) -> None:
    assert ranks(3, values) == [[0, 1, (6, 0), 3]] * 3


def in_groups() -> list[Any]:
    """Two groups of two: rank 1 of the second is rank 3 of all."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = dist.get_rank() // 2
    ranks = Ranks(groups[mine])
    error = raised(lambda: ranks.allgather_call("halving", lambda: 1 // (1 - ranks.rank)))
    return [ranks.gather(dist.get_rank()), ranks.broadcast(dist.get_rank(), 1), str(error)]


@pytest.mark.ranks
def test_ranks_are_those_of_the_group(ranks: Pool) -> None:
    words = "halving failed on rank 1: ZeroDivisionError: integer division or modulo by zero"
    assert ranks(4, in_groups) == [[[0, 1], 1, words]] * 2 + [[[2, 3], 3, words]] * 2


def alone(group: Any = None) -> None:
    ranks = Ranks(group)
    assert (ranks.rank, ranks.size) == (0, 1)
    assert ranks.allgather_call("a", lambda: 3) == ranks.gather(3) == [3] and ranks.numbers([1, 2]) == [
        [1, 2]
    ]
    assert ranks.call("a", lambda: 3) == ranks.broadcast_call("a", lambda: 3) == ranks.broadcast(3) == 3
    assert ranks.reduce("a", lambda: 3, sum) == 3
    for call in (ranks.allgather_call, ranks.call, ranks.broadcast_call):
        assert isinstance(raised(lambda: call("a", lambda: 1 // 0)), ZeroDivisionError)  # noqa: B023


def alone_in_a_group() -> None:
    with Counted() as counted:
        alone(dist.new_group([dist.get_rank()], use_local_synchronization=True))
        assert counted.count == 0


def test_one_process_needs_no_group() -> None:
    alone()
    require_same("recipes", "abc", "host")


@pytest.mark.ranks
def test_one_rank_of_a_group_sends_nothing(ranks: Pool) -> None:
    ranks(2, alone_in_a_group)


def counts() -> list[int]:
    ranks, found = Ranks(), []
    for call in (
        lambda: ranks.numbers([1, 2, 3]),
        lambda: ranks.gather(None),
        lambda: ranks.gather(1),
        lambda: ranks.call("a", lambda: 1),
        lambda: ranks.broadcast_call("a", lambda: 1),
        lambda: ranks.reduce("a", lambda: None, lambda done: None),
        lambda: ranks.reduce("a", lambda: 1, sum),
    ):
        with Counted() as counted:
            call()
        found.append(counted.count)
    return found


@pytest.mark.ranks
def test_what_nobody_sends_costs_no_collective(ranks: Pool) -> None:
    assert ranks(2, counts) == [[1, 1, 2, 1, 2, 2, 4]] * 2


# ------------------------------------------------------------------------------------------------- errors


class Odd(EnvironmentProblem):
    """A plugin's error, which cannot be unpickled."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}", hint="try again")


def errors() -> list[Any]:
    ranks, found = Ranks(), []
    odd = ValueError("odd")
    odd.lock = threading.Lock()  # type: ignore[attr-defined]
    for error in (
        TitanError("no", hint="do"),
        Odd("a", "disk"),
        DamagedCheckpoint(Path("step-1"), "bad", "a.safetensors"),
        KeyboardInterrupt(),
        SystemExit(3),
        odd,
    ):

        def fails() -> int:
            if ranks.rank:
                raise error  # noqa: B023
            return 1

        for call in (ranks.allgather_call, ranks.call, lambda *given: ranks.broadcast_call(*given, rank=1)):
            caught = raised(lambda: call("trying", fails))  # noqa: B023
            found.append((type(caught).__name__, str(caught), getattr(caught, "exit_code", None)))
            assert not isinstance(caught, DamagedCheckpoint) or caught.file == "a.safetensors"
            if ranks.rank == 1:
                own = caught.__cause__ if isinstance(caught, RankFailure) else caught
                assert own is error
        caught = raised(lambda: ranks.reduce("trying", fails, sum))
        assert (type(caught).__name__, str(caught)) == found[-1][:2]
        assert ranks.gather(ranks.rank) == [0, 1]  # and all are in step
    return found


@pytest.mark.ranks
def test_what_one_rank_raises_is_raised_on_all_of_them(ranks: Pool) -> None:
    here, there = ranks(2, errors)
    assert here[::3] == here[1::3] == here[2::3]
    failed = ("RankFailure", "trying failed on rank 1: ValueError: odd", ExitCode.FAILED)
    expected = [
        ("TitanError", "no\ndo", ExitCode.FAILED),
        ("EnvironmentProblem", "a disk\ntry again", ExitCode.ENVIRONMENT),
        ("DamagedCheckpoint", "checkpoint step-1 is damaged: bad\nuse another checkpoint (--step N)", 5),
        ("KeyboardInterrupt", "", None),
        ("RankFailure", "trying failed on rank 1: SystemExit: 3", ExitCode.FAILED),
        failed,
    ]
    assert here[::3] == expected
    expected[1] = ("Odd", *expected[1][1:])  # where it was raised
    assert there[::3] == expected


def several() -> list[str]:
    ranks = Ranks()

    def fails() -> None:
        if ranks.rank == 1:
            raise ValueError("of rank 1")
        if ranks.rank == 2:
            raise EnvironmentProblem("of rank 2")

    def reduce(found: list[int]) -> None:
        raise OSError(f"with {found}")

    def is_no_pickle() -> Any:
        return threading.Lock() if ranks.rank == 1 else 1

    calls = [
        lambda: ranks.allgather_call("a", fails),
        lambda: ranks.reduce("b", lambda: ranks.rank, reduce),
        lambda: ranks.allgather_call("c", is_no_pickle),
        lambda: ranks.broadcast(is_no_pickle(), 1),
    ]
    return [f"{type(error).__name__}: {error}" for error in map(raised, calls)]


@pytest.mark.ranks
def test_all_raise_the_same_where_several_fail_or_something_cannot_be_sent(ranks: Pool) -> None:
    found = ranks(3, several)
    assert found[0] == found[1] == found[2]
    first, second, third, fourth = found[0]
    assert first == "RankFailure: a failed on ranks 1, 2: ValueError: of rank 1"
    assert second == "RankFailure: b failed on rank 0: OSError: with [0, 1, 2]"
    assert "c failed on rank 1: TypeError: cannot pickle '_thread.lock' object" in third
    assert "failed on rank 1: TypeError: cannot pickle '_thread.lock' object" in fourth


# ------------------------------------------------------------------------------------- not the same calls


def different() -> list[str]:
    ranks = Ranks()
    pairs: list[tuple[Callable[[], Any], Callable[[], Any]]] = [
        (
            lambda: ranks.allgather_call("reading", lambda: 1),
            lambda: ranks.broadcast_call("saving", lambda: 1),
        ),
        (lambda: ranks.gather("a value"), lambda: ranks.call("saving", lambda: None)),
        (lambda: ranks.broadcast(1, 0), lambda: ranks.broadcast(1, 1)),
        (lambda: ranks.reduce("adding", lambda: 1, sum), lambda: ranks.gather(1)),
    ]
    pairs.append((lambda: ranks.call("reading", one_thing), lambda: ranks.call("saving", another)))
    found = []
    for pair in pairs:
        error = raised(pair[ranks.rank])
        assert isinstance(error, Disagreement)
        found.append(error.message)
    assert ranks.gather(ranks.rank) == [0, 1]  # and all are in step
    return found


def one_thing() -> None:
    """Something that ranks do."""


def another() -> None:
    """Something else."""


@pytest.mark.ranks
def test_ranks_that_do_different_things_are_told_what(ranks: Pool) -> None:
    here, there = ranks(2, different)
    assert here == there
    assert here[0] == "the ranks do different things: rank 0 reading, rank 1 saving"


def in_two_threads() -> list[int]:
    """As a save does in the background, over a group of its own."""
    behind, ahead = Ranks(dist.new_group(backend="gloo")), Ranks()
    found: list[Any] = []

    def save() -> None:
        for number in range(50):
            found.append(behind.reduce("saving", lambda: number + behind.rank, sum))  # noqa: B023
        found.append(raised(lambda: behind.call("saving", lambda: 1 // (1 - behind.rank))))

    thread = threading.Thread(target=save)
    thread.start()
    for number in range(50):
        assert ahead.gather((number, ahead.rank)) == [(number, 0), (number, 1)]
    thread.join()
    assert isinstance(found.pop(), RankFailure)
    return found


@pytest.mark.ranks
def test_two_threads_have_a_group_each(ranks: Pool) -> None:
    assert ranks(2, in_two_threads) == [[2 * number + 1 for number in range(50)]] * 2


DYING = """
import os, sys
import torch.distributed as dist
from titancli.distributed.together import Ranks

rank, raises = int(sys.argv[1]), sys.argv[3] == "raises"
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 2), rank=rank, world_size=2)
ranks = Ranks()
ranks.gather(None)
if rank == 1:
    os._exit(3)

def function():
    if raises:
        raise ZeroDivisionError

try:
    ranks.allgather_call("trying", function)
except ZeroDivisionError:
    os._exit(5)
except RuntimeError:
    os._exit(4)
"""


@pytest.mark.parametrize(("raises", "code"), [("raises", 5), ("waits", 4)])
def test_a_rank_that_ends_is_noticed_and_hides_no_error_of_another(
    tmp_path: Path, raises: str, code: int
) -> None:
    (tmp_path / "dying.py").write_text(DYING)
    command = [sys.executable, str(tmp_path / "dying.py")]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store"), raises], env=environment)
        for rank in (0, 1)
    ]
    assert [rank.wait(60) for rank in ranks] == [code, 3]


def late() -> float:
    ranks, began = Ranks(), time.monotonic()
    ranks.call("sleeping", lambda: time.sleep(ranks.rank))
    return time.monotonic() - began


@pytest.mark.ranks
def test_ranks_wait_for_each_other(ranks: Pool) -> None:
    assert min(ranks(2, late)) >= 1.0


def on_another_device() -> None:
    """Inside of code that makes its tensors elsewhere."""
    with torch.device("meta"):
        assert Ranks().gather(dist.get_rank()) == [0, 1]


@pytest.mark.ranks
def test_the_default_device_does_not_matter(ranks: Pool) -> None:
    ranks(2, on_another_device)


# ---------------------------------------------------------------------------------------------- comparing


def compare() -> str:
    require_same("recipes", "abc", "host")
    try:
        require_same("recipes", f"recipe {dist.get_rank()}", "host")
    except EnvironmentProblem as error:
        return error.message
    return "nothing was noticed"


@pytest.mark.ranks
def test_ranks_that_differ_are_named_on_every_rank(ranks: Pool) -> None:
    message = "the ranks were started with different recipes"
    listed = "  rank 0 on host: recipe 0\n  rank 1 on host: recipe 1"
    assert ranks(2, compare) == [f"{message}\n{listed}"] * 2
