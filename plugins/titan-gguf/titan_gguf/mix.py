"""Which type each tensor of a file has, and how its values are stored in it."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType
from gguf.quants import dequantize, quantize
from torch import Tensor

from titan_gguf.kquants import q4_k, q6_k
from titancli.errors import TitanError

Type = GGMLQuantizationType
FILE_TYPES = {
    "f32": LlamaFileType.ALL_F32,
    "f16": LlamaFileType.MOSTLY_F16,
    "bf16": LlamaFileType.MOSTLY_BF16,
    "q8_0": LlamaFileType.MOSTLY_Q8_0,
    "q6_k": LlamaFileType.MOSTLY_Q6_K,
    "q4_k_m": LlamaFileType.MOSTLY_Q4_K_M,
}
"""What `--type` may be, with the number that the file says of itself."""
PLAIN = {"f32": Type.F32, "f16": Type.F16, "bf16": Type.BF16, "q8_0": Type.Q8_0, "q6_k": Type.Q6_K}
TORCH = {Type.F32: torch.float32, Type.F16: torch.float16, Type.BF16: torch.bfloat16}
SMALLER_BLOCKS = {Type.Q4_K: Type.Q5_0, Type.Q6_K: Type.Q8_0}
"""For rows that are no whole number of super-blocks, what llama.cpp takes instead."""
CHUNK = 1 << 20
"""Values that are quantized at once."""


@dataclass(frozen=True)
class Mix:
    """Which type a tensor gets.

    Args:
        file: a key of `FILE_TYPES`.
        layers: how many layers the model has.
        experts: how many experts each layer has; 0: none.
        tied: whether the embedding is the output too.
    """

    file: str
    layers: int
    experts: int
    tied: bool

    def type_of(self, name: str, shape: tuple[int, ...]) -> Type:
        """Return the type of a tensor, by its name in GGUF."""
        if _whole(name, shape):
            return Type.F32
        wanted = PLAIN[self.file] if self.file in PLAIN else self._q4_k_m(name)
        for fallback in (wanted, SMALLER_BLOCKS.get(wanted, wanted)):
            if shape[-1] % GGML_QUANT_SIZES[fallback][0] == 0:
                return fallback
        return Type.F16

    def _q4_k_m(self, name: str) -> Type:
        """Return the type under the mix Q4_K_M of llama.cpp: Q6_K for the output, and for the values of
        attention and the down projections of every layer that loses most; Q4_K for the rest.

        Of models with eight experts, keys and values are Q8_0. Their attention's output is Q6_K (Q5_K there),
        and so are the values of models of 80 layers that have fewer of them than of queries.
        """
        if name == "output.weight" or (self.tied and name == "token_embd.weight"):
            return Type.Q6_K
        found = re.fullmatch(r"blk\.(\d+)\.(attn_v|attn_k|attn_output|ffn_down|ffn_down_exps)\.weight", name)
        if found is None:
            return Type.Q4_K
        layer, kind = int(found[1]), found[2]
        if self.experts == 8 and kind.startswith("attn_"):
            return Type.Q6_K if kind == "attn_output" else Type.Q8_0
        if kind in ("attn_v", "ffn_down", "ffn_down_exps"):
            eighth = self.layers // 8
            more = layer < eighth or layer >= 7 * self.layers // 8 or (layer - eighth) % 3 == 2
            return Type.Q6_K if more or (kind == "attn_v" and self.layers == 80) else Type.Q4_K
        return Type.Q4_K


def _whole(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor is kept in float32 whatever the type of the file."""
    small = len(shape) < 2 or not name.endswith(".weight")
    return small or name.endswith(("_norm.weight", "ffn_gate_inp.weight"))


def bytes_of(kind: Type, shape: tuple[int, ...]) -> int:
    """Return the size of a stored tensor."""
    block, size = GGML_QUANT_SIZES[kind]
    return int(np.prod(shape, dtype=np.int64)) // block * size


def stored(name: str, tensor: Tensor, kind: Type) -> np.ndarray:
    """Return a tensor's bytes: uint8 [bytes].

    Raises:
        TitanError: a value is not finite, or too large for the type.
    """
    flat = tensor.detach().reshape(-1, tensor.shape[-1])
    out = np.empty(bytes_of(kind, tuple(tensor.shape)), np.uint8)
    rows = max(1, CHUNK // flat.shape[-1])
    done = 0
    for first in range(0, len(flat), rows):
        data = _encoded(name, flat[first : first + rows].float(), kind)
        out[done : done + len(data)] = data
        done += len(data)
    return out


def _encoded(name: str, values: Tensor, kind: Type) -> np.ndarray:
    if not bool(values.isfinite().all()):
        raise TitanError(f"{name} has values that are not finite", hint="use another checkpoint of the run")
    if kind in (Type.Q4_K, Type.Q6_K):
        data = (q4_k if kind == Type.Q4_K else q6_k)(values).numpy()
    elif kind in TORCH:
        cast = values.to(TORCH[kind])
        if not bool(cast.isfinite().all()):
            raise TitanError(
                f"{name} has values up to {values.abs().max():.3g}, which {kind.name} cannot represent",
                hint="use --type bf16, or f32",
            )
        data = cast.contiguous().view(torch.uint8).numpy()
    else:
        data = quantize(values.numpy(), kind)
    return data.reshape(-1).view(np.uint8)


def values_of(data: np.ndarray, kind: Type, shape: tuple[int, ...]) -> Tensor:
    """Return the values of a stored tensor in float32, by the gguf package's reading of its bytes."""
    rows = np.asarray(data).view(np.uint8).reshape(*shape[:-1], -1)
    return torch.from_numpy(dequantize(rows, kind).reshape(shape).astype(np.float32, copy=True))


def limit_of(values: Tensor, kind: Type) -> Tensor:
    """Return the largest error that a type may have, for each value of rows [R, C].

    Exact for F32; half a unit in the last place for F16 and BF16. In blocks it is a share of the span of the
    block, or super-block, that the value is in, plus what float16 scales lose of very small values.
    """
    if kind == Type.F32:
        return torch.zeros_like(values)
    if kind in TORCH:
        return values.abs() * torch.finfo(TORCH[kind]).eps / 2 + 2.0**-25
    share, tiny = {
        Type.Q8_0: (1 / 200, 2.0**-17),
        Type.Q5_0: (1 / 14, 2.0**-19),
        Type.Q6_K: (1 / 20, 2.0**-12),
        Type.Q4_K: (1 / 7, 2.0**-13),
    }[kind]
    block = GGML_QUANT_SIZES[kind][0]
    blocks = values.reshape(-1, block)
    span = blocks.amax(1).clamp(min=0) - blocks.amin(1).clamp(max=0)
    return (span * share + tiny)[:, None].expand(-1, block).reshape(values.shape)
