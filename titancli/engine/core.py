"""The parts of an engine, and the checks with which each of its verbs begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from titancli.distributed.private import forget_iteration
from titancli.engine.agreement import Call
from titancli.engine.inputs import (
    CheckedBatches,
    Given,
    batches_of,
    checked_batches,
    loss_of,
    name_of,
    trained_alone,
)
from titancli.engine.ranks import RankGroup, rank_group
from titancli.engine.rng import Stream
from titancli.engine.routes import ROUTES, check_routes
from titancli.engine.runners import Runner
from titancli.engine.sampling import not_training
from titancli.engine.skip_step import Guard
from titancli.engine.status import (
    CallLock,
    EngineSettings,
    RecoverableBy,
    Status,
    Unusable,
    Watched,
    refuse_modes,
)
from titancli.engine.step import Hooks, Step
from titancli.engine.weights import adapter_converter, plain_parameters
from titancli.errors import TitanError
from titancli.models.loss import module_of
from titancli.parallel.fsdp import reshard
from titancli.parallel.wrapped import as_written
from titancli.registry.component import build

if TYPE_CHECKING:
    from titancli.data.turn_ends import Learned
    from titancli.distributed.mesh import Mesh
    from titancli.parallel.pipeline import Placement
    from titancli.protocols import Converter, HFForm, Loss, Tokenizer
    from titancli.protocols.batch import Batch
    from titancli.recipe.schema import Recipe


@dataclass(eq=False)
class EngineCore:
    """The parts, counters and state of an engine; `titancli.engine.Engine` adds the verbs."""

    parts: list[Any]
    """The parts of the model on this rank: the whole model, or its pipeline stages in order."""
    runner: Runner
    mesh: Mesh
    device: torch.device
    loss: Loss
    optimizer: torch.optim.Optimizer | None
    settings: EngineSettings
    recipe: Recipe
    """The recipe that it was built from."""
    converters: Sequence[Converter] = ()
    hf_form: HFForm | None = None
    placement: Placement | None = None
    """The placement of pipeline stages; None without a pipeline."""
    flops_per_token: float = 0.0
    """Floating-point operations of forward and backward of the whole model per token, for rows of the
    recipe's seq_len."""
    parameter_count: int = 0
    """The number of parameters of the whole model; a tied one counts once."""
    config: dict[str, Any] = field(default_factory=dict)
    """Plain data: `model` (its `type` and fields), `mesh` (as written), `degrees` (on these ranks), `world`,
    `device`, `parameters`, `dtype` and `compute_dtype`."""
    hooks: Hooks = field(default_factory=Hooks, repr=False)
    """The hooks that take part in steps."""
    step: int = 0
    """Optimizer steps done, including those skipped for their numbers."""
    version: int = 0
    """The version of the weights, see `Status`; saved and loaded with the optimizer's state."""
    tokens_seen: int = 0
    """Input tokens of all steps, over all ranks, without padding."""
    base: dict[str, str] | None = None
    """The `path` and `digest` of the base weights of the adapters."""
    begins_as_base: bool = False
    """Whether adapters began at zero, so that the model without them is the initial model."""
    kept: Mapping[str, bytes] = field(default_factory=dict)
    """Other files of the Hugging Face folder that the weights came from; copied into checkpoints."""
    learned: Learned | None = None
    """The ends of turns that the run trains on; None: it trains on none, or they are not known."""
    uncut: Callable[[], Any] = field(default=lambda: None, repr=False)
    """Builds the whole model with its converters on meta, as for a single rank."""
    busy: str | None = None
    """The reason why no verb can be called now, if any."""
    ranks: RankGroup = field(default_factory=rank_group, repr=False)
    """The ranks of the process group that this engine was built in."""
    number: int = field(init=False)
    """The number of the engine within its group, the same on every rank."""
    unusable: Unusable | None = None
    """The reason why only `load` may be called, if any."""
    adapters_from: Path | None = None
    """A checkpoint of adapters that must be loaded before any verb is called."""
    watched: Watched = field(init=False, repr=False)
    """The parameters at the time of building."""
    call_lock: CallLock = field(default_factory=CallLock, repr=False)
    """The verb that is running, if any."""
    pending: Step | None = field(default=None, repr=False)
    """The step whose gradients wait for `optim_step`."""
    _given: tuple[Any, Any] | None = field(default=None, repr=False)
    """The last loss argument, and the loss made from it."""
    _ends: ExitStack = field(default_factory=ExitStack, repr=False)
    """Clean-up actions of `close`."""

    def __post_init__(self) -> None:
        self.number = self.ranks.enlist()
        self.watched = Watched(self.parts)

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The recipe's tokenizer; None if it has none."""
        return None if self.recipe.tokenizer is None else build(self.recipe.tokenizer)

    @property
    def guard(self) -> Guard | None:
        """The guard that skips steps; None if all are applied."""
        return self.hooks.last

    # ------------------------------------------------------------------------------------------- verbs

    @property
    def dp_rank(self) -> int:
        """The index of this rank's data-parallel group; ranks with the same index have the same rows."""
        return self.mesh.dp_rank

    @property
    def dp_size(self) -> int:
        """The number of data-parallel ranks."""
        return self.mesh.degrees.dp

    @property
    def status(self) -> Status:
        return Status(
            step=self.step,
            version=self.version,
            accumulated=0 if self.pending is None else self.pending.batches,
            tokens_seen=self.tokens_seen,
        )

    def ready(self, verb: str, mends: RecoverableBy | None = None) -> None:
        """Check that a verb can be called.

        Args:
            mends: the state that the verb restores in an unusable engine, if any.

        Raises:
            TitanError: the engine is closed, in the middle of `sampling` or another verb, or unusable; its
                ranks have lost contact; or a script has replaced or unfrozen parameters of the model.
        """
        self._usable(verb, mends)
        refuse_modes(verb, self.device)
        self.call_lock.require(verb)
        self.watched.check(verb, self.parts, self.optimizer)

    def _usable(self, verb: str, mends: RecoverableBy | None = None) -> None:
        if self.busy is not None:
            raise TitanError(f"{verb}: the engine {self.busy}")
        self.ranks.require(verb)
        if self.unusable is not None and not self.unusable.mended_by_this(mends):
            raise self.unusable.error(verb)

    @contextmanager
    def _verb(self, name: str, mends: RecoverableBy | None = None) -> Iterator[Call]:
        """Run a verb in the block: one at a time over all threads, and on every rank; see `ready`."""
        with self.call_lock.of(name):
            self.ready(name, mends)
            yield self.call(name)

    def call(self, verb: str) -> Call:
        """Begin a verb that every rank calls."""
        return Call(self.ranks, verb, self.number, self.mesh.degrees)

    def mark_unusable(self, why: str, recoverable_by: RecoverableBy = "load") -> None:
        """Refuse later verbs after an error that cannot be undone. Of several reasons the most severe is
        kept, or the first of them."""
        found = Unusable(why, recoverable_by)
        if self.unusable is None or found.worse_than(self.unusable.recoverable_by):
            self.unusable = found
            self.version += 1  # weights may have changed

    def _trained(self, verb: str) -> torch.optim.Optimizer:
        """Return the optimizer.

        Raises:
            TitanError: the engine has no optimizer.
        """
        if self.optimizer is None:
            raise TitanError(f"{verb} on a frozen engine", hint="build the engine with frozen=False")
        return self.optimizer

    # ----------------------------------------------------------------------------------- parameters

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters by their names in the plain model on one device."""
        return [named for part in self.parts for named in part.named_parameters()]

    def trained_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters that the optimizer trains."""
        return [(name, parameter) for name, parameter in self.named_parameters() if parameter.requires_grad]

    def plain_parameters(self) -> list[tuple[str, Tensor]]:
        """Return the plain model's parameters; see `titancli.engine.weights.plain_parameters`."""
        return plain_parameters(self.parts, self.converters)

    @property
    def adapters(self) -> Any:
        """The converter whose parameters are not part of the plain model, or None."""
        return adapter_converter(self.converters)

    @contextmanager
    def as_base(self) -> Iterator[None]:
        """Disable the adapters of the model in the block; only for computing."""
        if self.adapters is None:
            raise TitanError("as_base: this engine has no adapters (such as those of the converter lora)")
        with self.adapters.disabled(self.parts):
            yield

    @contextmanager
    def as_written(self) -> Iterator[None]:
        """Run the blocks of the model without compilation and activation checkpointing, so that hooks of
        their modules see the activations; only for computing."""
        with ExitStack() as stack:
            for part in self.parts:
                for block in part.layers.values():
                    stack.enter_context(as_written(block))
            yield

    # ------------------------------------------------------------------------------------ inside verbs

    def _loss_of(self, given: Any) -> Any:
        """Return the loss to use. The same argument returns the same object, because a pipeline queries a new
        loss for the names of its metrics.

        Raises:
            TitanError: it has parameters, and is not the loss of the recipe.
        """
        own = module_of(self.loss)
        if given is None or (own is not None and (given is own or given == self.recipe.loss)):
            return self.loss
        if self._given is None or self._given[0] is not given:
            self._given = (given, trained_alone(loss_of(given, self.recipe.model)))
        return self._given[1]

    def _checked_batches(self, given: Given | Sequence[Given], loss: Any) -> CheckedBatches:
        """Return batches, checked before anything is exchanged: see `checked_batches`."""
        part = self.parts[0]
        found = checked_batches(batches_of(given), part, loss, self.settings.limits, self.device)
        for batch in found.batches:
            if ROUTES in batch and part.inputs[0] == "tokens":  # those of samples are checked one by one
                check_routes(f"the batch's {ROUTES}", batch[ROUTES], batch["tokens"].shape, part.routing)
        return found

    def _checked_call(
        self, call: Call, given: Given | Sequence[Given], loss: Any
    ) -> tuple[Any, list[Batch], Tensor | None]:
        """Return the loss and the checked batches, and declare them to the other ranks."""
        loss = self._loss_of(loss)
        own, poison, counts = self._checked_batches(given, loss)
        call.given_batches(own, counts)
        call.given(f"with the loss {name_of(loss)}")
        return loss, own, poison

    def _forget_gradients(self) -> None:
        self._drop_gradients()
        self.pending = None

    def _drop_gradients(self) -> None:
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        for part in self.parts:
            part.forget_token_counts()

    def _has_new_weights(self, version: int) -> None:
        self.version = version
        self._forget_gradients()

    @contextmanager
    def _no_gradients(self, verb: str) -> Iterator[None]:
        # no_grad, never inference_mode: parameters gathered inside it would break the next training step.
        stream = Stream(self.device, self.settings.seed, self.step, self.mesh.dp_rank, "no gradients")
        with self._aborted(verb), torch.no_grad(), not_training(self.parts), stream.drawn():
            yield
        for part in self.parts:
            reshard(part)

    @contextmanager
    def _aborted(self, verb: str, *, forget: bool = False) -> Iterator[None]:
        """Restore the parts to their state between verbs if the block raises.

        Args:
            forget: also discard the gradients of the step so far.
        """
        try:
            yield
        except BaseException:
            if forget:
                self._forget_gradients()
            if self.ranks.lost is None:  # otherwise it would wait for lost ranks
                for part in self.parts:
                    forget_iteration(part)
                if self.runner.exchanging:
                    why = f"{verb} raised an error while the ranks of its pipeline were exchanging tensors"
                    self.mark_unusable(why, "nothing")
            raise
