"""Stand-ins for a dry run, without device and data: rows without values, and a recipe without GPU
features."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import torch

from titancli.errors import UsageError
from titancli.parallel import AllToAll
from titancli.protocols.batch import Batch
from titancli.recipe.schema import Compile, Recipe, needs_dataset
from titancli.registry.component import component_info


def on_a_cpu(recipe: Recipe) -> tuple[Recipe, list[str]]:
    """Return the recipe without features that need a GPU or take minutes, and the names of those left out."""
    left_out = ["frozen models beside the trained one"] * bool(recipe.loop.frozen_models(recipe))
    if recipe.compile.enable:
        budget = recipe.activation_checkpoint.mode == "memory_budget"
        left_out.append("compile" + ("(and with it the memory_budget of activations)" if budget else ""))
    left_out += ["compile.cuda_graphs"] * (recipe.compile.cuda_graphs != "none")
    recipe = dataclasses.replace(recipe, compile=Compile())
    if fields := [key for key, _ in recipe.parallelize.needs_gpu()]:
        left_out += [f"parallelize.{key}" for key in fields]
        plan: Any = dataclasses.replace(recipe.parallelize, **dict.fromkeys(fields, False))
        recipe = dataclasses.replace(recipe, parallelize=plan)
    if other_dispatcher(recipe):
        left_out.append("parallelize.expert_dispatch")
        plan = dataclasses.replace(recipe.parallelize, expert_dispatch=AllToAll())
        recipe = dataclasses.replace(recipe, parallelize=plan)
    return recipe, left_out


def other_dispatcher(recipe: Recipe) -> str | None:
    """Return the name of a dispatcher of experts that is not titan's own, which is computed instead."""
    given = recipe.parallelize.expert_dispatch or AllToAll()
    return None if isinstance(given, AllToAll) else component_info(given).name


def rows_of(recipe: Recipe, inputs: Collection[str], loss: Any, rows: int, device: torch.device) -> Batch:
    """Return `rows` rows of the recipe's length, with all fields that its model and loss need.

    Args:
        inputs: names of the model's inputs.

    Raises:
        UsageError: the model does not take rows of tokens.
    """
    if "tokens" not in inputs:
        raise UsageError(f"a dry run can only make rows of tokens, but the model takes {', '.join(inputs)}")
    shape = (rows, recipe.training.seq_len)
    tensors = {
        name: torch.zeros(shape, dtype=torch.int64, device=device)
        for name in ("tokens", "targets", "positions")
    }
    masked = recipe.dataset is not None and recipe.dataset.document_mask
    if masked or not needs_dataset(recipe.loop):
        tensors["document_ids"] = torch.zeros(shape, dtype=torch.int32, device=device)
    needs = loss.needs
    for name in set(needs) - set(tensors):
        dims = len(needs[name]) if isinstance(needs, Mapping) else len(shape)
        tensors[name] = torch.zeros(shape[:dims], device=device)
    return Batch(tensors)
