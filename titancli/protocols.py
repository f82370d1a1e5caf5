"""What each kind's builder is given, and what it must return.

Every builder is called as `build(config, **runtime)`, `runtime` being the keyword arguments of the kind's
Protocol, and gets nothing else of the recipe. What is required of a thing is its Protocol; what it may have
beside that is declared in a class of defaults, read by `titancli.registry.defaults.with_defaults`.
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
    """An `nn.Module` that says what can be split; the `decoder` plan applies it.

    `forward(**inputs)` returns the raw output; with `batch=` and `loss=` it returns what
    `output(hidden, batch, loss)` returns, a LossResult, computed inside the output module.

    Under a pipeline a rank has stages of the model: copies in which the children of other stages are None and
    `layers` holds the stage's own blocks. Forward leaves out what is None. A stage that is not the first
    finds in place of the first of `inputs` the hidden states of the stage before it, [B, S, dim] (`dim` being
    the config's), and always `positions`; one that is not the last is given no loss, and returns its hidden
    states. No parameter may belong to the model itself, only to its children.

    Under context parallel a plan puts another method in place of each attention's
    `core_attention(q, k, v, mask, causal=True)`, which calls the module's own one with whole keys and values,
    or with whole rows of some heads; and it sets `row_cut` on the model and on its output.

    What a model may have beside this stands in `ModelDefaults`, and what its modules may have in
    `ModuleDefaults`.
    """

    inputs: tuple[str, ...]
    """The batch's tensors that forward takes, e.g. `("tokens", "positions", "document_ids")`."""
    sequence_dim: Mapping[str, int]
    """Which dimension runs along the sequence, of each input that context parallel may cut: every rank then
    computes on its own part of a row. Not that of `document_ids`: a mask is made of those of the whole row,
    for attention sees keys of every part. `positions` must be here, since a part does not begin at 0."""
    layers: nn.ModuleDict
    """The blocks, keyed by absolute index: `"0"`, `"1"`, …"""
    output: nn.Module
    tensor_plan: Mapping[str, Literal["column", "row", "vocab", "norm", "replicate", "expert"]]
    """Parameter-name pattern (fnmatch) to how it is cut under tensor parallelism; "expert": not by it, but
    over mesh.ep."""
    experts: Mapping[str, nn.Module]
    """The `titancli.models.blocks.moe.Experts` that this part of the model has, by name; empty for a dense
    model. Expert parallel spreads them over ranks, and FSDP2 takes each for a group of its own."""

    def init_weights(self, generator_for: Callable[[str], torch.Generator]) -> None:
        """Fill every parameter in place, each from `generator_for(name)`, drawn whole and then cut."""

    def flops_per_token(self, seq_len: int) -> float:
        """Floating-point operations of forward and backward for one token of a row of seq_len."""
        ...


class ModelDefaults:
    """Optional members of a model, each with what a model without it has."""

    token_inputs: tuple[str, ...] = ("tokens",)
    """The inputs that lie in a row one after the other, each along its `sequence_dim`: their lengths are what
    is counted as tokens."""
    parameter_device: torch.device | None = None
    """Set by a parallelize plan whose parameters are elsewhere than the engine computes; None: there."""
    row_cut: RowCut | None = None
    """Set by a parallelize plan: how rows are cut over the ranks of mesh.cp."""
    config: Any = None
    """What it was built of."""
    new_cache: Callable[..., Cache] | None = None
    """Of a model that can generate: `new_cache(length, padding=None)`, for rows of at most `length` tokens of
    which `padding` ([B] int64) at the beginning of each do not count. `forward(tokens, cache=cache)` adds
    tokens to those that the cache holds and returns the logits of the last one, [B, 1, V]."""

    def token_counts(self) -> dict[str, Tensor]:
        """How many tokens each expert has trained on here since the last step, by layer: of a model whose
        state moves by them, outside of gradients. It keeps that state in persistent buffers."""
        return {}

    def forget_token_counts(self) -> None:
        """Count anew."""

    def after_step(self, counts: dict[str, Tensor]) -> None:
        """Called after each optimizer step with the counts, summed over all ranks that had other tokens."""


class ModuleDefaults:
    """Optional members of the modules in a model, each with what a module without it has."""

    core_attention: Callable[..., Tensor] | None = None
    """Of an attention: `core_attention(q, k, v, mask, causal=True)`, which context parallel replaces."""
    reach: Any = None
    """Of an attention: how far back a token sees, a `titancli.models.blocks.reach.Reach`; None: to the row's
    beginning."""
    is_plain_softmax: bool = False
    """Of an attention: whether `core_attention` is plain softmax attention, which a ring can compute."""
    loss_backend: str | None = None
    """Of an output: set by a parallelize plan, the backend that compiles its loss; None: it stays eager."""
    takes_local_parameters: bool = False
    """Whether `forward` computes with this rank's parts of the parameters by itself."""
    tensor_parallel: Callable[..., None] | None = None
    """`tensor_parallel(group, style)`: has `forward` compute with this rank's parts of the parameters, of
    which `weight` is cut in `style`."""

    def parts(self) -> list[tuple[nn.Module, str]]:
        """Of a block: the methods, by module and name, that can each be compiled whole."""
        return [(cast("nn.Module", self), "forward")]

    def tensor_plan(self, style: str | None) -> Mapping[str, str]:
        """How parameters that a converter has added are cut where the module's weight is cut in a style."""
        return {}


class Cache(Protocol):
    """What a model keeps of the tokens that it has seen, for rows that grow together."""

    def select(self, rows: Tensor) -> None:
        """Keep these rows ([N] int64), in this order; a row that is named twice is there twice."""


class ModelConfig(Protocol):
    """What `titan plan` asks a model's config, torch-free. Optional: a model without it is not estimated.

    What else such a config may have stands in `titancli.registry.defaults`.
    """

    def shape(self) -> Decoder:
        """The sizes: every parameter of the module by name and shape, with its style in `tensor_plan`."""
        ...


class ModelBuilder(Protocol):
    def __call__(self, config: Any, *, seq_len: int) -> Model:
        """Build on the device that is current (usually meta); must not draw initial values."""
        ...


class HFForm(Protocol):
    """A model's Hugging Face form: what `hf=` of `@component` returns for a config.

    Transforms work on one tensor at a time, so that memory grows with the largest tensor only. What a form
    may have beside this stands in `HFFormDefaults`.
    """

    def to_hf(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """The Hugging Face tensors that come of one of ours (plain name, whole tensor)."""
        ...

    def sources(self, name: str) -> list[str]:
        """The Hugging Face names that one parameter of ours is made of, in the order `from_hf` takes them;
        none where a Hugging Face folder has nothing of it, and `from_hf` knows what it begins with."""
        ...

    def from_hf(self, name: str, tensors: list[Tensor]) -> Tensor:
        """Our parameter out of the tensors that `sources` named."""
        ...

    def ignored(self, hf_name: str) -> bool:
        """Whether a Hugging Face tensor is rightly left unread (a tied copy, an inv_freq buffer)."""
        ...

    def config_json(self) -> dict[str, Any]:
        """`config.json` for transformers, without `dtype`, `bos_token_id`, `eos_token_id`."""
        ...


class HFFormDefaults:
    """Optional members of a Hugging Face form, each with what a form without it has."""

    library: ClassVar[str] = "transformers"
    """"diffusers" for a folder that is not transformers': other names of files, and a class in place of
    `model_type`."""
    loses_biases: bool = False
    """Whether its folders have no place for the biases that balance experts."""

    def copy_of(self, hf_name: str) -> str | None:
        """The Hugging Face tensor that an ignored one must be equal to."""
        return None

    def known_as(self, hf_name: str) -> str:
        """Under which of its own names it knows a tensor that some folders have under another one."""
        return hf_name


class HFBuilder(Protocol):
    """The `hf=` target: a class whose instances are HFForms."""

    model_type: str
    """`model_type` in the `config.json` that this form reads and writes (`_class_name`, where the library is
    diffusers). Of a class that reads several (`HFBuilderDefaults`) each instance has the one that it
    writes."""

    def __call__(self, config: Any) -> HFForm: ...

    def from_config_json(self, config_json: dict[str, Any]) -> dict[str, Any]:
        """The keys of `[model]` (without `type`) for a Hugging Face `config.json`; a static method.

        Raises:
            TitanError: the config asks for something that the model does not have.
        """
        ...


class HFBuilderDefaults:
    """Optional members of a class of Hugging Face forms, each with what a class without it has."""

    model_type: str | None = None
    """None of a class that has `model_types`, or that reads any."""
    model_types: tuple[str, ...] | None = None
    """All that it reads; empty: a folder of any type, but only if the model is named; None: `model_type`."""


# ----------------------------------------------------------------------------------------------- data


class Tokenizer(Protocol):
    """Text to ids and back.

    What it may have beside this stands in `TokenizerDefaults`. What a chat template does not take is a
    `titancli.data.chat_template.ChatRefused`.
    """

    vocab_size: int
    """Ids are below this."""
    eos_id: int
    """Ends a document."""
    files: Mapping[str, str | Path]
    """Files an export carries along: name to source path; empty where there are none."""

    def encode(self, text: str) -> list[int]:
        """Ids without added special tokens."""
        ...

    def encode_batch(self, texts: list[str]) -> list[list[int]]: ...

    def decode(self, ids: list[int]) -> str: ...

    def chat(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = False) -> list[int]:
        """Ids of a conversation under the tokenizer's own chat template; a TitanError where it has none.

        `add_generation_prompt`: with what an answer of the assistant is to follow.
        """
        ...


class TokenizerDefaults:
    """Optional members of a tokenizer, each with what a tokenizer without it has."""

    bos_id: int | None = None
    adds_bos: bool = False
    """Whether a text to continue begins with bos."""
    fingerprint: str | None = None
    """Changes when the ids do; None: its class, size, end and files tell it from others."""
    chat_fingerprint: str | None = None
    """The same of the ids of `chat`."""
    chat_with_mask: Callable[..., tuple[list[int], list[bool]]] | None = None
    """Needed to train on what an assistant says: `chat_with_mask(messages, *, first=0) -> (ids, mask)`, the
    ids of `chat`, and which of them are of assistant turns among `messages[first:]`, the end marker included.
    One that takes `trailing_newline: bool = False` too can include the line break that its template puts
    behind the marker."""

    def encode_arrays(self, texts: list[str]) -> list[np.ndarray] | None:
        """`encode_batch` without lists of Python integers; None: there is only `encode_batch`."""
        return None


class TokenizerBuilder(Protocol):
    def __call__(self, config: Any) -> Tokenizer: ...


class Dataset(Protocol):
    """An endless or ending stream of this rank's batches, on the CPU, all of one shape."""

    def __iter__(self) -> Iterator[Batch]: ...

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch handed out: plain JSON, independent of dp_rank and dp_size."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position, whatever the dp_size it was saved under.

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
        """`tokenizer` is None for a config with `needs_tokenizer = False`, whose recipes have no [tokenizer],
        and for no other; see `titancli.registry.defaults`."""
        ...


# ------------------------------------------------------------------------------------- model surgery


class Converter(Protocol):
    """Changes a model, on one device, before it is cut.

    One that adds parameters of its own (adapters) also has what stands in `ConverterDefaults`. A module that
    gets parameters says how they are cut: `ModuleDefaults.tensor_plan`.
    """

    def convert(self, model: Model) -> None:
        """Change the model in place, on meta, before it is cut. Parameter names stay."""

    def after_step(self, model: Model) -> None:
        """Called whenever the weights have new values: after each optimizer step, and after a load."""

    def plain(self, name: str, tensor: Tensor) -> Tensor:
        """A parameter without the converter's own tensor class, in the same memory: checkpoints are read into
        it as well as written from it. `tensor` is a DTensor where the parameter is sharded."""
        ...


class ConverterDefaults:
    """Members of a converter that adds parameters of its own, None of any other."""

    owns: Callable[[str], bool] | None = None
    """Whether a parameter of this name is one: these alone are saved, and the others are the base's."""
    facts: Mapping[str, Any] | None = None
    """Plain data that a checkpoint tells of them."""
    initialise: Callable[..., None] | None = None
    """`initialise(model, generator_for)` fills them."""
    merged: Callable[..., Iterator[tuple[str, Tensor]]] | None = None
    """`merged(named_tensors)`: the plain model's tensors out of both."""
    disabled: Callable[..., Any] | None = None
    """`disabled(parts)`: a context in which the model is its base."""


class ConverterBuilder(Protocol):
    def __call__(self, config: Any, *, mesh: Degrees, compile: bool) -> Converter: ...


class Precision(Protocol):
    """What numbers are stored, computed and reduced in."""

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
    """A sum and the weight that it is to be divided by; see `titancli.losses.result`.

    What a loss may have beside this stands in `LossDefaults`.
    """

    output: Literal["logprobs", "model"]
    """What the loss is called with: log p(targets) [B, S] fp32, or the model's raw output (logits)."""

    def __call__(self, out: Tensor, batch: Batch) -> LossResult: ...


class LossDefaults:
    """Optional members of a loss, each with what a loss without it has."""

    needs: Sequence[str] | Mapping[str, Literal["B", "BS"]] = ()
    """What the batch must have besides the model's inputs and targets; as a mapping with its shape, a number
    for each row or for each token. Checked before anything is computed."""
    entropy: bool = False
    """Whether it finds `batch["entropy"]`: [B, S] fp32 without gradient, the entropy of the model's
    distribution at each position in nats, 0 where there is no target."""
    steady: bool = True
    """False of one that keeps to no level, as a policy's does: that it or its gradient norm jumps is no
    spike, and the guard ([stability]) skips its steps only where they are not finite."""

    def check_batch(self, batch: Batch) -> None:
        """Called before anything is computed; raises a TitanError where a batch will not do."""

    def token_weights(self, batch: Batch) -> Tensor | None:
        """The weights w [B, S] of a loss that is −Σ w·log p: gradients are then made in forward, in chunks,
        and the loss is called with log-probs that carry none, for its weight and metrics."""
        return None


class LossBuilder(Protocol):
    def __call__(self, config: Any) -> Loss: ...


class OptimizerConfig(Protocol):
    """What `titan plan` asks an optimizer's config, torch-free. Optional: else two fp32 numbers are taken.

    What else such a config may have stands in `titancli.registry.defaults`.
    """

    rounds_stochastically: ClassVar[bool]
    """Whether weights and state in bfloat16 are rounded so that small changes are not lost."""

    def state_bytes(self, stored: int) -> float:
        """Bytes of state for each number of a parameter that is stored in `stored` bytes."""
        ...


class OptimizerBuilder(Protocol):
    def __call__(
        self, config: Any, *, named_parameters: list[tuple[str, nn.Parameter]], model_names: Sequence[str]
    ) -> torch.optim.Optimizer:
        """`named_parameters` are those of this rank, under a pipeline its stages'; `model_names` are the
        names of all, to check patterns against."""
        ...


# -------------------------------------------------------------------------------------- around a run


class Logger(Protocol):
    """Watches a run on rank 0 of it, or on every rank (`is_main` says which). All methods are optional.

    A logger that raises is reported once and is not called again; it never kills a run.
    """

    def run_start(self, info: dict[str, Any]) -> None:
        """`info`: what `run.json` holds, plus `recipe` (the resolved data)."""

    def step_end(self, step: int, metrics: dict[str, float]) -> None:
        """Every `metrics.log_freq` steps, and after the first and the last."""

    def checkpoint_saved(self, step: int, path: Path) -> None: ...

    def run_end(self, outcome: dict[str, Any]) -> None: ...


class LoggerBuilder(Protocol):
    def __call__(self, config: Any, *, run_folder: Path, is_main: bool) -> Logger: ...


class LauncherBuilder(Protocol):
    """Torch-free. Starts the workers, waits, and returns the exit code of the command."""

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
    """Returns the program. `run` is what a loop needs to know of its run: see `titancli.loops.run.Run`."""

    def __call__(
        self, config: Any, *, engine: Any, data: Any, tokenizer: Any, observers: Any, run: Any
    ) -> Callable[[], None]: ...


# --------------------------------------------------------------------- slots of loops that learn from samples


class Task(Protocol):
    """Prompts by number: a number gives the same prompt always, on every rank and after a resume."""

    identity: Mapping[str, Any]
    """Plain JSON, small; equal only if the prompts are. A resume compares it."""

    def prompt(self, number: int) -> Prompt:
        """Number 0, 1, … without end."""
        ...


class TaskBuilder(Protocol):
    def __call__(self, config: Any, *, seed: int) -> Task: ...


class Generator(Protocol):
    """Writes completions with the weights of an engine.

    One that has the weights elsewhere (a vLLM server) takes them in `update` from `engine.weights()`: Hugging
    Face names and whole tensors, one at a time, on rank 0.
    """

    def update(self, version: int) -> None:
        """Called on every rank before samples are wanted of weights that it has not seen; `version` counts
        optimizer steps."""

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[Sequence[int]],
        limits: Sequence[int],
        *,
        greedy: bool = False,
    ) -> list[list[Completion]]:
        """Continue this rank's prompts (token ids), each once for every seed that it has. Collective.

        What is drawn for a seed depends on the prompt and the weights alone, not on what else is asked for.

        Args:
            limits: how many tokens each prompt leaves room for.
            greedy: the most probable token always; the log-probabilities stay the model's.
        """
        ...


class GeneratorBuilder(Protocol):
    """Raises a TitanError where it cannot sample from an engine that is cut in such a way."""

    def __call__(self, config: Any, *, engine: Any, tokenizer: Tokenizer) -> Generator: ...


class Reward(Protocol):
    """A number for one completion; higher is better.

    It may raise, take too long, or return what is no number: this counts as failed. What its rewards are
    multiplied by is said by its config, see `titancli.registry.defaults`.
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
