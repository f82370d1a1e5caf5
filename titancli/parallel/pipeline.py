"""A model cut into pipeline stages: which of them this rank has, and the parts of the model that they are.

What each stage holds is arithmetic (`titancli.layout.stages`). A part is the model without the modules of the
other stages; names stay those of the whole model, since `layers` keeps its keys.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from titancli.errors import TitanError
from titancli.layout.stages import StageError, cut, stage_ranks
from titancli.recipe.schema import Pipeline
from titancli.registry.component import completed


@dataclass(frozen=True)
class Placement:
    """The rank of the pipeline that holds each stage."""

    holders: tuple[int, ...]
    rank: int
    """This rank's place in the pipeline."""

    @property
    def mine(self) -> list[int]:
        """The stages that this rank holds, first to last."""
        return [stage for stage, holder in enumerate(self.holders) if holder == self.rank]

    @property
    def last(self) -> int:
        """The rank that has the output, and the loss."""
        return self.holders[-1]

    def __len__(self) -> int:
        return len(self.holders)


def split(model: Any, section: Pipeline, pp: int, rank: int) -> tuple[list[Any], Placement]:
    """Return the parts of a model on meta that one rank of the pipeline has, and the place of all stages.

    The parts take the model's modules over: it is of no use after this.

    Raises:
        StageError: the recipe's stages do not fit the model, or the first and the last would share a weight.
        TitanError: the model is not made of children alone.
    """
    before, after = ends(model)
    stages = cut(section, pp, len(model.layers), before=before, after=after)
    placement = Placement(tuple(stage_ranks(section.schedule, pp, len(stages))), rank)
    if model.stage is not None:
        parts = [model.stage(stages[stage]) for stage in placement.mine]
        return [completed("model", part) for part in parts], placement
    _refuse_shared(model, stages)
    return [part_of(model, stages[stage]) for stage in placement.mine], placement


def ends(model: Any) -> tuple[Sequence[str], Sequence[str]]:
    """Return the names of the modules before the blocks, and of those after them.

    Raises:
        TitanError: the model is not made of children alone.
    """
    if model.stage is not None:
        return model.stage_ends
    children = [name for name, _ in model.named_children()]
    if "layers" not in children or next(model.parameters(recurse=False), None) is not None:
        raise TitanError(
            f"{type(model).__name__} cannot be split into pipeline stages",
            hint="its parameters must be in its children, and its blocks in the child `layers`",
        )
    at = children.index("layers")
    return children[:at], children[at + 1 :]


def part_of(model: Any, names: Iterable[str]) -> Any:
    """Return the model with these of its modules, the same objects, and None in place of the others."""
    part = copy.copy(model)
    for name, value in vars(model).items():
        if isinstance(value, dict | set):  # registries of modules, parameters, hooks: no two parts share one
            vars(part)[name] = copy.copy(value)
    wanted = set(names)
    blocks = {key: block for key, block in model.layers.items() if f"layers.{key}" in wanted}
    part.layers = nn.ModuleDict(blocks)
    for name, _ in model.named_children():
        if name != "layers" and name not in wanted:
            setattr(part, name, None)
    return part


def _refuse_shared(model: nn.Module, stages: list[list[str]]) -> None:
    owner: dict[int, int] = {}
    for number, names in enumerate(stages):
        for name in names:
            for parameter in model.get_submodule(name).parameters():
                if owner.setdefault(id(parameter), number) != number:
                    message = (
                        f"tied weights cannot be split into stages: {name} shares a parameter "
                        f"with another stage"
                    )
                    raise StageError("mesh.pp", message, "set pp = 1, or model.tied = false")
