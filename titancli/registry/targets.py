"""Checks that the code a component names exists, as far as possible without importing it."""

from __future__ import annotations

import importlib.util
import re
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path


def missing(target: str) -> str | None:
    """Return the reason why `"module:callable"` cannot be loaded, without importing it; None if none is
    found.

    A module that computes its names (`__getattr__`, `import *`, no Python source) is trusted.
    """
    module, _, name = target.partition(":")
    try:
        spec = _find(module)
    except (ImportError, ValueError):  # a finder that fails, or a module without a spec
        return None
    if spec is None:
        return f"the target {target!r} does not exist: no module {module!r}"
    if not spec.origin or not spec.origin.endswith(".py"):
        return None
    try:
        source = Path(spec.origin).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    if re.search(rf"\b({name}|__getattr__)\b|import \*", source):
        return None
    return f"the target {target!r} does not exist: {spec.origin} does not define {name!r}"


def _find(module: str) -> ModuleSpec | None:
    """Return the spec of a module. `importlib.util.find_spec` would import the packages above it."""
    above, _, _ = module.rpartition(".")
    if module in sys.modules or not above:
        return importlib.util.find_spec(module)
    package = _find(above)
    if package is None or package.submodule_search_locations is None:
        return None
    found = (finder.find_spec(module, package.submodule_search_locations) for finder in sys.meta_path)
    return next(filter(None, found), None)
