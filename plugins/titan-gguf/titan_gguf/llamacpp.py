"""Runs a GGUF file with llama.cpp, by the package llama-cpp-python: `python llamacpp.py ASKED.json TOLD.npz`.

It is started by a Python that has that package and need not have titan: it imports nothing of titan's.
"""

from __future__ import annotations

import json
import sys


def main(asked: str, told: str) -> None:
    """Compute what `titan_gguf.verify.run_llamacpp` returns."""
    import llama_cpp
    import numpy as np

    with open(asked, encoding="utf-8") as file:
        what = json.load(file)
    tokens = what["tokens"]
    model = llama_cpp.Llama(
        what["model"],
        n_ctx=max(64, 2 * len(tokens)),
        n_batch=max(64, len(tokens)),
        n_threads=1,
        n_threads_batch=1,
        n_gpu_layers=0,
        logits_all=True,
        type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
        flash_attn=False,
        verbose=True,  # its messages say why a file cannot be loaded
    )
    model.eval(tokens)
    logits = np.array(model.scores[: len(tokens)], dtype=np.float32)
    texts = [model.tokenize(text.encode(), add_bos=False, special=False) for text in what.get("texts") or ()]
    np.savez(told, logits=logits, texts=np.array(json.dumps(texts)))


if __name__ == "__main__":
    main(*sys.argv[1:])
