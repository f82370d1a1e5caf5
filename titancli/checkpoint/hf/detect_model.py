"""The model in a checkpoint or a Hugging Face folder: its component, bound, and whether it fits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import torch

from titancli.checkpoint.format.manifest import LOCK, Manifest, is_checkpoint, newest_good, read_manifest
from titancli.checkpoint.format.tensors import Tensors
from titancli.checkpoint.hf.config_match import CONFIG, model_types, read_config, reader_of
from titancli.checkpoint.hf.libraries import type_in
from titancli.checkpoint.load import name_lists
from titancli.errors import EnvironmentProblem, PluginError, TitanError, UsageError
from titancli.models.blocks.state import named_state
from titancli.protocols import HFForm
from titancli.recipe.config_json import bind_model, fields_in
from titancli.registry.component import build, build_hf, component_info
from titancli.registry.kinds import BUILTIN

Say = Callable[[str], None]


def find_checkpoint(src: Path, say: Say) -> Path:
    """Return the checkpoint that SRC names."""
    if is_checkpoint(src):
        return src.absolute()
    found = newest_good(src.absolute() / "checkpoints", rejected=say)
    if found is None:
        raise EnvironmentProblem(
            f"{src} is neither a checkpoint nor a run with a good checkpoint",
            hint="give a folder such as RUN/checkpoints/step-100",
        )
    return found


def recipe_of(folder: Path) -> tuple[Any, Any, Any]:
    """Return the configs of the model, the tokenizer and the loss, from the recipe that the checkpoint
    contains; None for a tokenizer or a loss that is not known."""
    if (folder / LOCK).is_file():
        from titancli.recipe import load_recipe

        recipe = load_recipe(folder / LOCK, runnable=False).recipe
        return recipe.model, recipe.tokenizer, recipe.loss
    manifest: Manifest = read_manifest(folder)
    keys = manifest.state.get("model")
    if not isinstance(keys, dict) or not isinstance(keys.get("type"), str):
        raise EnvironmentProblem(f"{folder} does not say which model it holds: it has no {LOCK}")
    from titancli.registry import current

    cls = current().find("model", keys["type"])
    fields = {key: value for key, value in keys.items() if key != "type"}
    return bind_model(cls, fields, folder), None, None


def adds_bos(folder: Path, tokenizer: Any) -> bool:
    """Return whether the model of a checkpoint was trained on texts that begin with BOS: as its recipe's
    dataset says, otherwise if the tokenizer does that to a text."""
    if (folder / LOCK).is_file():
        from titancli.recipe import load_recipe

        dataset = load_recipe(folder / LOCK, runnable=False).recipe.dataset
        if dataset is not None and dataset.add_bos is not None:
            return bool(dataset.add_bos)
    return bool(tokenizer.adds_bos)


def model_of(src: Path, component: str | None) -> tuple[str, dict[str, Any], Any]:
    """Return the model for a Hugging Face folder's `config.json`: its full name, its keys, and its bound
    config.

    Raises:
        EnvironmentProblem: there is no readable config.json, or it uses a feature that the model lacks.
        PluginError: no model component reads its model_type, or more than one.
    """
    from titancli.registry import current

    path = src / CONFIG
    keys = read_config(path)
    model_type = type_in(keys)
    registry = current()
    if component:
        cls = registry.find("model", component)
    else:
        if (error := registry.lacks_reader(model_type)) is not None:
            raise error
        cls = _by_type(registry.components("model"), model_type)
    info = component_info(cls)
    if info.hf is None:
        raise UsageError(f"the model {registry.full_name(cls)} has no Hugging Face form")
    config = fields_in(path, reader_of(cls), keys, registry.full_name(cls))
    return registry.full_name(cls), config, bind_model(cls, config, path, keys)


def _by_type(components: Iterable[tuple[str, type]], model_type: str) -> type:
    """Return the one model whose Hugging Face form reads a model_type."""
    found: dict[str, type] = {}
    offered: list[str] = []
    willing: list[str] = []
    for name, cls in components:
        if component_info(cls).hf is not None:
            reads = model_types(reader_of(cls))
            offered += reads
            willing += [] if reads else [name]
            if model_type in reads:
                found[name] = cls
    found = {name: cls for name, cls in found.items() if name.startswith(f"{BUILTIN}/")} or found
    if len(found) == 1:
        return next(iter(found.values()))
    if found:
        raise PluginError(
            f"model_type {model_type!r} is read by {' and '.join(found)}",
            hint=f"choose one: --model-component {next(iter(found))}",
        )
    raise PluginError(
        f"no installed model reads model_type {model_type!r} (supported: {', '.join(sorted(set(offered)))})",
        hint="install a plugin that provides it, or use a model that reads other types, too: "
        + " or ".join(f"--model-component {name}" for name in willing)
        if willing
        else "install a plugin that provides it, or select a model with --model-component",
    )


def hf_form(model: Any) -> HFForm:
    """Return the Hugging Face form of a model's config.

    Raises:
        UsageError: it has none.
    """
    if (form := build_hf(model)) is None:
        raise UsageError(
            f"the model {component_info(model).name} has no Hugging Face form",
            hint="a component declares one with hf= (see titancli.protocols.HFForm)",
        )
    return form


def parameter_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's parameters, tied ones once, and of its other state, by name."""
    with torch.device("meta"):
        built = build(model, seq_len=1)
    return {name: tuple(tensor.shape) for name, tensor in named_state(built)}


def check_parameters(reader: Tensors, model: Any, folder: Path, of_head: Collection[str] = ()) -> None:
    """Check that a checkpoint holds the model that its recipe describes, and these parameters of the loss.

    Raises:
        TitanError: it does not; names the differences.
    """
    shapes, names = parameter_shapes(model), set(reader.names())
    wrong = [n for n in shapes if n in names and reader.shape(n) != shapes[n]]
    found = name_lists(
        {
            "it lacks": sorted((shapes.keys() | set(of_head)) - names),
            "the model lacks": sorted(names - shapes.keys() - set(of_head)),
            "shapes differ": wrong,
        }
    )
    if found:
        raise TitanError(f"the weights in {folder} do not belong to its model: {found}")
