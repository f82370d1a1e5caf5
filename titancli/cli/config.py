"""`titan recipe show|diff`: a recipe with all values filled in and their origins; the differences between
two."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import click

from titancli.cli.common import split_overrides
from titancli.cli.completion import RecipeOrOverride
from titancli.cli.output import note, print_json
from titancli.errors import UsageError
from titancli.recipe import Loaded, load_recipe
from titancli.recipe.load import resolved_text
from titancli.recipe.toml import comment, dotted, toml_text
from titancli.terminal import printable

COMMENT_COLUMN = 40
UNSET = click.option(
    "--unset", metavar="KEY", multiple=True, help="Reset KEY to its default; may be repeated."
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


@click.command("show", short_help="Print a recipe with all defaults filled in.")
@click.argument(
    "arguments", metavar="RECIPE [KEY=VALUE]...", nargs=-1, required=True, type=RecipeOrOverride()
)
@UNSET
@click.option("--origin", is_flag=True, help="Show where each value comes from.")
@click.option("--diff", "other", metavar="OTHER", hidden=True, help="The same as `titan recipe diff`.")
@JSON
def command(
    arguments: tuple[str, ...], unset: tuple[str, ...], origin: bool, other: str | None, as_json: bool
) -> None:
    """Print a recipe with all defaults filled in, as TOML that can be run as is."""
    recipes, overrides = split_overrides(arguments)
    if len(recipes) != 1:
        raise UsageError(f"it takes one recipe, not {len(recipes)}", hint="write an override as KEY=VALUE")
    if other is not None:
        if origin:
            raise UsageError("--origin cannot be combined with --diff")
        return _diff(recipes[0], overrides, unset, other, as_json)
    loaded = load_recipe(recipes[0], overrides, unset=unset)
    if as_json:
        document: dict[str, Any] = {"path": str(loaded.path), "recipe": loaded.data}
        if origin:
            document["origins"] = {key: str(where) for key, where in loaded.origins.items()}
        print_json("config", document)
    elif origin:
        print("\n".join(with_origins(loaded)))
    else:
        print(resolved_text(loaded).rstrip())
    return None


@click.command("diff", short_help="Print what differs between two recipes or runs.")
@click.argument(
    "arguments", metavar="RECIPE OTHER [KEY=VALUE]...", nargs=-1, required=True, type=RecipeOrOverride(2)
)
@UNSET
@JSON
def diff(arguments: tuple[str, ...], unset: tuple[str, ...], as_json: bool) -> None:
    """Print what differs between two recipes or runs.

    Each key that differs, with its value in RECIPE and in OTHER, and the versions of libraries and plugins
    that differ; for a run, those that it recorded. Overrides and --unset apply to RECIPE.
    """
    recipes, overrides = split_overrides(arguments)
    if len(recipes) != 2:
        raise UsageError(
            f"it takes two recipes or runs, not {len(recipes)}", hint="write an override as KEY=VALUE"
        )
    _diff(recipes[0], overrides, unset, recipes[1], as_json)


def _diff(reference: str, overrides: list[str], unset: tuple[str, ...], other: str, as_json: bool) -> None:
    from titancli.run.compare import changes_between, read_side

    keys, software = changes_between(read_side(reference, overrides, unset=unset), read_side(other))
    if as_json:
        rows = [
            [{"key": c.key, "here": c.before, "other": c.after} for c in part] for part in (keys, software)
        ]
        print_json("config-diff", {"recipe": rows[0], "software": rows[1]})
        return
    for change in keys:
        print(printable(f"{change.key}: {_shown(change.before)} -> {_shown(change.after)}"))
    for change in software:
        print(printable(f"{change.key} (installed): {change.before or 'none'} -> {change.after or 'none'}"))
    if not keys and not software:
        note("nothing differs")


def with_origins(loaded: Loaded) -> Iterator[str]:
    """Return the lines of the recipe as TOML, each value followed by a comment with its origin."""
    return _table(loaded.data, (), {key: str(where) for key, where in loaded.origins.items()})


def _table(data: Mapping[str, Any], at: tuple[str | int, ...], origins: Mapping[str, str]) -> Iterator[str]:
    names = tuple(part for part in at if isinstance(part, str))  # headers have no numbers
    for key, value in data.items():
        if isinstance(value, dict) or _is_tables(value):
            continue
        first, *rest = toml_text({key: value}).rstrip().split("\n")
        path = dotted((*at, key))
        where = origins.get(path) or origins.get(f"{path}.0")  # of an array: of its first element
        yield f"{first:<{COMMENT_COLUMN}}{comment(where, '  # ')}" if where else first
        yield from rest
    for key, value in data.items():
        if isinstance(value, dict):
            yield from ("", f"[{dotted((*names, key))}]")
            yield from _table(value, (*at, key), origins)
        elif _is_tables(value):
            for number, element in enumerate(value):
                yield from ("", f"[[{dotted((*names, key))}]]")
                yield from _table(element, (*at, key, number), origins)


def _is_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _shown(value: Any) -> str:
    return "(not set)" if value is None else json.dumps(value, ensure_ascii=False)
