"""Comparing a recipe's model with the one that weights were made for, field by field. Torch-free.

Equal shapes are not enough: weights made for another rotary base or another eps load without an error, and
the model then computes wrong results.
"""

from __future__ import annotations

import dataclasses
import json
import reprlib
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titancli.checkpoint.format.manifest import LOCK, is_checkpoint, read_manifest
from titancli.checkpoint.hf.libraries import type_in
from titancli.errors import EnvironmentProblem
from titancli.files import read_bytes, read_json
from titancli.recipe.config_json import LARGEST, bind_model, fields_in
from titancli.recipe.peft_folder import base_folder
from titancli.recipe.toml import inline
from titancli.recipe.vocabulary import GROW
from titancli.registry.component import component_info, load_target
from titancli.registry.fields import plain

if TYPE_CHECKING:
    from titancli.recipe.schema import Recipe

CONFIG = "config.json"


@dataclasses.dataclass(frozen=True)
class Difference:
    """A field in which two configs of one model differ."""

    key: str
    """The name within `[model]`: `rope_theta`, `moe.top_k`."""
    here: Any
    there: Any

    def line(self) -> str:
        """Return the line to write in `[model]`."""
        return f"{self.key} = {_shown(self.there)}" if self.there is not None else f"no {self.key}"


def _explicit(config: Any) -> Any:
    """Return a component's config, or a section of it, with derived fields written out."""
    return config.explicit() if hasattr(config, "explicit") else config


def differing_fields(here: Any, there: Any, key: str = "") -> Iterator[Difference]:
    """Yield the fields in which two configs of one class differ.

    Fields that a class lists in `without_effect` are ignored; its `explicit()` writes out derived fields.
    """
    if dataclasses.is_dataclass(here) and type(here) is type(there):
        here, there = (_explicit(side) for side in (here, there))
        left_out = getattr(here, "without_effect", ())
        for field in dataclasses.fields(here):
            if field.name not in left_out:
                values = getattr(here, field.name), getattr(there, field.name)
                yield from differing_fields(*values, f"{key}.{field.name}" if key else field.name)
    elif isinstance(here, dict) and isinstance(there, dict):
        for name in here.keys() & there.keys():  # an omitted field has a default that is not known here
            yield from differing_fields(here[name], there[name], f"{key}.{name}")
    elif here != there:
        yield Difference(key, here, there)


@dataclasses.dataclass(frozen=True)
class _Other:
    """A model of another family than the recipe's."""

    name: str
    own: str


def complaint(
    model: Any, folder: Path, meant: Collection[str], *, grows: bool = False
) -> tuple[str, str] | None:
    """Return what is wrong with weights for a model, and what to write; None if nothing is, or it is unknown.

    Args:
        model: the recipe's, bound.
        folder: a Hugging Face folder, or a checkpoint.
        meant: keys of `[model]` that are meant to differ.
        grows: whether the model's vocabulary may be larger than that of a Hugging Face folder.

    Raises:
        EnvironmentProblem: the folder's config.json cannot be read, or names a feature that the model lacks.
    """
    there = _model_in(folder, model)
    if isinstance(there, _Other):
        hint = "use weights of the recipe's model, or change [model]"
        return f"{folder} holds a {there.name!r} model, but this recipe trains a {there.own} model", hint
    if there is None:
        return None
    found = [d for d in differing_fields(model, there) if not _covered(d.key, meant)]
    larger = [d for d in found if _has_grown(d)]
    if grows and larger and is_checkpoint(folder):
        return (
            "weights_vocab: the vocabulary of a checkpoint cannot grow, and "
            f"{folder} has {larger[0].there:,} rows",
            f"export it first: titan convert-checkpoint {folder} OUT --to hf; then set weights=OUT",
        )
    found = [d for d in found if not (grows and d in larger)]
    if not found:
        return None
    listed = "\n".join(
        f"  {d.key} is {_shown(d.here)} in the recipe and {_shown(d.there)} there" for d in found
    )
    names = json.dumps(sorted({d.key for d in found}))
    if found == larger and not is_checkpoint(folder):
        return (
            f"{folder} holds the weights of a model with a smaller vocabulary:\n{listed}",
            f'set weights_vocab = "{GROW}" to add rows, or in [model]: {found[0].line()}',
        )
    return (
        f"{folder} holds the weights of a different model:\n{listed}",
        f"set in [model]: {'; '.join(d.line() for d in found)}. To train with the recipe's values on "
        f"purpose, set checkpoint.model_differs = {names}",
    )


def refuse_other_model(recipe: Recipe, folder: Path) -> None:
    """Check that the weights in a folder were made for the recipe's model, whatever their shapes.

    Raises:
        EnvironmentProblem: they were not; names every field that differs.
    """
    differs, grows = recipe.checkpoint.model_differs, recipe.weights_vocab == GROW
    if found := complaint(recipe.model, folder, differs, grows=grows):
        raise EnvironmentProblem(f"weights: {found[0]}", hint=found[1])


def read_config(path: Path) -> dict[str, Any]:
    """Return a config.json that names its model.

    Raises:
        EnvironmentProblem: it is missing or damaged.
    """
    try:
        keys = read_json(path, LARGEST)
        if not isinstance(keys, dict):
            raise ValueError("it is not an object")
        if not isinstance(named := type_in(keys), str):
            raise ValueError(f"{reprlib.repr(named)} is not a text")
    except OSError as error:
        raise EnvironmentProblem(
            f"{path.parent} is not a Hugging Face model folder: {path.name} cannot be read "
            f"({error.strerror})",
            hint="give a folder with config.json and *.safetensors",
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise EnvironmentProblem(
            f"{path} is damaged, or has no model_type: {type(error).__name__}: {error}",
            hint="download the folder again",
        ) from error
    return keys


def _model_in(folder: Path, like: Any) -> Any:
    """Return the config of the model in a folder, or an `_Other`; None if it is unknown."""
    if is_checkpoint(folder) or (folder / LOCK).is_file():
        return _in_checkpoint(folder, like)
    folder = base_folder(folder)
    return _in_hf(folder / CONFIG, like) if (folder / CONFIG).is_file() else None


def _in_hf(path: Path, like: Any) -> Any:
    reader = reader_of(like)
    if reader is None:
        return None
    keys = read_config(path)
    types = model_types(reader)
    if types and type_in(keys) not in types:
        return _Other(type_in(keys), " or ".join(map(repr, types)))
    return bind_model(type(like), fields_in(path, reader, keys, component_info(like).name), path, keys)


def reader_of(model: Any) -> Any:
    """Return the object that has `from_config_json` for a model's config or its class: the class itself,
    which needs no torch, or else its Hugging Face form if torch is already loaded. None: there is none."""
    cls: Any = model if isinstance(model, type) else type(model)
    if cls.from_config_json is not None:
        return cls
    hf = component_info(cls).hf
    return load_target(hf) if hf and "torch" in sys.modules else None


def model_types(reader: Any) -> tuple[str, ...]:
    """Return the model_types that a reader accepts; empty: any."""
    if (types := getattr(reader, "model_types", None)) is not None:
        return types
    one = getattr(reader, "model_type", None)
    return (one,) if isinstance(one, str) else ()


def _in_checkpoint(folder: Path, like: Any) -> Any:
    import tomli

    if (folder / LOCK).is_file():
        try:
            table = tomli.loads(read_bytes(folder / LOCK).decode())["model"]
        except (OSError, ValueError, KeyError, RecursionError):
            return None  # a damaged checkpoint is reported, with the reason, when its weights are read
    else:
        table = read_manifest(folder).state.get("model")
    if not isinstance(table, dict) or not isinstance(table.get("type"), str):
        return None
    own = component_info(like).name
    if table["type"].rpartition("/")[2] != own:
        return _Other(table["type"], repr(own))
    keys = {key: value for key, value in table.items() if key not in ("type", "flavor")}
    return bind_model(type(like), keys, folder)


def left_out(model: Any, checkpoint: Path) -> tuple[str, ...]:
    """Return patterns of a checkpoint's tensors that a model starts without, as it does from a Hugging Face
    folder: layers that predict further tokens, if the model has none."""
    if getattr(model, "n_mtp_layers", None) != 0:
        return ()
    there = getattr(_in_checkpoint(checkpoint, model), "n_mtp_layers", 0)
    return tuple(f"model.layers.{model.n_layers + number}" for number in range(there))


def vocabulary_in(folder: Path, like: Any) -> int | None:
    """Return the size of the vocabulary of the model in a Hugging Face folder; None if it is unknown."""
    found: int | None = getattr(_model_in(folder, like), "vocab_size", None)
    return found


def _has_grown(difference: Difference) -> bool:
    here, there = difference.here, difference.there
    of_vocabulary = difference.key.rpartition(".")[2] == "vocab_size"
    return of_vocabulary and isinstance(here, int) and isinstance(there, int) and here > there


def _covered(key: str, meant: Collection[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in meant)


def _shown(value: Any) -> str:
    return "not set" if value is None else inline(plain(value))
