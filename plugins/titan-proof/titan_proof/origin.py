"""Find the recipe and the checkpoint from which a step of a run was made. Torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from titancli.checkpoint import LOCK, STEP_NAME, faults, read_manifest
from titancli.errors import EnvironmentProblem
from titancli.runs import RunFolder, read_lock


class Origin(NamedTuple):
    """The attempts of a run that share one recipe."""

    recipe: str
    """The contents of the lock file."""
    first: int
    """The step after which they began."""
    serial: int
    """The serial number of the newest checkpoint that existed before them."""
    launch: dict[str, Any]
    """`nproc` and `nnodes` of the requested attempt."""


def origin_of(folder: RunFolder, number: int | None) -> Origin:
    """Return the origin of an attempt of a run, by its number (from 1; None: the newest).

    A resume that changes the recipe keeps the previous one under the next number.

    Raises:
        EnvironmentProblem: the recipe is no longer known.
    """
    attempts = folder.record().get("attempts") or [{}]
    number = number or len(attempts)
    changed = [
        n
        for n, attempt in enumerate(attempts, 1)
        if n > 1 and attempt.get("drift") and attempt.get("loaded", True)
    ]
    older = sorted(folder.path.glob("recipe.lock.*.toml"), key=lambda file: int(file.name.split(".")[2]))
    locks = [*older, folder.recipe_lock]
    known = len(locks) == len(changed) + 1
    if not known and number < max([1, *changed]):
        raise EnvironmentProblem(
            f"the recipe of attempt {number} of {folder.path} is no longer known",
            hint="steps of the newest attempt can be repeated",
        )
    before = [n for n in changed if n <= number]
    lock = locks[len(before)] if known else folder.recipe_lock
    begun = attempts[before[-1] - 1] if before else {}
    start = STEP_NAME.match(Path(begun.get("checkpoint") or "").name)
    return Origin(
        recipe=read_lock(lock),
        first=int(start[1]) if start else 0,
        serial=begun.get("serial") or 0,
        launch={name: attempts[number - 1].get(name) for name in ("nproc", "nnodes")},
    )


def checkpoint_before(folder: RunFolder, step: int, origin: Origin) -> tuple[Path | None, list[str]]:
    """Return the newest good checkpoint before a step of these attempts, and what is wrong with newer ones.

    Only a checkpoint that the attempts began with, or wrote, counts: under the previous recipe the run may
    have come further, and its checkpoints stay until they are replaced.

    Raises:
        EnvironmentProblem: there is none, and the attempts did not begin at step 0.
    """
    notes: list[str] = []
    found: dict[int, Path] = {}
    for path in folder.checkpoints.glob("step-*"):
        name = STEP_NAME.match(path.name)
        if name and origin.first <= int(name[1]) < step and (path / LOCK).is_file():
            found[int(name[1])] = path
    for number in sorted(found, reverse=True):
        try:
            manifest = read_manifest(found[number])
            if number > origin.first and manifest.serial <= origin.serial:
                continue
            wrong = faults(found[number], manifest, verify="size")
        except EnvironmentProblem as error:
            wrong = [error.message]
        if not wrong:
            return found[number], notes
        notes.append(f"checkpoint {found[number].name} is skipped: {'; '.join(wrong)}")
    if origin.first > 0:
        raise EnvironmentProblem(
            f"step {step} was made after a resume from step {origin.first} under another recipe, and there "
            f"is no good checkpoint from step {origin.first} to step {step - 1}",
            hint=f"step {origin.first} or an earlier one can be repeated",
        )
    return None, notes
