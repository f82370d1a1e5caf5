"""A recipe's model on meta: how many blocks of which kinds it has, and a rank's shard of one block of each
kind.

Blocks whose modules, sizes and settings are equal are of one kind; a kind is named by the index of its first
block. Nothing here knows what a block consists of.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import nn

from titancli.distributed.local import local
from titancli.distributed.mesh import MeshOfNobody
from titancli.layout.degrees import Degrees
from titancli.models.blocks.moe import moe_layers
from titancli.models.loss import LOSS, attach, loss_in
from titancli.observe.peaks import Device
from titancli.parallel.fsdp import around, share_parameters
from titancli.parallel.pipeline import ends, part_of
from titancli.planning.stand_in import on_a_cpu
from titancli.recipe.schema import ActivationCheckpoint, Recipe
from titancli.registry.component import build, component_info, takes


class Blueprint:
    """The whole model, with the converters that add parameters."""

    def __init__(self, recipe: Recipe, device: Device) -> None:
        with torch.device("meta"):
            self.model: Any = build(recipe.model, seq_len=recipe.training.seq_len)
        self.size = sum(p.numel() for p in self.model.parameters())
        self.flops_per_token: float = self.model.flops_per_token(recipe.training.seq_len)
        self.known: dict[Any, Any] = {}
        """Cache of measurements, filled by `titancli.planning.workload.Workload`."""
        self.left_out: list[str] = []
        """Converters that change the arithmetic of matrix products and do not say how; a plan ignores
        them."""
        self.has_adapters = False
        for config in recipe.converters:
            counted = {"planned": device} if takes(config, "planned") else {}
            converter = build(config, mesh=Degrees(), compile=False, **counted)
            self.has_adapters |= converter.owns is not None
            if converter.owns is None and not counted:
                self.left_out.append(component_info(config).name)
            else:
                converter.convert(self.model)
        self.ends = ends(self.model)
        """Names, for pipeline stages, of the modules before and after the blocks."""
        if takes(recipe.loss, "model"):  # others, without parameters that depend on a size, are not built
            self.size += attach(self.model, build(recipe.loss, model=recipe.model))
        first: dict[Any, int] = {}
        self.kinds = [
            first.setdefault(_likeness(block, number), number)
            for number, block in enumerate(self.model.layers.values())
        ]
        """Kind of each block."""
        self.has_experts = bool(self.model.experts)

    @cached_property
    def few(self) -> Any:
        """Return the model with only the first block of each kind, or the whole model if it cannot be
        split."""
        if self.model.stage is not None:
            return self.model
        before, after = self.ends
        return part_of(
            self.model, [*before, *(f"layers.{kind}" for kind in dict.fromkeys(self.kinds)), *after, LOSS]
        )


def _likeness(module: nn.Module, number: int) -> Any:
    """Return a key that is equal for blocks that compute the same. A block's own index is not part of it."""
    own = tuple(
        (name, value if isinstance(value, Hashable) else repr(value))
        for name, value in vars(module).items()
        if _is_setting(value) and not name.startswith("_") and not (type(value) is int and value == number)
    )
    parameters = tuple((n, p.shape, p.requires_grad) for n, p in module._parameters.items() if p is not None)
    children = tuple((n, _likeness(m, number)) for n, m in module._modules.items() if m is not None)
    return type(module), own, parameters, children


def _is_setting(value: Any) -> bool:
    plain = isinstance(value, bool | int | float | str | tuple | torch.dtype | None)
    return plain or (dataclasses.is_dataclass(value) and not isinstance(value, type))


# ------------------------------------------------------------------------------------------- a rank's part


@dataclass(frozen=True)
class Parameter:
    """A parameter's shard on a rank under tensor and expert parallelism."""

    shape: tuple[int, ...]
    is_expert: bool
    is_trained: bool
    bytes_per_value: float | None = None  # at rest, of a tensor class that stores others than its dtype's


@dataclass(frozen=True)
class Cut:
    """One block of each kind and the modules around the blocks, as they are on a rank."""

    model: Any
    blocks: dict[int, nn.Module]
    """Blocks by kind."""
    front: tuple[Parameter, ...]
    back: tuple[Parameter, ...]
    """Parameters after the blocks, except those shared with the front."""
    parameters: dict[int, tuple[Parameter, ...]]
    """Parameters of a block, by kind."""
    tied: int
    """Bytes of the parameters that front and back share."""


@dataclass(frozen=True)
class Precision:
    """See `titancli.protocols.Precision`."""

    param: torch.dtype
    reduce: torch.dtype


def cut(
    blueprint: Blueprint, recipe: Recipe, degrees: Degrees, device: str, dtype: torch.dtype, recompute: str
) -> Cut:
    """Shard a copy of the blueprint by the recipe's parallelize plan, without FSDP2 and compile, which are
    computed.

    Args:
        device: the device it would run on, "cpu" or "cuda".
        dtype: dtype of its parameters.
        recompute: how activation checkpointing treats each block: "none", "full" or an operation's name
            (`activation_checkpoint.selective_ac_option`).
    """
    section = ActivationCheckpoint(mode="selective", selective_ac_option=recompute)
    if recompute in ("none", "full"):
        section = ActivationCheckpoint(mode=cast("Any", recompute))
    recipe, _ = on_a_cpu(recipe)
    training = recipe.training
    parallelize = build(
        recipe.parallelize,
        mesh=MeshOfNobody(dataclasses.replace(degrees, pp=1, dp_replicate=1, dp_shard=1)),
        device=torch.device(device),
        precision=Precision(
            getattr(torch, training.mixed_precision_param), getattr(torch, training.mixed_precision_reduce)
        ),
        activation_checkpoint=section,
        compile=recipe.compile,
    )
    model = parallelize(copy.deepcopy(blueprint.few).to(dtype))
    _make_plain(model)
    for layer in moe_layers(model).values():
        layer.force_load_balance()
    layers = dict(model.layers.items())
    blocks = {kind: layers[str(kind)] for kind in dict.fromkeys(blueprint.kinds)}
    if len(blocks) < len(layers):
        _pass_by([block for block in layers.values() if block not in blocks.values()], blocks.values())
    experts = {id(p) for module in model.experts.values() for p in module.parameters()}
    front, back = around(model, model.layers)
    if (loss := loss_in(model)) is not None:  # of the last stage
        back = [*back, loss]
    known: set[int] = set()

    def parameters(modules: Iterable[nn.Module]) -> tuple[Parameter, ...]:
        found = {id(p): p for module in modules for p in module.parameters() if id(p) not in known}
        known.update(found)
        given = ((p, key in experts, getattr(p, "bytes_per_value", None)) for key, p in found.items())
        return tuple(Parameter(tuple(p.shape), expert, p.requires_grad, rest) for p, expert, rest in given)

    in_front = {id(p) for module in front for p in module.parameters()}
    tied = {id(p): p.nbytes for module in back for p in module.parameters() if id(p) in in_front}
    assert bool(tied) == share_parameters(front, back)
    return Cut(
        model,
        blocks,
        parameters(front),
        parameters(back),
        {kind: parameters([block]) for kind, block in blocks.items()},
        sum(tied.values()),
    )


def _make_plain(model: nn.Module) -> None:
    """Replace parameters that know of other ranks by plain ones."""
    made: dict[int, nn.Parameter] = {}  # keyed by id, so that tied parameters stay tied
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                plain = local(parameter.detach())
                made[id(parameter)] = nn.Parameter(plain, requires_grad=parameter.requires_grad)
            module._parameters[name] = made[id(parameter)]


def _pass_by(blocks: Iterable[nn.Module], measured: Iterable[nn.Module]) -> None:
    """Make blocks pass their input through, with as many outputs as the measured blocks return."""
    returned: list[int] = [0]

    def count(block: nn.Module, args: Any, out: Any) -> None:
        returned[0] = len(out) if isinstance(out, tuple) else 0

    def passed(*args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else kwargs["hidden_states"]
        return (x, *[None] * (returned[0] - 1)) if returned[0] else x

    for block in measured:
        block.register_forward_hook(count)
    for block in blocks:
        block.forward = passed
