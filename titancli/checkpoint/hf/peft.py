"""Adapters in the `peft` library's format: a folder that `PeftModel.from_pretrained` loads unchanged."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from titancli.checkpoint.base import open_base, require_base
from titancli.checkpoint.format.disk import write_file
from titancli.checkpoint.format.manifest import adapter_record, is_checkpoint
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
from titancli.checkpoint.hf.config_match import vocabulary_in
from titancli.checkpoint.hf.detect_model import Say, find_checkpoint, hf_form, recipe_of
from titancli.checkpoint.hf.folder import cast_of, export_hf
from titancli.checkpoint.hf.peft_names import Adapter, beside_experts, config_of, placed
from titancli.checkpoint.reader import CheckpointReader
from titancli.converters.lora import adapter_names, magnitude_name, scale_of, weights_of
from titancli.errors import EnvironmentProblem, UsageError
from titancli.models.loss import of_loss

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


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

    Raises:
        TitanError: the checkpoint holds no adapters, the model has no Hugging Face form, or an adapted
            weight is not a single matrix of the same shape and order in that form.

    Returns:
        Lines for the user, and whether the comparison with peft passed, if there was one.
    """
    refuse_used(dst)
    folder = find_checkpoint(src, say)
    reader = CheckpointReader(folder, prefix="model.")
    record = adapter_record(reader.manifest)
    if record is None:
        raise UsageError(f"{folder} contains no adapters", hint="export a whole model with --to hf")
    base = require_base(record, folder)
    if left := reader.leave_out(of_loss):
        say(f"left out, since they are the loss's alone: {', '.join(left)}")
    model, _, _ = recipe_of(folder)
    _refuse_grown(base, model)
    if verify:
        refuse_incomparable(hf_form(model))
        if find_spec("peft") is None:
            raise EnvironmentProblem("--verify needs the package peft", hint="pip install peft")
    adapters = placed(model, weights_of(reader.names()))
    say(f"exporting {folder}")
    jobs = [_job(reader, weight, several, dtype) for weight, several in adapters.items()]
    everyone = [one for several in adapters.values() for one in several]
    if model.n_experts and (beside := beside_experts(everyone)):
        say(
            f"warning: in many models peft takes adapters of {beside[0]} and others beside experts for "
            f"adapters of the experts, and loads them wrongly: check with --verify, or merge with --to hf"
        )
    config = json.dumps(adapter_config(record, base, everyone), indent=2) + "\n"
    needed = sum(entry.nbytes for job in jobs for entry in job.entries) + len(config)
    with new_folder(dst, needed, say=say) as new:
        write_files(new, jobs, lambda number, count: WEIGHTS, limit=1 << 62, progress=progress)
        write_file(new / CONFIG, config.encode())
    dst = dst.absolute()
    lines, good = _verdict(model, reader, record, base, dst, dtype) if verify else ([], True)
    lines.append(f"PEFT folder: {dst}")
    if is_checkpoint(base):
        lines.append(
            f"the base is a titan checkpoint; export it with: titan convert-checkpoint {base} BASE --to hf"
        )
    lines.append(f"load it with: from peft import PeftModel; PeftModel.from_pretrained(base, {str(dst)!r})")
    return lines, good


def _refuse_grown(base: Path, model: Any) -> None:
    """
    Raises:
        UsageError: the model has a larger vocabulary than its base, whose new rows no folder of adapters has.
    """
    rows = vocabulary_in(base, model)
    if rows is not None and model.vocab_size is not None and rows < model.vocab_size:
        raise UsageError(
            f"the adapters are of a model with {model.vocab_size:,} tokens, but their base {base} has "
            f"{rows:,}: peft would not find the new rows",
            hint="merge the adapters instead: --to hf",
        )


def _verdict(
    model: Any,
    reader: CheckpointReader,
    record: dict[str, Any],
    base: Path,
    dst: Path,
    dtype: torch.dtype | None,
) -> tuple[list[str], bool]:
    """Compare our base with the adapters beside it to base and folder as loaded by transformers and peft."""
    tokens, scale = verify_tokens(model), scale_of(record)
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


def _job(reader: CheckpointReader, weight: str, adapters: list[Adapter], dtype: torch.dtype | None) -> Job:
    """Return the job that writes peft's tensors for the adapters of a weight."""
    magnitude = {magnitude_name(weight)}.intersection(reader.names())

    def made(read: Callable[[str], Tensor]) -> list[Tensor]:
        tensors = list(map(read, (*adapter_names(weight), *magnitude)))
        return [tensor for adapter in adapters for tensor in adapter.of(*tensors)]

    def empty(name: str) -> Tensor:
        return torch.empty(reader.shape(name), dtype=cast_of(reader.dtype(name), dtype), device="meta")

    keys = [key for adapter in adapters for key in adapter.keys[: 2 + len(magnitude)]]
    entries = tuple(
        Entry(key, dtype_name(key, tensor.dtype), tuple(tensor.shape))
        for key, tensor in zip(keys, made(empty), strict=True)
    )
    return Job(weight, entries, lambda: made(reader.read))


def adapter_config(record: dict[str, Any], base: Path, adapters: list[Adapter]) -> dict[str, Any]:
    """Return the contents of `adapter_config.json`."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": record["rank"],
        "lora_alpha": record["alpha"],
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": record["rslora"],
        "use_dora": record["dora"],
        "inference_mode": True,
        **config_of(adapters),
    }
