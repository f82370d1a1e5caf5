"""Test tools for plugin authors, and `titan plugin new`. Needs no pytest, and adds nothing to it.

    from titan_testing import check_plugin, recipe, run_cli

    def test_the_plugin_is_sound():
        check_plugin("titan-lab")

    def test_it_trains(tmp_path):
        done = run_cli("train", recipe(tmp_path, '[loss]\\ntype = "lab"'), cwd=tmp_path)
        assert done.code == 0, done.stderr

Names are loaded on first use: titan imports this file at each start.
"""

from __future__ import annotations

from titancli import Command, hookimpl

_WHERE = {
    "Done": "titan_testing.commands",
    "Example": "titan_testing.behaviour.subject",
    "check_plugin": "titan_testing.check",
    "recipe": "titan_testing.recipes",
    "run_cli": "titan_testing.commands",
}
__all__ = ["Done", "Example", "check_plugin", "recipe", "run_cli"]

TYPE_CHECKING = False  # as in typing, whose import takes longer than everything else here
if TYPE_CHECKING:
    from typing import Any

    from titan_testing.behaviour.subject import Example as Example
    from titan_testing.check import check_plugin as check_plugin
    from titan_testing.commands import Done as Done
    from titan_testing.commands import run_cli as run_cli
    from titan_testing.recipes import recipe as recipe


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'titan_testing' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_WHERE[name]), name)


@hookimpl
def titan_commands() -> list[Command]:
    return [Command("plugin new", "Create the package of a new plugin.", "titan_testing.command:command")]
