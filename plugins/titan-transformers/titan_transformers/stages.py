"""Pipeline stages of a transformers base, which runs as a whole in each of them.

The base's own forward still does everything around blocks: rotary embeddings, masks, the choice of attention
per layer. Blocks of other stages pass hidden states through; the one before the stage's first returns the
received ones, and the one after its last keeps those to send. Other modules with parameters are replaced by
zeros of the same shape. A tiny copy is used to check that only hidden states pass between blocks.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

BEFORE, AFTER = "embeddings", "output"
"""Names of everything with parameters before the blocks, and after them, in stages."""


class Border:
    """Input and output of a stage in the current forward."""

    def __init__(self) -> None:
        self.received: Tensor | None = None
        self.sent: Tensor | None = None


class Passed(nn.Module):
    """Stands in for a block of another stage, with the attributes that a base reads from it."""

    def __init__(self, block: nn.Module, border: Border, *, gives: bool, keeps: bool, as_tuple: bool) -> None:
        super().__init__()
        for name, value in vars(block).items():
            if name not in vars(self):
                vars(self)[name] = value
        self.training = block.training
        self._border, self._gives, self._keeps, self._as_tuple = border, gives, keeps, as_tuple

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        if self._keeps:
            self._border.sent = hidden
        if self._gives and self._border.received is not None:
            hidden = self._border.received
        return (hidden,) if self._as_tuple else hidden


class StandIn(nn.Module):
    """Returns zeros of the shape of another stage's module's output."""

    def __init__(self, module: nn.Module, border: Border, *, embeds: bool, gives: bool) -> None:
        """Create the stand-in.

        Args:
            embeds: return zeros like the received tensor.
            gives: return the received tensor itself, if no block does.
        """
        super().__init__()
        self._meta = (copy.deepcopy(module).to("meta"),)  # in a tuple: not a submodule
        self._border, self._embeds, self._gives = border, embeds, gives

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._meta[0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        received = self._border.received
        if self._embeds and received is not None:
            return received if self._gives else torch.zeros_like(received)
        given: list[Tensor] = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        device, dtype = given[0].device, next((x.dtype for x in given if x.is_floating_point()), None)
        on_meta = tree_map_only(Tensor, lambda x: x.to("meta"), (args, kwargs))
        out = self._meta[0](*on_meta[0], **on_meta[1])
        return tree_map_only(
            Tensor, lambda x: torch.zeros(x.shape, dtype=dtype or x.dtype, device=device), out
        )


def stage_of(model: Any, names: Collection[str], as_tuple: bool) -> Any:
    """Return a copy of a model with only these modules: `embeddings`, `layers.0`, …, `output`."""
    part, border = _copied(model), Border()
    part.border = border
    part.first, part.last = BEFORE in names, AFTER in names
    above, front = part, True
    mine = [int(name.removeprefix("layers.")) for name in names if name.startswith("layers.")]
    path = [part._parts.base_name, *part._parts.layers_path.split(".")]
    embedding = model.base.get_input_embeddings()
    for step in path:
        for name, child in list(above.named_children()):
            if name == step:
                front = False
                continue
            kept = part.first if front else part.last
            if not kept and next(child.parameters(), None) is not None:
                if child is model.output:
                    vars(above)["_modules"][name] = None
                else:
                    vars(above)["_modules"][name] = StandIn(
                        child, border, embeds=child is embedding, gives=0 in mine
                    )
        front = True
        below = _copied(getattr(above, step))
        vars(above)["_modules"][step] = below
        above = below
    first = min(mine, default=len(above) if part.last else 0)
    end = max(mine, default=first - 1) + 1
    for number, (name, block) in enumerate(list(vars(above)["_modules"].items())):
        if not first <= number < end:
            vars(above)["_modules"][name] = Passed(
                block, border, gives=number == first - 1, keeps=number == end, as_tuple=as_tuple
            )
    if end == len(above) and mine and not part.last:
        # Registered before FSDP2's hook on the same block, which casts its own outputs only.
        above[-1].register_forward_hook(partial(_keep, border))
    return part


def _keep(border: Border, module: nn.Module, args: Any, out: Any) -> None:
    border.sent = out[0] if isinstance(out, tuple) else out


def _copied(module: Any) -> Any:
    """Return a new module with the same children."""
    made = copy.copy(module)
    for name, value in vars(module).items():
        if isinstance(value, dict | set):
            vars(made)[name] = copy.copy(value)
    return made
