"""What differs in how two runs were made, and what each difference may change. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from titancli.run.drift import Change, changes

if TYPE_CHECKING:
    from titancli.run.reproduction import Reproduction  # it reads digests, with NumPy

Effect = Literal["results", "rounding", "none"]
"""What a difference may change: results; the order of additions, and so the last bits; nothing."""

NO_EFFECT: tuple[str, ...] = (
    "name",
    "description",
    "recipe",
    "requires",
    "assets",
    "launcher",
    "loggers",
    "metrics",
)
NO_EFFECT += ("profiling", "comm", "validation")
"""Sections of a recipe that change no number of training."""
NO_EFFECT_KEYS = ("training.gc_freq", "stability.recheck_every", "debug.digests")
LAYOUT = ("mesh", "pipeline", "parallelize", "activation_checkpoint", "compile")
"""Sections that change only the order of additions."""
COMPARED_AS_A_WHOLE = ("training.steps", "lr_scheduler.total_steps", "training.global_batch_size")
"""Keys of which only counts what they come to: the schedule, and the global batch."""
BATCH = ("training.local_batch_size", "training.global_batch_size")
PACKAGES = ("titancli", "torch", "numpy", "transformers", "datasets")
"""Packages on which results may depend; a plugin's does where the recipe uses it."""
THREADS = ("OMP_", "MKL_NUM", "OPENBLAS_NUM", "KMP_")
QUIET = ("HF_", "TRANSFORMERS_", "DATASETS_", "NCCL_DEBUG", "TOKENIZERS_", "MALLOC_")
"""Beginnings of environment variables that change only rounding, and nothing."""


@dataclass(frozen=True)
class Difference:
    """One thing that is not the same."""

    kind: str
    """recipe, data, weights, plugin, titan, torch, package, python, device, cpu_kernels, environment,
    threads, layout, determinism, resumed, git or machine."""
    what: str
    before: Any
    after: Any
    effect: Effect

    def __str__(self) -> str:
        return f"{self.what}: {_shown(self.before)} -> {_shown(self.after)}"


def differences(before: Reproduction, after: Reproduction) -> list[Difference]:
    """Return what differs in how two runs were made, the likeliest explanation first.

    Raises:
        EnvironmentProblem: a recipe is not TOML.
    """
    one, other = before.made_by, after.made_by
    found = [
        *_recipe(before, after),
        *_data(one, other),
        *_first_weights(one, other),
        *_plugins(before.data, one, other),
        *_software(before.data, one, other),
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
    """Return what one of the two did not record, a phrase each."""
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
    for change in changes(one, other):
        if change.key in COMPARED_AS_A_WHOLE:
            continue
        effect, section = _effect_of_key(change.key), change.key.split(".")[0]
        if same_data and section in ("dataset", "tokenizer") and _are_paths(change.before, change.after):
            effect = "none"  # the same contents elsewhere
        kind = "layout" if effect == "rounding" and section != "env" else "recipe"
        yield Difference(kind, change.key, change.before, change.after, effect)


def _effect_of_key(key: str) -> Effect:
    """What another value of a recipe's key changes."""
    section, _, rest = key.partition(".")
    if section in NO_EFFECT or key in NO_EFFECT_KEYS:
        return "none"
    if section == "checkpoint":
        return "results" if rest.startswith("exclude_from_loading") else "none"
    if section == "env":
        return _effect_of_variable(rest)
    return "rounding" if section in LAYOUT or key in BATCH else "results"


def _schedule(recipe: Mapping[str, Any]) -> Any:
    return recipe.get("lr_scheduler", {}).get("total_steps") or recipe.get("training", {}).get("steps")


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
    """Hashes of shards, which say nothing where layouts differ."""
    sides = one.get("first_weights"), other.get("first_weights")
    if sides[0] and sides[1] and sides[0]["layout"] == sides[1]["layout"] and sides[0] != sides[1]:
        yield Difference("weights", "first weights", sides[0]["hash"], sides[1]["hash"], "results")


def code_changes(
    recipe: Mapping[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]
) -> list[Difference]:
    """Return what may change results of titan, packages, and a recipe's plugins, between two attempts.

    Args:
        recipe: the resolved data.
        before, after: the attempts, as run.json records them.
    """
    found = [*_plugins(recipe, before, after), *_software(recipe, before, after)]
    return [difference for difference in found if difference.effect == "results"]


def _used_plugins(recipe: Mapping[str, Any]) -> set[str]:
    """The plugins whose components a recipe names, titan itself included."""

    def types(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            for key, item in value.items():
                if key == "type" and isinstance(item, str):
                    yield item
                else:
                    yield from types(item)
        elif isinstance(value, list):
            for item in value:
                yield from types(item)

    training = {name: part for name, part in recipe.items() if name not in NO_EFFECT}
    return {"titan", *(name.partition("/")[0] for name in types(training) if "/" in name)}


def _plugins(
    recipe: Mapping[str, Any], one: Mapping[str, Any], other: Mapping[str, Any]
) -> Iterator[Difference]:
    used = _used_plugins(recipe)
    sides = [
        {Path(entry["path"]).stem: entry["sha256"] for entry in side.get("plugin_files") or []}
        for side in (one, other)
    ]
    for change in _changed(*sides):
        effect: Effect = "results" if change.key in used else "none"
        yield Difference("plugin", f"plugin file {change.key}.py", change.before, change.after, effect)
    if one.get("code") is None or other.get("code") is None:
        return
    for change in _changed(one["code"], other["code"]):
        effect = "results" if change.key in used else "none"
        kind, what = ("titan", "titan") if change.key == "titan" else ("plugin", f"plugin {change.key}")
        yield Difference(kind, f"code of {what}", change.before, change.after, effect)


def _software(
    recipe: Mapping[str, Any], one: Mapping[str, Any], other: Mapping[str, Any]
) -> Iterator[Difference]:
    used = _used_plugins(recipe)
    if one.get("versions") is None or other.get("versions") is None:
        return
    for change in _changed(one["versions"], other["versions"]):
        name = change.key
        effect: Effect = "results" if name in (*PACKAGES, *used) else "none"
        if name == "python" and _minor(change.before) != _minor(change.after):
            effect = "results"
        kind = {"titancli": "titan", "torch": "torch", "python": "python"}.get(name, "package")
        kind = "plugin" if name in used else kind
        what = "titan" if name == "titancli" else name
        yield Difference(kind, f"version of {what}", change.before, change.after, effect)


def _changed(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[Change]:
    for key in dict.fromkeys([*one, *other]):
        if one.get(key) != other.get(key):
            yield Change(key, one.get(key), other.get(key))


def _minor(version: Any) -> list[str]:
    return str(version).split(".")[:2]


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
    for change in _changed(one["machine"], other["machine"]):
        kind, what, effect = effects.get(change.key, ("machine", change.key, "none"))
        yield Difference(kind, what, change.before, change.after, effect)


def _effect_of_variable(name: str) -> Effect:
    if name.startswith(THREADS):
        return "rounding"
    return "none" if name.startswith(QUIET) else "results"


def _environment(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[Difference]:
    for change in _changed(one.get("env") or {}, other.get("env") or {}):
        effect = _effect_of_variable(change.key)
        if effect == "rounding" and one.get("machine") and other.get("machine"):
            continue  # what the number of threads came to is recorded
        yield Difference("environment", f"variable {change.key}", change.before, change.after, effect)


def _layout(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[Difference]:
    for name in ("world", "mesh"):
        if one.get(name) is None or other.get(name) is None:
            continue
        for change in changes({name: one[name]}, {name: other[name]}):
            what = "ranks" if name == "world" else f"degree {change.key.removeprefix('mesh.')}"
            yield Difference("layout", what, change.before, change.after, "rounding")


def _determinism(run: Reproduction, one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[Difference]:
    """A GPU adds in another order each time, unless it is asked not to."""
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
    """Earlier attempts of a run that were made otherwise than the last one."""
    newest = replace(run, earlier=[])
    for attempt in run.earlier:
        steps = f"up to step {attempt['to_step']}"
        for words in attempt["drift"]:
            key, _, values = words.partition(": ")
            before, _, after = values.partition(" -> ")
            yield Difference("resumed", f"{steps}, {key}", before, after, _effect_of_key(key))
        for one in differences(
            replace(newest, made_by={**newest.made_by, **_without_drift(attempt)}), newest
        ):
            if one.kind not in ("recipe", "determinism") and one.effect != "none":
                yield replace(one, kind="resumed", what=f"{steps}, {one.what}")


def _without_drift(attempt: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attempt.items() if name not in ("drift", "to_step")}


def _git(run: Reproduction, one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[Difference]:
    """The repository around the working folder; it can matter only to code that is not titan's own."""
    first, second = ({**(side.get("git") or {})} for side in (one, other))
    foreign = bool(one.get("plugin_files")) or _used_plugins(run.data) != {"titan"}
    effect: Effect = "results" if foreign and first and second else "none"
    if first.get("commit") != second.get("commit"):
        yield Difference("git", "git commit", first.get("commit"), second.get("commit"), effect)
    if first.get("patch_sha256") != second.get("patch_sha256"):
        yield Difference(
            "git", "uncommitted changes", first.get("patch_sha256"), second.get("patch_sha256"), effect
        )


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    text = str(value)
    # A hash is told from another by its beginning.
    is_hash = len(text) >= 32 and all(digit in "0123456789abcdef" for digit in text)
    return text[:12] if is_hash else text
