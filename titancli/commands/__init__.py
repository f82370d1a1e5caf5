"""The building blocks of a plugin's command: options, completion, output. Public; it imports no torch.

    from titancli.commands import note, print_json, table

`titancli.commands.starting` starts runs, `titancli.commands.evaluation` runs a loop on the weights of a run,
a checkpoint or a Hugging Face folder.
"""

from titancli.cli import main
from titancli.cli.common import Common, split_overrides
from titancli.cli.completion import RecipeOrOverride, RunName
from titancli.cli.component_lookup import find_component, is_component
from titancli.cli.failures import print_error
from titancli.cli.new_file import next_step, recipe_name, refuse_file, write_new
from titancli.cli.output import colored, note, out, print_json, short_path, table
from titancli.cli.path_types import FolderOrURL, on_disk
from titancli.cli.train import NumberOrAuto
from titancli.recipe.toml import comment
from titancli.terminal import clean, printable

__all__ = [
    "Common",
    "FolderOrURL",
    "NumberOrAuto",
    "RecipeOrOverride",
    "RunName",
    "clean",
    "colored",
    "comment",
    "find_component",
    "is_component",
    "main",
    "next_step",
    "note",
    "on_disk",
    "out",
    "print_error",
    "print_json",
    "printable",
    "recipe_name",
    "refuse_file",
    "short_path",
    "split_overrides",
    "table",
    "write_new",
]
