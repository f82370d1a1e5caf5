"""Datasets: batches of one shape, a position to resume from, and the same rows on any number of ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch

from titan_testing.behaviour.subject import Check, Subject
from titancli import IGNORE, Batch
from titancli.data import ByteTokenizer
from titancli.data.loader import Loader
from titancli.errors import TitanError
from titancli.recipe.schema import needs_tokenizer
from titancli.registry.component import build

ROWS, SEED = 4, 7


def made(subject: Subject, *, dp_rank: int = 0, dp_size: int = 1, state: Any = None) -> Any:
    """Build a rank's dataset; all ranks together have ROWS rows."""
    tokenizer = build(ByteTokenizer()) if needs_tokenizer(subject.config) else None
    dataset = subject.build(
        tokenizer=tokenizer,
        seq_len=subject.seq_len,
        rows=ROWS // dp_size,
        dp_rank=dp_rank,
        dp_size=dp_size,
        seed=SEED,
    )
    if state is not None:
        dataset.load_state_dict(json.loads(json.dumps(state)))
    return dataset


def difference(one: Batch, other: Batch) -> str | None:
    """Describe the first difference between two batches, if any."""
    if set(one) != set(other):
        return f"one has {', '.join(sorted(one))}, the other {', '.join(sorted(other))}"
    for name in one:
        if one[name].shape != other[name].shape:
            return f"{name} is {list(one[name].shape)} and {list(other[name].shape)}"
        if not torch.equal(one[name], other[name]):
            return f"{name} has different values"
    return None


def _two(subject: Subject) -> list[Batch]:
    found = []
    for batch in islice(made(subject), 2):
        if not isinstance(batch, Batch):
            raise TypeError(f"it returned a {type(batch).__name__}, not a titancli.Batch")
        found.append((batch, Batch({name: tensor.clone() for name, tensor in batch.items()})))
    if any(difference(batch, before) for batch, before in found):
        raise TitanError("the first batch changed when the second was read: return new tensors")
    return [batch for batch, _ in found]


def batches(subject: Subject) -> Iterator[str]:
    """Check that two batches have the same valid shapes."""
    found = _two(subject)
    if len(found) < 2:
        yield (
            f"it ends after {len(found)} batches of {ROWS} rows of {subject.seq_len}, but two are "
            f"needed for the checks: use values with more data in configs"
        )
        return
    shapes = [{name: (list(t.shape), t.dtype) for name, t in batch.items()} for batch in found]
    if shapes[0] != shapes[1]:
        yield f"two batches have different shapes: {shapes[0]} and {shapes[1]}; pad the last one"
    first = found[0]
    if first.rows != ROWS:
        yield f"a batch has {first.rows} rows, but it was built with rows={ROWS}"
    if wrong := [name for name, tensor in first.items() if tensor.device.type != "cpu"]:
        yield f"{', '.join(wrong)} is not on the CPU: the loader moves batches to the device"
    for name in {"tokens", "targets"} & set(first):
        yield from _ids(subject, name, first[name])


def _ids(subject: Subject, name: str, ids: torch.Tensor) -> Iterator[str]:
    if ids.dtype != torch.int64:
        yield f"{name} are {ids.dtype}, but must be int64"
    vocabulary = build(ByteTokenizer()).vocab_size if needs_tokenizer(subject.config) else None
    legal = (ids >= 0) | ((ids == IGNORE) & torch.tensor(name == "targets"))
    if vocabulary is not None:
        legal &= ids < vocabulary
    if not legal.all():
        yield f"{name} holds {int(ids[~legal][0])}, which is not an id of the tokenizer"


def again(subject: Subject) -> Iterator[str]:
    """Check that the same configuration and seed give the same rows."""
    for number, (one, other) in enumerate(zip(_two(subject), _two(subject), strict=True)):
        if found := difference(one, other):
            yield (
                f"batch {number} differs in a second instance: {found}; random numbers must follow from "
                f"seed, epoch and row number"
            )


def position(subject: Subject) -> Iterator[str]:
    """Check that states are constant plain JSON that lead a fresh dataset to the next batch."""
    dataset = made(subject)
    rows = iter(dataset)
    begin = _plain(dataset.state_dict())
    first = next(rows)
    state = dataset.state_dict()
    kept = _plain(state)
    second = next(rows)
    dataset.state_dict()
    if _plain(state) != kept:
        yield "a state changed after it was returned, when the next batch was read: return a copy"
    if kept == begin:
        yield "the state did not change when a batch was read"
        return
    for what, at, wanted in (("a batch", kept, second), ("nothing", begin, first)):
        fresh = made(subject, state=at)
        if found := difference(wanted, next(iter(fresh))):
            yield f"a new dataset with the state after {what} continues with a different batch: {found}"
        if _plain(made(subject, state=at).state_dict()) != at:
            yield f"after loading a state (after {what}), state_dict() returns a different one"


def _plain(state: Any) -> Any:
    """Return the state after a round trip through JSON."""
    found = json.loads(json.dumps(state, allow_nan=False))
    if found != state:
        raise TypeError(f"a state must be plain JSON, but {state} becomes {found} in JSON")
    return found


def prefetched(subject: Subject) -> Iterator[str]:
    """Check that batches prefetched by a thread are the same."""
    wanted = _two(subject)
    loader = Loader(made(subject), device="cpu", prefetch=4)
    try:
        read = [next(loader) for _ in wanted]
    finally:
        loader.close()
    for batch, other in zip(wanted, read, strict=True):
        if found := difference(batch, other):
            yield f"when it is read ahead, it returns a different batch: {found}"


def ranks(subject: Subject) -> Iterator[str]:
    """Check that one rank and two see the same rows in the same order, and have the same state."""
    alone = made(subject)
    one = next(iter(alone))
    state = _plain(alone.state_dict())
    two = [made(subject, dp_rank=rank, dp_size=2) for rank in range(2)]
    parts = [next(iter(dataset)) for dataset in two]
    if found := difference(one, _joined(parts)):
        yield (
            f"two ranks together have different rows than one rank: {found}; rank 0 must have the first half"
        )
    states = [_plain(dataset.state_dict()) for dataset in two]
    if states[0] != states[1] or states[0] != state:
        yield (
            "the state depends on the ranks: one has "
            f"{state}, two have {states[0]} and {states[1]}; count the rows of all ranks together"
        )
        return
    wanted = next(iter(alone))
    resumed = [next(iter(made(subject, dp_rank=rank, dp_size=2, state=state))) for rank in range(2)]
    if found := difference(wanted, _joined(resumed)):
        yield f"two ranks do not continue where one rank stopped: {found}"


def _joined(parts: list[Batch]) -> Batch:
    """Return the rows of all ranks as one batch."""
    return Batch({name: torch.cat([part[name] for part in parts]) for name in parts[0]}, unit=parts[0].unit)


CHECKS: dict[str, dict[str, Check]] = {
    "dataset": {
        "batches": batches,
        "again": again,
        "position": position,
        "prefetch": prefetched,
        "ranks": ranks,
    }
}
