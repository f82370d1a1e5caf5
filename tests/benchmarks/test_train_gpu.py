"""benchmarks/train_gpu.py on a CPU: what it compares is the same, and what a cut-off run leaves is right."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import gpu_steps
import train_gpu

CPU = torch.device("cpu")


def case(variant: str, **given: Any) -> gpu_steps.Case:
    """Of the smallest model, uncompiled."""
    fields = dict(model="debugmodel", variant=variant, repeat=0, rows=2, seq_len=32, steps=2, warmup=1)
    return gpu_steps.Case(**{**fields, "curve": 0, "profile": 0, "device": "cpu", "compile": False, **given})


def test_more_rows_are_the_same_ones_and_others_after_them() -> None:
    few, many = gpu_steps.rows_of(3, 2, 16, 300), gpu_steps.rows_of(4, 4, 16, 300)
    assert few.shape == (3, 2, 17) and few.max() < 300
    assert torch.equal(few.flatten(0, 1), many.flatten(0, 1)[:6])
    assert torch.equal(few.flatten(0, 1)[1:, 0], few.flatten(0, 1)[:-1, -1])  # as a run cuts a stream


@pytest.mark.slow
@pytest.mark.e2e
def test_the_command_trains_on_what_the_engine_trains_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same rows, same rates: the loss of the last step is the same number."""
    (tmp_path / "tiny.toml").write_text('extends = "titan:llama3_debug"\nmodel = {dim = 32, n_layers = 2}\n')
    monkeypatch.setitem(gpu_steps.RECIPES, "debugmodel", str(tmp_path / "tiny.toml"))
    engine, command = case("titan", curve=3), case("titan train")
    assert gpu_steps.train(command)["loss"] == gpu_steps.measure(engine, CPU)["losses"][-1]


# --------------------------------------------------------------------------------- what is cut off or damaged

ABOUT = {"device": "CPU"}


def kept(folder: Path, text: str) -> list[Any]:
    (folder / "results.json").write_text(text)
    return train_gpu.kept(folder / "results.json", ABOUT, [case("titan")])


def result(**given: Any) -> dict[str, Any]:
    return {**asdict(case("titan")), "asked_rows": 2, "loss": 1.0, **given}


@pytest.mark.parametrize(
    ("results", "stay"),
    [
        ([result()], True),
        ([result(rows=1)], True),  # two did not fit
        ([result(failed="out of memory")], True),
        ([result(failed="failed: of a mistake")], False),
        ([result(steps=3)], False),  # other than asked for now
        ([result(variant="plain", steps=3)], True),  # not asked for now
    ],
)
def test_what_an_earlier_run_left_stays_if_it_is_what_is_asked_for(
    results: list[Any], stay: bool, tmp_path: Path
) -> None:
    found = kept(tmp_path, json.dumps({"environment": ABOUT, "results": results}))
    assert found == (results if stay else [])


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"environment": {}}', '{"environment": {}, "results": [{}]}']
)
def test_damaged_results_are_named(text: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"results\.json is damaged"):
        kept(tmp_path, text)


def test_results_of_another_machine_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"another machine or code: \{'device': 'H200'\}"):
        kept(tmp_path, '{"environment": {"device": "H200"}, "results": []}')


def test_a_folder_is_of_one_run_until_what_it_has_started_ends(tmp_path: Path) -> None:
    lock = train_gpu.locked(tmp_path)
    child = subprocess.Popen([sys.executable, "-Sc", "input()"], stdin=subprocess.PIPE, pass_fds=[lock])
    with pytest.raises(SystemExit, match="is in use"):
        train_gpu.locked(tmp_path)
    os.close(lock)  # as where the run is killed
    with pytest.raises(SystemExit, match="is in use"):
        train_gpu.locked(tmp_path)
    child.communicate(b"\n")
    os.close(train_gpu.locked(tmp_path))


@pytest.mark.parametrize(
    ("code", "rows", "expected"),
    [
        (lambda rows: 0 if rows == 1 else gpu_steps.OUT_OF_MEMORY, 1, {"loss": 1.0}),
        (lambda rows: gpu_steps.OUT_OF_MEMORY, 1, {"failed": "out of memory"}),
        (lambda rows: -signal.SIGKILL, 4, {"failed": "failed: killed by SIGKILL"}),
        (lambda rows: 1, 4, {"failed": "failed: of a mistake"}),
    ],
)
def test_fewer_rows_are_tried_where_memory_is_short(
    code: Any, rows: int, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], **given: Any) -> Any:
        asked = json.loads(command[-1])["rows"]
        return subprocess.CompletedProcess(command, code(asked), '{"loss": 1.0}', "of a mistake")

    monkeypatch.setattr(subprocess, "run", run)
    given = case("titan", rows=4)
    assert train_gpu.run_case(given, {}, 0) == {**asdict(given), "rows": rows, **expected}


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("a mistake")])
def test_a_process_says_by_its_code_that_memory_is_short(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: Any) -> Any:
        raise error

    monkeypatch.setattr(sys, "stdout", sys.stdout)  # the worker exchanges it
    monkeypatch.setitem(gpu_steps.BUILD, "titan", fail)
    with pytest.raises((SystemExit, RuntimeError)) as raised:
        gpu_steps.worker(case("titan"))
    short = isinstance(error, torch.OutOfMemoryError)
    assert getattr(raised.value, "code", None) == (gpu_steps.OUT_OF_MEMORY if short else None)
