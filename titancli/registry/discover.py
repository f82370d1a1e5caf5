"""Finding plugins: entry points of the group `titancli`, and files named with `-p`."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from titancli.errors import EnvironmentProblem, UsageError, nearest_name
from titancli.provenance import entry_points
from titancli.registry.kinds import BUILTIN
from titancli.registry.lookup import Registry
from titancli.registry.plugins import DISABLED, GROUP, Plugin
from titancli.version import __version__

ALLOW_LIST = "TITAN_PLUGINS"
REQUIRES_TITAN = re.compile(rf"Requires-Dist: *{GROUP}(\[[^]]*\])? *\(?(?P<specifier>[^;)]*)\)?")
"""Matches a distribution's requirement on titan: the versions of titan's API that a plugin supports."""


def load_plugins(*, files: Iterable[Path] = (), blocked: Iterable[str] = (), checks: bool = True) -> Registry:
    """Return the registry of all installed plugins and of `files`, without the names in `blocked`.

    `checks`: whether it runs the plugins' `titan_checks`. The environment variable `TITAN_PLUGINS`, a
    comma-separated list, is an allow-list of installed plugins.

    Raises:
        UsageError: see `titancli.registry.current`.
        EnvironmentProblem: titan itself is not installed.
    """
    plugins = _installed()
    if BUILTIN not in plugins:
        raise EnvironmentProblem(
            "titan is not installed properly: its own entry point is missing",
            hint="pip install titancli, or pip install -e . in a checkout",
        )
    _apply_allow_list(plugins)
    for file in files:
        plugin = _from_file(Path(file))
        if plugin.name in plugins and plugins[plugin.name].state not in DISABLED:
            raise UsageError(
                f"-p {file}: a plugin named {plugin.name!r} already exists", hint="rename the file"
            )
        plugins[plugin.name] = plugin
    for name in blocked:
        _block(plugins, name)
    return Registry([plugins[name] for name in sorted(plugins)], checks=checks)


def _installed() -> dict[str, Plugin]:
    by_name: dict[str, list[metadata.EntryPoint]] = {}
    for entry in entry_points():
        by_name.setdefault(entry.name, []).append(entry)
    return {name: _from_entries(name, by_name[name]) for name in sorted(by_name)}


def _from_entries(name: str, entries: list[metadata.EntryPoint]) -> Plugin:
    if name == BUILTIN:  # no other distribution may take the name, nor break titan by trying
        entries = [entry for entry in entries if _distribution(entry)[0] == GROUP] or entries
    if len(entries) > 1:
        owners = " and ".join(sorted(" ".join(filter(None, _distribution(entry))) for entry in entries))
        why = f"two distributions provide a plugin named {name!r}: {owners}; uninstall one of them"
        return Plugin.unusable(name, "broken", why)
    (entry,) = entries
    distribution, version = _distribution(entry)
    load = functools.partial(_load_entry, entry)
    return Plugin(name, load, distribution=distribution, version=version)


def _load_entry(entry: metadata.EntryPoint) -> Any:
    """Import the target of an entry point, if it supports this version of titan."""
    for line in _headers(entry).splitlines():
        needs = REQUIRES_TITAN.match(line)
        if needs and needs["specifier"].strip() and not _satisfied(needs["specifier"].strip()):
            raise ImportError(
                f"it needs {GROUP} {needs['specifier'].strip()}, but this is {GROUP} {__version__}: "
                f"install another version of {_distribution(entry)[0]}, or of {GROUP}"
            )
    return entry.load()


def _satisfied(specifier: str) -> bool:
    at_least = re.fullmatch(r">= *(\d+(?:\.\d+)*)", specifier)
    if at_least and _numbers(at_least[1]) <= _numbers(__version__):
        return True  # what nearly all of them write; packaging takes 10 ms to import
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        return SpecifierSet(specifier).contains(__version__, prereleases=True)
    except InvalidSpecifier:
        return True  # no installer has understood it either


def _numbers(version: str) -> list[int]:
    """Return the leading numbers of a version."""
    found = re.match(r"\d+(\.\d+)*", version)
    return [int(part) for part in found[0].split(".")] if found else []


def _distribution(entry: metadata.EntryPoint) -> tuple[str, str | None]:
    """Return name and version of the distribution that brings an entry point."""
    headers = _headers(entry)
    found = {key: re.search(rf"^{key}: *(.+)$", headers, re.MULTILINE) for key in ("Name", "Version")}
    name, version = found["Name"], found["Version"]
    return (name[1].strip() if name else "an unknown distribution"), (version[1].strip() if version else None)


def _headers(entry: metadata.EntryPoint) -> str:
    """Return the headers of a distribution's metadata as text: the standard parser takes as long as importing
    a plugin."""
    dist = entry.dist
    text = (dist.read_text("METADATA") or dist.read_text("PKG-INFO")) if dist else None
    return (text or "").partition("\n\n")[0]


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
            f"-p no:{name}: the built-in components cannot be disabled",
            hint="to use another component, give its full name, plugin/name",
        )
    if name not in plugins:
        near = nearest_name(name, plugins)
        raise UsageError(
            f"-p no:{name}: no plugin with this name is installed",
            hint=f"did you mean 'no:{near}'?" if near else "`titan plugin list` lists them",
        )
    plugins[name].leave_out("blocked", f"blocked by -p no:{name}")


# ---------------------------------------------------------------------------------------- plugin files


def _from_file(file: Path) -> Plugin:
    """Load a plugin from one file. Its name is the file's stem, which is the module's name as well."""
    file = file.absolute()
    name = file.stem
    if file.suffix != ".py" or not name.isidentifier():
        raise UsageError(
            f"-p {file}: the name of a plugin file must be a valid Python module name",
            hint="for example my_loss.py",
        )
    if not file.is_file():
        raise UsageError(f"-p {file}: the file does not exist")
    taken = _module_of(name)
    if taken is not None and taken.resolve() != file.resolve():
        raise UsageError(
            f"-p {file}: {name!r} is already the name of a module ({taken})", hint="rename the file"
        )
    return Plugin(name, lambda: _run_file(name, file), file=file)


def _module_of(name: str) -> Path | None:
    """Return the file that a module of this name would come from; None if there is no such module."""
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
