"""Commands of plugins: found by name, loaded when used, and reported with the plugin to install where it is
missing."""

from __future__ import annotations

from collections.abc import Collection

import click

from titancli.errors import PluginError
from titancli.registry.command import Command
from titancli.registry.first_party import COMMANDS, PLUGINS, install_command

Offer = tuple[str, "Command | click.Command"]
"""A plugin, and a command of it."""


def own_commands() -> set[str]:
    """Return the commands of titan's own plugins that are installed, without loading them."""
    from titancli.registry import current

    return {name for name, plugin in COMMANDS.items() if current().has_own(plugin)}


def offers(reserved: Collection[str] = (), *, own: bool = True) -> dict[str, list[Offer]]:
    """Return the commands of plugins by name, each with the plugins that offer it.

    Args:
        reserved: names that no plugin can have.
        own: whether to include titan's own plugins.
    """
    from titancli.registry import current

    found: dict[str, list[Offer]] = {}
    without = () if own else [plugin for plugin in PLUGINS if current().has_own(plugin)]
    for plugin, command in current().commands(reserved, without=without):
        found.setdefault(str(command.name), []).append((plugin, command))
    return found


def offered(name: str, reserved: Collection[str] = ()) -> click.Command | None:
    """Return the command of a plugin, `name` or `group name`.

    Raises:
        PluginError: more than one plugin offers it; its code cannot be imported or is not a click command; or
            titan's own plugin that brings it is not installed.
    """
    found = offers(reserved).get(name, [])
    if len(found) > 1:
        plugins = [plugin for plugin, _ in found]
        raise PluginError(
            f"the command {name!r} is provided by more than one plugin: {', '.join(plugins)}",
            hint=f"disable one of them: -p no:{plugins[-1]}",
        )
    if not found and name in COMMANDS:
        raise _missed(name, COMMANDS[name])
    return _load(*found[0]) if found else None


def short_help(command: Command | click.Command) -> str:
    """Return a command's line of help."""
    return command.help if isinstance(command, Command) else command.get_short_help_str(limit=60)


def _missed(name: str, plugin: str) -> PluginError:
    """Return the error for a command that one of titan's own plugins should offer and does not."""
    from titancli.registry import current

    status = next((one for one in current().plugins if one.name == plugin), None)
    if status is None:
        return PluginError(f"titan {name} comes with {plugin}: {install_command(plugin)}")
    return PluginError(
        f"titan {name} comes with {plugin}, which is {status.state}: {status.error}",
        hint=f"titan plugin show {plugin}",
    )


def _load(plugin: str, command: Command | click.Command) -> click.Command:
    if isinstance(command, click.Command):
        return command
    from titancli.registry.component import load_target
    from titancli.registry.plugins import own_traceback

    try:
        loaded = load_target(command.target)
    except PluginError as error:
        trace = own_traceback(error.__cause__ or error)
        raise PluginError(f"the command {command.name!r} of plugin {plugin!r} is broken:\n{trace}") from error
    if isinstance(loaded, click.Command):
        return loaded
    raise PluginError(
        f"the command {command.name!r} of plugin {plugin!r} is {loaded!r}, which is not a click command",
        hint="this is a bug in the plugin",
    )
