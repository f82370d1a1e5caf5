"""`titan plugin list|show`: the installed plugins, their status and their load times."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from titancli.cli.completion import PluginName
from titancli.cli.group import RESERVED
from titancli.cli.output import print_json, table
from titancli.errors import PluginError, nearest_name
from titancli.registry import current
from titancli.registry.badges import badges
from titancli.registry.first_party import PLUGINS
from titancli.registry.isolated_load import try_apart
from titancli.registry.kinds import BUILTIN
from titancli.registry.plugins import PluginStatus

JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


@click.command("list", short_help="List the plugins and their status.")
@JSON
def list_(as_json: bool) -> None:
    """List the plugins and their status.

    The status is ok, broken, slow (not loaded within a minute), blocked (by -p no:NAME), unlisted (not in
    TITAN_PLUGINS) or missing (listed there, but not installed). A plugin that imports torch slows down every
    command. Each is first loaded in a process of its own, to see what it does there: whether it ends, prints,
    changes the folder, the environment, logging or torch, or takes seconds. What `titan prove` has found is
    shown too; a proof is stale if the plugin's code, titan or torch has changed since.
    """
    _report(None, as_json)


@click.command("show", short_help="Show one plugin: its components, its status and its error.")
@click.argument("name", type=PluginName())
@JSON
def show(name: str, as_json: bool) -> None:
    """Show one plugin: its components, its status, what was proven, and the traceback if it is broken."""
    _report(name, as_json)


def _report(name: str | None, as_json: bool) -> None:
    registry = current()
    try_apart(registry)
    registry.commands(RESERVED)  # asked for everything, a plugin shows all its faults
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
        _print(plugins)


def _print(plugins: list[PluginStatus]) -> None:
    """Print titan's own plugins, and then those of others."""
    own = [plugin for plugin in plugins if _is_own(plugin)]
    others = [plugin for plugin in plugins if not _is_own(plugin)]
    for title, group in (("titan's own", own), ("others", others)):
        if group:
            if own and others:
                print(f"{title}:" if group is own else f"\n{title}:")
            header = ("plugin", "version", "state", "load", "components", "")
            table(header, [_row(plugin) for plugin in group])


def _is_own(plugin: PluginStatus) -> bool:
    return plugin.name == BUILTIN or (plugin.name in PLUGINS and plugin.distribution == plugin.name)


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
    document = dataclasses.asdict(plugin) | {"own": _is_own(plugin), "proofs": badges(plugin.name)}
    return {**document, "file": plugin.file and str(plugin.file), "seconds": round(plugin.seconds, 4)}


def _row(plugin: PluginStatus) -> tuple[str, ...]:
    count = f"{len(plugin.components)} component{'' if len(plugin.components) == 1 else 's'}"
    clashes = [f"{', '.join(plugin.clashes)}: another plugin has this name"] if plugin.clashes else []
    remark = "; ".join(["imports torch"] * plugin.torch + list(plugin.habits) + clashes + _proofs(plugin))
    if plugin.error:
        remark = plugin.error.splitlines()[-1]
    return plugin.name, plugin.version or "-", plugin.state, _milliseconds(plugin), count, remark


def _show(plugin: PluginStatus) -> None:
    source = str(plugin.file) if plugin.file else f"{plugin.distribution or '-'} {plugin.version or ''}"
    print(f"{plugin.name}: {plugin.state}")
    print(f"  from        {source.strip()}")
    print(f"  load        {_milliseconds(plugin)}{', imports torch' if plugin.torch else ''}")
    print(f"  components  {', '.join(plugin.components) or 'none'}")
    for habit in plugin.habits:
        print(f"  at loading  {habit}")
    if plugin.clashes:
        print(
            f"  full names  {', '.join(plugin.clashes)}: another plugin has this name, so a recipe must write"
        )
        print(f"              {plugin.name}/NAME, or that of the other one")
    for badge in badges(plugin.name):
        print(f"  proof       {badge['component']}: {_proof_text(badge)}")
    if plugin.error:
        print()
        print(plugin.error)


def _milliseconds(plugin: PluginStatus) -> str:
    return f"{1000 * plugin.seconds:.0f} ms"


def _proofs(plugin: PluginStatus) -> list[str]:
    """Return the numbers of components that were proven right, proven wrong, or whose proof is stale, in
    words."""
    found = badges(plugin.name)
    counts = {
        "proven": sum(badge["ok"] is True and not badge["stale"] for badge in found),
        "proven wrong": sum(badge["ok"] is False and not badge["stale"] for badge in found),
        "with a stale proof": sum(bool(badge["stale"]) for badge in found),
    }
    return [f"{count} {what}" for what, count in counts.items() if count]


def _proof_text(badge: dict[str, Any]) -> str:
    if badge["ok"] is None:
        return "; ".join(badge["stale"])
    counts = ", ".join(f"{count} {status}" for status, count in badge["cases"].items())
    versions = ", ".join(f"{name} {version}" for name, version in badge["versions"].items())
    text = f"{badge['recipe']} on up to {badge['ranks']} ranks: {counts} ({badge['time'][:10]}; {versions})"
    return f"{text}; stale: {', '.join(badge['stale'])}" if badge["stale"] else text
