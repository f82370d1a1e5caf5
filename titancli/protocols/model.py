"""The required members of a model, and the arguments of its builder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, cast

from titancli.registry.defaults import ModelConfigDefaults

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from titancli.distributed.local import RowCut
    from titancli.protocols.shape import Decoder

Role = Literal["matrix", "embedding", "output", "router", "modulation", "other"]
"""The role of a parameter: `matrix` maps hidden states to hidden states, as does each of a stack of
experts; `embedding` makes hidden states of the input, `output` maps them to the output; `router` scores
experts; `modulation` makes scales and shifts from a condition; `other` is everything else (norms, biases,
convolutions, …)."""


class Routing(NamedTuple):
    """The experts that each token visits in a model, in numbers."""

    layers: int
    """Number of layers with experts, without those of multi-token prediction."""
    top_k: int
    """Experts that a token visits in each layer."""
    num_experts: int
    """Experts of each layer."""


class ModelDefaults(Protocol):
    """Optional members of a model, with their defaults."""

    token_inputs: tuple[str, ...] = ("tokens",)
    """The inputs that make up a row, each along its `sequence_dim`; their lengths are counted as tokens, of
    `("tokens",)` without padding."""
    parameter_device: torch.device | None = None
    """Set by a parallelize plan if parameters are on another device than the computation; None: the same
    device."""
    row_cut: RowCut | None = None
    """Set by a parallelize plan: how rows are sharded over the ranks of mesh.cp."""
    config: Any = ModelConfigDefaults()
    """The config that the model was built from; by default one of unknown sizes."""
    mesh_faults: Mapping[str, str] = {}
    """For each degree of [mesh] that cannot shard the model, the reason; a run with that degree is
    refused."""
    roles: Mapping[str, Role] = {}
    """Maps patterns of parameter names (fnmatch) to roles that do not follow from the modules: for example a
    linear layer that is a router. See `titancli.models.roles.roles_of`."""
    routing: Routing | None = None
    """For a model whose `inputs` include `routes`, [B, S, layers, top_k] integers: the experts that tokens
    visit in place of those that the routers would choose; -1: theirs. None: routes cannot be replayed."""
    new_cache: Callable[[], Cache] | None = None
    """For a model that can generate: returns an empty cache. `forward(tokens, cache=cache.extend(rows,
    counts, device))` appends tokens to these rows, and returns the logits of the last token of each, [R, V];
    tokens, [1, N], are those of the first row, then those of the second, …"""

    why_no_cache: str = "it has no new_cache"
    """The reason, if `new_cache` is None."""
    stage: Callable[..., Any] | None = None
    """For a model whose children are not its stages: `stage(names)` returns the part with these modules,
    named `layers.0` and so on, and as in `stage_ends`."""
    stage_ends: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    """With `stage`: the names of the modules before the blocks, and after them."""

    def token_counts(self) -> dict[str, Tensor]:
        """Return the number of tokens that each expert has processed in training since the last step, by
        layer; for a model with state that depends on these counts and not on gradients. It keeps that state
        in persistent buffers."""
        return {}

    def forget_token_counts(self) -> None:
        """Reset the token counts."""

    def after_step(self, counts: dict[str, Tensor]) -> None:
        """Update the state after each optimizer step, with the counts summed over all ranks that had
        different tokens."""


class Model(ModelDefaults, Protocol):
    """An `nn.Module` that declares how it can be split; the `decoder` plan applies it.

    `forward(**inputs)` returns the raw output; with `batch=` and `loss=` it returns what `output(hidden,
    batch, loss)` returns, a LossResult, computed inside the output module.

    With pipeline parallelism a rank has stages of the model: copies in which the children of other stages are
    None and `layers` holds the blocks of the stage. Forward must skip children that are None. A stage other
    than the first gets the hidden states of the previous stage, [B, S, dim] (`dim` of the config), instead of
    the first of `inputs`, and always `positions`; a stage other than the last gets no loss and returns its
    hidden states. All parameters must be in children, not in the model itself.

    With context parallelism a plan replaces the method `core_attention(q, k, v, mask, causal=True)` of each
    attention by one that calls the original method with whole keys and values, or with whole rows of some
    heads; it also sets `row_cut` on the model and on its output. An attention with sinks passes them as
    `sinks`, [heads], and receives those of its heads.

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
        """Initialize every parameter in place, each from `generator_for(name)`, with the same values on
        every layout: see `titancli.models.blocks.init`."""

    def flops_per_token(self, seq_len: int) -> float:
        """Return the floating-point operations of forward and backward per token, for rows of seq_len."""
        ...


class ModuleDefaults:
    """Optional members of the modules of a model, with their defaults. They are not filled in: most modules
    are torch's."""

    core_attention: Callable[..., Tensor] | None = None
    """For an attention: `core_attention(q, k, v, mask, causal=True)`, which context parallelism replaces."""
    core_recurrence: Callable[..., Tensor] | None = None
    """For a layer that goes through rows in order: `core_recurrence(per_head, mask, heads=slice(None))`,
    which context parallelism replaces. `per_head` are tensors [B, S, heads, ...], `mask` is [B, S] bool (the
    tokens with which a document begins) or None, and `heads` selects the heads of this rank that the tensors
    contain."""
    reach: Any = None
    """For an attention: the distance that a token can look back, a `Reach` of
    `titancli.models.blocks.attention_window`; None: to the start of the row."""
    keeps_cache: bool = False
    """For the mixer of a block, or a block: whether `forward` continues rows by its argument `cache`, a
    `titancli.models.blocks.cache.LayerStep`. Declared by the class that defines `forward`; without it the
    model is trained, but not sampled from."""
    later_factor: float = 1.0
    """For an embedding: the factor that is a part of it, but that its model applies; see `embedding_scale` of
    `titancli.protocols.shape.Decoder`."""
    is_plain_softmax: bool = False
    """For an attention: whether `core_attention` is plain softmax attention, which a ring can compute."""
    loss_backend: str | None = None
    """For an output: the backend that compiles its loss, set by a parallelize plan; None: the loss is
    eager."""
    takes_local_parameters: bool = False
    """True if `forward` itself computes with this rank's shards of the parameters."""
    tensor_parallel: Callable[..., None] | None = None
    """`tensor_parallel(group, style)`: makes `forward` compute with this rank's shards of the parameters,
    where `weight` is sharded in `style`."""

    def parts(self) -> list[tuple[nn.Module, str]]:
        """Return the methods of a block that can each be compiled as a whole, as (module, name)."""
        return [(cast("nn.Module", self), "forward")]

    def tensor_plan(self, style: str | None) -> Mapping[str, str]:
        """Return how parameters added by a converter are sharded if the weight of the module is sharded
        in `style`."""
        return {}


class CacheDefaults(Protocol):
    """Optional members of a cache, with their defaults."""

    apart: bool = False
    """Whether rows must begin in one call and grow together, so that others begin only when they have
    ended."""


class Cache(CacheDefaults, Protocol):
    """The state that a model keeps for rows of tokens; rows begin and end independently."""

    def begin(self) -> int:
        """Begin an empty row, and return its number."""
        ...

    def fork(self, row: int, count: int) -> list[int]:
        """Begin `count` rows with the tokens of this one, and return their numbers."""
        ...

    def close(self, row: int) -> None:
        """End a row; its number may be reused."""

    def extend(self, rows: Sequence[int], counts: Sequence[int], device: torch.device) -> Any:
        """Return the argument of `forward` that appends `counts` tokens to these rows: any number to an empty
        row, one to others. After a forward that raised, the cache is not used again."""


class ModelConfig(Protocol):
    """Members of a model's config that describe the model without torch. Optional.

    Other optional members of such a config are in `titancli.registry.defaults`.
    """

    def shape(self) -> Decoder:
        """Return the specs of its blocks."""
        ...


class ModelBuilder(Protocol):
    def __call__(self, config: Any, *, seq_len: int) -> Model:
        """Build the module on the current device (usually meta), without initial values."""
        ...
