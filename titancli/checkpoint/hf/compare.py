"""`convert-checkpoint --verify`: whether our logits are transformers', or peft's."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titancli.checkpoint.base import HFTensors, MergedReader
from titancli.checkpoint.format.tensors import Tensors
from titancli.checkpoint.hf.folder import cast_of
from titancli.checkpoint.hf.libraries import library_of
from titancli.checkpoint.hf.quantise import Quantise
from titancli.checkpoint.hf.virtual import put
from titancli.checkpoint.hf.which import hf_form
from titancli.converters.lora import adapt, adapters_of, weights_of
from titancli.errors import EnvironmentProblem, TitanError, UsageError
from titancli.models.blocks.state import named_state
from titancli.models.config_json import kernels_of_the_hub
from titancli.models.quantization import Quantization, quantization_of
from titancli.registry.component import build

VERIFY_LIMIT = 1e-3
"""The largest difference of logits, relative to the largest logit, that passes."""
VERIFY_SHAPE = (2, 64)
"""Rows and tokens that the logits are compared on."""


def refuse_incomparable(form: Any, quantised: Quantise | None = None) -> None:
    """
    Raises:
        UsageError: transformers does not load what the form writes, quantised so.
    """
    if (library := library_of(form).name) != "transformers":
        raise UsageError(f"--verify compares with transformers, but this model belongs to {library}")
    if quantised is not None and quantised.undivided is not None:
        raise UsageError(
            f"--verify: transformers cannot dequantize {quantised.undivided}, whose last block is smaller",
            hint="leave --verify out; vLLM, transformers' kernels for GPUs and titan read the folder",
        )


def verdict(
    model: Any, reader: Tensors, hf_folder: Path, dtype: torch.dtype | None, *, exported: bool = True
) -> tuple[list[str], bool]:
    """Lines on how our logits differ from transformers', and whether that is little enough.

    Both run on the CPU in float32. What a reader of merged adapters stands for is computed with the adapters
    beside their base, not by the merge that is being verified.

    Args:
        reader: our weights, before an export rounded them or after an import did.
        dtype: what floating-point weights were cast to on the way; None: each one's own.
        exported: whether the folder was written from `reader`; else `reader` is of what was written from it.

    Raises:
        EnvironmentProblem: transformers cannot load the folder.
    """
    form = hf_form(model)
    tokens = verify_tokens(model)
    theirs = load_in_transformers(hf_folder)
    if _quantisation(hf_folder) is not None:
        found = _quantised_differences(model, reader, theirs, hf_folder, tokens, dtype, exported)
    elif exported:
        made = logits_of(theirs, tokens)
        del theirs
        found = _export_differences(model, reader, made, tokens, dtype)
    else:
        ours = our_logits(model, reader, tokens)
        found = [(ours, logits_of(theirs, tokens))]
        if dtype is not None and _round(theirs, dtype):
            found.append((ours, logits_of(theirs, tokens)))
    lines, good = verdict_on(found)
    if any(not form.sources(name) and bool(reader.read(name).any()) for name in reader.names()):
        lines.append(
            "not compared, because a Hugging Face folder cannot hold them: the experts' balancing biases"
        )
    return lines, good


def _quantised_differences(
    model: Any,
    reader: Tensors,
    theirs: torch.nn.Module,
    folder: Path,
    tokens: Tensor,
    dtype: torch.dtype | None,
    exported: bool,
) -> list[tuple[Tensor, Tensor]]:
    """See `verdict_on`: transformers multiplies values by scales in float32, and what is read here is
    bfloat16, so both sides are compared once more as bfloat16. Of an export, that is what was written."""
    if isinstance(reader, MergedReader):
        meant = logits_beside(model, reader.base, reader.adapters, reader.scale, tokens)
    else:
        meant = our_logits(model, reader, tokens)
    found = [(logits_of(theirs, tokens), meant)]
    for rounding in (torch.bfloat16, *([] if dtype is None or exported else [dtype]), torch.bfloat16):
        _round(theirs, rounding)
    written = HFTensors(folder, model) if exported else reader
    ours = our_logits(model, Rounded(written, torch.bfloat16), tokens)
    return [*found, (logits_of(theirs, tokens), ours)]


def _quantisation(folder: Path) -> Quantization | None:
    file = folder / "config.json"
    return quantization_of(json.loads(file.read_bytes())) if file.is_file() else None


def _export_differences(
    model: Any, reader: Tensors, made: Tensor, tokens: Tensor, dtype: torch.dtype | None
) -> list[tuple[Tensor, Tensor]]:
    """See `verdict_on`: what transformers made of the export, and what the reader stands for; then, if the
    export rounded something, both sides of each of its steps alone."""
    rounded = Rounded(reader, dtype)
    logits = our_logits(model, rounded, tokens)
    if isinstance(reader, MergedReader):
        meant = logits_beside(model, reader.base, reader.adapters, reader.scale, tokens)
        steps = [(made, logits), (our_logits(model, reader, tokens), meant)] if rounded.changed else []
        return [(made, meant), *steps]
    if rounded.changed:
        return [(made, our_logits(model, reader, tokens)), (made, logits)]
    return [(made, logits)]


def verdict_on(pairs: list[tuple[Tensor, Tensor]]) -> tuple[list[str], bool]:
    """Lines for the user, and whether the logits are equal up to `VERIFY_LIMIT`.

    Args:
        pairs: logits that were found and those that were meant. If there are more pairs than one, the weights
            were rounded on the way: the first pair tells how far that goes, and the others, which have the
            same rounding on both sides, decide.
    """
    absolute = float((pairs[0][0] - pairs[0][1]).abs().max())
    lines = [
        f"largest difference between logits: {absolute:.3g} absolute, {far(*pairs[0]):.3g} of the "
        f"largest logit"
    ]
    left = [far(*pair) for pair in pairs[1:] or pairs]
    if pairs[1:]:
        words = " and ".join(f"{value:.3g}" for value in left)
        lines.append(f"not counting the rounding of weights: {words} of the largest logit")
    good = all(value <= VERIFY_LIMIT for value in left)  # NaN is not
    lines.append(f"verified: {'yes, at most' if good else 'NO, more than'} {VERIFY_LIMIT:g}")
    return lines, good


def far(found: Tensor, meant: Tensor) -> float:
    """The largest difference, relative to the largest of what was meant."""
    return float((found - meant).abs().max() / meant.abs().max().clamp(min=1e-30))


class Rounded:
    """Tensors as an export writes them; afterwards `changed` is whether one of them is another for it."""

    def __init__(self, reader: Tensors, dtype: torch.dtype | None) -> None:
        self._reader, self._dtype = reader, dtype
        self.changed = False

    def names(self) -> list[str]:
        return self._reader.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._reader.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return cast_of(self._reader.dtype(name), self._dtype)

    def read(self, name: str) -> Tensor:
        value = self._reader.read(name)
        rounded = value.to(self.dtype(name))
        self.changed |= rounded.dtype != value.dtype and not torch.equal(rounded.to(value.dtype), value)
        return rounded


def verify_tokens(model: Any) -> Tensor:
    """Random tokens of a model's vocabulary, `VERIFY_SHAPE`; the same ones each time."""
    with torch.device("meta"):
        vocabulary = build(model, seq_len=1).output.weight.shape[0]
    return torch.randint(0, vocabulary, VERIFY_SHAPE, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def _round(model: torch.nn.Module, dtype: torch.dtype) -> bool:
    """Round parameters, not buffers (which hold rotary frequencies); whether one of them changed."""
    changed = False
    for parameter in model.parameters():
        rounded = parameter.to(dtype).to(parameter.dtype)
        changed |= not torch.equal(rounded, parameter)
        parameter.copy_(rounded)
    return changed


@torch.no_grad()
def our_logits(model: Any, reader: Tensors, tokens: Tensor) -> Tensor:
    """In float32; what a Hugging Face folder has no place for is as it would come back out of one."""
    ours = build(model, seq_len=tokens.shape[1])
    form = hf_form(model)
    for name, tensor in named_state(ours):
        put(tensor, reader.read(name) if form.sources(name) else form.from_hf(name, []))
    return ours.float().eval()(tokens=tokens)


@torch.no_grad()
def logits_beside(model: Any, base: Tensors, adapters: Tensors, scale: float, tokens: Tensor) -> Tensor:
    """Of a base with adapters beside it, as they were trained, in float32."""
    ours = build(model, seq_len=tokens.shape[1]).float()
    form = hf_form(model)
    for name, tensor in named_state(ours):
        put(tensor, base.read(name) if form.sources(name) else form.from_hf(name, []))
    parameters = adapters.names()
    for weight in weights_of(parameters):
        adapt(ours, weight, adapters.shape(adapters_of(weight)[0])[-2], scale)
    live = dict(ours.named_parameters())
    for name in parameters:
        put(live[name], adapters.read(name))
    return ours.eval()(tokens=tokens)


@torch.no_grad()
def logits_of(model: Any, tokens: Tensor) -> Tensor:
    """Of a model of transformers."""
    return model.eval()(input_ids=tokens).logits


def _dequantised(folder: Path) -> dict[str, Any]:
    """Arguments by which transformers unpacks quantized weights, and asks the Hub for no kernels for them."""
    how = _quantisation(folder)
    if how is None or how.method == "compressed-tensors":
        return {}
    from transformers import FineGrainedFP8Config, Mxfp4Config

    wanted: Any = Mxfp4Config if how.method == "mxfp4" else FineGrainedFP8Config
    return {"quantization_config": wanted(dequantize=True)}


def load_in_transformers(folder: Path, adapters: Path | None = None) -> torch.nn.Module:
    """The folder as transformers loads it, in float32 on the CPU; with adapters as peft loads those.

    Raises:
        EnvironmentProblem: it cannot, or its config.json names a kernel on the Hub, which is code.
    """
    file = folder / "config.json"
    for key, name in kernels_of_the_hub(json.loads(file.read_bytes()) if file.is_file() else {}):
        raise EnvironmentProblem(
            f"{file}: {key} = {name!r} names a kernel on the Hub, which is code that titan does not run",
            hint="remove the key",
        )
    before = logging.root.manager.disable
    logging.disable(
        logging.WARNING
    )  # what it imports along the way warns of kernels that a CPU does not need
    try:
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            **_dequantised(folder),
        )
        model = model.float()  # what was quantized is in bfloat16
        if adapters is None:
            return model
        from peft import PeftModel

        return PeftModel.from_pretrained(model, str(adapters))
    except TitanError:
        raise
    except Exception as error:  # whatever it is, it is of what stands in the folder
        who = f"transformers cannot load {folder}" if adapters is None else f"peft cannot load {adapters}"
        raise EnvironmentProblem(f"{who}: {error}") from error
    finally:
        logging.disable(before)
