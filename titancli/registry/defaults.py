"""Optional members of components' configs, each with the default for configs without it.

A class here is never inherited from: it declares names, types and defaults, for `with_defaults`. Those of the
objects that components build are in `titancli.protocols`, beside their required members.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any, ClassVar, TypeVar, cast

T = TypeVar("T")


def with_defaults(defaults: type[T], owner: Any) -> T:
    """Return `owner` with a default for each member of `defaults` that it lacks.

    A declared method comes from the owner only if it is callable there: a config may have a field of its
    name.
    """
    return cast(T, _WithDefaults(defaults, owner))


class _WithDefaults:
    """Looks up members, which must be declared."""

    __slots__ = ("_defaults", "_owner")

    def __init__(self, defaults: type, owner: Any) -> None:
        self._defaults, self._owner = defaults, owner

    def __getattr__(self, name: str) -> Any:
        default = getattr(self._defaults, name)
        value = getattr(self._owner, name, default)
        if isinstance(default, FunctionType) and (value is default or not callable(value)):
            return MethodType(default, self._owner)
        return value


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


class DatasetConfigDefaults:
    """Members of a dataset's config, or of its class."""

    needs_tokenizer: ClassVar[bool] = True
    gives_pairs: ClassVar[bool] = False
    """True if two consecutive rows are a pair."""
    repeat: bool = False
    """True if the dataset starts over at its end."""
    reference_logps: bool = False
    """True if batches contain the log-probabilities of a reference model."""
    document_mask: bool = False
    """True if batches contain `document_ids`."""
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
    """Optional members of a schedule's config, which derives from `titancli.optimizers.ScheduleConfig`."""

    def remarks(self, steps: int) -> Iterable[str]:
        """Return warnings about a schedule of this many steps; they do not end a command."""
        return ()


class ParallelizeConfigDefaults:
    """Members of a parallelize plan's config."""

    context_parallel: str = "allgather"
    reshard_after_forward: str = "default"
    cpu_offload: bool = False


class LoopConfigDefaults:
    """Members of a loop's config."""

    trains: ClassVar[bool] = True
    """True if it trains; otherwise it gets a frozen engine and no data, and nothing is saved."""
    joins_other_runs: ClassVar[bool] = False
    """True if its ranks exchange tensors with those of other runs, perhaps on other machines. Otherwise the
    ranks of a run on one machine listen on its loopback interface alone."""
    checkpoint: Path | None = None
    """The checkpoint to load for a loop that does not train; None: none."""
    eval_task: Any = None
    """The task of its evaluations; None: no evaluations."""
    eval_freq: int = 0
    """Steps between two evaluations; 0: none."""

    def needs_reference(self, recipe: Any) -> bool:
        """Return whether it compares with the model at the run's start until the run's end."""
        return False


class GeneratorConfigDefaults:
    """Members of a generator's config."""

    max_new_tokens: int = 0
    """Maximum tokens of one completion; 0: unknown."""


class RewardConfigDefaults:
    """Members of a reward's config."""

    weight: float = 1.0
    """Factor of its rewards."""
