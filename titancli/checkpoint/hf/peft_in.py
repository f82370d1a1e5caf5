"""Reading a folder that `peft` has saved: its adapters go on beside their base, or are merged into it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titancli.checkpoint.adapters import require_same
from titancli.checkpoint.format.tensorfile import read_header
from titancli.checkpoint.format.tensors import read_tensor
from titancli.checkpoint.hf.detect_model import hf_form, parameter_shapes
from titancli.checkpoint.hf.folder import read_hf
from titancli.checkpoint.hf.lazy_tensor import Virtual, put
from titancli.checkpoint.hf.peft_names import Adapter, placed
from titancli.checkpoint.load import name_lists
from titancli.converters.lora import adapter_names, magnitude_name, merge, scale_of
from titancli.errors import EnvironmentProblem, RecipeError
from titancli.protocols import HFForm
from titancli.recipe.peft_folder import MERGE, WEIGHTS, facts_of, weights_of
from titancli.registry.component import build

STEM = "base_model.model."


class PeftFolder:
    """The adapters of a folder, by our names: `layers.0.attention.wq.lora_a` and so on.

    Raises:
        EnvironmentProblem: the folder is damaged, or titan has no such adapters; names everything.
    """

    def __init__(self, folder: Path, model: Any) -> None:
        self.folder = folder
        weights = weights_of(folder)
        self.facts = facts_of(folder)
        self.scale = scale_of(self.facts)
        self._header = read_header(weights)
        self._shapes = parameter_shapes(model)
        self._form = hf_form(model)
        self._copies: dict[str, str] = {}
        """Keys of weights of the base that are stored again, and our names: peft copies embedding and output
        if they have adapters, or if the vocabulary was resized."""
        self._refuse_tied(model)
        self._adapters = self._placed(model)

    @property
    def weights(self) -> list[str]:
        """The names of the weights that have adapters."""
        return list(self._adapters)

    def read(self, weight: str) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return A [rank, in], B [out, rank] and the magnitudes, if any, of a weight [out, in]."""
        several = self._adapters[weight]
        if several[0].expert is None:
            [one] = several
            a, b = (self._read(key) for key in one.keys[:2])
            if one.embedding:
                return b.mT, a.mT, None
            magnitude = self._read(one.keys[2]) if self.facts["dora"] else None
            return a, self._in_rows(one, b), None if magnitude is None else self._in_rows(one, magnitude)
        ordered = sorted(several, key=lambda one: one.expert or 0)
        a = torch.stack([self._read(one.keys[0]) for one in ordered])
        b = torch.stack([self._in_rows(one, self._read(one.keys[1])) for one in ordered])
        return (b.mT, a.mT, None) if ordered[0].transposed else (a, b, None)

    def _in_rows(self, one: Adapter, values: Tensor) -> Tensor:
        """Return rows in our order."""
        return values if one.rows is None else torch.empty_like(values).index_copy_(0, one.rows, values)

    def _read(self, key: str) -> Tensor:
        return read_tensor(self.folder / WEIGHTS, self._header[key])

    def _placed(self, model: Any) -> dict[str, list[Adapter]]:
        """Return the adapters of each weight, after a check that every tensor of the file is one of them."""
        owners = {source: name for name in self._shapes for source in self._form.sources(name)}
        modules = {key.removeprefix(STEM).rpartition(".lora_")[0] for key in self._header}
        found = [owners[f"{module}.weight"] for module in sorted(modules) if f"{module}.weight" in owners]
        adapters = placed(model, dict.fromkeys(found))
        known: dict[str, str] = {}
        for weight, several in adapters.items():
            for one in several:
                known |= dict.fromkeys(one.keys[: 2 + (self.facts["dora"] is True)], weight)
            if len(several) > 1 and several[0].expert is None:
                # each has an A of its own
                known = {key: owner for key, owner in known.items() if owner != weight}
        self._rename_magnitudes()
        for key in self._header:
            if (owner := owners.get(key.removeprefix(STEM).replace(".base_layer", ""))) is not None:
                self._copies[key] = owner
        lists = name_lists(
            {
                "titan has no such adapters": sorted(
                    self._header.keys() - known.keys() - self._copies.keys()
                ),
                "it lacks": sorted(known.keys() - self._header.keys()),
            }
        )
        if lists or not known:
            raise EnvironmentProblem(
                f"the adapters in {self.folder} do not fit this model: {lists or 'there are none'}",
                hint=MERGE,
            )
        return adapters

    def _refuse_tied(self, model: Any) -> None:
        """Refuse adapters of either end of a tied model: peft computes the other end without them."""
        ends = [key for key in self._header if ".lora_embedding_" in key or ".lm_head.lora_" in key]
        if not ends:
            return
        with torch.device("meta"):
            built = build(model, seq_len=1)
        every = [parameter for _, parameter in built.named_parameters(remove_duplicate=False)]
        if len({*every}) < len(every):
            raise EnvironmentProblem(
                f"{self.folder} has {sorted(ends)[0]}, but embedding and output of its base are one weight, "
                "whose other end peft computes without the adapter",
                hint="give the output of the base a weight of its own (tie_word_embeddings = false), "
                "merge the adapters with peft (merge_and_unload), and use the merged folder as weights",
            )

    def _rename_magnitudes(self) -> None:
        end = ".lora_magnitude_vector"
        self._header = {
            key.removesuffix(".weight") if key.endswith(f"{end}.weight") else key: entry
            for key, entry in self._header.items()
        }

    def check_copies(self, base: Path) -> None:
        """Check that weights of the base which the folder has, too, are those of the base.

        Raises:
            EnvironmentProblem: they differ, as after resizing the vocabulary.
        """
        if not self._copies:
            return
        reader = read_hf(base, self._form)
        for key, owner in self._copies.items():
            own, theirs = self._form.from_hf(owner, [self._read(key)]), reader.parameter(owner)
            if own.shape != theirs.shape or not torch.equal(own.to(theirs.dtype), theirs):
                raise EnvironmentProblem(
                    f"{self.folder} has {key} {list(own.shape)}, which differs from {owner} "
                    f"{list(theirs.shape)} of its base {base}",
                    hint=MERGE,
                )

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Yield the adapters' parameters by our names."""
        for weight in self.weights:
            a, b, magnitude = self.read(weight)
            yield from zip(adapter_names(weight), (a, b), strict=True)
            if magnitude is not None:
                yield magnitude_name(weight), magnitude

    def require_same(self, adapters: Any) -> None:
        """Check that a recipe's adapters are of the same kind, and of the same layers.

        Args:
            adapters: the recipe's converter, see `titancli.converters.lora.Adapters`.

        Raises:
            RecipeError: they differ; names how.
        """
        require_same(self.folder, adapters.facts)
        ours, own = set(adapters.weights), set(self.weights)
        if ours != own:
            lists = name_lists({"only there": sorted(own - ours), "only here": sorted(ours - own)})
            ends = {weight.rpartition(".")[0].rpartition(".")[2] for weight in own}
            alike = {name for name in self._shapes if name.rpartition(".")[0].rpartition(".")[2] in ends}
            names = ends if alike == own else {weight.removesuffix(".weight") for weight in own}
            raise RecipeError(
                f"{self.folder} holds adapters of other layers than this recipe: {lists}",
                hint=f"set targets of the converter to {sorted(names)}",
            )


class Merged:
    """A form that reads a base with adapters merged into it, in fp32."""

    def __init__(self, form: HFForm, adapters: PeftFolder) -> None:
        self._form, self._adapters = form, adapters
        self._weights = frozenset(adapters.weights)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._form, name)

    def from_hf(self, name: str, tensors: list[Tensor]) -> Tensor:
        """Build a parameter, see `titancli.protocols.HFForm`."""
        made = self._form.from_hf(name, tensors)
        if name not in self._weights or made.is_meta:
            return made
        whole = made.whole() if isinstance(made, Virtual) else made
        a, b, magnitude = self._adapters.read(name)
        return merge(whole, a, b, self._adapters.scale, magnitude)


@torch.no_grad()
def fill_adapters(adapters: PeftFolder, parameters: Mapping[str, Tensor]) -> None:
    """Fill the adapters' parameters, or this rank's parts of them, with those of a folder."""
    for name, tensor in adapters.tensors():
        if name in parameters:
            if tensor.shape != parameters[name].shape:
                raise EnvironmentProblem(
                    f"{adapters.folder}: {name} is {list(tensor.shape)}, but the model has "
                    f"{list(parameters[name].shape)}",
                    hint="use the base that the adapters were trained on",
                )
            put(parameters[name], tensor.contiguous())


def merged_form(form: HFForm, adapters: PeftFolder) -> HFForm:
    """Return the form that reads a base with adapters merged into it."""
    made: Any = Merged(form, adapters)
    return made
