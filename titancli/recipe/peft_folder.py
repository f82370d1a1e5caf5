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
FACTS = {"rank": "r", "alpha": "lora_alpha", "rslora": "use_rslora", "dora": "use_dora"}
"""Our facts of adapters, and their keys in adapter_config.json."""
HARMLESS = {
    *FACTS.values(),
    *("auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "eva_config", "exclude_modules"),
    *("inference_mode", "layers_pattern", "layers_to_transform", "lora_dropout", "megatron_core"),
    *("peft_type", "peft_version", "qalora_group_size", "revision", "target_modules", "task_type"),
    *("bias", "init_lora_weights"),
}
"""Keys that do not change what the stored adapters compute, or that are checked one by one."""
HARMLESS_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
MERGE = "merge the adapters with peft (merge_and_unload), and use the merged folder as weights"


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


def facts_of(folder: Path) -> dict[str, Any]:
    """Return rank, alpha, rslora and dora of the adapters in a folder.

    Raises:
        EnvironmentProblem: its config is damaged, or titan has no such adapters; names everything.
    """
    config = config_of(folder)
    wrong = [
        f"{key} = {value!r}"
        for key, value in config.items()
        if (key not in HARMLESS and value)
        or (key == "peft_type" and value != "LORA")
        or (key == "bias" and value not in (None, "none"))
        # these change the base that is beside the adapters
        or (key == "init_lora_weights" and value not in HARMLESS_STARTS)
    ]
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1 or not isinstance(alpha, int | float) or not alpha > 0:
        wrong.append(f"r = {rank!r}, lora_alpha = {alpha!r}")
    if wrong:
        raise EnvironmentProblem(
            f"{folder / CONFIG} has {', '.join(wrong)}, which titan's adapters do not have", hint=MERGE
        )
    return {ours: config.get(theirs) or False for ours, theirs in FACTS.items()}


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
