"""Compare the uses of trained weights with the engine that has them: a Hugging Face folder from which a
new engine starts, and generation with a cache, one token at a time."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_proof.prove.compare import FACTOR, FLOOR, Reference, compared, distance, finite, reference_of
from titan_proof.prove.measure import Record, Refusal, Results, batches_of, engine_of, mine, writable
from titancli import Engine, Recipe
from titancli.checkpoint import export_hf, open_weights
from titancli.errors import TitanError
from titancli.models.blocks.moe import moe_layers
from titancli.protocols import HFForm

GROWN = 5.0
"""The factor by which matrices are enlarged for generation: at the start of training attention is nearly
the same for all tokens, so a wrong position would hardly show."""
PROMPT = 5
"""Number of tokens that are read at once, before the others come one by one."""


def exported(recipe: Recipe, sizes: Sequence[int], folder: Path) -> dict[str, Any]:
    """Do a step, export the weights, and compare the next step of an engine that starts from the export with
    that of the exported engine. If the base is stored in fewer bits, which would round the merged weights
    once more, the new engine has no converters. Collective; the answer is rank 0's.

    Raises:
        Refusal: the model has no Hugging Face form, or the engine cannot be built.
    """
    with _closed(engine_of(recipe)) as engine:
        if engine.hf_form is None:
            raise Refusal(TitanError("the model has no Hugging Face form (hf= of its component)"))
        try:
            engine.hf_form.config_json()
        except TitanError as error:  # transformers' model lacks something
            raise Refusal(error) from error
        adapted = engine.adapters is not None
        rounds = len(list(writable(engine))) < len(list(engine.named_parameters()))
        second = _after_a_step(engine, recipe, sizes)
        if engine.hf_form.loses_biases:  # and warns: they begin at zero again
            _clear_biases(engine)
        saved = folder / "step-1"
        engine.save(saved)
        form = recipe.loss.hf_form(engine.hf_form, {})
        if dist.get_rank() == 0:
            weights = open_weights(saved, recipe.model, of_head=form.of_loss)
            export_hf(weights, form, {}, folder / "hf")
        dist.barrier()
        lost = {name: parameter.detach().clone() for name, parameter in _lost(engine, form)}
        expected = _recorded(engine, second, sizes)
    again = replace(recipe, weights=folder / "hf", converters=[] if rounds else recipe.converters)
    with _closed(engine_of(again)) as engine:
        engine.step = 1  # the same random numbers, where the model draws some
        with torch.no_grad():
            for name, parameter in engine.named_parameters():
                if name in lost:
                    parameter.copy_(lost[name])
        found = _recorded(engine, second, sizes)
    dist.barrier()
    if dist.get_rank() != 0:
        return {"status": "right"}
    shutil.rmtree(folder)
    return compared(found, reference_of(_kept(expected, adapted), expected))


def _kept(expected: Results, adapted: bool) -> Results:
    """Return the results that a new engine must share: none of the optimizer's state, and with adapters,
    which are merged into their base, only outputs and losses."""
    names = ("loss", "output") if adapted else ("initial", "loss", "gradient", "norm", "applied", "output")
    return replace(expected, tensors={k: t for k, t in expected.tensors.items() if k.split(" ")[1] in names})


def _after_a_step(engine: Engine, recipe: Recipe, sizes: Sequence[int]) -> Any:
    """Do a step, so that no weight is as it was initialized; return the rows of the next."""
    first, second = batches_of(recipe, engine, sum(sizes))
    engine.forward_backward(mine(engine, first, sizes))
    engine.optim_step()
    return second


def _recorded(engine: Engine, batch: Any, sizes: Sequence[int]) -> Results:
    record = Record(sizes, forward=True)
    record.do(engine, batch, 1)
    return record.results()


def _lost(engine: Engine, form: HFForm) -> list[tuple[str, Tensor]]:
    """Return the parameters that the folder lacks, and says so: those of a loss, or, of a model with a head
    in place of it, the output layer's."""
    whole, adapters = form is engine.hf_form, engine.adapters
    return [
        (name, parameter)
        for name, parameter in engine.named_parameters()
        if adapters is None or not adapters.owns(name)
        if (name not in form.of_loss if name.startswith("loss.") else not (whole or form.sources(name)))
    ]


def _clear_biases(engine: Engine) -> None:
    for part in engine.parts:
        for layer in moe_layers(part).values():
            layer.clear_bias()


@contextmanager
def _closed(engine: Engine) -> Iterator[Engine]:
    """Close the engine on exit. Its own context manager does not wait for other ranks if something raises."""
    try:
        yield engine
    finally:
        engine.close()


# ----------------------------------------------------------------------------------------------- generation


def generated(
    recipe: Recipe, sizes: Sequence[int], reference: Reference | None, *, by_rows: bool = False
) -> dict[str, Any]:
    """Do a step, and compare the logits of the model for sampling with those of training: for whole rows; for
    tokens that come through the cache one at a time; and for rows of unequal length.
    Collective; the answer is rank 0's.

    Args:
        sizes: see `measure`.
        reference: for the effect of rounding on outputs; only rank 0 has it.
        by_rows: values of converters depend on the tokens of a call, so only whole rows are compared.

    Raises:
        Refusal: the model cannot generate, or the layout is refused.
    """
    with _closed(engine_of(recipe if recipe.converters else replace(recipe, weights=None))) as engine:
        batch = mine(engine, _after_a_step(engine, recipe, sizes), sizes)[0]
        with torch.no_grad():
            for name, parameter in writable(engine):
                if name.startswith("layers.") and parameter.ndim > 1:
                    parameter.mul_(GROWN)
        if "tokens" not in batch:
            raise Refusal(
                TitanError(f"the model takes {', '.join(engine.parts[0].inputs)}: it has no tokens")
            )
        tokens = batch["tokens"]
        places = torch.arange(tokens.shape[1]).expand_as(tokens).contiguous()
        plain = {"tokens": tokens, "targets": batch["targets"], "positions": places}
        whole, sampled, cached = _Outputs(), _Outputs(), _Outputs()
        with whole.of(engine.parts[0]):
            expected = engine.forward(plain, return_logits=True).float().cpu()
        tokens = tokens.to(engine.device)
        found: dict[str, Tensor] = {}
        try:
            with engine.sampling() as model:
                given = {name: plain[name].to(engine.device) for name in model.inputs if name in plain}
                with sampled.of(model):
                    found["sampled"] = model(**given).float().cpu()
                if not by_rows:
                    with cached.of(model):
                        found["generation"] = _one_by_one(model, tokens, [PROMPT] * len(tokens))
                    found["ragged"] = _one_by_one(model, tokens, _lengths(tokens))
        except TitanError as error:
            raise Refusal(error) from error
    if dist.get_rank() != 0:
        return {"status": "right"}
    tolerance = max(FLOOR, FACTOR * (reference.noise["1 output"] if reference else 0.0))
    first = {"sampled": sampled, "generation": cached}
    return _answer(
        expected,
        found,
        tolerance,
        lambda kind: first[kind].first_other(whole, tolerance) if kind in first else None,
    )


def _one_by_one(model: Any, tokens: Tensor, prompts: Sequence[int]) -> Tensor:
    """Return the logits of each call's last token, [B, calls, V], for prompts of these lengths and then one
    token per call."""
    cache, device = model.new_cache(), tokens.device
    rows = [cache.begin() for _ in tokens]
    begin = torch.cat([row[:count] for row, count in zip(tokens, prompts, strict=True)])
    found = [model(begin[None], cache=cache.extend(rows, prompts, device))]
    for call in range(tokens.shape[1] - PROMPT):
        new = torch.stack([row[count + call] for row, count in zip(tokens, prompts, strict=True)])
        found.append(model(new[None], cache=cache.extend(rows, [1] * len(rows), device)))
    return torch.stack(found, 1).float().cpu()


def _lengths(tokens: Tensor) -> list[int]:
    """Return lengths of prompts, each shorter than PROMPT by its number modulo PROMPT."""
    return [PROMPT - number % PROMPT for number in range(len(tokens))]


def _answer(
    expected: Tensor,
    found: dict[str, Tensor],
    tolerance: float,
    first_other: Callable[[str], tuple[str, str] | None],
) -> dict[str, Any]:
    """Return the comparison, in the form of `titan_proof.prove.compare.compared`.

    Args:
        expected: [B, S, V].
        found: logits by kind, in the order of reporting: `sampled` of whole rows, others [B, calls, V] of
            each call's last token.
        first_other: the first module of a kind whose tokens differ, and its parameter.
    """
    errors: dict[tuple[str, int], float] = {}
    for kind, logits in found.items():
        first = 0 if kind == "sampled" else PROMPT - 1
        for call in range(logits.shape[1]):
            token, own = first + call, expected[:, first + call]
            if kind == "ragged":
                own = torch.stack([row[token - number % PROMPT] for number, row in enumerate(expected)])
            errors[kind, token] = distance(logits[:, call], own)
    worst = max(errors, key=lambda key: errors[key])
    rows = {"sampled": " of whole rows", "ragged": " of rows of unequal length"}.get(worst[0], "")
    found_worst = {
        "worst": finite(errors[worst]),
        "where": f"logits of token {worst[1]}{rows}",
        "tolerance": tolerance,
    }
    wrong = next((key for key, error in errors.items() if error > tolerance), None)
    if wrong is None:
        return {"status": "right", **found_worst, "fault": None}
    kind, token = wrong
    output, parameter = first_other(kind) or (None, None)
    fault: dict[str, Any] = {
        "step": 2,
        "kind": kind,
        "token": token,
        "parameter": parameter,
        "enters": None,
        "output": output,
        "routes": [],
        "wrong": 0,
        "of": 0,
        "difference": finite(errors[wrong]),
        "scale": None,
    }
    return {"status": "wrong", **found_worst, "fault": fault}


class _Outputs:
    """Projections of each module's outputs, for every token, in the order in which modules are called."""

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
        """Return the first module whose tokens differ from those of whole rows, and its parameter."""
        for name, pieces in whole.pieces.items():
            expected, found = (torch.cat(p).sort().values for p in (pieces, self.pieces.get(name, pieces)))
            if expected.shape == found.shape and distance(found, expected) > tolerance:
                return name, self.parameters[name]
        return None
