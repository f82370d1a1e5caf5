"""Find the first step at which two runs that should agree diverge, and what differs in it. Imports torch
late."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from titan_proof.differences import Difference, provenance_differences, unknown
from titan_proof.digests import Start, StepDigest, differing_values, named, read_digests, read_starts
from titan_proof.reproduction import COMPARED, Reproduction, folder_of
from titan_proof.verdict import Deviation, compare
from titancli.errors import EnvironmentProblem
from titancli.observe.events import plain
from titancli.runs import RunFolder

if TYPE_CHECKING:
    from titan_proof.checkpoints import Comparison

Result = Literal["equal", "within_envelope", "parts", "not_comparable"]
BEFORE = "weights before it"
PHASES = (
    (BEFORE, "start"),
    ("rows", "data"),
    ("loss", "forward"),
    ("gradient", "backward"),
    ("whether", "optimizer"),
    ("weights", "optimizer"),
)
"""The phase of a step that computes each quantity, by the beginning of the quantity's name."""


@dataclass(frozen=True)
class Side:
    """One of the two runs, as it is recorded."""

    run: Reproduction
    folder: Path | None
    """The run folder; None if it is not on this machine."""
    digests: dict[int, StepDigest]
    starts: dict[int, Start]
    """The weights that attempts began with, by step."""
    missing: list[str]

    @property
    def checkpoints(self) -> list[int]:
        """Return the steps of the checkpoints that are on this machine."""
        return sorted(map(int, self.run.weights)) if self.folder else []

    def checkpoint(self, step: int) -> Path:
        return RunFolder(self.folder or Path()).checkpoints / f"step-{step}"


@dataclass(frozen=True)
class Compared:
    """The comparison of two checkpoints of the same step, tensor by tensor."""

    step: int
    count: int
    unequal: list[Any]
    """See `titan_proof.checkpoints.TensorDifference`."""


@dataclass(frozen=True)
class Bisection:
    """The result of comparing two runs."""

    result: Result
    step: int | None
    """The first step at which they diverge; None if they do not."""
    after: int | None
    """The last compared step before it; None if there is none."""
    earliest: int | None
    """The first step that may have caused it: earlier than `step` if the digests cover only a sample of
    large tensors and the last equal checkpoints are older."""
    what: list[str]
    """The quantities that differ in that step, in the order in which they are computed."""
    phase: str | None
    """The phase that caused it: start (the weights before the step already differ), data, forward,
    backward, or optimizer; None if it is not known."""
    tensors: list[str]
    """The first tensors that differ, if digests or checkpoints identify them."""
    first_bit: int | None
    """The first step with any difference, even one within the envelope; None if there is none, or it
    cannot be known."""
    compared: list[int]
    with_digests: list[int]
    """The steps of `compared` for which both runs have digests."""
    largest: list[Deviation]
    envelope: dict[str, float]
    """The envelope of each metric at the last compared step; empty if the runs must be bitwise equal."""
    checkpoints: list[Compared]
    """The checkpoints nearest to the step: the last before it, and the first at or after it."""
    differences: list[Difference]
    unknown: list[str] = field(default_factory=list)
    """Facts that one of the two runs did not record."""

    @property
    def because(self) -> list[Difference]:
        """Return the known differences that can explain the result."""
        effect = {"parts": "results", "within_envelope": "rounding"}.get(self.result)
        return [one for one in self.differences if one.effect == effect]


def side_of(run: Reproduction) -> Side:
    """Return a run with the digests of its steps, if its folder is on this machine."""
    path = folder_of(run)
    if path is None:
        why = f"the run folder {run.run['path']} is not here: its logged steps are compared, without digests"
        return Side(run, None, {}, {}, [why])
    try:
        digests, starts = read_digests(path), read_starts(path)
    except EnvironmentProblem as error:
        return Side(run, path, {}, {}, [error.message])
    if not digests:
        why = f"{run.name} has no digests of its steps (debug.digests): logged steps are compared"
        return Side(run, path, {}, {}, [why])
    return Side(run, path, digests, starts, [])


def bisect(one: Side, other: Side) -> Bisection:
    """Find where two runs diverge.

    If no known difference changes rounding, any differing bit counts; otherwise only a difference outside the
    envelope of `titan reproduce`. Rows must be the same on any layout.

    Raises:
        EnvironmentProblem: a recipe is not TOML, or a checkpoint is damaged.
    """
    steps = {step: _unequal(one, other, step) for step in _common(one, other)}
    known = provenance_differences(one.run, other.run)
    numbers = [replace(side.run, steps=_numbers(side, list(steps)), weights={}) for side in (one, other)]
    verdict = compare(numbers[0], numbers[1])
    is_exact = all(difference.effect != "rounding" for difference in known)
    bits = [step for step, what in steps.items() if what]
    if is_exact:
        step = min(bits, default=None)
    else:
        outside = [verdict.step] if verdict.result == "parts" and verdict.step is not None else []
        step = min(outside + [step for step in bits if "rows" in steps[step]], default=None)
    if is_exact and (odd := _unequal_checkpoint(one, other, step)) is not None:
        step, steps[odd] = odd, ["tensors of the checkpoint"]  # in what digests did not cover
    around = _around(one, other, step)
    what = [] if step is None else steps[step]
    tensors: list[str] = []
    if step is not None and is_exact:
        what = ([BEFORE] if _before(one, other, step) else []) + what
        tensors = _tensors(one, other, step, what)
    # On another layout, weights and gradients cannot be compared.
    both = one.digests.keys() & other.digests.keys()
    equal = not bits and all(one.digests[step].layout == other.digests[step].layout for step in both)
    result: Result = "parts" if step is not None else "equal" if equal else "within_envelope"
    before = [other_step for other_step in steps if step is not None and other_step < step]
    return Bisection(
        result=result if steps else "not_comparable",
        step=step,
        after=max(before, default=None),
        earliest=step if tensors else _earliest(one, step, what, around),
        what=what,
        phase=_phase(what, is_exact=is_exact),
        tensors=tensors or _of_checkpoint(around, step),
        first_bit=min(bits, default=None),
        compared=list(steps),
        with_digests=[step for step in steps if step in one.digests and step in other.digests],
        largest=verdict.largest,
        envelope={} if is_exact else verdict.envelope,
        checkpoints=around,
        differences=known,
        unknown=unknown(one.run, other.run) + one.missing + other.missing,
    )


def _phase(what: list[str], *, is_exact: bool) -> str | None:
    """Return the phase that caused the first difference of a step. Within an envelope everything differs a
    little."""
    found = next((phase for word, phase in PHASES if what and what[0].startswith(word)), None)
    return found if is_exact or found == "data" else None


def _common(one: Side, other: Side) -> list[int]:
    digests = one.digests.keys() & other.digests.keys()
    logged = {int(step) for step in one.run.steps.keys() & other.run.steps.keys()}
    return sorted(digests | logged)


def _unequal(one: Side, other: Side, step: int) -> list[str]:
    """Return the quantities of a step that are not bitwise equal."""
    a, b = one.digests.get(step), other.digests.get(step)
    if a is not None and b is not None:
        return differing_values(a, b)
    logged = one.run.steps[str(step)], other.run.steps[str(step)]
    return [n.replace("grad_norm", "gradient norm") for n in COMPARED if logged[0].get(n) != logged[1].get(n)]


def _before(one: Side, other: Side, step: int) -> dict[int, tuple[Any, Any]]:
    """Return the hashes of the weights that a step began with, for the ranks on which they differ."""
    pairs = []
    for side in (one, other):
        start, last = side.starts.get(step - 1), side.digests.get(step - 1)
        if start is not None:
            pairs.append((start.layout, start.ranks))
        elif last is not None:
            pairs.append((last.layout, {rank: hashes[1] for rank, hashes in last.ranks.items()}))
    if len(pairs) < 2 or pairs[0][0] != pairs[1][0]:
        return {}
    (_, a), (_, b) = pairs
    return {rank: (a[rank], b[rank]) for rank in a if a[rank] != b[rank]}


def _numbers(side: Side, steps: list[int]) -> dict[str, dict[str, Any]]:
    """Return losses and norms by step: from digests, which cover every step, or else from the log."""
    return {
        str(step): plain({"loss": d.loss, "grad_norm": d.grad_norm})
        if (d := side.digests.get(step)) is not None
        else side.run.steps[str(step)]
        for step in steps
    }


def _tensors(one: Side, other: Side, step: int, what: list[str]) -> list[str]:
    """Return the tensors in which the digests of a step differ, if each rank has only one."""
    a, b = one.digests.get(step), other.digests.get(step)
    if a is None or b is None or a.layout != b.layout or what[0] in ("rows", "loss"):
        return []
    pairs = _before(one, other, step)
    if not pairs:
        index = 0 if any(word.startswith("gradients") for word in what) else 1
        pairs = {rank: (a.ranks[rank][index], b.ranks[rank][index]) for rank in a.ranks}
    found = {named(a.layout.names[rank], *pair) for rank, pair in pairs.items() if pair[0] != pair[1]}
    return sorted(name for name in found if name) if None not in found else []


# ------------------------------------------------------------------------------------------- checkpoints


def _unequal_checkpoint(one: Side, other: Side, step: int | None) -> int | None:
    """Return the first step before `step` (None: of all) whose checkpoints have different checksums."""
    weights = one.run.weights, other.run.weights
    both = [n for n in one.checkpoints if n in other.checkpoints and (step is None or n < step)]
    return next((n for n in both if weights[0][str(n)] != weights[1][str(n)]), None)


def _earliest(one: Side, step: int | None, what: list[str], around: list[Compared]) -> int | None:
    digest = None if step is None else one.digests.get(step)
    if step is None or digest is None or not digest.layout.sampled or what[0] in ("rows", BEFORE):
        return step
    return min(step, 1 + max((c.step for c in around if c.step < step and not c.unequal), default=0))


def _around(one: Side, other: Side, step: int | None) -> list[Compared]:
    """Compare the last checkpoints before a step, and the first ones at or after it; the last ones without
    a step."""
    both = [number for number in one.checkpoints if number in other.checkpoints]
    before = [number for number in both if step is None or number < step]
    chosen = before[-1:] + [number for number in both if number not in before][:1]
    if not chosen:
        return []
    from titan_proof.checkpoints import compare_checkpoints

    found: list[tuple[int, Comparison]] = [
        (number, compare_checkpoints(one.checkpoint(number), other.checkpoint(number))) for number in chosen
    ]
    return [Compared(number, result.count, result.unequal) for number, result in found]


def _of_checkpoint(around: list[Compared], step: int | None) -> list[str]:
    """Return the tensors that differ in the checkpoints of that very step; in a later one everything
    differs."""
    at = [c for c in around if c.step == step]
    if not at or not at[0].unequal or len(at[0].unequal) == at[0].count:
        return []
    return [difference.name for difference in at[0].unequal]
