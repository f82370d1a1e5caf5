"""The core sections of a recipe. Field names are torchtitan 0.2.2's where it had the field.

A section or a field stands here only if it does something.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le

from titancli.errors import RecipeError
from titancli.layout.degrees import Degrees, Mesh
from titancli.layout.stages import Pipeline
from titancli.registry.component import section
from titancli.registry.fields import Component, Effect, Required, Slot, fields_of
from titancli.registry.kinds import KINDS

BFLOAT16: Literal["bfloat16"] = str(b"bfloat16", "ascii")  # type: ignore[assignment]
"""The default computation dtype of recipes, which scripts on a CPU do not use. It is an object of its own,
so that `is` distinguishes the default from the same text in a recipe."""


@section
class Requires:
    """Versions that this recipe requires."""

    effect: ClassVar = "running"
    titan: str | None = None
    """Version specifier for titan itself, e.g. `">=0.1"`."""
    plugins: list[str] = field(default_factory=list)
    """Requirements on plugin distributions, e.g. `"titan-float8>=0.1"`."""


@section
class DataLoader:
    """How batches are prepared ahead of their use. None of this changes which rows a run sees."""

    effect: ClassVar = "running"
    num_workers: Annotated[int, Ge(0)] = 0
    """Processes on each data-parallel rank that prepare batches; 0: a thread of the rank does. Each prepares
    every num_workers-th batch, so the dataset must be one that can skip rows without preparing them."""
    prefetch_factor: Annotated[int, Gt(0)] = 2
    """Batches that the thread, or each process, prepares in advance. On CUDA, they are pinned."""


@section
class Training:
    """Length of the run, batch sizes, gradient clipping and precision."""

    effect: ClassVar = "numbers"
    steps: Annotated[int, Gt(0), Required(unless="epochs")] = 0
    """Total number of optimizer steps, including those before a resume; in a script there need be none."""
    epochs: Annotated[float, Gt(0), Le(10_000)] | None = None
    """Passes over the dataset, in place of `steps`: every row is used exactly that often, so the last step
    may be smaller. The rows are counted before the first step. A fraction is rounded up to whole steps."""
    seq_len: Annotated[int, Gt(0)] = 2048
    """Sequence length, in tokens."""
    local_batch_size: Annotated[int, Gt(0), Effect("speed")] = 8
    """Sequences per micro-batch on each data-parallel rank."""
    global_batch_size: Annotated[int, Gt(0)] | None = None
    """Sequences per optimizer step over all ranks; None: one micro-batch per rank. The number of gradient
    accumulation steps follows from it."""
    accumulate: Literal["sharded", "unsharded"] = "sharded"
    """Reduce gradients after every micro-batch (least memory) or only after the last one (least traffic)."""
    max_norm: Annotated[float, Ge(0)] = 1.0
    """Maximum gradient norm for clipping; 0 disables clipping."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which parameters, gradients and optimizer state are stored."""
    mixed_precision_param: Literal["float32", "bfloat16"] = BFLOAT16
    """Dtype of parameters and activations in forward and backward; in float32, experts wait for the GPU."""
    mixed_precision_reduce: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the gradient reduction over ranks."""
    gc_freq: Annotated[int, Gt(0), Effect("running")] = 50
    """Steps between two runs of Python's garbage collector, which is off in between."""
    seed: Annotated[int, Ge(0), Le(2**63 - 1)] = 0
    """Random seed for initialization, data order and all other random numbers."""
    dataloader: DataLoader = field(default_factory=DataLoader)


@section
class ActivationCheckpoint:
    """Activation checkpointing: recompute activations in backward instead of storing them."""

    effect: ClassVar = "speed"
    mode: Literal["none", "full", "selective", "memory_budget"] = "selective"
    """`"memory_budget"` leaves the choice to the compiler and needs compile.enable."""
    selective_ac_option: str = "op"
    """`"products"`: store the results of attention and all matrix products, and recompute elementwise work;
    `"op"`: of attention and every second product; `"2"`: recompute every second layer."""
    memory_budget: Annotated[float, Ge(0), Le(1)] = 0.5
    """With mode `"memory_budget"`, the fraction of its activations that a block may store: 0 stores as little
    as `"full"`, 1 is fastest."""


@section
class Compile:
    """torch.compile, block by block."""

    effect: ClassVar = "speed"
    enable: bool = False
    """Compile each block of the model."""
    components: list[Literal["model", "loss"]] | None = None
    """`"model"`: each block; `"loss"`: the loss on one chunk of logits, which makes it slower on a CPU (in
    fp32 by 10 to 30 %); None: the model, and on a GPU the loss too."""
    backend: str = "inductor"
    """Backend of torch.compile."""
    cuda_graphs: Literal["none", "blocks", "step"] = "none"
    """Replay CUDA graphs in place of launching kernels one by one, compiled or not, with the same numbers;
    for one GPU. `"blocks"`: forward and backward of each block; `"step"`: of whole micro-batches."""

    @property
    def model(self) -> bool:
        """Return whether the blocks are compiled."""
        return self.enable and (self.components is None or "model" in self.components)

    def loss(self, *, on_gpu: bool) -> bool:
        """Return whether the loss is compiled."""
        return self.enable and (on_gpu if self.components is None else "loss" in self.components)


@section
class Checkpoint:
    """Checkpoints of a run, saved in its folder `checkpoints/`."""

    effect: ClassVar = "running"
    enable: bool = True
    """Save checkpoints."""
    interval: Annotated[int, Gt(0)] = 500
    """Steps between checkpoints; the last step is always saved."""
    keep_latest_k: Annotated[int, Ge(0)] = 10
    """Number of this run's checkpoints to keep; 0 keeps all."""
    remote: str | None = None
    """Folder in a store, such as `"s3://bucket/prefix"`. Each checkpoint is uploaded to REMOTE/RUN
    while training continues, and downloaded from there on a machine that does not have the run."""
    store: Annotated[Component, Slot("store")] | None = None
    """The store of `remote`, and of `weights` under a URL with the same scheme. None: the one named like the
    scheme, or fsspec."""
    remote_timeout_seconds: Annotated[int, Gt(0)] = 1800
    """Seconds without progress after which a request to the store counts as failed. Not every kind of store
    reports progress within a file: then it is the limit for the transfer of one file."""
    remote_exit_seconds: Annotated[int, Ge(0)] = 60
    """Seconds that a run which has got a signal waits for its uploads; the next start of the run uploads the
    rest."""
    remote_read_back: bool = False
    """Read each object back after its upload and compare the bytes. The checksums that S3 and Google Cloud
    Storage have of their objects are compared in any case."""
    copies: Annotated[Component, Slot("copies")] | None = None
    """Where the state is copied between checkpoints, as in `[checkpoint.copies] type = "peers"`."""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """Whether training continues while a checkpoint is written, and whether it is staged in pinned memory."""
    verify: Literal["full", "size", "off"] = "full"
    """What is verified before a checkpoint is loaded: every checksum, file sizes only, or nothing."""
    on_error: Literal["continue", "stop"] = "continue"
    """Whether the run continues if a checkpoint cannot be written; a failure of the last one is always an
    error."""
    enable_first_step_checkpoint: bool = False
    """Also save after the first step, so that storage problems show up early."""
    create_seed_checkpoint: bool = False
    """Save the initial state as step-0 and exit without training."""
    initial_load_model_only: Annotated[bool, Effect("numbers")] = True
    """If false, a new run loads the full training state of the checkpoint in `weights`, not only the
    model."""
    exclude_from_loading: Annotated[list[str], Effect("numbers")] = field(default_factory=list)
    """Parts of a checkpoint not to load: `"optimizer"`, `"data"`, `"step"`, `"guard"`, `"callbacks"`, or
    tensors, as in `"model.output.*"`. Applies only once: a checkpoint that was saved under the same list is
    loaded in full."""
    model_differs: list[str] = field(default_factory=list)
    """Keys of [model], such as `"rope_theta"`, that may differ from the model that `weights` come from. Any
    other difference that affects the model's output is an error."""
    last_save_model_only: bool = False
    """Also save the weights alone at the end, in RUN/exports/step-N."""
    last_save_in_hf: bool = False
    """Also export a Hugging Face folder at the end, to RUN/exports/step-N-hf."""
    export_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of these two exports."""


@section
class Stability:
    """Skip bad steps."""

    effect: ClassVar = "numbers"
    skip_nonfinite: bool = True
    """Skip a step whose loss or gradient norm is NaN or infinite. (A step whose loss has no weight, as where
    no token is a target, is always skipped.)"""
    sigma: Annotated[float, Ge(0)] = 6.0
    """Skip a step whose loss or gradient norm is this many standard deviations above the mean of the last
    `window` applied steps; the standard deviation counts as at least a tenth of the mean. Five consecutive
    such steps that agree are accepted as a new level: this is reported, and steps are applied again. 0
    disables the check."""
    window: Annotated[int, Ge(2)] = 128
    """Steps in the running statistics. No step counts as a spike until this many steps have been applied, at
    the start or at a new level."""
    max_skips: Annotated[int, Gt(0)] = 10
    """End the run after this many consecutive skipped steps, with a checkpoint of the weights before them; in
    a script, `optim_step` raises an error."""


@section
class Validation:
    """Evaluation on held-out data: loss and perplexity of each dataset, in every loop."""

    effect: ClassVar = "watching"
    datasets: dict[str, Annotated[Component, Slot("dataset")]] = field(default_factory=dict)
    """Datasets by name, as in `[validation.datasets.books]`: any of them, with `repeat = false` by default.
    Metrics are called `validation/NAME/loss`; without a dataset, nothing is evaluated."""
    freq: Annotated[int, Gt(0)] = 100
    """Steps between two evaluations; there is always one after the last step."""
    steps: Annotated[int, Gt(0)] | None = None
    """Batches per evaluation of each dataset on each data-parallel rank, from its start; None: all."""
    local_batch_size: Annotated[int, Gt(0)] | None = None
    """Sequences per batch on each data-parallel rank; None: training.local_batch_size."""
    at_start: bool = True
    """Also evaluate before the first step."""


@section
class Metrics:
    """Logging of metrics."""

    effect: ClassVar = "watching"
    log_freq: Annotated[int, Gt(0)] = 10
    """Steps between two log entries."""


@section
class Profiling:
    """Traces of torch's profiler, and memory snapshots, on a schedule. `titan profile RUN` records traces of
    a run under way without it."""

    effect: ClassVar = "watching"
    enable_profiling: bool = False
    """Record traces."""
    save_traces_folder: Annotated[str, "folder"] = "profile_traces"
    """Folder of traces in the run folder: step-N/rank-M.json.gz."""
    profile_freq: Annotated[int, Gt(0)] = 10
    """Steps between two traces; each ends at a multiple of it. The same for memory snapshots."""
    profiler_active: Annotated[int, Gt(0), Le(20)] = 1
    """Steps in a trace."""
    profiler_warmup: Annotated[int, Ge(0)] = 3
    """Steps before a trace in which the profiler runs, but does not record."""
    enable_memory_snapshot: bool = False
    """Take snapshots of the CUDA allocator, also when memory runs out."""
    save_memory_snapshot_folder: Annotated[str, "folder"] = "memory_snapshot"
    """Folder of memory snapshots in the run folder: step-N/rank-M.pickle."""
    ranks: list[Annotated[int, Ge(0)]] = field(default_factory=list)
    """Ranks that record; empty: all."""


@section
class Comm:
    """Timeouts of collectives, and the flight recorder."""

    effect: ClassVar = "running"
    init_timeout_seconds: Annotated[int, Gt(0)] = 300
    """Timeout until the first step has completed."""
    train_timeout_seconds: Annotated[int, Gt(0)] = 100
    """Timeout after the first step."""
    trace_buf_size: Annotated[int, Ge(0)] = 20000
    """Number of collectives that the flight recorder keeps; 0 turns it off."""


@section
class Debug:
    """Settings for reproducible runs and for measurements."""

    effect: ClassVar = "numbers"
    digests: Annotated[bool, Effect("watching")] = True
    """Keep a digest of each step in the run folder: loss, gradient norm, hashes of rows, gradients and
    weights."""
    uncommitted_patch: Annotated[bool, Effect("watching")] = True
    """Keep the uncommitted changes of the git repository around the current folder in the run folder."""
    deterministic: bool = False
    """Use deterministic algorithms only; required for bitwise identical resumption on a GPU."""
    moe_force_load_balance: bool = False
    """Assign tokens to experts round-robin instead of by the router, to measure speed under an even load."""


@section
class Recipe:
    """A complete run, as data."""

    recipe: Annotated[Literal[1], Effect("running")] = 1
    """Format version."""
    name: Annotated[str, "name", Effect("watching")] = "run"
    """Prefix of the run folder's name."""
    description: Annotated[str, Effect("watching")] = ""
    weights: Annotated[Path | None, Effect("numbers")] = None
    """Initial weights: a Hugging Face folder, a titan checkpoint, a checkpoint's URL, or a repository of the
    Hugging Face Hub (`"hf://OWNER/NAME"`). Without a [model] section, the model is read from the Hugging Face
    folder."""
    weights_vocab: Annotated[Literal["same", "grow"], Effect("numbers")] = "same"
    """`"grow"`: the model may have a larger vocabulary than the Hugging Face folder in `weights`, for a
    tokenizer with added tokens. New rows of the embedding and the output layer begin as the mean of the
    folder's. If `model.vocab_size` is not set, the model that is read from the folder gets a row for each id
    of the tokenizer in `tokenizer.path`."""
    assets: Annotated[str | None, Effect("running")] = None
    """Hugging Face repository (`"owner/name"`) of the tokenizer and of initial weights, which
    `titan download RECIPE` downloads to `tokenizer.path`."""
    requires: Requires = field(default_factory=Requires)
    env: Annotated[dict[str, str], Effect("numbers")] = field(default_factory=dict)
    """Environment variables of the workers, e.g. `NCCL_DEBUG = "INFO"`. Names that look like secrets are
    rejected, because the lock file stores the values."""
    model: Annotated[Component, Slot("model")]
    tokenizer: Annotated[Component, Slot("tokenizer")] | None = None
    """Required, and used, only if the dataset builds its batches from text."""
    dataset: Annotated[Component, Slot("dataset")] | None = None
    """Required, and used, only if the loop has no task that provides prompts."""
    converters: list[Annotated[Component, Slot("converter")]] = field(default_factory=list)
    mesh: Mesh = field(default_factory=Mesh)
    pipeline: Pipeline = field(default_factory=Pipeline)
    parallelize: Annotated[Component, Slot("parallelize")]
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile = field(default_factory=Compile)
    optimizer: Annotated[Component, Slot("optimizer")]
    lr_scheduler: Annotated[Component, Slot("schedule")]
    loss: Annotated[Component, Slot("loss")]
    training: Training
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    stability: Stability = field(default_factory=Stability)
    validation: Validation = field(default_factory=Validation)
    metrics: Metrics = field(default_factory=Metrics)
    profiling: Profiling = field(default_factory=Profiling)
    comm: Comm = field(default_factory=Comm)
    debug: Debug = field(default_factory=Debug)
    loggers: list[Annotated[Component, Slot("logger")]] = field(default_factory=list)
    callbacks: list[Annotated[Component, Slot("callback")]] = field(default_factory=list)
    loop: Annotated[Component, Slot("loop")]
    launcher: Annotated[Component, Slot("launcher")]

    def degrees(self, world: int) -> Degrees:
        return self.mesh.resolve(world)

    @property
    def schedule_steps(self) -> int:
        """The length of the learning rate schedule; 0: it is known once the rows of an epoch are counted."""
        return self.lr_scheduler.total_steps or self.training.steps

    def accumulation(self, degrees: Degrees) -> int:
        """Return the number of micro-batches per optimizer step.

        Raises:
            RecipeError: the global batch is not a multiple of local_batch_size times the dp degree.
        """
        micro = self.training.local_batch_size * degrees.dp
        total = self.training.global_batch_size or micro
        if total % micro:
            raise RecipeError(
                f"training.global_batch_size = {total} is not a multiple of local_batch_size "
                f"({self.training.local_batch_size}) x data-parallel ranks ({degrees.dp}) = {micro}",
                hint=f"use {max(micro, round(total / micro) * micro)}, or another local_batch_size",
            )
        return total // micro


@functools.cache
def recipe_slots() -> dict[str, Slot]:
    """Return the component slots of a recipe: single ones, and the arrays of them."""
    found = {}
    for name, known in fields_of(Recipe).items():
        element = known.type.element(0)
        if slot := known.type.slot or (element and element.slot):
            found[name] = slot
    return found


def effect_of(key: str, configs: Mapping[str, type] = MappingProxyType({})) -> str:
    """Return what another value of a recipe's dotted key changes: see `titancli.registry.fields.Effect`.

    Args:
        configs: the classes of components by section, where their own fields and sections count; without its
            class, all keys of a component count as its kind does.
    """
    section, *rest = key.split(".")
    slot = recipe_slots().get(section)
    config: type | None = configs.get(section) if slot else Recipe
    effect = getattr(config, "effect", None) or (KINDS[slot.kind].effect if slot else "numbers")
    for name in rest if slot else (section, *rest):
        known = fields_of(config).get(name) if config else None
        if known is None:
            break
        effect = known.type.effect or effect
        config = next(iter(known.type.tables), None)
    return effect


def sections_with(*effects: str) -> list[str]:
    """Return the sections of a recipe, and its keys outside of them, that have one of these effects."""
    return [name for name in fields_of(Recipe) if effect_of(name) in effects]


def default_type(section: str) -> str | None:
    """Return the full name of the component that a recipe gets that does not have this section, or no type in
    it; None: it gets none."""
    slot = recipe_slots().get(section)
    return KINDS[slot.kind].full_default if slot else None


def needs_tokenizer(dataset: Any) -> bool:
    """Return whether a dataset's config, or its class, wants a tokenizer: all do, unless they declare it, and
    so does one that is not known (None)."""
    return dataset is None or dataset.needs_tokenizer


def needs_dataset(loop: Any) -> bool:
    """Return whether a loop's config, or its class, wants a dataset: all that train without a `task` do, and
    so do one that says so and one that is not known (None)."""
    reads = loop is None or loop.trains or loop.reads_dataset
    return reads and "task" not in getattr(loop, "__dataclass_fields__", {})
