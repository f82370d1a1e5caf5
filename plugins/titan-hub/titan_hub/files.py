"""The files of a model that are pushed: weights, configs, tokenizer. Nothing else of a folder is."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from titancli.errors import EnvironmentProblem, UsageError
from titancli.files import parse_json, read_bytes

CARD, RECIPE = "README.md", "recipe.toml"
NAMES = (
    *(CARD, RECIPE, "LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE", "NOTICE.txt", "USE_POLICY.md"),
    *("*.safetensors", "*.safetensors.index.json", "*.gguf", "config.json", "generation_config.json"),
    *("adapter_config.json", "model_index.json", "quantize_config.json", "hf_quant_config.json"),
    *("scheduler_config.json", "preprocessor_config.json", "processor_config.json"),
    *("video_preprocessor_config.json", "image_processor_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "*.bpe.model"),
    *("*.tiktoken", "tekken.json", "chat_template.json", "chat_template.jinja"),
)
"""Patterns of the names that are pushed; others need --include."""
TEMPLATES = "additional_chat_templates"
"""The folder of further chat templates."""
OF_TRAINING = ("run.json", "note.json", "manifest.json", "trainer_state.json", "training_args.json")
"""JSON that belongs to a run or a checkpoint, with names of users, machines and folders."""
OF_RANKS = ("rank-", "optimizer", "metadata")
"""Beginnings of names of a checkpoint's files, optimizer state among them."""
PATHS = {"adapter_config.json": "base_model_name_or_path", "config.json": "_name_or_path"}
"""Keys that may hold a local path, by file."""


@dataclass(frozen=True)
class File:
    """A file to push."""

    name: str
    """Path in the repository, with `/`."""
    data: Path | bytes
    made: bool = False
    """Whether it is a card that titan has made."""

    @property
    def size(self) -> int:
        return len(self.data) if isinstance(self.data, bytes) else self.data.stat().st_size


def collect(folder: Path, include: Sequence[str] = ()) -> tuple[dict[str, File], list[str]]:
    """Return the files of a model's folder that are pushed, by name, and the names of all others.

    Links are not followed.

    Args:
        include: patterns of further files, by their paths in the folder.

    Raises:
        EnvironmentProblem: the folder is empty, cannot be read, or has no whole weights.
    """
    found: dict[str, File] = {}
    left: list[str] = []

    def fail(error: OSError) -> None:
        raise EnvironmentProblem(f"{error.filename} cannot be read: {error.strerror}") from error

    for path, folders, names in os.walk(folder, onerror=fail):
        here = Path(path).relative_to(folder)
        hidden = [name for name in folders if name.startswith(".") or (Path(path) / name).is_symlink()]
        left += [f"{(here / name).as_posix()}/" for name in hidden]
        folders[:] = [name for name in folders if name not in hidden]
        for name in names:
            file = Path(path) / name
            if _is_pushed(file, (here / name).as_posix(), include):
                found[(here / name).as_posix()] = File((here / name).as_posix(), file)
            else:
                left.append((here / name).as_posix())
    if not found and not left:
        raise EnvironmentProblem(
            f"{folder} is empty", hint="write a model there: titan convert-checkpoint RUN FOLDER --to hf"
        )
    for pattern in include:
        if not any(fnmatchcase(name, pattern) for name in found):
            raise UsageError(f"--include {pattern}: {folder} has no such file that can be pushed")
    _require_weights(folder, found)
    return found, sorted(left)


def _is_pushed(file: Path, path: str, include: Sequence[str]) -> bool:
    """Return whether a file is pushed; `path` is its path in the folder. What belongs to a run never is."""
    name = file.name
    known = any(fnmatchcase(name, pattern) for pattern in NAMES)
    known |= file.parent.name == TEMPLATES and name.endswith(".jinja")
    known |= any(fnmatchcase(path, pattern) for pattern in include)
    private = name.startswith(".") or name in OF_TRAINING or name.startswith(OF_RANKS)
    return known and not private and stat.S_ISREG(file.lstat().st_mode)


def _require_weights(folder: Path, files: Mapping[str, File]) -> None:
    """
    Raises:
        EnvironmentProblem: there are no weights, or a file of them is missing or damaged.
    """
    weights = [name for name in files if name.endswith((".safetensors", ".gguf"))]
    if not weights:
        raise EnvironmentProblem(
            f"{folder} has no weights (*.safetensors or *.gguf)",
            hint="give a run, a checkpoint, or a folder that titan convert-checkpoint has written",
        )
    for name in files:
        if name.endswith(".safetensors.index.json"):
            listed = read_json(folder / name).get("weight_map")
            parts = set(map(str, listed.values())) if isinstance(listed, dict) else set()
            beside = Path(name).parent
            if gone := sorted(part for part in parts if (beside / part).as_posix() not in files):
                raise EnvironmentProblem(
                    f"{folder} lacks {gone[0]}, which {name} names", hint="export the model again"
                )
    for name in weights:
        if name.endswith(".safetensors"):
            _require_whole(folder / name)


def _require_whole(file: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np"):
            return  # its header fits its length
    except (SafetensorError, OSError) as error:
        raise EnvironmentProblem(f"{file} is damaged: {error}", hint="export the model again") from error


def without_local_paths(
    files: Mapping[str, File], base_model: str | None, say: Callable[[str], None]
) -> dict[str, File]:
    """Return the configs that name a folder of this machine, with the base model's name in its place, or the
    folder's own."""
    changed = {}
    for name, file in files.items():
        key = PATHS.get(Path(name).name)
        if key is None or not isinstance(file.data, Path):
            continue
        config = read_json(file.data)
        value = config.get(key)
        if not isinstance(value, str) or not (value.startswith(("/", "~", ".")) or "\\" in value):
            continue
        config[key] = base_model or Path(value).name
        say(f"{name} is pushed with {key} = {config[key]!r} in place of a local path")
        changed[name] = File(name, (json.dumps(config, indent=2) + "\n").encode())
    return changed


def read_json(file: Path) -> dict[str, Any]:
    """Return a JSON object.

    Raises:
        EnvironmentProblem: the file has none.
    """
    try:
        found = parse_json(read_bytes(file))
    except (OSError, ValueError) as error:
        raise EnvironmentProblem(f"{file} cannot be read: {error}", hint="export the model again") from error
    if not isinstance(found, dict):
        raise EnvironmentProblem(f"{file} is not an object", hint="export the model again")
    return found
