"""Lookup of components by their names in a recipe, and all questions to the plugins as a whole."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titancli.errors import PluginError, nearest_name
from titancli.registry.command import Command
from titancli.registry.component import component_info, configs, is_config
from titancli.registry.fields import fields_of
from titancli.registry.first_party import (
    COMMANDS_ALONE,
    COMPONENTS,
    MODEL_TYPES,
    PLUGINS,
    install_command,
)
from titancli.registry.kinds import BUILTIN, KINDS
from titancli.registry.plugins import DISABLED, Plugin, PluginStatus
from titancli.registry.targets import missing

if TYPE_CHECKING:
    import click

SHOWN = 12
"""Maximum number of names in a hint."""


class Registry:
    """All plugins, in the order of their names.

    `Registry(components=[("my-plugin", MyLoss)])` makes one by hand.
    """

    def __init__(
        self,
        plugins: Sequence[Plugin] = (),
        *,
        components: Iterable[tuple[str, type]] = (),
        checks: bool = True,
    ) -> None:
        by_plugin: dict[str, list[type]] = {}
        for plugin_name, config in components:
            by_plugin.setdefault(plugin_name, []).append(config)
        made = [Plugin.of(name, configs) for name, configs in by_plugin.items()]
        self._checks = checks
        self._plugins = {plugin.name: plugin for plugin in sorted([*plugins, *made], key=lambda p: p.name)}

    # -------------------------------------------------------------------------------------- components

    def find(self, kind: str, name: str, *, first: Sequence[str] = ()) -> Any:
        """Return the config class of a component by its bare name, or by its full name `plugin/name`.

        Args:
            first: plugins that win for a bare name which others have too.

        Raises:
            PluginError: there is none, more than one plugin offers it, or the plugin that it names, or that
                might offer it, is broken.
        """
        owner, _, bare = name.rpartition("/")
        if owner:
            return self._find_in(self._named(kind, owner, bare), kind, bare)
        for plugin in filter(None, map(self._plugins.get, first)):
            if (kind, bare) in plugin.components:
                return plugin.components[kind, bare]
        found = {p.name: p.components[kind, bare] for p in self._loaded() if (kind, bare) in p.components}
        if len(found) > 1:
            full = " or ".join(f"'{plugin}/{bare}'" for plugin in found)
            raise PluginError(
                f"{kind} {bare!r} is provided by more than one plugin: {', '.join(found)}",
                hint=f"use {full}, or disable one plugin: -p "
                f"no:{[name for name in found if name != BUILTIN][-1]}",
            )
        if not found:
            raise self._unknown(kind, name, list(self._loaded()))
        return next(iter(found.values()))

    def full_name(self, config: type) -> str:
        """Return `plugin/name` of a config class (or of a bound config).

        Raises:
            PluginError: no plugin offers it.
        """
        cls = config if isinstance(config, type) else type(config)
        info = component_info(cls)
        # A class that was found is of a loaded plugin; the others come last, since they must be loaded.
        for plugin in sorted(self._plugins.values(), key=lambda plugin: not plugin.loaded):
            if plugin.components.get((info.kind, info.name)) is cls:
                return f"{plugin.name}/{info.name}"
        raise PluginError(
            f"{cls.__module__}.{cls.__qualname__} is not provided by any plugin",
            hint="return it from the plugin's titan_components hook",
        )

    def names(self, kind: str) -> list[str]:
        """Return the full names of all components of a kind."""
        return [name for name, _ in self.components(kind)]

    def choices(self, kind: str) -> str:
        """Return the names of a kind as a recipe may write them, titan's first, for messages."""
        names = sorted(self.names(kind), key=lambda name: not name.startswith(f"{BUILTIN}/"))
        bare = [name.rpartition("/")[2] for name in names]
        shown = [b if bare.count(b) == 1 else name for b, name in zip(bare, names, strict=True)]
        more = f", and {len(shown) - SHOWN} more: titan list-components {kind}" if len(shown) > SHOWN else ""
        return (", ".join(shown[:SHOWN]) or "none is installed") + more

    def components(self, kind: str | None = None) -> list[tuple[str, Any]]:
        """Return full name and config class of all components (of a kind), by kind and then by name."""
        found = [
            (list(KINDS).index(of_kind), f"{plugin.name}/{name}", config)
            for plugin in self._loaded()
            for (of_kind, name), config in plugin.components.items()
            if kind in (None, of_kind)
        ]
        return [(name, config) for _, name, config in sorted(found, key=lambda row: row[:2])]

    # ----------------------------------------------------------------------------------- plugins, hooks

    @property
    def plugins(self) -> list[PluginStatus]:
        """Return every plugin's status; loads all of them."""
        counts = Counter(key for plugin in self._loaded() for key in plugin.components)
        clashes = {key for key, count in counts.items() if count > 1}
        return [plugin.load().status(clashes) for plugin in self._plugins.values()]

    @property
    def broken(self) -> list[str]:
        """Return the names of the plugins known to be broken."""
        list(self._loaded())
        return [plugin.name for plugin in self._plugins.values() if plugin.state == "broken"]

    @property
    def guests(self) -> list[Plugin]:
        """Return every plugin but titan that is neither left out nor known to be broken; loads none."""
        return [plugin for name, plugin in self._plugins.items() if name != BUILTIN and plugin.state == "ok"]

    def load_unguarded(self, name: str) -> None:
        """Load everything from one plugin, without undoing its changes to this process."""
        plugin = self._plugins[name]
        plugin.guards = False
        plugin.load()
        for hook in ("titan_recipes", "titan_commands"):
            plugin.call(hook)

    def unneeded_torch(self, recipe: Any) -> list[str]:
        """Return the plugins that imported torch while loading and that a recipe does not use."""
        return [
            plugin.name
            for plugin in self._plugins.values()
            if plugin.loaded and plugin.torch and not self._uses(recipe, plugin)
        ]

    def check_targets(self) -> None:
        """Check that the code that components name exists; a plugin that lacks some is broken from here
        on."""
        for plugin in self._plugins.values():
            plugin.load().check_targets()

    def foreign_keys(self) -> dict[str, str]:
        """Return the keys of other trainers that plugins know, each with titan's or with words."""
        found: dict[str, str] = {}
        for plugin in self._plugins.values():
            for keys in plugin.call("titan_foreign_keys"):
                if isinstance(keys, dict):
                    found |= keys
                else:
                    plugin.fail(f"titan_foreign_keys returned {keys!r}, which is not a dict")
        return found

    def foreign_config(self, text: str) -> tuple[str, str] | None:
        """Return the trainer whose config a text is, and the command that converts it; None for any other."""
        for plugin in self._plugins.values():
            for found in plugin.call("titan_foreign_config", text=text):
                if _is_finding(found):
                    return found[0], found[1]
                plugin.fail(f"titan_foreign_config returned {found!r}, which is not a name and a command")
        return None

    def recipe_folders(self) -> list[tuple[str, Path]]:
        """Return the recipe folders of plugins, each with the plugin's name."""
        folders = []
        for plugin in self._loaded():
            for folder in plugin.call("titan_recipes"):
                if isinstance(folder, (str, Path)) and Path(folder).is_dir():
                    folders.append((plugin.name, Path(folder)))
                else:
                    plugin.fail(f"titan_recipes returned {str(folder)!r}, which is not a folder")
        return folders

    def has_own(self, name: str) -> bool:
        """Return whether one of titan's own plugins is there and not left out, without loading it."""
        plugin = self._plugins.get(name)
        return plugin is not None and plugin.distribution == name and plugin.state not in DISABLED

    def commands(
        self, reserved: Collection[str] = (), *, without: Collection[str] = ()
    ) -> list[tuple[str, Command | click.Command]]:
        """Return the commands of plugins, each with the plugin's name; none may have a reserved name.

        Args:
            without: plugins that are not asked.
        """
        import click

        commands: list[tuple[str, Command | click.Command]] = []
        for plugin in (plugin for name, plugin in self._plugins.items() if name not in without):
            for command in plugin.call_list("titan_commands"):
                if not isinstance(command, (Command, click.Command)) or not command.name:
                    plugin.fail(f"titan_commands returned {command!r}, which is not a command with a name")
                elif command.name in reserved:
                    plugin.fail(
                        f"titan_commands returned {command.name!r}, which is the name of a built-in command"
                    )
                else:
                    commands.append((plugin.name, command))
        return commands

    def checks(self, recipe: Any) -> list[tuple[str, str]]:
        """Return the problems of a recipe that the plugins' checks find: `(dotted key, message)`.

        Raises:
            PluginError: the check of a plugin that the recipe uses is broken.
        """
        found: list[tuple[str, str]] = []
        for plugin in self._loaded() if self._checks else ():
            was_ok = plugin.state == "ok"
            for finding in plugin.call_list("titan_checks", recipe=recipe):
                if _is_finding(finding):
                    found.append((finding[0], f"{finding[1]} (reported by plugin {plugin.name})"))
                else:
                    plugin.fail(
                        f"titan_checks returned {finding!r}, which is not a pair (dotted key, message)"
                    )
            if was_ok and plugin.state != "ok" and self._uses(recipe, plugin):
                raise PluginError(f"the titan_checks of plugin {plugin.name!r} failed:\n{plugin.error}")
        return found

    def refuse_missing_code(self, recipe: Any) -> None:
        """Check, without importing it, that the code that a recipe's components name exists.

        Raises:
            PluginError: some of it is missing.
        """
        for _, config in configs(recipe) if self._checks else ():
            if not is_config(config):  # a section of titan's own
                continue
            info = component_info(config)
            for why in filter(None, map(missing, filter(None, (info.target, info.hf)))):
                raise PluginError(
                    f"{info.kind} {self.full_name(config)}: {why}",
                    hint="this is a bug in the plugin that provides it",
                )

    # ----------------------------------------------------------------------------------------- helpers

    def _loaded(self) -> Iterator[Plugin]:
        """Yield the plugins that may have components, recipes or checks."""
        for name, plugin in self._plugins.items():
            if name not in COMMANDS_ALONE or plugin.distribution != name:
                yield plugin.load()

    def _named(self, kind: str, owner: str, bare: str) -> Plugin:
        if owner in self._plugins:
            return self._plugins[owner]
        if COMPONENTS.get(f"{kind}/{bare}") == owner and (absent := self.absent(owner)):
            raise PluginError(f"{kind} '{owner}/{bare}' comes with {absent[0]}", hint=absent[1])
        near = nearest_name(owner, self._plugins)
        raise PluginError(
            f"'{owner}/{bare}': no plugin {owner!r} is installed",
            hint=f"did you mean '{near}/{bare}'?" if near else "`titan plugin list` lists them",
        )

    def absent(self, plugin: str) -> tuple[str, str | None] | None:
        """Return why a plugin of titan offers nothing, and what installs it; None if it is loaded."""
        found = self._plugins.get(plugin)
        if found is not None:
            return (f"{plugin}, which is disabled: {found.error}", None) if found.state in DISABLED else None
        return (f"{plugin}, which is not installed", install_command(plugin)) if plugin in PLUGINS else None

    def lacks_reader(self, model_type: str) -> PluginError | None:
        """Return the error for a config.json that one of titan's plugins reads which is not installed."""
        owner = MODEL_TYPES.get(model_type)
        if owner is None or owner in self._plugins:
            return None
        message = f"model_type {model_type!r} is read by {owner}, which is not installed"
        return PluginError(message, hint=install_command(owner))

    def _find_in(self, plugin: Plugin, kind: str, bare: str) -> type:
        config = plugin.components.get((kind, bare))
        if config is not None:
            return config
        if plugin.state in DISABLED:
            raise PluginError(f"{plugin.name}/{bare}: the plugin is disabled: {plugin.error}")
        raise self._unknown(kind, f"{plugin.name}/{bare}", [plugin])

    def _unknown(self, kind: str, name: str, searched: list[Plugin]) -> PluginError:
        """Return the error for a name that none of these plugins offers, with the error of a broken one."""
        broken = [plugin for plugin in searched if plugin.state == "broken"]
        if absent := self.absent(COMPONENTS.get(f"{kind}/{name}", "")):
            return PluginError(f"{kind} {name!r} comes with {absent[0]}", hint=absent[1])
        message = f"unknown {kind} {name!r}"
        for plugin in broken:
            message += f"\nplugin {plugin.name!r}, which may provide it, is broken:\n{plugin.error}"
        return PluginError(message, hint=self._advice(kind, name, searched, [p.name for p in broken]))

    def _advice(self, kind: str, name: str, searched: list[Plugin], broken: list[str]) -> str:
        bare = name.rpartition("/")[2]
        # Components of two kinds may have one name: the loss grpo, and the loop.
        offered = [(plugin.name, *key) for plugin in searched for key in plugin.components]
        candidates = {
            f"{owner}/{other}" if "/" in name else other
            for owner, of_kind, other in offered
            if of_kind == kind
        }
        if (advice := self._other_place(kind, bare)) is not None:
            return advice
        if near := nearest_name(name, sorted(candidates)):
            doubt = f" Or fix {', '.join(broken)}, which may provide {name!r}" if broken else ""
            return f"did you mean {near!r}?{doubt}"
        others = sorted({of_kind for _, of_kind, other in offered if other == bare})
        if broken:
            advice = "fix or uninstall the broken plugin; `titan plugin list` shows the status of each plugin"
        elif others:
            kinds = " and ".join(others)
            advice = (
                f"{name!r} is of kind {kinds}; `titan list-components {kind}` lists the components "
                f"of that kind"
            )
        else:
            advice = f"known: {', '.join(sorted(candidates)) or 'none is installed'}"
        disabled = [f"{p.name} ({p.error})" for p in self._plugins.values() if p.state in DISABLED]
        return f"{advice}; disabled: {', '.join(disabled)}" if disabled else advice

    def _other_place(self, kind: str, name: str) -> str | None:
        """Return a hint for a name that is no component but a model of transformers, or a choice of the
        component that the kind has by default (`cosine` of the schedule `wsd`)."""
        known = dict(self.components(kind))
        if kind == "model":
            if readers := [full for full, cls in known.items() if name in cls.model_types]:
                return (
                    f"{' and '.join(readers)} reads its folders: type = {readers[0]!r}, or weights = FOLDER"
                )
            if _of_transformers(name):
                return 'transformers has it: type = "hf_causal_lm" and config = FOLDER, in [model]'
        default = known.get(KINDS[kind].full_default or "") if kind in KINDS else None
        for field in fields_of(default).values() if default else ():
            if name in field.type.choices:
                return f"it is a choice of {KINDS[kind].default}: {field.name} = {name!r}"
        return None

    def _uses(self, recipe: Any, plugin: Plugin) -> bool:
        own = set(plugin.components.values())
        return any(type(config) in own for _, config in configs(recipe))


def _of_transformers(name: str) -> bool:
    """Return whether the installed transformers has a model of this name, without importing it."""
    found = importlib.util.find_spec("transformers")
    places = found.submodule_search_locations if found else None
    return name.isidentifier() and any(Path(place, "models", name).is_dir() for place in places or ())


def _is_finding(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2 and all(isinstance(v, str) for v in value)
