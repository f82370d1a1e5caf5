"""`[requires]`: checked before components are looked up, so that the error says what to install."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from titancli.recipe.problems import Problems
from titancli.recipe.tree import Node
from titancli.version import __version__

OWN_PLUGINS = Path(__file__).resolve().parents[2] / "plugins"
"""Titan's own plugins, in a checkout; an installed titan has none."""


def install_command(requirement: str, *options: str) -> str:
    """What installs a plugin: from the checkout if it is one of titan's own."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    folder = OWN_PLUGINS / canonicalize_name(Requirement(requirement).name)
    target = requirement
    if (folder / "pyproject.toml").is_file():
        near = os.path.relpath(folder)
        target = str(folder) if near.startswith("..") else f"./{near}"
    return " ".join(["pip install", *options, shlex.quote(target)])


def check_requires(root: Node, problems: Problems) -> bool:
    """Report what a recipe requires and does not find; whether all is there."""
    requires = root.child("requires")
    titan = requires.child("titan") if requires else None
    plugins = requires.child("plugins") if requires else None
    found = True
    if titan is not None and isinstance(titan.value, str):
        found &= _check_titan(titan, problems)
    if plugins is not None and isinstance(plugins.value, list):
        for plugin in plugins.value:
            if isinstance(plugin.value, str):
                found &= _check_plugin(plugin, problems)
    return found


def _check_titan(node: Node, problems: Problems) -> bool:
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    location = node.origin.location()
    try:
        wanted = SpecifierSet(node.value)
    except InvalidSpecifier:
        hint = 'write a version specifier such as ">=0.1"'
        problems.add("bad-value", f"requires.titan: {node.value!r} is no version specifier", location, hint)
        return True
    if wanted.contains(__version__, prereleases=True):
        return True
    message = f"this recipe requires titan {node.value}; this is titan {__version__}"
    problems.add("requires", message, location, f"pip install 'titancli{node.value}'")
    return False


def _check_plugin(node: Node, problems: Problems) -> bool:
    from importlib import metadata

    from packaging.requirements import InvalidRequirement, Requirement

    location = node.origin.location()
    try:
        wanted = Requirement(node.value)
    except InvalidRequirement:
        hint = 'write a distribution and its version, such as "titan-float8>=0.1"'
        problems.add("bad-value", f"requires.plugins: {node.value!r} is no requirement", location, hint)
        return True
    if wanted.marker is not None and not wanted.marker.evaluate():
        return True
    try:
        version = metadata.version(wanted.name)
    except metadata.PackageNotFoundError:
        message = f"this recipe requires the plugin {node.value}, which is not installed"
        problems.add("requires", message, location, install_command(node.value))
        return False
    if wanted.specifier.contains(version, prereleases=True):
        return True
    message = f"this recipe requires the plugin {node.value}; installed is {version}"
    problems.add("requires", message, location, install_command(node.value, "--upgrade"))
    return False
