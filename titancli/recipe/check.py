"""Checks of a recipe as a whole that need neither torch nor the ranks, and remarks on valid recipes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any, cast

from titancli.errors import PluginError, TitanError
from titancli.recipe.assets import REPOSITORY
from titancli.recipe.env import check_env
from titancli.recipe.layout import Finding, check_layout
from titancli.recipe.problems import Problems, did_you_mean, nearest_name
from titancli.recipe.schema import Recipe, needs_dataset, needs_tokenizer
from titancli.recipe.toml import KeyPath, Node, dotted, match_key
from titancli.recipe.vocabulary import GROW
from titancli.registry.component import component_info, configs, is_config
from titancli.registry.fields import fields_of

if TYPE_CHECKING:
    from titancli.registry.lookup import Registry

INSTEAD = 'set it to "none"'
KEEPS_ALL = {"eager", "eager_noexcept", "eager_debug", "pre_dispatch_eager", "ts"}
"""The backends of torch.compile that let autograd choose which activations backward keeps."""


def check_recipe(
    recipe: Recipe,
    root: Node,
    registry: Registry,
    problems: Problems,
    left_out: Collection[KeyPath] = (),
) -> None:
    """Report the problems that titan, the components and the plugins find.

    `left_out`: the paths of values that could not be bound and have their defaults instead. A problem that
    may be due to such a default alone is not reported.

    Raises:
        PluginError: a check of a component or of a plugin that the recipe uses is broken.
    """
    found = [*_core_checks(recipe), *([] if left_out else component_checks(recipe))]
    for path, message, hint in found:
        if not any(_concerns(path, message, key) for key in left_out):
            _add(problems, root, path, message, hint)
    for path, message, hint in check_env(recipe.env):
        _add(problems, root, path, message, hint, show_value=False)
    for key, message in () if left_out else registry.checks(recipe):
        _add(problems, root, _path(key), message, None)


def _concerns(path: KeyPath, message: str, key: KeyPath) -> bool:
    """Return whether a finding may be due to the value of a key: it is in the same table, or names the
    key."""
    return path[:1] == key[:1] or re.search(rf"\b{re.escape(str(key[-1]))}\b", message) is not None


def _core_checks(recipe: Recipe) -> Iterator[Finding]:
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", recipe.name, re.ASCII):
        message = f"name {recipe.name!r} cannot be the start of a run folder's name"
        yield ("name",), message, "use letters, digits, '_', '-' and '.', starting with a letter or digit"
    if recipe.assets is not None and not REPOSITORY.match(recipe.assets):
        yield ("assets",), f"{recipe.assets!r} is not the name of a repository", 'write "owner/name"'
    if recipe.tokenizer is not None and not any(map(needs_tokenizer, _datasets(recipe))):
        message = f"the dataset {component_info(recipe.dataset).name} does not use a tokenizer"
        yield ("tokenizer",), message, "remove [tokenizer]"
    if recipe.dataset is not None and not needs_dataset(recipe.loop):
        trains = recipe.loop.trains
        instead = "gets its prompts from loop.task and" if trains else "evaluates [validation.datasets] and"
        message = f"the loop {component_info(recipe.loop).name} {instead} uses no dataset"
        yield ("dataset",), message, "remove [dataset]"
    yield from _epochs(recipe)
    yield from _activation_checkpoint(recipe)
    yield from _cuda_graphs(recipe)
    yield from _checkpoint(recipe)
    yield from _dataloader(recipe)
    yield from _validation(recipe)
    yield from _profiling(recipe)
    yield from check_layout(recipe)


def _datasets(recipe: Recipe) -> list[Any]:
    """Return the configs of all datasets; None stands for one that the loop does not use."""
    return [recipe.dataset, *recipe.validation.datasets.values()]


def _epochs(recipe: Recipe) -> Iterator[Finding]:
    epochs, path, dataset = recipe.training.epochs, ("training", "epochs"), recipe.dataset
    if epochs is None:
        return
    name = component_info(recipe.loop).name
    if recipe.training.steps:
        yield path, "a run's length is given in steps or in epochs, not in both", "remove one of the two"
    if recipe.loop.trains and not needs_dataset(recipe.loop):
        yield path, f"the loop {name} uses no dataset, so there are no epochs of one", "set training.steps"
    elif recipe.loop.joins_other_runs:
        yield path, f"other runs use rows of an epoch too in the loop {name}", "set training.steps"
    if dataset is None:
        return
    if dataset.uncountable is not None:
        yield path, dataset.uncountable, "set training.steps instead"
    if "repeat" in fields_of(cast(type, type(dataset))) and not dataset.repeat and epochs > 1:
        message = f"the data end after one epoch, before training.epochs = {epochs:g}"
        yield ("dataset", "repeat"), message, "remove it"


def _dataloader(recipe: Recipe) -> Iterator[Finding]:
    path = ("training", "dataloader", "num_workers")
    if not recipe.training.dataloader.num_workers:
        return
    if recipe.dataset is None:
        yield path, "the loop uses no dataset, so there is nothing for workers to prepare", "remove it"
    elif not recipe.dataset.skips_rows:
        name = component_info(recipe.dataset).name
        message = f"the dataset {name} tokenizes all rows before a row, so each worker would prepare all"
        keys = (key for key in ("cache_tokens", "length_index") if hasattr(recipe.dataset, key))
        shards = "write token shards with `titan data tokenize`, and use the dataset token_shards"
        yield path, message, f"set dataset.{key} = true" if (key := next(keys, None)) else shards


def _validation(recipe: Recipe) -> Iterator[Finding]:
    section = recipe.validation
    for name, dataset in section.datasets.items():
        path = ("validation", "datasets", name)
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name, re.ASCII):
            message = f"{name!r} cannot be the name of a metric and of a file"
            hint = "use letters, digits, '_', '-' and '.', starting with a letter or digit"
            yield path, message, hint
        if dataset.repeat and section.steps is None:
            message = "an evaluation would never end: set it to false, or set validation.steps"
            yield (*path, "repeat"), message, None


def _activation_checkpoint(recipe: Recipe) -> Iterator[Finding]:
    section = recipe.activation_checkpoint
    option = section.selective_ac_option
    if option not in ("op", "products") and not re.fullmatch(r"[1-9]\d*", option):
        message = (
            f"selective_ac_option must be 'products', 'op' or a number of layers as a string, not {option!r}"
        )
        yield ("activation_checkpoint", "selective_ac_option"), message, None
    if section.mode != "memory_budget":
        return
    if not recipe.compile.model:
        message = (
            "in mode memory_budget the compiler chooses which activations to keep, and no block is compiled"
        )
        hint = 'set compile.enable = true, or mode = "selective"'
        yield ("activation_checkpoint", "mode"), message, hint
    elif recipe.compile.backend in KEEPS_ALL:
        message = f"the backend {recipe.compile.backend!r} keeps all activations, whatever the memory_budget"
        yield ("compile", "backend"), message, 'use "inductor"'


def _cuda_graphs(recipe: Recipe) -> Iterator[Finding]:
    """Yield what no graph can do; `titancli.engine.graphed` refuses what a recipe does not tell."""
    how, path = recipe.compile.cuda_graphs, ("compile", "cuda_graphs")
    if how == "none":
        return
    if getattr(recipe.parallelize, "cpu_offload", False):
        yield path, "graphs read parameters where they are, and parallelize.cpu_offload moves them", INSTEAD
    if recipe.loop.trains and not needs_dataset(recipe.loop):
        name = component_info(recipe.loop).name
        yield path, f"each micro-batch of the loop {name} has a shape of its own", INSTEAD
    if recipe.model.n_experts and recipe.training.mixed_precision_param == "float32":
        message = "in float32 the host waits for the tokens of experts, which a graph cannot"
        yield path, message, 'set training.mixed_precision_param = "bfloat16"'
    data: Any = recipe.dataset
    masks = () if data is None else ("document_mask", "pack", "joins_rows")
    if how == "blocks" and (key := next((one for one in masks if getattr(data, one, False)), None)):
        message = "on a GPU, blocks are given a mask of the documents that is another one in each micro-batch"
        hint = 'padding = "longest"' if key == "joins_rows" else f"{key} = false"
        yield path, message, f'set it to "step", or dataset.{hint}'


def _checkpoint(recipe: Recipe) -> Iterator[Finding]:
    section = recipe.checkpoint
    saving = ["enable_first_step_checkpoint", "create_seed_checkpoint", "remote"]
    exports = ["last_save_model_only", "last_save_in_hf"]
    if not section.enable:
        for name in [*saving, *exports]:
            if getattr(section, name):
                yield ("checkpoint", name), "nothing is saved when checkpoint.enable is false", None
    if section.remote is not None and (wrong := _remote(section.remote)):
        yield ("checkpoint", "remote"), *wrong
    if section.remote_read_back and section.remote is None:
        message = "nothing is uploaded, so remote_read_back has no effect"
        yield ("checkpoint", "remote_read_back"), message, "set checkpoint.remote, or remove it"
    if section.export_dtype != "float32" and not any(getattr(section, name) for name in exports):
        message = "nothing is exported, so export_dtype has no effect"
        yield ("checkpoint", "export_dtype"), message, "set last_save_in_hf = true, for example"
    if section.last_save_in_hf and component_info(recipe.model).hf is None:
        message = f"the model {component_info(recipe.model).name} has no Hugging Face form"
        yield ("checkpoint", "last_save_in_hf"), message, "set last_save_model_only = true"
    if recipe.weights_vocab == GROW and (recipe.weights is None or not section.initial_load_model_only):
        message = "only initial weights of a Hugging Face folder can grow, and this recipe names none"
        yield ("weights_vocab",), message, "set weights to the folder, or remove weights_vocab"
    if not section.initial_load_model_only and recipe.weights is None:
        message = "no checkpoint is given to load the state from"
        yield ("checkpoint", "initial_load_model_only"), message, 'set weights = "RUN/checkpoints/step-N"'
    for name in section.exclude_from_loading:
        if "." not in name and name not in PARTS:
            hint = did_you_mean(TORCHTITAN.get(name) or nearest_name(name, PARTS))
            message = f"a checkpoint has no part {name!r}"
            yield ("checkpoint", "exclude_from_loading"), message, hint or f"its parts are {', '.join(PARTS)}"
    known = [field.name for field in dataclasses.fields(recipe.model)]
    for name in section.model_differs:
        if name.partition(".")[0] not in known:
            message = f"the model {component_info(recipe.model).name} has no {name!r}"
            hint = did_you_mean(nearest_name(name, known)) or f"its keys are {', '.join(known)}"
            yield ("checkpoint", "model_differs"), message, hint


def _profiling(recipe: Recipe) -> Iterator[Finding]:
    section = recipe.profiling
    for name in ("save_traces_folder", "save_memory_snapshot_folder"):
        folder = getattr(section, name)
        if not re.fullmatch(r"[A-Za-z0-9_][\w-]*", folder, re.ASCII) or folder in TAKEN:
            message = f"{folder!r} cannot be the name of a folder in the run folder"
            yield ("profiling", name), message, f"use a name that is not {', '.join(TAKEN)}"
    if section.save_traces_folder == section.save_memory_snapshot_folder:
        yield (
            ("profiling", "save_memory_snapshot_folder"),
            "this is the folder of the traces",
            "use another one",
        )
    needed = section.profiler_warmup + section.profiler_active
    if section.enable_profiling and needed > section.profile_freq:
        message = f"profiler_warmup + profiler_active = {needed} steps do not fit into {section.profile_freq}"
        yield ("profiling", "profile_freq"), message, f"use {needed} or more"


def _remote(url: str) -> tuple[str, str] | None:
    """Return the problem of `checkpoint.remote` and a hint, or None; credentials are not shown."""
    if re.match(r"\w+://[^/]*@", url):
        hint = "remove the part before the @, and set AWS_PROFILE, for example, in the shell"
        return (
            "a recipe and its lock file are meant to be shared and must not hold credentials in a URL"
        ), hint
    if not re.fullmatch(r"[a-z][a-z0-9+.-]+://[^?#:\s]*[^/?#:\s]/*", url):
        return f"{url!r} is not the URL of a folder in an object store", 'use "s3://bucket/prefix"'
    return None


def component_checks(recipe: Recipe) -> Iterator[Finding]:
    """Yield the findings of the configs' own `check(recipe)` methods."""
    for path, config in components(recipe):
        try:
            for key, message in config.check(recipe):
                yield (*path, *_path(key)), message, None
        except TitanError:
            raise
        except Exception as error:
            where = f"{type(config).__module__}.{type(config).__qualname__}.check"
            raise PluginError(f"{where} failed: {type(error).__name__}: {error}") from error


def components(recipe: Recipe) -> Iterator[tuple[KeyPath, Any]]:
    """Yield the config of every component in a recipe with its path, including slots of other components."""
    return ((path, config) for path, config in configs(recipe) if is_config(config))


def _path(key: str) -> KeyPath:
    found = match_key(key)
    return tuple(found[0]) if found else ()


def _add(
    problems: Problems, root: Node, path: KeyPath, message: str, hint: str | None, *, show_value: bool = True
) -> None:
    """Report a finding at its key, or at the nearest enclosing table that the recipe has."""
    node, reached = root.follow(path)
    location = node.origin.location("value" if reached == path and show_value else "key")
    if location is not None and not show_value:
        shown = location.source[: location.column - 1 + location.length]
        location = dataclasses.replace(location, source=f"{shown} = …")
    text = message if reached == path and location else f"{dotted(path)}: {message}" if path else message
    problems.add("check", text, location, hint)


# ------------------------------------------------------------------------------------ what a checkpoint holds


TAKEN = ("checkpoints", "evaluations", "exports", "logs", "rollouts", "sources")
"""Folders of a run that have another purpose."""
PARTS = {
    "model": "the weights",
    "optimizer": "the optimizer's moments and step counts",
    "data": "the position in the dataset",
    "step": "the numbers of steps, which the schedule follows, and of tokens",
    "guard": "the recent losses and gradient norms that a step is compared with",
    "callbacks": "the state of callbacks, such as an average of the weights",
}
TORCHTITAN = {"dataloader": "data", "lr_scheduler": "step", "train_state": "step"}
"""The parts of a checkpoint under torchtitan's names, where these differ."""


# ---------------------------------------------------------------------------------------------------- remarks


def remarks(recipe: Recipe) -> list[str]:
    """Return remarks as sentences; none of them stops a command."""
    of_schedule = recipe.lr_scheduler.remarks(recipe.schedule_steps) if recipe.schedule_steps else ()
    return [*of_schedule, *_rounding(recipe)]


def _rounding(recipe: Recipe) -> Iterator[str]:
    if recipe.training.dtype == "bfloat16" and not recipe.optimizer.rounds_stochastically:
        name = component_info(recipe.optimizer).name
        yield (
            f'training.dtype is "bfloat16", and the optimizer {name} does not declare that it rounds '
            "stochastically: with rounding to nearest, updates smaller than 0.2 % of a weight are lost; "
            "use adamw, or float32"
        )
