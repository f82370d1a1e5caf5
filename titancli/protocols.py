"""Define what the builder of each kind is called with, and what it must return.

Every builder is called as `build(config, **runtime)`, where `runtime` are the keyword arguments of the
kind's Protocol; it gets nothing else from the recipe. Required members are in the Protocols; optional
members are declared in classes of defaults, which `titancli.registry.defaults.with_defaults` reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, cast

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor, nn

    from titancli.data.batch import Batch
    from titancli.distributed.local import RowCut
    from titancli.distributed.mesh import Mesh
    from titancli.layout.degrees import Degrees
    from titancli.losses.result import LossResult
    from titancli.models.shape import Decoder
    from titancli.recipe.schema import ActivationCheckpoint, Compile
    from titancli.rl.samples import Completion, Prompt


# ---------------------------------------------------------------------------------------------- model


class Model(Protocol):
    """An `nn.Module` that declares how it can be split; the `decoder` plan applies it.

    `forward(**inputs)` returns the raw output; with `batch=` and `loss=` it returns what `output(hidden,
    batch, loss)` returns, a LossResult, computed inside the output module.

    With pipeline parallelism a rank has stages of the model: copies in which the children of other stages
    are None and `layers` holds the blocks of the stage. Forward must skip children that are None. A stage
    other than the first gets the hidden states of the previous stage, [B, S, dim] (`dim` of the config), in
    place of the first of `inputs`, and always `positions`; a stage other than the last gets no loss and
    returns its hidden states. All parameters must be in children, none in the model itself.

    With context parallelism a plan replaces the method `core_attention(q, k, v, mask, causal=True)` of each
    attention by one that calls the original method with whole keys and values, or with whole rows of some
    heads; it also sets `row_cut` on the model and on its output.

    Optional members of a model are in `ModelDefaults`, those of its modules in `ModuleDefaults`.
    """

    inputs: tuple[str, ...]
    """The tensors of a batch that forward takes, e.g. `("tokens", "positions", "document_ids")`."""
    sequence_dim: Mapping[str, int]
    """The dimension along the sequence, for each input that context parallelism may shard: every rank
    then computes its own part of a row. Must contain `positions`, because a part does not start at 0, but
    not `document_ids`: the mask is built from those of the whole row, since attention sees the keys of
    every part."""
    layers: nn.ModuleDict
    """The blocks, keyed by absolute index: `"0"`, `"1"`, …"""
    output: nn.Module
    tensor_plan: Mapping[str, Literal["column", "row", "vocab", "norm", "replicate", "expert"]]
    """Maps patterns of parameter names (fnmatch) to how they are sharded under tensor parallelism;
    "expert" means sharded over mesh.ep instead."""
    experts: Mapping[str, nn.Module]
    """The `titancli.models.blocks.moe.Experts` in this part of the model, by name; empty for a dense
    model. Expert parallelism distributes them over ranks, and each is a separate FSDP2 group."""

    def init_weights(self, generator_for: Callable[[str], torch.Generator]) -> None:
        """Initialize every parameter in place, each from `generator_for(name)`; values are drawn for the
        whole parameter and then sharded."""

    def flops_per_token(self, seq_len: int) -> float:
        """Return the floating-point operations of forward and backward for one token of a row of seq_len."""
        ...


class ModelDefaults:
    """Optional members of a model, with their defaults."""

    token_inputs: tuple[str, ...] = ("tokens",)
    """The inputs that make up a row, one after the other, each along its `sequence_dim`: their lengths
    are counted as tokens."""
    parameter_device: torch.device | None = None
    """Set by a parallelize plan whose parameters are on another device than the computation; None: the
    same device."""
    row_cut: RowCut | None = None
    """Set by a parallelize plan: how rows are sharded over the ranks of mesh.cp."""
    config: Any = None
    """The config that the model was built from."""
    new_cache: Callable[..., Cache] | None = None
    """For a model that can generate: `new_cache(length, padding=None)`, for rows of at most `length`
    tokens, where the first `padding` ([B] int64) tokens of each row do not count. `forward(tokens,
    cache=cache)` appends tokens to the cache and returns the logits of the last one, [B, 1, V]."""

    def token_counts(self) -> dict[str, Tensor]:
        """Return how many tokens each expert has trained on here since the last step, by layer; for a
        model with state that depends on these counts and not on gradients. It keeps that state in
        persistent buffers."""
        return {}

    def forget_token_counts(self) -> None:
        """Reset the token counts."""

    def after_step(self, counts: dict[str, Tensor]) -> None:
        """Update the state after each optimizer step, with the counts summed over all ranks that had
        different tokens."""


class ModuleDefaults:
    """Optional members of the modules of a model, with their defaults."""

    core_attention: Callable[..., Tensor] | None = None
    """For an attention: `core_attention(q, k, v, mask, causal=True)`, which context parallelism replaces."""
    reach: Any = None
    """For an attention: how far back a token sees, a `titancli.models.blocks.reach.Reach`; None: to the
    start of the row."""
    is_plain_softmax: bool = False
    """For an attention: whether `core_attention` is plain softmax attention, which a ring can compute."""
    loss_backend: str | None = None
    """For an output: set by a parallelize plan, the backend that compiles its loss; None: the loss is
    eager."""
    takes_local_parameters: bool = False
    """Whether `forward` itself computes with this rank's shards of the parameters."""
    tensor_parallel: Callable[..., None] | None = None
    """`tensor_parallel(group, style)`: makes `forward` compute with this rank's shards of the parameters,
    where `weight` is sharded in `style`."""

    def parts(self) -> list[tuple[nn.Module, str]]:
        """Return the methods of a block, by module and name, that can each be compiled as a whole."""
        return [(cast("nn.Module", self), "forward")]

    def tensor_plan(self, style: str | None) -> Mapping[str, str]:
        """Return how parameters added by a converter are sharded if the weight of the module is sharded
        in `style`."""
        return {}


class Cache(Protocol):
    """The state that a model keeps of previous tokens, for rows that grow together."""

    def select(self, rows: Tensor) -> None:
        """Keep these rows ([N] int64), in this order; a row may occur more than once."""


class ModelConfig(Protocol):
    """What `titan plan` needs from a model's config, without torch. Optional: a model without it is not
    estimated.

    Other optional members of such a config are in `titancli.registry.defaults`.
    """

    def shape(self) -> Decoder:
        """Return the sizes: every parameter of the module by name and shape, with its style in
        `tensor_plan`."""
        ...


class ModelBuilder(Protocol):
    def __call__(self, config: Any, *, seq_len: int) -> Model:
        """Build the module on the current device (usually meta), without initial values."""
        ...


class HFForm(Protocol):
    """The Hugging Face form of a model: what `hf=` of `@component` returns for a config.

    Transforms work on one tensor at a time, so that memory use is limited by the largest tensor. Optional
    members are in `HFFormDefaults`.
    """

    def to_hf(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """Return the Hugging Face tensors for a titan parameter (plain name, whole tensor)."""
        ...

    def sources(self, name: str) -> list[str]:
        """Return the Hugging Face names that a titan parameter is built from, in the order in which
        `from_hf` takes them; empty if a Hugging Face folder has no such tensor and `from_hf` defines its
        initial value."""
        ...

    def from_hf(self, name: str, tensors: list[Tensor]) -> Tensor:
        """Build a titan parameter from the tensors named by `sources`."""
        ...

    def ignored(self, hf_name: str) -> bool:
        """Return whether a Hugging Face tensor can be ignored (a tied copy, an inv_freq buffer)."""
        ...

    def config_json(self) -> dict[str, Any]:
        """Return the `config.json` for transformers, without `dtype`, `bos_token_id`, `eos_token_id`."""
        ...


class HFFormDefaults:
    """Optional members of a Hugging Face form, with their defaults."""

    library: ClassVar[str] = "transformers"
    """"diffusers" for a folder that is not transformers': other names of files, and a class in place of
    `model_type`."""
    loses_biases: bool = False
    """Whether its folders cannot hold the biases that balance experts."""

    def copy_of(self, hf_name: str) -> str | None:
        """Return the Hugging Face tensor that an ignored one must be equal to."""
        return None

    def known_as(self, hf_name: str) -> str:
        """Return the form's own name for a tensor that has another name in some folders."""
        return hf_name


class HFBuilder(Protocol):
    """The `hf=` target: a class whose instances are HFForms."""

    model_type: str
    """`model_type` in the `config.json` that this form reads and writes (`_class_name`, where the library is
    diffusers). Of a class that reads several (`HFBuilderDefaults`) each instance has the one that it
    writes."""

    def __call__(self, config: Any) -> HFForm: ...

    def from_config_json(self, config_json: dict[str, Any]) -> dict[str, Any]:
        """Return the keys of `[model]` (without `type`) for a Hugging Face `config.json`; a static
        method.

        Raises:
            TitanError: the config requires something that the model does not support.
        """
        ...


class HFBuilderDefaults:
    """Optional members of a class of Hugging Face forms, with their defaults."""

    model_type: str | None = None
    """None for a class that has `model_types`, or that reads any type."""
    model_types: tuple[str, ...] | None = None
    """All types that it reads; empty: any type, but only if the model is selected explicitly; None: only
    `model_type`."""


# ----------------------------------------------------------------------------------------------- data


class Tokenizer(Protocol):
    """Converts text to ids and back.

    Optional members are in `TokenizerDefaults`. A conversation that a chat template rejects raises
    `titancli.data.chat_template.ChatRefused`.
    """

    vocab_size: int
    """Ids are below this."""
    eos_id: int
    """The id that ends a document."""
    files: Mapping[str, str | Path]
    """Files to copy into an export: name to source path; may be empty."""

    def encode(self, text: str) -> list[int]:
        """Return ids, without added special tokens."""
        ...

    def encode_batch(self, texts: list[str]) -> list[list[int]]: ...

    def decode(self, ids: list[int]) -> str: ...

    def chat(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = False) -> list[int]:
        """Return the ids of a conversation, using the tokenizer's own chat template; raises a TitanError
        if it has none.

        Args:
            add_generation_prompt: whether to append the prompt for an answer of the assistant.
        """
        ...


class TokenizerDefaults:
    """Optional members of a tokenizer, with their defaults."""

    bos_id: int | None = None
    adds_bos: bool = False
    """Whether a text to continue starts with BOS."""
    fingerprint: str | None = None
    """A text that changes when the ids change; None: derived from its class, vocabulary size, end marker
    and files."""
    chat_fingerprint: str | None = None
    """The same for the ids of `chat`."""
    chat_with_mask: Callable[..., tuple[list[int], list[bool]]] | None = None
    """Needed to train on assistant messages: `chat_with_mask(messages, *, first=0) -> (ids, mask)`, the
    ids of `chat`, and which of them belong to assistant turns among `messages[first:]`, including the end
    marker. With an additional argument `trailing_newline: bool = False` it can include the line break
    that the template adds after the marker."""

    def encode_arrays(self, texts: list[str]) -> list[np.ndarray] | None:
        """Return the result of `encode_batch` as arrays; None: only `encode_batch` is available."""
        return None


class TokenizerBuilder(Protocol):
    def __call__(self, config: Any) -> Tokenizer: ...


class Dataset(Protocol):
    """A finite or infinite stream of this rank's batches, on the CPU, all of the same shape."""

    def __iter__(self) -> Iterator[Batch]: ...

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that was returned: plain JSON, independent of dp_rank
        and dp_size."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position, whatever the dp_size when it was saved.

        Raises:
            TitanError: the data is not the data that the state was saved on.
        """


class DatasetBuilder(Protocol):
    def __call__(
        self,
        config: Any,
        *,
        tokenizer: Tokenizer | None,
        seq_len: int,
        rows: int,
        dp_rank: int,
        dp_size: int,
        seed: int,
    ) -> Dataset:
        """Build the dataset; `tokenizer` is None only for a config with `needs_tokenizer = False`, whose
        recipes have no [tokenizer]; see `titancli.registry.defaults`."""
        ...


# ------------------------------------------------------------------------------------- model surgery


class Converter(Protocol):
    """Changes a model, on one device, before it is sharded.

    A converter that adds its own parameters (adapters) also has the members of `ConverterDefaults`. A module
    that gets parameters declares how they are sharded: `ModuleDefaults.tensor_plan`.
    """

    def convert(self, model: Model) -> None:
        """Change the model in place, on meta, before it is sharded. Parameter names must not change."""

    def after_step(self, model: Model) -> None:
        """Update derived values whenever the weights have changed: after each optimizer step, and after a
        load."""

    def plain(self, name: str, tensor: Tensor) -> Tensor:
        """Return a parameter without the converter's own tensor class, in the same memory: checkpoints
        are loaded into it as well as saved from it. `tensor` is a DTensor if the parameter is sharded."""
        ...


class ConverterDefaults:
    """Members of a converter that adds its own parameters; None for any other converter."""

    owns: Callable[[str], bool] | None = None
    """Whether a parameter with this name was added: only these are saved, all others belong to the base."""
    facts: Mapping[str, Any] | None = None
    """Plain data about them that is stored in checkpoints."""
    initialise: Callable[..., None] | None = None
    """`initialise(model, generator_for)` initializes them."""
    merged: Callable[..., Iterator[tuple[str, Tensor]]] | None = None
    """`merged(named_tensors)`: yields the plain model's tensors, with the added parameters merged in."""
    disabled: Callable[..., Any] | None = None
    """`disabled(parts)`: a context in which the model computes as its base."""


class ConverterBuilder(Protocol):
    def __call__(self, config: Any, *, mesh: Degrees, compile: bool) -> Converter: ...


class Precision(Protocol):
    """The dtypes of parameters, computation and reduction."""

    param: torch.dtype
    reduce: torch.dtype


class ParallelizeBuilder(Protocol):
    def __call__(
        self,
        config: Any,
        *,
        mesh: Mesh,
        device: torch.device,
        precision: Precision,
        activation_checkpoint: ActivationCheckpoint,
        compile: Compile,
    ) -> Callable[[Model], Model]: ...


# ----------------------------------------------------------------------------------------- optimising


class Loss(Protocol):
    """Computes a sum and the weight to divide it by; see `titancli.losses.result`.

    Optional members are in `LossDefaults`.
    """

    output: Literal["logprobs", "model"]
    """The first argument of the loss: log p(targets) [B, S] fp32, or the model's raw output (logits)."""

    def __call__(self, out: Tensor, batch: Batch) -> LossResult: ...


class LossDefaults:
    """Optional members of a loss, with their defaults."""

    needs: Sequence[str] | Mapping[str, Literal["B", "BS"]] = ()
    """What the batch must contain in addition to the model's inputs and targets; as a mapping, with its
    shape: one number for each row or for each token. Checked before anything is computed."""
    entropy: bool = False
    """Whether it needs `batch["entropy"]`: [B, S] fp32 without gradient, the entropy of the model's
    distribution at each position in nats, 0 where there is no target."""
    steady: bool = True
    """False for a loss without a stable level, such as that of a policy: its jumps and those of its
    gradient norm do not count as spikes, and the guard ([stability]) skips steps only if they are not
    finite."""

    def check_batch(self, batch: Batch) -> None:
        """Check a batch before anything is computed; raises a TitanError if it cannot be used."""

    def token_weights(self, batch: Batch) -> Tensor | None:
        """Return the weights w [B, S] if the loss is −Σ w·log p, else None. The gradients are then
        computed in forward, in chunks, and the loss is called with log-probs without gradient, for its
        weight and metrics."""
        return None


class LossBuilder(Protocol):
    def __call__(self, config: Any) -> Loss: ...


class OptimizerConfig(Protocol):
    """What `titan plan` needs from an optimizer's config, without torch. Optional: otherwise two fp32
    numbers are assumed.

    Other optional members of such a config are in `titancli.registry.defaults`.
    """

    rounds_stochastically: ClassVar[bool]
    """Whether weights and state in bfloat16 are rounded stochastically, so that small updates are not
    lost."""

    def state_bytes(self, stored: int) -> float:
        """Return the bytes of state for each element of a parameter that is stored in `stored` bytes."""
        ...


class OptimizerBuilder(Protocol):
    def __call__(
        self, config: Any, *, named_parameters: list[tuple[str, nn.Parameter]], model_names: Sequence[str]
    ) -> torch.optim.Optimizer:
        """Build the optimizer; `named_parameters` are those of this rank (with a pipeline, of its
        stages), `model_names` the names of all parameters, to check patterns against."""
        ...


# -------------------------------------------------------------------------------------- around a run


class Logger(Protocol):
    """Receives the metrics and events of a run, on rank 0 or on every rank (see `is_main`). All methods
    are optional.

    A logger that raises is reported once and not called again; it never ends a run.
    """

    def run_start(self, info: dict[str, Any]) -> None:
        """Start of a run; `info` has the contents of `run.json`, plus `recipe` (the resolved data)."""

    def step_end(self, step: int, metrics: dict[str, float]) -> None:
        """Metrics of a step: every `metrics.log_freq` steps, and after the first and the last step."""

    def checkpoint_saved(self, step: int, path: Path) -> None: ...

    def run_end(self, outcome: dict[str, Any]) -> None: ...


class LoggerBuilder(Protocol):
    def __call__(self, config: Any, *, run_folder: Path, is_main: bool) -> Logger: ...


class LauncherBuilder(Protocol):
    """Starts the workers, waits, and returns the exit code of the command. Must not import torch."""

    def __call__(
        self,
        config: Any,
        *,
        run_folder: Path,
        lock_file: Path,
        checkpoint: Path | None,
        plugin_files: list[Path],
        nproc: int,
        nnodes: int,
        rdzv: str | None,
        json_events: bool,
        traceback: bool,
    ) -> int: ...


class LoopBuilder(Protocol):
    """Builds the training program; `run` has what a loop needs to know about its run: see
    `titancli.loops.run.Run`."""

    def __call__(
        self, config: Any, *, engine: Any, data: Any, tokenizer: Any, observers: Any, run: Any
    ) -> Callable[[], None]: ...


# --------------------------------------------------------------------- slots of loops that learn from samples


class Task(Protocol):
    """Provides prompts by number: a number always gives the same prompt, on every rank and after a
    resume."""

    identity: Mapping[str, Any]
    """Small plain JSON that is equal only if the prompts are. A resume compares it."""

    def prompt(self, number: int) -> Prompt:
        """Return the prompt with this number, 0, 1, … without end."""
        ...


class TaskBuilder(Protocol):
    def __call__(self, config: Any, *, seed: int) -> Task: ...


class Generator(Protocol):
    """Generates completions with the weights of an engine.

    A generator with its own copy of the weights (a vLLM server) gets them in `update` from
    `engine.weights()`: Hugging Face names and whole tensors, one at a time, on rank 0.
    """

    def update(self, version: int) -> None:
        """Take over new weights; called on every rank before samples of weights that it has not seen are
        needed. `version` counts optimizer steps."""

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[Sequence[int]],
        limits: Sequence[int],
        *,
        greedy: bool = False,
    ) -> list[list[Completion]]:
        """Continue this rank's prompts (token ids), each once for each of its seeds. Collective.

        The sample for a seed must depend only on the prompt and the weights, not on other samples.

        Args:
            limits: the maximum number of new tokens for each prompt.
            greedy: always use the most probable token; log-probabilities are still those of the model.
        """
        ...


class GeneratorBuilder(Protocol):
    """Builds the generator; raises a TitanError if it cannot sample from an engine with this layout."""

    def __call__(self, config: Any, *, engine: Any, tokenizer: Tokenizer) -> Generator: ...


class Reward(Protocol):
    """Rates one completion with a number; higher is better.

    A reward that raises, takes too long, or returns something else than a number counts as failed. Its
    weight is in its config, see `titancli.registry.defaults`.
    """

    def __call__(self, prompt: Prompt, completion: Completion) -> float: ...


class RewardBuilder(Protocol):
    def __call__(self, config: Any) -> Reward: ...


class Advantage(Protocol):
    def __call__(self, rewards: Tensor, counted: Tensor) -> Tensor:
        """Advantages, [G, N] float64, of the N samples of each of G prompts; 0 for those that do not count.

        Args:
            rewards: [G, N] float64.
            counted: [G, N] bool.
        """
        ...


class AdvantageBuilder(Protocol):
    def __call__(self, config: Any) -> Advantage: ...
