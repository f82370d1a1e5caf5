"""titan's own plugins are made of public modules only, which docs/plugins.md lists, and have one version."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomli

from titancli import __version__
from titancli.registry import first_party
from titancli.registry.component import component_info
from titancli.registry.discover import load_plugins

ROOT = Path(__file__).parents[1]
PLUGINS = sorted(path.parent for path in (ROOT / "plugins").glob("*/pyproject.toml"))
each_plugin = pytest.mark.parametrize("plugin", PLUGINS, ids=lambda path: path.name)


def public() -> set[str]:
    """The modules of the table; `names` of `titancli.models` is `titancli.models.names`, `.*` all below."""
    text = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
    table = re.search(r"<!-- public modules -->\n\| module .*\n\|---.*\n((?:\|.*\n)+)", text)
    assert table is not None
    found = set()
    for row in table[1].splitlines():
        names = re.findall(r"`([\w.*]+)`", row.split("|")[1])
        package = names[-1]
        found |= {name if name.startswith("titancli") else f"{package}.{name}" for name in names}
    return found


PUBLIC = public()


def imports(path: Path) -> Iterator[tuple[int, str, str]]:
    """Line, module and name of each import of titan's."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "titancli":
            yield from ((node.lineno, str(node.module), alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            names = (alias.name for alias in node.names)
            yield from ((node.lineno, name, "") for name in names if name.split(".")[0] == "titancli")


def is_public(module: str, name: str) -> bool:
    """Whether a name may be imported."""
    hidden = any(part.startswith("_") and not part.endswith("__") for part in (*module.split("."), name))
    package = module.rpartition(".")[0]
    return not hidden and bool({module, f"{module}.{name}", f"{package}.*"} & PUBLIC)


def test_a_public_module_is_there() -> None:
    assert len(PUBLIC) > 10
    for module in sorted(name.removesuffix(".*") for name in PUBLIC):
        importlib.import_module(module)


@each_plugin
def test_a_plugin_imports_public_names_only(plugin: Path) -> None:
    files = [file for file in plugin.glob("titan_*/**/*.py") if "templates" not in file.parts]
    assert files
    found = [
        f"{file.relative_to(ROOT)}:{line}: {module}" + (f".{name}" if name else "")
        for file in files
        for line, module, name in imports(file)
        if not is_public(module, name)
    ]
    assert not found, "\n".join(["not in the table of docs/plugins.md:", *found])


@each_plugin
def test_a_plugin_has_titans_version(plugin: Path) -> None:
    assert tomli.loads((plugin / "pyproject.toml").read_text())["project"]["version"] == __version__


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda plugin: plugin.name)
def test_a_plugin_is_in_the_table(plugin: Path) -> None:
    page = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
    table = page.partition("<!-- titan's own plugins -->")[2].partition("\n\n")[0]
    assert f"[{plugin.name}](../plugins/{plugin.name}/README.md)" in table


def test_the_names_that_plugins_bring_are_known_where_they_are_not_installed() -> None:
    registry = load_plugins()
    own = {path.name for path in PLUGINS}
    commands = {str(command.name): plugin for plugin, command in registry.commands() if plugin in own}
    assert commands == first_party.COMMANDS
    components = {
        f"{component_info(config).kind}/{name.rpartition('/')[2]}": name.partition("/")[0]
        for name, config in registry.components()
        if name.partition("/")[0] in own
    }
    assert components == first_party.COMPONENTS
    for name in first_party.COMMANDS_ALONE:  # which nothing else is asked of
        plugin = registry._plugins[name].load()
        assert not plugin.components and not plugin.call("titan_recipes"), name
        assert not plugin.call("titan_checks", recipe=None), name
