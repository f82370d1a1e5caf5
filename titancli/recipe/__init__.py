"""From the text of a recipe to a checked Recipe.

    recipe.toml ─ read ─ extends ─ overrides ─ resolve ─ bind ─ check ─▶ Loaded ─ lock_text

Importing this imports no pydantic, and nothing here ever imports torch.
"""

from __future__ import annotations

from titancli.recipe.find import LOCK_NAME, bundled_folder, find_recipe
from titancli.recipe.load import Loaded, load_recipe, lock_text
from titancli.recipe.problems import render_problems
from titancli.recipe.toml import Origin

__all__ = [
    "LOCK_NAME",
    "Loaded",
    "Origin",
    "bundled_folder",
    "find_recipe",
    "load_recipe",
    "lock_text",
    "render_problems",
]
