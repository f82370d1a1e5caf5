"""Translation of fields that belong together: model, tokenizer, data, converters, and others."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from titan_torchtitan.checkpoint import checkpoint
from titan_torchtitan.fields import FLOAT8, GROUPED_FLOAT8, GROUPED_MX, MX
from titan_torchtitan.job import Job
from titancli.errors import PluginError
from titancli.layout.stages import SCHEDULES
from titancli.recipe import install_command

if TYPE_CHECKING:
    from titancli.registry.lookup import Registry

SAME_MODEL = {
    "llama": "llama3",
    "llama3_ft": "llama3",
    "llama3_simple_fsdp": "llama3",
    "simple_fsdp.llama3": "llama3",
}
"""torchtitan's models that differ from another only in how they are run."""
DATASETS: dict[str, dict[str, Any]] = {
    "c4": {"type": "hf", "path": "allenai/c4", "name": "en", "streaming": True},
    "c4_validation": {
        "type": "hf",
        "path": "allenai/c4",
        "name": "en",
        "split": "validation",
        "streaming": True,
    },
    "c4_test": {"type": "hf", "path": "./tests/assets/c4_test"},
    "c4_mini": {"type": "hf", "path": "./torchtitan/datasets/c4_mini"},
}
NO_DATASET = "no installed plugin provides the dataset {0!r}; [dataset] needs one"
IMAGES = dict.fromkeys(
    ("cc12m-wds", "cc12m-test", "coco-validation"),
    "{0!r} is a set of images, which titan reads encoded: titan flux-encode IMAGES SHARDS --model FLUX "
    '(plugin titan-flux), then [dataset] type = "latents", paths = ["SHARDS/*.safetensors"]',
)
"""Datasets of torchtitan's flux recipes."""
CONVERTERS = {
    "float8": FLOAT8,
    "mx": MX,
    FLOAT8: FLOAT8,
    MX: MX,
    GROUPED_FLOAT8: GROUPED_FLOAT8,
    GROUPED_MX: GROUPED_MX,
}
"""Names in `model.converters`, and the sections that configure them."""
BY_HAND = {
    MX: ("mxfp8_linear", "a name of torchao's recipes stands for other scales in other versions of it"),
    GROUPED_FLOAT8: ("float8_experts", "fqns says what is converted, and skip what is not"),
    GROUPED_MX: ("mxfp8_experts", "fqns says what is converted, and skip what is not"),
}
"""Sections whose fields do not say what those of titan-float8's converters do: the converter, and why."""
SUBMODULES = {"output", "wq", "wk", "wv", "wo", "w1", "w2", "w3"}
"""Last parts of the names of linear layers, the same here as in torchtitan."""
AUTO_FILTER = "auto_filter_small_kn"


def model(job: Job, registry: Registry) -> None:
    name = SAME_MODEL.get(job.value("model.name"), job.value("model.name"))
    flavor = job.value("model.flavor")
    job.put("model.type", name, "model.name")
    if name != job.value("model.name"):
        job.change(
            "model.name", f"the model is {name}; in titan, how a model is run is not a property of the model"
        )
    plain = re.sub(r"_(flex|varlen)(_attn)?\Z", "", flavor)
    job.put("model.flavor", plain, "model.flavor")
    if plain != flavor:
        how = "the attention kernel depends on the device; the document mask is dataset.document_mask = true"
        job.change("model.flavor", f"is {plain!r} here: {how}")
        job.put("dataset.document_mask", True)
    config = _installed(registry, "model", name)
    if config is None:
        job.lose(
            "model.name", f"no installed plugin provides the model {name!r}; [model] needs one that does"
        )
    elif plain not in config.flavors:
        known = ", ".join(config.flavors)
        job.lose("model.flavor", f"{name} has no flavor {plain!r} (it has {known}); set the model's own keys")


def tokenizer(job: Job, registry: Registry) -> None:
    name = "model.hf_assets_path"
    if job.value("model.tokenizer_path") is not None and not job.written(name):
        name = "model.tokenizer_path"
    elif job.written("model.tokenizer_path"):
        job.lose("model.tokenizer_path", "model.hf_assets_path sets the same value")
    path = str(job.value(name))
    job.put("tokenizer.type", "hf")
    folder = re.sub(r"/?(original/)?[^/]+\.(model|json)\Z", "", path) or "."
    job.put("tokenizer.path", folder, name)
    if folder != path:
        job.change(
            name,
            f"this is a file; tokenizer.path is its folder {folder!r}, which must contain tokenizer.json",
        )


def dataset(job: Job, registry: Registry) -> None:
    job.recipe["dataset"] = _dataset(job, registry, "training") | job.recipe.get("dataset", {})


def validation(job: Job, registry: Registry) -> None:
    if not job.value("validation.enable"):
        _lose_section(job, "validation", "no effect: validation.enable is false")
        return
    held_out = _dataset(job, registry, "validation")
    if job.value("validation.seq_len") == job.value("training.seq_len"):
        job.take("validation.seq_len")
    else:
        job.lose("validation.seq_len", "rows of held-out data are as long as training.seq_len")
    for name in ("freq", "steps", "local_batch_size"):
        value, field = job.value(f"validation.{name}"), f"validation.{name}"
        if value > 0:  # steps = -1 means all of it, as does omitting it in titan
            job.put(field, value, field)
        job.take(field)
    job.put("validation.datasets", {"validation": held_out}, "validation.enable")


def _dataset(job: Job, registry: Registry, section: str) -> dict[str, Any]:
    """Return the table of the dataset that a section names."""
    key = f"{section}.dataset"
    name, path = job.value(key), job.value(f"{key}_path")
    table = dict(DATASETS.get(name, {"type": name}))
    if name not in DATASETS and _installed(registry, "dataset", name) is None:
        if path is None:
            job.lose(key, IMAGES.get(name, NO_DATASET).format(name))
        else:
            table = {"type": "hf"}
            job.change(key, "is read as a Hugging Face dataset; dataset.text names its text column")
    if path is not None and table["type"] == "hf":
        table.pop("name", None)
        table["path"] = path if path.startswith(("/", "./", "../", "~")) else f"./{path}"
        job.take(f"{key}_path")
    elif path is not None:
        job.lose(f"{key}_path", f"the dataset {table['type']!r} defines its own keys")
    job.take(key)
    return table


def optimizer(job: Job, registry: Registry) -> None:
    name = job.value("optimizer.name")
    known = name.lower()
    if known == "adam" and job.value("optimizer.weight_decay") == 0:
        job.change("optimizer.name", "without weight decay, Adam and AdamW are the same")
        known = "adamw"
    if _installed(registry, "optimizer", known) is None:
        job.lose(
            "optimizer.name", f"no installed plugin provides the optimizer {known!r}; adamw is used instead"
        )
        known = "adamw"
    job.take("optimizer.name")
    job.recipe["optimizer"] = {"type": known, **job.recipe.get("optimizer", {})}
    if job.written("optimizer.fused"):
        value = "fused" if job.value("optimizer.fused") else "foreach"
        job.put("optimizer.implementation", value, "optimizer.fused")


def schedule(job: Job, registry: Registry) -> None:
    """Translate the schedule; a warm-up or decay that is too long for the run is shortened as in
    torchtitan."""
    total = job.value("lr_scheduler.total_steps") or job.value("training.steps")
    warmup, ratio = job.value("lr_scheduler.warmup_steps"), job.value("lr_scheduler.decay_ratio")
    if warmup > total:
        job.change(
            "lr_scheduler.warmup_steps", f"becomes {total}, the total number of steps, as in torchtitan"
        )
        warmup = total
        job.put("lr_scheduler.warmup_steps", warmup)
    elif job.written("lr_scheduler.warmup_steps"):
        job.put("lr_scheduler.warmup_steps", warmup, "lr_scheduler.warmup_steps")
    if ratio is None:
        return
    if warmup + round(total * ratio) > total:
        how = "is removed: the decay takes all steps after the warm-up, as in torchtitan"
        job.change("lr_scheduler.decay_ratio", how)
    else:
        job.put("lr_scheduler.decay_ratio", ratio, "lr_scheduler.decay_ratio")


def experts(job: Job, registry: Registry) -> None:
    degree, balance = "parallelism.expert_parallel_degree", "debug.moe_force_load_balance"
    model = job.recipe["model"]
    config = _installed(registry, "model", model["type"])
    if config is None:
        return
    flavor = config.flavors.get(model["flavor"], {})
    if any(key in flavor for key in ("moe", "n_experts")):
        return
    why = "the model has no experts; torchtitan ignores it, too"
    if job.value(degree) > 1:
        job.put("mesh.ep", 1)
        job.lose(degree, why)
    if job.value(balance):
        job.put("debug.moe_force_load_balance", False)
        job.lose(balance, why)


def dispatch(job: Job, registry: Registry) -> None:
    """Translate how tokens reach experts: "standard" is torch's all-to-all, titan's default."""
    name = "parallelism.expert_parallel_comm_backend"
    backend = job.value(name)
    if backend == "standard":
        job.take(name)
    elif backend != "deepep":
        job.lose(name, "titan sends tokens by torch's all-to-all, or by DeepEP: deepep")
    elif _installed(registry, "dispatcher", "deepep") is None:
        install = install_command("titan-deepep")
        job.lose(name, f"no installed plugin provides deepep: {install}, and convert again")
    else:
        job.put("parallelize.expert_dispatch", "deepep", name)
        _require(job, registry, "dispatcher", "deepep")


def batch(job: Job, registry: Registry) -> None:
    total = job.value("training.global_batch_size")
    if total > 0:
        job.put("training.global_batch_size", total, "training.global_batch_size")
    elif job.written("training.global_batch_size"):
        job.change("training.global_batch_size", "is removed: the default is one micro-batch per rank")


def loggers(job: Job, registry: Registry) -> None:
    for switch, name in (("metrics.enable_tensorboard", "tensorboard"), ("metrics.enable_wandb", "wandb")):
        if not job.value(switch):
            job.take(switch)
        elif _installed(registry, "logger", name) is None:
            job.lose(switch, f"no installed plugin provides the logger {name!r}")
        else:
            job.recipe.setdefault("loggers", []).append({"type": name})
            job.take(switch)


def weights(job: Job, registry: Registry) -> None:
    path, hf = job.value("checkpoint.initial_load_path"), job.value("checkpoint.initial_load_in_hf")
    names = ("checkpoint.initial_load_path", "checkpoint.initial_load_in_hf")
    if path is None and not hf:
        job.take(*names)
    elif not job.value("checkpoint.enable"):
        for name in filter(job.written, names):
            job.lose(name, "no effect: torchtitan loads nothing when checkpoint.enable is false")
    elif hf:
        job.put("weights", path or job.value("model.hf_assets_path"), *names)
    else:
        why = (
            "a torch.distributed.checkpoint folder, which titan does not read; convert it to a Hugging "
            "Face folder"
        )
        job.lose(
            "checkpoint.initial_load_path", f"{why} with torchtitan's script and set weights to that folder"
        )
        job.take("checkpoint.initial_load_in_hf")


def activation_checkpoint(job: Job, registry: Registry) -> None:
    mode, option = (job.value(f"activation_checkpoint.{name}") for name in ("mode", "selective_ac_option"))
    if mode == "memory_budget" and not (
        job.value("compile.enable") and "model" in _names(job.value("compile.components"))
    ):
        why = "a memory budget needs compile.enable; selective checkpointing by operation is used instead"
        job.lose("activation_checkpoint.mode", why)
        mode, option = "selective", "op"
    job.put("activation_checkpoint.mode", mode, "activation_checkpoint.mode")
    if mode == "selective":
        job.put("activation_checkpoint.selective_ac_option", str(option))
    job.take("activation_checkpoint.selective_ac_option")


def compile_components(job: Job, registry: Registry) -> None:
    """Translate the parts to compile: torchtitan compiles the loss by default too, but titan's is computed
    in chunks, which gains less."""
    name = "compile.components"
    known = [component for component in _names(job.value(name)) if component in ("model", "loss")]
    if not job.written(name):
        if job.value("compile.enable"):
            job.put(name, known)
    elif known != _names(job.value(name)):
        job.put(name, known)
        job.change(name, "names parts that cannot be compiled: only the blocks (model) and the loss can")
    else:
        job.put(name, known, name)


def parallel(job: Job, registry: Registry) -> None:
    """Translate the parallelism settings whose values have other names or conditions here."""
    name = "parallelism.pipeline_parallel_schedule"
    known = {schedule.lower(): schedule for schedule in SCHEDULES}
    if job.written(name) and job.value(name).lower() in known:
        job.put("pipeline.schedule", known[job.value(name).lower()], name)
    elif job.written(name):
        job.lose(name, f"titan runs {', '.join(SCHEDULES)}")
    name = "parallelism.context_parallel_rotate_method"
    if job.value(name) == "alltoall":
        job.put("parallelize.context_parallel", "ring")
        job.change(name, 'becomes parallelize.context_parallel = "ring"')
    elif job.value(name) != "allgather":
        job.lose(name, "torchtitan supports allgather and alltoall")
    elif job.written(name):
        job.put("parallelize.context_parallel", "allgather", name)
    name = "parallelism.enable_async_tensor_parallel"
    inductor = job.value("compile.backend") == "inductor" and "model" in _names(
        job.value("compile.components")
    )
    if job.value(name) and not (job.value("compile.enable") and inductor):
        job.lose(name, "no effect without compile.enable of the model by inductor")
    elif job.written(name):
        job.put("parallelize.async_tp", job.value(name), name)


def converters(job: Job, registry: Registry) -> None:
    """Translate `[[converters]]`, in the order of the job; sections of unused converters have no effect."""
    named = _names(job.value("model.converters"))
    for switch in (
        "training.enable_fp8_linear",
        "training.enable_float8_linear",
        "float8.enable_float8_linear",
    ):
        if job.value(switch):
            named.append("float8")
        job.take(switch)
    job.take("model.converters")
    used = set()
    for name in named:
        section = CONVERTERS.get(name)
        used.add(section)
        if section == FLOAT8:
            _float8(job, registry)
        elif section is None and _installed(registry, "converter", name) is not None:
            _append(job, registry, {"type": name})
        elif section in BY_HAND:
            type_, why = BY_HAND[section]
            job.lose(
                "model.converters",
                f'for {name!r} write [[converters]] type = "{type_}" (plugin titan-float8) by hand: {why}',
            )
            _lose_section(job, section, f"set the fields of {type_} by hand: {why}")
        else:
            job.lose("model.converters", f"no installed plugin provides the converter {name!r}")
    for section in {*CONVERTERS.values()} - used:
        _lose_section(job, section, "no effect: model.converters does not name it")


def _float8(job: Job, registry: Registry) -> None:
    config = _installed(registry, "converter", "float8_linear")
    if config is None:
        install = install_command("titan-float8")
        job.lose(
            "model.converters", f"no installed plugin provides float8_linear: {install}, and convert again"
        )
        _lose_section(job, FLOAT8, "float8_linear is not installed")
        return
    table: dict[str, Any] = {
        "type": "float8_linear",
        "recipe": job.value(f"{FLOAT8}.recipe_name") or "tensorwise",
    }
    gather, scale = (
        f"{FLOAT8}.enable_fsdp_float8_all_gather",
        f"{FLOAT8}.precompute_float8_dynamic_scale_for_fsdp",
    )
    if job.value(gather):
        if table["recipe"] == "tensorwise":
            table["enable_fsdp_float8_all_gather"] = True
        else:
            job.lose(gather, f"a float8 all-gather needs one scale per tensor, not {table['recipe']}")
    if job.value(scale):
        if "enable_fsdp_float8_all_gather" in table:
            table["precompute_float8_dynamic_scale_for_fsdp"] = True
        else:
            job.lose(scale, "no effect without enable_fsdp_float8_all_gather")
    skip = _names(job.value(f"{FLOAT8}.filter_fqns"))
    if AUTO_FILTER in skip:
        skip.remove(AUTO_FILTER)
        job.lose(f"{FLOAT8}.filter_fqns", f"{AUTO_FILTER} is not supported: list the small layers in skip")
    if skip:
        # torchtitan skips every name that contains the text.
        table["skip"] = [name if name.rpartition(".")[2] in SUBMODULES else f"*{name}*" for name in skip]
    if job.value(f"{FLOAT8}.emulate"):
        table["emulate"] = True
    _append(job, registry, table)
    for name in ("recipe_name", "filter_fqns", "emulate"):
        job.take(f"{FLOAT8}.{name}")
    job.take(gather, scale)


def _append(job: Job, registry: Registry, table: dict[str, Any]) -> None:
    """Add a converter, and require the distribution that provides it."""
    job.recipe.setdefault("converters", []).append(table)
    _require(job, registry, "converter", table["type"])


def _require(job: Job, registry: Registry, kind: str, name: str) -> None:
    """Require the distribution that provides a component."""
    plugin = registry.full_name(registry.find(kind, name)).partition("/")[0]
    needed = next((p.distribution for p in registry.plugins if p.name == plugin), None)
    if needed and needed != "titancli":
        requires = job.recipe.setdefault("requires", {}).setdefault("plugins", [])
        requires += [needed] if needed not in requires else []


def _lose_section(job: Job, section: str, why: str) -> None:
    for name, entry in job.entries.items():
        if name.startswith(f"{section}."):
            if entry.value == entry.field.default:
                job.ignore(name)
            else:
                job.lose(name, why)


def _names(value: Any) -> list[str]:
    """Return a list, or split the comma-separated text that torchtitan also accepts."""
    return (
        [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else list(value)
    )


def _installed(registry: Registry, kind: str, name: str) -> Any:
    try:
        return registry.find(kind, name)
    except PluginError:
        return None


PARTS: list[Callable[[Job, Any], None]] = [
    model,
    tokenizer,
    dataset,
    validation,
    converters,
    optimizer,
    schedule,
    experts,
    dispatch,
    batch,
    weights,
    checkpoint,
    activation_checkpoint,
    compile_components,
    parallel,
    loggers,
]
