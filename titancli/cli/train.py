"""`titan train`: start a run, or continue one."""

from __future__ import annotations

import itertools
import re
import shlex
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from titancli.cli.common import Common, split_overrides
from titancli.cli.completion import RecipeOrOverride
from titancli.cli.output import note, print_json, short_path
from titancli.converters import LoRA
from titancli.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_STOPPED, UsageError
from titancli.registry.component import component_info
from titancli.torch_version import untested

if TYPE_CHECKING:
    from titancli.launch import LaunchRequest
    from titancli.recipe.schema import Recipe
    from titancli.run.prepare import Plan
    from titancli.run.request import Request


class NumberOrAuto(click.ParamType):
    """A number of processes, or `auto`."""

    name = "N|auto"

    def convert(self, value: Any, param: Any, ctx: Any) -> int | str:
        if value == "auto":
            return "auto"
        if isinstance(value, str) and value.isdecimal() and int(value) > 0:
            return int(value)
        return self.fail(f"{value!r} is neither a number of processes nor auto", param, ctx)


class Nodes(click.ParamType):
    """A number of nodes, or MIN:MAX: the minimum (None if the number is fixed) and the maximum."""

    name = "N|MIN:MAX"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int | None, int]:
        if isinstance(value, tuple):
            return value
        least, colon, most = str(value).partition(":")
        if least.isdecimal() and int(least) > 0:
            if not colon:
                return None, int(least)
            if most.isdecimal() and int(most) > int(least):
                return int(least), int(most)
        return self.fail(f"{value!r} is neither a number of machines nor MIN:MAX", param, ctx)


START_OPTIONS = (
    click.argument(
        "arguments", metavar="RECIPE [KEY=VALUE]...", nargs=-1, required=True, type=RecipeOrOverride()
    ),
    click.option(
        "--run-dir",
        type=click.Path(path_type=Path),
        metavar="DIR",
        help="The run folder; of several machines, on a disk that all share.",
    ),
    click.option("--resume", is_flag=True, help="Resume the run from its newest good checkpoint."),
    click.option(
        "--allow-drift", is_flag=True, help="With --resume: allow a changed model, tokenizer or dataset."
    ),
    click.option(
        "--from-scratch", is_flag=True, help="With --resume: if no checkpoint can be used, start at step 0."
    ),
    click.option("--unset", metavar="KEY", multiple=True, help="Reset KEY to its default; may be repeated."),
    click.option(
        "--env",
        "variables",
        metavar="NAME=VALUE",
        multiple=True,
        help="Set an environment variable of the workers; may be repeated.",
    ),
    click.option(
        "--nproc", type=NumberOrAuto(), help="Processes on each machine.  [default: set by the launcher]"
    ),
)


def start_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that start a run, on this machine or as a cluster's job."""
    for option in reversed(START_OPTIONS):
        function = option(function)
    return function


EXTENDS = "    # shows ways to continue, and the learning rate of each"

KEY_LIKE = re.compile(r"[a-z][a-z0-9_]*(\.[a-z0-9_]+)+")
"""Matches words without `=` that look like a key rather than a recipe."""


@click.command("train", short_help="Train a model from a recipe, or resume a run.")
@start_options
@click.option(
    "--step", type=click.IntRange(0), metavar="N", help="With --resume: start from the checkpoint of step N."
)
@click.option(
    "--nnodes",
    type=Nodes(),
    default=(None, 1),
    metavar="N|MIN:MAX",
    help="Number of machines; start titan on each of them. MIN:MAX: as many as there are.",
)
@click.option(
    "--rdzv",
    metavar="HOST:PORT",
    help="Where several machines meet; HOST is one of them.  [default: chosen through the run folder]",
)
@click.option("--dry-run", is_flag=True, help="Show what would be done, then exit.")
@click.option("--json", "as_json", is_flag=True, help="Print events as JSON Lines to stdout.")
@click.pass_obj
def command(
    common: Common,
    arguments: tuple[str, ...],
    run_dir: Path | None,
    resume: bool,
    step: int | None,
    allow_drift: bool,
    from_scratch: bool,
    unset: tuple[str, ...],
    variables: tuple[str, ...],
    nproc: int | str | None,
    nnodes: tuple[int | None, int],
    rdzv: str | None,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Train a model from a recipe, or resume a run.

    \b
    titan train RECIPE                          start a new run
    titan train RUN --resume                    resume a run
    titan train RECIPE --run-dir DIR --resume   start or resume the run in DIR: for job scripts

    KEY=VALUE overrides a value of the recipe. KEY is a section and a key of it, VALUE as in TOML;
    strings need no quotes, an array is one word:

    \b
    training.steps=20 optimizer.lr=3e-4         two keys of sections
    optimizer=muon                              another component: its type
    dataset.paths='["a.txt", "b.txt"]'          an array

    `titan recipe show RECIPE` prints every key of a recipe with its value, `titan show SECTION` (training,
    checkpoint, …) and `titan show KIND/NAME` (optimizer/adamw, …) what each means.
    """
    from titancli.run.request import Request
    from titancli.runs import ChangedMeanwhile

    recipe, overrides = one_recipe(arguments, "train")
    check_flags(run_dir, resume, step, allow_drift, from_scratch, nnodes[1])
    request = Request(
        recipe,
        overrides,
        unset,
        run_dir,
        resume,
        step,
        allow_drift,
        from_scratch,
        common.plugin_files,
        dry_run,
        say=note,
        nproc=nproc,
        env=environment_of(variables),
        nnodes=nnodes[1],
        min_nodes=nnodes[0],
        rdzv=rdzv,
        json_events=as_json,
        traceback=common.traceback,
    )
    try:
        return _train(request)
    except ChangedMeanwhile as error:  # for one, the attempt before has just saved and ended
        note(f"{error.message}: planning again")
        return _train(request)


def _train(request: Request) -> int:
    """Plan the run, and start it, or show what would be started."""
    from titancli.run.effects import effects
    from titancli.run.prepare import make_plan
    from titancli.run.start import launch_request

    plan = make_plan(request)
    launch = launch_request(plan)
    for line in _remarks(plan.loaded.recipe):
        note(f"note: {line}")
    if request.dry_run:
        return _show(plan, launch)
    for line in plan.notes:
        note(line)
    for change in plan.drift:
        note(f"changed: {change}")
    if plan.finished or plan.only_uploads:
        return _say_finished(plan)
    if plan.last_step_done:
        note(f"step {plan.start_step}, the last one, is done: the rest of the run's end follows")
    for line in effects(plan, launch.world):
        note(f"changed: {line}")
    return _run(plan, launch)


def _remarks(recipe: Recipe) -> Iterator[str]:
    """Yield what the user should know of a recipe, and of what is installed, before it runs."""
    from titancli.recipe.check import remarks
    from titancli.registry import current

    yield from remarks(recipe)
    for name in current().unneeded_torch(recipe):
        yield (
            f"the plugin {name}, which this recipe does not use, imports torch and may change the "
            f"run: `titan plugin show {name}` says what it changes, -p no:{name} leaves it out"
        )
    if newer := untested():
        yield newer


def one_recipe(arguments: tuple[str, ...], command: str) -> tuple[str, list[str]]:
    """Return the recipe and the overrides of a command line.

    Raises:
        UsageError: there is no recipe, or more than one.
    """
    recipes, overrides = split_overrides(arguments)
    if len(recipes) == 1:
        return recipes[0], overrides
    wanted = f"takes one recipe, not {' and '.join(recipes)}" if recipes else "needs a recipe"
    for key, value in itertools.pairwise([*recipes, "VALUE"]):
        if KEY_LIKE.fullmatch(key) and not key.endswith(".toml"):
            raise UsageError(f"{command} {wanted}", hint=f"an override is one word: {key}={value}")
    raise UsageError(
        f"{command} {wanted}",
        hint=f"titan {command} RECIPE [KEY=VALUE]...; `titan recipe list` lists the recipes",
    )


def check_flags(
    run_dir: Path | None,
    resume: bool,
    step: int | None,
    allow_drift: bool,
    from_scratch: bool,
    nnodes: int,
) -> None:
    """Check the flags of a start.

    Raises:
        UsageError: flags exclude each other, or one needs another.
    """
    if nnodes > 1 and run_dir is None and not resume:
        raise UsageError(
            f"--nnodes {nnodes} needs --run-dir",
            hint="give a folder on storage that all nodes share, the same on every node",
        )
    if allow_drift and not resume:
        raise UsageError("--allow-drift needs --resume")
    if from_scratch and (not resume or step is not None):
        raise UsageError("--from-scratch needs --resume, without --step")


def _run(plan: Plan, request: LaunchRequest) -> int:
    """Start the run, wait for its end, and print what to do next."""
    from titancli.run.outlook import outlook
    from titancli.run.start import launch, prepared

    with prepared(plan, request) as ready:
        note(f"run folder: {short_path(ready.run_folder)}")
        for line in outlook(plan, request.world):
            note(line)
        code = launch(plan, ready)
    if code in (EXIT_STOPPED, EXIT_INTERRUPTED):
        # All is saved, and the code says so: an impatient Ctrl-C from now on must not change it.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    _say_next(plan, ready)
    return code


def _show(plan: Plan, request: LaunchRequest) -> int:
    from titancli.cli.failures import print_error
    from titancli.run.inputs import missing_error
    from titancli.run.preview import as_text, preview

    facts = preview(plan, request)
    if request.json_events:
        print_json("plan", {"plan": facts})
    else:
        print(as_text(facts))
    if plan.missing:
        error = missing_error(plan.missing, plan.loaded.recipe)
        print_error(error)
        return error.exit_code
    return EXIT_OK


def _say_finished(plan: Plan) -> int:
    from titancli.worker.remote import upload_rest

    upload_rest(plan.folder, plan.loaded.recipe.checkpoint)
    run, steps = shlex.quote(short_path(plan.folder.path)), plan.loaded.recipe.training.steps
    note(f"{run} is finished: step {plan.start_step} of {steps}")
    longer = max(2 * steps, plan.start_step + 1)
    note(f"to continue: titan recipe extend {run} --steps {longer}{EXTENDS}")
    return EXIT_OK


def environment_of(variables: tuple[str, ...]) -> dict[str, str]:
    """Return the environment variables that `--env` sets.

    Raises:
        UsageError: an item is not NAME=VALUE, or is already set in the shell or by the launcher.
    """
    from titancli.recipe.env import wrong_variable

    env = {}
    for variable in variables:
        name, equals, value = variable.partition("=")
        if not equals:
            raise UsageError(f"--env {variable}: '=' is missing", hint="write --env NAME=VALUE")
        if wrong := wrong_variable(name, value):
            raise UsageError(f"--env {name}: {wrong[0]}", hint=wrong[1])
        env[name] = value
    return env


def _say_next(plan: Plan, request: LaunchRequest) -> None:
    """Print up to three commands to type next, after a run that ended normally."""
    folder, recipe, ranks = request.folder, plan.loaded.recipe, plan.request
    outcome = folder.outcome()
    if outcome is None or outcome["why"] not in ("finished", "data_ended", "stopped", "interrupted"):
        return
    run = shlex.quote(short_path(folder.path))
    plugins = "".join(f" -p {shlex.quote(str(file))}" for file in request.plugin_files)
    flags = plugins + "".join(f" --env {shlex.quote(f'{name}={value}')}" for name, value in ranks.env.items())
    flags += f" --nproc {ranks.nproc}" if ranks.nproc is not None else ""
    flags += f" --nnodes {request.nodes}" if request.nnodes > 1 else ""
    flags += f" --rdzv {request.rdzv}" if request.rdzv else ""
    ended = {"data_ended": "reached the end of the data", "interrupted": "stopped"}.get(
        outcome["why"], outcome["why"]
    )
    step, saved = outcome["step"], outcome["checkpoint"]  # None: ranks that had not begun were stopped
    note(f"{ended} {f'at step {step}' if step is not None else 'before a step'}; run folder: {run}")
    if not saved and (step or outcome["why"] not in ("stopped", "interrupted")):
        return
    if outcome["why"] == "finished":
        epochs = recipe.training.epochs
        longer = f"--steps {2 * step}" if epochs is None else f"--epochs {2 * epochs:g}"
        note(f"continue:  titan recipe extend {run} {longer}{plugins}{EXTENDS}")
    else:
        note(f"continue:  titan train {run} --resume{flags}")
    if not saved or component_info(recipe.model).hf is None:
        return  # transformers has no such model
    lora = any(isinstance(converter, LoRA) for converter in recipe.converters)
    form = "peft    # the adapters; --to hf merges them" if lora else "hf"
    note(f"export:    titan convert-checkpoint {run}/{saved} OUT{plugins} --to {form}")
