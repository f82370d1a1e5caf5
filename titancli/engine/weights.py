"""The weights of an engine: its parameters by name, and whole tensors under Hugging Face names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from titancli.checkpoint import base as bases
from titancli.checkpoint.adapters import require_same
from titancli.checkpoint.format.manifest import adapter_record, is_checkpoint, read_manifest
from titancli.checkpoint.hf.lazy_tensor import put
from titancli.checkpoint.load import name_lists
from titancli.distributed import process_group
from titancli.distributed.together import Ranks
from titancli.errors import TitanError
from titancli.models.blocks.state import named_state
from titancli.models.loss import of_loss
from titancli.parallel.unsharded import as_stored

if TYPE_CHECKING:
    from titancli.distributed.mesh import Mesh
    from titancli.engine.step import Step
    from titancli.parallel.pipeline import Placement
    from titancli.protocols import Converter, HFForm


class TensorInfo(NamedTuple):
    """A tensor of one pipeline rank, as known to all of them."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    holder: int
    """The pipeline rank that has it."""


def adapter_converter(converters: Iterable[Converter]) -> Any:
    """Return the converter whose parameters are not part of the plain model, if there is one."""
    return next((one for one in converters if one.owns is not None), None)


def plain_parameters(parts: Iterable[Any], converters: Sequence[Converter]) -> list[tuple[str, Tensor]]:
    """Return parameters and other state by their names in the plain model on one device, detached and without
    the converters' tensor classes: the tensors to save, and to load into."""
    found = []
    for name, live in (named for part in parts for named in named_state(part)):
        tensor = live.detach()
        for converter in reversed(converters):
            tensor = converter.plain(name, tensor)
        found.append((name, tensor))
    return found


def saved_parameters(parts: Iterable[Any], converters: Sequence[Converter]) -> list[tuple[str, Tensor]]:
    """Return those of `plain_parameters` that a checkpoint contains: all, or only the adapters, if any, and
    the parameters of the loss."""
    adapters = adapter_converter(converters)
    return [
        named
        for named in plain_parameters(parts, converters)
        if adapters is None or adapters.owns(named[0]) or of_loss(named[0])
    ]


def base_parameters(parts: Iterable[Any], converters: Sequence[Converter]) -> dict[str, Tensor]:
    """Return those of `plain_parameters` that belong to the plain model."""
    adapters = adapter_converter(converters)
    return {
        name: tensor
        for name, tensor in plain_parameters(parts, converters)
        if not of_loss(name) and (adapters is None or not adapters.owns(name))
    }


def loss_parameters(parts: Iterable[Any]) -> dict[str, Tensor]:
    """Return those of `plain_parameters` that belong to the loss."""
    return {name: tensor for name, tensor in plain_parameters(parts, ()) if of_loss(name)}


class Renewal:
    """Lets converters update what they derive from the weights, whenever the weights have changed."""

    def __init__(self, parts: Iterable[Any], converters: Iterable[Converter]) -> None:
        self._parts, self._converters = parts, converters

    def step_applied(self, step: Step) -> None:
        self.weights_moved()

    def weights_loaded(self) -> None:
        self.weights_moved()

    def weights_moved(self) -> None:
        for converter in self._converters:
            for part in self._parts:
                with as_stored(part):
                    converter.after_step(part)


# ------------------------------------------------------------------------------- over a pipeline's stages


def tensor_infos(
    named: Iterable[tuple[str, Tensor]], parts: Sequence[Any], mesh: Mesh, placement: Placement | None
) -> list[TensorInfo]:
    """Return the tensors of all pipeline ranks, in the order of the stages. Collective.

    Args:
        named: the tensors of this rank's stages, in their order.
        parts: these stages.
    """
    mine = [TensorInfo(name, tuple(tensor.shape), tensor.dtype, mesh.pp_rank) for name, tensor in named]
    if placement is None:
        return mine
    stage_of: dict[str, int] = {}
    for stage, part in zip(placement.mine, parts, strict=True):
        stage_of |= dict.fromkeys(
            [name for name, _ in (*part.named_parameters(), *part.named_buffers())], stage
        )
    gathered = Ranks(mesh.pp_group).gather([(stage_of[known.name], known) for known in mine])
    found = sorted((entry for entries in gathered for entry in entries), key=lambda entry: entry[0])
    return [known for _, known in found]


def whole_tensors(
    mine: dict[str, Tensor], known: Iterable[TensorInfo], mesh: Mesh, home: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yield names and whole tensors of the whole model, one at a time. Collective.

    Away from rank 0 a tensor of another stage is on meta.

    Args:
        mine: this rank's tensors.
        known: all ranks', see `tensor_infos`.
        home: the device of parameters.
    """
    group, rank = mesh.pp_group, mesh.pp_rank
    to_rank_0 = dist.get_rank() == 0 or (group is not None and 0 in dist.get_process_group_ranks(group))
    for one in known:
        whole = torch.empty(one.shape, dtype=one.dtype, device="meta")
        if one.holder == rank:
            tensor = mine[one.name]
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if rank > 0 and to_rank_0:
                process_group.wait(dist.isend(whole.to(home).contiguous(), dst=0, group=group))
        elif dist.get_rank() == 0:
            whole = torch.empty(one.shape, dtype=one.dtype, device=home)
            process_group.wait(dist.irecv(whole, group=group, group_src=one.holder))
        yield one.name, whole


# ----------------------------------------------------------------------------------------------- adapters


def adapter_facts(
    adapters: Any, folder: Path, *, base: dict[str, str] | None = None
) -> dict[str, Any] | None:
    """Return a checkpoint's facts about its adapters; None if it has none, or is not a checkpoint.

    Args:
        adapters: the engine's adapters, if it has any.
        base: the base of the engine's adapters, if known by now.

    Raises:
        RecipeError: they do not match the engine's, or it has none.
        EnvironmentProblem: they were trained on another base.
    """
    record = adapter_record(read_manifest(folder)) if is_checkpoint(folder) else None
    if record is None:
        return None
    require_same(folder, None if adapters is None else adapters.facts)
    if base is not None:
        bases.require_base(record, folder, base)
    return record


# ----------------------------------------------------------------------------------- under Hugging Face names


NamedTensor = tuple[str, Tensor | None]
"""A Hugging Face name, and the whole tensor: on rank 0, None elsewhere."""


class Loads(Protocol):
    """A target that takes all weights in one call, such as vLLM's models."""

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> Any:
        """Copy every tensor; the return value is ignored. A tensor is valid until the next one is
        requested."""


Target = Loads | Callable[[str, Tensor], Any]


# ----------------------------------------------------------------------------------------------------- out


def push(weights: Iterator[NamedTensor], target: Target) -> None:
    """Send all weights to a target; see `Engine.push_weights`."""
    ranks = Ranks()

    def hand_over() -> None:
        try:
            if ranks.rank == 0:
                _hand_over(weights, target)
        finally:
            for _ in weights:  # other ranks, and what the target left unread: gathering is collective
                pass

    ranks.call("push_weights: handing over the weights", hand_over)


def _hand_over(weights: Iterator[Any], target: Any) -> None:
    if hasattr(target, "load_weights"):
        target.load_weights(weights)
    elif callable(target):
        for name, tensor in weights:
            target(name, tensor)
    else:
        raise TitanError(
            f"push_weights: a {type(target).__name__} cannot receive weights",
            hint="pass an object with load_weights(iterator), or a function of (name, tensor)",
        )


# ------------------------------------------------------------------------------------------------------ in


def take_weights(loader: WeightLoader, weights: Iterable[NamedTensor] | None, device: torch.device) -> None:
    """Load all weights; see `Engine.load_weights`."""
    given: Iterator[Any] = iter(() if weights is None else weights)
    if weights is None and dist.get_rank() == 0:
        given = _nothing_given()
    for name, tensor in _everywhere(given, device):
        loader.take(name, tensor)
    loader.finish()


class WeightLoader:
    """Copies tensors into parameters as they arrive, and collects errors. Every rank has one."""

    def __init__(
        self,
        mine: dict[str, Tensor],
        shapes: dict[str, tuple[int, ...]],
        form: HFForm,
        begin: Callable[[], None],
    ) -> None:
        """
        Args:
            mine: the parameters of this rank.
            shapes: the shapes of the whole model's parameters.
            begin: called before a parameter is replaced, here or on another rank.
        """
        self._mine, self._shapes, self._form, self._begin = mine, shapes, form, begin
        self._wanted = {name: sources for name in shapes if (sources := form.sources(name))}
        self._owners = {source: name for name, sources in self._wanted.items() for source in sources}
        self._waiting: dict[str, dict[str, Tensor]] = {}
        """The tensors received so far of parameters that consist of several."""
        self._seen: set[str] = set()
        self._wrong: dict[str, list[str]] = {"unknown": [], "given twice": [], "shapes differ": []}

    def take(self, hf_name: str, tensor: Tensor) -> None:
        name = self._owners.get(hf_name)
        if name is None:
            if not self._form.ignored(hf_name):
                self._wrong["unknown"].append(hf_name)
            return
        if hf_name in self._seen:
            self._wrong["given twice"].append(hf_name)
            return
        self._seen.add(hf_name)
        parts = self._waiting.setdefault(name, {})
        # If several make one parameter, the first must outlive the next one's arrival.
        parts[hf_name] = tensor.clone() if len(self._wanted[name]) > 1 else tensor
        if len(parts) == len(self._wanted[name]):
            self._put(name, self._waiting.pop(name))

    def _put(self, name: str, parts: dict[str, Tensor]) -> None:
        tensors = [parts[source] for source in self._wanted[name]]
        wanted = self._shapes[name]
        try:
            whole = self._form.from_hf(name, tensors)
        except (RuntimeError, TypeError, ValueError):
            whole = None
        if whole is None or tuple(whole.shape) != wanted:
            given = " + ".join(str(list(tensor.shape)) for tensor in tensors)
            names = " + ".join(self._wanted[name])
            self._wrong["shapes differ"].append(f"{names} is {given}, {name} is {list(wanted)}")
        else:
            self._begin()
            if name in self._mine:
                put(self._mine[name], whole)

    def finish(self) -> None:
        """Check that all parameters are loaded.

        Raises:
            TitanError: lists all errors.
        """
        missing = [source for source in self._owners if source not in self._seen]
        found = name_lists({"missing": missing, **self._wrong})
        if found:
            raise TitanError(
                f"load_weights: these weights do not belong to this model: {found}",
                hint="names and shapes must be those of the model's Hugging Face form, as returned by "
                "weights()",
            )


def _everywhere(weights: Iterator[Any], device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Yield rank 0's tensors on every rank, on the device; other ranks' iterators advance in step."""
    ranks, tensor = Ranks(), None

    def take() -> tuple[str, tuple[int, ...], torch.dtype] | None:
        nonlocal tensor
        tensor = None
        item = next(weights, None)
        if item is None or ranks.rank > 0:
            return None
        name, tensor = item
        return (name, *_described(name, tensor))

    while (head := ranks.allgather_call("load_weights: reading the weights", take)[0]) is not None:
        name, shape, dtype = head
        if tensor is None:
            whole = torch.empty(shape, dtype=dtype, device=device)
        else:
            whole = tensor.detach().to(device).contiguous()
        if ranks.size > 1:
            dist.broadcast(whole, src=0)
        yield name, whole


def _described(name: str, tensor: Any) -> tuple[tuple[int, ...], torch.dtype]:
    if not isinstance(tensor, Tensor):
        raise TitanError(f"load_weights: {name} is a {type(tensor).__name__}, not a tensor")
    return tuple(tensor.shape), tensor.dtype


def _nothing_given() -> Iterator[Any]:
    raise TitanError("load_weights: no weights were passed on rank 0")
    yield
