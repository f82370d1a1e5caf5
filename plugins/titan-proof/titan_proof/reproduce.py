"""Repeat a run on this machine: how it is started, and what a repetition would be made by. Imports torch
late."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from titan_proof.reproduction import Reproduction
from titancli import __version__
from titancli.commands.recorded import data_identity, machine, provenance
from titancli.commands.starting import (
    LaunchRequest,
    Plan,
    Request,
    count_processes,
    launch_request,
    make_plan,
    prepared,
)
from titancli.commands.starting import launch as launch_plan
from titancli.errors import EnvironmentProblem, PluginError, RecipeError, TitanError, UsageError
from titancli.launchers.devices import visible_gpus
from titancli.recipe import ALLOWED, lock_text
from titancli.runs import LOCK_NAME, RunFolder

ENDED = ("finished", "data_ended")
THREADS = "OMP_NUM_THREADS"


def target(run: Reproduction, steps: int | None) -> int | None:
    """Return the step with which a reproduction ends; None: that of the recipe.

    A failed run is reproduced into the step in which it failed; one that was stopped, or is still running, up
    to the last step that it has logged.

    Raises:
        UsageError: more steps are requested than there are to compare with.
        EnvironmentProblem: no step was logged.
    """
    state, last = run.run.get("state"), run.last_step
    total = run.data.get("training", {}).get("steps")
    if steps is not None and steps > last > 0:
        raise UsageError(
            f"the run has logged {last} steps, not {steps}", hint=f"use --steps {last}, or fewer"
        )
    if last == 0 and state != "failed":
        raise EnvironmentProblem(
            f"{run.name} has logged no step: there is nothing to compare a reproduction with",
            hint="`titan reproduce --check` shows what differs here; `titan train` runs its recipe",
        )
    if steps is None:
        if state in ENDED:
            return None
        steps = last + 1 if state == "failed" else last
    return steps if isinstance(total, int) and steps < total else None


def plan(
    run: Reproduction,
    *,
    overrides: Sequence[str] = (),
    steps: int | None = None,
    run_dir: Path | None = None,
    nproc: int | str | None = None,
    plugin_files: Sequence[Path] = (),
    dry_run: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> Plan:
    """Return the plan of a new run under the recipe of another one, with its threads and environment.

    Its loggers and its object store are left out. On another number of ranks the global batch stays the same.

    Args:
        overrides: further overrides, `KEY=VALUE`, for paths that differ on this machine.
        steps: the last step to do; the schedule stays that of the whole run.
        nproc: number of ranks, or `auto`: one for each GPU; None: as many as the run had.

    Raises:
        TitanError: the recipe, a plugin or the data have changed, or are not here.
    """
    recipe = run.data
    own = shortened(run, steps)
    training, mesh = recipe.get("training", {}), run.made_by.get("mesh")
    world = (visible_gpus() or 1) if nproc == "auto" else nproc
    if mesh and world not in (None, run.made_by.get("world")) and "global_batch_size" not in training:
        rows = training["local_batch_size"] * mesh["dp_replicate"] * mesh["dp_shard"]
        own.append(f"training.global_batch_size={rows}")
    with tempfile.TemporaryDirectory(prefix="titan-") as folder:
        file = Path(folder) / LOCK_NAME
        file.write_text(run.recipe, encoding="utf-8")
        try:
            made = make_plan(
                Request(
                    reference=str(file),
                    overrides=[*own, *overrides],
                    unset=["checkpoint.remote"],
                    run_dir=run_dir,
                    plugin_files=plugin_files,
                    dry_run=dry_run,
                    say=say,
                    nproc=nproc or run.launch.get("nproc"),
                    env=environment(run),
                )
            )
        except TitanError as error:
            raise with_what_helps(error, run, plugin_files) from error
    return replace(made, loaded=replace(made.loaded, path=Path(run.run["path"]) / LOCK_NAME))


def shortened(run: Reproduction, steps: int | None) -> list[str]:
    """Return the overrides that remove a run's loggers, and end it at a step (None: its last) while
    keeping the schedule of the whole run."""
    recipe = run.data
    own = ["loggers=[]"] if recipe.get("loggers") else []
    if steps is None:
        return own
    length = recipe.get("lr_scheduler", {}).get("total_steps") or recipe["training"].get("steps")
    if length is None:  # in epochs
        length = run.run["steps"]
        if steps >= length:  # the last step may be smaller, which only the length in epochs says
            return own
    return [*own, f"training.steps={steps}", f"lr_scheduler.total_steps={length}"]


def with_what_helps(error: TitanError, run: Reproduction, plugin_files: Sequence[Path]) -> TitanError:
    """Return the error with a hint about software of the run that is missing here, or the error itself."""
    given = {file.stem for file in plugin_files}
    entries = run.made_by.get("plugin_files") or []
    lacking = [Path(entry["path"]) for entry in entries if Path(entry["path"]).stem not in given]
    if lacking:
        flags = " ".join(f"-p {path}" for path in lacking)
        return PluginError(
            f"the run was started with {flags}; without it: {error.message}",
            hint=f"add {flags}; `titan reproduce {run.run['path']} --extract DIR` writes the recorded text",
        )
    made, here = (run.made_by.get("versions") or {}).get("titancli"), __version__
    if isinstance(error, RecipeError) and made != here:
        return RecipeError(
            f"the run was made by titan {made}, and titan {here} does not accept its recipe: {error.message}",
            hint=f"install titan {made}; --check shows what else differs",
        )
    return error


def request(run: Reproduction, made: Plan, nproc: int | str | None, *, traceback: bool) -> LaunchRequest:
    """Return the launch of a plan.

    Raises:
        UsageError: the run had several nodes.
        EnvironmentProblem: there are too few GPUs here.
    """
    if nproc is None and (run.launch.get("nnodes") or 1) > 1:
        raise UsageError(
            f"the run was made on {run.launch['nnodes']} nodes of {run.launch['nproc']} ranks",
            hint="--nproc N reproduces it on N ranks of this machine, in another layout",
        )
    return launch_request(replace(made, request=replace(made.request, traceback=traceback)))


def environment(run: Reproduction) -> dict[str, str]:
    """Return the variables to set: those of the run that a recipe may set or that the shell has, with the
    shell's values; and its number of threads, unless the shell sets one."""
    recorded = {name: str(value) for name, value in (run.made_by.get("env") or {}).items()}
    found = {
        name: os.environ.get(name, value)
        for name, value in recorded.items()
        if name in os.environ or name in ALLOWED
    }
    threads = (run.made_by.get("machine") or {}).get("threads")
    if isinstance(threads, int) and THREADS not in os.environ:
        found.setdefault(THREADS, str(threads))
    return found


def launch(
    made: Plan, wanted: LaunchRequest, announce: Callable[[RunFolder], None]
) -> tuple[int, TitanError | None]:
    """Launch a run to its end; return the exit code, and its error if it failed after its folder was made.

    Raises:
        TitanError: it could not be started.
    """
    folder = None
    try:
        with prepared(made, wanted) as ready:
            folder = ready.folder
            announce(folder)
            return launch_plan(made, ready), None
    except TitanError as error:
        if folder is None or folder.outcome() is None:
            raise
        return error.exit_code, error


def here(
    run: Reproduction,
    *,
    overrides: Sequence[str] = (),
    nproc: int | str | None = None,
    plugin_files: Sequence[Path] = (),
) -> tuple[Reproduction, list[str]]:
    """Return what a reproduction would be made by on this machine, without steps, and the problems found, a
    line each.

    The data are opened, and read only as far as it takes to identify them.
    """
    problems: list[str] = []
    before, now = run.made_by, provenance(list(plugin_files))
    found: dict[str, Any] = {
        **{name: now[name] for name in ("versions", "code", "git", "plugin_files")},
        "device": _device(),
        "machine": machine(),
        "data": None,
        "mesh": None,
        "env": environment(run),
        "world": None,
    }
    if THREADS not in os.environ and before.get("machine"):
        found["machine"]["threads"] = before["machine"].get("threads")  # launched with these
    recipe = run.recipe
    try:
        made = plan(run, overrides=overrides, nproc=nproc, plugin_files=plugin_files, dry_run=True)
        recipe = lock_text(made.loaded)
        problems += made.missing
        found["env"] = {**made.loaded.recipe.env, **environment(run)}
        ranks = count_processes(made)
        found["world"], found["mesh"] = ranks, vars(made.loaded.recipe.degrees(ranks))
        if not made.missing:
            found["data"] = data_identity(made.loaded.recipe)
    except TitanError as error:
        problems.append(f"{error.message}" + (f" ({error.hint})" if error.hint else ""))
    return Reproduction(run.name, {"path": None, "state": None}, recipe, found, {}), problems


def _device() -> str:
    import torch

    if not visible_gpus() or not torch.cuda.is_available():
        return "CPU"
    return torch.cuda.get_device_name(0)
