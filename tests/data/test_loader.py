"""The prefetching loader: order, state, errors, and how it ends."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.data.helpers import make, same
from titancli.data import TextFiles
from titancli.data.loader import Loader
from titancli.errors import EnvironmentProblem, PluginError
from titancli.protocols.batch import Batch

ROOT = Path(__file__).parents[2]


class Counter:
    """Batches 0, 1, 2, …; ends or fails at a number, and says how far it was asked to go."""

    def __init__(self, end: int = 10**9, error: Exception | None = None) -> None:
        self.next, self.end, self.error = 0, end, error

    def __iter__(self) -> Any:
        while self.next < self.end:
            self.next += 1
            yield Batch({"tokens": torch.full((1, 1), self.next - 1)})
        if self.error:
            raise self.error

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


def data_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "titan-data"]


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited a minute in vain"
        time.sleep(0.005)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Any:
    yield
    gc.collect()
    wait_for(lambda: not data_threads())


class Reusing(Counter):
    """The same, in one buffer and one state that it fills again for each batch."""

    def __iter__(self) -> Any:
        numbers = np.zeros((1, 2), np.int64)
        rows = torch.from_numpy(numbers)
        self.state = {"at": {"next": 0}}
        for batch in super().__iter__():
            numbers[:] = batch["tokens"].item()
            self.state["at"]["next"] = self.next
            yield Batch({"tokens": rows[:, :1], "targets": rows[:, 1:]})

    def state_dict(self) -> dict[str, Any]:
        return getattr(self, "state", {"at": {"next": 0}})


def test_a_dataset_may_fill_the_same_memory_again() -> None:
    loader = Loader(Reusing(end=6), device="cpu", prefetch=4)
    found = []
    for batch in loader:
        found.append((batch["tokens"].item(), batch["targets"].item(), loader.state["at"]["next"]))
    assert found == [(n, n, n + 1) for n in range(6)]


def test_a_state_that_is_none_is_told_by_name() -> None:
    dataset = Counter()
    dataset.state_dict = lambda: None  # type: ignore[assignment, method-assign, return-value]
    with pytest.raises(PluginError, match=r"state_dict\(\) of the dataset Counter returned a NoneType"):
        Loader(dataset, device="cpu")


def test_state_is_that_of_the_last_batch_used_not_prefetched() -> None:
    dataset = Counter()
    loader = Loader(dataset, device="cpu", prefetch=3)
    assert loader.state == {"next": 0}
    for i in range(5):
        assert next(loader)["tokens"].item() == i
        assert loader.state == {"next": i + 1}
    wait_for(lambda: dataset.next == 9)  # 5 used, 3 in the queue, 1 in the thread's hand
    time.sleep(0.02)
    assert dataset.next == 9, "prefetching is bounded"
    assert loader.state == {"next": 5}
    loader.close()


def test_end_is_told_after_the_last_batch_and_again() -> None:
    loader = Loader(Counter(end=3), device="cpu")
    assert [batch["tokens"].item() for batch in loader] == [0, 1, 2]
    assert next(loader, None) is None
    assert loader.state == {"next": 3}


def test_error_is_raised_in_its_place_and_again() -> None:
    loader = Loader(Counter(end=2, error=EnvironmentProblem("broken", hint="mend it")), device="cpu")
    assert [next(loader)["tokens"].item() for _ in range(2)] == [0, 1]
    for _ in range(2):
        with pytest.raises(EnvironmentProblem, match="broken"):
            next(loader)
    assert loader.state == {"next": 2}


def test_an_id_that_the_model_has_no_row_for_is_told_in_its_place() -> None:
    loader = Loader(Counter(), device="cpu", vocab_size=2)
    assert [next(loader)["tokens"].item() for _ in range(2)] == [0, 1]
    with pytest.raises(EnvironmentProblem, match=r"token id 2 in 'tokens', but the model's vocab_size is 2"):
        next(loader)
    assert loader.state == {"next": 2}


def test_a_batch_of_other_rows_than_the_recipes_is_refused_in_its_place() -> None:
    """Less data than a batch, or a dataset that does not keep to its `rows`: a step would be another one."""
    fits = Loader(Counter(end=1), device="cpu", rows=1)
    assert len(list(fits)) == 1
    for rows in (2, 4):
        with pytest.raises(
            EnvironmentProblem, match=f"a batch of 1 rows, but training.local_batch_size is {rows}"
        ):
            next(Loader(Counter(), device="cpu", rows=rows))


def test_load_state_drops_what_was_prefetched() -> None:
    loader = Loader(Counter(), device="cpu")
    next(loader)
    loader.load_state({"next": 70})
    assert loader.state == {"next": 70}
    assert next(loader)["tokens"].item() == 70
    loader.close()


def test_closing_loses_no_batch() -> None:
    loader = Loader(Counter(), device="cpu")
    next(loader)
    loader.close()
    assert not data_threads()
    loader.close()
    assert loader.state == {"next": 1}
    assert next(loader)["tokens"].item() == 1
    loader.close()


def test_a_dropped_loader_ends_its_thread() -> None:
    loader = Loader(Counter(), device="cpu")
    next(loader)
    assert data_threads()
    del loader
    gc.collect()
    wait_for(lambda: not data_threads())


def test_resumes_a_packed_dataset_exactly(corpus: Path) -> None:
    config = TextFiles(paths=[corpus])
    loader = Loader(make(config), device="cpu")
    for _ in range(7):
        next(loader)
    state = loader.state
    expected = [next(loader) for _ in range(20)]
    loader.close()
    resumed = Loader(make(config), device="cpu")
    resumed.load_state(state)
    assert all(same(next(resumed), batch) for batch in expected)
    resumed.close()


def test_python_ends_at_once_with_a_full_queue_or_a_waiting_consumer() -> None:
    ends = {"pass": 0, "raise SystemExit(3)": 3, "os.kill(os.getpid(), signal.SIGINT)": -signal.SIGINT}
    code = (
        "import os, signal, time\n"
        "from tests.data.test_loader import Counter, Loader\n"
        f"for end in {[*ends]}:\n"  # each in a copy of a process that has imported torch, once for all
        "    if (child := os.fork()) == 0:\n"
        "        break\n"
        "    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)\n"
        "else:\n"
        "    raise SystemExit\n"
        "loader = Loader(Counter(), device='cpu'); next(loader)\n"
        "exec(end)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=90, check=False
    )
    assert done.stdout.splitlines() == [str(code) for code in ends.values()], done.stderr
    assert "Fatal" not in done.stderr


def test_ctrl_c_reaches_a_consumer_that_waits_for_a_slow_batch(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, threading, time\n"
        "from tests.data.test_loader import Counter, Loader\n"
        "class Slow(Counter):\n"
        "    def __iter__(self):\n"
        "        time.sleep(3600); yield from super().__iter__()\n"
        "threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()\n"
        "try:\n"
        "    next(Loader(Slow(), device='cpu'))\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted', flush=True)\n"
        "    os._exit(0)\n"  # the thread still sleeps
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout.strip() == "interrupted", done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_batches_arrive_on_the_gpu(corpus: Path) -> None:
    config = TextFiles(paths=[corpus], document_mask=True)
    on_gpu, on_cpu = Loader(make(config), device="cuda"), Loader(make(config), device="cpu")
    for _ in range(50):
        one, other = next(on_gpu), next(on_cpu)
        assert one["tokens"].is_cuda
        assert same(Batch({name: tensor.cpu() for name, tensor in one.items()}), other)
    on_gpu.close()
    on_cpu.close()
