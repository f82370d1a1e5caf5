"""The core sections of a recipe. Field names are torchtitan 0.2.2's where it had the field.

A section or a field stands here only if it does something.
"""

from __future__ import annotations

from dataclasses import field
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from titancli.errors import RecipeError
from titancli.layout.degrees import Degrees, Mesh
from titancli.layout.stages import Pipeline
from titancli.registry.component import Component, Slot, section

BFLOAT16: Literal["bfloat16"] = str(b"bfloat16", "ascii")  # type: ignore[assignment]
"""What recipes compute in by default, and scripts on a CPU do not. An object of its own: `is` tells it from
the same text when somebody has written that."""


@section
class Requires:
    """What must be installed for this recipe."""

    titan: str | None = None
    """Version specifier for titan itself, e.g. `">=0.1"`."""
    plugins: list[str] = field(default_factory=list)
    """Requirements on plugin distributions, e.g. `"titan-float8>=0.1"`."""


@section
class Training:
    """How long, on how much at a time, in which precision."""

    steps: Annotated[int, Gt(0)]
    """Optimizer steps in all; a resumed run counts from its start."""
    seq_len: Annotated[int, Gt(0)] = 2048
    """Tokens in a row."""
    local_batch_size: Annotated[int, Gt(0)] = 8
    """Rows in one micro-batch of one data-parallel rank."""
    global_batch_size: Annotated[int, Gt(0)] | None = None
    """Rows in one optimizer step over all ranks; None: one micro-batch a rank. Accumulation is derived."""
    accumulate: Literal["sharded", "unsharded"] = "sharded"
    """Reduce gradients after each micro-batch (least memory), or after the last (least traffic)."""
    max_norm: Annotated[float, Ge(0)] = 1.0
    """Gradients are clipped to this total norm; 0 never clips."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What parameters, gradients and optimizer state are stored in."""
    mixed_precision_param: Literal["float32", "bfloat16"] = BFLOAT16
    """What parameters and activations are cast to for forward and backward."""
    mixed_precision_reduce: Literal["float32", "bfloat16"] = "float32"
    """What gradients are summed over ranks in."""
    gc_freq: Annotated[int, Gt(0)] = 50
    """Python's garbage is collected every so many steps, and never between."""
    seed: Annotated[int, Ge(0), Le(2**63 - 1)] = 0
    """Initial values, data order and every other random number follow from it."""


@section
class ActivationCheckpoint:
    """Which activations are recomputed in backward instead of kept."""

    mode: Literal["none", "full", "selective", "memory_budget"] = "selective"
    """`"memory_budget"`: the compiler chooses, so it needs compile.enable."""
    selective_ac_option: str = "op"
    """`"op"`: keep the results of matrix products and attention; `"2"`: recompute every second layer."""
    memory_budget: Annotated[float, Ge(0), Le(1)] = 0.5
    """Under that mode, how much of its activations a block may keep: 0 is as little as with `"full"`, 1 what
    is fastest."""


@section
class Compile:
    """torch.compile, block by block."""

    enable: bool = False
    components: list[Literal["model", "loss"]] = field(default_factory=lambda: ["model"])
    """`"model"`: each block; `"loss"`: what the loss does with a chunk of logits, which on a CPU is slower
    than without (fp32: by 10 to 30 %)."""
    backend: str = "inductor"


@section
class LRScheduler:
    """Warm-up, stable, decay: a factor on the optimizer's learning rate."""

    warmup_steps: Annotated[int, Ge(0)] = 200
    """Steps of linear warm-up; in a run that has fewer, all of them."""
    total_steps: Annotated[int, Gt(0)] | None = None
    """The length of the schedule; None: training.steps."""
    decay_ratio: Annotated[float, Ge(0), Le(1)] | None = None
    """The share of the steps that decay takes, after warm-up at the earliest; None: right after warm-up."""
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    min_lr_factor: Annotated[float, Ge(0), Le(1)] = 0.0
    """What is left of the learning rate at the end, as a share."""

    def phases(self, training_steps: int) -> tuple[int, int, int]:
        """How many steps the schedule has, and how many of them warm-up and decay take.

        Warm-up takes no more than there are, and decay what that leaves, as in torchtitan.
        """
        total = self.total_steps or training_steps
        warmup = min(self.warmup_steps, total)
        share = total if self.decay_ratio is None else round(total * self.decay_ratio)
        return total, warmup, min(share, total - warmup)


@section
class Checkpoint:
    """What is saved during a run, in its folder `checkpoints/`."""

    enable: bool = True
    interval: Annotated[int, Gt(0)] = 500
    """Steps between checkpoints; the last step is always saved."""
    keep_latest_k: Annotated[int, Ge(0)] = 10
    """How many of this run's checkpoints to keep; 0 keeps all."""
    remote: str | None = None
    """A folder in an object store, such as `"s3://bucket/prefix"`: each checkpoint is copied to REMOTE/RUN
    while training goes on, and taken from there on a machine that does not have the run."""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """Whether training goes on while a checkpoint is written, and whether its copy is in pinned memory."""
    verify: Literal["full", "size", "off"] = "full"
    """What is compared before a checkpoint is loaded: every checksum, the files' sizes, or nothing."""
    on_error: Literal["continue", "stop"] = "continue"
    """Whether a run goes on when a checkpoint cannot be written; the last one must be."""
    enable_first_step_checkpoint: bool = False
    """Save after the first step too: a disk that says no is known early."""
    create_seed_checkpoint: bool = False
    """Save what the run begins with as step-0, and do no step."""
    initial_load_model_only: bool = True
    """false: a new run takes over all of the state of the checkpoint that `weights` names."""
    exclude_from_loading: list[str] = field(default_factory=list)
    """What to leave out of a checkpoint: `"optimizer"`, `"data"`, `"step"`, `"guard"`, or tensors, as in
    `"model.output.*"`. Once: a checkpoint that was saved under the same list is loaded whole."""
    model_differs: list[str] = field(default_factory=list)
    """Keys of [model], such as `"rope_theta"`, that are meant to differ from those of the model that
    `weights` come from. Any other difference that changes what is computed is refused."""
    last_save_model_only: bool = False
    """At the end save the weights alone as well, in RUN/exports/step-N."""
    last_save_in_hf: bool = False
    """At the end write a Hugging Face folder as well, RUN/exports/step-N-hf."""
    export_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """What these two are stored in."""


@section
class Stability:
    """Which steps are skipped because their numbers went wrong: weights and optimizer stay as they were."""

    skip_nonfinite: bool = True
    """Skip a step whose loss or gradient norm is NaN or infinite."""
    sigma: Annotated[float, Ge(0)] = 6.0
    """Skip a step whose loss or gradient norm is so many standard deviations above the mean of the last
    `window` steps that were applied; one deviation is taken to be a tenth of the mean at least. Five such
    steps in a row that agree are a new level: it is reported, and steps are applied again. 0: never."""
    window: Annotated[int, Ge(2)] = 128
    """Nothing is a spike before so many steps were applied, at the beginning or at a new level."""
    max_skips: Annotated[int, Gt(0)] = 10
    """So many skipped steps in a row end the run, with a checkpoint of the weights before them; in a script
    `optim_step` raises an error."""


@section
class Metrics:
    """What is measured, how often."""

    log_freq: Annotated[int, Gt(0)] = 10
    """Steps between two readings of the metrics."""


@section
class Comm:
    """Time limits of collectives, and their flight recorder."""

    init_timeout_seconds: Annotated[int, Gt(0)] = 300
    """Until the first step is done."""
    train_timeout_seconds: Annotated[int, Gt(0)] = 100
    """From then on."""
    trace_buf_size: Annotated[int, Ge(0)] = 20000
    """Collectives that the flight recorder remembers; 0 turns it off."""


@section
class Debug:
    deterministic: bool = False
    """Deterministic algorithms only; bitwise resume on a GPU needs it."""
    moe_force_load_balance: bool = False
    """Experts are dealt out to tokens in turn instead of chosen: for measuring speed with an even load."""


@section
class Recipe:
    """A whole run, as data."""

    recipe: Literal[1] = 1
    """Format version."""
    name: Annotated[str, "name"] = "run"
    """The run folder begins with it."""
    description: str = ""
    weights: Path | None = None
    """A Hugging Face folder, or a titan checkpoint, to take the first weights from; or a checkpoint's URL.
    Without a [model], a Hugging Face folder's is taken."""
    requires: Requires = field(default_factory=Requires)
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of the workers, e.g. `NCCL_DEBUG = "INFO"`. Names that look like secrets are
    refused, since the lock file keeps them."""
    model: Annotated[Component, Slot("model")]
    tokenizer: Annotated[Component, Slot("tokenizer")] | None = None
    """Needed, and taken, only where the dataset makes its batches of text."""
    dataset: Annotated[Component, Slot("dataset")] | None = None
    """Needed, and taken, only where the loop has no task of its own that makes prompts."""
    converters: list[Annotated[Component, Slot("converter")]] = field(default_factory=list)
    mesh: Mesh = field(default_factory=Mesh)
    pipeline: Pipeline = field(default_factory=Pipeline)
    parallelize: Annotated[Component, Slot("parallelize")]
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile = field(default_factory=Compile)
    optimizer: Annotated[Component, Slot("optimizer")]
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    loss: Annotated[Component, Slot("loss")]
    training: Training
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    stability: Stability = field(default_factory=Stability)
    metrics: Metrics = field(default_factory=Metrics)
    comm: Comm = field(default_factory=Comm)
    debug: Debug = field(default_factory=Debug)
    loggers: list[Annotated[Component, Slot("logger")]] = field(default_factory=list)
    loop: Annotated[Component, Slot("loop")]
    launcher: Annotated[Component, Slot("launcher")]

    def degrees(self, world: int) -> Degrees:
        return self.mesh.resolve(world)

    def accumulation(self, degrees: Degrees) -> int:
        """Micro-batches in one optimizer step.

        Raises:
            RecipeError: the global batch is not a multiple of local_batch_size times the dp degree.
        """
        micro = self.training.local_batch_size * degrees.dp
        total = self.training.global_batch_size or micro
        if total % micro:
            raise RecipeError(
                f"training.global_batch_size = {total} is not a multiple of local_batch_size "
                f"({self.training.local_batch_size}) x data-parallel ranks ({degrees.dp}) = {micro}",
                hint=f"take {max(micro, round(total / micro) * micro)}, or another local_batch_size",
            )
        return total // micro
