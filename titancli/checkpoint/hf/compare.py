"""`convert-checkpoint --verify`: compare our logits with those of transformers or peft."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titancli.checkpoint.base import HFTensors, MergedReader
from titancli.checkpoint.format.tensors import Tensors
from titancli.checkpoint.hf.detect_model import hf_form
from titancli.checkpoint.hf.folder import cast_of
from titancli.checkpoint.hf.lazy_tensor import put
from titancli.checkpoint.hf.libraries import library_of
from titancli.checkpoint.hf.quantise import Quantise
from titancli.converters.lora import adapt, adapter_names, magnitude_name, weights_of
from titancli.errors import EnvironmentProblem, TitanError, UsageError
from titancli.files import read_json
from titancli.models.blocks.state import named_state
from titancli.models.config_json import kernels_of_the_hub
from titancli.models.quantization import Quantization, quantization_of
from titancli.protocols import HFForm
from titancli.registry.component import build

VERIFY_LIMIT = 1e-3
"""The largest difference of logits, relative to the largest logit, that passes."""
COMPARED = 64
"""Tokens at the end of a row whose logits are compared."""
LONGEST = {
    "sliding_window": 8192,
    "attention_chunk_size": 8192,
    "original_max_position_embeddings": 4096,
}
"""Keys of config.json with a length at which a model may begin to compute otherwise, and the longest such
length that rows are made for: longer ones take a CPU too much time and memory."""


def refuse_incomparable(form: Any, quantised: Quantise | None = None) -> None:
    """Refuse a form, quantised or not, that transformers does not load.

    Raises:
        UsageError: transformers does not load the folders that the form writes, quantised this way.
    """
    if quantised is not None and form.loader is not None:
        raise UsageError("--verify does not compare a quantized model with a head: leave one of them out")
    if (library := library_of(form).name) != "transformers":
        raise UsageError(f"--verify compares with transformers, but this model belongs to {library}")
    if quantised is not None and quantised.undivided is not None:
        raise UsageError(
            f"--verify: transformers cannot dequantize {quantised.undivided}, whose last block is smaller",
            hint="leave --verify out; vLLM, transformers' kernels for GPUs and titan read the folder",
        )


def verdict(
    model: Any,
    reader: Tensors,
    hf_folder: Path,
    dtype: torch.dtype | None,
    form: HFForm,
    *,
    exported: bool = True,
) -> tuple[list[str], bool]:
    """Return lines on how our logits differ from transformers', and whether the difference is small enough.

    Both run on the CPU in float32. For merged adapters the expected logits are computed with the adapters
    beside their base, not by the merge that is being verified.

    Args:
        reader: our weights, before rounding by an export or after rounding by an import.
        dtype: the dtype that floating-point weights were cast to; None: they kept theirs.
        form: that of the folder; of a head its numbers are compared in place of logits.
        exported: whether the folder was written from `reader`; if not, `reader` was imported from the folder.

    Raises:
        EnvironmentProblem: transformers cannot load the folder.
    """
    tokens = verify_tokens(model)
    theirs = load_in_transformers(hf_folder, loader=form.loader)
    if form.readout(reader) is not None:
        return verdict_on(_head_differences(model, reader, theirs, form, tokens, dtype))
    if _quantisation(hf_folder) is not None:
        found = _quantised_logit_pairs(model, reader, theirs, hf_folder, tokens, dtype, exported)
    elif exported:
        made = logits_of(theirs, tokens)
        del theirs
        found = _export_logit_pairs(model, reader, made, tokens, dtype)
    else:
        ours = _last_logits(model, reader, tokens)
        found = [(ours, logits_of(theirs, tokens))]
        if dtype is not None and _round(theirs, dtype):
            found.append((ours, logits_of(theirs, tokens)))
    lines, good = verdict_on(found)
    lines += [f"not compared, because rows would be too long: {one}" for one in _lengths(model)[1]]
    if any(not form.sources(name) and bool(reader.read(name).any()) for name in reader.names()):
        lines.append(
            "not compared, because a Hugging Face folder cannot hold them: the experts' balancing biases"
        )
    return lines, good


def _quantised_logit_pairs(
    model: Any,
    reader: Tensors,
    theirs: torch.nn.Module,
    folder: Path,
    tokens: Tensor,
    dtype: torch.dtype | None,
    exported: bool,
) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of logits for `verdict_on`. transformers multiplies values by scales in float32 while we
    read bfloat16, so both sides are compared once more as bfloat16; for an export, our side is then what was
    written."""
    if isinstance(reader, MergedReader):
        meant = logits_beside(model, reader.base, reader.adapters, reader.scale, tokens)
    else:
        meant = _last_logits(model, reader, tokens)
    found = [(logits_of(theirs, tokens), meant)]
    for rounding in (torch.bfloat16, *([] if dtype is None or exported else [dtype]), torch.bfloat16):
        _round(theirs, rounding)
    written = HFTensors(folder, model) if exported else reader
    ours = _last_logits(model, Rounded(written, torch.bfloat16), tokens)
    return [*found, (logits_of(theirs, tokens), ours)]


def _quantisation(folder: Path) -> Quantization | None:
    file = folder / "config.json"
    return quantization_of(read_json(file)) if file.is_file() else None


def _export_logit_pairs(
    model: Any, reader: Tensors, made: Tensor, tokens: Tensor, dtype: torch.dtype | None
) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of logits for `verdict_on`: transformers' logits of the export, and the expected ones;
    then, if the export rounded weights, a pair for each of its steps with equal rounding on both sides."""
    rounded = Rounded(reader, dtype)
    logits = _last_logits(model, rounded, tokens)
    if isinstance(reader, MergedReader):
        meant = logits_beside(model, reader.base, reader.adapters, reader.scale, tokens)
        steps = [(made, logits), (_last_logits(model, reader, tokens), meant)] if rounded.changed else []
        return [(made, meant), *steps]
    if rounded.changed:
        return [(made, _last_logits(model, reader, tokens)), (made, logits)]
    return [(made, logits)]


@torch.no_grad()
def _head_differences(
    model: Any, reader: Tensors, theirs: Any, form: HFForm, tokens: Tensor, dtype: torch.dtype | None
) -> list[tuple[Tensor, Tensor]]:
    """Return pairs for `verdict_on` of the numbers of a head, for rows of two lengths, one by one:
    classifiers look for padding in several."""
    padding = theirs.config.get_text_config().pad_token_id
    tokens[tokens == (-1 if padding is None else padding)] = 1 if padding != 1 else 0
    rows = [*tokens.flatten()[: 2 * COMPARED].view(8, 1, -1), *tokens.split(1)]
    made = torch.cat([logits_of(theirs, row).flatten() for row in rows])
    rounded = Rounded(reader, dtype)

    def ours(read: Tensors) -> Tensor:
        found = filled(model, read, tokens.shape[1])
        found.output = form.readout(read)
        return torch.cat([_end(found.float().eval()(tokens=row)).flatten() for row in rows])

    written = ours(rounded)
    return [(made, ours(reader)), (made, written)] if rounded.changed else [(made, written)]


def verdict_on(pairs: list[tuple[Tensor, Tensor]]) -> tuple[list[str], bool]:
    """Return lines for the user, and whether the logits are equal up to `VERIFY_LIMIT`.

    Args:
        pairs: actual and expected logits. Several pairs mean that the weights were rounded on the way:
            the first pair shows the effect of the rounding, and the others, with the same rounding on both
            sides, decide.
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
    """Return the largest difference, relative to the largest expected value."""
    return float((found - meant).abs().max() / meant.abs().max().clamp(min=1e-30))


class Rounded:
    """Tensors rounded as an export writes them; `changed` is then whether rounding changed any of them."""

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
    """Return random tokens of a model's vocabulary, [rows, tokens]; the same ones each time.

    One row that is longer than every window, chunk and original context of YaRN, up to `LONGEST`; without
    any, two short rows.
    """
    with torch.device("meta"):
        vocabulary = build(model, seq_len=1).output.weight.shape[0]
    longest = max(_lengths(model)[0], default=0)
    shape = (1, longest + COMPARED) if longest else (2, COMPARED)
    return torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(0))


def _lengths(model: Any) -> tuple[list[int], list[str]]:
    """Return the lengths that rows must exceed, see `LONGEST`, and in words those that are too long."""
    config = hf_form(model).config_json()
    limit, windows = config.get("max_position_embeddings"), config.get("use_sliding_window", True)
    found, beyond = list[int](), list[str]()
    for key, length in _named(config):
        if (isinstance(limit, int) and length >= limit) or (key == "sliding_window" and not windows):
            continue  # no row is so long, or no layer has a window
        if length <= LONGEST[key]:
            found.append(length)
        else:
            beyond.append(f"{key} = {length:,}")
    return found, list(dict.fromkeys(beyond))


def _named(table: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    kind = table.get("rope_type", table.get("type", "yarn"))
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _named(value)
        elif key in LONGEST and type(value) is int and value > 0 and kind == "yarn":
            yield key, value


@torch.no_grad()
def _round(model: torch.nn.Module, dtype: torch.dtype) -> bool:
    """Round parameters, but not buffers (which hold rotary frequencies); return whether any of them
    changed."""
    changed = False
    for parameter in model.parameters():
        rounded = parameter.to(dtype).to(parameter.dtype)
        changed |= not torch.equal(rounded, parameter)
        parameter.copy_(rounded)
    return changed


def _last_logits(model: Any, reader: Tensors, tokens: Tensor) -> Tensor:
    return _end(our_logits(model, reader, tokens))


def _end(logits: Tensor) -> Tensor:
    """Return the logits of the last tokens of rows, [B, S, V]; of a head with one result per row, all."""
    return logits[:, -COMPARED:].clone() if logits.ndim == 3 else logits


@torch.no_grad()
def our_logits(model: Any, reader: Tensors, tokens: Tensor) -> Tensor:
    """Return our logits in float32; parameters that a Hugging Face folder cannot hold have the values they
    would have after an import."""
    return filled(model, reader, tokens.shape[1]).float().eval()(tokens=tokens)


def filled(model: Any, reader: Tensors, seq_len: int) -> Any:
    """Return a model with the weights of a reader."""
    ours = build(model, seq_len=seq_len)
    form = hf_form(model)
    for name, tensor in named_state(ours):
        put(tensor, reader.read(name) if form.sources(name) else form.from_hf(name, []))
    return ours


@torch.no_grad()
def logits_beside(model: Any, base: Tensors, adapters: Tensors, scale: float, tokens: Tensor) -> Tensor:
    """Return the last logits in float32 of a base with adapters beside it, as in training."""
    ours = build(model, seq_len=tokens.shape[1]).float()
    form = hf_form(model)
    for name, tensor in named_state(ours):
        put(tensor, base.read(name) if form.sources(name) else form.from_hf(name, []))
    parameters = adapters.names()
    for weight in weights_of(parameters):
        rank, dora = adapters.shape(adapter_names(weight)[0])[-2], magnitude_name(weight) in parameters
        adapt(ours, weight, rank, scale, dora)
    live = dict(ours.named_parameters())
    for name in parameters:
        put(live[name], adapters.read(name))
    return _end(ours.eval()(tokens=tokens))


@torch.no_grad()
def logits_of(model: Any, tokens: Tensor) -> Tensor:
    """Return the last logits of a transformers model, or the hidden states of one that has none; of a head
    its numbers."""
    found = model.eval()(input_ids=tokens)
    return _end(found.logits if "logits" in found else found.last_hidden_state)


def _dequantised(folder: Path) -> dict[str, Any]:
    """Return arguments that make transformers dequantize weights, without loading kernels from the Hub."""
    how = _quantisation(folder)
    if how is None or how.method == "compressed-tensors":
        return {}
    from transformers import FineGrainedFP8Config, Mxfp4Config

    wanted: Any = Mxfp4Config if how.method == "mxfp4" else FineGrainedFP8Config
    return {"quantization_config": wanted(dequantize=True)}


def load_in_transformers(
    folder: Path, adapters: Path | None = None, *, loader: str | None = None
) -> torch.nn.Module:
    """Load a folder with transformers, in float32 on the CPU, and adapters with peft.

    `loader`: the class that loads it; None: AutoModelForCausalLM.

    Raises:
        EnvironmentProblem: it cannot be loaded, or its config.json names a kernel on the Hub, which is code.
    """
    file = folder / "config.json"
    for key, name in kernels_of_the_hub(read_json(file) if file.is_file() else {}):
        raise EnvironmentProblem(
            f"{file}: {key} = {name!r} names a kernel on the Hub, which is code that titan does not run",
            hint="remove the key",
        )
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # its imports warn of kernels that a CPU does not need
    try:
        import transformers
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        model = getattr(transformers, loader or "AutoModelForCausalLM").from_pretrained(
            folder,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            **_dequantised(folder),
        )
        model = model.float()  # dequantized weights are in bfloat16
        if adapters is None:
            return model
        from peft import PeftModel

        return PeftModel.from_pretrained(model, str(adapters))
    except TitanError:
        raise
    except Exception as error:  # whatever the error, the folder's contents caused it
        who = f"transformers cannot load {folder}" if adapters is None else f"peft cannot load {adapters}"
        raise EnvironmentProblem(f"{who}: {error}") from error
    finally:
        logging.disable(before)
