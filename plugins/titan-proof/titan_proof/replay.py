"""Repeat a step of a run and look at it in detail: what `titan replay` starts, and what it reports.

Nothing is written into the run's folder: the ranks work in a folder of their own, which is removed.
Torch-free.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from titan_proof import Probe
from titan_proof.digests import StepDigest, differing_values, read_digests
from titan_proof.origin import checkpoint_before, origin_of
from titan_proof.reproduce import environment, with_what_helps
from titan_proof.reproduction import Reproduction, collect
from titan_proof.verdict import ENVELOPE, WIDEST
from titancli.checkpoint import read_manifest
from titancli.commands.evaluation import launch
from titancli.commands.recorded import require_inputs
from titancli.errors import EnvironmentProblem, TitanError, UsageError
from titancli.files import read_json
from titancli.observe.events import plain, read_events
from titancli.recipe import LOCK_HEADER, Loaded, load_recipe
from titancli.recipe.schema import sections_with
from titancli.runs import STEP_NAME, RunFolder

RESULT = "replay.result.json"
"""The file, in the folder of the replay, with the findings of the ranks."""
PROBE = "titan-proof/probe"
"""The callback that looks at the step."""
FAR = 1000
"""The number of steps that may be repeated without `--from-scratch`."""
STANDS_OUT = 2.0
"""A row stands out if its loss, or the norm of its gradient, is this many times the median of the step's
rows."""


@dataclass(frozen=True)
class Source:
    """The run, recipe and checkpoint from which a step is replayed."""

    run: Reproduction
    folder: RunFolder
    step: int
    recipe: str
    """The lock file under which the step was made."""
    checkpoint: Path | None
    """None: the replay begins at step 0."""
    world: int
    recorded: dict[int, StepDigest] = field(repr=False)
    """The recorded digests of the steps to repeat, for those that have one."""
    notes: list[str] = field(default_factory=list)

    @property
    def start(self) -> int:
        """Return the step after which the replay begins."""
        return 0 if self.checkpoint is None else read_manifest(self.checkpoint).step


def find_source(path: Path, step: int, *, from_scratch: bool = False) -> Source:
    """Find what is needed to repeat a step of a run: the nearest good checkpoint before it, or else its
    beginning.

    Raises:
        EnvironmentProblem: the folder is not a run, it has not done the step, or there is nothing to begin
            from.
        UsageError: too many steps would have to be repeated.
    """
    folder = RunFolder.open(path)
    run, unreadable = collect(folder.path), list[str]()
    digests = _digests(folder, step, step, unreadable)
    if step not in digests and step > run.last_step:
        last = max([run.last_step, *_digests(folder, 1, None, unreadable)])
        raise EnvironmentProblem(
            f"{path} has not reached step {step}: its last recorded step is {last}",
            hint=f"use --step {last}, or an earlier one" if last else None,
        )
    attempts = folder.record().get("attempts") or [{}]
    number = digests[step].attempt if step in digests else len(attempts)
    origin = origin_of(folder, number)
    checkpoint, notes = checkpoint_before(folder, step, origin)
    begun = 0 if checkpoint is None else read_manifest(checkpoint).step
    if (problem := _began_elsewhere(attempts)) and checkpoint is None:
        raise EnvironmentProblem(f"there is no good checkpoint before step {step}, and {problem}")
    cost = _time(folder, step - begun)
    if step - begun > FAR and not from_scratch:
        raise UsageError(
            f"{step - begun:,} steps would have to be repeated, from step {begun}{cost}",
            hint="add --from-scratch, or replay a step that is nearer to a checkpoint",
        )
    there = _digests(folder, begun + 1, step, unreadable)
    if unreadable:
        notes.append(f"only the loss and the gradient norm in the event log can be compared: {unreadable[0]}")
    elif step not in there:
        made = (run.made_by.get("versions") or {}).get("titancli")
        notes.append(
            f"step {step} has no digest (debug.digests was false, or titan {made} did not write any): only "
            "the loss and the gradient norm in the event log can be compared"
        )
    elif there[min(there)].layout != there[step].layout:
        notes.append("some earlier steps were made on another layout: they are equal only up to rounding")
    notes.append(
        f"repeating {step - begun} step{'s' * (step - begun > 1)} from "
        f"{'the beginning' if checkpoint is None else checkpoint.name}{cost}"
    )
    world = there[step].layout.world if step in there else attempts[number - 1].get("world") or 1
    return Source(run, folder, step, origin.recipe, checkpoint, world, there, notes)


def _digests(folder: RunFolder, first: int, last: int | None, unreadable: list[str]) -> dict[int, StepDigest]:
    """Return the digests of these steps; none, with a note, if they cannot be read."""
    try:
        return read_digests(folder.path, first, last)
    except EnvironmentProblem as error:
        unreadable.append(error.message)
        return {}


def _began_elsewhere(attempts: Sequence[dict[str, Any]]) -> str | None:
    """Return why a run cannot be started again from step 0; None if it can."""
    start = STEP_NAME.match(Path(attempts[0].get("checkpoint") or "").name)
    return f"its first attempt began at {start[0]}" if start and int(start[1]) else None


def _time(folder: RunFolder, steps: int) -> str:
    """Return the estimated time of these steps, from those that were logged."""
    seconds = [
        found
        for event in read_events(folder.events)
        if event["event"] == "step"
        and isinstance(found := event["metrics"].get("step_seconds"), (int, float))
    ]
    if not seconds:
        return ""
    total = steps * median(seconds)
    return f", about {total / 60:,.0f} min" if total >= 90 else f", about {max(1, round(total))} s"


def load(
    source: Source,
    overrides: Sequence[str],
    probe: Probe,
    plugin_files: Sequence[Path],
    say: Callable[[str], None],
) -> Loaded:
    """Return the checked recipe of a replay: the run's, with the callback that looks at the step.

    Args:
        overrides: for paths that differ on this machine, such as dataset.paths.

    Raises:
        TitanError: something is missing, or the recipe is not accepted.
    """
    import tomli
    import tomli_w

    left_out = ("launcher", *sections_with("watching"))
    data = {key: value for key, value in tomli.loads(source.recipe).items() if key not in left_out}
    kept = ("exclude_from_loading", "model_differs", "verify", "initial_load_model_only")
    section = {key: value for key, value in data.get("checkpoint", {}).items() if key in kept}
    data["checkpoint"] = {**section, "enable": False}
    data["debug"] = {**data.get("debug", {}), "digests": True}
    if "save_rollouts" in data.get("loop", {}):
        data["loop"]["save_rollouts"] = 0
    callbacks = [one for one in data.get("callbacks", []) if one["type"] != PROBE]
    data["callbacks"] = [*callbacks, {"type": PROBE, **asdict(probe)}]
    with tempfile.TemporaryDirectory(prefix="titan-") as folder:
        file = Path(folder) / "replay.toml"
        file.write_text(f"{LOCK_HEADER}\n{tomli_w.dumps(data)}", encoding="utf-8")
        try:
            loaded = load_recipe(file, overrides, run=source.folder.path)
        except TitanError as error:
            raise with_what_helps(error, source.run, plugin_files) from error
        if probe.overrides:
            load_recipe(file, [*overrides, *probe.overrides], run=source.folder.path)
    if probe not in loaded.recipe.callbacks:
        raise UsageError(
            "replay adds its callback to those of the run",
            hint="leave out the override of callbacks",
        )
    require_inputs(loaded, source.checkpoint, dry_run=False, say=say)
    return loaded


def replay(
    source: Source,
    loaded: Loaded,
    nproc: int | str | None,
    plugin_files: Sequence[Path],
    *,
    traceback: bool,
) -> tuple[int, dict[str, Any] | None]:
    """Repeat the step; return the command's exit code, and the findings: None if it was stopped.

    Raises:
        TitanError: the replay cannot be started, or fails.
    """

    def read(folder: RunFolder) -> dict[str, Any]:
        found = read_json(folder.path / RESULT)
        return {**found, "verdict": verdict(source, read_digests(folder.path))}

    code, found = launch(
        loaded,
        nproc or source.world,
        plugin_files,
        read,
        traceback=traceback,
        at_signal="stopping the replay",
        checkpoint=source.checkpoint,
        env=environment(source.run),
    )
    return code, None if found is None else _completed(source, found)


def verdict(source: Source, again: dict[int, StepDigest]) -> dict[str, Any]:
    """Compare the repeated steps with the run's record of them.

    Returns:
        `result`: "bitwise"; "within_envelope" (another layout, and equal up to rounding); "parts" (the steps
            diverge), at `step`, in `what`; or, without a digest of the step, "as_logged" or "unknown"; and
            the number of `compared` steps.
    """
    compared = sorted(source.recorded.keys() & again.keys())
    result, step, what = "bitwise", None, list[str]()
    for number in compared:
        before, after = source.recorded[number], again[number]
        other = before.layout != after.layout
        found = differing_values(before, after)
        close = not found or ("rows" not in found and _is_close(source, before, after, number))
        if other and close:  # weights and gradients cannot be compared
            result = "within_envelope"
        elif found:
            return {"result": "parts", "step": number, "what": found, "compared": len(compared)}
    if source.step not in compared:
        logged, done = source.run.steps.get(str(source.step), {}), again.get(source.step)
        numbers = {} if done is None else {"loss": done.loss, "grad_norm": done.grad_norm}
        what = [name for name, value in logged.items() if plain(numbers.get(name)) != value]
        result, step = ("parts", source.step) if what else ("as_logged" if logged else "unknown", None)
    return {"result": result, "step": step, "what": what, "compared": len(compared)}


def _is_close(source: Source, before: StepDigest, after: StepDigest, step: int) -> bool:
    dtype = source.run.data.get("training", {}).get("mixed_precision_param", "bfloat16")
    bounds = ENVELOPE.get(dtype, ENVELOPE["bfloat16"])
    grown = math.sqrt(step - source.start)  # rounding adds up like a random walk
    return all(
        math.isclose(getattr(before, name), getattr(after, name), rel_tol=min(WIDEST, bound * grown))
        for name, bound in bounds.items()
    )


def _completed(source: Source, found: dict[str, Any]) -> dict[str, Any]:
    """Return the findings of the ranks, with the conclusions from them."""
    digest = source.recorded.get(source.step)
    recorded = None
    if digest is not None:
        recorded = {"loss": digest.loss, "grad_norm": digest.grad_norm, "skipped": digest.skipped}
    layers = _layers(found.pop("activations"), found["parameters"])
    parameters = {
        name: {"gradient_norm": gradient, "weight_norm": weight}
        for name, (gradient, weight) in found["parameters"].items()
    }
    made = {
        "step": source.step,
        "checkpoint": None if source.checkpoint is None else str(source.checkpoint),
        "verdict": found["verdict"],
        "recorded": recorded,
        "replayed": found["done"],
        "tried": found.get("tried"),
        "guard": found["guard"],
        "stands_out": suspect(found["rows"]),
        "rows": [{k: v for k, v in row.items() if k not in ("hash", "place")} for row in found["rows"]],
        "layers": layers,
        "parameters": parameters,
    }
    answer: dict[str, Any] = plain(made)
    return answer


def _layers(activations: dict[str, dict[str, float]], parameters: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the observed modules in the model's order, each with the norms of the parameters in it."""
    order = {name: place for place, name in enumerate(parameters)}
    found = []
    for name, numbers in activations.items():
        inside = [own for own in parameters if own.startswith(f"{name}.")]
        norms = [
            math.hypot(*(float(parameters[own][i]) for own in inside)) if inside else None for i in (0, 1)
        ]
        place = min((order[own] for own in inside), default=len(order))
        row = {"name": name, **numbers, "gradient_norm": norms[0], "weight_norm": norms[1]}
        found.append(((place, name.count("."), name), row))
    return [row for _, row in sorted(found, key=lambda item: item[0])]


def suspect(rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the row that stands out most, by the norm of its gradient or its loss, each relative to the
    median of the step's rows; None if none does, most are not finite, or there are fewer than three.

    Returns:
        `row`, `loss`, `median_loss`, `gradient_norm` and `median_gradient_norm`.
    """
    names = ("loss", "gradient_norm")
    values = {name: [_number(row[name]) for row in rows if row[name] is not None] for name in names}
    if len(values["loss"]) < 3:
        return None
    middle = {name: median(own) if own else math.nan for name, own in values.items()}

    def score(row: dict[str, Any]) -> float:
        usual = [name for name in names if row[name] is not None and 0 < middle[name] < math.inf]
        return max((_number(row[name]) / middle[name] for name in usual), default=0.0)

    worst = max(rows, key=score)
    if score(worst) < STANDS_OUT:
        return None
    about = {name: worst[name] for name in names}
    return {"row": worst["row"], **about, **{f"median_{name}": middle[name] for name in names}}


def _number(value: Any) -> float:
    """Return a number of JSON; anything that is not finite counts as infinite."""
    return value if isinstance(value, (int, float)) else math.inf
