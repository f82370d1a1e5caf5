"""Writing quantized Hugging Face folders, as transformers and vLLM read them: block fp8, and gpt_oss' MXFP4.

`titancli.checkpoint.hf.stored` describes the formats. A value is rounded to the nearest one that its block
can hold, ties to even, and no block's scale is so small that its largest value is clipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from titancli.checkpoint.hf.stored import E2M1
from titancli.errors import TitanError, UsageError
from titancli.models.blocks.head import Output
from titancli.models.blocks.moe import Experts
from titancli.protocols import HFForm
from titancli.registry.component import build

Method = Literal["fp8", "mxfp4"]
BLOCK = 128
"""Rows and columns that share a scale, in fp8."""
E4M3_MAX, E2M1_MAX = 448.0, 6.0
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa"))
"""Matrices that vLLM fuses, which must therefore be quantized all or none."""
UNCONVERTED = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
"""The modules that gpt_oss' release lists as not quantized."""
ROWS = 32 * BLOCK
"""Number of rows that are quantized at a time."""


@dataclass(frozen=True)
class Quantise:
    """Which tensors of an exported folder are quantized, and how."""

    method: Method
    chosen: frozenset[str]
    """Hugging Face names of the quantized tensors."""
    table: Mapping[str, Any]
    """The `quantization_config` of config.json."""
    undivided: str | None = None
    """One of the chosen that transformers refuses to dequantize."""

    def out(self, tensors: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Return a form's tensors with the chosen ones quantized; on meta, only their shapes.

        Raises:
            TitanError: a value is NaN or infinite.
        """
        made: list[tuple[str, Tensor]] = []
        for name, tensor in tensors:
            if name not in self.chosen:
                made.append((name, tensor))
            elif self.method == "fp8":
                made += zip((name, f"{name}_scale_inv"), to_fp8(name, tensor), strict=True)
            else:
                made += zip((f"{name}_blocks", f"{name}_scales"), to_mxfp4(name, tensor), strict=True)
        return made


def quantisation(method: Method, model: Any, form: HFForm) -> Quantise:
    """Return which tensors of a model a method quantizes.

    fp8: all matrices of blocks except the router's and `eh_proj`. The last block of rows may be smaller, as
    in DeepSeek-V3, which has 576 rows in 5 blocks; matrices that readers would misread are left unquantized,
    see `_misread`.

    Raises:
        UsageError: transformers does not read the model quantized this way.
    """
    with torch.device("meta"):
        built = build(model, seq_len=1)
    if method == "mxfp4":
        return _mxfp4(built, form)
    wanted, others = _matrices(built, form)
    if stacked := [name for name, tensor in wanted.items() if tensor.ndim != 2]:
        raise UsageError(
            f"--quantise fp8: a {form.config_json()['model_type']} folder has its experts stacked "
            f"({stacked[0]}), of which transformers reads no block fp8",
            hint="use --quantise mxfp4" if form.config_json()["model_type"] == "gpt_oss" else None,
        )
    odd = {name for name, tensor in wanted.items() if _misread(name, *tensor.shape)}
    odd |= {name for name in wanted if any(other in odd for other in _siblings(name))}
    chosen = wanted.keys() - odd
    if not chosen:
        raise UsageError(f"--quantise fp8: no matrix of the model can be divided into blocks of {BLOCK}")
    left = sorted(name.removesuffix(".weight") for name in {*others, *odd})
    table = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [BLOCK, BLOCK],
        "activation_scheme": "dynamic",
        "modules_to_not_convert": left,
    }
    # Rows that are not divisible by the number of their blocks.
    unread = [name for name in sorted(chosen) if wanted[name].shape[0] % -(-wanted[name].shape[0] // BLOCK)]
    return Quantise("fp8", frozenset(chosen), table, next(iter(unread), None))


def _matrices(built: nn.Module, form: HFForm) -> tuple[dict[str, Tensor], list[str]]:
    """Return the matrices within the blocks, on meta by Hugging Face name, and names of other linear
    layers."""
    wanted: dict[str, Tensor] = {}
    others: list[str] = []
    for path, module in built.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            if isinstance(module, Experts) and parameter.ndim == 3:
                wanted |= dict(form.to_hf(f"{path}.{key}", parameter))
            elif isinstance(module, nn.Linear) and key == "weight":
                found = dict(form.to_hf(f"{path}.{key}", parameter))
                if isinstance(module, Output) or path.rpartition(".")[2] in ("gate", "router", "eh_proj"):
                    others += [name for name, tensor in found.items() if tensor.ndim == 2]
                else:
                    wanted |= found
    return wanted, others


def _misread(name: str, rows: int, columns: int) -> bool:
    """Return whether vLLM or transformers would misread the blocks of a matrix.

    vLLM divides input rows into whole blocks, and allows a smaller last one only in the last of the matrices
    that it fuses. transformers, which dequantizes if there is no kernel, divides rows evenly over the scales:
    192 rows in two blocks are silently treated as 96 per block; 576 in five are refused.
    """
    count = -(-rows // BLOCK)
    uneven = rows % BLOCK != 0
    joined = len(_siblings(name)) > 1 and _siblings(name)[-1] != name
    return columns % BLOCK != 0 or (uneven and (joined or (count > 1 and rows % count == 0)))


def _siblings(name: str) -> list[str]:
    """Return the matrices that are fused with this one, including itself; empty if there are none."""
    parent, _, own = name.removesuffix(".weight").rpartition(".")
    return [f"{parent}.{other}.weight" for group in TOGETHER if own in group for other in group]


def _mxfp4(built: nn.Module, form: HFForm) -> Quantise:
    kind = form.config_json()["model_type"]
    if kind != "gpt_oss":
        raise UsageError(
            f"--quantise mxfp4: transformers reads MXFP4 only for gpt_oss, and this model is a {kind}",
            hint="use --quantise fp8",
        )
    chosen: dict[str, Tensor] = {}
    for path, module in built.named_modules():
        if isinstance(module, Experts):
            for key, parameter in module.named_parameters(recurse=False):
                chosen |= dict(form.to_hf(f"{path}.{key}", parameter)) if parameter.ndim == 3 else {}
    for name, tensor in chosen.items():
        if tensor.shape[1] % 32:
            raise UsageError(
                f"--quantise mxfp4: {name} has {tensor.shape[1]} inputs, which is no multiple of 32"
            )
    table = {"quant_method": "mxfp4", "modules_to_not_convert": UNCONVERTED}
    return Quantise("mxfp4", frozenset(chosen), table)


# ----------------------------------------------------------------------------------------------- values


def to_fp8(name: str, tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return e4m3 values and the float32 scales of their blocks, of which the last may be smaller."""
    rows, columns = tensor.shape
    values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=tensor.device)
    scales = torch.empty(-(-rows // BLOCK), -(-columns // BLOCK), dtype=torch.float32, device=tensor.device)
    for start in range(0, 0 if tensor.is_meta else rows, BLOCK):
        x = pad(tensor[start : start + BLOCK].float(), (0, -columns % BLOCK)).unflatten(1, (-1, BLOCK))
        most = _finite(name, x.abs().amax((0, 2)))
        scale = torch.where(most > 0, most / E4M3_MAX, 1.0).clamp_(min=torch.finfo(torch.float32).tiny)
        scales[start // BLOCK] = scale
        x = (x / scale[:, None]).clamp_(-E4M3_MAX, E4M3_MAX)
        values[start : start + BLOCK] = x.flatten(1)[:, :columns].to(torch.float8_e4m3fn)
    return values, scales


_EDGES = [(low + high) / 2 for low, high in pairwise(E2M1)]


def to_mxfp4(name: str, tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return blocks [E, out, in / 32, 16] and scales [E, out, in / 32], both uint8, for a stack [E, in, out].

    A block's scale is the least power of two for which its largest scaled value is at most 6.
    """
    many, inner, outer = tensor.shape
    blocks = torch.empty(many, outer, inner // 32, 16, dtype=torch.uint8, device=tensor.device)
    scales = torch.empty(many, outer, inner // 32, dtype=torch.uint8, device=tensor.device)
    # Half-way values go to the even code: an edge below an odd code counts from just beyond it.
    edges = torch.tensor(_EDGES)
    edges[1::2] = edges[1::2].nextafter(torch.zeros(()))
    for expert in range(0 if tensor.is_meta else many):
        for start in range(0, outer, ROWS):
            x = tensor[expert, :, start : start + ROWS].t().float().contiguous()
            x = x.unflatten(1, (-1, 32))
            fraction, exponent = torch.frexp(_finite(name, x.abs().amax(-1)) / E2M1_MAX)
            exponent = (exponent - (fraction == 0.5).int()).clamp_(-127, 127)
            scales[expert, start : start + ROWS] = (exponent + 127).to(torch.uint8)
            x = torch.ldexp(x, -exponent[..., None])
            codes = torch.bucketize(x.abs(), edges, out_int32=True).to(torch.uint8)
            codes |= x.signbit().to(torch.uint8) << 3
            blocks[expert, start : start + ROWS] = codes[..., 0::2] | codes[..., 1::2] << 4
    return blocks, scales


def _finite(name: str, most: Tensor) -> Tensor:
    """Return the largest values of blocks, after checking that they are finite."""
    if not bool(most.isfinite().all()):
        raise TitanError(f"{name} holds a value that is NaN or infinite, and cannot be quantized")
    return most
