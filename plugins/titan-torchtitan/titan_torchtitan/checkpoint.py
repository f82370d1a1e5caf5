"""Translation of torchtitan's `[checkpoint]` fields that depend on each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from titancli.recipe.check import PARTS, TORCHTITAN

if TYPE_CHECKING:
    from titan_torchtitan.job import Job
    from titancli.registry.lookup import Registry

OFF = "no effect: checkpoint.enable is false"
WANTS_ENABLE = ("exclude_from_loading", "enable_first_step_checkpoint", "create_seed_checkpoint", "load_only")
EXPORTS = ("last_save_model_only", "last_save_in_hf", "export_dtype")


def checkpoint(job: Job, registry: Registry) -> None:
    if not job.value("checkpoint.enable"):
        for name in (*WANTS_ENABLE, *EXPORTS):
            if job.written(f"checkpoint.{name}"):
                job.lose(f"checkpoint.{name}", OFF)
        return
    _left_out(job)
    if job.value("checkpoint.load_only"):
        job.put("checkpoint.enable", False)
        job.change(
            "checkpoint.load_only",
            "checkpoint.enable = false: nothing is saved, but checkpoints can be loaded",
        )
        for name in ("enable_first_step_checkpoint", "create_seed_checkpoint", *EXPORTS):
            if job.written(f"checkpoint.{name}"):
                job.lose(f"checkpoint.{name}", "no effect: load_only saves nothing")
        return
    job.take("checkpoint.load_only")
    for name in ("enable_first_step_checkpoint", "create_seed_checkpoint"):
        if job.written(f"checkpoint.{name}"):
            job.put(f"checkpoint.{name}", job.value(f"checkpoint.{name}"), f"checkpoint.{name}")
    _exports(job)


def _left_out(job: Job) -> None:
    """Translate the excluded parts to titan's names; torchtitan also accepts them as one string."""
    value = job.value("checkpoint.exclude_from_loading")
    names = value.split(",") if isinstance(value, str) else value
    names = [TORCHTITAN.get(name.strip(), name.strip()) for name in names if name.strip()]
    if unknown := [name for name in names if name not in PARTS]:
        why = (
            f"a titan checkpoint has no part {unknown[0]!r}; its parts are {', '.join(PARTS)}, and "
            f"tensors by name"
        )
        job.lose("checkpoint.exclude_from_loading", why)
    elif names:
        job.put("checkpoint.exclude_from_loading", names, "checkpoint.exclude_from_loading")
    else:
        job.take("checkpoint.exclude_from_loading")


def _exports(job: Job) -> None:
    """Translate the export of the last checkpoint: torchtitan saves only weights there, titan saves them
    next to it."""
    weights, in_hf, dtype = (job.value(f"checkpoint.{name}") for name in EXPORTS)
    reason = "saved next to the last checkpoint, which holds the whole state like every other one"
    if not job.written("checkpoint.last_save_model_only") and not in_hf:
        job.lose("checkpoint.last_save_model_only", "the last checkpoint holds the whole state like "
                                                    "every other one; last_save_model_only = true saves "
                                                    "the weights next to it")  # fmt: skip
        weights = False
    elif weights and not in_hf:
        job.put("checkpoint.last_save_model_only", True)
        job.change("checkpoint.last_save_model_only", reason)
    else:
        job.take("checkpoint.last_save_model_only")
    if in_hf:
        job.put("checkpoint.last_save_in_hf", True)
        job.change("checkpoint.last_save_in_hf", reason)
    else:
        job.take("checkpoint.last_save_in_hf")
    if not job.written("checkpoint.export_dtype"):
        return
    if weights or in_hf:
        job.put("checkpoint.export_dtype", dtype, "checkpoint.export_dtype")
    elif dtype == "float32":
        job.take("checkpoint.export_dtype")
    else:
        job.lose("checkpoint.export_dtype", "no effect: the weights are not saved separately")
