"""Tokenizer folders of bytes with special tokens and a chat template, as transformers saves them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

CHATML = (
    "{% if tools %}{{ '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}{% endif %}"
)
CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def byte_level(
    folder: Path,
    specials: Sequence[str],
    *,
    eos: str,
    bos: str | None = None,
    adds_bos: bool = False,
    template: str | None = None,
    ends: Sequence[str] = (),
    plain: Sequence[str] = (),
) -> Path:
    """Write a tokenizer of bytes.

    Args:
        adds_bos: the post-processor puts `bos` before a text.
        ends: tokens that generation_config.json names as ends; none: there is no such file.
        plain: added tokens that are not special.
    """
    folder.mkdir(parents=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in specials])
    made.add_tokens([AddedToken(name, special=False, normalized=False) for name in plain])
    if adds_bos:
        made.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, made.token_to_id(bos))]
        )
    made.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | ({"bos_token": bos} if bos else {})))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    if ends:
        ids = [made.token_to_id(name) for name in ends]
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return folder


def chatml(folder: Path, *, bos: str | None = None, adds_bos: bool = False, writes_bos: bool = False) -> Path:
    """Write a tokenizer with ChatML's template, whose end marker of a text is `<|endoftext|>`."""
    template = ("{{ bos_token }}" if writes_bos else "") + CHATML
    specials = (*CHATML_TOKENS, *([bos] if bos else []))
    return byte_level(folder, specials, eos="<|endoftext|>", bos=bos, adds_bos=adds_bos, template=template)
