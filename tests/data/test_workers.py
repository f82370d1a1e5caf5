"""Worker processes: the same batches and positions as without them, whatever happens to one of them."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.data.helpers import same
from tests.data.slow_plugin import Slow
from titancli.data import ByteTokenizer, Mix, MixStage, TokenShards
from titancli.data.loader import Loader
from titancli.data.workers import IGNORED, Rebuild, Workers
from titancli.errors import EnvironmentProblem, RecipeError
from titancli.observe.metrics import collector
from titancli.protocols import DatasetDefaults
from titancli.protocols.batch import Batch

SEQ_LEN, ROWS = 8, 2


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    collector.drain()
    yield
    collector.drain()
    assert not multiprocessing.active_children()


def loader(
    config: Any,
    workers: int,
    *,
    prefetch: int = 2,
    dp: tuple[int, int] = (0, 1),
    rows: int = ROWS,
    seq_len: int = SEQ_LEN,
    **options: Any,
) -> Loader:
    tokenizer = None if isinstance(config, Slow) else ByteTokenizer()
    rebuild = Rebuild(config, tokenizer, seq_len, rows, *dp, seed=7, rows_per_step=4 * ROWS)
    dataset = rebuild()
    preparers = Workers(rebuild, dataset, count=workers, depth=prefetch) if workers else None
    return Loader(dataset, device="cpu", prefetch=prefetch, workers=preparers, **options)


def read(source: Loader, count: int) -> list[tuple[Batch, dict[str, Any]]]:
    """Batches, and the state after each."""
    return [
        (batch, json.loads(json.dumps(source.state))) for _, batch in zip(range(count), source, strict=False)
    ]


def equal(one: list[tuple[Batch, dict[str, Any]]], other: list[tuple[Batch, dict[str, Any]]]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(same(a, b) and state == its for (a, state), (b, its) in pairs)


@pytest.fixture
def mixed(tmp_path: Path) -> Mix:
    """Token shards in every order, with weights that change; one of them ends."""
    ids = np.random.RandomState(0).randint(0, 255, 4000).astype("uint8")
    ids[::37] = 255
    parts = {}
    for name, options in (("rows", {}), ("listed", {"shuffle": "off", "document_mask": True})):
        ids.tofile(tmp_path / f"{name}.bin")
        parts[name] = TokenShards(paths=[tmp_path / f"{name}.bin"], format="raw", dtype="uint8", **options)
    ids[:150].tofile(tmp_path / "short.bin")
    short = TokenShards(paths=[tmp_path / "short.bin"], format="raw", dtype="uint8", repeat=False)
    return Mix(
        datasets={**parts, "short": short},
        weights={"rows": 2, "listed": 1},
        stages=[MixStage(from_step=3, weights={"short": 1, "rows": 1})],
        exhausted="continue",
    )


def test_batches_states_and_any_resume_are_those_without_workers(mixed: Mix) -> None:
    with_loaders = [loader(mixed, 0), loader(mixed, 3, prefetch=1), loader(mixed, 2, dp=(0, 1), prefetch=4)]
    whole, *others = [read(one, 30) for one in with_loaders]
    for one in with_loaders:
        one.close()
    assert all(equal(whole, other) for other in others)
    again = loader(mixed, 2)
    again.load_state(whole[6][1])
    assert equal(read(again, 5), whole[7:12])
    again.load_state(whole[19][1])  # what was prefetched is dropped
    assert equal(read(again, 10), whole[20:30])
    again.close()
    second = loader(mixed, 2, dp=(1, 2))  # a rank of two
    first_of_two = [batch["tokens"] for batch, _ in read(second, 4)]
    second.close()
    assert all(torch.equal(mine, whole[2 * n + 1][0]["tokens"]) for n, mine in enumerate(first_of_two))


@pytest.mark.parametrize("rows", [11, 12])
def test_data_end_after_the_same_batch(tmp_path: Path, rows: int) -> None:
    np.arange(rows * SEQ_LEN, dtype="uint8").tofile(tmp_path / "a.bin")
    config = TokenShards(paths=[tmp_path / "a.bin"], format="raw", dtype="uint8", repeat=False)
    alone, workers = loader(config, 0), loader(config, 4)
    assert equal(read(alone, 99), read(workers, 99))
    assert next(workers, None) is None and workers.state == alone.state
    workers.close()


def test_what_is_reported_and_logged_in_workers_reaches_the_rank() -> None:
    source = loader(Slow(), 2)
    read(source, 3)
    source.close()
    assert collector.drain()["read_rows"].value >= 3 * ROWS


def test_a_worker_that_is_killed_is_an_error_that_names_its_rows_in_its_place() -> None:
    # Slow enough for the batch before to be sent: the worker prepares ahead, and dies in the middle of that.
    source = loader(Slow(seconds=0.2, at=9, then="die"), 2)
    assert [int(batch["tokens"][0, 0]) for batch, _ in read(source, 4)] == [0, 2, 4, 6]
    for _ in range(2):
        with pytest.raises(
            EnvironmentProblem, match=r'killed by SIGKILL while it prepared rows 8 to 9 .*\{"row": 8\}'
        ) as caught:
            next(source)
    assert caught.value.exit_code == 5
    assert source.state == {"row": 8}
    assert not multiprocessing.active_children()
    source.close()


def test_an_exception_in_a_worker_comes_out_with_its_rows_and_leaves_no_process() -> None:
    source = loader(Slow(at=5, then="raise"), 3)
    assert len(read(source, 2)) == 2
    with pytest.raises(LookupError, match="there is no row 5") as caught:
        next(source)
    notes = "".join(caught.value.__notes__)
    assert "rows 4 to 5" in notes and "slow_plugin.py" in notes, "the place in the worker"
    assert not multiprocessing.active_children()
    source.close()


def test_an_error_in_words_says_the_rows_too(tmp_path: Path) -> None:
    np.full(100, 200, "uint8").tofile(tmp_path / "a.bin")
    source = loader(TokenShards(paths=[tmp_path / "a.bin"], format="raw", dtype="uint8"), 1, vocab_size=10)
    with pytest.raises(EnvironmentProblem, match="token id 200"):  # checked by the rank
        next(source)
    source.close()
    source = loader(TokenShards(paths=[tmp_path / "a.bin"], format="raw", dtype="uint8"), 2)
    os.truncate(tmp_path / "a.bin", 10)
    with pytest.raises(EnvironmentProblem, match=r"is not the data.*data worker \d+, rows 0 to 1 since"):
        next(source)
    source.close()


def test_workers_are_stopped_while_they_prepare_and_while_nobody_reads() -> None:
    source = loader(Slow(seconds=0.02), 2)
    next(source)
    source.close()
    assert not multiprocessing.active_children()
    assert source.state == {"row": 2} and int(next(source)["tokens"][0, 0]) == 2
    source.close()


def test_signals_for_the_rank_do_not_end_its_workers() -> None:
    source = loader(Slow(), 2)
    next(source)
    for process in multiprocessing.active_children():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            os.kill(process.pid or 0, number)
        status = Path(f"/proc/{process.pid}/status").read_text()
        blocked = int(status.partition("SigBlk:")[2].split()[0], 16)
        assert all(blocked >> (number - 1) & 1 for number in IGNORED), "from the start, by their server too"
    assert len(read(source, 8)) == 8
    source.close()


def test_a_dataset_that_cannot_skip_is_refused() -> None:
    class NoSkip(DatasetDefaults):
        def state_dict(self) -> dict[str, Any]:
            return {}

    with pytest.raises(RecipeError, match="NoSkip cannot skip rows"):
        Workers(Rebuild(Slow(), None, 8, 2, 0, 1, 7), NoSkip(), count=1, depth=1)  # type: ignore[arg-type]


def waits(source: Loader, steps: int, step_seconds: float) -> float:
    """The share of the time that steps of so many seconds wait for data."""
    next(source)
    waited, began = 0.0, time.perf_counter()
    for _ in range(steps):
        time.sleep(step_seconds)
        asked = time.perf_counter()
        next(source)
        waited += time.perf_counter() - asked
    source.close()
    return waited / (time.perf_counter() - began)


@pytest.mark.slow
def test_steps_do_not_wait_for_rows_that_take_5_ms() -> None:
    config = Slow(seconds=0.005)
    alone = waits(loader(config, 0, rows=8), 10, 0.02)  # a batch takes 40 ms
    shared = min(waits(loader(config, 4, rows=8), 30, 0.02) for _ in range(3))
    assert alone > 0.3 and shared < alone / 2, (alone, shared)
