"""`titan validate`: all problems of recipes, without running them."""

from __future__ import annotations

import sys
from typing import Any, Literal

import click

from titancli.cli.common import split_overrides
from titancli.cli.completion import RecipeOrOverride
from titancli.cli.failures import print_error
from titancli.cli.group import note_broken
from titancli.cli.output import note, print_json
from titancli.errors import Problem, RecipeError, TitanError, UsageError
from titancli.recipe import load_recipe, render_problems
from titancli.recipe.check import remarks
from titancli.recipe.problems import problems_data
from titancli.run.fit import import_components
from titancli.run.inputs import missing_error, require_inputs

Format = Literal["text", "json", "github"]


@click.command("validate", short_help="Check recipes without running them.")
@click.argument(
    "arguments", metavar="RECIPE... [KEY=VALUE]...", nargs=-1, required=True, type=RecipeOrOverride()
)
@click.option("--unset", metavar="KEY", multiple=True, help="Reset KEY to its default; may be repeated.")
@click.option("--strict", is_flag=True, help="Also import the code that builds the components.")
@click.option(
    "--recipe-only", is_flag=True, help="Do not look at the files that a recipe names: they are elsewhere."
)
@click.option(
    "--format",
    "format_",
    type=click.Choice(["text", "json", "github"]),
    default="text",
    help="Output format: plain text, one JSON document, or GitHub annotations.",
)
def command(
    arguments: tuple[str, ...], unset: tuple[str, ...], strict: bool, recipe_only: bool, format_: Format
) -> int:
    """Check recipes, and the files that they name, without running them. Component code is imported only
    with --strict.

    The checks, their hints and the exit code are those of a start on this machine. Arguments that contain =
    are overrides and apply to all recipes.
    """
    recipes, overrides = split_overrides(arguments)
    if not recipes:
        raise UsageError("validate needs a recipe before the overrides")
    code = 0
    documents: list[dict[str, Any]] = []
    for reference in recipes:
        try:
            loaded = load_recipe(reference, overrides, unset=unset)
            if not recipe_only and (remote := loaded.recipe.checkpoint.remote) is not None:
                from titancli.checkpoint.remote.transfer import require_store

                require_store(remote, loaded.recipe.checkpoint.store)
            if not recipe_only and (missing := require_inputs(loaded, dry_run=True)):
                raise missing_error(missing, loaded.recipe)
            if strict:
                import_components(loaded)
        except TitanError as error:
            code = code or error.exit_code
            documents.append(_failed(reference, error, format_))
        else:
            documents.append({"recipe": reference, "name": loaded.recipe.name, "ok": True, "problems": []})
            if format_ == "text":
                print(f"ok: {reference}")
            for line in remarks(loaded.recipe):
                note(f"note: {reference}: {line}")
    if format_ == "json":
        print_json("validation", {"ok": code == 0, "recipes": documents})
    note_broken()
    return code


def _failed(reference: str, error: TitanError, format_: Format) -> dict[str, Any]:
    """Print an error in the chosen format, and return the JSON document of this recipe."""
    if isinstance(error, RecipeError):
        problems = error.problems
    else:
        problems = [
            Problem("plugin" if error.exit_code == 4 else "environment", error.message, hint=error.hint)
        ]
    if format_ == "github":
        print(render_problems(problems, format="github"))
    elif format_ == "text":
        sys.stdout.flush()  # so that ok lines and problems stay in order where both go to one place
        print_error(error)
        note(f"{reference}: {len(problems)} problem{'' if len(problems) == 1 else 's'}\n")
    return {"recipe": reference, "ok": False, "problems": problems_data(problems)}
