"""Whether the code that a recipe names can be imported and used: the one check that runs any of it."""

from __future__ import annotations

from titancli.errors import EXIT_PLUGIN, Problem, RecipeError
from titancli.recipe.check import components
from titancli.recipe.load import Loaded
from titancli.recipe.tree import dotted
from titancli.registry import current
from titancli.registry.component import component_info, load_target


class NotImportable(RecipeError):
    """Components of a recipe whose code cannot be imported; a problem for each."""

    exit_code = EXIT_PLUGIN


def import_components(loaded: Loaded) -> None:
    """Import what builds each component of a recipe, those in slots of others too; and have the configs that
    can (`try_out()`) see what only that code knows.

    Raises:
        NotImportable: some cannot be: which, whose they are, and the error.
        RecipeError: a config's `try_out` says why it cannot be built.
    """
    problems, tried = [], set()
    for path, config in components(loaded.recipe):
        info = component_info(config)
        full = current().full_name(config)
        for target in filter(None, (info.target, info.hf)):
            if target in tried:
                continue
            tried.add(target)
            try:
                load_target(target)
            except (Exception, SystemExit) as error:  # whatever a plugin's module does
                cause = error.__cause__ or error
                plugin = full.partition("/")[0]
                origin = loaded.origins.get(dotted((*path, "type")))
                message = (
                    f"{info.kind}/{info.name} of the plugin {plugin}: {target!r} cannot be imported: "
                    f"{type(cause).__name__}: {cause}"
                )
                hint = f"repair or reinstall {plugin}; or name another {info.kind} in {dotted(path)}"
                problems.append(
                    Problem("import", message, origin.location("value") if origin else None, hint)
                )
    if problems:
        raise NotImportable(problems)
    for _, config in components(loaded.recipe):
        if try_out := getattr(config, "try_out", None):
            try_out()
