"""What weights are trained for, each compared with the engine that has them: a Hugging Face folder that a new
engine starts from, and tokens that come one at a time through a cache.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titancli.checkpoint.base import open_weights
from titancli.checkpoint.hf.folder import export_hf
from titancli.engine import Engine
from titancli.errors import TitanError
from titancli.models.blocks.moe import moe_layers
from titancli.protocols import HFFormDefaults
from titancli.prove.compare import FACTOR, FLOOR, Reference, compared, distance, finite, reference_of
from titancli.prove.measure import Record, Refusal, Results, batches_of, engine_of, mine
from titancli.recipe.schema import Recipe
from titancli.registry.defaults import with_defaults

GROWN = 5.0
"""How much larger matrices are made for generation: at the start of training attention is nearly the same for
all tokens, so that a wrong position would hardly show."""
PROMPT = 5
"""Tokens that are read at once, before the others come one by one."""


def exported(recipe: Recipe, rows: int, folder: Path) -> dict[str, Any]:
    """Do a step, export the weights, and compare the next step of an engine that starts from the export with
    that of the engine that was exported. Collective; the answer is rank 0's.

    Raises:
        Refusal: the model has no Hugging Face form, or the engine cannot be built.
    """
    with _closed(engine_of(recipe)) as engine:
        if engine.hf_form is None:
            raise Refusal(TitanError("the model has no Hugging Face form (hf= of its component)"))
        try:
            engine.hf_form.config_json()
        except TitanError as error:  # what transformers' model does not have
            raise Refusal(error) from error
        adapted = engine.adapters is not None
        second = _after_a_step(engine, recipe, rows)
        if with_defaults(
            HFFormDefaults, engine.hf_form
        ).loses_biases:  # and says so: they begin at zero again
            _clear_biases(engine)
        saved = folder / "step-1"
        engine.save(saved)
        if dist.get_rank() == 0:
            export_hf(open_weights(saved, recipe.model), engine.hf_form, {}, folder / "hf")
        dist.barrier()
        expected = _recorded(engine, second)
    with _closed(engine_of(replace(recipe, weights=folder / "hf"))) as engine:
        engine.step = 1  # the same random numbers, where the model draws some
        found = _recorded(engine, second)
    dist.barrier()
    if dist.get_rank() != 0:
        return {"status": "right"}
    shutil.rmtree(folder)
    return compared(found, reference_of(_kept(expected, adapted), expected))


def _kept(expected: Results, adapted: bool) -> Results:
    """What an engine that starts anew must share: not the optimizer's state, and of adapters, which are
    merged into their base, only what comes out."""
    names = ("loss", "output") if adapted else ("initial", "loss", "gradient", "norm", "applied", "output")
    return replace(expected, tensors={k: t for k, t in expected.tensors.items() if k.split(" ")[1] in names})


def _after_a_step(engine: Engine, recipe: Recipe, rows: int) -> Any:
    """Do a step, so that no weight is what it is at the start; return the rows of the next."""
    first, second = batches_of(recipe, engine, rows)
    engine.forward_backward(mine(engine, first))
    engine.optim_step()
    return second


def _recorded(engine: Engine, batch: Any) -> Results:
    record = Record(forward=True)
    record.do(engine, batch, 1)
    return record.results()


def _clear_biases(engine: Engine) -> None:
    for part in engine.parts:
        for layer in moe_layers(part).values():
            layer.clear_bias()


@contextmanager
def _closed(engine: Engine) -> Iterator[Engine]:
    """Not the engine's own context manager, which waits for nobody where something raises."""
    try:
        yield engine
    finally:
        engine.close()


# ----------------------------------------------------------------------------------------------- generation


def generated(recipe: Recipe, rows: int, reference: Reference | None) -> dict[str, Any]:
    """Do a step, and compare the logits of tokens that come through the cache one at a time with those of
    whole rows; then those of rows of unequal length, padded at their beginning. Collective; the answer is
    rank 0's. Converters are left out, as `titan generate` does.

    Args:
        reference: for what rounding makes of outputs; only rank 0 has it.

    Raises:
        Refusal: the model cannot generate, or the layout is refused.
    """
    with _closed(engine_of(replace(recipe, weights=None, converters=[]))) as engine:
        batch = mine(engine, _after_a_step(engine, recipe, rows))[0]
        with torch.no_grad():
            for name, parameter in engine.named_parameters():
                if name.startswith("layers.") and parameter.ndim > 1:
                    parameter.mul_(GROWN)
        if "tokens" not in batch:
            raise Refusal(
                TitanError(f"the model takes {', '.join(engine.parts[0].inputs)}: it has no tokens")
            )
        tokens = batch["tokens"]
        places = torch.arange(tokens.shape[1]).expand_as(tokens).contiguous()
        plain = {"tokens": tokens, "targets": batch["targets"], "positions": places}
        whole, cached = _Outputs(), _Outputs()
        with whole.of(engine.parts[0]):
            expected = engine.forward(plain, return_logits=True).float().cpu()
        tokens = tokens.to(engine.device)
        try:
            with engine.sampling() as model:
                with cached.of(model):
                    found = _one_by_one(model, tokens, None)
                padded = _one_by_one(model, *_padded(tokens))
        except TitanError as error:
            raise Refusal(error) from error
    if dist.get_rank() != 0:
        return {"status": "right"}
    tolerance = max(FLOOR, FACTOR * (reference.noise["output"] if reference else 0.0))
    return _answer(expected, found, padded, tolerance, cached.first_other(whole, tolerance))


def _one_by_one(model: Any, tokens: Tensor, padding: Tensor | None) -> Tensor:
    """The logits of each call's last token, [B, calls, V]."""
    cache = model.new_cache(tokens.shape[1], padding)
    calls = [tokens[:, :PROMPT], *tokens[:, PROMPT:].split(1, dim=1)]
    return torch.cat([model(call, cache=cache)[:, -1:] for call in calls], 1).float().cpu()


def _padded(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Rows that begin later, each with as many tokens of padding as its number, fewer than PROMPT."""
    padding = torch.arange(len(tokens), device=tokens.device) % PROMPT
    moved = [
        torch.cat([row.new_zeros(int(n)), row[: len(row) - int(n)]])
        for row, n in zip(tokens, padding, strict=True)
    ]
    return torch.stack(moved), padding


def _answer(
    expected: Tensor, found: Tensor, padded: Tensor, tolerance: float, first: tuple[str, str] | None
) -> dict[str, Any]:
    """What is wrong, as `titancli.prove.compare.compared` says it."""
    errors: dict[tuple[int, bool], float] = {}
    for call in range(found.shape[1]):
        token = PROMPT - 1 + call
        errors[token, False] = distance(found[:, call], expected[:, token])
        own = [expected[row, token - row % PROMPT] for row in range(len(expected))]
        errors[token, True] = distance(padded[:, call], torch.stack(own))
    worst = max(errors, key=lambda key: errors[key])
    where = f"logits of token {worst[0]}{' of padded rows' * worst[1]}"
    told = {"worst": finite(errors[worst]), "where": where, "tolerance": tolerance}
    wrong = sorted((key for key, error in errors.items() if error > tolerance), key=lambda key: key[::-1])
    if not wrong:
        return {"status": "right", **told, "fault": None}
    token, is_padded = wrong[0]
    fault: dict[str, Any] = {
        "step": 2,
        "kind": "padded" if is_padded else "generation",
        "token": token,
        "parameter": None if is_padded or first is None else first[1],
        "enters": None,
        "output": None if is_padded or first is None else first[0],
        "routes": [],
        "wrong": 0,
        "of": 0,
        "difference": finite(errors[token, is_padded]),
        "scale": None,
    }
    return {"status": "wrong", **told, "fault": fault}


class _Outputs:
    """What each module that has parameters makes of every token, in the order in which they are called."""

    def __init__(self) -> None:
        self.pieces: dict[str, list[Tensor]] = {}
        self.parameters: dict[str, str] = {}

    @contextmanager
    def of(self, model: nn.Module) -> Iterator[None]:
        handles = []
        for name, module in model.named_modules():
            own = [key for key, _ in module.named_parameters(recurse=False)]
            if own:
                self.parameters[name] = f"{name}.{own[0]}".lstrip(".")
                handles.append(module.register_forward_hook(self._keeper(name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _keeper(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, given: Any, out: Any) -> None:
            if isinstance(out, Tensor) and out.is_floating_point() and out.ndim > 1:
                along = torch.randn(out.shape[-1], generator=torch.Generator().manual_seed(0))
                self.pieces.setdefault(name, []).append((out.detach().float().cpu() @ along).flatten())

        return hook

    def first_other(self, whole: _Outputs, tolerance: float) -> tuple[str, str] | None:
        """The first module whose tokens differ from those of whole rows, and its parameter."""
        for name, pieces in whole.pieces.items():
            expected, found = (torch.cat(p).sort().values for p in (pieces, self.pieces.get(name, pieces)))
            if expected.shape == found.shape and distance(found, expected) > tolerance:
                return name, self.parameters[name]
        return None
