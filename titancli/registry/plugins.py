"""One plugin, loaded in isolation so that it cannot harm others.

Every plugin has a pluggy manager of its own: results and exceptions of a hook thus belong to a known plugin.
A plugin is loaded on first use; a full name such as `titan/llama3` loads that one plugin only.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pluggy

from titancli.registry import hookspecs
from titancli.registry.command import Command
from titancli.registry.component import ComponentInfo, component_info
from titancli.registry.targets import missing

GROUP = "titancli"

State = Literal["ok", "broken", "slow", "blocked", "unlisted", "missing"]
DISABLED = ("slow", "blocked", "unlisted", "missing")
"""States of plugins that were not loaded."""


@dataclass(frozen=True)
class PluginStatus:
    """The entry of one plugin in `titan plugin list`."""

    name: str
    state: State
    distribution: str | None
    version: str | None
    file: Path | None
    """The file of a plugin that `-p` added."""
    seconds: float
    """Time to import it and get its components."""
    torch: bool
    """Whether it imported torch, which its module must not."""
    habits: tuple[str, ...]
    """Its other side effects when loaded, if these were observed: see `titancli.registry.isolated_load`."""
    components: tuple[str, ...]
    """`kind/name`, in the plugin's order."""
    clashes: tuple[str, ...]
    """`kind/name` of components that another plugin offers too: a recipe must write their full names."""
    error: str | None
    """The reason if it is not ok; for an exception the traceback, from the plugin's own first line on."""


class Plugin:
    """One plugin, loaded on first use. No exception of its code leaves this class."""

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
        self.torch = False
        """True if it imports torch."""
        self.habits: tuple[str, ...] = ()
        self.guards = True
        """True if its changes to the process are undone; False to observe them."""
        self._hooks: pluggy.PluginManager | None = None
        self._components: dict[tuple[str, str], type] | None = None
        self._doubled: set[tuple[str, str]] = set()
        """Names of two classes each; neither is offered."""

    @classmethod
    def of(cls, name: str, components: Sequence[type]) -> Plugin:
        """Return a plugin that consists of these components."""

        class Offer:
            @staticmethod
            @hookspecs.hookimpl
            def titan_components() -> list[type]:
                return list(components)

        return cls(name, Offer)

    @classmethod
    def unusable(cls, name: str, state: State, why: str) -> Plugin:
        """Return a plugin of which only the name is known, and the reason."""
        plugin = cls(name, lambda: None)
        plugin.leave_out(state, why)
        return plugin

    def leave_out(self, state: State, why: str) -> None:
        """Disable the plugin."""
        self.state, self.error = state, why

    def load(self) -> Plugin:
        """Import it and get its components, once."""
        if self._components is None:
            self._components = {}
            for config in self.call_list("titan_components"):
                self._add(self._components, config)
            self._log()
        return self

    @property
    def loaded(self) -> bool:
        return self._components is not None

    @property
    def components(self) -> dict[tuple[str, str], type]:
        """Return its valid components by kind and name."""
        self.load()
        return {key: cls for key, cls in (self._components or {}).items() if key not in self._doubled}

    def call(self, hook: str, **arguments: Any) -> list[Any]:
        """Return the results of the plugin's implementations of a hook; empty if it has none or is broken."""
        self._import()
        if self._hooks is None:
            return []
        with self._guarded():
            return getattr(self._hooks.hook, hook)(**arguments)
        return []

    def call_list(self, hook: str, **arguments: Any) -> list[Any]:
        """Return the elements of the results of a hook that returns lists; see `call`."""
        elements: list[Any] = []
        for result in self.call(hook, **arguments):
            if isinstance(result, (list, tuple)):
                elements += result
            else:
                self.fail(f"{hook} returned {result!r}, which is not a list")
        return elements

    def check_targets(self) -> None:
        """Check, without importing anything, that the code that the components name exists."""
        for (kind, name), config in self.components.items():
            info = component_info(config)
            for target in filter(None, (info.target, info.hf)):
                if why := missing(target):
                    self.fail(f"{kind}/{name}: {why}")
        for command in self.call_list("titan_commands"):
            if isinstance(command, Command) and (why := missing(command.target)):
                self.fail(f"command {command.name}: {why}")

    def status(self, others: Collection[tuple[str, str]] = ()) -> PluginStatus:
        """Return the plugin's status; `others`: kinds and names that other plugins offer."""
        offered = tuple(f"{kind}/{name}" for kind, name in self.components)
        return PluginStatus(
            self.name,
            self.state,
            self.distribution,
            self.version,
            self.file,
            self._seconds,
            self.torch,
            self.habits,
            offered,
            tuple(f"{kind}/{name}" for kind, name in self.components if (kind, name) in others),
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
            hooks.add_hookspecs(hookspecs.SPECS)
            hooks.register(self._load(), name=self.name)
            hooks.check_pending()
            self._hooks = hooks

    def _add(self, found: dict[tuple[str, str], type], config: Any) -> None:
        info = vars(config).get("__component__") if isinstance(config, type) else None
        if not isinstance(info, ComponentInfo):
            self.fail(f"titan_components returned {config!r}, which is not a class decorated with @component")
            return
        key = (info.kind, info.name)
        other = found.setdefault(key, config)
        if other is not config:
            self.fail(
                f"titan_components returned two components {info.kind}/{info.name}: "
                f"{_path_of(other)} and {_path_of(config)}"
            )
            self._doubled.add(key)

    def _log(self) -> None:
        if "logging" in sys.modules:  # `-v` has imported it; nobody else is to wait for that
            import logging

            count, milliseconds = len(self._components or {}), 1000 * self._seconds
            words = "plugin %s: %s, components: %d, %.0f ms"
            logging.getLogger(__name__).debug(words, self.name, self.state, count, milliseconds)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Time the plugin's code, record its exceptions, and undo its changes to the process.

        stdout is reserved for data, paths are relative to the folder, and the command decides what is logged.
        """
        began = time.perf_counter()
        before = set(sys.modules)
        try:
            with contextlib.ExitStack() as kept:
                for keep in (_stdout_kept, _folder_kept, _logging_kept) if self.guards else ():
                    kept.enter_context(keep())
                yield
        except KeyboardInterrupt:
            seconds = time.perf_counter() - began
            print(
                f"interrupted while the plugin {self.name} was loaded, after {seconds:.0f} s", file=sys.stderr
            )
            raise
        except BaseException as error:  # SystemExit, and the panics of extension modules
            self.fail(own_traceback(error))
        finally:
            self._seconds += time.perf_counter() - began
            self.torch = self.torch or _brings_torch(set(sys.modules) - before)


@contextlib.contextmanager
def _stdout_kept() -> Iterator[None]:
    """Redirect stdout to stderr, including output of C code and of child processes."""
    with contextlib.redirect_stdout(sys.stderr), _descriptor_kept():
        yield


@contextlib.contextmanager
def _descriptor_kept() -> Iterator[None]:
    try:
        kept = os.dup(1)
        os.dup2(2, 1)
    except OSError:  # one of them is closed
        yield
        return
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


@contextlib.contextmanager
def _folder_kept() -> Iterator[None]:
    try:
        folder = os.open(".", os.O_RDONLY)
    except OSError:  # it was removed, or may not be read
        yield
        return
    try:
        yield
    finally:
        os.fchdir(folder)
        os.close(folder)


@contextlib.contextmanager
def _logging_kept() -> Iterator[None]:
    """Restore the root logger; if logging was not imported before, it had no settings."""
    logging = sys.modules.get("logging")
    handlers, level = (list(logging.root.handlers), logging.root.level) if logging else ([], None)
    try:
        yield
    finally:
        if (now := sys.modules.get("logging")) is not None:
            now.root.handlers[:] = handlers
            now.root.setLevel(now.WARNING if level is None else level)


def _brings_torch(new: set[str]) -> bool:
    """Return whether newly imported modules bring torch, or use it if it was imported before."""
    torch = sys.modules.get("torch")
    return torch is not None and (
        "torch" in new or any(value is torch for name in new for value in names_in(name).values())
    )


def names_in(module: str) -> dict[str, Any]:
    """Return the contents of a module. `sys.modules` may hold any object instead of one, and attributes that
    load lazily must not be loaded by this."""
    found = sys.modules.get(module)
    is_module = issubclass(type(found), ModuleType)  # its own `__class__` is not asked
    return dict(object.__getattribute__(found, "__dict__")) if is_module else {}


# ---------------------------------------------------------------------------------------------- faults


def own_traceback(error: BaseException) -> str:
    """Return a traceback that begins in the plugin's own code."""
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
