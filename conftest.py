"""Fixtures for all tests: titan's own and those of its plugins."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

# Spinning OpenMP threads of several processes on few cores ruin tests; set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import HealthCheck, settings

from tests import programs
from tests.choice.choose import ABSENT, nightly
from tests.nodes import Cluster, unavailable
from tests.ranks import Ranks
from tests.warm import Warm

pytest_plugins = ["tests.absent", "tests.summary", "tests.s3"]
programs.restrict()
WARM, POOL = Warm(), Ranks()

# On a busy machine an example takes as long as it takes.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def heed_ctrl_c() -> None:
    """What the tests start would ignore it where they do."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


heed_ctrl_c()  # a shell that starts the tests in the background has it ignored


def pytest_sessionstart() -> None:
    WARM.install()


def pytest_sessionfinish() -> None:
    WARM.close()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    # A process that has been forked may not use CUDA where its parent has.
    WARM.cold = any(item.get_closest_marker(name) for name in ("cold", "gpu"))
    with programs.visible(programs.needed(item)):
        yield
    heed_ctrl_c()  # `titan train` in this process ignores it once all is saved
    if nextitem is None or nextitem.path != item.path:
        POOL.close()  # torch 2.11 and 2.12 leave threads behind for each group, which forks are rid of
        freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = nightly()
    files = {item.nodeid.partition("::")[0] for item in items}
    here = {name for name in left_out if name.partition("::")[0] in files}
    config.stash[ABSENT] = here - {item.nodeid for item in items}
    for item in items:
        if item.nodeid in left_out:
            item.add_marker("nightly")
        if "cluster" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.needs("ip", install="apt install iproute2"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if reason := programs.missing(programs.needed(item)):
        pytest.skip(reason)


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    gc.disable()  # what is imported stays: to look through it over and over finds no garbage
    yield
    gc.enable()
    freeze()


def freeze() -> None:
    """Have the modules that are there left alone by every collection to come: one of a run takes longer than
    its steps where it looks through all of torch."""
    gc.collect()
    gc.freeze()
    gc.get_freeze_count = _many  # to count a million of them, as each run does, takes longer than its steps


def _many() -> int:
    return 1_000_000


@pytest.fixture(scope="session")
def ranks() -> Ranks:
    """`ranks(n, function, *args)`: a module-level function on n gloo ranks; the results by rank."""
    return POOL


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Nodes on this machine that share the test's folder, see `tests/nodes.py`; skipped where there can be
    none."""
    if reason := unavailable():
        pytest.skip(reason)
    with Cluster(tmp_path) as made:
        yield made
