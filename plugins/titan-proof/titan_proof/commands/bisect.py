"""`titan bisect`: find where two runs that should agree diverge."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from titan_proof.commands.reproduce import print_differences, quiet_stdout
from titancli.commands import Common, note, out, print_json, printable
from titancli.errors import EXIT_FAILED, EXIT_OK, UsageError

if TYPE_CHECKING:
    from titan_proof.bisect import Bisection, Compared, Side
    from titan_proof.repeat import Repetition

PHASES = {
    "start": "they began this step with other weights",
    "data": "they were trained on other rows",
    "forward": "the rows are equal, as are the weights before, as far as known: the forward pass differs",
    "backward": "the loss is equal: the backward pass differs",
    "optimizer": "the gradients are equal: the optimizer's update differs",
}
SHOWN = 5
"""Number of tensors that are listed; `--json` lists all of them."""


@click.command("bisect", short_help="Find where two runs that should agree diverge.")
@click.argument("one", metavar="A")
@click.argument("other", metavar="B")
@click.option(
    "--repeat",
    "again",
    is_flag=True,
    help="Compute the step once more from the nearest checkpoints, and say with which run it agrees.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_obj
def command(common: Common, one: str, other: str, again: bool, as_json: bool) -> int:
    """Find the first step, and then the first tensor, in which runs A and B differ.

    A and B are run folders, or files of `titan reproduce --export`. The digests of their steps are compared
    bit by bit on the same layout; on another layout, losses and gradient norms with the envelope of `titan
    reproduce`. Then the nearest checkpoints that both have are compared tensor by tensor.

    The exit code is 0 if the runs agree and 1 if they diverge.
    """
    from titan_proof.bisect import bisect, side_of
    from titan_proof.reproduction import find

    sides = side_of(find(one)), side_of(find(other))
    if again and None in (sides[0].folder, sides[1].folder):
        raise UsageError("--repeat needs the folders of both runs on this machine")
    found = bisect(*sides)
    repeated: dict[str, Any] = {}
    if again and found.step is not None:
        with _folder() as folder:
            repeated = _repeated(sides, found, folder, common, quiet=as_json)
    if as_json:
        print_json("bisection", _document(sides, found, repeated))
    else:
        for line in _lines(sides, found):
            out(printable(line))
        for line in _lines_of(repeated, found):
            out(printable(line))
        print_differences([one for one in found.differences if one not in found.because])
        for line in found.unknown:
            out(printable(line))
        if found.result == "parts" and not again and found.with_digests and found.step in found.with_digests:
            note(f"to compute step {found.step} once more: titan bisect {one} {other} --repeat")
    return EXIT_OK if found.result in ("equal", "within_envelope") else EXIT_FAILED


@contextmanager
def _folder() -> Iterator[Path]:
    """Yield a temporary folder for repetitions, which holds a checkpoint of each."""
    folder = Path(tempfile.mkdtemp(prefix="titan-bisect-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _repeated(
    sides: tuple[Side, Side], found: Bisection, folder: Path, common: Common, *, quiet: bool
) -> dict[str, Any]:
    """Repeat the step from each run; return which run each repetition agrees with, and the unequal
    tensors."""
    from titan_proof.checkpoints import compare_checkpoints
    from titan_proof.digests import differing_values
    from titan_proof.repeat import repeat

    made: dict[str, Repetition] = {}
    answer: dict[str, Any] = {}
    step = found.step or 0
    for name, side in zip("AB", sides, strict=True):
        note(f"repeating {name} up to step {step}")
        with quiet_stdout(True):
            made[name] = repeat(
                side,
                step,
                folder / name,
                plugin_files=common.plugin_files,
                traceback=common.traceback,
                say=note,
            )
        sys.stdout.flush()
        recorded = {key: own.digests.get(step) for key, own in zip("AB", sides, strict=True)}
        answer[name] = {
            "from_step": made[name].start,
            "differs": {
                key: differing_values(digest, made[name].digest) for key, digest in recorded.items() if digest
            },
        }
    both = compare_checkpoints(made["A"].checkpoint, made["B"].checkpoint)
    answer["tensors"] = {"count": both.count, "unequal": [asdict(tensor) for tensor in both.unequal]}
    return answer


# ------------------------------------------------------------------------------------------------ words


def _lines(sides: tuple[Side, Side], found: Bisection) -> Iterator[str]:
    steps = found.compared
    if not steps:
        yield "not comparable: the runs have no step in common, neither with a digest nor logged"
        return
    span = f"{len(steps)} step{'s' * (len(steps) > 1)}, {steps[0]} to {steps[-1]}" + (
        " (digests)"
        if found.with_digests == steps
        else f" ({len(found.with_digests)} with digests, the others as they were logged)"
    )
    if found.result == "parts":
        yield f"diverge at step {found.step}: {', '.join(found.what)}"
        if found.phase is not None:
            yield f"  {PHASES[found.phase]}"
        if found.tensors:
            names = ", ".join(found.tensors[:SHOWN])
            more = f" and {len(found.tensors) - SHOWN} more" if len(found.tensors) > SHOWN else ""
            yield f"  first tensor: {names}{more}"
        yield (
            f"  equal up to step {found.after}, of {span}"
            if found.after is not None
            else f"  there is no earlier step to compare, of {span}"
        )
        if found.earliest != found.step:
            yield (
                f"  digests cover only a sample of large tensors: it may have begun at any step from "
                f"{found.earliest} to {found.step}"
            )
    elif found.result == "within_envelope":
        yield f"within the layout's envelope: {span}"
    else:
        yield f"equal: {span}"
    if found.envelope:
        if found.first_bit is not None and found.first_bit != found.step:
            yield f"  first bitwise difference: step {found.first_bit}"
        for one in found.largest:
            within = f"(envelope {found.envelope[one.metric]:.1e} at step {steps[-1]})"
            name = one.metric.replace("_", " ")
            yield f"  largest relative difference of {name}: {one.relative:.1e} at step {one.step} {within}"
    for checkpoint in found.checkpoints:
        yield f"  {_checkpoint(checkpoint)}"
    if found.result == "parts" and not found.checkpoints:
        yield "  the runs have no checkpoint of the same step"
    if found.because:
        yield f"  because of {'; '.join(map(str, found.because))}"
    elif found.result == "parts":
        yield "  no known difference explains it"


def _checkpoint(found: Compared) -> str:
    if not found.unequal:
        return f"checkpoint step-{found.step}: all {found.count} tensors are equal"
    listed = ", ".join(
        f"{one.name} ({one.elements} values, relative {one.relative:.1e})" for one in found.unequal[:SHOWN]
    )
    more = f" and {len(found.unequal) - SHOWN} more" if len(found.unequal) > SHOWN else ""
    return (
        f"checkpoint step-{found.step}: {len(found.unequal)} of {found.count} tensors differ: {listed}{more}"
    )


def _lines_of(repeated: dict[str, Any], found: Bisection) -> Iterator[str]:
    if not repeated:
        return
    equal = {name: [key for key, what in repeated[name]["differs"].items() if not what] for name in "AB"}
    known = list(repeated["A"]["differs"])  # the runs that have a digest of the step
    for name in "AB":
        start = repeated[name]["from_step"]
        where = f"checkpoint step-{start}" if start else "the beginning"
        if equal[name]:
            what = f"equals that of {' and '.join(equal[name])}"
        elif known:
            what = f"is {'not' if len(known) == 1 else 'neither'} that of {' nor that of '.join(known)}"
        else:
            what = "cannot be compared: neither run has a digest of it"
        yield f"repeated from {where} of {name}: step {found.step} {what}"
    if equal == {"A": ["A"], "B": ["B"]}:
        unequal = repeated["tensors"]["unequal"]
        first = f", in {len(unequal)} tensors, the first {unequal[0]['name']}" if unequal else ""
        yield f"  both steps are repeatable{first}: the cause is in how they were made"
    elif equal["A"] == equal["B"] and len(equal["A"]) == 1 and len(known) == 2:
        odd = "B" if equal["A"] == ["A"] else "A"
        yield (
            f"  step {found.step} of {odd} cannot be repeated here: something went wrong once (such as a "
            "flipped bit), or it was made by other software or on another machine"
        )


def _document(sides: tuple[Side, Side], found: Bisection, repeated: dict[str, Any]) -> dict[str, Any]:
    from titancli.observe.events import plain

    made = asdict(found)
    for name in ("differences", "unknown"):
        made[name] = made.pop(name)
    return plain(
        {
            "runs": [side.run.run for side in sides],
            **made,
            "because": [asdict(one) for one in found.because],
            "repeated": repeated or None,
        }
    )
