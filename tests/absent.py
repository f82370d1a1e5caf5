"""Skip the tests that need one of titan's plugins whose folder has been deleted, by its name.

A plugin can be deleted: whatever else there is stays green. What a module or a test imports of it skips that
module or test; so does a failure that names it, such as a recipe with one of its components.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec

import pytest

from titancli.registry.first_party import COMMANDS, FOLDER, PLUGINS

ABSENT = {name for name in PLUGINS if not (FOLDER / name).is_dir()}


def need(*plugins: str) -> None:
    """Skip the test if one of these plugins has been deleted: for tests whose failure would not name it."""
    for plugin in ABSENT.intersection(plugins):
        pytest.skip(f"{plugin} is not here")


def need_command(command: str) -> None:
    """Skip the test if the plugin of a command, as it is typed after `titan`, has been deleted."""
    need(*(plugin for name, plugin in COMMANDS.items() if f"{command} ".startswith(f"{name} ")))


class Missing:
    """Finds the modules of absent plugins, after everybody else: there are none."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if (plugin := name.partition(".")[0].replace("_", "-")) in ABSENT:
            pytest.skip(f"{plugin} is not here", allow_module_level=True)
        return None


sys.meta_path.append(Missing())  # type: ignore[arg-type]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report: pytest.TestReport = (yield).get_result()  # type: ignore[attr-defined]
    if report.failed and (plugin := named(report.longreprtext + report.caplog + report.capstderr)):
        report.outcome = "skipped"
        report.longrepr = (str(item.path), item.location[1] or 0, f"Skipped: {plugin} is not here")


def named(text: str) -> str | None:
    """Return the first absent plugin that a text names, as a distribution or a module."""
    return next((plugin for plugin in sorted(ABSENT) if plugin in text.replace("_", "-")), None)
