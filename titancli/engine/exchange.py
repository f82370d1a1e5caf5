"""Weights under Hugging Face names, out to a target and in from an iterator: one whole tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from titancli.checkpoint.hf import put
from titancli.checkpoint.load import name_lists
from titancli.errors import TitanError

if TYPE_CHECKING:
    from titancli.engine.parameters import Parameters
    from titancli.protocols import HFForm

NamedTensor = tuple[str, Tensor | None]
"""A Hugging Face name, and the whole tensor: on rank 0, None elsewhere."""


class Loads(Protocol):
    """What takes all weights in one call: vLLM's models have this method, for one."""

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> Any:
        """Copy every tensor; what is returned is not looked at. One is good until the next is asked for."""


Target = Loads | Callable[[str, Tensor], Any]


# ----------------------------------------------------------------------------------------------------- out


def push(weights: Iterator[NamedTensor], target: Target) -> None:
    """See `Engine.push_weights`."""
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            _hand_over(weights, target)
        except Exception as error:
            failure = error
    for _ in weights:  # other ranks, and what a target has left: the gathers are everyone's
        pass
    told = _from_rank_0(f"{type(failure).__name__}: {failure}" if failure else None)
    if failure is not None:
        raise failure
    if told is not None:
        raise TitanError(f"push_weights: the target failed on rank 0: {told}")


def _hand_over(weights: Iterator[Any], target: Any) -> None:
    if hasattr(target, "load_weights"):
        target.load_weights(weights)
    elif callable(target):
        for name, tensor in weights:
            target(name, tensor)
    else:
        raise TitanError(
            f"push_weights: a {type(target).__name__} takes no weights",
            hint="give an object with load_weights(iterator), or a function of (name, tensor)",
        )


# ------------------------------------------------------------------------------------------------------ in


def take_weights(
    engine: Parameters, form: HFForm, weights: Iterable[NamedTensor] | None, begin: Callable[[], None]
) -> None:
    """See `Engine.load_weights`. `begin` is called before a parameter is replaced, here or elsewhere."""
    given: Iterator[Any] = iter(() if weights is None else weights)
    if weights is None and dist.get_rank() == 0:
        given = _nothing_given()

    intake = Intake(dict(engine.plain_parameters()), engine.parameter_shapes(), form, begin)
    for name, tensor in _everywhere(given, engine.device):
        intake.take(name, tensor)
    intake.finish()


class Intake:
    """Puts tensors in their places as they come, and remembers what was wrong. Every rank has one."""

    def __init__(
        self,
        mine: dict[str, Tensor],
        shapes: dict[str, tuple[int, ...]],
        form: HFForm,
        begin: Callable[[], None],
    ) -> None:
        """
        Args:
            mine: this rank's parameters.
            shapes: of the whole model's.
            begin: called before a parameter is replaced, here or on another rank.
        """
        self._mine, self._shapes, self._form, self._begin = mine, shapes, form, begin
        self._wanted = {name: sources for name in shapes if (sources := form.sources(name))}
        self._owners = {source: name for name, sources in self._wanted.items() for source in sources}
        self._waiting: dict[str, dict[str, Tensor]] = {}
        """What has come of parameters that are made of several tensors."""
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
        # Where several make one, the first must outlast the one that is given next.
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
        """
        Raises:
            TitanError: with everything that was wrong.
        """
        missing = [source for source in self._owners if source not in self._seen]
        found = name_lists({"missing": missing, **self._wrong})
        if found:
            raise TitanError(
                f"load_weights: these are not this model's weights: {found}",
                hint="names and shapes are those of the model's Hugging Face form, as weights() gives them",
            )


def _everywhere(weights: Iterator[Any], device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Rank 0's tensors on every rank, on the device; the ranks' own iterators are run in step."""
    while True:
        head, tensor, failure = None, None, None
        try:
            item = next(weights, None)
            if item is not None and dist.get_rank() == 0:
                name, tensor = item
                head = (name, *_described(name, tensor))
        except Exception as error:  # the others must hear of it before it is raised
            failure = error
        head, failed = _from_rank_0((head, failure is not None))
        if failure is not None:
            raise failure
        if failed:
            raise TitanError("load_weights: what rank 0 was given failed there")
        if head is None:
            return
        name, shape, dtype = head
        if tensor is None:
            whole = torch.empty(shape, dtype=dtype, device=device)
        else:
            whole = tensor.detach().to(device).contiguous()
        if dist.get_world_size() > 1:
            dist.broadcast(whole, src=0)
        yield name, whole


def _described(name: str, tensor: Any) -> tuple[tuple[int, ...], torch.dtype]:
    if not isinstance(tensor, Tensor):
        raise TitanError(f"load_weights: {name} comes with a {type(tensor).__name__}, not with a tensor")
    return tuple(tensor.shape), tensor.dtype


def _nothing_given() -> Iterator[Any]:
    raise TitanError("load_weights: rank 0 was given no weights")
    yield


def _from_rank_0(value: Any) -> Any:
    """Rank 0's picklable value on every rank; over gloo."""
    if dist.get_world_size() == 1:
        return value
    told = [value]
    dist.broadcast_object_list(told, src=0, device=torch.device("cpu"))
    return told[0]
