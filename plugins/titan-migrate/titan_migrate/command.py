"""`titan recipe from-axolotl`, `from-llamafactory`, `from-torchtune`: a recipe from another tool's config."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from titan_migrate.config import Asked
from titan_migrate.translate import TOOLS, translate
from titancli.commands import next_step, note, print_error, recipe_name, refuse_file, write_new
from titancli.errors import EXIT_OK, EnvironmentProblem, RecipeError, TitanError
from titancli.recipe import ABSENT_WEIGHTS, load_recipe
from titancli.registry import current


def _convert(tool: str, config: Path, file: Path, model: Path | None, gpus: int) -> int:
    refuse_file(file)
    found = translate(
        tool, config, recipe_name(file), current(), Asked(None if model is None else str(model), gpus)
    )
    try:
        write_new(file, found.text)
    except FileExistsError:
        raise
    except OSError as error:
        raise EnvironmentProblem(f"cannot write {file}: {error.strerror or error}") from error
    for line in found.lines(str(config)):
        print(line)
    lost = [remark for remark in found.lost if remark.line is not None]
    note(f"{file}: {len(found.moved)} keys carried over, {len(lost)} not")
    try:
        load_recipe(file)
    except TitanError as error:
        problems = error.problems if isinstance(error, RecipeError) else []
        if [problem.code for problem in problems] == [ABSENT_WEIGHTS]:
            note(f"the model is checked when it is there; {problems[0].hint}")
            return EXIT_OK
        note(f"{file} is not valid yet:")
        return print_error(error)
    note(f"compare:  titan data show --recipe {shlex.quote(str(file))}   (the rows as the model sees them)")
    note(next_step(file))
    return EXIT_OK


def _command(name: str) -> click.Command:
    title = TOOLS[name].title

    def run(config: Path, file: Path, model: Path | None, gpus: int) -> int:
        return _convert(name, config, file, model, gpus)

    run.__doc__ = f"""Convert a training config of {title} to a recipe FILE, which must not exist yet.

    Every key that could not be converted is reported, with its line and the reason; the same report is
    appended to FILE.
    """
    options = [
        click.argument("config", metavar="CONFIG.yaml", type=click.Path(path_type=Path)),
        click.argument("file", type=click.Path(path_type=Path)),
        click.option(
            "--model",
            type=click.Path(path_type=Path),
            metavar="FOLDER",
            help="Folder of the base model.  [default: as CONFIG names it]",
        ),
        click.option(
            "--gpus",
            type=click.IntRange(min=1),
            default=1,
            metavar="N",
            show_default=True,
            help="GPUs that CONFIG was run on: a batch there is one of each GPU.",
        ),
    ]
    for option in reversed(options):
        run = option(run)
    return click.command(f"from-{name}", short_help=f"Convert a config of {title}.")(run)


from_axolotl = _command("axolotl")
from_llamafactory = _command("llamafactory")
from_torchtune = _command("torchtune")
