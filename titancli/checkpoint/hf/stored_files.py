"""The files of weights in a Hugging Face folder, and the tensors that their headers list. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

from titancli.checkpoint.format.tensorfile import Entry, read_header
from titancli.checkpoint.hf.libraries import LIBRARIES, Library
from titancli.errors import EnvironmentProblem
from titancli.files import read_json
from titancli.recipe.peft_folder import base_folder, is_peft, weights_of

PICKLED = ("*.bin", "*.pth", "*.pt", "*.ckpt")


def stored_tensors(folder: Path, library: Library) -> dict[str, tuple[Path, Entry]]:
    """Return every tensor of a folder by its name there, with the file that has it.

    Raises:
        EnvironmentProblem: the folder holds no safetensors, or a file is missing or damaged.
    """
    header = cache(lambda file: read_header(folder / file))
    if (folder / library.index).is_file():
        names = _indexed(folder / library.index, header)
        if library.weights not in names and (folder / library.weights).is_file():
            raise EnvironmentProblem(
                f"{folder} holds weights twice: {library.weights}, and those that {library.index} names",
                hint=f"remove the files that you do not want; transformers reads {library.weights}",
            )
    elif (folder / library.weights).is_file():
        names = [library.weights]
    else:
        raise _no_weights(folder, library)
    found: dict[str, tuple[Path, Entry]] = {}
    for name in names:
        for key, entry in header(name).items():
            if key in found:
                raise EnvironmentProblem(
                    f"{folder}: {key} is in {found[key][0].name} and in {name}",
                    hint="remove one of the two, or download the folder again",
                )
            found[key] = folder / name, entry
    return found


def require_stored(folder: Path) -> None:
    """Check by their headers that a folder's weights are whole: those of adapters, and those of their base.

    Raises:
        EnvironmentProblem: there are none, or a file is missing or damaged.
    """
    base = base_folder(folder)
    config = read_json(base / "config.json")
    named = [library for library in LIBRARIES.values() if library.key in config]
    stored_tensors(base, (named or list(LIBRARIES.values()))[0])
    if is_peft(folder):
        read_header(weights_of(folder))


def _indexed(path: Path, header: Callable[[str], dict[str, Entry]]) -> list[str]:
    try:
        weight_map = read_json(path)["weight_map"]
        files = sorted(set(weight_map.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise EnvironmentProblem(f"{path} is damaged: it has no weight_map") from error
    for name in files:
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][\w.-]*\.safetensors", name):
            raise EnvironmentProblem(f"{path} names {name!r}, which is not a safetensors file in that folder")
    for key, name in weight_map.items():
        if key not in header(name):
            raise EnvironmentProblem(f"{path} says that {key!r} is in {name}, but it is not")
    return files


def _no_weights(folder: Path, library: Library) -> EnvironmentProblem:
    if not folder.is_dir():
        return EnvironmentProblem(f"folder {folder} does not exist")
    pickled = sorted(path.name for form in PICKLED for path in folder.glob(form))
    if pickled:
        return EnvironmentProblem(
            f"{folder} holds pickled weights ({pickled[0]}), which can run code and are therefore not read",
            hint="if you trust them, save them as safetensors: load the folder with transformers "
            "and call save_pretrained(NEW_FOLDER)",
        )
    parts = any(folder.glob(f"{library.stem}-*-of-*.safetensors"))
    return EnvironmentProblem(
        f"{folder} contains no weights: neither {library.weights} nor {library.index}",
        hint=f"{library.index}, which names its other files, is missing: download it again"
        if parts
        else "give a Hugging Face model folder with *.safetensors files",
    )
