"""The adapters in a folder, compared with those of a recipe: peft's, and checkpoints of titan. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from titancli.checkpoint.format.manifest import adapter_record, is_checkpoint, read_manifest
from titancli.errors import EnvironmentProblem, RecipeError
from titancli.recipe.peft_folder import facts_of, is_peft


class Complaint(NamedTuple):
    """What is wrong with the adapters in a folder, for a recipe."""

    message: str
    hint: str
    key: str | None = None
    """The key of the recipe's converter that differs."""


def complaint(folder: Path, facts: Mapping[str, Any] | None) -> Complaint | None:
    """Return how the adapters in a folder differ from a recipe's; None if they do not, or if there are none.
    Only the built model shows whether they are of the same layers.

    Args:
        facts: the recipe's, see `titancli.converters.LoRA.facts`; None: it has no adapters, so those of peft
            are merged into the model.

    Raises:
        EnvironmentProblem: the folder is damaged, or titan has no such adapters.
    """
    if is_peft(folder):
        theirs = facts_of(folder)
        return None if facts is None else _of_peft(folder, theirs, facts)
    record = adapter_record(read_manifest(folder)) if is_checkpoint(folder) else None
    if record is None:
        return None
    if facts is None:
        return Complaint(
            f"{folder} contains adapters ({record['form']}), not the weights of a model",
            f"merge them first: titan convert-checkpoint {folder} FOLDER --to hf",
        )
    for name in sorted((facts.keys() | record.keys()) - {"base"}):
        there, here = record.get(name), facts.get(name)
        if there != here:
            return Complaint(
                f"{folder} contains adapters with {name} = {there}, but this recipe has {here}",
                f"use the converter that they were trained with, with its {name}",
                name,
            )
    return None


def _of_peft(folder: Path, theirs: Mapping[str, Any], facts: Mapping[str, Any]) -> Complaint | None:
    if facts["form"] != "lora":
        return Complaint(
            f"{folder} holds LoRA adapters, but this recipe has those of the form {facts['form']}",
            "use the converter lora, or none to merge them",
        )
    for name, there in theirs.items():
        if facts[name] != there:
            return Complaint(
                f"{folder} holds adapters with {name} = {there}, but this recipe has {facts[name]}",
                f"set {name} of the converter to {str(there).lower()}",
                name,
            )
    return None


def require_same(folder: Path, facts: Mapping[str, Any] | None) -> None:
    """
    Raises:
        RecipeError: the adapters in a folder differ from a recipe's, see `complaint`.
        EnvironmentProblem: the folder is damaged, or titan has no such adapters.
    """
    if (found := complaint(folder, facts)) is not None:
        raise RecipeError(found.message, hint=found.hint)


def recorded_base(record: Mapping[str, Any], folder: Path) -> Path:
    """Return the folder of the base that a checkpoint of adapters was trained on.

    Args:
        record: what the manifest of `folder` records about its adapters.

    Raises:
        EnvironmentProblem: it is not there.
    """
    path = Path(record["base"]["path"])
    if not path.is_dir():
        raise EnvironmentProblem(
            f"{folder} holds adapters, but their base {path} no longer exists",
            hint="restore the base at this path",
        )
    return path
