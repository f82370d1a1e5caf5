"""What an engine saves and loads: tensors keyed by parameter name, never by index."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titancli.checkpoint.exclude import NOTHING, Exclusion
from titancli.checkpoint.kept import kept_of
from titancli.errors import EnvironmentProblem, TitanError
from titancli.observe import comm

if TYPE_CHECKING:
    from titancli.checkpoint.manifest import Verify
    from titancli.engine.core import Core


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, nn.Parameter]]
) -> dict[str, Tensor]:
    """`optimizer.<parameter>.<key>` for every tensor of the optimizer's state."""
    initialise_state(optimizer)
    return {
        f"optimizer.{name}.{key}": value
        for name, parameter in named_parameters
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


@torch.no_grad()
def initialise_state(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer create the state of what it has not moved yet, changing no parameter.

    A step with a learning rate and gradients of zero does it for any optimizer; its count is taken back. The
    gradients that there are stay.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    lacking = [p for p in parameters if p not in optimizer.state]
    if not lacking:
        return
    gradients = [parameter.grad for parameter in parameters]
    rates = [group["lr"] for group in optimizer.param_groups]
    try:
        optimizer.zero_grad(set_to_none=True)
        for parameter in lacking:
            parameter.grad = torch.zeros_like(parameter)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        optimizer.step()
    except BaseException:
        for parameter in lacking:
            optimizer.state.pop(parameter, None)
        raise
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
    for parameter in lacking:
        state = optimizer.state.get(parameter, {})
        if isinstance(state.get("step"), Tensor):
            state["step"].zero_()


def load_state(
    engine: Core,
    folder: Path,
    *,
    optimizer: bool,
    verify: Verify = "full",
    exclude: Exclusion = NOTHING,
) -> dict[str, Any]:
    """Fill the engine's tensors from a checkpoint and set its counters; see `Engine.load`."""
    from titancli.checkpoint import load_checkpoint

    told_adapters(engine, folder, base=engine.base)
    kept = kept_of(folder)
    tensors, _ = engine.live_state()
    if not optimizer:
        tensors = {name: tensor for name, tensor in tensors.items() if name.startswith("model.")}

    def begin() -> None:
        engine.spoil(f"loading {folder} has failed half way", "load" if optimizer else "weights")

    state = load_checkpoint(folder, tensors, verify=verify, exclude=exclude, begin=begin)
    for converter in engine.converters:
        for part in engine.parts:
            converter.after_step(part)
    if optimizer:
        counters = state.get("engine")
        if counters is None:
            raise EnvironmentProblem(
                f"{folder} holds weights but no training state, so a run cannot be continued from it",
                hint=f"start a new run from it with weights={folder}",
            )
        try:
            _set_counters(engine, counters, exclude)
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise EnvironmentProblem(
                f"{folder} holds a training state that titan does not write: {type(error).__name__}: {error}",
                hint="take another checkpoint (--step N)",
            ) from error
    engine.kept = kept or engine.kept
    return state


def told_adapters(engine: Core, folder: Path, *, base: dict[str, str] | None = None) -> dict[str, Any] | None:
    """What a checkpoint tells of its adapters; None where it has none, or is no checkpoint.

    Args:
        base: the one that the engine's adapters stand beside, if it is known by now.

    Raises:
        TitanError: they are others than the engine's, or it has none.
        EnvironmentProblem: they were trained on another base.
    """
    from titancli.checkpoint.base import adapters_of, require_base
    from titancli.checkpoint.manifest import MANIFEST, read_manifest

    told = adapters_of(read_manifest(folder)) if (folder / MANIFEST).is_file() else None
    if told is None:
        return None
    if engine.adapters is None:
        raise TitanError(
            f"{folder} holds adapters ({told['form']}) and not the weights of a model",
            hint=f"merge them first: titan convert-checkpoint {folder} FOLDER --to hf",
        )
    for name, here in engine.adapters.facts.items():
        if told[name] != here:
            raise TitanError(
                f"{folder} holds adapters of {name} {told[name]}, and this recipe's have {here}",
                hint=f"write {name} = {told[name]!r} in the converter",
            )
    if base is not None:
        require_base(told, folder, base)
    return told


def _set_counters(engine: Core, counters: dict[str, Any], exclude: Exclusion) -> None:
    if not exclude.has("step"):
        step, tokens = counters["step"], counters["tokens_seen"]
        if type(step) is not int or type(tokens) is not int:
            raise TypeError(f"step {step!r}, tokens_seen {tokens!r}")
        version = counters.get("version", step)
        if type(version) is not int:
            raise TypeError(f"version {version!r}")
        engine.step, engine.tokens_seen = step, tokens
        engine.version = max(engine.version, version)
    if engine.guard is not None and "guard" in counters and not exclude.has("guard"):
        engine.guard.load_state(counters["guard"])


# ---------------------------------------------------------------------------------- over a pipeline's stages


class Known(NamedTuple):
    """What every rank of a pipeline knows of a tensor that one of them has."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    holder: int
    """The rank of the pipeline that has it."""


def all_known(engine: Core, named: Iterable[tuple[str, Tensor]]) -> list[Known]:
    """What all ranks of the pipeline have, in the order of the stages. Collective.

    Args:
        named: of this rank's stages, in their order.
    """
    rank = engine.mesh.pp_rank
    mine = [Known(name, tuple(tensor.shape), tensor.dtype, rank) for name, tensor in named]
    if engine.placement is None:
        return mine
    stage_of: dict[str, int] = {}
    for stage, part in zip(engine.placement.mine, engine.parts, strict=True):
        stage_of |= dict.fromkeys(
            [name for name, _ in (*part.named_parameters(), *part.named_buffers())], stage
        )
    gathered: list[Any] = [None] * dist.get_world_size(engine.mesh.pp_group)
    dist.all_gather_object(gathered, [(stage_of[known.name], known) for known in mine], engine.mesh.pp_group)
    found = sorted((entry for entries in gathered for entry in entries), key=lambda entry: entry[0])
    return [known for _, known in found]


def parameter_shapes(engine: Core) -> dict[str, tuple[int, ...]]:
    """Of everything of the whole plain model that is saved. Collective."""
    return {known.name: known.shape for known in all_known(engine, engine.base_parameters().items())}


def whole_tensors(engine: Core) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of the whole model, whole, one at a time. Collective.

    Away from rank 0 a tensor of another stage is on meta.
    """
    mine = dict(engine.plain_parameters())
    home = getattr(engine.parts[0], "parameter_device", engine.device)
    group, rank = engine.mesh.pp_group, engine.mesh.pp_rank
    to_rank_0 = dist.get_rank() == 0 or (group is not None and 0 in dist.get_process_group_ranks(group))
    for known in all_known(engine, mine.items()):
        whole = torch.empty(known.shape, dtype=known.dtype, device="meta")
        if known.holder == rank:
            tensor = mine[known.name]
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if rank > 0 and to_rank_0:
                comm.wait(dist.isend(whole.to(home).contiguous(), dst=0, group=group))
        elif dist.get_rank() == 0:
            whole = torch.empty(known.shape, dtype=known.dtype, device=home)
            comm.wait(dist.irecv(whole, group=group, group_src=known.holder))
        yield known.name, whole
