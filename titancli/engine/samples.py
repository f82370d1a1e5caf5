"""The verbs for lists of samples: packed into micro-batches, with results by sample."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titancli.distributed.together import Ranks
from titancli.engine.inputs import LogProbs, checked_batches, name_of
from titancli.engine.packing import (
    COLUMNS,
    Checked,
    Packed,
    Room,
    Rows,
    checked_samples,
    checksum,
    dealt,
    field_of,
    pack,
)
from titancli.engine.sample_losses import Kept, OfSamples, sample_loss
from titancli.engine.training import accumulating, refuse_another
from titancli.errors import TitanError
from titancli.parallel.fsdp import reshard
from titancli.protocols.result import Result
from titancli.protocols.samples import Sample

if TYPE_CHECKING:
    from titancli.engine.agreement import Call
    from titancli.engine.core import EngineCore


class How(NamedTuple):
    """Options of passing samples to a verb."""

    budget: int | None = None
    shared: bool = True


def as_list(given: Any) -> Any:
    """Return the argument of a verb; an iterator becomes a list, so that it can be read twice."""
    plain = isinstance(given, Mapping | Sequence) or not isinstance(given, Iterable)
    return given if plain else list(given)


def are_samples(given: Any, how: How) -> bool:
    """Return whether a verb received samples, not batches; an empty list is samples if each rank passes its
    own."""
    if isinstance(given, Sample):
        raise TitanError("a sample was passed, not a list of samples", hint="pass [sample]")
    if isinstance(given, Mapping) or not isinstance(given, Sequence):
        return False
    return any(isinstance(one, Sample) for one in given) or (not given and not how.shared)


def refuse_how(how: How) -> None:
    """Check that options for samples are not passed with batches.

    Raises:
        TitanError: they are.
    """
    if how != How():
        raise TitanError(
            "budget and shared are for lists of samples, but batches were passed",
            hint="batches have their rows, and each rank passes its own",
        )


# ---------------------------------------------------------------------------------------------- verbs


def forward(
    engine: EngineCore, samples: Sequence[Sample], how: How, loss_to_call: Callable[[], Any]
) -> list[Tensor]:
    """Return log-probabilities, or values, of samples; see `Engine.forward`."""
    with engine._verb("forward") as call:
        packed, loss = _packed(engine, call, samples, loss_to_call, how)
        with engine._no_gradients("forward"), call.shared():
            rows = _log_probs(engine, packed, loss)
            return _by_sample(engine, packed, how, rows)[0]


def forward_backward(engine: EngineCore, samples: Sequence[Sample], loss: Any, how: How) -> Result:
    """Add gradients of samples; see `Engine.forward_backward`."""
    with engine._verb("forward_backward") as call:

        def begin() -> Any:
            refuse_another(engine)
            return sample_loss(loss, engine._loss_of)

        packed, kept = _packed(engine, call, samples, begin, how)
        kept.begin(packed, engine.device)
        placed = [batch.to(engine.device) for batch in packed.batches]
        of_all: Callable[..., Any] | None = None
        if isinstance(kept, OfSamples):
            given = list(samples)

            def of_all(step: Any) -> dict[str, Tensor]:
                with torch.no_grad(), step.stream.copy().drawn():
                    rows = _log_probs(engine, packed, LogProbs(kept.temperature), placed)
                for part in engine.parts:
                    reshard(part)
                leaves = _by_sample(engine, packed, how, rows)[0]
                shares = engine.dp_size if how.shared else 1
                return kept.differentiate(leaves, given, packed, shares)

        with accumulating(engine, call, placed, kept, None, first=of_all) as added:
            added.sums = engine.runner.forward_backward(placed, kept)
        with call.shared():
            found = _by_sample(engine, packed, how, *_everywhere(engine, kept))
        return Result(added.metrics, found[0], found[1] if len(found) > 1 else None)


# --------------------------------------------------------------------------------------------- helpers


class Facts(NamedTuple):
    """Facts about the samples of one rank that all ranks need."""

    rows: int
    longest: int
    """The maximum number of filled positions of a row."""
    names: tuple[str, ...] | None
    """The columns of its samples; None if it has no samples."""

    @classmethod
    def of(cls, rows: Rows, samples: Sequence[Checked]) -> Facts:
        return cls(rows.count, rows.longest, tuple(sorted(samples[0].columns)) if samples else None)


def _packed(
    engine: EngineCore, call: Call, samples: Sequence[Sample], begin: Callable[[], Any], how: How
) -> tuple[Packed, Any]:
    """Return this rank's samples as micro-batches, and the loss; all ranks check them before the model
    runs."""
    settings, part = engine.settings, engine.parts[0]
    with call.agreed():
        if part.inputs[0] != "tokens":
            raise TitanError(
                f"samples are lists of tokens, but {type(part).__name__} takes {part.inputs[0]}",
                hint="pass batches",
            )
        loss = begin()
        room = Room.of(
            how.budget, settings.budget, settings.seq_len, settings.limits, engine.runner.rows_multiple
        )
        checked = checked_samples(samples, settings.limits.vocab_size, part.routing, room.row, room.why)
        if not isinstance(loss, LogProbs):
            _check_loss(checked, loss)
        call.given(f"with {'shared samples' if how.shared else 'samples of each rank'}")
        call.given(f"with budget={how.budget}")
        if how.shared:
            if not checked:
                raise TitanError("no sample was passed", hint="with shared=False a rank may pass none")
            call.given(f"with {len(checked)} samples of checksum {checksum(checked)}")
    piles = dealt(checked, engine.dp_size) if how.shared else [checked]
    together = "document_ids" in part.inputs
    packs = [Rows(pile, room.length_for(pile), shared=together) for pile in piles]
    facts = [Facts.of(rows, checked) for rows in packs]
    if not how.shared:
        with call.shared():
            facts = Ranks().gather(facts[0])
    rows = packs[engine.dp_rank if how.shared else 0]
    shape = room.shape(max(one.rows for one in facts), max(one.longest for one in facts))
    with call.agreed():
        names = _names(facts, loss)
        packed = pack(rows, shape, names, [len(one.tokens) for one in checked], part.routing)
        found = checked_batches(packed.batches, part, loss, settings.limits, engine.device)
        packed.batches[:] = found.batches
        call.given_batches(found.batches, found.counts)
        call.given(f"with the loss {name_of(loss)} at temperature {loss.temperature}")
    return packed, loss


def _names(facts: Sequence[Facts], loss: Any) -> list[str]:
    """Return the columns of all ranks' samples; those that the loss needs if no rank has a sample.

    Raises:
        TitanError: they differ.
    """
    known = {one.names: rank for rank, one in reversed(list(enumerate(facts))) if one.names is not None}
    if len(known) > 1:
        (some, rank), (others, other) = list(known.items())[:2]
        name = min(set(some) ^ set(others))
        has, lacks = (rank, other) if name in some else (other, rank)
        raise TitanError(
            f"the samples of rank {has} have {field_of(name)}, but those of rank {lacks} have not",
            hint="all samples of a call must have the same fields",
        )
    return sorted(next(iter(known), None) or {"advantages", "weights", *_needs(loss)} - {"targets"})


def _needs(loss: Any) -> Sequence[str]:
    """Return the names of what a loss reads from a batch."""
    return (loss.needs,) if isinstance(loss.needs, str) else tuple(loss.needs)


def _check_loss(samples: Sequence[Checked], loss: Any) -> None:
    """Check that samples have what the loss needs.

    Raises:
        TitanError: samples lack a field that the loss needs, or have weights that it ignores.
    """
    name = name_of(loss)
    needs = _needs(loss)
    shapes: Mapping[str, str] = loss.needs if isinstance(loss.needs, Mapping) else {}
    if by_row := [one for one, shape in shapes.items() if shape == "B"]:
        raise TitanError(
            f"the loss {name} takes {by_row[0]} as one number for each row, but samples share rows",
            hint="pass batches, or use a loss of numbers for each token",
        )
    for sample in samples:
        if lacking := [one for one in needs if one not in sample.columns and one != "targets"]:
            field, in_extra = field_of(lacking[0]), lacking[0] not in COLUMNS.values()
            raise TitanError(
                f"the loss {name} needs {field}, which sample {sample.index} has not",
                hint=f"pass extra={{{field!r}: ...}}" if in_extra else f"pass Sample(..., {field}=...)",
            )
        weights = sample.columns["weights"]
        if not loss.weighted and bool(((weights != 0) & (weights != 1)).any()):
            raise TitanError(
                f"sample {sample.index}: its mask has other numbers than 0 and 1, but the loss {name} does "
                f"not weigh targets",
                hint='use the loss "sft", for one',
            )


def _log_probs(
    engine: EngineCore, packed: Packed, loss: LogProbs, placed: Sequence[Any] | None = None
) -> Tensor:
    """Return log-probabilities of all rows, [R, S], on all ranks with a part of them."""
    batches = placed or [batch.to(engine.device) for batch in packed.batches]
    return torch.cat([engine.runner.forward(batch, loss) for batch in batches])


def _everywhere(engine: EngineCore, kept: Kept) -> list[Tensor]:
    """Return the kept values of all rows on every rank of a pipeline."""
    if engine.placement is not None:
        for rows in kept.kept:
            dist.broadcast(rows, group=engine.mesh.pp_group, group_src=engine.placement.last)
    return kept.kept


def _by_sample(engine: EngineCore, packed: Packed, how: How, *several: Tensor) -> list[list[Tensor]]:
    """Return values of rows by sample; shared samples get those of all data-parallel ranks."""
    found = [packed.unpacked(rows) for rows in several]
    if not how.shared or engine.dp_size == 1:
        return found
    flat = torch.cat([one for numbers in found for one in numbers])
    dist.all_reduce(flat, group=engine.mesh.dp_group)  # a sample has values on one rank, and 0 on others
    pieces = iter(flat.split(list(packed.lengths) * len(several)))
    return [[next(pieces) for _ in numbers] for numbers in found]
