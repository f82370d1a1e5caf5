"""benchmarks/sidebyside.py: ratios with the interval in which they are known."""

from __future__ import annotations

import ast
import math
import random
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import sidebyside
from sidebyside import Ratio, ratio

WORKER = """
import os, sys
sys.path.append({benchmarks!r})
import sidebyside

def serve():
    sidebyside.serve(lambda: {{"pid": os.getpid(), "sum": sum(range(1_000_000))}})

if not sidebyside.run_worker({{"a": serve, "b": serve}}):
    if sys.argv[1:] == ["instructions"]:
        print(sidebyside.instructions("a", steps=2, warmup=1))
    else:
        print({{name: [step["pid"] for step in steps] for name, steps in
               sidebyside.measure(["a", "b"], rounds=2, starts=3).items()}})
"""


def steps(*starts: tuple[float, ...]) -> list[sidebyside.Numbers]:
    return [{"cpu": cost, "start": number} for number, start in enumerate(starts) for cost in start]


def test_rounds_are_paired_and_each_start_counts_once() -> None:
    ours = steps(*[(1.0, 3.0, 100.0)] * 6, (8.0, 9.0, 10.0))
    found = ratio(ours, steps(*[(1.0, 1.5, 100.0)] * 6, (1.0, 1.0, 1.0)), "cpu")
    assert found == Ratio(1.0, 1.0, 9.0) and not found.differs
    assert f"{found:.2f}" == "1.00 (1.00 to 9.00): no difference"


def test_rounds_of_one_start_are_observations() -> None:
    found = ratio(steps((2.0, 4.0, 6.0, 8.0, 10.0, 12.0)), steps((2.0,) * 6), "cpu")
    assert found == Ratio(3.5, 1.0, 6.0)
    assert ratio(steps((2.2,) * 6), steps((2.0,) * 6), "cpu").differs


@pytest.mark.parametrize("number", [1, 5])
def test_a_few_observations_have_no_interval_and_conclude_nothing(number: int) -> None:
    found = ratio(steps(*[(2.0,)] * number), steps(*[(1.0,)] * number), "cpu")
    assert found.value == 2.0 and math.isnan(found.low) and not found.differs
    assert f"{found:.1f}" == "2.0 (too few for an interval)"


@pytest.mark.parametrize("number", [6, 9, 25])
def test_the_interval_holds_the_true_median_in_95_of_100_cases(number: int) -> None:
    """Of a skewed distribution, whose median is 1."""
    drawn, held = random.Random(0), 0
    for _ in range(2000):
        found = ratio(
            steps(*[(math.exp(drawn.expovariate(math.log(2)) - 1),) for _ in range(number)]),
            steps(*[(1.0,)] * number),
            "cpu",
        )
        held += found.low <= 1 <= found.high
    assert held / 2000 > 0.94


def run(folder: Path, *arguments: str) -> str:
    (folder / "script.py").write_text(WORKER.format(benchmarks=str(Path(sidebyside.__file__).parent)))
    command = [sys.executable, "script.py", *arguments]
    return subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True).stdout


def test_each_start_has_processes_of_its_own(tmp_path: Path) -> None:
    found = ast.literal_eval(run(tmp_path))
    assert {name: len(set(pids)) for name, pids in found.items()} == {"a": 3, "b": 3}
    assert all(pids[::2] == pids[1::2] for pids in found.values())


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.needs("valgrind", "valgrind.bin|valgrind", install="apt install valgrind")
def test_instructions_are_those_of_a_step(tmp_path: Path) -> None:
    """Each of a million additions takes tens of them; what starts and ends a process is not counted."""
    assert 1e7 < float(run(tmp_path, "instructions")) < 1e9
