"""`titan convert-checkpoint` without its words: which model, which tensors, and the comparison of logits."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titancli.checkpoint.hf import HFReader, Progress, export_hf, no_progress, put, read_hf, refuse_used
from titancli.checkpoint.load import CheckpointReader, name_lists
from titancli.checkpoint.manifest import LOCK, MANIFEST, Manifest, newest_good, read_manifest
from titancli.checkpoint.save import Draft, run_save
from titancli.checkpoint.storage import SavePlannerOf, plan_of
from titancli.errors import EnvironmentProblem, PluginError, TitanError, UsageError
from titancli.models.blocks.state import named_state
from titancli.registry.component import build, component_info, load_target
from titancli.registry.kinds import HFForm

Say = Callable[[str], None]

VERIFY_LIMIT = 1e-3
"""The largest difference of logits, relative to the largest logit, that passes."""
VERIFY_SHAPE = (2, 64)
"""Rows and tokens that the logits are compared on."""


@dataclass(frozen=True)
class Result:
    """What was done, in lines for the user, and whether it passed the comparison, if there was one."""

    lines: list[str]
    good: bool = True


def to_hf(
    src: Path, dst: Path, *, dtype: str | None, verify: bool, progress: Progress | None, say: Say
) -> Result:
    """Export a checkpoint, or a run's newest good one.

    Raises:
        TitanError: `src` is no good checkpoint, its model has no Hugging Face form, or `dst` is not free.
    """
    refuse_used(dst)
    folder = find_checkpoint(src, say)
    model, tokenizer = recipe_of(folder)
    form = hf_form(model)
    reader = CheckpointReader(folder, prefix="model.")
    check_parameters(reader, model, folder)
    say(f"exporting {folder}")
    built = build(tokenizer) if tokenizer is not None else None
    export_hf(
        reader,
        form,
        getattr(built, "files", {}),
        dst,
        dtype=_dtype(dtype),
        eos_id=getattr(built, "eos_id", None),
        bos_id=getattr(built, "bos_id", None),
        progress=progress or no_progress,
    )
    dst = dst.absolute()
    lines, good = verdict(model, reader, dst, _dtype(dtype)) if verify else ([], True)
    lines += [
        f"Hugging Face folder: {dst}",
        "load it with: from transformers import AutoModelForCausalLM; "
        f"AutoModelForCausalLM.from_pretrained({str(dst)!r})",
    ]
    return Result(lines, good)


def to_titan(
    src: Path,
    dst: Path,
    *,
    dtype: str | None,
    verify: bool,
    component: str | None,
    progress: Progress | None,
    say: Say,
) -> Result:
    """Make a checkpoint of weights alone out of a Hugging Face folder.

    Raises:
        TitanError: `src` holds no model that `component` reads, or `dst` is not free.
    """
    refuse_used(dst)
    src, dst = src.absolute(), dst.absolute()
    name, config, model = model_of(src, component)
    reader = read_hf(src, hf_form(model))
    shapes = parameter_shapes(model)
    reader.check(shapes)
    say(f"reading {src} as {name}")
    draft = Draft(dst, {"model": {"type": name, **config}}, "", f"weights of {src}", {})
    _save(draft, reader, shapes, _dtype(dtype), progress or no_progress)
    lines: list[str] = []
    good = True
    if verify:
        lines, good = verdict(model, CheckpointReader(dst, prefix="model."), src, _dtype(dtype))
    return Result([*lines, f"checkpoint: {dst}", f"start a run from it with: weights={dst}"], good)


def _save(
    draft: Draft,
    reader: HFReader,
    shapes: dict[str, tuple[int, ...]],
    dtype: torch.dtype | None,
    progress: Progress,
) -> None:
    """Save while reading: the plan is made from shapes, and each tensor is read when its turn comes."""
    empty = {
        f"model.{name}": torch.empty(shape, dtype=dtype or reader.dtype(name), device="meta")
        for name, shape in shapes.items()
    }
    done = 0

    def read(item: Any) -> Tensor:
        nonlocal done
        done += 1
        name = item.index.fqn
        progress(name, done, len(empty))
        return reader.parameter(name.removeprefix("model.")).to(empty[name].dtype)

    run_save(SavePlannerOf(plan_of(empty).create_local_plan(), read), draft, None)


# ------------------------------------------------------------------------------------------ which model


def find_checkpoint(src: Path, say: Say) -> Path:
    """The checkpoint that SRC names."""
    if (src / MANIFEST).is_file():
        return src.absolute()
    found = newest_good(src.absolute() / "checkpoints", rejected=say)
    if found is None:
        raise EnvironmentProblem(
            f"{src} is neither a checkpoint nor a run with a good one",
            hint="name a folder such as RUN/checkpoints/step-100",
        )
    return found


def recipe_of(folder: Path) -> tuple[Any, Any]:
    """The model's config, and the tokenizer's where there is one, out of what the checkpoint carries."""
    if (folder / LOCK).is_file():
        from titancli.recipe import load_recipe

        recipe = load_recipe(folder / LOCK).recipe
        return recipe.model, recipe.tokenizer
    manifest: Manifest = read_manifest(folder)
    keys = manifest.state.get("model")
    if not isinstance(keys, dict) or not isinstance(keys.get("type"), str):
        raise EnvironmentProblem(f"{folder} does not say which model it holds: it has no {LOCK}")
    from titancli.registry import current

    cls = current().find("model", keys["type"])
    return bind(cls, {key: value for key, value in keys.items() if key != "type"}, str(folder)), None


def model_of(src: Path, component: str | None) -> tuple[str, dict[str, Any], Any]:
    """The model for a Hugging Face folder's `config.json`: its full name, its keys, and its bound config.

    Raises:
        EnvironmentProblem: there is no readable config.json, or it asks for what the model does not have.
        PluginError: no model component reads its model_type, or more than one.
    """
    from titancli.registry import current

    path = src / "config.json"
    try:
        keys = json.loads(path.read_bytes())
        model_type = keys["model_type"]
    except OSError as error:
        raise EnvironmentProblem(
            f"{src} is no Hugging Face model folder: {path.name} cannot be read ({error.strerror})",
            hint="name a folder with config.json and *.safetensors",
        ) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise EnvironmentProblem(f"{path} is damaged: it names no model_type") from error
    registry = current()
    if component:
        cls = registry.find("model", component)
    else:
        cls = _by_type(registry.components("model"), model_type)
    info = component_info(cls)
    if info.hf is None:
        raise UsageError(f"the model {registry.full_name(cls)} has no Hugging Face form")
    try:
        config = load_target(info.hf).from_config_json(keys)  # type: ignore[attr-defined]
    except (KeyError, TypeError, ValueError) as error:
        raise EnvironmentProblem(f"{path} lacks {error}, which {registry.full_name(cls)} needs") from error
    return registry.full_name(cls), config, bind(cls, config, str(path))


def _by_type(components: Iterable[tuple[str, type]], model_type: str) -> type:
    """The one model whose Hugging Face form reads a model_type."""
    found: dict[str, type] = {}
    offered: list[str] = []
    for name, cls in components:
        hf = component_info(cls).hf
        if hf is not None:
            form: Any = load_target(hf)
            reads = getattr(form, "model_types", None) or (form.model_type,)
            offered += reads
            if model_type in reads:
                found[name] = cls
    if len(found) == 1:
        return next(iter(found.values()))
    if found:
        raise PluginError(
            f"model_type {model_type!r} is read by {' and '.join(found)}",
            hint=f"choose one: --model-component {next(iter(found))}",
        )
    raise PluginError(
        f"no installed model reads model_type {model_type!r} (there are: {', '.join(sorted(set(offered)))})",
        hint="install a plugin that offers it, or name a model with --model-component",
    )


def bind(cls: type, keys: dict[str, Any], where: str) -> Any:
    """A component's config from plain values, as strictly as a recipe is bound.

    Raises:
        EnvironmentProblem: they do not fit; `where` says whose they are.
    """
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(cls).validate_json(json.dumps(keys))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        name = component_info(cls).name
        raise EnvironmentProblem(f"{where} does not fit the model {name}: {place}: {first['msg']}") from error


def hf_form(model: Any) -> HFForm:
    """The Hugging Face form of a model's config.

    Raises:
        UsageError: it has none.
    """
    info = component_info(model)
    if info.hf is None:
        raise UsageError(
            f"the model {info.name} has no Hugging Face form",
            hint="a component declares one with hf= (see titancli.registry.kinds.HFForm)",
        )
    return load_target(info.hf)(model)


def parameter_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a model's parameters, tied ones once, and of its other state."""
    with torch.device("meta"):
        built = build(model, seq_len=VERIFY_SHAPE[1])
    return {name: tuple(tensor.shape) for name, tensor in named_state(built)}


def check_parameters(reader: CheckpointReader, model: Any, folder: Path) -> None:
    """See to it that a checkpoint holds the model that its recipe describes.

    Raises:
        TitanError: it does not; names the differences.
    """
    shapes, names = parameter_shapes(model), set(reader.names())
    wrong = [n for n in shapes if n in names and reader.shape(n) != shapes[n]]
    found = name_lists(
        {
            "it lacks": sorted(shapes.keys() - names),
            "it has, and the model has not": sorted(names - shapes.keys()),
            "other shapes": wrong,
        }
    )
    if found:
        raise TitanError(f"the weights in {folder} are not those of its model: {found}")


def _dtype(name: str | None) -> torch.dtype | None:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name] if name else None


# ------------------------------------------------------------------------------------------- comparison


def verdict(
    model: Any, reader: CheckpointReader, hf_folder: Path, dtype: torch.dtype | None
) -> tuple[list[str], bool]:
    """Lines on how our logits differ from transformers', and whether that is little enough."""
    absolute, relative = logit_difference(model, reader, hf_folder, dtype)
    good = relative <= VERIFY_LIMIT
    lines = [
        f"largest difference of logits: {absolute:.3g} absolute, {relative:.3g} of the largest logit",
        f"verified: {'yes' if good else f'NO, more than {VERIFY_LIMIT:g}'}",
    ]
    return lines, good


@torch.no_grad()
def logit_difference(
    model: Any, reader: CheckpointReader, hf_folder: Path, dtype: torch.dtype | None = None
) -> tuple[float, float]:
    """The largest difference of logits between our model and transformers', on random tokens.

    Both run on the CPU in float32, on `VERIFY_SHAPE` tokens; weights are rounded to `dtype` first, as the
    conversion did. Returns the largest absolute difference, and that divided by the largest logit.

    Raises:
        EnvironmentProblem: transformers cannot load the folder.
    """
    ours = build(model, seq_len=VERIFY_SHAPE[1])
    for name, tensor in named_state(ours):
        value = reader.read(name)
        put(tensor, value.to(dtype) if dtype else value)
    tokens = torch.randint(0, model.vocab_size, VERIFY_SHAPE, generator=torch.Generator().manual_seed(0))
    logits = ours.float().eval()(tokens=tokens)
    del ours
    theirs = load_in_transformers(hf_folder)
    for parameter in theirs.parameters() if dtype else ():
        parameter.copy_(parameter.to(dtype))  # not the buffers: they hold rotary frequencies
    expected = theirs.eval()(input_ids=tokens).logits
    difference = float((logits - expected).abs().max())
    return difference, difference / float(expected.abs().max())


def load_in_transformers(folder: Path) -> torch.nn.Module:
    """The folder as transformers loads it, in float32 on the CPU.

    Raises:
        EnvironmentProblem: it cannot.
    """
    before = logging.root.manager.disable
    logging.disable(
        logging.WARNING
    )  # what it imports along the way warns of kernels that a CPU does not need
    try:
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise EnvironmentProblem(f"transformers cannot load {folder}: {error}") from error
    finally:
        logging.disable(before)
