"""Optional members of components' configs, each with what a config without it has.

A class here is never inherited from: it declares names, types and defaults, for `with_defaults`. Those of
what components build stand in `titancli.protocols`, beside what is required.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any, ClassVar, TypeVar, cast

T = TypeVar("T")


def with_defaults(defaults: type[T], owner: Any) -> T:
    """Return `owner`, a default in place of each member of `defaults` that it lacks.

    A method that is declared is the owner's if that can be called: a config may have a field of its name.
    """
    return cast(T, _WithDefaults(defaults, owner))


class _WithDefaults:
    """Looks a member up, which must be declared."""

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
    """Of a config of any kind, or of its class."""

    flavors: ClassVar[Mapping[str, dict[str, Any]]] = {}
    """Named sets of fields, for `flavor = "..."`."""
    without_effect: ClassVar[tuple[str, ...]] = ()
    """Fields in which weights that are loaded may differ from the recipe."""

    def check(self, recipe: Any) -> Iterable[tuple[str, str]]:
        """Return what is wrong with the recipe as a whole: keys relative to the component, or "", and why."""
        return ()

    def needs_gpu(self) -> Iterable[tuple[str, str]]:
        """Return the fields whose values need a GPU, and why."""
        return ()

    def explicit(self) -> Any:
        """Return the config with fields that follow from others filled in."""
        return self

    def try_out(self) -> None:
        """Build as much as tells whether it can be built, before a run starts.

        Raises:
            RecipeError: it cannot.
        """


class ModelConfigDefaults:
    """Of a model's config. A size that is not there is not checked."""

    mesh_degrees: ClassVar[tuple[str, ...] | None] = None
    """The degrees of [mesh] that the model can be cut by, the others being 1; None: all."""
    stage_ends: ClassVar[tuple[tuple[str, ...], tuple[str, ...]] | None] = None
    """The children before and after the blocks, for pipeline stages; None: a decoder's."""
    dim: int | None = None
    """The width of hidden states."""
    hidden_dim: int | None = None
    """The width inside of a feed-forward layer."""
    n_layers: int | None = None
    n_heads: int | None = None
    n_kv_heads: int | None = None
    n_experts: int | None = None
    """None or 0: it has no experts."""
    vocab_size: int | None = None
    max_seq_len: int | None = None
    """The longest row; None or 0: any."""
    tied: bool = False
    """Whether the output's weight is the embedding's."""
    model_types: ClassVar[tuple[str, ...]] = ()
    """The `model_type`s of the `config.json` that `from_config_json` reads."""
    from_config_json: Any = None
    """The function of its Hugging Face form (`titancli.protocols.HFBuilder`), if that needs no torch."""

    def shape(self) -> Any:
        """Return the specs of its blocks, a `titancli.models.shape.Decoder`; None: they are not known."""
        return None

    def small(self) -> Any:
        """Return a config of the same kind with small sizes, for `titan prove`; None: they are made small by
        the names that titan's own models give them."""
        return None


class LossConfigDefaults:
    """Of a loss's config."""

    learns_from_pairs: ClassVar[bool] = False
    """Whether two rows after one another are a pair, as the loop dpo needs."""
    learns_from_samples: ClassVar[bool] = False
    """Whether it learns from samples and their advantages, as the loop grpo needs."""
    kl_coef: float = 0.0
    """What the divergence from a reference model counts; 0: there is none."""


class DatasetConfigDefaults:
    """Of a dataset's config, or of its class."""

    needs_tokenizer: ClassVar[bool] = True
    gives_pairs: ClassVar[bool] = False
    """Whether two rows after one another are a pair."""
    repeat: bool = False
    """Whether it begins again at its end."""
    reference_logps: bool = False
    """Whether batches have the log-probabilities of a reference."""
    document_mask: bool = False
    """Whether batches have `document_ids`."""
    skips_rows: bool = True
    """Whether rows are skipped without being prepared, as worker processes need it."""


class OptimizerConfigDefaults:
    """Of an optimizer's config."""

    lr: float | None = None
    """The peak learning rate; None: that of the first parameter group."""
    rounds_stochastically: ClassVar[bool] = False
    """Whether weights and state in bfloat16 are rounded so that small changes are not lost."""
    state_dtype: str = "bfloat16"

    def state_bytes(self, stored: int) -> float | None:
        """Return the bytes of state per element of a parameter stored in `stored` bytes; None: not known."""
        return None


class ScheduleConfigDefaults:
    """Of a schedule's config, which derives from `titancli.optimizers.ScheduleConfig`."""

    def remarks(self, steps: int) -> Iterable[str]:
        """Return sentences on a schedule of so many steps that a user may not expect; none ends a command."""
        return ()


class ParallelizeConfigDefaults:
    """Of a parallelize plan's config."""

    context_parallel: str = "allgather"
    reshard_after_forward: str = "default"
    cpu_offload: bool = False


class LoopConfigDefaults:
    """Of a loop's config."""

    trains: ClassVar[bool] = True
    """Whether it trains; if not, it gets a frozen engine and no data, and nothing is saved."""
    joins_other_runs: ClassVar[bool] = False
    """Whether its ranks exchange tensors with those of other runs, perhaps on other machines: else the ranks
    of a run on one machine listen on its loopback interface alone."""
    checkpoint: Path | None = None
    """Of a loop that does not train: the checkpoint that is loaded for it; None: none."""
    eval_task: Any = None
    """The task of its evaluations; None: it has none."""
    eval_freq: int = 0
    """Steps between two evaluations; 0: none."""

    def needs_reference(self, recipe: Any) -> bool:
        """Whether it compares with the model that the run began with, to the run's end."""
        return False


class GeneratorConfigDefaults:
    """Of a generator's config."""

    max_new_tokens: int = 0
    """The most tokens of one completion; 0: not known."""


class RewardConfigDefaults:
    """Of a reward's config."""

    weight: float = 1.0
    """What its rewards are multiplied by."""
