"""Optional members of components' configs, each with the default for configs without it.

A class here declares names, types and defaults. `@component` gives a config's class those that it lacks, so
that whoever reads a config can use them all. Those of the objects that components build are in
`titancli.protocols`, beside their required members; `titancli.build` fills them in.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any, ClassVar

from titancli.errors import PluginError


def fill_in(owner: Any, defaults: Any) -> Any:
    """Give an object the members of `defaults` that it lacks, and return it.

    Raises:
        PluginError: it has something else in place of a method, or can be given no attributes.
    """
    for name, default in members(defaults).items():
        if not _has(owner, name):
            # A default method needs no owner. Bound to it, it would keep a model alive until the garbage
            # collector runs.
            _set(owner, name, partial(default, None) if isinstance(default, FunctionType) else default)
        elif isinstance(default, FunctionType) and not callable(getattr(owner, name)):
            raise PluginError(
                f"{name} of {_name(owner)} is a {type(getattr(owner, name)).__name__}, but must be a method",
                hint=f"see {defaults.__module__}.{defaults.__name__}, or use another name",
            )
    return owner


def fill_in_class(cls: type, defaults: type, fields: Collection[str]) -> None:
    """Give a config's class the members of `defaults` that neither it nor its fields have.

    Raises:
        PluginError: it has something else in place of a method.
    """
    for name, default in members(defaults).items():
        method = isinstance(default, FunctionType)
        if method and (name in fields or not callable(getattr(cls, name, default))):
            raise PluginError(
                f"{cls.__module__}.{cls.__qualname__}: {name} is the name of a method",
                hint=f"see {defaults.__module__}.{defaults.__name__}, or use another name",
            )
        if name not in fields and not hasattr(cls, name):
            setattr(cls, name, default)
            cls.__filled_in__ = (*vars(cls).get("__filled_in__", ()), name)  # type: ignore[attr-defined]


def is_filled_in(cls: type, name: str) -> bool:
    """Return whether a class has a member by `fill_in_class`, of its own or of its bases."""
    owner = next((base for base in cls.__mro__ if name in vars(base)), None)
    return owner is not None and name in vars(owner).get("__filled_in__", ())


@functools.cache
def members(defaults: type) -> dict[str, Any]:
    """Return the members of a class of defaults, by name."""
    return {name: value for name, value in vars(defaults).items() if not name.startswith("_")}


def _set(owner: Any, name: str, value: Any) -> None:
    """Set an attribute, of frozen objects too, and of those with `__slots__` in their class."""
    for target, setter in ((owner, object.__setattr__), (type(owner), setattr)):
        try:
            setter(target, name, value)
            return
        except (AttributeError, TypeError):
            continue
    raise PluginError(
        f"{_name(owner)} has no {name}, and cannot be given it",
        hint="return an object of a class of your own",
    )


def _has(owner: Any, name: str) -> bool:
    """Return whether an object has a member; a property is not read."""
    return any(name in vars(base) for base in type(owner).__mro__) or hasattr(owner, name)


def _name(owner: Any) -> str:
    return str(getattr(owner, "__qualname__", type(owner).__qualname__))


class ConfigDefaults:
    """Members of any config, or of its class."""

    flavors: ClassVar[Mapping[str, dict[str, Any]]] = {}
    """Named sets of fields, for `flavor = "..."`."""
    without_effect: ClassVar[tuple[str, ...]] = ()
    """Fields in which loaded weights may differ from the recipe."""

    def check(self, recipe: Any) -> Iterable[tuple[str, str]]:
        """Return problems of the recipe as a whole: keys relative to the component, or "", and messages."""
        return ()

    def needs_gpu(self) -> Iterable[tuple[str, str]]:
        """Return the fields whose values need a GPU, and why."""
        return ()

    def explicit(self) -> Any:
        """Return the config with fields that follow from others filled in."""
        return self

    def try_out(self) -> None:
        """Build as much as shows whether the component can be built, before a run starts.

        Raises:
            RecipeError: it cannot.
        """


class ModelConfigDefaults:
    """Members of a model's config. A size that it lacks is not checked."""

    mesh_degrees: ClassVar[tuple[str, ...] | None] = None
    """The degrees of [mesh] that the model supports, all others being 1; None: all."""
    stage_ends: ClassVar[tuple[tuple[str, ...], tuple[str, ...]] | None] = None
    """The children before and after the blocks, for pipeline stages; None: a decoder's."""
    dim: int | None = None
    """Width of hidden states."""
    hidden_dim: int | None = None
    """Width inside a feed-forward layer."""
    n_layers: int | None = None
    n_heads: int | None = None
    n_kv_heads: int | None = None
    n_experts: int | None = None
    """None or 0: no experts."""
    vocab_size: int | None = None
    max_seq_len: int | None = None
    """Longest row; None or 0: no limit."""
    tied: bool = False
    """True if the output's weight is the embedding's."""
    model_types: ClassVar[tuple[str, ...]] = ()
    """Values of `model_type` in the `config.json` files that `from_config_json` reads."""
    from_config_json: Any = None
    """The function of its Hugging Face form (`titancli.protocols.HFBuilder`), if that needs no torch."""

    def shape(self) -> Any:
        """Return the specs of its blocks, a `titancli.protocols.shape.Decoder`; None: they are not known."""
        return None

    def small(self) -> Any:
        """Return a config of the same kind with small sizes, for `titan prove`; None: the sizes are reduced
        by the field names that titan's own models use."""
        return None


class LossConfigDefaults:
    """Members of a loss's config."""

    learns_from_pairs: ClassVar[bool] = False
    """True if two consecutive rows are a pair, as the loop dpo requires."""
    learns_from_samples: ClassVar[bool] = False
    """True if it learns from samples and their advantages, as the loop grpo requires."""
    needs_reference: bool = False
    """True if it compares the model with the one that the run began with, of which a copy is kept."""

    def hf_form(self, form: Any, shapes: Mapping[str, Any], config_json: Any = None) -> Any:
        """Return the Hugging Face form of models that are trained with it: that of the language model, or one
        with the loss's head in place of the output layer.

        Args:
            shapes: of the model's parameters.
            config_json: of a folder that is read, which may be a language model's; None: one is written.

        Raises:
            TitanError: there is no such form, or the folder has another head.
        """
        return form


class DatasetConfigDefaults:
    """Members of a dataset's config, or of its class."""

    needs_tokenizer: ClassVar[bool] = True
    add_bos: bool | None = None
    """Whether texts begin with BOS; None: if the tokenizer does that to a text."""
    of_conversations: bool = False
    """True if rows are conversations, whose turns the model learns to write and to end."""
    gives_pairs: ClassVar[bool] = False
    """True if two consecutive rows are a pair."""
    predicts_tokens: ClassVar[bool] = True
    """False if targets only mark positions, such as the last token of a document that has a label."""
    repeat: bool = False
    """True if the dataset starts over at its end."""
    uncountable: str | None = None
    """Why its epochs have no known number of rows, for `training.epochs`; None: they have."""
    reference_logps: bool = False
    """True if batches contain the log-probabilities of a reference model."""
    document_mask: bool = False
    """True if batches contain `document_ids`."""
    joins_rows: bool = False
    """True if the rows of a batch are joined to one."""
    skips_rows: bool = True
    """True if rows can be skipped without preparing them, as worker processes require."""


class OptimizerConfigDefaults:
    """Members of an optimizer's config."""

    lr: float | None = None
    """Peak learning rate; None: that of the first parameter group."""
    rounds_stochastically: ClassVar[bool] = False
    """True if weights and state in bfloat16 are rounded stochastically, so that small changes are not
    lost."""
    state_dtype: str = "bfloat16"

    def state_bytes(self, stored: int) -> float | None:
        """Return the bytes of state per element of a parameter stored in `stored` bytes; None: not known."""
        return None


class ScheduleConfigDefaults:
    """Optional members of a schedule's config."""

    total_steps: int | None = None
    """Length of the schedule; None: training.steps."""

    def remarks(self, steps: int) -> Iterable[str]:
        """Return warnings about a schedule of this many steps; they do not end a command."""
        return ()


class ParallelizeConfigDefaults:
    """Members of a parallelize plan's config."""

    context_parallel: str = "allgather"
    reshard_after_forward: str = "default"
    cpu_offload: bool = False
    expert_dispatch: Any = None
    """Config of a dispatcher; None: the plan has no choice of them."""


class LoopConfigDefaults:
    """Members of a loop's config."""

    trains: ClassVar[bool] = True
    """True if it trains; otherwise it gets a frozen engine and no data, and nothing is saved."""
    reads_dataset: ClassVar[bool] = False
    """True if it reads the recipe's dataset although it does not train, by `Run.open_dataset`."""
    joins_other_runs: ClassVar[bool] = False
    """True if its ranks exchange tensors with those of other runs, perhaps on other machines. Otherwise the
    ranks of a run on one machine listen on its loopback interface alone."""
    checkpoint: Path | None = None
    """The checkpoint to load for a loop that does not train; None: none."""
    task: Any = None
    """The task of its prompts; None: it reads a dataset, or nothing."""
    eval_task: Any = None
    """The task of its evaluations; None: no evaluations."""
    eval_freq: int = 0
    """Steps between two evaluations; 0: none."""

    def needs_reference(self, recipe: Any) -> bool:
        """Return whether it compares with the model at the run's start until the run's end."""
        return False

    def frozen_models(self, recipe: Any) -> list[Any]:
        """Return the recipes of the frozen models beside the trained one; `recipe` itself: a copy of it."""
        return [recipe] if self.needs_reference(recipe) else []


class TaskConfigDefaults:
    """Members of a task's config."""

    of_conversations: bool = False
    """True if prompts are messages, whose answers end as the chat template's turns do."""


class CopiesConfigDefaults:
    """Members of the config of copies."""

    interval: int = 1
    """Steps between two copies."""

    def recorded(self, checkpoints: Path) -> bool:
        """Return whether a run with this folder of checkpoints may have a copy."""
        return False

    def states(self, nodes: int) -> int:
        """Return how many times the share of a node in the state is in its memory, for `titan plan`."""
        return 0


class CallbackConfigDefaults:
    """Members of a callback's config."""

    offloads_activations: ClassVar[bool] = False
    """True if blocks keep what they save for backward in the host's memory, which plans count."""


class GeneratorConfigDefaults:
    """Members of a generator's config."""

    max_new_tokens: int = 0
    """Maximum tokens of one completion; 0: unknown."""


class RewardConfigDefaults:
    """Members of a reward's config."""

    weight: float = 1.0
    """Factor of its rewards."""


class AdvantageConfigDefaults:
    """Members of an advantage's config."""

    needs_reference: bool = False
    """Whether it reads log-probabilities under the model at the run's start."""


CONFIGS: Mapping[str, type] = {
    "model": ModelConfigDefaults,
    "loss": LossConfigDefaults,
    "dataset": DatasetConfigDefaults,
    "optimizer": OptimizerConfigDefaults,
    "schedule": ScheduleConfigDefaults,
    "parallelize": ParallelizeConfigDefaults,
    "loop": LoopConfigDefaults,
    "task": TaskConfigDefaults,
    "copies": CopiesConfigDefaults,
    "callback": CallbackConfigDefaults,
    "generator": GeneratorConfigDefaults,
    "reward": RewardConfigDefaults,
    "advantage": AdvantageConfigDefaults,
}
"""The optional members of configs, beside those of any config, by kind."""
