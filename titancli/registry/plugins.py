"""Finding plugins and loading them, one at a time and each on its own, so that none can harm another.

Plugins are entry points of the group `titancli`, and files named with `-p`. Every plugin has a pluggy
manager of its own: what a hook returns is known to be that plugin's, and so is what it raises. A plugin is
loaded when it is first asked for something; a full name such as `titan/llama3` loads that one plugin only.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import pluggy

from titancli.errors import EnvironmentProblem, UsageError
from titancli.registry import hookspecs
from titancli.registry.component import ComponentInfo

if TYPE_CHECKING:
    from titancli.registry.lookup import Registry

GROUP = "titancli"
BUILTIN = "titan"
ALLOW_LIST = "TITAN_PLUGINS"

State = Literal["ok", "broken", "blocked", "unlisted", "missing"]
LEFT_OUT = ("blocked", "unlisted", "missing")


@dataclass(frozen=True)
class PluginStatus:
    """What `titan plugins` shows of one plugin."""

    name: str
    state: State
    distribution: str | None
    version: str | None
    file: Path | None
    """The file, for a plugin that `-p` added."""
    seconds: float
    """What importing it and asking for its components took."""
    torch: bool
    """Whether it imported torch, which a menu must not."""
    components: tuple[str, ...]
    """`kind/name`, in the order that the plugin gives them."""
    error: str | None
    """Why it is not ok; for an exception its traceback, from the plugin's own first line on."""


class Plugin:
    """One plugin, loaded when first used. Nothing that it raises leaves this class."""

    def __init__(
        self,
        name: str,
        load: Callable[[], Any],
        *,
        distribution: str | None = None,
        version: str | None = None,
        file: Path | None = None,
    ) -> None:
        self.name = name
        self.distribution = distribution
        self.version = version
        self.file = file
        self.state: State = "ok"
        self.error: str | None = None
        self._load = load
        self._seconds = 0.0
        self._torch = False
        self._hooks: pluggy.PluginManager | None = None
        self._components: dict[tuple[str, str], type] | None = None

    @classmethod
    def of(cls, name: str, components: Sequence[type]) -> Plugin:
        """A plugin that is nothing but these components."""

        class Offer:
            @staticmethod
            @hookspecs.hookimpl
            def titan_components() -> list[type]:
                return list(components)

        return cls(name, Offer)

    @classmethod
    def unusable(cls, name: str, state: State, why: str) -> Plugin:
        """A plugin that is known by name only, and why."""
        plugin = cls(name, lambda: None)
        plugin.leave_out(state, why)
        return plugin

    def leave_out(self, state: State, why: str) -> None:
        """Never load it."""
        self.state, self.error = state, why

    def load(self) -> Plugin:
        """Import it and ask for its components, once."""
        if self._components is None:
            self._components = {}
            for config in self.call_list("titan_components"):
                self._add(self._components, config)
        return self

    @property
    def loaded(self) -> bool:
        return self._components is not None

    @property
    def components(self) -> dict[tuple[str, str], type]:
        """What it offers, by kind and name; the good ones, where some are bad."""
        self.load()
        return dict(self._components or {})

    def call(self, hook: str, **arguments: Any) -> list[Any]:
        """What the plugin's implementations of a hook return; empty where it has none or is broken."""
        self._import()
        if self._hooks is None:
            return []
        with self._guarded():
            return getattr(self._hooks.hook, hook)(**arguments)
        return []

    def call_list(self, hook: str, **arguments: Any) -> list[Any]:
        """The same for a hook that returns a list: the elements."""
        elements: list[Any] = []
        for result in self.call(hook, **arguments):
            if isinstance(result, (list, tuple)):
                elements += result
            else:
                self.fail(f"{hook} returned {result!r}, which is no list")
        return elements

    def status(self) -> PluginStatus:
        offered = tuple(f"{kind}/{name}" for kind, name in self.components)
        return PluginStatus(
            self.name,
            self.state,
            self.distribution,
            self.version,
            self.file,
            self._seconds,
            self._torch,
            offered,
            self.error,
        )

    def fail(self, why: str) -> None:
        """Record a fault; the first one is kept."""
        self.state = "broken"
        self.error = self.error or why

    def _import(self) -> None:
        if self._hooks is not None or self.state != "ok":
            return
        with self._guarded():
            hooks = pluggy.PluginManager(GROUP)
            hooks.add_hookspecs(hookspecs)
            hooks.register(self._load(), name=self.name)
            hooks.check_pending()
            self._hooks = hooks

    def _add(self, found: dict[tuple[str, str], type], config: Any) -> None:
        info = vars(config).get("__component__") if isinstance(config, type) else None
        if not isinstance(info, ComponentInfo):
            self.fail(f"titan_components returned {config!r}, which is no class made by @component")
            return
        key = (info.kind, info.name)
        other = found.get(key)
        if other is not None and other is not config:
            self.fail(
                f"titan_components returned two components {info.kind}/{info.name}: "
                f"{_path_of(other)} and {_path_of(config)}"
            )
            return
        found[key] = config

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Time the plugin's code, keep its prints off stdout (which is for data), record what it raises."""
        began = time.perf_counter()
        without_torch = "torch" not in sys.modules
        try:
            with contextlib.redirect_stdout(sys.stderr):
                yield
        except (Exception, SystemExit) as error:
            self.fail(own_traceback(error))
        finally:
            self._seconds += time.perf_counter() - began
            self._torch = self._torch or (without_torch and "torch" in sys.modules)


def load_plugins(*, files: Iterable[Path] = (), blocked: Iterable[str] = (), checks: bool = True) -> Registry:
    """The registry of everything that is installed, and of `files`; without the names in `blocked`.

    `checks`: whether it asks the plugins' `titan_checks`. The environment variable `TITAN_PLUGINS`, a
    comma-separated list, is an allow-list of installed plugins.

    Raises:
        UsageError: see `titancli.registry.current`.
        EnvironmentProblem: titan itself is not installed.
    """
    from titancli.registry.lookup import Registry

    plugins = _installed()
    if BUILTIN not in plugins:
        raise EnvironmentProblem(
            "titan is not installed: its own entry point is missing",
            hint="pip install titancli, or pip install -e . in a checkout",
        )
    _apply_allow_list(plugins)
    for file in files:
        plugin = _from_file(Path(file))
        if plugin.name in plugins and plugins[plugin.name].state not in LEFT_OUT:
            raise UsageError(
                f"-p {file}: a plugin named {plugin.name!r} is there already", hint="rename the file"
            )
        plugins[plugin.name] = plugin
    for name in blocked:
        _block(plugins, name)
    return Registry([plugins[name] for name in sorted(plugins)], checks=checks)


def _installed() -> dict[str, Plugin]:
    by_name: dict[str, list[metadata.EntryPoint]] = {}
    for entry in metadata.entry_points(group=GROUP):
        by_name.setdefault(entry.name, []).append(entry)
    return {name: _from_entries(name, by_name[name]) for name in sorted(by_name)}


def _from_entries(name: str, entries: list[metadata.EntryPoint]) -> Plugin:
    if name == BUILTIN:  # no other distribution may take the name, nor break titan by trying
        entries = [entry for entry in entries if _distribution(entry)[0] == GROUP] or entries
    if len(entries) > 1:
        owners = " and ".join(sorted(" ".join(filter(None, _distribution(entry))) for entry in entries))
        why = f"two distributions offer a plugin named {name!r}: {owners}; uninstall one of them"
        return Plugin.unusable(name, "broken", why)
    distribution, version = _distribution(entries[0])
    return Plugin(name, entries[0].load, distribution=distribution, version=version)


def _distribution(entry: metadata.EntryPoint) -> tuple[str, str | None]:
    return (entry.dist.name, entry.dist.version) if entry.dist else ("an unknown distribution", None)


def _apply_allow_list(plugins: dict[str, Plugin]) -> None:
    text = os.environ.get(ALLOW_LIST)
    if text is None:
        return
    allowed = {name.strip() for name in text.split(",")} - {""}
    for name in set(plugins) - allowed - {BUILTIN}:
        plugins[name].leave_out("unlisted", f"{ALLOW_LIST} does not list it")
    for name in allowed - set(plugins):
        plugins[name] = Plugin.unusable(name, "missing", f"{ALLOW_LIST} lists it, but it is not installed")


def _block(plugins: dict[str, Plugin], name: str) -> None:
    if name == BUILTIN:
        raise UsageError(
            f"-p no:{name}: the built-in components cannot be blocked",
            hint="choose another component by its full name, plugin/name",
        )
    if name not in plugins:
        near = difflib.get_close_matches(name, plugins, 1)
        raise UsageError(
            f"-p no:{name}: no plugin of this name is installed",
            hint=f"did you mean 'no:{near[0]}'?" if near else "`titan plugins` lists them",
        )
    plugins[name].leave_out("blocked", f"-p no:{name} blocks it")


# ---------------------------------------------------------------------------------------- plugin files


def _from_file(file: Path) -> Plugin:
    """A plugin in one file. Its name is the file's stem, and is the module's name as well."""
    file = file.absolute()
    name = file.stem
    if file.suffix != ".py" or not name.isidentifier():
        raise UsageError(
            f"-p {file}: a plugin file is named like a Python module", hint="for example my_loss.py"
        )
    if not file.is_file():
        raise UsageError(f"-p {file}: there is no such file")
    taken = _module_of(name)
    if taken is not None and taken.resolve() != file.resolve():
        raise UsageError(
            f"-p {file}: {name!r} is already the name of a module ({taken})", hint="rename the file"
        )
    return Plugin(name, lambda: _run_file(name, file), file=file)


def _module_of(name: str) -> Path | None:
    """Where a module of this name would come from, if there is one."""
    module = sys.modules.get(name)
    spec = module.__spec__ if module is not None else importlib.util.find_spec(name)
    if module is None and spec is None:
        return None
    return Path((spec and spec.origin) or getattr(module, "__file__", None) or "built-in")


def _run_file(name: str, file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot read {file} as a Python module")
    module = importlib.util.module_from_spec(spec)
    # Before it runs: dataclasses and targets such as "my_loss:build" look the module up by name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


# ---------------------------------------------------------------------------------------------- faults


def own_traceback(error: BaseException) -> str:
    """A traceback that begins where the plugin's code does."""
    trace = error.__traceback__
    while trace is not None and _is_machinery(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace)).rstrip()


def _is_machinery(filename: str) -> bool:
    ours = (
        str(Path(__file__).parent),
        str(Path(pluggy.__file__).parent),
        str(Path(importlib.__file__).parent),
    )
    return filename.startswith(ours) or filename.startswith("<frozen importlib")


def _path_of(config: type) -> str:
    return f"{config.__module__}.{config.__qualname__}"
