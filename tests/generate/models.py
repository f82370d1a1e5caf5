"""A small Llama 3 with random weights: in memory, in transformers, and on the disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM

from titancli.checkpoint import save_checkpoint
from titancli.models import Llama3, RopeScaling
from titancli.models.blocks.decoder import Decoder, build
from titancli.models.blocks.hf import DecoderHF
from titancli.recipe import load_recipe, lock_text
from titancli.registry import component

SMALL: dict[str, Any] = dict(dim=64, n_layers=2, n_heads=4, hidden_dim=96, vocab_size=128)
VARIANTS: dict[str, dict[str, Any]] = {
    "multi-head": {},
    "grouped": {"n_kv_heads": 2},
    "tied": {"tied": True, "n_kv_heads": 1},
    "scaled-rope": {
        "n_kv_heads": 2,
        "rope_theta": 10000.0,
        "rope_scaling": RopeScaling(
            factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=16
        ),
    },
}


def small(variant: str = "grouped") -> Decoder:
    """Weights are wide apart, so that what is most probable is clearly so."""
    model = build(Llama3(**SMALL, **VARIANTS[variant]), seq_len=64)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("norm.weight"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
    return model.eval()


def in_transformers(model: Decoder) -> LlamaForCausalLM:
    form = DecoderHF(model.config)
    theirs = LlamaForCausalLM(LlamaConfig.from_dict(form.config_json()))
    state = dict(pair for name, p in model.named_parameters() for pair in form.to_hf(name, p.detach()))
    theirs.load_state_dict(state, strict=False)  # a tied head has no tensor of its own
    theirs.tie_weights()
    return theirs.eval()


def feed(model: Any, cache: Any, rows: list[int], pieces: list[Any]) -> torch.Tensor:
    """Append tokens to rows of a cache; returns the logits of the last of each, [R, V]."""
    pieces = [torch.as_tensor(piece) for piece in pieces]
    call = cache.extend(rows, [len(piece) for piece in pieces], torch.device("cpu"))
    with torch.no_grad():
        return model(torch.cat(pieces)[None], cache=call)


def tokens(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(
        0, SMALL["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(seed)
    )


# ------------------------------------------------------------------------------------------- on the disk

RECIPE = ["model.dim=64", "model.n_layers=2", "model.n_heads=4", "model.n_kv_heads=2", "model.hidden_dim=96"]
"""Overrides that make llama3_debug small."""


def make_checkpoint(folder: Path, *overrides: str, seed: int = 0) -> None:
    """A checkpoint of llama3_debug, small and with random weights that are wide apart."""
    loaded = load_recipe("llama3_debug", [*RECIPE, "model.vocab_size=300", *overrides])
    model = component.build(loaded.recipe.model, seq_len=64)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("norm.weight"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
    tensors = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    save_checkpoint(folder, tensors, {}, lock_text=lock_text(loaded), run_id="run")


def make_tokenizer(folder: Path) -> Path:
    """A byte-level tokenizer with an end, and a beginning that it puts before a text, as Llama 3's does."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|begin|>", "<|end|>", "<|turn|>"])
    begin = tokenizer.token_to_id("<|begin|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", begin)]
    )
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    words = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(words))
    return folder
