"""The converter `qlora`: LoRA's adapters in float32, beside weights that are quantized once they are loaded."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_qlora import nf4
from titan_qlora.kernels import uses_library
from titan_qlora.nf4 import BLOCK, NESTED
from titan_qlora.weight import Content, Gathered, NF4Weight, Packed
from titancli.converters.lora import Adapters
from titancli.converters.lora_experts import stacks_of
from titancli.distributed.local import offsets_of, sharded_as
from titancli.errors import RecipeError
from titancli.recipe import nearest

if TYPE_CHECKING:
    from titan_qlora import QLoRA
    from titancli.layout.degrees import Degrees

# Below titan's own logger, so that it reaches users and the run's events.
logger = logging.getLogger("titancli.plugins.titan_qlora")


def build(config: QLoRA, *, mesh: Degrees, compile: bool) -> QuantisedBase:
    return QuantisedBase(config, mesh.tp)


class QuantisedBase(Adapters):
    """LoRA's converter, whose base is quantized."""

    def __init__(self, config: QLoRA, tp: int = 1) -> None:
        super().__init__(config)
        self.facts = {**self.facts, "base_in": "nf4"}
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
                        Content(full=parameter.detach()), self.quantised[name], parameter.dtype, parameter.device
                    )
                    module._parameters[key] = nn.Parameter(made, requires_grad=False)
                elif self.owns(name):
                    module._parameters[key] = nn.Parameter(parameter.detach().float())
        self._tell(model)

    def _refuse_cut_blocks(self, model: Any, names: Iterable[str]) -> None:
        styles = model.tensor_plan
        parameters = dict(model.named_parameters())
        for name in names if self._tp > 1 else ():
            style = next((s for pattern, s in styles.items() if fnmatchcase(name, pattern)), None)
            blocks = parameters[name].shape[-1] // BLOCK
            if style == "row" and blocks % self._tp:
                raise RecipeError(
                    f"qlora: mesh.tp = {self._tp} would cut through blocks of {BLOCK} values of {name} "
                    f"{list(parameters[name].shape)}",
                    hint=f"use a mesh.tp that divides {blocks}, or add {name.removesuffix('.weight')!r} to skip",
                )

    def _tell(self, model: Any) -> None:
        """Log which share of the weights is quantized and which is trained, with their bytes."""
        sizes = {n: (p.numel(), p.nbytes) for n, p in model.named_parameters() if n not in self.quantised}
        codes = {name: numel(shape) for name, shape in self.quantised.items()}
        count = sum(codes.values())
        trained = [sizes[n] for n in sizes if self.owns(n)]
        rest = [sizes[n] for n in sizes if not self.owns(n)]
        base = count + sum(n for n, _ in rest)
        logger.info(
            "qlora: %s of %s weights (%.1f%%) in NF4, %s bytes; the others in %s bytes; trained: %s (%.2f%%), "
            "%s bytes",
            f"{count:,}",
            f"{base:,}",
            100 * count / base,
            f"{sum(map(bytes_of, self.quantised.values())):,}",
            f"{sum(size for _, size in rest):,}",
            f"{sum(n for n, _ in trained):,}",
            100 * sum(n for n, _ in trained) / base,
            f"{sum(size for _, size in trained):,}",
        )

    @torch.no_grad()
    def after_step(self, model: nn.Module) -> None:
        """Quantize the weights that have their values by now."""
        for parameter in model.parameters():
            part = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
            if isinstance(part, NF4Weight) and part.packed is None and not part.is_meta:
                quantise_(parameter, part, uses_library(self._qlora.backend, part.device))

    def plain(self, name: str, tensor: Tensor) -> Tensor:
        """Return the memory that values are loaded into; of a quantized weight the weight itself, whose
        values can be read."""
        part = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        if not isinstance(part, NF4Weight) or part.content.full is None:
            return tensor
        return sharded_as(tensor, part.content.full.view(part.shape), tensor.shape)

    # ------------------------------------------------------------------------------------ the base

    def as_computed(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of a base as the model computes with them."""
        for name, tensor in tensors:
            yield name, rounded(tensor) if name in self.quantised else tensor


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
    return nf4.dequantise(codes, nf4.dequantise_scales(nf4.quantise_scales(scales)), weight.dtype)


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
            f"qlora: nothing of this model can be quantized: rows of linear layers must be multiples of {BLOCK}",
            hint="use the converter lora",
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
