"""Find the differences in titan, packages and plugins between two attempts, and their effects. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from titancli.recipe.schema import sections_with
from titancli.run.drift import Change

Effect = Literal["results", "rounding", "none"]
"""The effect of a difference: on results; on the order of additions, and so on the last bits; none."""

PACKAGES = ("titancli", "torch", "numpy", "transformers", "datasets")
"""Packages that may affect results; a plugin's package does if the recipe uses it."""


@dataclass(frozen=True)
class Difference:
    """One difference between two attempts."""

    kind: str
    """recipe, data, weights, plugin, titan, torch, package, python, device, cpu_kernels, environment,
    threads, layout, determinism, resumed, git or machine."""
    what: str
    before: Any
    after: Any
    effect: Effect

    def __str__(self) -> str:
        return f"{self.what}: {_shown(self.before)} -> {_shown(self.after)}"


def code_changes(
    recipe: Mapping[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]
) -> list[Difference]:
    """Return the differences between two attempts that may change results: in titan, packages, and a recipe's
    plugins.

    Args:
        recipe: the resolved data.
        before, after: the attempts, as run.json records them.
    """
    found = [*plugin_changes(recipe, before, after), *software_changes(recipe, before, after)]
    return [difference for difference in found if difference.effect == "results"]


def used_plugins(recipe: Mapping[str, Any]) -> set[str]:
    """Return the plugins whose components a recipe names, including titan itself."""

    def types(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            for key, item in value.items():
                if key == "type" and isinstance(item, str):
                    yield item
                else:
                    yield from types(item)
        elif isinstance(value, list):
            for item in value:
                yield from types(item)

    training = {name: recipe[name] for name in sections_with("numbers", "speed") if name in recipe}
    return {"titan", *(name.partition("/")[0] for name in types(training) if "/" in name)}


def plugin_changes(
    recipe: Mapping[str, Any], one: Mapping[str, Any], other: Mapping[str, Any]
) -> Iterator[Difference]:
    used = used_plugins(recipe)
    sides = [
        {Path(entry["path"]).stem: entry["sha256"] for entry in side.get("plugin_files") or []}
        for side in (one, other)
    ]
    for change in changed(*sides):
        effect: Effect = "results" if change.key in used else "none"
        yield Difference("plugin", f"plugin file {change.key}.py", change.before, change.after, effect)
    if one.get("code") is None or other.get("code") is None:
        return
    for change in changed(one["code"], other["code"]):
        effect = "results" if change.key in used else "none"
        kind, what = ("titan", "titan") if change.key == "titan" else ("plugin", f"plugin {change.key}")
        yield Difference(kind, f"code of {what}", change.before, change.after, effect)


def software_changes(
    recipe: Mapping[str, Any], one: Mapping[str, Any], other: Mapping[str, Any]
) -> Iterator[Difference]:
    used = used_plugins(recipe)
    if one.get("versions") is None or other.get("versions") is None:
        return
    for change in changed(one["versions"], other["versions"]):
        name = change.key
        effect: Effect = "results" if name in (*PACKAGES, *used) else "none"
        if name == "python" and _minor(change.before) != _minor(change.after):
            effect = "results"
        kind = {"titancli": "titan", "torch": "torch", "python": "python"}.get(name, "package")
        kind = "plugin" if name in used else kind
        what = "titan" if name == "titancli" else name
        yield Difference(kind, f"version of {what}", change.before, change.after, effect)


def changed(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[Change]:
    for key in dict.fromkeys([*one, *other]):
        if one.get(key) != other.get(key):
            yield Change(key, one.get(key), other.get(key))


def _minor(version: Any) -> list[str]:
    return str(version).split(".")[:2]


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    text = str(value)
    # The beginning of a hash is enough to distinguish it.
    is_hash = len(text) >= 32 and all(digit in "0123456789abcdef" for digit in text)
    return text[:12] if is_hash else text
