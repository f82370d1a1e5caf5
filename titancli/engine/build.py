"""Building an engine from a recipe.

In order: mesh, model on meta, converters, the parallelize plan, materialise (initialise or load), optimizer.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from titancli.checkpoint.start_from import start_from
from titancli.data.values import Limits
from titancli.distributed.local import RowCut
from titancli.distributed.mesh import Mesh
from titancli.distributed.process_group import groups_wait_as_the_default_one
from titancli.engine.experts import (
    Balancing,
    RouterLosses,
    begins_unbalanced,
    report_frozen,
    router_losses,
)
from titancli.engine.first_weights import FirstWeights, awaited_checkpoint, first_weights, report_growth
from titancli.engine.graphed import GraphedModel
from titancli.engine.inputs import loss_of
from titancli.engine.optimizer_state import keep_peaks, remember
from titancli.engine.pipelined import PipelinedModel
from titancli.engine.runners import Runner, WholeModel
from titancli.engine.skip_step import Guard
from titancli.engine.status import EngineSettings, Unusable
from titancli.engine.step import Hooks
from titancli.engine.weights import Renewal, adapter_converter
from titancli.errors import PluginError, Problem, RecipeError, TitanError
from titancli.layout.degrees import Degrees
from titancli.models.blocks.kernels import prefer_fast_kernels
from titancli.models.blocks.moe import moe_layers
from titancli.models.loss import attach, without_loss
from titancli.models.roles import roles_of
from titancli.optimizers.nothing import Nothing
from titancli.optimizers.schedule import schedule_of
from titancli.parallel.pipeline import Placement, split
from titancli.protocols import Role
from titancli.recipe.check import component_checks
from titancli.recipe.layout import check_layout, on
from titancli.recipe.schema import Recipe, Training
from titancli.recipe.toml import dotted
from titancli.registry.component import build, build_hf, completed, component_info
from titancli.torch_version import check_torch

E = TypeVar("E")


@dataclass(frozen=True)
class MixedPrecision:
    """The dtypes of computation and reduction."""

    param: torch.dtype
    reduce: torch.dtype


def build_engine(
    made: Callable[..., E],
    recipe: Recipe,
    *,
    device: torch.device,
    frozen: bool,
    checkpoint: Path | None = None,
    fill: Callable[[list[Any]], None] | None = None,
) -> E:
    """Make a `titancli.Engine`; see its `build`.

    The caller still has to load adapters that the recipe's weights name: `Engine.adapters_from`.

    Args:
        made: the engine's class, called with the parts.
        checkpoint: as for `Engine.build`.
        fill: replaces `first_weights`; a dry run allocates no memory.
    """
    check_torch()
    degrees = recipe.degrees(dist.get_world_size())
    refuse_unfit(recipe, degrees)
    with groups_wait_as_the_default_one():
        mesh = Mesh(degrees, device)
    model, roles = sharded_model(recipe, mesh, device, frozen=frozen)
    parts, converters, placement = model.parts, model.converters, model.placement
    first, awaited, form = FirstWeights(), awaited_checkpoint(recipe, checkpoint), build_hf(recipe.model)
    if fill is not None:
        fill(parts)
    else:
        first = first_weights(recipe, parts, converters, device, mesh, placement, form, awaited)
    optimizer, hooks = None, Hooks([Renewal(parts, converters)])
    if not frozen:
        balancing = Balancing(
            parts,
            mesh.token_groups,
            device,
            begins_unbalanced=fill is None and begins_unbalanced(form, recipe, start_from(recipe)),
        )
        optimizer, hooks = trainer_of(recipe, model, roles, balancing, device)
        if fill is None and awaited is None:
            report_growth(recipe, form, parts)
        if awaited is None:  # otherwise called when the checkpoint is loaded
            balancing.weights_loaded()
    return made(
        mesh=mesh,
        device=device,
        optimizer=optimizer,
        hooks=hooks,
        settings=_settings(recipe, degrees, row_cut_of(parts[0], degrees)),
        hf_form=form,
        config=plain_config(recipe, degrees, device, model.parameter_count),
        uncut=lambda: _uncut(recipe),
        recipe=recipe,
        unusable=None if awaited is None else Unusable(f"{awaited} is not loaded yet", "weights"),
        **model._asdict(),
        **first._asdict(),
    )


class ShardedModel(NamedTuple):
    """A model and its loss on this rank, as members of `titancli.engine.core.EngineCore`."""

    parts: list[Any]
    placement: Placement | None
    runner: Runner
    converters: list[Any]
    loss: Any
    flops_per_token: float
    parameter_count: int


def sharded_model(
    recipe: Recipe, mesh: Mesh, device: torch.device, *, frozen: bool = False
) -> tuple[ShardedModel, dict[str, Role]]:
    """Build this rank's parts of the model and its loss, without values; and return the roles of all trained
    parameters of the whole model."""
    model = on_meta(recipe)
    flops = model.flops_per_token(recipe.training.seq_len)
    count = sum(parameter.numel() for parameter in model.parameters())
    converters = converted(model, recipe, mesh.degrees)
    loss = loss_of(recipe.loss, recipe.model)
    count += attach(model, loss)  # after converters, which neither freeze nor change it
    known = roles_of(model)
    roles = {name: known[name] for name, parameter in model.named_parameters() if parameter.requires_grad}
    own_losses = router_losses(model)
    parts, placement = parallelized(model, recipe, mesh, device)
    own = RouterLosses(parts, mesh.token_groups, own_losses)
    if recipe.compile.cuda_graphs != "none" and not frozen:
        runner: Runner = GraphedModel(parts[0], own, recipe=recipe, loss=loss, device=device)
    else:
        runner = runner_of(recipe, parts, placement, mesh, own, device)
    return ShardedModel(parts, placement, runner, converters, loss, flops, count), roles


def _uncut(recipe: Recipe) -> Any:
    """Build the whole model with its converters on meta, as for a single rank."""
    model = on_meta(recipe)
    converted(model, recipe, Degrees())
    return model


def converted(model: Any, recipe: Recipe, degrees: Degrees) -> list[Any]:
    """Apply the recipe's converters to a model on meta, and return them.

    Raises:
        PluginError: a converter does not change the model in place, or adds or renames parameters: added ones
            would get titan's initial values, and renamed ones would be saved under the new name.
    """
    found: list[Any] = []
    for config in recipe.converters:
        name = component_info(config).name
        converter = build(config, mesh=degrees, compile=recipe.compile.enable)
        owns = converter.owns
        if owns is not None and adapter_converter(found) is not None:
            raise PluginError(
                f"the converter {name} adds parameters of its own, and so does one before it",
                hint="use only one of them",
            )
        before = {key for key, _ in model.named_parameters()}
        if converter.convert(model) not in (None, model):
            raise PluginError(
                f"the converter {name} returned another model, which would not be used",
                hint="convert(model) must change the model in place and return nothing",
            )
        after = {key for key, _ in model.named_parameters()}
        if gone := sorted(before - after):
            raise PluginError(
                f"the converter {name} removed or renamed the parameter {gone[0]} ({len(gone)} in all)",
                hint="change layers in place: parameters must keep their names",
            )
        if added := sorted(key for key in after - before if owns is None or not owns(key)):
            raise PluginError(
                f"the converter {name} added the parameter {added[0]} ({len(added)} in all), whose initial "
                "value on meta is lost",
                hint="a converter with parameters of its own has `owns` and `initialise`, see "
                "titancli.protocols.ConverterDefaults",
            )
        found.append(converter)
    return found


def on_meta(recipe: Recipe) -> Any:
    """Build the model on the meta device, in the dtype that it is trained in."""
    with torch.device("meta"):
        model = build(recipe.model, seq_len=recipe.training.seq_len)
    model = model.to(getattr(torch, recipe.training.dtype))
    if recipe.debug.moe_force_load_balance:
        for layer in moe_layers(model).values():
            layer.force_load_balance()
    return model


def parallelized(
    model: Any, recipe: Recipe, mesh: Mesh, device: torch.device
) -> tuple[list[Any], Placement | None]:
    """Apply the recipe's plan to the model or this rank's stages; return them, and the placement of all
    stages."""
    kinds = precision(recipe.training)
    parallelize = build(
        recipe.parallelize,
        mesh=mesh,
        device=device,
        precision=kinds,
        activation_checkpoint=recipe.activation_checkpoint,
        compile=recipe.compile,
    )
    models, placement = [model], None
    if mesh.degrees.pp > 1:
        with without_loss(model) as loss:
            models, placement = split(model, recipe.pipeline, mesh.degrees.pp, mesh.pp_rank)
        if loss is not None and models[-1].output is not None:
            models[-1].loss = loss
    parts = [completed("model", parallelize(model)) for model in models]
    for part in parts:
        prefer_fast_kernels(part, device, kinds.param, recipe.training.seq_len)
    return parts, placement


def trainer_of(
    recipe: Recipe, model: ShardedModel, roles: Mapping[str, Role], balancing: Balancing, device: torch.device
) -> tuple[torch.optim.Optimizer, Hooks]:
    """Build the optimizer of this rank's parts, and the engine's hooks of a step.

    Args:
        roles: as for `optimizer_of`.
    """
    trained = [named for part in model.parts for named in part.named_parameters() if named[1].requires_grad]
    optimizer = optimizer_of(recipe, trained, roles)
    keep_peaks(optimizer, recipe.optimizer.lr)
    remember(optimizer)
    report_frozen(recipe)
    own: list[Any] = [balancing, Renewal(model.parts, model.converters)]
    if hasattr(optimizer, "around_backward"):  # gradients are wanted elsewhere than at the weights
        own.insert(0, optimizer)
    return optimizer, Hooks(own, last=Guard(recipe.stability, device))


def optimizer_of(
    recipe: Recipe, trained: list[tuple[str, nn.Parameter]], roles: Mapping[str, Role]
) -> torch.optim.Optimizer:
    """Build the recipe's optimizer for the parameters that this rank trains; a pipeline stage may have none.

    Args:
        roles: of all trained parameters of the whole model.

    Raises:
        RecipeError: the whole model has nothing to train.
        PluginError: the component did not return an optimizer, or returned one that must compute the loss
            again.
    """
    if not roles:
        raise RecipeError(
            "no parameter of the model requires a gradient, so there is nothing to train",
            hint="build a frozen engine, or add a converter with trainable parameters, such as lora",
        )
    if not trained:
        return Nothing(recipe.optimizer.lr or 0.0)
    made: Any = build(recipe.optimizer, named_parameters=trained, roles=roles)
    name = component_info(recipe.optimizer).name
    if not hasattr(made, "param_groups"):
        raise PluginError(f"the optimizer {name} built a {type(made).__name__}, not a torch.optim.Optimizer")
    closure = inspect.signature(made.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise PluginError(
            f"the optimizer {name} ({type(made).__name__}) needs a closure that computes the loss again",
            hint="titan steps once on gradients that are there: use one whose step() takes no arguments",
        )
    optimizer: torch.optim.Optimizer = made
    return optimizer


def refuse_unfit(recipe: Recipe, degrees: Degrees) -> None:
    """Check that a recipe fits the ranks, as a command does before it starts a run.

    Some of these mistakes would fail later inside torch, and some would silently corrupt gradients.

    Raises:
        RecipeError: lists all problems.
    """
    known = on(recipe, degrees)
    problems = [
        Problem("check", message if dotted(path) in message else f"{dotted(path)}: {message}", None, hint)
        for path, message, hint in (*check_layout(known), *component_checks(known))
    ]
    if problems:
        raise RecipeError(problems)


def runner_of(
    recipe: Recipe,
    parts: list[Any],
    placement: Placement | None,
    mesh: Mesh,
    own: RouterLosses,
    device: torch.device,
) -> Runner:
    """Return the runner that passes batches through the parts.

    Raises:
        RecipeError: a pipeline needs the width of the model, but its config has no `dim`.
    """
    row_cut = row_cut_of(parts[0], mesh.degrees)
    if placement is None:
        return WholeModel(parts[0], own, accumulate=recipe.training.accumulate, row_cut=row_cut)
    width = recipe.model.dim
    if width is None:
        raise RecipeError(
            "mesh.pp: the model's config has no `dim`, the width of the activations passed between stages"
        )
    return PipelinedModel(
        parts,
        placement,
        recipe.pipeline,
        mesh,
        own,
        width=width,
        dtype=precision(recipe.training).param,
        device=device,
        row_cut=row_cut,
    )


def row_cut_of(part: Any, degrees: Degrees) -> RowCut | None:
    """Return how the plan sharded rows over the ranks of mesh.cp.

    Raises:
        TitanError: the plan did not shard them.
    """
    found = part.row_cut
    if degrees.cp > 1 and found is None:
        raise TitanError(
            f"mesh.cp = {degrees.cp}, but the parallelize plan did not shard the rows", hint="set mesh.cp = 1"
        )
    return found


def plain_config(recipe: Recipe, degrees: Degrees, device: torch.device, parameters: int) -> dict[str, Any]:
    """Return the facts of the engine as plain data: `Engine.config`."""
    training = recipe.training
    return {
        "model": {
            "type": component_info(recipe.model).name,
            **json.loads(json.dumps(asdict(recipe.model), default=str)),  # a path is text
        },
        "mesh": asdict(recipe.mesh),
        "degrees": asdict(degrees),
        "world": degrees.world,
        "device": str(device),
        "parameters": parameters,
        "dtype": training.dtype,
        "compute_dtype": training.mixed_precision_param,
    }


def precision(training: Training) -> MixedPrecision:
    """Return the recipe's precision as torch's dtypes."""
    return MixedPrecision(
        param=getattr(torch, training.mixed_precision_param),
        reduce=getattr(torch, training.mixed_precision_reduce),
    )


def _settings(recipe: Recipe, degrees: Degrees, row_cut: RowCut | None) -> EngineSettings:
    training = recipe.training
    return EngineSettings(
        seed=training.seed,
        max_norm=training.max_norm,
        accumulation=recipe.accumulation(degrees),
        lr_factor=schedule_of(recipe),
        limits=limits_of(recipe, degrees, row_cut),
        seq_len=training.seq_len,
        budget=training.local_batch_size * training.seq_len,
    )


def limits_of(recipe: Recipe, degrees: Degrees, row_cut: RowCut | None) -> Limits:
    """Return the limits of a batch: the model is built for rows of seq_len, or for as many tokens in a row as
    a dataset joins."""
    longest, joined = recipe.training.seq_len, 1
    datasets = (recipe.dataset, *recipe.validation.datasets.values())
    if any(one is not None and one.joins_rows for one in datasets):
        rows = recipe.training.local_batch_size
        joined = max(rows, recipe.validation.local_batch_size or rows)
    # Otherwise later stages would wait for hidden states that the first stage cannot shard.
    between_stages = degrees.cp * degrees.tp if degrees.pp > 1 else 1
    return Limits(
        vocab_size=recipe.model.vocab_size,
        row_length=longest * joined,
        positions=recipe.model.max_seq_len or longest,
        multiple=math.lcm(between_stages, 1 if row_cut is None else row_cut.pieces),
    )
