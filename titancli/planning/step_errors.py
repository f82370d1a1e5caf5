"""Errors of a step in a dry run, attributed to a plugin's component, with the lines of its code, or to the
recipe."""

from __future__ import annotations

import dataclasses
import traceback
from pathlib import Path
from types import FrameType

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from titancli.errors import EnvironmentProblem, PluginError, RecipeError, TitanError, UsageError
from titancli.recipe.check import components
from titancli.recipe.schema import Recipe
from titancli.registry.component import component_info

UNKNOWABLE = (DataDependentOutputException, DynamicOutputShapeException)
ELSEWHERE = (
    str(Path(torch.__file__).parent),
    str(Path(traceback.__file__).parent),
    str(Path(__file__).parent),
)
"""Files whose frames are left out of the report."""


def blamed(error: Exception, recipe: Recipe, where: str) -> TitanError:
    """Return the error to raise in place of `error`.

    Args:
        where: the rank, in words.
    """
    if isinstance(error, RecipeError):
        return RecipeError(
            [dataclasses.replace(p, message=f"{p.message}, on {where}") for p in error.problems]
        )
    plugin, steps = _way(error, recipe)
    if isinstance(error, TitanError):
        words = f"{error.message}, on {where}"
        for kind in (PluginError, EnvironmentProblem, UsageError):
            if isinstance(error, kind):  # a plugin's subclass may take other arguments
                return kind(words, hint=error.hint)
        return _error(plugin, words, error.hint)
    cause = f"{type(error).__name__}: {error}".removesuffix(": ").partition("\n\n")[0]
    at = f"\n  at {steps[-1]}" if steps else ""
    if isinstance(error, UNKNOWABLE):
        return TitanError(
            f"{where}: the step depends on tensor values, which do not exist in a dry run: {cause}{at}",
            hint="shapes and branches must not depend on tensor values",
        )
    if plugin:
        trace = "".join(f"\n  {step}" for step in steps)
        return PluginError(f"{where}: {plugin} failed in a step:{trace}\n  {cause}")
    return RecipeError(f"{where}: a step failed: {cause}{at}", hint="use --traceback to see where")


def _error(plugin: str | None, message: str, hint: str | None) -> TitanError:
    return PluginError(f"{plugin}: {message}", hint=hint) if plugin else RecipeError(message, hint=hint)


def _way(error: Exception, recipe: Recipe) -> tuple[str | None, list[str]]:
    """Return the last plugin component whose code the error passed through, if any, and the lines of code
    from there on (or from the start) that are not a library's."""
    packages = {}
    for _, config in components(recipe):
        info = component_info(config)
        package = info.target.partition(":")[0].partition(".")[0]
        if package != "titancli":
            packages[package] = f"the {info.kind} {info.name}"
    plugin: str | None = None
    steps: list[str] = []
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_filename.startswith(ELSEWHERE):
            continue
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package in packages and packages[package] != plugin:
            plugin, steps = packages[package], []
        steps.append(_shown(frame, line))
    return plugin, steps


def _shown(frame: FrameType, line: int) -> str:
    (summary,) = traceback.extract_stack(frame, limit=1)
    file = Path(summary.filename)
    shown = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
    return f"{shown}:{line} in {summary.name}"
