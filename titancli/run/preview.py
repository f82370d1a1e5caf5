"""`titan train --dry-run`: describe a plan on a number of processes, and the command that would start it."""

from __future__ import annotations

import os
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

from titancli.errors import TitanError
from titancli.launch import LaunchRequest
from titancli.launchers import Local
from titancli.launchers.local import in_place
from titancli.launchers.torchrun import torchrun_command
from titancli.layout.degrees import Degrees
from titancli.observe.peaks import DEVICES, Device
from titancli.optimizers import AdamW
from titancli.recipe.schema import Recipe
from titancli.registry.component import component_info
from titancli.run.effects import effects
from titancli.run.fit import check_world
from titancli.run.prepare import Plan


def preview(plan: Plan, request: LaunchRequest) -> dict[str, Any]:
    """Return the facts as plain JSON. Builds the model on the meta device, without memory, to count its
    parameters.

    Raises:
        TitanError: the recipe does not fit the processes.
    """
    recipe = plan.loaded.recipe
    degrees, accumulation = check_world(plan.loaded, request.world)
    training = recipe.training
    rows = training.local_batch_size * accumulation * degrees.dp
    parameters, mine, names = count_parameters(recipe, degrees)
    steps = _steps(plan, request.world)
    return {
        "recipe": str(plan.loaded.path),
        "name": recipe.name,
        "run_folder": str(plan.folder.path),
        "new": plan.new,
        "checkpoint": str(plan.checkpoint) if plan.checkpoint else None,
        "start_step": plan.start_step,
        "drift": [*map(str, plan.drift), *effects(plan, request.world)],
        "missing": plan.missing,
        "notes": list(recipe.optimizer.unmatched(names)) if isinstance(recipe.optimizer, AdamW) else [],
        "model": component_info(recipe.model).name,
        "parameters": parameters,
        "weights_and_gradients_bytes_per_rank": 2 * mine * (4 if training.dtype == "float32" else 2),
        "memory": _memory(recipe, degrees, request.nproc),
        "world": request.world,
        "nproc": request.nproc,
        "nnodes": request.nnodes,
        "mesh": asdict(degrees),
        "seq_len": training.seq_len,
        "local_batch_size": training.local_batch_size,
        "accumulation": accumulation,
        "microbatch_size": recipe.pipeline.microbatch_size if degrees.pp > 1 else None,
        "global_batch_size": rows,
        "tokens_per_step": rows * training.seq_len,
        "steps": steps,
        "epochs": training.epochs,
        "tokens": None if steps is None else rows * training.seq_len * steps,
        "command": launch_command(plan, request),
    }


def _steps(plan: Plan, world: int) -> int | None:
    """Return the steps of the run; those of epochs are counted, which is None where the data are missing."""
    recipe = plan.loaded.recipe
    if recipe.training.epochs is None:
        return recipe.training.steps
    from titancli.worker.epochs import steps_of

    try:
        return steps_of(recipe, world, plan.checkpoint, allow_drift=plan.request.allow_drift)
    except TitanError:
        if plan.missing:
            return None
        raise


def _memory(recipe: Recipe, degrees: Degrees, nproc: int) -> dict[str, Any] | None:
    """Return the bytes that the ranks of this machine need at the peak of a step by `titan plan`'s estimate,
    those that there are, and whether the step fits; None for a model that cannot be estimated.

    On GPUs the bytes are those of one GPU, as far as tensors may use it.
    """
    import torch

    from titancli.planning.estimate import estimate

    gpu = torch.cuda.is_available()
    device = DEVICES["cpu"]
    if gpu:
        device = Device(
            torch.cuda.get_device_name(0), memory=torch.cuda.get_device_properties(0).total_memory
        )
    found = estimate(recipe, degrees, device)
    if found is None:
        return None
    if gpu and found.limit is not None:
        needed, there = found.worst.total, found.limit
    else:
        needed = found.worst.total * nproc
        there = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return {"needed_bytes": round(needed), "available_bytes": round(there), "fits": needed <= there}


def count_parameters(recipe: Recipe, degrees: Degrees) -> tuple[int, int, list[str]]:
    """Return the number of parameters of the model, tied ones once, the number on the rank that has the
    most, and their names."""
    from titancli.planning.blueprint import Blueprint
    from titancli.planning.memory import numbers_at_rest
    from titancli.planning.workload import workload

    blueprint = Blueprint(recipe, DEVICES["cpu"])
    work = workload(recipe, blueprint, degrees, DEVICES["cpu"])
    most = max(numbers_at_rest(work, rank) for rank in range(degrees.pp))
    return blueprint.size, round(most), [name for name, _ in blueprint.model.named_parameters()]


def launch_command(plan: Plan, request: LaunchRequest) -> str | None:
    """Return the command that starts this machine's workers; None if they run inside `titan`, or a plugin
    starts them."""
    launcher = plan.loaded.recipe.launcher
    if not isinstance(launcher, Local) or in_place(launcher, request):
        return None
    return shlex.join(torchrun_command(launcher, request))


def as_text(facts: dict[str, Any]) -> str:
    """Return the facts as text."""
    degrees = [f"{name} {degree}" for name, degree in facts["mesh"].items() if degree != 1]
    nodes = f"{facts['nnodes']} nodes x " if facts["nnodes"] > 1 else ""
    memory = facts["weights_and_gradients_bytes_per_rank"] / 2**30
    rows, times = facts["local_batch_size"], facts["accumulation"]
    if facts["microbatch_size"]:  # a pipeline takes all rows of a step at once, in smaller pieces
        rows, times = facts["microbatch_size"], rows * times // facts["microbatch_size"]
    length = f"{facts['steps']:,}" if facts["steps"] else "as many as the missing data give"
    length += "" if facts["epochs"] is None else f" ({facts['epochs']:g} epoch{'s' * (facts['epochs'] != 1)})"
    total = f", {facts['tokens']:,} tokens in total" if facts["steps"] else ""
    begin = Path(facts["checkpoint"]).name if facts["checkpoint"] else "the start"
    table = {
        "recipe": facts["recipe"],
        "run folder": f"{facts['run_folder']} ({'new' if facts['new'] else 'resumed'})",
        "model": f"{facts['model']}, {facts['parameters']:,} parameters",
        "ranks": f"{facts['world']} ({nodes}{facts['nproc']} on {'each node' if nodes else 'this machine'})",
        "mesh": ", ".join(degrees) or "one device",
        "memory": f"{memory:.2f} GiB per rank for weights and gradients{_fits(facts['memory'])}",
        "batch": f"{facts['global_batch_size']:,} rows x {facts['seq_len']:,} tokens = "
        f"{facts['tokens_per_step']:,} tokens per step",
        "": f"{rows} row{'s' * (rows > 1)} at a time per rank, {times} time{'s' * (times > 1)} per step",
        "steps": f"{length} from {begin}{total}",
        "started by": facts["command"] or "this process",
    }
    lines = [f"{label:<12}{text}" for label, text in table.items()]
    lines += [f"{'changed':<12}{change}" for change in facts["drift"]]
    lines += [f"{'note':<12}{note}" for note in facts["notes"]]
    return "\n".join(lines + [f"{'missing':<12}{file}" for file in facts["missing"]])


def _fits(memory: dict[str, Any] | None) -> str:
    if memory is None:
        return ""
    needed, there = (memory[f"{kind}_bytes"] / 2**30 for kind in ("needed", "available"))
    verdict = "fits" if memory["fits"] else "does not fit: `titan plan` proposes changes"
    return f"; a step needs about {needed:.2f} of {there:.1f} GiB here: it {verdict}"
