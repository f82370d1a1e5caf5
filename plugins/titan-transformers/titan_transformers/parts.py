"""transformers' models, split into parts that titan's engine can train.

The parts are the model below its output, the output, and further facts about both, for a `config.json`.
Anything that would silently compute something else is rejected by name: an output that is more than a matrix
with a scale and a cap, attention that is not causal, random numbers in forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from titan_transformers.attention import (
    ATTENTION,
    DECLARED,
    DENSE,
    LOOKED_INTO,
    Rows,
    has_own_attention,
    register_attention,
    seen_by_attention,
)
from titan_transformers.experts import EXPERTS, register_experts, stacked_experts
from titan_transformers.rope import GrowingRope, growing_rope
from titan_transformers.theirs import choose, line_of, made, refused, tiny_values
from titan_transformers.values import buffer_values
from titancli.errors import RecipeError
from titancli.models.blocks.head import Output
from titancli.models.blocks.masks import document_masks


@dataclass(frozen=True)
class Parts:
    """A model of transformers on meta, and its parts."""

    whole: Any
    """The whole model, with its output."""
    config: Any
    """transformers' config."""
    base_name: str
    base: Any
    """A PreTrainedModel that maps tokens to hidden states."""
    head_name: str
    head: Output
    layers_path: str
    """Path of the blocks in the base."""
    experts: dict[str, nn.Module]
    """Stacked experts by their names in the base."""
    buffers: dict[str, Tensor]
    """Values of the base's buffers by name, on the CPU: on meta they would be lost."""
    rope: GrowingRope | None
    """RoPE that depends on the other rows in a batch, if the model has it."""
    untraced: str | None
    """Why the base cannot run on meta; None: it ran, and attention is declared."""
    gives_tuples: bool
    """Whether a block returns its hidden states in a tuple."""


def take_apart(values: Mapping[str, Any]) -> Parts:
    """Build a model on meta, and check that titan can train it.

    Raises:
        RecipeError: it cannot; says why.
    """
    register_attention()
    register_experts()
    whole = made(values, ATTENTION, EXPERTS)
    if has_own_attention(type(whole)):
        choose(whole, DENSE, EXPERTS)
    config = whole.config
    # Some have the prefix of a model that contains them.
    base_name = whole.base_model_prefix if hasattr(whole, whole.base_model_prefix) else "model"
    base, head = getattr(whole, base_name, None), whole.get_output_embeddings()
    children = dict(whole.named_children())
    head_name = next((name for name, child in children.items() if child is head), None)
    if base is None or head_name is None or type(head) is not nn.Linear:
        raise refused(values, f"{type(whole).__name__} has no output layer that is a single matrix")
    others = [
        name for name in children if name not in (base_name, head_name) and _has_parameters(children[name])
    ]
    if others or any(True for _ in whole.parameters(recurse=False)):
        raise refused(
            values, f"{type(whole).__name__} has parameters outside its blocks: {', '.join(others)}"
        )
    try:
        base.get_input_embeddings()
    except NotImplementedError as error:
        raise refused(
            values, f"transformers does not say where {type(base).__name__} embeds tokens"
        ) from error
    with torch.device("cpu"):
        output = _output(values, whole, base, head)
    layers_path = _blocks(values, base)
    _refuse_odd_blocks(values, base, base.get_submodule(layers_path))
    rope = growing_rope(base)
    experts = stacked_experts(base)
    buffers = buffer_values(values, base)
    shapes: list[bool] = []
    hook = base.get_submodule(layers_path)[0].register_forward_hook(
        lambda module, given, out: shapes.append(isinstance(out, tuple))
    )
    untraced = _trace(base, config)
    if untraced == LOOKED_INTO:
        choose(whole, DENSE, EXPERTS)
        untraced = _trace(base, config)
    hook.remove()
    return Parts(
        whole,
        config,
        base_name,
        base,
        head_name,
        output,
        layers_path,
        experts,
        buffers,
        rope,
        untraced,
        any(shapes),
    )


def experts_fault(values: Mapping[str, Any]) -> str | None:
    """Return why a model's experts cannot be sharded over ranks; None if they can. Determined with a tiny
    copy."""
    try:
        with torch.device("meta"):
            found = take_apart(tiny_values(values)).experts
    except RecipeError as error:
        return error.message
    return None if found else f"{values['model_type']} has no stacked experts that titan computes"


def _trace(base: Any, config: Any) -> str | None:
    """Run a base on meta, which declares its attention; return why that fails, if it does."""
    tokens = torch.zeros(1, 8, dtype=torch.int64, device="meta")
    # Some modules cache results, which would stay on meta.
    before = [(module, dict(vars(module)), dict(module._buffers)) for module in base.modules()]
    try:
        with torch.no_grad(), torch.device("meta"):
            run_base(base, config, tokens, torch.arange(8)[None], Rows(None, document_masks(None)))
    except Exception as error:  # for example data-dependent control flow
        return error.message if isinstance(error, RecipeError) else line_of(error)
    finally:
        for module, own, buffers in before:
            declared = {key: value for key, value in vars(module).items() if key in DECLARED}
            vars(module).clear()
            vars(module).update(own | declared)
            module._buffers.clear()
            module._buffers.update(buffers)
    return None


def run_base(base: Any, config: Any, tokens: Tensor, positions: Tensor, rows: Rows) -> Tensor:
    """Return the hidden states [B, S, dim] of whole rows, or of this rank's parts of them."""
    given = {"position_ids": positions, "attention_mask": torch.ones_like(tokens), "use_cache": False}
    takes = inspect.signature(base.forward).parameters
    with seen_by_attention(config, rows):
        return base(input_ids=tokens, **{key: value for key, value in given.items() if key in takes})[0]


# --------------------------------------------------------------------------------------------------- output


class _Anything(tuple):
    """Stands in for a base's output: hidden states first, and None for everything else."""

    last_hidden_state: Tensor

    def __getattr__(self, name: str) -> None:
        return None


def _output(values: Mapping[str, Any], whole: Any, base: Any, head: nn.Linear) -> Output:
    """Return the output, including operations on hidden states before it and on logits after it.

    The loss is computed inside it, from what the base returns. The code around the base is run with test
    values in place of hidden states and logits; the result must be cap · tanh(scale · x / cap), or scale · x.
    """
    hidden = torch.linspace(-2, 3, 2 * head.in_features).view(1, 2, -1) + 0.1
    steps = torch.tensor([-40.0, -3.0, -1e-3, 1e-3, 0.5, 7.0, 90.0, 1e30])
    logits = steps.repeat(-(-head.out_features // len(steps)))[: head.out_features].expand(1, 2, -1)
    returned = _Anything((hidden,))
    returned.last_hidden_state = hidden
    entered: list[Tensor] = []

    def stand_in(x: Tensor) -> Tensor:
        entered.append(x)
        return logits.clone()

    # Some call the model within the base rather than the base.
    bases = [module for module in base.modules() if hasattr(module, "base_model_prefix")]
    for module in bases:
        module.forward = lambda *args, **kwargs: returned
    head.forward = stand_in  # type: ignore[method-assign, assignment]
    try:
        with torch.no_grad():
            tokens = torch.zeros(1, 2, dtype=torch.int64)
            left = whole(input_ids=tokens, use_cache=False).logits
    except Exception as error:
        raise refused(
            values, f"{type(whole).__name__}'s forward cannot be traced: {line_of(error)}"
        ) from error
    finally:
        del head.forward
        for module in bases:
            del module.forward
    before = _scale(hidden, entered[0]) if len(entered) == 1 else None
    after = _bend(logits, left)
    if before is None or after is None or (before != 1 and head.bias is not None):
        raise refused(
            values,
            f"between its blocks and the loss {type(whole).__name__} does more than multiply by one "
            f"matrix, scale and cap, which titan's chunked loss does not support",
        )
    with torch.device("meta"):
        output = Output(head.in_features, head.out_features, bias=head.bias is not None)
    output.weight, output.bias = head.weight, head.bias  # the embedding's, if they are tied
    output.scale, output.cap = before * after[0], after[1]
    return output


def _scale(given: Tensor, found: Tensor) -> float | None:
    """Return the factor between two tensors; None if they are not proportional."""
    if given.shape != found.shape or found.is_meta:
        return None
    factor = float((found / given).flatten()[0])
    factor = round(factor) if abs(factor - round(factor)) < 1e-6 and factor > 0.5 else factor
    return factor if torch.allclose(found, given * factor, rtol=1e-5, atol=0) else None


def _bend(given: Tensor, found: Tensor) -> tuple[float, float | None] | None:
    """Return scale and cap; None if it is another function."""
    if given.shape != found.shape or found.is_meta or not bool(found.isfinite().all()):
        return None
    largest = float(found.max())
    if largest > 1e20 or given.shape[-1] < 8:
        scale = _scale(given, found)
        return None if scale is None else (scale, None)
    scale = _scale(given[..., 2:4], found[..., 2:4])
    if scale is None:
        return None
    meant = largest * torch.tanh(given * (scale / largest))
    return (scale, largest) if torch.allclose(found, meant, rtol=1e-4, atol=1e-7) else None


# --------------------------------------------------------------------------------------------------- blocks


def _blocks(values: Mapping[str, Any], base: nn.Module) -> str:
    """Return the path of the blocks: the longest list of modules that is not within another list."""
    lists: dict[str, int] = {}
    for path, module in base.named_modules():
        within = any(path.startswith(f"{other}.") for other in lists)
        if isinstance(module, nn.ModuleList) and not within and _has_parameters(module):
            lists[path] = len(module)
    if not lists:
        raise refused(values, f"{type(base).__name__} has no list of blocks")
    return max(lists, key=lambda path: lists[path])


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _causal(block: nn.Module) -> list[bool]:
    """Return whether each attention in a block is causal, according to transformers."""
    return [bool(module.is_causal) for module in block.modules() if hasattr(module, "is_causal")]


def _refuse_odd_blocks(values: Mapping[str, Any], base: Any, blocks: Any) -> None:
    for block in blocks:
        if not all(_causal(block)):
            raise refused(values, f"{type(block).__name__} has no causal attention")
    if draws := sorted(_random(base)):
        settings = base.config.to_dict()  # including its defaults
        keys = [k for k, v in settings.items() if "drop" in k and isinstance(v, float) and v > 0]
        named = ", ".join(f"{key} = {settings[key]}" for key in sorted(keys)) or ", ".join(draws)
        raise refused(
            values,
            f"it uses dropout ({named}), which titan does not support",
            hint="set these to 0.0 in [model.config]",
        )


def _random(base: nn.Module) -> Iterator[str]:
    """Yield the names of modules and fields that draw random numbers in forward."""
    for path, module in base.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            yield path.rpartition(".")[2]
        yield from (k for k, v in vars(module).items() if "drop" in k and isinstance(v, float) and v > 0)
