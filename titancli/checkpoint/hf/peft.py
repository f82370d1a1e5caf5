"""Adapters in the form of the `peft` library: a folder that `PeftModel.from_pretrained` loads as it is."""

from __future__ import annotations

import json
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from titancli.checkpoint.base import open_base, require_base
from titancli.checkpoint.format.disk import write_file
from titancli.checkpoint.format.manifest import adapters_of, is_checkpoint
from titancli.checkpoint.format.newfolder import new_folder, refuse_used
from titancli.checkpoint.format.stream import Job, Progress, no_progress, write_files
from titancli.checkpoint.format.tensorfile import Entry
from titancli.checkpoint.format.tensors import dtype_name
from titancli.checkpoint.hf.compare import (
    Rounded,
    load_in_transformers,
    logits_beside,
    logits_of,
    refuse_incomparable,
    verdict_on,
    verify_tokens,
)
from titancli.checkpoint.hf.folder import cast_of, export_hf
from titancli.checkpoint.hf.which import Say, find_checkpoint, hf_form, parameter_shapes, recipe_of
from titancli.checkpoint.load import CheckpointReader
from titancli.converters.lora import OWN
from titancli.errors import EnvironmentProblem, TitanError, UsageError

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
ENDS = dict(zip(OWN, ("lora_A.weight", "lora_B.weight"), strict=True))


def to_peft(
    src: Path,
    dst: Path,
    *,
    dtype: torch.dtype | None = None,
    verify: bool = False,
    progress: Progress = no_progress,
    say: Say,
) -> tuple[list[str], bool]:
    """Write the adapters of a checkpoint, or of a run's newest good one.

    Returns:
        Lines for the user, and whether it passed the comparison with peft, if there was one.

    Raises:
        TitanError: it holds no adapters, the model has no Hugging Face form, or one in which an adapted
            weight is not one matrix of the same shape and order.
    """
    refuse_used(dst)
    folder = find_checkpoint(src, say)
    reader = CheckpointReader(folder, prefix="model.")
    told = adapters_of(reader.manifest)
    if told is None:
        raise UsageError(f"{folder} contains no adapters", hint="export a whole model with --to hf")
    base = require_base(told, folder)
    model, _ = recipe_of(folder)
    if verify:
        refuse_incomparable(hf_form(model))
        if find_spec("peft") is None:
            raise EnvironmentProblem("--verify needs the package peft", hint="pip install peft")
    modules = hf_modules(
        model, [name.removesuffix(OWN[0]) for name in reader.names() if name.endswith(OWN[0])]
    )
    say(f"exporting {folder}")
    jobs = [
        _job(reader, f"{ours}{end}", f"base_model.model.{theirs}.{ENDS[end]}", dtype)
        for ours, theirs in modules.items()
        for end in OWN
    ]
    config = json.dumps(adapter_config(told, base, sorted(modules.values())), indent=2) + "\n"
    needed = sum(entry.nbytes for job in jobs for entry in job.entries) + len(config)
    with new_folder(dst, needed, say=say) as new:
        write_files(new, jobs, lambda number, count: WEIGHTS, limit=1 << 62, progress=progress)
        write_file(new / CONFIG, config.encode())
    dst = dst.absolute()
    lines, good = _verdict(model, reader, told, base, dst, dtype) if verify else ([], True)
    lines.append(f"PEFT folder: {dst}")
    if is_checkpoint(base):
        lines.append(
            f"the base is a titan checkpoint; export it with: titan convert-checkpoint {base} BASE --to hf"
        )
    lines.append(f"load it with: from peft import PeftModel; PeftModel.from_pretrained(base, {str(dst)!r})")
    return lines, good


def _verdict(
    model: Any,
    reader: CheckpointReader,
    told: dict[str, Any],
    base: Path,
    dst: Path,
    dtype: torch.dtype | None,
) -> tuple[list[str], bool]:
    """Our base with the adapters beside it, against what transformers and peft make of base and folder."""
    tokens, scale = verify_tokens(model), told["alpha"] / told["rank"]
    weights = open_base(base, model, verify="size")
    with TemporaryDirectory(prefix=f".{dst.name}.base-", dir=dst.parent) as folder:
        if is_checkpoint(base):
            base = Path(folder) / "hf"
            export_hf(weights, hf_form(model), {}, base)
        made = logits_of(load_in_transformers(base, dst), tokens)
    pairs = [(made, logits_beside(model, weights, reader, scale, tokens))]
    rounded = Rounded(reader, dtype)
    logits = logits_beside(model, weights, rounded, scale, tokens)
    return verdict_on([*pairs, (made, logits)] if rounded.changed else pairs)


def _job(reader: CheckpointReader, ours: str, theirs: str, dtype: torch.dtype | None) -> Job:
    entry = Entry(theirs, dtype_name(ours, cast_of(reader.dtype(ours), dtype)), reader.shape(ours))

    def read(name: str) -> list[Tensor]:
        return [reader.read(name)]

    return Job(ours, (entry,), partial(read, ours))


def hf_modules(model: Any, layers: list[str]) -> dict[str, str]:
    """What Hugging Face calls our linear layers.

    Raises:
        TitanError: the form makes something else of a weight than the same matrix under another name.
    """
    form, shapes, found = hf_form(model), parameter_shapes(model), {}
    for layer in layers:
        name = f"{layer}.weight"
        probe = torch.arange(float(torch.Size(shapes[name]).numel())).view(shapes[name])
        made = list(form.to_hf(name, probe))
        if len(made) != 1 or made[0][1].shape != probe.shape or not torch.equal(made[0][1], probe):
            raise TitanError(
                f"{name} is stored differently in the model's Hugging Face form, so its adapter cannot "
                f"be exported",
                hint="merge the adapters instead: --to hf",
            )
        found[layer] = made[0][0].removesuffix(".weight")
    return found


def adapter_config(told: dict[str, Any], base: Path, modules: list[str]) -> dict[str, Any]:
    """`adapter_config.json`."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": told["rank"],
        "lora_alpha": told["alpha"],
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "inference_mode": True,
        "target_modules": modules,
    }
