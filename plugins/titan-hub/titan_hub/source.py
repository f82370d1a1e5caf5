"""What SRC names: a run, a checkpoint, or an exported folder; and the records that belong to it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from titan_hub.files import read_json
from titancli.commands.evaluation import find_source
from titancli.errors import EnvironmentProblem, UsageError
from titancli.observe.events import backwards
from titancli.runs import RunFolder

Say = Callable[[str], None]
SHOWN = ("loss", "grad_norm")
"""Metrics of a step that a card has, beside those of validation."""
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+\Z", re.ASCII)
MODELS = ("config.json", "adapter_config.json", "model_index.json")


@dataclass(frozen=True)
class Source:
    """A model to push, and what is known of its training."""

    path: Path
    to: str
    """`hf` or `peft`; of an exported folder what it is."""
    checkpoint: Path | None
    """None: an exported folder."""
    step: int | None = None
    recipe: dict[str, Any] | None = None
    """Resolved, as plain data; None if it is not known."""
    attempt: dict[str, Any] = field(default_factory=dict)
    """Of run.json: the newest one."""
    metrics: dict[str, float | None] = field(default_factory=dict)
    evaluations: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Metrics of `titan eval` and `titan lm-eval`, by name."""

    @property
    def exported(self) -> bool:
        return self.checkpoint is None

    @property
    def message(self) -> str:
        """The default message of the commit."""
        return "Push a model" if self.step is None else f"Push the checkpoint of step {self.step}"

    @property
    def base_model(self) -> str | None:
        """The repository of the weights that training began with, as the recipe names it."""
        return base_model_of(self.recipe or {})

    def config(self) -> dict[str, Any]:
        """Return what config.json or model_index.json has to say, without weights."""
        if self.checkpoint is None:
            there = [self.path / name for name in MODELS if (self.path / name).is_file()]
            return read_json(there[0]) if there else {}
        from titancli.checkpoint.hf.detect_model import hf_form, recipe_of

        found: dict[str, Any] = hf_form(recipe_of(self.checkpoint)[0]).config_json()
        return found

    def library(self) -> str:
        """Return the library that loads what is pushed."""
        if self.checkpoint is not None:
            from titancli.checkpoint.hf.detect_model import hf_form, recipe_of

            return "peft" if self.to == "peft" else str(hf_form(recipe_of(self.checkpoint)[0]).library)
        if (self.path / "adapter_config.json").is_file():
            return "peft"
        if (self.path / "model_index.json").is_file():
            return "diffusers"
        return "transformers" if (self.path / "config.json").is_file() else "gguf"

    def folder(self, dst: Path | None, say: Say) -> Path:
        """Return the folder to push; a checkpoint is converted into `dst`.

        Raises:
            TitanError: the checkpoint is damaged, or its model cannot be exported.
        """
        if self.checkpoint is None or dst is None:
            return self.path
        if self.to == "peft":
            from titancli.checkpoint.hf.peft import to_peft

            to_peft(self.checkpoint, dst, say=say)
        else:
            from titancli.checkpoint.hf.convert import to_hf

            to_hf(self.checkpoint, dst, say=say)
        return dst


def find(src: Path, to: str, say: Say) -> Source:
    """Find what SRC names.

    Raises:
        EnvironmentProblem: it is not a run, a checkpoint or an exported folder.
        UsageError: `to` does not fit it.
    """
    if src.is_file():
        raise UsageError(f"{src} is a file", hint="give its folder, a run or a checkpoint")
    if src.is_dir() and not any(src.iterdir()):
        raise EnvironmentProblem(
            f"{src} is empty", hint="give a run, a checkpoint, or a folder with an exported model"
        )
    exported = any((src / name).is_file() for name in MODELS) or any(src.glob("*.gguf"))
    if exported and not RunFolder.is_run(src):
        if to == "peft" and not (src / "adapter_config.json").is_file():
            raise UsageError(f"--to peft is for a run or a checkpoint, and {src} is exported already")
        run = src.absolute().parent.parent
        step = src.name.removeprefix("step-")
        if src.absolute().parent.name == "exports" and RunFolder.is_run(run) and step.isdigit():
            lock = RunFolder(run).recipe_lock
            from titancli.recipe import load_recipe

            data = load_recipe(lock, runnable=False).data if lock.is_file() else None
            return _with_records(Source(src.absolute(), to, None, int(step), data), run)
        return Source(src.absolute(), to, None)
    found = find_source(src, None, say)
    assert found.checkpoint is not None  # a folder with config.json is handled above
    source = Source(found.checkpoint, to, found.checkpoint, found.step, found.recipe)
    return source if found.run is None else _with_records(source, found.run)


def _with_records(source: Source, run: Path) -> Source:
    """Add what the run says of the model: its newest attempt, metrics up to its step, evaluations."""
    folder = RunFolder(run)
    attempts = folder.record().get("attempts") or [{}]
    logged: dict[str, dict[str, float | None]] = {}
    for event in backwards(folder.events):
        kind = event["event"]
        if kind in ("step", "validation") and kind not in logged and event["step"] <= (source.step or 0):
            logged[kind] = event["metrics"]
            if len(logged) == 2:
                break
    step = logged.get("step", {})
    kept: dict[str, float | None] = {name: step[name] for name in SHOWN if name in step}
    kept |= logged.get("validation", {})
    evaluations = {}
    for file in sorted((run / "evaluations" / f"step-{source.step}").glob("*.json")):
        data = read_json(file)
        if isinstance(data.get("metrics"), dict):
            evaluations[str(data.get("name", file.stem))] = data["metrics"]
    return Source(
        source.path,
        source.to,
        source.checkpoint,
        source.step,
        source.recipe,
        attempts[-1],
        kept,
        evaluations,
    )


def base_model_of(recipe: Mapping[str, Any]) -> str | None:
    """Return the repository of the weights that a recipe begins with; None if it does not name it."""
    weights, assets = str(recipe.get("weights") or ""), str(recipe.get("assets") or "")
    if weights.startswith("hf://"):
        name = weights.removeprefix("hf://").partition("@")[0]
        return name if REPOSITORY.match(name) else None
    same = weights and PurePosixPath(weights).name == assets.partition("/")[2]
    return assets if same and REPOSITORY.match(assets) else None
