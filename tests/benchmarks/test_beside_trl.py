"""benchmarks/beside_trl.py: the losses of TRL and peft, step for step, by command and by script."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import beside_trl
import sidebyside

STEPS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("beside")
    beside_trl.prepare(found, STEPS, layers=2)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", beside_trl.CASES)
def test_losses_are_those_of_trl(folder: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process: what takes long is to import both sides."""
    if case == "qlora":
        pytest.importorskip("bitsandbytes", reason="needs the package bitsandbytes")
    losses: dict[str, list[float]] = {}
    for peer, train in beside_trl.PEERS.items():
        told: list[sidebyside.Numbers] = []
        monkeypatch.setattr(sidebyside, "turn", told.append)
        train(beside_trl.Job(case, "ragged", folder, STEPS))
        ready, *steps = told
        assert ready == {} and all(step["cpu"] > 0 for step in steps)
        losses[peer] = [step["loss"] for step in steps]
    assert len(set(losses["trl"])) == STEPS
    for peer in ("titan", "script"):
        assert losses[peer] == pytest.approx(losses["trl"], abs=1e-5), peer
