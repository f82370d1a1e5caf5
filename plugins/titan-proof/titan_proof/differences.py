"""Find how two runs were made differently, and what each difference may change. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from titancli.commands.recorded import (
    Difference,
    Effect,
    changed,
    changes,
    plugin_changes,
    software_changes,
    used_plugins,
)
from titancli.errors import PluginError
from titancli.recipe.schema import effect_of, recipe_slots
from titancli.registry import current

if TYPE_CHECKING:
    from titan_proof.reproduction import Reproduction  # it reads digests, with NumPy

EFFECTS: dict[str, Effect] = {"numbers": "results", "speed": "rounding"}
COMPARED_AS_A_WHOLE = (
    "training.steps",
    "training.epochs",
    "lr_scheduler.total_steps",
    "training.global_batch_size",
)
"""Keys that are compared by their effect, the schedule and the global batch, and not one by one."""
THREADS = ("OMP_", "MKL_NUM", "OPENBLAS_NUM", "KMP_")
QUIET = ("HF_", "TRANSFORMERS_", "DATASETS_", "NCCL_DEBUG", "TOKENIZERS_", "MALLOC_")
"""Beginnings of environment variables that change only rounding (`THREADS`), or nothing (`QUIET`)."""


def provenance_differences(before: Reproduction, after: Reproduction) -> list[Difference]:
    """Return the differences in how two runs were made, the likeliest explanation first.

    Raises:
        EnvironmentProblem: a recipe is not TOML.
    """
    one, other = before.made_by, after.made_by
    found = [
        *_recipe(before, after),
        *_data(one, other),
        *_first_weights(one, other),
        *plugin_changes(before.data, one, other),
        *software_changes(before.data, one, other),
        *_machine(one, other),
        *_environment(one, other),
        *_layout(one, other),
        *_determinism(before, one, other),
        *_resumed(before),
        *_resumed(after),
        *_git(before, one, other),
    ]
    order = ("results", "rounding", "none")
    return sorted(found, key=lambda difference: order.index(difference.effect))


def unknown(before: Reproduction, after: Reproduction) -> list[str]:
    """Return what one of the two did not record, one phrase for each fact."""
    names = {
        "versions": "versions",
        "code": "the code of titan and its plugins",
        "machine": "the CPU, its kernels and the threads",
        "data": "the identity of the data",
        "mesh": "the layout",
    }
    sides = ((before, "the run"), (after, "the reproduction"))
    return [
        f"{text}: not recorded by {who}"
        for side, who in sides
        for name, text in names.items()
        if side.made_by.get(name) is None
    ]


def _recipe(before: Reproduction, after: Reproduction) -> Iterator[Difference]:
    one, other = before.data, after.data
    lengths = _schedule(one), _schedule(other)
    if lengths[0] != lengths[1]:
        yield Difference("recipe", "length of the learning rate schedule", *lengths, "results")
    batches = _global_batch(before), _global_batch(after)
    if batches[0] != batches[1]:
        yield Difference("recipe", "rows of a global batch", *batches, "results")
    same_data = before.made_by.get("data") is not None and (
        before.made_by.get("data") == after.made_by.get("data")
    )
    configs = _configs(one)
    for change in changes(one, other):
        if change.key in COMPARED_AS_A_WHOLE:
            continue
        effect, section = _effect_of_key(change.key, configs), change.key.split(".")[0]
        if same_data and section in ("dataset", "tokenizer") and _are_paths(change.before, change.after):
            effect = "none"  # the same contents in another place
        kind = "layout" if effect == "rounding" and section != "env" else "recipe"
        yield Difference(kind, change.key, change.before, change.after, effect)


def _configs(recipe: Mapping[str, Any]) -> dict[str, type]:
    """Return the classes of a recipe's components that are installed here, by section."""
    found = {}
    for section, slot in recipe_slots().items():
        table = recipe.get(section)
        if isinstance(table, dict):
            with suppress(PluginError):
                found[section] = current().find(slot.kind, table["type"])
    return found


def _effect_of_key(key: str, configs: Mapping[str, type]) -> Effect:
    """Return what a changed value of a recipe's key affects."""
    section, _, rest = key.partition(".")
    if section == "env":
        return _effect_of_variable(rest)
    return EFFECTS.get(effect_of(key, configs), "none")


def _schedule(recipe: Mapping[str, Any]) -> Any:
    """Return the length of the schedule: a number of steps, or of epochs."""
    training = recipe.get("training", {})
    length = recipe.get("lr_scheduler", {}).get("total_steps") or training.get("steps")
    return length or (training.get("epochs"), "epochs")


def _global_batch(run: Reproduction) -> Any:
    training, mesh = run.data.get("training", {}), run.made_by.get("mesh") or {}
    if "global_batch_size" in training:
        return training["global_batch_size"]
    rows = training.get("local_batch_size", 0)
    return rows * mesh.get("dp_replicate", 1) * mesh.get("dp_shard", 1)


def _are_paths(*values: Any) -> bool:
    return all(
        isinstance(text, str) and text.startswith("/")
        for value in values
        for text in (value if isinstance(value, list) else [value])
    )


def _data(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[Difference]:
    if one.get("data") is None or other.get("data") is None:
        return
    for change in changes(one["data"], other["data"]):
        yield Difference("data", f"data, {change.key}", change.before, change.after, "results")


def _first_weights(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[Difference]:
    """Compare the hashes of the first weights. They are hashes of shards, so layouts must be the same."""
    sides = one.get("first_weights"), other.get("first_weights")
    if sides[0] and sides[1] and sides[0]["layout"] == sides[1]["layout"] and sides[0] != sides[1]:
        yield Difference("weights", "first weights", sides[0]["hash"], sides[1]["hash"], "results")


def _machine(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[Difference]:
    if one.get("device") is not None and other.get("device") is not None and one["device"] != other["device"]:
        yield Difference("device", "device", one["device"], other["device"], "results")
    if one.get("machine") is None or other.get("machine") is None:
        return
    effects: dict[str, tuple[str, str, Effect]] = {
        "cpu_kernels": ("cpu_kernels", "instructions of the CPU's kernels", "results"),
        "cuda": ("torch", "version of CUDA", "results"),
        "cudnn": ("torch", "version of cuDNN", "results"),
        "threads": ("threads", "threads of a rank", "rounding"),
    }
    for change in changed(one["machine"], other["machine"]):
        kind, what, effect = effects.get(change.key, ("machine", change.key, "none"))
        yield Difference(kind, what, change.before, change.after, effect)


def _effect_of_variable(name: str) -> Effect:
    if name.startswith(THREADS):
        return "rounding"
    return "none" if name.startswith(QUIET) else "results"


def _environment(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[Difference]:
    for change in changed(one.get("env") or {}, other.get("env") or {}):
        effect = _effect_of_variable(change.key)
        if effect == "rounding" and one.get("machine") and other.get("machine"):
            continue  # the machine's record has the resulting number of threads
        yield Difference("environment", f"variable {change.key}", change.before, change.after, effect)


def _layout(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[Difference]:
    for name in ("world", "mesh"):
        if one.get(name) is None or other.get(name) is None:
            continue
        for change in changes({name: one[name]}, {name: other[name]}):
            what = "ranks" if name == "world" else f"degree {change.key.removeprefix('mesh.')}"
            yield Difference("layout", what, change.before, change.after, "rounding")


def _determinism(run: Reproduction, one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[Difference]:
    """Yield a difference if a GPU adds in a new order each time, as it does without `debug.deterministic`."""
    on_gpu = any(side.get("device") not in (None, "CPU") for side in (one, other))
    if on_gpu and not run.data.get("debug", {}).get("deterministic", False):
        yield Difference(
            "determinism",
            "order of additions on the GPU (debug.deterministic=true fixes it)",
            "any",
            "any",
            "rounding",
        )


def _resumed(run: Reproduction) -> Iterator[Difference]:
    """Yield the differences between earlier attempts of a run and its last one."""
    newest = replace(run, earlier=[])
    for attempt in run.earlier:
        steps = f"up to step {attempt['to_step']}"
        for words in attempt["drift"]:
            key, _, values = words.partition(": ")
            before, _, after = values.partition(" -> ")
            yield Difference(
                "resumed", f"{steps}, {key}", before, after, _effect_of_key(key, _configs(run.data))
            )
        for one in provenance_differences(
            replace(newest, made_by={**newest.made_by, **_without_drift(attempt)}), newest
        ):
            if one.kind not in ("recipe", "determinism") and one.effect != "none":
                yield replace(one, kind="resumed", what=f"{steps}, {one.what}")


def _without_drift(attempt: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attempt.items() if name not in ("drift", "to_step")}


def _git(run: Reproduction, one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[Difference]:
    """Compare the repository around the working folder; it can matter only to code that is not titan's
    own."""
    first, second = ({**(side.get("git") or {})} for side in (one, other))
    foreign = bool(one.get("plugin_files")) or used_plugins(run.data) != {"titan"}
    effect: Effect = "results" if foreign and first and second else "none"
    if first.get("commit") != second.get("commit"):
        yield Difference("git", "git commit", first.get("commit"), second.get("commit"), effect)
    if first.get("patch_sha256") != second.get("patch_sha256"):
        yield Difference(
            "git", "uncommitted changes", first.get("patch_sha256"), second.get("patch_sha256"), effect
        )
