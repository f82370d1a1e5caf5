"""Whether the parameters of a model are still those that its engine was built with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from titancli.errors import TitanError


class Watched:
    """The parameters of an engine's parts, and where they are.

    Sharding, optimizer and checkpoints know a parameter by its object: one that a script puts in its place
    would be computed with or not, never trained, and saved under a name that means the other.
    """

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self._named = _named(parts)
        self._places: list[tuple[dict[str, Any], list[tuple[str, Any]]]] = []
        """The modules' own dictionaries, and what was in them: compared by identity, at each verb."""
        for part in parts:
            for module in part.modules():
                for dictionary in (module._parameters, module._modules):
                    self._places.append((dictionary, list(dictionary.items())))

    def check(self, verb: str, parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer | None) -> None:
        """
        Raises:
            TitanError: parameters were replaced, added or taken away; or one requires a gradient, and the
                optimizer does not have it.
        """
        if not all(_same(dictionary, items) for dictionary, items in self._places):
            self._compare(verb, _named(parts))
        if optimizer is None:
            return
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        lost = [name for name, p in self._named.items() if p.requires_grad and id(p) not in held]
        if lost:
            raise TitanError(
                f"{verb}: {_listed(lost)} {_require(lost)} a gradient, and the optimizer does not have "
                f"{'it' if len(lost) == 1 else 'them'}",
                hint="parameters may be frozen after building, not unfrozen: build the engine with them",
            )

    def _compare(self, verb: str, now: dict[str, nn.Parameter]) -> None:
        changed = [name for name, p in now.items() if self._named.get(name) is not p]
        gone = [name for name in self._named if name not in now]
        if changed or gone:
            parts = [f"{_listed(changed)} {_was(changed)} put in"] if changed else []
            parts += [f"{_listed(gone)} {_was(gone)} taken away"] if gone else []
            raise TitanError(
                f"{verb}: {' and '.join(parts)} after the engine was built, and nothing would train or save "
                "what is there now",
                hint="put values into what is there (parameter.data.copy_, engine.load_weights), or change "
                "the model in a converter, before it is built",
            )


def _named(parts: Iterable[nn.Module]) -> dict[str, nn.Parameter]:
    return {name: parameter for part in parts for name, parameter in part.named_parameters()}


def _same(dictionary: dict[str, Any], items: list[tuple[str, Any]]) -> bool:
    return len(dictionary) == len(items) and all(dictionary.get(key) is value for key, value in items)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _was(names: list[str]) -> str:
    return "was" if len(names) == 1 else "were"


def _require(names: list[str]) -> str:
    return "requires" if len(names) == 1 else "require"
