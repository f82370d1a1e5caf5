"""Start the workers of a plan: make and hold the run folder, and call the recipe's launcher.

On one machine all files are written here. On several, it is not known yet who will be rank 0, so each command
writes its files into a folder of its own, and rank 0 makes the run folder from its node's files. Torch-free.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from titancli.errors import EnvironmentProblem, TitanError
from titancli.launch import LaunchRequest
from titancli.launchers import Local
from titancli.launchers.devices import visible_gpus
from titancli.launchers.others import refuse_other_launchers
from titancli.process import environment, no_room, own_folder
from titancli.registry.component import component_info, load_target
from titancli.run.fit import check_devices, check_worlds
from titancli.run.prepare import Plan
from titancli.run.record import write_attempt
from titancli.run.request import history
from titancli.runs import ATTEMPT, LOCK_NAME, ChangedMeanwhile, Claim, RunFolder
from titancli.torch_version import check_torch


def count_processes(plan: Plan, *, may_exceed: bool = False) -> int:
    """Return the number of processes on this machine: from the request, the recipe's launcher, or one for
    each GPU.

    Raises:
        EnvironmentProblem: there are fewer GPUs here, unless `may_exceed` (to show a plan).
    """
    wanted = plan.request.nproc or getattr(plan.loaded.recipe.launcher, "nproc", "auto")
    gpus = visible_gpus()
    if not isinstance(wanted, int):
        return gpus or 1
    if gpus and wanted > gpus and not may_exceed:
        raise EnvironmentProblem(
            f"{wanted} processes need {wanted} GPUs, but {gpus} {'is' if gpus == 1 else 'are'} visible",
            hint=f"use --nproc {gpus}, or make more GPUs visible with CUDA_VISIBLE_DEVICES",
        )
    return wanted


def launch_request(plan: Plan) -> LaunchRequest:
    """Return the request to the launcher of a plan.

    Raises:
        EnvironmentProblem: there are not as many GPUs here, and it is no dry run.
        UsageError: another launcher has started this command several times.
    """
    ranks = plan.request
    refuse_other_launchers(ranks.nnodes)
    return LaunchRequest(
        run_folder=plan.folder.path,
        lock_file=plan.folder.recipe_lock,
        checkpoint=plan.checkpoint,
        plugin_files=list(ranks.plugin_files),
        nproc=count_processes(plan, may_exceed=ranks.dry_run),
        nnodes=ranks.nnodes,
        min_nodes=ranks.min_nodes,
        rdzv=ranks.rdzv,
        json_events=ranks.json_events,
        traceback=ranks.traceback,
        env={**plan.loaded.recipe.env, **ranks.env},
    )


@contextmanager
def prepared(plan: Plan, request: LaunchRequest) -> Iterator[LaunchRequest]:
    """Check the plan, make and hold the run folder inside the block, and yield the request as it is then: on
    several nodes rank 0 may still have to make the folder.

    Raises:
        ChangedMeanwhile: another attempt has worked in the folder since the plan was made.
        TitanError: the recipe does not fit the processes, or the folder is in use or cannot be written.
    """
    _check(plan, request)
    with environment(request.env):
        load_target(component_info(plan.loaded.recipe.launcher).target)  # if it fails, no folder is left
        with (_own_files if request.nnodes > 1 else _run_files)(plan, request) as ready:
            yield ready


def launch(plan: Plan, ready: LaunchRequest) -> int:
    """Run what is prepared to its end and return the command's exit code.

    Raises:
        TitanError: the run failed for a reason that a user can fix.
    """
    config = plan.loaded.recipe.launcher
    code: int = load_target(component_info(config).target)(config, request=ready)
    return code


def _check(plan: Plan, request: LaunchRequest) -> None:
    check_torch()
    check_devices(plan.loaded, visible_gpus(), {**os.environ, **request.env})
    check_worlds(plan.loaded, request.nproc, request.min_nodes, request.nnodes)
    launcher = plan.loaded.recipe.launcher
    if request.min_nodes is not None and not isinstance(launcher, Local):
        raise EnvironmentProblem(
            f"the launcher {component_info(launcher).name} runs on a fixed number of nodes",
            hint=f"use --nnodes {request.nnodes}",
        )


@contextmanager
def _own_files(plan: Plan, request: LaunchRequest) -> Iterator[LaunchRequest]:
    """Write this node's files into a folder of its own."""
    # Compare attempts alone: checkpoints may change while other nodes download them from a store.
    if plan.seen is not None and plan.seen[0] != history(plan.folder)[0]:
        raise ChangedMeanwhile(plan.folder)
    with own_folder() as own:
        lock_file = own / LOCK_NAME
        try:
            lock_file.write_text(plan.lock_text, encoding="utf-8")
        except OSError as error:
            raise no_room(own, error) from error
        write_attempt(RunFolder(own), plan, request)
        with environment({ATTEMPT: ""}):  # not that of a run inside which this command is started
            yield replace(request, lock_file=lock_file)


@contextmanager
def _run_files(plan: Plan, request: LaunchRequest) -> Iterator[LaunchRequest]:
    """Make the run folder, hold it, and write its files."""
    folder, token = make_folder(plan), None
    hold = folder.hold()
    try:
        if plan.seen not in (None, history(folder)):
            raise ChangedMeanwhile(folder)
        folder.propose_recipe_lock(plan.lock_text)
        token = write_attempt(folder, plan, request)["token"]
        with environment({ATTEMPT: token}):
            yield replace(request, run_folder=folder.path, lock_file=folder.recipe_lock)
    finally:
        _withdraw(folder, token)
        hold.release()


def _withdraw(folder: RunFolder, token: str | None) -> None:
    """Remove the recipe of an attempt whose ranks have not loaded it, unless the folder is another attempt's
    by now."""
    if token is not None:
        with suppress(TitanError, OSError):  # what made the run fail says more
            Claim(folder, token).check()
            folder.withdraw_recipe_lock()


def make_folder(plan: Plan) -> RunFolder:
    """Make the plan's folder and return it. If titan named it and the name has been taken since, choose
    another."""
    if plan.new and plan.named_by_titan:
        return RunFolder.create(plan.loaded.recipe.name)
    plan.folder.make()
    return plan.folder
