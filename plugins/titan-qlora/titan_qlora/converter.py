"""The converter `qlora`: LoRA's adapters in float32, beside weights that are quantized once loaded."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_qlora import nf4
from titan_qlora.kernels import dequantise, uses_library
from titan_qlora.nf4 import BLOCK, NESTED
from titan_qlora.weight import Content, Gathered, NF4Weight, Packed
from titancli.converters.lora import Adapters
from titancli.converters.lora_experts import stacks_of
from titancli.distributed.local import offsets_of, sharded_as
from titancli.errors import RecipeError
from titancli.recipe import nearest
from titancli.registry.component import build as build_component

if TYPE_CHECKING:
    from titan_qlora import QLoRA
    from titancli import Recipe
    from titancli.layout.degrees import Degrees

# Below titan's own logger, so that it reaches users and the run's events.
logger = logging.getLogger("titancli.plugins.titan_qlora")


def build(config: QLoRA, *, mesh: Degrees, compile: bool) -> QuantisedBase:
    return QuantisedBase(config, mesh.tp)


class QuantisedBase(Adapters):
    """LoRA's converter, whose base is quantized."""

    def __init__(self, config: QLoRA, tp: int = 1) -> None:
        super().__init__(config)
        self._qlora, self._tp = config, tp
        self.quantised: dict[str, tuple[int, ...]] = {}
        """Shapes of the quantized weights, by name."""

    # ------------------------------------------------------------------------------------- the model

    def convert(self, model: Any) -> None:
        """Freeze the model, quantize what is to be quantized, and put adapters beside the layers that are to
        have one.

        Raises:
            RecipeError: see `Adapters.convert`; or nothing can be quantized, a name in `skip` matches
                nothing, or tensor parallelism would cut through a block.
        """
        super().convert(model)
        uses_library(self._qlora.backend, torch.device("cpu"))  # says that it is not installed
        chosen = quantised_names(model, self._qlora.skip)
        self._refuse_cut_blocks(model, chosen)
        for path, module in model.named_modules():
            for key, parameter in list(module.named_parameters(recurse=False)):
                name = f"{path}.{key}"
                if name in chosen:
                    self.quantised[name] = tuple(parameter.shape)
                    made = NF4Weight(
                        Content(full=parameter.detach()),
                        self.quantised[name],
                        parameter.dtype,
                        parameter.device,
                    )
                    module._parameters[key] = nn.Parameter(made, requires_grad=False)
                elif self.owns(name):
                    module._parameters[key] = nn.Parameter(parameter.detach().float())
        self._tell(model)

    def _refuse_cut_blocks(self, model: Any, names: set[str]) -> None:
        styles = model.tensor_plan
        for name, parameter in model.named_parameters():  # on all ranks the same one is refused
            style = next((s for pattern, s in styles.items() if fnmatchcase(name, pattern)), None)
            blocks = parameter.shape[-1] // BLOCK
            if name in names and style == "row" and blocks % self._tp:
                raise RecipeError(
                    f"qlora: mesh.tp = {self._tp} would cut through blocks of {BLOCK} values of {name} "
                    f"{list(parameter.shape)}",
                    hint=f"use a mesh.tp that divides {blocks}, or add it to skip",
                )

    def _tell(self, model: Any) -> None:
        """Log which share of the weights is quantized and which is trained, with their bytes."""
        others = {n: p for n, p in model.named_parameters() if n not in self.quantised}
        trained = [p for n, p in others.items() if self.owns(n)]
        kept = [p for n, p in others.items() if not self.owns(n)]
        quantised = sum(map(numel, self.quantised.values()))
        whole = quantised + sum(p.numel() for p in kept)
        new = sum(p.numel() for p in trained)
        logger.info(
            f"qlora: {quantised:,} of {whole:,} weights ({quantised / whole:.1%}) in NF4, "
            f"{sum(map(bytes_of, self.quantised.values())):,} bytes; the others take "
            f"{sum(p.nbytes for p in kept):,} bytes; trained are {new:,} in addition ({new / whole:.2%}), "
            f"{sum(p.nbytes for p in trained):,} bytes"
        )

    def base_loaded(self, model: nn.Module) -> None:
        """Quantize the base, and begin with what follows from it. Collective."""
        self.after_step(model)
        super().base_loaded(model)

    @torch.no_grad()
    def after_step(self, model: nn.Module) -> None:
        """Quantize the weights that have their values by now."""
        for parameter in model.parameters():
            part = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
            if isinstance(part, NF4Weight) and part.packed is None and not part.is_meta:
                quantise_(parameter, part, uses_library(self._qlora.backend, part.device))
        super().after_step(model)

    def plain(self, name: str, tensor: Tensor) -> Tensor:
        """Return the memory that values are loaded into; of a quantized weight the weight itself, whose
        values can be read."""
        part = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        if not isinstance(part, NF4Weight) or part.content.full is None:
            return tensor
        return sharded_as(tensor, part.content.full.view(part.shape), tensor.shape)

    # ------------------------------------------------------------------------------------ the base

    def merged(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the plain model's tensors as `Adapters.merged` does, of the values of quantized weights."""
        return super().merged((n, t.values() if isinstance(t, NF4Weight) else t) for n, t in tensors)

    def base(self, tensors: Any, recipe: Recipe) -> Rounded:
        """Return a base with the values that its quantized weights have."""
        with torch.device("meta"):
            model = build_component(recipe.model, seq_len=1)
        names = quantised_names(model, self._qlora.skip)
        return Rounded(tensors, names, getattr(torch, recipe.training.dtype))


class Rounded:
    """The weights of a base, some of them as they are after quantization; see `titancli.checkpoint`."""

    def __init__(self, base: Any, names: Collection[str], dtype: torch.dtype) -> None:
        """
        Args:
            base: the weights as they are stored.
            names: those that are quantized.
            dtype: that of the model in training.
        """
        self._base, self._quantised, self._dtype = base, names, dtype

    def names(self) -> list[str]:
        found: list[str] = self._base.names()
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._base.shape(name))

    def dtype(self, name: str) -> torch.dtype:
        found: torch.dtype = self._base.dtype(name)
        return found

    def read(self, name: str) -> Tensor:
        weight: Tensor = self._base.read(name)
        return rounded(weight.to(self._dtype)) if name in self._quantised else weight


def numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def bytes_of(shape: tuple[int, ...]) -> int:
    """Return the bytes of a weight [out, in], or of a stack of them, in NF4 with its scales."""
    *experts, rows, columns = shape
    count = numel(tuple(experts))
    blocks = rows * columns // BLOCK
    return count * (blocks * (BLOCK // 2 + 1) + 4 * (-(-blocks // NESTED) + 1))


def rounded(weight: Tensor) -> Tensor:
    """Return the values of a whole weight after quantization, in its dtype."""
    codes, scales = nf4.quantise(weight)
    scales = nf4.dequantise_scales(nf4.quantise_scales(scales))
    return dequantise(codes, scales, weight.dtype, library=False)


def quantised_names(model: Any, skip: Iterable[str]) -> set[str]:
    """Return the names of the weights to quantize: of linear layers of the blocks and of stacked experts.

    Raises:
        RecipeError: there is none, or a name in `skip` matches none.
    """
    inside = {module for _, block in model.layers.items() for module in block.modules()}
    stacks = stacks_of(model)
    found = {
        f"{name}.weight": layer.weight
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear)
        and layer in inside
        and next((s for p, s in model.tensor_plan.items() if fnmatchcase(f"{name}.weight", p)), None)
        in ("column", "row")
    } | {name: getattr(module, name.rpartition(".")[2]) for name, module in stacks.items()}
    for pattern in skip:
        names = {name: name.removesuffix(".weight") for name in found}
        matched = [
            full for full, n in names.items() if fnmatchcase(n, pattern) or fnmatchcase(n, f"*.{pattern}")
        ]
        if not matched:
            ends = {n.split(".", i)[-1]: None for n in names.values() for i in range(n.count(".") + 1)}
            raise RecipeError(
                f"qlora: skip = {pattern!r} matches nothing that is quantized",
                hint=nearest(pattern, ends) or "see `titan show` of the model",
            )
        for name in matched:
            found.pop(name)
    uneven = {name: weight for name, weight in found.items() if weight.shape[-1] % BLOCK}
    if uneven:
        some = ", ".join(f"{name} {list(weight.shape)}" for name, weight in list(uneven.items())[:3])
        logger.warning("qlora: rows that are no multiple of %d stay as they are: %s", BLOCK, some)
    chosen = found.keys() - uneven.keys()
    if not chosen:
        raise RecipeError(
            "qlora: no layer of this model can be quantized",
            hint=f"their rows must be multiples of {BLOCK}; use the converter lora",
        )
    return chosen


def quantise_(parameter: Tensor, part: NF4Weight, library: bool) -> None:
    """Quantize a weight in place, or this rank's part of a sharded one. Collective."""
    full: Any = part.content.full
    codes, own = nf4.quantise(full.view(part.shape).to(part.device))
    whole = own
    if isinstance(parameter, DTensor):
        shape = (*parameter.shape[:-1], parameter.shape[-1] // BLOCK)
        sharded: Any = sharded_as(parameter, own, shape)
        whole = sharded.full_tensor()
    scales = nf4.quantise_scales(whole)
    origin = (0,) * part.ndim
    if isinstance(parameter, DTensor):
        if own.numel():
            *begin, column = offsets_of(parameter)
            origin = (*begin, column // BLOCK)
        mine = tuple(slice(o, o + size) for o, size in zip(origin, own.shape, strict=True))
        scales = scales._replace(codes=scales.codes[mine].contiguous())
        part.content.gathered = gathered_part(parameter)
    part.content.packed = Packed(codes, scales, origin, whole.shape[-1], library)
    part.content.full = None


def gathered_part(parameter: DTensor) -> Gathered:
    """Return what FSDP2, if it shards a parameter, gathers it to."""
    mesh, rows, shards, origin = parameter.device_mesh, parameter.shape[0], 1, [0] * parameter.ndim
    # FSDP2's shards lie within those of tensor or expert parallelism, if these are along the rows, too.
    within = max(getattr(place, "split_factor", 1) for place in parameter.placements)
    for number, place in enumerate(parameter.placements):
        dim = getattr(place, "dim", None)
        if dim == 0:
            shards *= mesh.size(number)
        if dim is not None and getattr(place, "split_factor", 1) == 1 and (dim > 0 or within > 1):
            size = parameter.shape[dim] // mesh.size(number)
            last = dim == parameter.ndim - 1
            origin[dim] = mesh.get_local_rank(number) * size // (BLOCK if last else 1)
    return Gathered(tuple(origin), rows // within, -(-rows // shards))
