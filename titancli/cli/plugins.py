"""`titan plugins`: what is installed, whether it works, and what it costs."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from titancli.cli.completion import PluginName
from titancli.cli.group import BUILTIN
from titancli.cli.output import print_json, table
from titancli.errors import PluginError, nearest_name
from titancli.registry import current
from titancli.registry.plugins import PluginStatus


@click.command("plugins", short_help="List the plugins and their status, or show one.")
@click.argument("name", required=False, type=PluginName())
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(name: str | None, as_json: bool) -> None:
    """List the plugins and their status, or show one.

    The status is ok, broken, blocked (by -p no:NAME), unlisted (not in TITAN_PLUGINS) or missing (listed
    there, but not installed). A plugin that imports torch slows down every command.
    """
    registry = current()
    registry.commands(BUILTIN)  # asked for everything, a plugin shows all its faults
    registry.recipe_folders()
    registry.check_targets()
    plugins = registry.plugins
    if name is not None:
        plugins = [_named(name, plugins)]
    if as_json:
        print_json("plugins", {"plugins": [_document(plugin) for plugin in plugins]})
    elif name is not None:
        _show(plugins[0])
    else:
        table(("plugin", "version", "state", "load", "components", ""), [_row(plugin) for plugin in plugins])


def _named(name: str, plugins: list[PluginStatus]) -> PluginStatus:
    by_name = {plugin.name: plugin for plugin in plugins}
    if name not in by_name:
        near = nearest_name(name, by_name)
        raise PluginError(
            f"no plugin {name!r} is installed",
            hint=f"did you mean {near!r}?" if near else f"installed: {', '.join(by_name)}",
        )
    return by_name[name]


def _document(plugin: PluginStatus) -> dict[str, Any]:
    document = dataclasses.asdict(plugin)
    return {**document, "file": plugin.file and str(plugin.file), "seconds": round(plugin.seconds, 4)}


def _row(plugin: PluginStatus) -> tuple[str, ...]:
    count = f"{len(plugin.components)} component{'' if len(plugin.components) == 1 else 's'}"
    remark = "imports torch" if plugin.torch else ""
    if plugin.error:
        remark = plugin.error.splitlines()[-1]
    return plugin.name, plugin.version or "-", plugin.state, _milliseconds(plugin), count, remark


def _show(plugin: PluginStatus) -> None:
    source = str(plugin.file) if plugin.file else f"{plugin.distribution or '-'} {plugin.version or ''}"
    print(f"{plugin.name}: {plugin.state}")
    print(f"  from        {source.strip()}")
    print(f"  load        {_milliseconds(plugin)}{', imports torch' if plugin.torch else ''}")
    print(f"  components  {', '.join(plugin.components) or 'none'}")
    if plugin.error:
        print()
        print(plugin.error)


def _milliseconds(plugin: PluginStatus) -> str:
    return f"{1000 * plugin.seconds:.0f} ms"
