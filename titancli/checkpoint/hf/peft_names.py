"""Names and shapes of our adapters in the `peft` library.

Those of a linear layer are `NAME.lora_A.weight` [rank, in] and `NAME.lora_B.weight` [out, rank] (of an
embedding `lora_embedding_A` [rank, words], `lora_embedding_B` [width, rank]), and likewise
those of a single expert, in folders that store experts one by one: peft stacks them as transformers stacks
their weights. If a folder has a stack, it is one of `target_parameters`: A is [experts · rank, in] with the
experts outermost, B [out, rank · experts] with them innermost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from titancli.checkpoint.hf.detect_model import hf_form
from titancli.converters.lora_experts import stacks_of
from titancli.errors import TitanError
from titancli.registry.component import build

OUT_IN = ("llama4_text", "llama4")
"""Model types whose stacks are [experts, in, out], but which peft treats as [experts, out, in]."""


@dataclass(frozen=True)
class Adapter:
    """One of peft's adapters, made from one of ours."""

    name: str
    """The name of the module, or of the parameter of a stack."""
    rows: Tensor | None = None
    """Our output rows that make up its outputs; None: all, in order."""
    expert: int | None = None
    stacked: bool = False
    depth: int = 0
    """The number of other stacks of its module that peft wraps after it."""
    transposed: bool = False
    """Whether our A is on the output side."""
    swapped: bool = False
    """Whether peft's A is on the output side."""
    embedding: bool = False

    @property
    def keys(self) -> tuple[str, str, str]:
        """Return the names of A, B and the magnitudes."""
        module = self.name.rpartition(".")[0] if self.stacked else self.name
        stem = f"base_model.model.{module}{'.base_layer' * self.depth}"
        a, b = ("embedding_A", "embedding_B") if self.embedding else ("A.weight", "B.weight")
        return f"{stem}.lora_{a}", f"{stem}.lora_{b}", f"{stem}.lora_magnitude_vector"

    def of(self, a: Tensor, b: Tensor, *magnitude: Tensor) -> tuple[Tensor, ...]:
        """Return A and B in peft's shapes, and the magnitudes if there are any."""
        if magnitude:
            rows = slice(None) if self.rows is None else self.rows.to(a.device)
            return *self.of(a, b), magnitude[0][rows]
        if self.embedding:
            return b.mT.contiguous(), a.mT.contiguous()
        if self.transposed:
            a, b = b.mT, a.mT
        if self.expert is not None:
            a, b = a[self.expert], b[self.expert]
        if self.rows is not None:
            b = b.index_select(-2, self.rows.to(b.device))
        if self.stacked:
            if self.swapped:
                a, b = b.mT, a.mT
            return a.flatten(0, 1).contiguous(), b.permute(1, 2, 0).flatten(1).contiguous()
        return a.contiguous(), b.contiguous()


def placed(model: Any, weights: Iterable[str]) -> dict[str, list[Adapter]]:
    """Return the adapters in peft that each of our weights' adapters becomes.

    Raises:
        TitanError: the form makes anything else of a weight than its rows under other names.
    """
    form = hf_form(model)
    with torch.device("meta"):
        built = build(model, seq_len=1)
    shapes = {name: tuple(parameter.shape) for name, parameter in built.named_parameters()}
    stacks = stacks_of(built)
    swapped = form.config_json()["model_type"] in OUT_IN
    found: dict[str, list[Adapter]] = {}
    for weight in weights:
        size = torch.Size(shapes[weight])
        # Rows are recognised by their values: each value occurs once.
        probe = torch.arange(size.numel(), dtype=torch.int64).view(size)
        transposed = weight in stacks and stacks[weight].is_transposed
        ours = probe.mT if transposed else probe
        made = list(form.to_hf(weight, probe))
        adapters = [_recognised(name, tensor, ours) for name, tensor in made]
        embeds = isinstance(built.get_submodule(weight.rpartition(".")[0]), torch.nn.Embedding)
        known = [
            replace(one, transposed=transposed, swapped=swapped, embedding=embeds) for one in adapters if one
        ]
        if len(known) != len(made) or sum(tensor.numel() for _, tensor in made) != probe.numel():
            raise TitanError(
                f"{weight} is stored differently in the model's Hugging Face form, so its adapter cannot "
                f"be exported",
                hint="merge the adapters instead: --to hf",
            )
        found[weight] = known
    return _nested(found)


def _recognised(name: str, made: Tensor, ours: Tensor) -> Adapter | None:
    """Return an adapter if a tensor of a folder consists of rows of our matrix, or of a stack's matrices."""
    out, inner = ours.shape[-2:]
    for matrix in (made, made.mT) if made.ndim == 3 else (made,):
        if matrix.ndim > ours.ndim or matrix.shape[-1] != inner or not matrix.numel():
            continue
        expert = int(matrix[0, 0]) // (out * inner) if ours.ndim > matrix.ndim else None
        whole = ours if expert is None else ours[expert]
        place = {value: row for row, value in enumerate(_column(whole))}
        rows = [place.get(value) for value in _column(matrix)]
        if None in rows:
            continue
        index = torch.tensor(rows)
        if torch.equal(matrix, whole.index_select(-2, index)):
            all_in_order = rows == list(range(out))
            return Adapter(
                name if matrix.ndim == 3 else name.removesuffix(".weight"),
                None if all_in_order else index,
                expert,
                matrix.ndim == 3,
            )
    return None


def _column(matrix: Tensor) -> list[int]:
    """Return the first value of each row; for a stack, of the first matrix."""
    found: list[int] = (matrix[0] if matrix.ndim == 3 else matrix)[:, 0].tolist()
    return found


def _nested(found: dict[str, list[Adapter]]) -> dict[str, list[Adapter]]:
    """Return the adapters with the depth at which peft wraps each stack of a module: in the order of its
    parameters, the down projection last."""
    modules: dict[str, list[str]] = {}
    for adapter in (one for several in found.values() for one in several if one.stacked):
        modules.setdefault(adapter.name.rpartition(".")[0], []).append(adapter.name)
    depth = {
        name: len(names) - 1 - number
        for names in modules.values()
        for number, name in enumerate(sorted(names, key=lambda name: name.endswith("down_proj")))
    }
    return {
        weight: [replace(one, depth=depth.get(one.name, 0)) for one in several]
        for weight, several in found.items()
    }


def beside_experts(adapters: Iterable[Adapter]) -> list[str]:
    """Return the modules of dense and shared feed-forwards, which peft 0.21 distinguishes from stacked
    experts only by name suffixes (`_convert_peft_config_moe`)."""
    ends = (".gate_proj", ".up_proj", ".down_proj")
    return [
        one.name for one in adapters if not one.stacked and one.expert is None and one.name.endswith(ends)
    ]


def config_of(adapters: Sequence[Adapter]) -> dict[str, list[str]]:
    """Return the entries of adapter_config.json that say where adapters are."""
    stacks = sorted(one.name for one in adapters if one.stacked)
    modules = sorted(one.name for one in adapters if not one.stacked)
    return {"target_modules": modules} | ({"target_parameters": stacks} if stacks else {})
