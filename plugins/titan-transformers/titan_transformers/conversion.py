"""Conversion of a transformers folder's tensors to parameters, and back, by transformers' own rules.

Most folders have the modules' own names. Others (such as stacked experts) are converted by transformers on
loading, by rules that it can also reverse; they are applied here to one parameter at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from titan_transformers.parts import take_apart
from titan_transformers.theirs import line_of, quiet, tiny_values
from titancli.errors import RecipeError
from titancli.models.blocks.state import named_state


class Conversion:
    """transformers' rules for one model: files to parameters, and back."""

    def __init__(self, whole: Any) -> None:
        """Collect the rules.

        Args:
            whole: transformers' model on meta, whose modules have the names of the parameters.
        """
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange, WeightConverter, WeightRenaming

        self._whole = whole
        rules = get_model_conversion_mapping(whole)
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._by_pattern = {p: rule for rule in self._converters for p in rule.source_patterns}
        kept = get_model_conversion_mapping(whole, add_legacy=False)
        # The rules that transformers reverses when it saves: no prefixes, for a model that it has not loaded.
        self._saved = [rule for rule in kept if not isinstance(rule, PrefixChange)]
        self._names = whole.state_dict().keys()

    def to_files(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        """Return the tensors that a parameter is saved as, by name."""
        from transformers.core_model_loading import revert_weight_conversion

        if not self._saved:
            return [(name, tensor)]
        self._whole._weight_conversions = deepcopy(self._saved)
        return list(revert_weight_conversion(self._whole, {name: tensor}).items())

    def parameter_of(self, file_name: str) -> str:
        """Return the parameter that a folder's tensor becomes, or is the first part of."""
        return self._renamed(file_name)[0]

    def from_files(self, name: str, given: Iterable[tuple[str, Tensor]]) -> Tensor:
        """Return a parameter made from a folder's tensors.

        Raises:
            ValueError: the rules make something else from them.
        """
        found: dict[str, Any] = {}
        for file_name, tensor in given:
            renamed, pattern = self._renamed(file_name)
            if pattern is None:
                return tensor
            rule = found.setdefault(renamed, deepcopy(self._by_pattern[pattern]))
            rule.add_tensor(renamed, file_name, pattern, tensor)
        made: dict[str, Any] = {}
        for renamed, rule in found.items():
            made |= rule.convert(renamed, model=self._whole, config=self._whole.config)
        if name not in made:
            raise ValueError(f"these tensors become {', '.join(made)}, not {name}")
        value = made[name]
        return value[0] if isinstance(value, list) else value

    def _renamed(self, file_name: str) -> tuple[str, str | None]:
        from transformers.core_model_loading import rename_source_key

        prefix = self._whole.base_model_prefix
        known = dict.fromkeys(self._names, True)
        return rename_source_key(file_name, self._renamings, self._converters, prefix, known)


def sources_of(conversion: Conversion, state: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Return the names of the tensors that each parameter is made from, in order.

    Raises:
        ValueError: a parameter does not survive a round trip, or two share a tensor.
    """
    found: dict[str, list[str]] = {}
    owner: dict[str, str] = {}
    for name, tensor in state.items():
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        saved = conversion.to_files(name, empty)
        again = conversion.from_files(name, saved)
        if again.shape != tensor.shape:
            raise ValueError(f"{name} {list(tensor.shape)} comes back as {list(again.shape)}")
        found[name] = [file_name for file_name, _ in saved]
        for file_name in found[name]:
            if conversion.parameter_of(file_name) != name:
                raise ValueError(f"{file_name} is not read as {name}")
            if owner.setdefault(file_name, name) != name:
                raise ValueError(f"{file_name} is a part of {owner[file_name]} and of {name}")
    return found


def weights_fault(values: Mapping[str, Any]) -> str | None:
    """Return why a model has no Hugging Face form; None if it has one. Determined with a tiny copy."""
    try:
        with quiet(), torch.device("meta"):
            whole = take_apart(tiny_values(values)).whole
            sources_of(Conversion(whole), dict(named_state(whole)))
    except RecipeError as error:
        return error.message
    except Exception as error:  # any error of transformers' rules
        return no_form(values["model_type"], error)
    return None


def no_form(model_type: str, error: Exception) -> str:
    return (
        f"{model_type}: the rules by which transformers reads a folder cannot be applied to single "
        f"parameters: {line_of(error)}"
    )
