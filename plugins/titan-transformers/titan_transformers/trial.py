"""Check, on a tiny copy, that a model of transformers computes the same under titan as by itself.

The arguments of attention functions, and the code around them, differ between transformers' models and
releases. So each config is tested once per process before it is trained: a copy with small sizes and random
weights (`titan_transformers.tiny`), on rows of a batch, whole and of documents, is compared with
transformers' own eager forward of each document by itself: logits, and gradients.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from titan_transformers.cache import Cache
from titan_transformers.stages import stage_of
from titan_transformers.tensor_plan import parts_fault, sharded
from titan_transformers.theirs import hf_config, line_of, quiet, refused, whole_values
from titan_transformers.tiny import fewer_layers, tiny
from titancli.errors import RecipeError

LIMIT = 1e-3
"""Maximum difference of logits, relative to the largest one, and of gradients, relative to their norm."""
ROWS, LENGTH = 2, 24
"""Tokens in the test; fewer, if RoPE is limited to fewer."""
LARGEST = 50_000_000
"""Maximum number of parameters of a copy: some models cannot be made narrower."""

_tried: dict[str, Tried | RecipeError] = {}


class Tried(NamedTuple):
    """The results of a test."""

    apart: bool
    """Whether documents must be rows of their own, because a layer other than attention joins tokens."""
    tokenwise: bool
    """Whether only attention that a plan can shard joins tokens."""
    staged: bool
    """Whether blocks pass only hidden states to each other."""
    embeds_alone: bool
    """Whether the modules before the blocks can be a stage of their own."""
    unlike: frozenset[str]
    """Classes of modules that compute something else when sharded by tensor parallelism."""
    reads_weights: bool
    """Whether blocks use the weight of a Linear inside them without calling it."""


def try_once(values: Mapping[str, Any], make: Callable[[Mapping[str, Any]], Any]) -> Tried:
    """Compare a tiny copy with transformers, unless these values were already tested in this process.

    Args:
        make: titan's model of values, on meta.

    Raises:
        RecipeError: they differ, or the copy cannot be made or does not run; says what differs and by how
            much.
    """
    key = json.dumps(values, sort_keys=True, default=str)
    if key not in _tried:
        try:
            _tried[key] = _try(values, make)
        except RecipeError as error:
            _tried[key] = error
    found = _tried[key]
    if isinstance(found, RecipeError):
        raise RecipeError(found.message, hint=found.hint)
    return found


def _try(values: Mapping[str, Any], make: Callable[[Mapping[str, Any]], Any]) -> Tried:
    with _undisturbed():
        copy, theirs = _eager(values)
        try:
            ours = make(copy).to_empty(device="cpu")
            ours.tie()
            _draw(ours)
            theirs.load_state_dict(ours.state_dict())
            found = list(_relative_errors(ours, theirs))
        except RecipeError:
            raise
        except Exception as error:  # any error is caused by the given values
            what = f"a tiny copy of the model does not run: {line_of(error)}"
            raise refused(values, what, HINT) from error
        for name, difference in found:
            if not difference <= LIMIT:  # also for NaN
                what = (
                    f"on a tiny copy of the model, {name} differ from those of transformers by "
                    f"{difference:.2g} (eager attention)"
                )
                raise refused(values, what, HINT)
        if ours.apart:
            return Tried(True, False, False, False, frozenset(), False)
        staged, alone = (_staged(ours, first) for first in (len(ours.layers) // 2, 0))
        unlike, reads = _unlike(ours), _reads_weights(ours)
        return Tried(False, _tokenwise(ours), staged, staged and alone, unlike, reads)


_tried_cache: dict[str, str | None] = {}


def try_cache_once(values: Mapping[str, Any], make: Callable[[Mapping[str, Any]], Any]) -> None:
    """Compare a tiny copy with a cache, token by token, with the copy's result for whole rows.

    Raises:
        RecipeError: they differ, or the cache cannot be used; says which.
    """
    key = json.dumps(values, sort_keys=True, default=str)
    if key not in _tried_cache:
        with _undisturbed(), torch.no_grad():
            model = make(_eager(values)[0]).to_empty(device="cpu").eval()
            model.tie()
            _draw(model)
            try:
                _tried_cache[key] = _cache_fault(model)
            except Exception as error:  # any error of transformers
                _tried_cache[key] = line_of(error)
    if (fault := _tried_cache[key]) is not None:
        raise refused(values, f"it cannot generate with transformers' cache ({fault})")


def _cache_fault(model: Any) -> str | None:
    tokens = _tokens(model.base)[:, : 8 if model.rope is None else min(8, model.rope.length)]
    cache = Cache(model._parts)
    whole, start = model(tokens), tokens.shape[1] - 2
    rows = [cache.begin() for _ in tokens]
    pieces = [tokens[:, :start], *tokens[:, start:].split(1, 1)]
    made = []
    for piece in pieces:
        call = cache.extend(rows, [piece.shape[1]] * len(rows), tokens.device)
        made.append(model(piece.reshape(1, -1), cache=call))
    far = _far(torch.stack(made, 1), whole[:, start - 1 :])
    return None if far <= LIMIT else f"logits differ by {far:.2g}"


HINT = "hf_causal_lm cannot train it; titan list-components model lists titan's own model families"


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Run on the CPU with gradients, whatever the caller's context; its generator is restored."""
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.device("cpu"),
        torch.random.fork_rng(devices=[]),
        quiet(),
    ):
        yield


def _eager(values: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Return a copy's values, and transformers' own model of them: the smallest that can be made.

    Raises:
        RecipeError: none fits the limit.
    """
    from transformers import AutoModelForCausalLM

    whole = whole_values(values)
    errors = []
    for smaller in (tiny, fewer_layers, dict):
        copy = smaller(whole)
        try:
            config = hf_config(copy)
            with torch.device("meta"):
                model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            if (count := sum(p.numel() for p in model.parameters())) > LARGEST:
                errors.append(f"{count:,} parameters")
                continue
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
            with torch.no_grad():
                model(input_ids=_tokens(model)[:, :2], use_cache=False)
        except Exception as error:  # mismatched sizes
            errors.append(line_of(error))
            continue
        return copy, model.eval()
    reasons = "; ".join(dict.fromkeys(errors))
    raise refused(
        values,
        f"no tiny copy of the model can be created for a comparison with transformers ({reasons})",
        HINT,
    )


def _tokens(model: Any) -> Tensor:
    rows = model.get_input_embeddings().weight.shape[0]
    return torch.randint(0, rows, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def _draw(model: nn.Module) -> None:
    """Draw weights that make differences visible: distinct scores, no bias of 0, no norm of 1."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim < 2:
            parameter.uniform_(0.5, 1.5, generator=generator)
        else:
            parameter.normal_(0, max(parameter.shape[-2:]) ** -0.5, generator=generator)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.weight.normal_(generator=generator)


def _relative_errors(ours: Any, theirs: Any) -> Iterator[tuple[str, float]]:
    length = LENGTH if ours.rope is None else min(LENGTH, ours.rope.length)
    cut = length // 2 + 1
    tokens = _tokens(theirs)[:, :length]
    before = torch.get_rng_state()
    whole = ours(tokens)
    if not torch.equal(before, torch.get_rng_state()):
        what = "it uses random numbers in forward, which titan does not support"
        hint = "if [model.config] has a noise setting, set it to 0.0"
        raise refused({"model_type": theirs.config.model_type}, what, hint)
    with torch.no_grad():
        rows = torch.cat([theirs(row[None], use_cache=False).logits for row in tokens])
    yield "logits", _far(whole, rows)
    positions = torch.cat((torch.arange(cut), torch.arange(length - cut))).expand(ROWS, -1)
    documents = (torch.arange(length) >= cut).int().expand(ROWS, -1)
    parts = [theirs(part[None], use_cache=False).logits for row in tokens for part in (row[:cut], row[cut:])]
    meant = torch.cat(parts, dim=1).view_as(whole)
    mine = ours(tokens, positions, documents)
    if not (far := _far(mine, meant)) <= LIMIT:
        ours.apart = True
        mine = ours(tokens, positions, documents)
        if not _far(mine, meant) <= LIMIT:
            yield "logits of documents", far
    towards = torch.randn(mine.shape, generator=torch.Generator().manual_seed(1))
    (mine * towards).sum().backward()
    (meant * towards).sum().backward()
    expected = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    squares = torch.zeros(2)
    for name, parameter in ours.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        reference = expected.get(name, torch.zeros_like(parameter))
        squares += torch.stack(((grad - reference).square().sum(), reference.square().sum()))
    yield "gradients", float((squares[0] / squares[1]).sqrt())


@torch.no_grad()
def _staged(ours: Any, first: int) -> bool:
    """Return whether consecutive stages compute the same as the whole, the first stage with `first`
    blocks."""
    tokens = _tokens(ours.base)
    tokens = tokens[:, : LENGTH if ours.rope is None else min(LENGTH, ours.rope.length)]
    positions = torch.arange(tokens.shape[1]).expand(ROWS, -1)
    documents = (positions > 4).int()
    whole, count = ours(tokens, positions, documents), len(ours.layers)
    blocks = [f"layers.{number}" for number in range(count)]
    made = tokens
    try:
        for names in (("embeddings", *blocks[:first]), blocks[first:], ("output",)):
            part = stage_of(ours, names, ours._parts.gives_tuples)
            made = part(made, positions, documents)
    except Exception:  # modules of another stage are missing
        return False
    return made is not None and made.shape == whole.shape and _far(made, whole) <= LIMIT


@torch.no_grad()
def _unlike(ours: Any) -> frozenset[str]:
    """Return the classes of regions whose shards do not add up to the whole, on two ranks."""
    found, given = sharded(ours._parts.config, ours.base), {}
    hooks = [
        ours.base.get_submodule(path).register_forward_pre_hook(
            lambda module, args, kwargs, path=path: given.update({path: (args, kwargs)}), with_kwargs=True
        )
        for path in found.regions
    ]
    tokens = _tokens(ours.base)
    ours(tokens[:, : LENGTH if ours.rope is None else min(LENGTH, ours.rope.length)])
    for hook in hooks:
        hook.remove()
    unlike = set()
    for path, (args, kwargs) in given.items():
        module, start = ours.base.get_submodule(path), f"{path}."
        own = {name.removeprefix(start): s for name, s in found.styles.items() if name.startswith(start)}
        own = {name: style for name, style in own.items() if "." not in name}
        if parts_fault(module, own, args, kwargs) is not None:
            unlike.add(type(module).__name__)
    return frozenset(unlike)


@torch.no_grad()
def _reads_weights(ours: Any) -> bool:
    """Return whether a Linear in the blocks is never called in training."""
    called: set[nn.Module] = set()
    linears = {module for module in ours.layers.modules() if type(module) is nn.Linear}
    hooks = [module.register_forward_pre_hook(lambda module, _: called.add(module)) for module in linears]
    before = ours.training
    ours.train()(_tokens(ours.base)[:, :2])
    ours.train(before)
    for hook in hooks:
        hook.remove()
    return not linears <= called


@torch.no_grad()
def _tokenwise(ours: Any) -> bool:
    """Return whether a part of a row gives the same result by itself if no token sees another."""
    attentions: list[Any] = [module for module in ours.modules() if hasattr(module, "core_attention")]
    for module in attentions:
        module.core_attention = _alone
    tokens = _tokens(ours.base)
    tokens = tokens[:, : LENGTH if ours.rope is None else min(LENGTH, ours.rope.length)]
    half = tokens.shape[1] // 2
    positions = torch.arange(tokens.shape[1]).expand(ROWS, -1)
    try:
        whole, part = ours(tokens, positions), ours(tokens[:, half:], positions[:, half:])
    except Exception:  # it does not run on a part of a row
        return False
    return bool(attentions) and _far(part, whole[:, half:]) <= LIMIT


def _alone(q: Tensor, k: Tensor, v: Tensor, mask: Any, causal: bool = True, sinks: Any = None) -> Tensor:
    """Attend from each token to itself only."""
    return v.repeat_interleave(q.shape[2] // v.shape[2], 2)


def _far(found: Tensor, meant: Tensor) -> float:
    return float(((found - meant).abs().max() / meant.abs().max()).detach())
