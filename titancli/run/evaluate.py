"""Prepare and run an evaluation for `titan eval`: a recipe with the loop `evaluate`, and its results.
Torch-free."""

from __future__ import annotations

import dataclasses
import glob
import json
import logging
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from titancli.checkpoint.format.manifest import LOCK, is_checkpoint, newest_good, read_manifest
from titancli.data.files import find_files
from titancli.data.formats import formats_of
from titancli.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_STOPPED, EnvironmentProblem, UsageError
from titancli.files import read_json
from titancli.launchers.devices import visible_gpus
from titancli.observe.events import plain
from titancli.recipe import Loaded, load_recipe, lock_text, toml_text
from titancli.recipe.assets import hub_hint
from titancli.recipe.find import LOCK_HEADER
from titancli.recipe.schema import sections_with
from titancli.run import start
from titancli.run.inputs import require_inputs
from titancli.run.prepare import Plan
from titancli.run.request import Request
from titancli.runs import RunFolder, timestamp, write_atomically
from titancli.signals import STOPPING
from titancli.version import __version__

T = TypeVar("T")
LONGEST = 2048
"""Maximum tokens of a row with a Hugging Face folder, unless its context is shorter."""
OF_TRAINING = ("dataset", "loop", "launcher", "mesh")
"""Sections of a run's recipe that do not affect an evaluation, beside those that only watch: results do not
depend on the layout."""


@dataclasses.dataclass(frozen=True)
class Source:
    """The model to evaluate."""

    recipe: dict[str, Any]
    """Plain data: the checkpoint's resolved recipe, or the settings of a Hugging Face folder."""
    checkpoint: Path | None
    """None: a Hugging Face folder."""
    name: str
    """The name in messages to the user."""

    @property
    def run(self) -> Path | None:
        """The run folder that contains the checkpoint, if there is one."""
        if self.checkpoint is None or self.checkpoint.parent.name != "checkpoints":
            return None
        folder = self.checkpoint.parent.parent
        return folder if RunFolder.is_run(folder) else None

    @property
    def step(self) -> int | None:
        return None if self.checkpoint is None else read_manifest(self.checkpoint).step


def find_source(src: Path, step: int | None, say: Callable[[str], None]) -> Source:
    """Find the source that SRC names: a run, a checkpoint, or a Hugging Face folder.

    Args:
        step: for a run, the step of its checkpoint; None: the newest good one.
        say: reports checkpoints that had to be skipped.

    Raises:
        EnvironmentProblem: it is none of these, or the run has no such checkpoint.
        UsageError: a step was given for something that is not a run.
    """
    if RunFolder.is_run(src) and not is_checkpoint(src):
        folder = RunFolder.open(src.absolute()).checkpoints
        found = newest_good(folder, rejected=say) if step is None else folder / f"step-{step}"
        if found is None or not is_checkpoint(found):
            there = ", ".join(sorted(path.name for path in folder.glob("step-*")))
            what = "good checkpoint" if step is None else f"checkpoint of step {step}"
            raise EnvironmentProblem(f"{src} has no {what}", hint=f"there are: {there}" if there else None)
        return Source(_recipe_of(found), found, f"step-{read_manifest(found).step} of {src}")
    if step is not None:
        raise UsageError(f"--step needs a run, but {src} is not one", hint="remove --step")
    if is_checkpoint(src):
        return Source(_recipe_of(src.absolute()), src.absolute(), str(src))
    if not (src / "config.json").is_file():
        what = "is not a run, a checkpoint or a Hugging Face folder" if src.exists() else "does not exist"
        usual = "give RUN, RUN/checkpoints/step-N, or a folder with config.json and *.safetensors"
        hint = hub_hint(src) or usual
        raise EnvironmentProblem(f"{src} {what}", hint=hint)
    return Source(_recipe_of_hf(src.absolute()), None, str(src))


def _recipe_of(checkpoint: Path) -> dict[str, Any]:
    if not (checkpoint / LOCK).is_file():
        raise EnvironmentProblem(f"the checkpoint {checkpoint} contains no recipe", hint="evaluate a run")
    return load_recipe(checkpoint / LOCK).data


def _recipe_of_hf(folder: Path) -> dict[str, Any]:
    try:
        longest = read_json(folder / "config.json").get("max_position_embeddings")
    except (OSError, ValueError, AttributeError) as error:
        raise EnvironmentProblem(f"{folder / 'config.json'} is damaged: {error}") from error
    length = min(LONGEST, longest) if isinstance(longest, int) and longest > 0 else LONGEST
    dtype = "bfloat16" if visible_gpus() else "float32"
    training = {"steps": 1, "seq_len": length, "local_batch_size": 1, "mixed_precision_param": dtype}
    tokenizer = {"type": "titan/hf", "path": str(folder)}
    return {"recipe": 1, "weights": str(folder), "tokenizer": tokenizer, "training": training}


def load(
    source: Source, files: Sequence[Path], overrides: Sequence[str], say: Callable[[str], None]
) -> Loaded:
    """Return the recipe of an evaluation, checked.

    Args:
        files: files to evaluate instead of the recipe's `[validation]`, if any.
        overrides: as on the command line.

    Raises:
        UsageError: there is nothing to evaluate.
        TitanError: as for `recipe_of`.
    """
    section = source.recipe.get("validation", {})
    if files:
        mask = source.recipe.get("dataset", {}).get("document_mask", False)
        section = {"datasets": _datasets(files, document_mask=mask)}
    given = section.get("datasets")
    if not given and not any(override.startswith("validation.datasets") for override in overrides):
        raise UsageError(
            "there is nothing to evaluate: the recipe has no [validation.datasets]",
            hint="name a file: --data FILE",
        )
    return recipe_of(source, {"type": "titan/evaluate"}, overrides, say, validation=section)


def recipe_of(
    source: Source,
    loop: dict[str, Any],
    overrides: Sequence[str],
    say: Callable[[str], None],
    *,
    validation: dict[str, Any] | None = None,
) -> Loaded:
    """Return the source's recipe with a loop that does not train, checked.

    Args:
        loop: `[loop]`, without its `checkpoint`.
        validation: `[validation]`; None: none.

    Raises:
        TitanError: something is missing, or the recipe has errors.
    """
    if source.checkpoint is not None:
        loop = {**loop, "checkpoint": str(source.checkpoint)}
    left_out = (*OF_TRAINING, *sections_with("watching"))
    data = {key: value for key, value in source.recipe.items() if key not in left_out}
    # The run's batch need not fit the ranks that evaluate.
    training = {k: v for k, v in data["training"].items() if k != "global_batch_size"}
    data |= {"name": "eval", "loop": loop, "validation": validation or {}, "training": training}
    with tempfile.TemporaryDirectory(prefix="titan-") as folder:
        path = Path(folder) / "eval.toml"
        # With a lock file's header, missing values are None and not those of a flavor.
        path.write_text(f"{LOCK_HEADER}\n{toml_text(data)}", encoding="utf-8")
        loaded = load_recipe(path, overrides)
    require_inputs(loaded, source.checkpoint, dry_run=False, say=say)
    return loaded


def _datasets(files: Sequence[Path], *, document_mask: bool) -> dict[str, Any]:
    """Return a dataset for each file, under its name."""
    found: dict[str, Any] = {}
    for file in files:
        there = file.exists() or glob.has_magic(str(file))  # the check of inputs reports missing files
        paths = [one.path for one in find_files(file)] if there else []
        reader = {"text": "text_files", "parquet": "parquet"}
        kinds = sorted({reader.get(kind, "jsonl") for kind in formats_of(paths, text_anyhow=False)})
        if len(kinds) > 1:
            raise UsageError(
                f"{file} has files of several formats: {', '.join(kinds)}", hint="name each by itself"
            )
        stem = re.sub(r"[^\w.-]+", "-", file.stem, flags=re.ASCII).strip("-.") or "data"
        name, number = stem, 1
        while name in found:
            name, number = f"{stem}-{number + 1}", number + 1
        settings = {"paths": [str(file)], "shuffle": False, "document_mask": document_mask}
        found[name] = {"type": f"titan/{(kinds or ['text_files'])[0]}", **settings}
    return found


def run(loaded: Loaded, nproc: int | str | None, plugin_files: Sequence[Path], *, traceback: bool) -> Results:
    """Evaluate on this machine.

    Raises:
        TitanError: as for `launch`.
    """
    code, outcome = launch(
        loaded,
        nproc,
        plugin_files,
        RunFolder.outcome,
        traceback=traceback,
        at_signal="stopping the evaluation",
    )
    if outcome is None:
        return Results(code, {})
    sets: dict[str, dict[str, float]] = {name: {} for name in loaded.recipe.validation.datasets}
    for key, value in outcome["metrics"].items():
        if key.startswith("validation/"):
            _, name, metric = key.split("/", 2)
            sets[name][metric] = float(value)
    return Results(code, sets)


def launch(
    loaded: Loaded,
    nproc: int | str | None,
    plugin_files: Sequence[Path],
    read: Callable[[RunFolder], T],
    *,
    traceback: bool,
    at_signal: str = "stopping after the evaluation",
    checkpoint: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> tuple[int, T | None]:
    """Run a recipe in a run folder that is removed at the end.

    Args:
        checkpoint: the checkpoint to continue from.
        env: environment variables besides the recipe's.
        read: called with that folder before it is removed; not called if the run failed, whose folder is left
            for its logs, or if a signal stopped it.
        at_signal: a message about what the loop does at a signal.

    Returns:
        The command's exit code, and the result of `read`, or None if the run failed or was stopped.

    Raises:
        TitanError: the recipe does not fit the processes, or the evaluation failed.
    """
    folder = RunFolder(Path(tempfile.mkdtemp(prefix="titan-eval-")) / "run")
    titan = logging.getLogger("titancli")
    level = titan.level
    titan.setLevel(logging.WARNING)  # the messages of a training run are of no interest here
    words = STOPPING.set(at_signal)
    try:
        request = Request(
            loaded.recipe.name, plugin_files=plugin_files, nproc=nproc, env=env or {}, traceback=traceback
        )
        plan = Plan(request, folder, loaded, lock_text(loaded), new=True)
        wanted = dataclasses.replace(start.launch_request(plan), checkpoint=checkpoint)
        with start.prepared(plan, wanted) as ready:
            code = start.launch(plan, ready)
    except UsageError:  # no logs are needed to understand it
        shutil.rmtree(folder.path.parent, ignore_errors=True)
        raise
    finally:
        titan.setLevel(level)
        STOPPING.reset(words)
        if not folder.path.exists():  # the run did not start
            shutil.rmtree(folder.path.parent, ignore_errors=True)
    stopped = code in (EXIT_INTERRUPTED, EXIT_STOPPED)
    if not stopped and (code or folder.outcome() is None):
        return code or EXIT_FAILED, None
    found = None if stopped else read(folder)
    shutil.rmtree(folder.path.parent, ignore_errors=True)
    return code, found


@dataclasses.dataclass(frozen=True)
class Results:
    code: int
    """The command's exit code."""
    sets: dict[str, dict[str, float]]
    """Metrics of each dataset: `loss`, `perplexity`, `tokens`, `bits_per_byte`, `bytes`, …"""


def document(source: Source, src: str, evaluations: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the document that `--json` prints for evaluations: plain JSON. `src` is the user's name for
    the source."""
    checkpoint = None if source.checkpoint is None else str(source.checkpoint)
    about = {"source": src, "step": source.step, "checkpoint": checkpoint}
    return plain({**about, "evaluations": list(evaluations)})


def keep(source: Source, name: str, document: dict[str, Any]) -> Path | None:
    """Write results beside a run's checkpoint, as RUN/evaluations/step-N/NAME.json; None if it belongs to no
    run.

    Raises:
        EnvironmentProblem: the folder cannot be written.
    """
    if source.run is None:
        return None
    folder = source.run / "evaluations" / f"step-{source.step}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentProblem(f"cannot create {folder}: {error.strerror}") from error
    facts = {
        "schema": "titan.evaluation",
        "version": 1,
        "step": source.step,
        "checkpoint": str(source.checkpoint),
    }
    facts |= {"created": timestamp(), "titan": __version__}
    write_atomically(folder / f"{name}.json", json.dumps(plain({**facts, **document}), indent=2) + "\n")
    return folder / f"{name}.json"
