"""Compute a case on a rank: two optimizer steps on given rows. Rank 0 collects all results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_proof.prove.given import samples_of, with_routes, without_targets
from titancli import IGNORE, Batch, Engine, Recipe, build
from titancli.distributed.local import offsets_of
from titancli.distributed.together import Ranks
from titancli.errors import TitanError
from titancli.recipe.schema import needs_dataset, needs_tokenizer

STEPS = 2
Part = tuple[tuple[int, ...], tuple[slice, ...], Any]
"""The shape of the whole tensor, and one rank's part of it: its place, and its values as an array."""


class Refusal(Exception):
    """The engine cannot be built in this way; the message says why."""

    def __init__(self, error: TitanError) -> None:
        super().__init__(error.message)


@dataclass
class Results:
    """The results of two steps, by `STEP KIND NAME`; on rank 0."""

    tensors: dict[str, Tensor]
    """Kinds: `initial` (a weight before the step), `loss`, `norm`, `routes` (tokens of each expert),
    `gradient` (of the loss's sum), `applied` (as the optimizer gets it), `weight`, and `output` (of a
    module: a number for each token, sorted)."""
    order: list[str] = field(default_factory=list)
    """Parameters in the order in which forward uses them; known on one process."""
    random: bool = False
    """Whether forward drew random numbers."""


def measure(
    recipe: Recipe,
    sizes: Sequence[int],
    *,
    saved: Path | None = None,
    nudge: float = 0.0,
    draw: int = 1,
    how: Sequence[str] = (),
) -> Results:
    """Do two steps. Collective; needs a process group.

    Args:
        sizes: rows of each micro-batch of a step on every data-parallel rank.
        saved: a folder to save to after the first step; a new engine then loads it for the second.
        nudge: the relative size of random changes to the initial weights.
        draw: seed of the random changes.
        how: ways in which the rows are given, of `titan_proof.prove.cases.GIVEN`.

    Raises:
        Refusal: the engine cannot be built on this layout, or its rows be given in this way.
    """
    record = Record(sizes, forward=not recipe.compile.enable, how=how)
    engine = engine_of(recipe)
    try:
        if nudge:
            _nudge(engine, nudge, draw)
        batches = batches_of(recipe, engine, sum(sizes))
        for step in range(STEPS):
            record.do(engine, batches[step], step)
            if saved is not None and step == 0:
                engine.save(saved)
                engine.close()
                engine = engine_of(recipe)
                engine.load(saved)
    finally:
        engine.close()
    return record.results()


def gradients_of(recipe: Recipe, rows: int, pieces: int) -> dict[str, Tensor]:
    """Return the gradients of the first step's loss on one process, summed over `pieces` pieces of the
    rows: each piece is computed in a call of its own."""
    engine = engine_of(recipe)
    try:
        total: dict[str, Tensor] = {}
        batch = batches_of(recipe, engine, rows)[0]
        for piece in batch.split(batch.rows // pieces):
            engine.forward_backward(piece)
            for name, parameter in engine.trained_parameters():
                if parameter.grad is not None:
                    total[name] = total.get(name, 0.0) + parameter.grad.float().cpu()
            engine.clear_gradients()
        return total
    finally:
        engine.close()


class Record:
    """Steps of engines, and all their results.

    Args:
        sizes: see `measure`.
        forward: also record outputs of modules; not of compiled ones, as hooks would change their graphs.
    """

    def __init__(self, sizes: Sequence[int], *, forward: bool, how: Sequence[str] = ()) -> None:
        self._sizes, self._how = sizes, how
        # Samples lie in other rows, with other padding.
        self._watch, self._forward = Watch(), forward and not {"samples", "epoch"} & {*how}
        self._parts: dict[str, Part] = {}
        self._tensors: dict[str, Tensor] = {}

    def do(self, engine: Engine, batch: Batch, step: int) -> None:
        """Do a step on the rows of all ranks. Collective."""
        self._parts |= _weights(engine, f"{step} initial")
        with self._watch.on(engine, step, forward=self._forward):
            self._keep(f"{step} loss", self._forward_backward(engine, batch, step)["loss"])
            self._parts |= _gradients(engine, f"{step} gradient")
            self._keep(f"{step} norm", engine.optim_step()["grad_norm"])
        self._parts |= _weights(engine, f"{step} weight")

    def _forward_backward(self, engine: Engine, batch: Batch, step: int) -> Any:
        try:
            batch = with_routes(batch, engine, step) if "routes" in self._how else batch
            samples = samples_of(batch, engine.loss) if "samples" in self._how else None
        except TitanError as error:
            raise Refusal(error) from error
        if samples is not None:
            # Micro-batches as large as the samples need, then two rows and a half.
            budget = None if step == 0 else 5 * engine.settings.seq_len // 2
            return engine.forward_backward(samples, budget=budget).metrics
        own = mine(engine, batch, self._sizes)
        if "epoch" in self._how:
            own.append(without_targets(own[0]))
        return engine.forward_backward(own)

    def _keep(self, key: str, value: Any) -> None:
        self._tensors[key] = torch.as_tensor(value).detach().float().reshape(()).cpu().clone()

    def results(self) -> Results:
        """Return the results of all steps, on rank 0. Collective."""
        watch = self._watch
        whole = _assembled(self._parts | watch.applied, watch.outputs)
        return Results(self._tensors | watch.routes | whole, watch.order, watch.random)


def device_of_group() -> torch.device:
    """Return the device on which the process group's ranks compute."""
    on_gpu = "nccl" in dist.get_backend_config()
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def engine_of(recipe: Recipe) -> Engine:
    """Return an engine of a recipe.

    Raises:
        Refusal: the engine cannot be built in this way.
    """
    from titancli.errors import PluginError, RankFailure

    try:
        return Engine.build(recipe, device=device_of_group())
    except (PluginError, RankFailure):
        raise
    except TitanError as error:
        raise Refusal(error) from error


def writable(engine: Engine) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters, except those stored in fewer bits than their dtype's, whose values cannot be
    changed."""
    for name, parameter in engine.named_parameters():
        own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if getattr(own, "bytes_per_value", None) is None:
            yield name, parameter


def _nudge(engine: Engine, size: float, draw: int) -> None:
    """Change weights a little, as much as rounding might."""
    generator = torch.Generator().manual_seed(draw)
    with torch.no_grad():
        for _, parameter in writable(engine):
            whole = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            whole.mul_(1 + size * torch.randn(whole.shape, generator=generator).to(whole.device))


# ------------------------------------------------------------------------------------------------ batches


def batches_of(recipe: Recipe, engine: Engine, rows: int) -> list[Batch]:
    """Return all rows of each step, `rows` for each data-parallel rank: random tokens, with different
    numbers of targets; for a model without tokens, rows of the recipe's dataset."""
    rows *= engine.mesh.degrees.dp
    if "tokens" in engine.parts[0].inputs:
        return [_tokens(recipe, engine, rows, step) for step in range(STEPS)]
    if not needs_dataset(recipe.loop) or needs_tokenizer(recipe.dataset):
        taken = ", ".join(engine.parts[0].inputs)
        raise TitanError(f"the model takes {taken}, and only its dataset could provide them")
    dataset = build(
        recipe.dataset,
        tokenizer=None,
        seq_len=recipe.training.seq_len,
        rows=rows,
        dp_rank=0,
        dp_size=1,
        seed=recipe.training.seed,
    )
    return [batch for batch, _ in zip(dataset, range(STEPS), strict=False)]


def _tokens(recipe: Recipe, engine: Engine, rows: int, step: int) -> Batch:
    length = recipe.training.seq_len
    vocabulary = recipe.model.vocab_size
    if vocabulary is None:
        raise TitanError("the model's config has no `vocab_size`, so no tokens can be drawn for it")
    generator = torch.Generator().manual_seed(1000 * recipe.training.seed + step)
    tokens = torch.randint(0, vocabulary, (rows, length + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    for row in range(rows):
        begin, half = length * (row % ROW_KINDS) // ROW_KINDS, length // 2
        targets[row, :begin] = IGNORE  # an average of averages would be wrong
        if row % 4 in (1, 2) and begin < half:
            targets[row, half:] = IGNORE  # padding
    places = torch.arange(length).expand(rows, length)
    batch = {"tokens": tokens[:, :-1].contiguous(), "targets": targets, "positions": places.contiguous()}
    if recipe.dataset is not None and recipe.dataset.document_mask:
        starts = torch.rand(rows, length, generator=generator) < 0.2
        starts[:, 0] = True
        batch["document_ids"] = starts.cumsum(1).int()
        batch["positions"] = places - torch.where(starts, places, 0).cummax(1).values
    needs = engine.loss.needs
    for name in sorted(set(needs) - set(batch)):
        dims = needs[name] if isinstance(needs, Mapping) else "BS"
        drawn = torch.randn((rows, length)[: len(dims)], generator=generator)
        drawn = drawn.abs() if name == "weights" else drawn
        # Log-probabilities near those of the model: ratios to it must not overflow.
        batch[name] = -np.log(vocabulary) + 0.1 * drawn if "logprob" in name else drawn
    pairs = recipe.loss.learns_from_pairs
    return Batch(batch, unit=2 if pairs else 1)


ROW_KINDS = 8
"""Number of rows that have different numbers of targets."""


def mine(engine: Engine, batch: Batch, sizes: Sequence[int]) -> list[Batch]:
    """Return this rank's micro-batches, with these numbers of rows."""
    dp, start, found = engine.mesh.degrees.dp, 0, []
    for size in sizes:
        own = slice(start + engine.mesh.dp_rank * size, start + (engine.mesh.dp_rank + 1) * size)
        found.append(Batch({name: tensor[own] for name, tensor in batch.items()}, unit=batch.unit))
        start += dp * size
    return found


# ----------------------------------------------------------------------------------------- what is looked at


class Watch:
    """Records values that a step does not keep: outputs of modules, gradients as they are applied,
    experts' tokens."""

    def __init__(self) -> None:
        self.outputs: dict[str, list[Any]] = {}
        self.applied: dict[str, Part] = {}
        self.routes: dict[str, Tensor] = {}
        self.order: list[str] = []
        self.random = False

    @contextmanager
    def on(self, engine: Engine, step: int, *, forward: bool) -> Iterator[None]:
        """Watch one step.

        Args:
            forward: also watch modules; not compiled ones, as hooks would change their graphs.
        """
        with ExitStack() as ends:
            # A hooked optimizer that would divide the gradients itself gets divided ones: leave the second
            # step as in a run.
            if engine.optimizer is not None and step == 0:

                def before(*given: Any) -> None:
                    self.applied |= _gradients(engine, f"{step} applied")

                ends.callback(engine.optimizer.register_step_pre_hook(before).remove)
            for model in engine.parts:
                self._watch_counts(model, step, ends)
                if forward:
                    self._watch_forward(model, step, ends)
            yield

    def _watch_counts(self, model: Any, step: int, ends: ExitStack) -> None:
        kept: Callable[..., None] = model.after_step

        def after_step(counts: dict[str, Tensor]) -> None:
            self.routes |= {
                f"{step} routes {name}": count.float().cpu().clone() for name, count in counts.items()
            }
            kept(counts)

        model.after_step = after_step
        ends.callback(setattr, model, "after_step", kept)

    def _watch_forward(self, model: Any, step: int, ends: ExitStack) -> None:
        residual = {f"layers.{name}": layer for name, layer in model.layers.items()}
        residual |= {
            name: child for name, child in model.named_children() if name not in ("layers", "output")
        }
        for name, module in residual.items():
            hook = self._keeper(f"{step} output {name}")
            ends.callback(module.register_forward_hook(hook).remove)
        for name, module in model.named_modules():
            own = [f"{name}.{key}".lstrip(".") for key, _ in module.named_parameters(recurse=False)]
            if own and step == 0:
                ends.callback(module.register_forward_pre_hook(self._comes_to(own)).remove)
        before: list[list[Tensor]] = []
        ends.callback(model.register_forward_pre_hook(lambda *given: before.append(_generators())).remove)

        def after(*given: Any) -> None:
            self.random |= not all(map(torch.equal, before.pop(), _generators()))

        ends.callback(model.register_forward_hook(after).remove)

    def _comes_to(self, names: list[str]) -> Callable[..., None]:
        def hook(*given: Any) -> None:
            self.order += [name for name in names if name not in self.order]

        return hook

    def _keeper(self, key: str) -> Callable[..., None]:
        def hook(module: nn.Module, given: Any, out: Any) -> None:
            out = out[0] if isinstance(out, tuple) and out else out
            again = torch._C._current_graph_task_id() != -1  # recomputed in backward
            if isinstance(out, Tensor) and out.is_floating_point() and out.ndim > 1 and not again:
                drawn = torch.Generator().manual_seed(0)
                along = torch.randn(out.shape[-1], generator=drawn)  # a norm would not show a rotation
                self.outputs.setdefault(key, []).append(
                    (out.detach().float().cpu() @ along).flatten().numpy()
                )

        return hook


def _weights(engine: Engine, kind: str) -> dict[str, Part]:
    state, _ = engine.save_state()
    weights = {name.removeprefix("model."): t for name, t in state.items() if name.startswith("model.")}
    return {f"{kind} {name}": part(t) for name, t in weights.items() if t.is_floating_point()}


def _generators() -> list[Tensor]:
    """Return the states of torch's own random generators."""
    on_gpu = device_of_group().type == "cuda"
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if on_gpu else [])]


def _gradients(engine: Engine, kind: str) -> dict[str, Part]:
    return {
        f"{kind} {name}": part(p.grad if p.grad is not None else torch.zeros_like(p))
        for name, p in engine.trained_parameters()
    }


def part(tensor: Tensor) -> Part:
    """Return this rank's part of a tensor, in float32."""
    if not isinstance(tensor, DTensor):
        return tuple(tensor.shape), (), tensor.detach().float().cpu().clone().numpy()
    if any(placement.is_partial() for placement in tensor.placements):
        raise TitanError("a gradient is a sum that was never reduced over the ranks (a Partial DTensor)")
    local = tensor.to_local().detach().float().cpu().clone()
    starts = offsets_of(tensor)
    place = tuple(slice(start, start + length) for start, length in zip(starts, local.shape, strict=True))
    return tuple(tensor.shape), place, local.numpy()


def _assembled(parts: dict[str, Part], outputs: dict[str, list[Any]]) -> dict[str, Tensor]:
    """Assemble tensors from the parts of all ranks, on rank 0. Replicas must be the same on every rank: if
    they are not, the values are NaN, so that the comparison fails."""
    everyones: list[Any] = Ranks().gather((parts, outputs))
    if dist.get_rank() != 0:
        return {}
    found: dict[str, Tensor] = {}
    seen: dict[str, dict[str, Any]] = {}
    for theirs, _ in everyones:
        for name, (shape, place, values) in theirs.items():
            whole = found.setdefault(name, torch.full(shape, torch.nan))
            here = seen.setdefault(name, {})
            if str(place) in here and not np.array_equal(here[str(place)], values):
                values = _agreed(here[str(place)], values)
            here[str(place)] = values
            whole[place] = torch.from_numpy(values)
    tokens: dict[str, list[Any]] = {}
    for _, theirs in everyones:
        for name, pieces in theirs.items():
            tokens.setdefault(name, []).extend(pieces)
    return found | {name: torch.from_numpy(np.sort(np.concatenate(p))) for name, p in tokens.items()}


def _agreed(first: Any, other: Any) -> Any:
    """Return the first of two replicas; NaN if they differ by more than rounding."""
    apart = float(np.linalg.norm(first - other)) / max(float(np.linalg.norm(first)), 1e-30)
    return np.full_like(first, np.nan) if not apart <= 1e-5 else first
