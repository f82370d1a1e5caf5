"""One plugin: loaded on its own, so that it can harm no other.

Every plugin has a pluggy manager of its own: what a hook returns is known to be that plugin's, and so is what
it raises. A plugin is loaded when it is first asked for something; a full name such as `titan/llama3` loads
that one plugin only.
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

State = Literal["ok", "broken", "blocked", "unlisted", "missing"]
LEFT_OUT = ("blocked", "unlisted", "missing")


@dataclass(frozen=True)
class PluginStatus:
    """What `titan plugin list` shows of one plugin."""

    name: str
    state: State
    distribution: str | None
    version: str | None
    file: Path | None
    """The file, for a plugin that `-p` added."""
    seconds: float
    """What importing it and asking for its components took."""
    torch: bool
    """Whether it imported torch, which its module must not."""
    habits: tuple[str, ...]
    """What else it does as it is loaded, where that was looked at: see `titancli.registry.apart`."""
    components: tuple[str, ...]
    """`kind/name`, in the order that the plugin gives them."""
    clashes: tuple[str, ...]
    """`kind/name` of those that another plugin offers too: a recipe has to write their full names."""
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
        self.torch = False
        """Whether it imports torch."""
        self.habits: tuple[str, ...] = ()
        self.guards = True
        """Whether what it changes for others is undone; not where that is what one wants to see."""
        self._hooks: pluggy.PluginManager | None = None
        self._components: dict[tuple[str, str], type] | None = None
        self._doubled: set[tuple[str, str]] = set()
        """Names that two classes have; neither is offered."""

    @classmethod
    def of(cls, name: str, components: Sequence[type]) -> Plugin:
        """Make a plugin that consists of these components."""

        class Offer:
            @staticmethod
            @hookspecs.hookimpl
            def titan_components() -> list[type]:
                return list(components)

        return cls(name, Offer)

    @classmethod
    def unusable(cls, name: str, state: State, why: str) -> Plugin:
        """Make a plugin that is known by name only, and the reason."""
        plugin = cls(name, lambda: None)
        plugin.leave_out(state, why)
        return plugin

    def leave_out(self, state: State, why: str) -> None:
        """Disable the plugin."""
        self.state, self.error = state, why

    def load(self) -> Plugin:
        """Import it and ask for its components, once."""
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
        """What it offers, by kind and name; the good ones, where some are bad."""
        self.load()
        return {key: cls for key, cls in (self._components or {}).items() if key not in self._doubled}

    def call(self, hook: str, **arguments: Any) -> list[Any]:
        """Return what the plugin's implementations of a hook return; empty if it has none or is broken."""
        self._import()
        if self._hooks is None:
            return []
        with self._guarded():
            return getattr(self._hooks.hook, hook)(**arguments)
        return []

    def call_list(self, hook: str, **arguments: Any) -> list[Any]:
        """Return the elements for a hook that returns a list; see `call`."""
        elements: list[Any] = []
        for result in self.call(hook, **arguments):
            if isinstance(result, (list, tuple)):
                elements += result
            else:
                self.fail(f"{hook} returned {result!r}, which is not a list")
        return elements

    def check_targets(self) -> None:
        """Look, without importing anything, for the code that the components name."""
        for (kind, name), config in self.components.items():
            info = component_info(config)
            for target in filter(None, (info.target, info.hf)):
                if why := missing(target):
                    self.fail(f"{kind}/{name}: {why}")
        for command in self.call_list("titan_commands"):
            if isinstance(command, Command) and (why := missing(command.target)):
                self.fail(f"command {command.name}: {why}")

    def status(self, others: Collection[tuple[str, str]] = ()) -> PluginStatus:
        """Return what there is to know of it; `others`: kinds and names that other plugins offer."""
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
        """Time the plugin's code, record what it raises, and undo what it changes for others.

        stdout is for data, paths are relative to the folder, and what is logged is the command's choice.
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
    """Send what is written to stdout to stderr, also by C code, or by a program that is started."""
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
    """Restore the root logger; where logging was not there, it was not set up."""
    logging = sys.modules.get("logging")
    handlers, level = (list(logging.root.handlers), logging.root.level) if logging else ([], None)
    try:
        yield
    finally:
        if (now := sys.modules.get("logging")) is not None:
            now.root.handlers[:] = handlers
            now.root.setLevel(now.WARNING if level is None else level)


def _brings_torch(new: set[str]) -> bool:
    """Whether modules that were just imported bring torch, or use it where it was there before."""
    torch = sys.modules.get("torch")
    return torch is not None and (
        "torch" in new or any(value is torch for name in new for value in names_in(name).values())
    )


def names_in(module: str) -> dict[str, Any]:
    """Return what stands in a module. Anything may stand in `sys.modules` in place of one, and what is to be
    loaded when it is first asked for an attribute is not to be loaded by this."""
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
