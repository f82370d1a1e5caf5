"""Look at one step of a run in detail, on every rank: the callback of `titan replay`.

The ranks run the run's own loop, and the callback looks at one step before it is done. It uses the verb
`forward`, and gradients that are discarded again, which leave nothing behind: the step's result does not
change.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_proof.replay import RESULT
from titan_proof.watching import added, modules_of, numbers_of, watched
from titancli import IGNORE, Batch, Engine, TitanError, build, load_recipe
from titancli.distributed.together import Ranks
from titancli.engine import norm_of
from titancli.engine.step import PART, Backward, Step
from titancli.errors import UsageError
from titancli.observe.events import plain
from titancli.runs import RunFolder, write_atomically

if TYPE_CHECKING:
    from titan_proof import Probe as Config
    from titancli.loops.run import Run

Row = dict[str, Any]

logger = logging.getLogger(f"titancli.plugins.{__name__}")


class Probe:
    """Looks at one step, with which the run ends. Every rank has one."""

    def __init__(self, config: Config, *, engine: Engine, run: Run) -> None:
        """Set up the probe.

        Raises:
            UsageError: no module or parameter matches a requested name.
        """
        self._config, self._engine, self._run = config, engine, run
        self.found: dict[str, Any] = {}
        self._position: dict[str, Any] | None = None
        """The position in the data at which the next step begins."""
        self._names = modules_of(engine, config.layers)
        self._rows: list[Row] = []
        self._batches: Sequence[Batch] = []
        self._loss: Any = None
        self._lr: float | None = None
        self._began: dict[str, Any] | None = None
        self._state: tuple[dict[str, Tensor], dict[str, Any]] | None = None

    def run_start(self, step: int) -> None:
        self._position = position(self._run.data)

    def around_backward(self, backward: Backward) -> None:
        """Look at the data from which the step is about to be computed. Collective.

        Raises:
            TitanError: the loop calls `forward_backward` more than once in a step.
            UsageError: the step is to be tried without a row that it does not have.
        """
        if backward.step.number != self._config.step:
            return
        if self._batches:
            raise TitanError(
                "the loop calls forward_backward more than once in a step, which replay cannot show",
                hint="pass all micro-batches of a step in one call; the step's digest can still be compared",
            )
        engine, batches = self._engine, backward.batches
        self._batches, self._loss, self._began = batches, backward.loss, self._position
        if self._is_varied:
            self._state = _state_of(engine)
        with watched(engine, self._names, plainly=bool(self._config.layers)) as activations:
            mine = [row for k, batch in enumerate(batches) for row in self._rows_of(engine, k, batch)]
        gathered = Ranks().gather((engine.mesh.dp_rank, mine, numbers_of(activations)))
        by_rank = {dp_rank: rows for dp_rank, rows, _ in gathered}
        rows = [row for own in by_rank.values() for row in own]
        rows.sort(key=lambda row: (row["micro_batch"], row["dp_rank"], row["place"]))
        self._rows = [{"row": number, **row} for number, row in enumerate(rows, 1)]
        self._check_rows()
        self.found["activations"] = added([numbers for _, _, numbers in gathered])
        self._gradients(backward)

    @property
    def _is_varied(self) -> bool:
        """Return whether the step is also to be tried in another way."""
        return bool(self._config.without or self._config.overrides)

    def _check_rows(self) -> None:
        if self._config.without and "targets" not in self._batches[0]:
            raise UsageError("--without: the rows of this run have no targets to leave out")
        if any(row > len(self._rows) for row in self._config.without):
            raise UsageError(
                f"the step has the rows 1 to {len(self._rows)}", hint="use --without with one of these"
            )
        unit = self._batches[0].unit
        gone = {(row - 1) // unit for row in self._config.without}
        if gone and not any(row["targets"] for row in self._rows if (row["row"] - 1) // unit not in gone):
            raise UsageError("--without: no targets would be left in the step")

    def _rows_of(self, engine: Engine, number: int, batch: Batch) -> Iterator[Row]:
        """Yield the rows of this rank in one micro-batch."""
        hashes = row_hashes(batch)
        about = {"micro_batch": number, "dp_rank": engine.mesh.dp_rank, "gradient_norm": None}
        texts = "targets" in batch and "tokens" in batch
        log_probs = engine.forward(batch).cpu() if texts else torch.zeros(batch.rows, 0)
        for b in range(batch.rows):
            found: Row = {**about, "place": b, "hash": hashes[b], "loss": None, "targets": 0, "documents": []}
            if texts:
                tokens, counted = batch["tokens"][b].cpu(), batch["targets"][b].cpu() != IGNORE
                ids = batch["document_ids"][b].cpu() if "document_ids" in batch else None
                found |= {"loss": _mean(log_probs[b], counted), "targets": int(counted.sum())}
                found["documents"] = [
                    {
                        "begin": begin,
                        "end": end,
                        "targets": int(counted[begin:end].sum()),
                        "loss": _mean(log_probs[b, begin:end], counted[begin:end]),
                        "text": self._text(tokens[begin:end].tolist()),
                    }
                    for begin, end in _documents(tokens, ids, getattr(self._run.tokenizer, "eos_id", None))
                ]
            yield found

    def _text(self, ids: list[int]) -> str:
        tokenizer = self._run.tokenizer
        return " ".join(map(str, ids)) if tokenizer is None else str(tokenizer.decode(ids))

    def _gradients(self, backward: Backward) -> None:
        """Compute the norm of the gradient of each row's loss, starting with the highest loss; rows of a
        unit share one. The loss is a sum for now: the divisor is known only when the step is."""
        unit, engine = self._batches[0].unit, self._engine
        if "targets" not in self._batches[0]:
            return
        units = [self._rows[i : i + unit] for i in range(0, len(self._rows), unit)]
        units.sort(key=lambda own: -max(_high(row["loss"]) for row in own))
        parameters = [parameter for _, parameter in engine.trained_parameters()]
        for own in units[: self._config.gradients]:
            alone = _masked(self._batches[own[0]["micro_batch"]], keep=_places(own, engine))
            backward.compute([alone])
            gradients = [parameter.grad for parameter in parameters]
            norm = float(norm_of(gradients, engine.device, engine.mesh.pp_group))
            backward.forget()
            for row in own:
                row["gradient_norm"] = norm

    def gradients_ready(self, step: Step) -> None:
        """Record the gradients of the step, and the values that the guard judges by. Collective."""
        if step.number != self._config.step:
            return
        engine, weight = self._engine, float(step.weight)
        self._lr = step.lr_given
        for row in self._rows:
            if row["gradient_norm"] is not None and weight:
                row["gradient_norm"] /= weight
        mine = {}
        for name, parameter in engine.trained_parameters():
            gradient = float(norm_of([parameter.grad], engine.device)) / (weight or 1.0)
            mine[name] = [gradient, float(norm_of([parameter.detach()], engine.device))]
        everyones = Ranks().gather(mine)
        self.found["parameters"] = {name: norms for own in everyones for name, norms in own.items()}
        self.found["guard"] = None if engine.guard is None else engine.guard.view()

    def step_applied(self, step: Step) -> None:
        """Record the step's numbers and the loss after it, and end the run. Collective."""
        if step.number == self._config.step:
            numbers: dict[str, Any] = {"loss": step.average, "grad_norm": step.norm, "lr": step.lr}
            self.found["done"] = {
                **{name: float(value) for name, value in numbers.items()},
                "skipped": step.skipped is not None and bool(step.skipped > 0),
                "loss_after": self._loss_after(self._engine),
            }
            self._run.end_early(f"step {step.number} has been looked at")
        self._position = position(self._run.data)

    def _loss_after(self, engine: Engine) -> float:
        return float(engine.evaluate(self._tried(engine), self._loss)["loss"])

    def _tried(self, engine: Engine) -> Sequence[Batch]:
        """Return the step's batches without the rows to leave out, and without the rest of their units."""
        unit = self._batches[0].unit
        if not self._config.without:
            return self._batches
        gone = {(row - 1) // unit for row in self._config.without}
        rows = [row for row in self._rows if (row["row"] - 1) // unit not in gone]
        return [
            _masked(batch, keep=_places([row for row in rows if row["micro_batch"] == k], engine))
            for k, batch in enumerate(self._batches)
        ]

    # ------------------------------------------------------------------------------------------- afterwards

    def run_end(self, why: str) -> None:
        """Find where the rows come from, try the step in another way if requested, and write the findings.
        Collective.

        Raises:
            TitanError: the run did not reach the step, or the variation does not fit its state.
        """
        engine, run = self._engine, self._run
        if not run.has_ended or run.folder is None:
            return
        if "done" not in self.found:
            raise TitanError(f"the run ended before step {self._config.step}: {engine.step} steps were done")
        if self._state is not None:
            _free(engine)
            other = load_recipe(RunFolder(run.folder).recipe_lock, self._config.overrides).recipe
            with Engine.build(other, device=engine.device) as tried:
                _restore(tried, *self._state)
                self.found["tried"] = self._try(tried)
        if dist.get_rank() == 0:
            try:
                self._find_sources()
            except TitanError as error:
                logger.warning("cannot find where the rows come from: %s", error)
            found = plain({**self.found, "rows": self._rows})
            write_atomically(run.folder / RESULT, json.dumps(found))

    def _try(self, engine: Engine) -> dict[str, Any]:
        before = _skipped(engine)
        loss = engine.forward_backward(self._tried(engine), self._loss)["loss"]
        metrics = engine.optim_step(self._lr)
        numbers = {"loss": loss, "grad_norm": metrics["grad_norm"], "lr": metrics["lr"]}
        return {
            **{name: float(value) for name, value in numbers.items()},
            "skipped": _skipped(engine) > before,
            "loss_after": self._loss_after(engine),
        }

    def _find_sources(self) -> None:
        """Find where in the data each row begins, by reading again, row by row, from where the step began."""
        recipe = self._run.recipe
        if self._began is None or recipe is None:
            return
        unit = self._batches[0].unit
        dataset = build(
            recipe.dataset,
            tokenizer=self._run.tokenizer,
            seq_len=recipe.training.seq_len,
            rows=unit,
            dp_rank=0,
            dp_size=1,
            seed=recipe.training.seed,
        )
        dataset.load_state_dict(self._began)
        before = dataset.state_dict()
        for first, batch in zip(range(0, len(self._rows), unit), dataset, strict=False):
            for row, own in zip(self._rows[first : first + unit], row_hashes(batch), strict=True):
                if own == row["hash"]:
                    known = {k: v for k, v in before.items() if k not in ("version", "data")}
                    row["position"] = known
            before = dataset.state_dict()


def position(data: Any) -> dict[str, Any] | None:
    """Return the position in the data if they come from a dataset; None for others (prompts)."""
    return data.state if hasattr(data, "dataset") else None


# --------------------------------------------------------------------------------------------- the engine


def _state_of(engine: Engine) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return a copy of the engine's whole state on the host, except for that of callbacks."""
    tensors, counters = engine.live_state()
    own = {name: tensor for name, tensor in tensors.items() if not name.startswith(f"{PART}.")}
    return {name: _local(tensor).detach().cpu().clone() for name, tensor in own.items()}, counters


@torch.no_grad()
def _restore(engine: Engine, kept: dict[str, Tensor], counters: dict[str, Any]) -> None:
    """Copy the state of another engine into this one.

    Raises:
        UsageError: the states have different tensors or shapes.
    """
    tensors, _ = engine.live_state()
    mine = {name: _local(tensor) for name, tensor in tensors.items()}
    other = sorted(
        name
        for name in mine.keys() | kept.keys()
        if name not in mine or name not in kept or mine[name].shape != kept[name].shape
    )
    if other:
        raise UsageError(
            f"--with: {other[0]} does not match the run's state, so the step cannot be tried with it",
            hint="try other values of what the run has: optimizer.lr, loss.*, training.max_norm, …",
        )
    for name, tensor in mine.items():
        tensor.copy_(kept[name])
    engine.hooks.weights_loaded()
    engine.step, engine.tokens_seen = counters["step"], counters["tokens_seen"]
    if engine.guard is not None and "guard" in counters:
        engine.guard.load_state(counters["guard"])


def _free(engine: Engine) -> None:
    """Close an engine and release its memory even if it is still referred to: there may be no room for
    two."""
    tensors, _ = engine.live_state()
    engine.close()
    for name, tensor in tensors.items():
        storage = _local(tensor).untyped_storage()
        if storage.resizable() and not name.startswith(f"{PART}."):
            storage.resize_(0)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _skipped(engine: Engine) -> float:
    return 0.0 if engine.guard is None else float(engine.guard.skipped)


# ----------------------------------------------------------------------------------------------- the rows


def row_hashes(batch: Batch) -> list[int]:
    """Return a hash of each row: of its tokens and targets, or of everything if it has neither. Positions
    and columns that a loss has added are left out."""
    names = [name for name in ("tokens", "targets") if name in batch] or sorted(batch)
    parts = [batch[name].cpu().reshape(batch.rows, -1).contiguous().view(torch.uint8) for name in names]
    return [xxhash.xxh3_64_intdigest(row.numpy().tobytes()) for row in torch.cat(parts, dim=1)]


def _places(rows: Sequence[Row], engine: Engine) -> list[int]:
    """Return the positions in the micro-batch of those of these rows that are this rank's."""
    return [row["place"] for row in rows if row["dp_rank"] == engine.mesh.dp_rank]


def _masked(batch: Batch, keep: Sequence[int]) -> Batch:
    """Return the batch with targets in some rows only."""
    targets = torch.full_like(batch["targets"], IGNORE)
    targets[list(keep)] = batch["targets"][list(keep)]
    return Batch({**batch, "targets": targets}, unit=batch.unit)


def _documents(tokens: Tensor, ids: Tensor | None, eos: int | None) -> list[tuple[int, int]]:
    """Return where the documents of a row begin and end: by their ids, or else by the markers that end
    them."""
    if ids is not None:
        ends = (ids[1:] != ids[:-1]).nonzero().flatten().add(1).tolist()
    else:
        ends = [] if eos is None else (tokens == eos).nonzero().flatten().add(1).tolist()
    places = sorted({0, *ends, tokens.numel()})
    return list(pairwise(places))


def _mean(log_probs: Tensor, counted: Tensor) -> float | None:
    """Return the loss per target; None without a target."""
    number = int(counted.sum())
    return float(-log_probs[counted].double().sum()) / number if number else None


def _high(loss: float | None) -> float:
    """Return a loss to sort by; one that is not finite is higher than all others."""
    return -1.0 if loss is None else loss if loss < float("inf") else float("inf")
