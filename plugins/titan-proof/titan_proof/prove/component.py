"""Make a recipe around one component, from what its plugin declares, so that it can be proven. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from titancli.errors import PluginError, RecipeError, TitanError, UsageError
from titancli.recipe import Loaded, load_recipe
from titancli.registry import current
from titancli.registry.component import component_info, configs
from titancli.registry.kinds import BUILTIN, KINDS

COMPUTES = {
    "model": "model",
    "converter": "converters",
    "parallelize": "parallelize",
    "loss": "loss",
    "optimizer": "optimizer",
}
"""Kinds of component that take part in a step, each with its place in a recipe."""
BASE = "titan:llama3_debug"
"""The recipe that a component is added to if its plugin has none."""
WITHOUT_STEP = {
    "dataset": "the rows of a proof are random; check_plugin of titan-testing compares a dataset's rows on "
    "several ranks with those on one",
    "loop": "a proof calls the engine itself, as every loop does",
}


def label_of(config: type) -> str:
    """Return `KIND/PLUGIN/NAME`."""
    return f"{component_info(config).kind}/{current().full_name(config)}"


def computing(loaded: Loaded) -> list[type]:
    """Return the components of a recipe that take part in a step."""
    found = [type(config) for _, config in configs(loaded.recipe)]
    return list(dict.fromkeys(c for c in found if getattr(c, "__component__", None) and _kind(c) in COMPUTES))


def recipe_around(config: type, overrides: Sequence[str]) -> Loaded:
    """Return a recipe that uses a component: one of its plugin's own, or else llama3_debug with it.

    Of a plugin's recipes, one for debugging is preferred, and then one with experts. A model is otherwise
    taken with its first flavor.

    Raises:
        UsageError: a component of this kind takes no part in a step.
        PluginError: no recipe can be made; the message says what is missing, and what to give.
        TitanError: an override is wrong.
    """
    label, kind = label_of(config), _kind(config)
    if kind not in COMPUTES:
        why = WITHOUT_STEP.get(kind, f"a {kind} takes no part in a step ({KINDS[kind].summary})")
        raise UsageError(
            f"{label} cannot be proven alone: {why}",
            hint="prove a recipe that uses it: titan prove RECIPE",
        )
    refused: TitanError | None = None
    for recipe, more in _candidates(config):
        try:
            loaded = load_recipe(recipe, [*more, *overrides])
        except TitanError as error:
            if overrides and _loads(recipe, more):
                raise  # the error is in the overrides, and points at them
            refused = error
            continue
        if config in computing(loaded):
            return loaded
    raise _alone(label, refused)


def _loads(recipe: str | Path, overrides: list[str]) -> bool:
    try:
        load_recipe(recipe, overrides)
    except TitanError:
        return False
    return True


def cannot_alone(config: type, loaded: Loaded, error: RecipeError) -> TitanError:
    """Return the error for a component whose recipe does not run."""
    return _alone(f"{label_of(config)} in {loaded.recipe.name}", error)


def _alone(label: str, error: TitanError | None) -> PluginError:
    problems = [f"{p.message}" for p in error.problems] if isinstance(error, RecipeError) else []
    why = "; ".join(problems) or (error.message if error is not None else "an override replaces it")
    kind = label.partition("/")[0]
    key = f"{COMPUTES[kind]}{'.0' if kind == 'converter' else ''}.KEY"
    return PluginError(
        f"{label} cannot be proven alone: {why}",
        hint=f"give what it needs ({key}=VALUE), or a recipe that uses it: titan prove RECIPE",
    )


def _candidates(config: Any) -> Iterator[tuple[str | Path, list[str]]]:
    """Yield recipes, and the overrides that add the component to them, the best first."""
    kind, full = _kind(config), current().full_name(config)
    plugin = full.partition("/")[0]
    if plugin != BUILTIN or kind == "model":
        yield from ((file, []) for file in _recipes_with(config, plugin))
    if kind == "converter":
        yield BASE, [f"converters=[{{type = '{full}'}}]"]
        # A converter that adds weights beside a base needs a base, which a proof makes itself.
        yield BASE, [f"converters=[{{type = '{full}'}}]", "weights=./base"]
    else:
        flavor = next(iter(config.flavors), None)
        yield BASE, [f"{COMPUTES[kind]}={full}", *([f"{kind}.flavor={flavor}"] if flavor else [])]


def _recipes_with(config: type, plugin: str) -> list[Path]:
    """Return a plugin's recipes that use the component, the best first."""
    found = []
    for owner, folder in current().recipe_folders():
        for file in folder.rglob("*.toml") if owner == plugin else ():
            try:
                loaded = load_recipe(file)
            except TitanError:
                continue  # `check_plugin` and `titan validate` report its errors
            if config in computing(loaded):
                experts = loaded.recipe.model.n_experts
                found.append((not file.stem.endswith("_debug"), not experts, file.stem, file))
    return [file for *_, file in sorted(found)]


def _kind(config: type) -> str:
    return component_info(config).kind
