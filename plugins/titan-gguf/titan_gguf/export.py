"""A checkpoint as a GGUF file, tensor by tensor: memory grows with the largest tensor, not with the model."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_VERSION, MODEL_ARCH_NAMES, GGUFWriter
from torch import Tensor

from titan_gguf.families import Family, Names, family_of, made_tensors, part, write_sizes
from titan_gguf.mix import FILE_TYPES, Mix, Type, bytes_of, stored
from titan_gguf.newfile import new_file
from titan_gguf.tokens import Vocabulary
from titancli.errors import TitanError, UsageError
from titancli.protocols import HFForm

_FLOAT = np.dtype(np.float32)
ALIGNMENT = 32
EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"


@dataclass(frozen=True)
class Item:
    """A tensor of the file."""

    name: str
    shape: tuple[int, ...]
    kind: Type
    sources: tuple[str, ...]
    """The parameters that it is made of; none: it is made of the config."""


class Model:
    """A checkpoint's weights as the tensors of a GGUF file.

    Args:
        reader: the weights by our names, whole: what `open_weights` returns.
        form: the model's Hugging Face form.
        file: a key of `FILE_TYPES`.

    Raises:
        UsageError: the model cannot be written.
    """

    def __init__(self, reader: Any, form: HFForm, file: str) -> None:
        if form.library != "transformers" or form.loader is not None:
            raise UsageError("only language models can be written as GGUF", hint="export it with --to hf")
        self.reader, self.form, self.file = reader, form, file
        own = form.config_json()
        self.family: Family = family_of(own)
        self.config = _filled_in(own)
        self.names = Names(self.family, self.config["num_hidden_layers"])
        self.made: dict[str, Tensor] = dict(made_tensors(self.family, self.config))
        self._parts = lru_cache(maxsize=1)(self._parts_of)
        self.items = self._items()

    @property
    def rows(self) -> int:
        """Return how many tokens the embedding has."""
        return next(item.shape[0] for item in self.items if item.name == EMBEDDING)

    @property
    def nbytes(self) -> int:
        """Return how many bytes the tensors have in the file."""
        sizes = (bytes_of(item.kind, item.shape) for item in self.items)
        return sum(-size % ALIGNMENT + size for size in sizes)

    def read(self, item: Item) -> Tensor:
        """Return a tensor's values before they are stored."""
        if not item.sources:
            return self.made[item.name]
        parts = [found for name in item.sources for found in self._parts(name).get(item.name, ())]
        if len(parts) == 1 and parts[0][0] is None:
            return parts[0][1]
        return torch.stack([tensor for _, tensor in sorted(parts, key=lambda one: one[0] or 0)])

    def _parts_of(self, name: str) -> dict[str, list[tuple[int | None, Tensor]]]:
        """Return what a parameter becomes, by the names in the file; the last one read is kept, as it may be
        parts of several tensors."""
        return self._parted(name, self.reader.read(name))

    def _parted(self, name: str, tensor: Tensor) -> dict[str, list[tuple[int | None, Tensor]]]:
        found: dict[str, list[tuple[int | None, Tensor]]] = {}
        for hf_name, value in self.form.to_hf(name, tensor):
            for known, made in part(self.family, self.config, hf_name, value):
                place, expert = self.names.of(known)
                found.setdefault(place, []).append((expert, made))
        return found

    def _items(self) -> list[Item]:
        shapes: dict[str, tuple[int, ...]] = {}
        sources: dict[str, list[str]] = {}
        experts: dict[str, list[int]] = {}
        for name in sorted(self.reader.names(), key=_natural):
            empty = torch.empty(self.reader.shape(name), dtype=self.reader.dtype(name), device="meta")
            for place, parts in self._parted(name, empty).items():
                sources.setdefault(place, []).append(name)
                shapes[place] = tuple(parts[0][1].shape)
                experts.setdefault(place, []).extend(one for one, _ in parts if one is not None)
        for place, numbers in experts.items():
            if sorted(numbers) != list(range(len(numbers))) or (not numbers and len(sources[place]) > 1):
                raise TitanError(f"the parameters {' and '.join(sources[place])} would all become {place}")
            if numbers:
                shapes[place] = (len(numbers), *shapes[place])
        shapes |= {name: tuple(tensor.shape) for name, tensor in self.made.items()}
        count = self.config.get("num_local_experts") or self.config.get("num_experts") or 0
        mix = Mix(self.file, self.config["num_hidden_layers"], count, OUTPUT not in shapes)
        return [
            Item(name, shape, mix.type_of(name, shape), tuple(sources.get(name, ())))
            for name, shape in shapes.items()
        ]


def write_model(
    out: Path,
    model: Model,
    words: Vocabulary,
    *,
    progress: Callable[[str, int, int], None],
    say: Callable[[str], None],
    before_rename: Callable[[], None] = lambda: None,
) -> None:
    """Write a file, which appears when it is complete.

    Args:
        progress: called with a tensor's name, its number and how many there are.
        before_rename: called when everything is written; if it raises, nothing is left.

    Raises:
        EnvironmentProblem: `out` exists, or the disk refuses.
        TitanError: a value cannot be stored.
    """
    with new_file(out, model.nbytes, say=say) as hidden:
        writer = GGUFWriter(hidden, MODEL_ARCH_NAMES[model.family.arch])
        try:
            _metadata(writer, model, words, out.stem)
            for item in model.items:
                size = bytes_of(item.kind, item.shape)
                writer.add_tensor_info(item.name, item.shape, _FLOAT, size, raw_dtype=item.kind)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            _write_tensors(writer, model, progress)
        finally:
            writer.close()
        before_rename()


def _write_tensors(writer: GGUFWriter, model: Model, progress: Callable[[str, int, int], None]) -> None:
    assert writer.fout is not None
    (file,) = writer.fout
    for number, item in enumerate(model.items, 1):
        data = stored(item.name, model.read(item), item.kind)
        writer.write_padding(file, file.tell())
        file.write(data.data)  # not ndarray.tofile, whose errors do not say that the disk is full
        writer.write_padding(file, len(data))
        progress(item.name, number, len(model.items))
    writer.flush()


def _metadata(writer: GGUFWriter, model: Model, words: Vocabulary, name: str) -> None:
    writer.add_type("model")
    writer.add_name(name)
    writer.add_file_type(FILE_TYPES[model.file])
    writer.add_quantization_version(GGML_QUANT_VERSION)
    write_sizes(writer, model.family, model.config, model.rows)
    words.write(writer)


def _filled_in(own: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json with transformers' defaults for what it leaves out."""
    from transformers import AutoConfig

    found: dict[str, Any] = AutoConfig.for_model(**own).to_dict()
    return found


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts numbers within names by their value."""
    return [(int(word), "") if word.isdigit() else (-1, word) for word in re.split(r"(\d+)", name)]


def ends_of(texts: Mapping[str, Mapping[str, Any]]) -> list[int]:
    """Return the ids that end a text, by config.json and generation_config.json."""
    found: list[int] = []
    for text in texts.values():
        ends = text.get("eos_token_id")
        found += [one for one in (ends if isinstance(ends, list) else [ends]) if isinstance(one, int)]
    return list(dict.fromkeys(found))
