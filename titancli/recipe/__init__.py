"""From the text of a recipe to a checked Recipe.

    recipe.toml ─ read ─ extends ─ overrides ─ resolve ─ bind ─ check ─▶ Loaded ─ lock_text

Importing this imports no pydantic, and nothing here ever imports torch.
"""

from __future__ import annotations

from titancli.recipe.env import ALLOWED
from titancli.recipe.find import LOCK_HEADER, LOCK_NAME, bundled_folder, find_recipe
from titancli.recipe.load import ABSENT_WEIGHTS, Loaded, load_recipe, lock_text, model_in, resolved_data
from titancli.recipe.problems import Problems, nearest, render_problems
from titancli.recipe.read import read_file
from titancli.recipe.toml import DEFAULT, KeyPath, Node, Origin, dotted, inline, toml_blocks, toml_text
from titancli.registry.first_party import install_command

__all__ = [
    "ABSENT_WEIGHTS",
    "ALLOWED",
    "DEFAULT",
    "LOCK_HEADER",
    "LOCK_NAME",
    "KeyPath",
    "Loaded",
    "Node",
    "Origin",
    "Problems",
    "bundled_folder",
    "dotted",
    "find_recipe",
    "inline",
    "install_command",
    "load_recipe",
    "lock_text",
    "model_in",
    "nearest",
    "read_file",
    "render_problems",
    "resolved_data",
    "toml_blocks",
    "toml_text",
]
