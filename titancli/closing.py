"""What a run has left to do after its last step: an evaluation, exports, uploads. Torch-free.

From the moment the last step is saved, the attempt in run.json has `closing`: the step, why the run ended,
and what is `left`. The run is finished when its outcome says so; until then a resume does what is left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

EVALUATION = "evaluation"
"""The evaluation of the last step, with what callbacks make of it, such as `best`."""
CALLBACKS = "callbacks"
"""What callbacks do at the end, such as the export of an average."""
UPLOADS = "uploads"
ENDED = ("finished", "data_ended")


def has_ended(attempt: Mapping[str, Any], step: int) -> bool:
    """Return whether an attempt says that the run has ended at a step, and did all that was left."""
    outcome = attempt.get("outcome") or {}
    return outcome.get("why") in ENDED and outcome.get("step") == step


def closing_of(attempt: Mapping[str, Any], step: int) -> dict[str, Any] | None:
    """Return `closing` of an attempt, if the run was to end at this step; None: nothing says what is left."""
    closing = attempt.get("closing") or {}
    if closing.get("step") == step and isinstance(closing.get("left"), list):
        return dict(closing)
    return {"step": step, "why": attempt["outcome"]["why"], "left": []} if has_ended(attempt, step) else None


def closing_before(attempts: Sequence[Mapping[str, Any]], step: int) -> dict[str, Any] | None:
    """Return `closing` of the newest attempt: its own, if its ranks have been restarted, or else that of the
    last one before it whose ranks have loaded. None: nothing is known, or the recipe has changed since."""
    *earlier, current = attempts
    if (own := closing_of(current, step)) is not None:
        return own
    return None if current.get("drift") else closing_of(_last_loaded(earlier), step)


def is_closing(attempts: Sequence[Mapping[str, Any]], steps: int | None, done: int | None) -> bool:
    """Return whether a run has done its last step, but not all that follows.

    Args:
        steps, done: all steps of the run, and those that are done; None: unknown.
    """
    last = _last_loaded(attempts)
    if done is None or has_ended(last, done):
        return False
    return closing_of(last, done) is not None or (bool(steps) and done >= (steps or 0))


def uploads_alone(attempt: Mapping[str, Any], step: int) -> bool:
    """Return whether uploads are all that an attempt has left after a step."""
    closing = closing_of(attempt, step)
    return closing is not None and closing["left"] == [UPLOADS]


def finished(attempt: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of an attempt in run.json that has nothing left after its last step."""
    closing = attempt["closing"]
    ended = {"why": closing.get("why") or ENDED[0], "signal": None, "step": closing["step"]}
    before = {"checkpoint": f"checkpoints/step-{closing['step']}", "metrics": {}} | (attempt["outcome"] or {})
    return {"closing": {**closing, "left": []}, "outcome": before | ended}


def _last_loaded(attempts: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    loaded = [attempt for attempt in attempts if attempt.get("loaded", True)]
    return loaded[-1] if loaded else {}
