"""The names of a component on the command line: KIND/NAME, KIND/PLUGIN/NAME, PLUGIN/NAME or NAME."""

from __future__ import annotations

from titancli.cli.group import note_broken
from titancli.errors import PluginError, nearest_name
from titancli.registry import current
from titancli.registry.component import component_info
from titancli.registry.first_party import COMPONENTS
from titancli.registry.kinds import KINDS


def find_component(name: str) -> type:
    """Return the component of this name.

    Raises:
        PluginError: there is none, or more than one.
    """
    kind, _, rest = name.partition("/")
    if rest and kind in KINDS:
        return current().find(kind, rest)
    found = _called(name)
    if len(found) > 1:
        raise PluginError(
            f"{name!r} is the name of {len(found)} components: {', '.join(found)}",
            hint=f"for example: {next(iter(found))}",
        )
    if not found:
        for full, plugin in COMPONENTS.items():
            kind, _, bare = full.partition("/")
            if name in (bare, f"{plugin}/{bare}"):
                return current().find(kind, name)  # which says how to install it
        note_broken()
        near = nearest_name(name, [full.rpartition("/")[2] for full, _ in current().components()])
        raise PluginError(
            f"unknown component {name!r}",
            hint=f"did you mean {near!r}?" if near else "`titan list-components` lists all components",
        )
    return next(iter(found.values()))


def is_component(name: str) -> bool:
    """Return whether an argument has the form of a component's name rather than a recipe's."""
    first, slash, _ = name.partition("/")
    if slash:
        return first in KINDS or any(first == plugin.name for plugin in current().plugins)
    recipes = {file.stem for _, folder in current().recipe_folders() for file in folder.rglob("*.toml")}
    return name not in recipes and bool(_called(name))


def _called(name: str) -> dict[str, type]:
    return {
        f"{component_info(config).kind}/{full}": config
        for full, config in current().components()
        if name in (full, full.rpartition("/")[2])
    }
