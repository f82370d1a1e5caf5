"""The plugin is sound by the kit's rules; without it, a recipe that names its copies says so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from titan_peers import Peers
from titan_peers.memory import Copy, write_record
from titan_testing import check_plugin, run_cli
from titancli import registry


@pytest.fixture(autouse=True)
def all_plugins_again() -> Iterator[None]:
    """Plugins that a command has blocked are blocked in this process."""
    yield
    registry.configure()


def test_the_plugin_is_sound() -> None:
    check_plugin("titan-peers")


def test_without_it_a_recipe_says_what_to_install(tmp_path: Path) -> None:
    done = run_cli(
        "validate", "llama3_debug", "checkpoint.copies=peers", "-p", "no:titan-peers", cwd=tmp_path
    )
    assert done.code in (3, 4) and "titan-peers" in done.stderr


def test_a_run_folder_says_whether_there_may_be_a_copy(tmp_path: Path) -> None:
    assert not Peers().recorded(tmp_path)
    write_record(tmp_path, Copy(5, "a", 1, 1))
    assert Peers().recorded(tmp_path)
    assert [Peers().states(nodes) for nodes in (1, 2, 8)] == [2, 4, 4]
