"""Print the table of types in titan-gguf's README: bytes per weight and errors, beside llama.cpp's.

    python benchmarks/gguf_errors.py

llama.cpp's are printed if TITAN_LLAMACPP names a Python that has llama-cpp-python.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader, GGUFWriter
from gguf.quants import dequantize

from titan_gguf.mix import bytes_of, stored, values_of

ROWS, COLUMNS = 1024, 1024
KINDS = {
    "f32": (Type.F32, "float32", 0),
    "f16": (Type.F16, "float16", 1),
    "bf16": (Type.BF16, "bfloat16", 32),
    "q8_0": (Type.Q8_0, "Q8_0", 7),
    "q6_k": (Type.Q6_K, "Q6_K", 18),
    "q4_k_m": (Type.Q4_K, "Q4_K and Q6_K; this row: Q4_K", 14),
}
"""With llama.cpp's number of the file type, of Q4_K alone that of Q4_K_S."""
QUANTIZE = """
import ctypes, sys
import llama_cpp
options = llama_cpp.llama_model_quantize_default_params()
options.ftype, options.pure, options.nthread = int(sys.argv[3]), True, 1
sys.exit(llama_cpp.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), ctypes.byref(options)))
"""


def theirs(x: torch.Tensor, kind: int) -> torch.Tensor:
    """Values that llama.cpp has quantized: as a matrix of a model that has no other."""
    with tempfile.TemporaryDirectory() as own:
        plain, made = Path(own) / "plain.gguf", Path(own) / "made.gguf"
        writer = GGUFWriter(plain, "llama")
        writer.add_block_count(1)
        writer.add_context_length(64)
        writer.add_embedding_length(COLUMNS)
        writer.add_feed_forward_length(ROWS)
        writer.add_head_count(1)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_tensor("blk.0.ffn_up.weight", x.numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        words = [os.environ["TITAN_LLAMACPP"], "-c", QUANTIZE, str(plain), str(made), str(kind)]
        subprocess.run(words, check=True, capture_output=True)
        (tensor,) = GGUFReader(made).tensors
        return torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type))).view_as(x)


def main() -> None:
    x = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1)) * 0.02
    for name, (kind, words, number) in KINDS.items():
        size = bytes_of(kind, (ROWS, COLUMNS)) / x.numel()
        ours = values_of(stored("x", x, kind), kind, (ROWS, COLUMNS)) - x
        other = ""
        if number > 1 and number != 32 and "TITAN_LLAMACPP" in os.environ:
            other = f"{float((theirs(x, number) - x).norm() / x.norm()):.3g}"
        print(f"| `{name}` | {words} | {size:.4g} | {float(ours.norm() / x.norm()):.3g} | {other} |")


if __name__ == "__main__":
    sys.exit(main())
