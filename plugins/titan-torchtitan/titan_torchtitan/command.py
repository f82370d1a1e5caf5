"""`titan recipe from-torchtitan`: a recipe from a job config of torchtitan."""

from __future__ import annotations

from pathlib import Path

import click

from titan_torchtitan.translate import translate
from titancli.commands import next_step, note, print_error, recipe_name, refuse_file, write_new
from titancli.errors import EXIT_OK, TitanError
from titancli.recipe import load_recipe
from titancli.registry import current


@click.command("from-torchtitan", short_help="Convert a job config of torchtitan 0.2.2 or earlier.")
@click.argument("job", metavar="JOB.toml", type=click.Path(path_type=Path))
@click.argument("file", type=click.Path(path_type=Path))
def command(job: Path, file: Path) -> int:
    """Convert a job config of torchtitan 0.2.2 or earlier to a recipe FILE, which must not exist yet.

    Every field that could not be converted is reported, with its line and the reason; the same report is
    appended to FILE.
    """
    refuse_file(file)
    found = translate(job, recipe_name(file), current())
    write_new(file, found.text)
    for line in found.lines(str(job)):
        print(line)
    lost = [remark for remark in found.lost if remark.line is not None]
    note(f"{file}: {len(found.moved)} fields carried over, {len(lost)} not")
    try:
        load_recipe(file)
    except TitanError as error:
        note(f"{file} is not valid yet:")
        return print_error(error)
    note(next_step(file))
    return EXIT_OK
