"""Folders that `peft` has saved, as `weights` of a recipe: which base they belong to. Torch-free."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from titancli.errors import EnvironmentProblem
from titancli.files import read_json
from titancli.recipe.find import url_of

CONFIG, WEIGHTS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
BASE = "base_model_name_or_path"


def is_peft(folder: Path) -> bool:
    """Return whether a folder holds adapters in peft's form."""
    return url_of(folder) is None and (folder / CONFIG).is_file()


def config_of(folder: Path) -> dict[str, Any]:
    """Return the adapter_config.json of a folder.

    Raises:
        EnvironmentProblem: it cannot be read, or is damaged.
    """
    path = folder / CONFIG
    try:
        found = read_json(path)
        if not isinstance(found, dict):
            raise ValueError("no object")
    except (OSError, ValueError) as error:
        raise EnvironmentProblem(f"{path} cannot be read: {error}", hint="save it again") from error
    return found


def weights_of(folder: Path) -> Path:
    """Return the file with the adapters of a folder.

    Raises:
        EnvironmentProblem: there is none.
    """
    if (folder / WEIGHTS).is_file():
        return folder / WEIGHTS
    pickled = (folder / PICKLED).is_file()
    why = f"holds pickled adapters ({PICKLED}), which can run code" if pickled else f"has no {WEIGHTS}"
    raise EnvironmentProblem(f"{folder} {why}", hint="save it again with a newer peft")


def base_folder(folder: Path) -> Path:
    """Return the folder with the model whose weights are in a folder: of adapters in peft's form their base,
    of any other folder itself. A relative path starts at the current folder, as in peft.

    Raises:
        EnvironmentProblem: the base is not a folder on this machine.
    """
    if not is_peft(folder):
        return folder
    named = config_of(folder).get(BASE)
    base = Path(os.path.expanduser(named)) if isinstance(named, str) and named else None
    if base is None or not (base / "config.json").is_file() or is_peft(base):
        raise EnvironmentProblem(
            f"{folder} holds adapters of the base {named!r}, which is not a Hugging Face folder on this "
            "machine",
            hint=f"download the base, and set {BASE} in {folder / CONFIG} to its folder",
        )
    return base.absolute()
