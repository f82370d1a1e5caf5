"""What an engine is made of, and what of it is saved, loaded and handed on."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from titancli.checkpoint import load_checkpoint, save_checkpoint
from titancli.checkpoint.exclude import NOTHING, Exclusion
from titancli.checkpoint.hf.kept import kept_of
from titancli.engine.agreement import Call, Together, together
from titancli.engine.experts import hold_biases
from titancli.engine.optimizer_state import optimizer_tensors
from titancli.engine.recipes import checkpoint_of
from titancli.engine.runners import Runner
from titancli.engine.skip_step import Guard
from titancli.engine.status import EngineSettings, MendedBy, Status, Unusable, Watched, alone
from titancli.engine.weights import NamedTensor, Parameters, Target, push, take_weights, told_adapters
from titancli.errors import EnvironmentProblem, TitanError

if TYPE_CHECKING:
    from titancli.checkpoint.format.manifest import Verify
    from titancli.distributed.mesh import Mesh
    from titancli.engine.rng import Stream
    from titancli.parallel.pipeline import Placement
    from titancli.protocols import Converter, HFForm, Loss


@dataclass(eq=False)
class Core(Parameters):
    """A sharded model, its optimizer, and their state."""

    parts: list[Any]
    """The model, cut: whole, or under a pipeline the stages that this rank has, in their order."""
    runner: Runner
    mesh: Mesh
    device: torch.device
    loss: Loss
    optimizer: torch.optim.Optimizer | None
    settings: EngineSettings
    converters: Sequence[Converter] = ()
    hf_form: HFForm | None = None
    placement: Placement | None = None
    """Where the stages of a pipeline are; None where there is none."""
    flops_per_token: float = 0.0
    """Forward and backward of the whole model, for rows of the recipe's seq_len."""
    parameter_count: int = 0
    """Of the whole model; a tied one counts once."""
    config: dict[str, Any] = field(default_factory=dict)
    """Plain data: `model` (its `type` and fields), `mesh` (as written), `degrees` (as they are on these
    ranks), `world`, `device`, `parameters`, `dtype` and `compute_dtype`."""
    guard: Guard | None = None
    """Which steps are not applied; None: all are."""
    step: int = 0
    """Optimizer steps done, those that were skipped for their numbers included."""
    version: int = 0
    """See `Status`. Saved and loaded with the optimizer's state."""
    tokens_seen: int = 0
    """Input tokens of all steps, over all ranks."""
    base: dict[str, str] | None = None
    """`path` and `digest` of the weights that adapters were put beside."""
    begins_as_base: bool = False
    """Whether adapters began at zero, so that without them the model is what training began with."""
    kept: Mapping[str, bytes] = field(default_factory=dict)
    """What the Hugging Face folder that the weights once came from had beside them, for checkpoints."""
    begins_unbalanced: bool = False
    """See `titancli.engine.experts`."""
    holds_biases: bool = False
    """Whether the biases that would balance experts stay at zero."""
    busy: str | None = None
    """Why no verb can be called now, if so."""
    ranks: Together = field(default_factory=together, repr=False)
    """Those of the process group that this engine was built in."""
    number: int = field(init=False)
    """Which of the group's engines it is, the same on every rank."""
    unusable: Unusable | None = None
    """Why no verb but `load` may be called any more, if so."""
    watched: Watched | None = field(default=None, repr=False)
    """The parameters that it was built with."""
    turn: threading.Lock = field(default_factory=threading.Lock, repr=False)
    """Held by the verb that is running; see `titancli.engine.status`."""
    running: str = "another verb"
    """The verb that held it last."""
    _verb: str | None = None
    """The verb that is running."""
    _weight: Tensor | None = field(default=None, repr=False)
    _loss: Tensor | None = field(default=None, repr=False)
    """The sum that is to be divided by the weight, of all calls since the last step."""
    _steady: bool = True
    """Whether all losses since the last step keep to a level (`titancli.protocols.Loss`)."""
    _stream: Stream | None = field(default=None, repr=False)
    """The random numbers of the step that is under way."""
    _step_tokens: int = 0
    _accumulated: int = 0
    _given: tuple[Any, Any] | None = field(default=None, repr=False)
    """The loss that was given last, and what was made of it."""
    _ends: ExitStack = field(default_factory=ExitStack, repr=False)
    """What `close` undoes."""

    def __post_init__(self) -> None:
        self.number = self.ranks.enlist()

    @property
    def model(self) -> Any:
        """The whole model.

        Raises:
            TitanError: it is cut into pipeline stages.
        """
        self._usable("model")
        if self.mesh.degrees.pp > 1:
            raise TitanError("this rank has only some stages of the model: mesh.pp is not 1")
        return self.parts[0]

    @property
    def status(self) -> Status:
        return Status(
            step=self.step,
            version=self.version,
            accumulated=self._accumulated,
            tokens_seen=self.tokens_seen,
        )

    def ready(self, verb: str, mends: MendedBy | None = None) -> None:
        """See to it that a verb can be called.

        Args:
            mends: what the verb does for an engine that is unusable, if anything.

        Raises:
            TitanError: the engine is closed, in the middle of `sampling` or another verb, or unusable; its
                ranks have lost each other; or a script has put other parameters into the model, or had more
                of them require gradients.
        """
        self._usable(verb, mends)
        if torch.is_inference_mode_enabled():  # what is gathered or loaded in it can never be trained
            raise TitanError(
                f"{verb} under torch.inference_mode()", hint="leave it: forward and evaluate make no graph"
            )
        if torch.is_autocast_enabled(self.device.type):  # it would cast what titan has cast by its own rule
            raise TitanError(
                f"{verb} under torch.autocast()",
                hint="leave it: training.mixed_precision_param says what the model computes in",
            )
        if self._verb is not None:
            raise TitanError(
                f"{verb}: the engine is in the middle of {self._verb}",
                hint="call it before: what a loss needs travels with the batch",
            )
        if self.watched is not None:
            self.watched.check(verb, self.parts, self.optimizer)

    @contextmanager
    def inside(self, verb: str) -> Iterator[None]:
        """Have other verbs refused meanwhile: of a loss that calls one, or of another thread."""
        self._verb = verb
        try:
            yield
        finally:
            self._verb = None

    def _usable(self, verb: str, mends: MendedBy | None = None) -> None:
        if self.busy is not None:
            raise TitanError(f"{verb}: the engine {self.busy}")
        self.ranks.require(verb)
        if self.unusable is not None and not self.unusable.mended_by_this(mends):
            raise self.unusable.error(verb)

    def call(self, verb: str) -> Call:
        """A verb that is about to begin, and that every rank calls."""
        return Call(self.ranks, verb, self.number, self.mesh.degrees)

    def spoil(self, why: str, mended_by: MendedBy = "load") -> None:
        """Have each later verb refused: something has raised where nothing can be put back. Of several
        reasons the worst stays, or the first of them."""
        found = Unusable(why, mended_by)
        if self.unusable is None or found.worse_than(self.unusable.mended_by):
            self.unusable = found
            self.version += 1  # weights may have changed

    def trained(self, verb: str) -> torch.optim.Optimizer:
        """The optimizer.

        Raises:
            TitanError: there is none, or as in `ready`.
        """
        self.ready(verb)
        return self._has_optimizer(verb)

    def _has_optimizer(self, verb: str) -> torch.optim.Optimizer:
        if self.optimizer is None:
            raise TitanError(f"{verb} on a frozen engine", hint="build it with Engine.build, frozen=False")
        return self.optimizer

    @alone
    def clear_gradients(self) -> None:
        """Forget what `forward_backward` has added since the last step.

        Raises:
            TitanError: the engine is frozen or closed.
        """
        self.trained("clear_gradients")
        self._forget_gradients()

    def _forget_gradients(self) -> None:
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        for part in self.parts:
            if token_counts(part):
                part.forget_token_counts()
        self._weight = self._loss = self._stream = None
        self._steady = True
        self._step_tokens = self._accumulated = 0

    # ------------------------------------------------------------------------------------- checkpoints

    def save_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything a resume needs: tensors by name (the live ones, sharded), and counters as plain JSON."""
        self.ready("save_state")
        return self.live_state()

    def live_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The same, of an engine that may be unusable: to load into."""
        tensors = {f"model.{name}": tensor for name, tensor in self.saved_parameters()}
        if self.optimizer is not None:
            tensors |= optimizer_tensors(self.optimizer, self.named_parameters())
        more: dict[str, Any] = {"guard": self.guard.state()} if self.guard else {}
        if self.adapters is not None:
            more["adapters"] = {**self.adapters.facts, "base": self.base}
        counters = {"step": self.step, "version": self.version, "tokens_seen": self.tokens_seen}
        return tensors, {**counters, **more}

    @alone
    def save(self, folder: str | Path, *, lock_text: str = "", run_id: str = "") -> None:
        """Write a checkpoint of this engine, whole or not at all: safetensors and JSON. Collective.

        Accumulated gradients are not part of it. An older checkpoint of that name is replaced.

        Args:
            folder: its name; a last part such as `step-100` says its step.
            lock_text: the resolved recipe, kept beside it (`titancli.recipe.lock_text`).
            run_id: whose checkpoint it is; one of another id is never replaced.

        Raises:
            EnvironmentProblem: the disk is full or cannot be written, on any rank; or the folder is another
                run's.
        """
        self.ready("save")
        call = self.call("save")
        with call.agreed():
            tensors, state = self.save_state()
            call.given(f"as {Path(folder).name}")
        with call.shared():
            save_checkpoint(
                Path(folder),
                tensors,
                {"engine": state},
                lock_text=lock_text,
                run_id=run_id,
                mesh=asdict(self.mesh.degrees),
                kept=self.kept,
            )

    @alone
    def load(
        self,
        folder: str | Path,
        *,
        optimizer: bool | None = None,
        verify: Verify = "full",
        exclude: Exclusion = NOTHING,
    ) -> dict[str, Any]:
        """Continue from a checkpoint made on any layout; with optimizer=False take its weights alone.

        Gradients that were accumulated are forgotten. Collective. Where it raises after it has begun to
        replace anything, the engine is unusable until a `load` succeeds.

        Args:
            folder: a checkpoint, or a run, of which it takes the newest good one.
            optimizer: None: True, or False for a frozen engine.

        Returns:
            The checkpoint's state, for what the engine does not own (the data position).

        Raises:
            EnvironmentProblem: it is no checkpoint, is damaged, or lacks the optimizer's state where wanted.
            TitanError: it is of another model, or `exclude` names what it does not hold; or the engine is
                frozen and the optimizer's state is wanted.
        """
        wanted = self.optimizer is not None if optimizer is None else optimizer
        everything = wanted or self.optimizer is None
        mends: MendedBy | None = "load" if everything else "weights"
        self.ready("load" if everything else "load(optimizer=False)", None if exclude.patterns else mends)
        if wanted:
            self._has_optimizer("load(optimizer=True)")
        before, call = self.version, self.call("load")
        with call.agreed():
            call.given(f"of {Path(folder).name}, {'all of it' if wanted else 'its weights alone'}")
        with call.shared():
            state = self._load_state(
                checkpoint_of(Path(folder)), optimizer=wanted, verify=verify, exclude=exclude
            )
        if self.begins_unbalanced:
            self.holds_biases = hold_biases(self.parts, self.device, self.holds_biases)
        self._has_new_weights(max(self.version, before + 1))
        self.unusable = None
        return state

    def _load_state(
        self, folder: Path, *, optimizer: bool, verify: Verify, exclude: Exclusion
    ) -> dict[str, Any]:
        """Fill the engine's tensors from a checkpoint and set its counters; see `load`."""
        told_adapters(self.adapters, folder, base=self.base)
        kept = kept_of(folder)
        tensors, _ = self.live_state()
        if not optimizer:
            tensors = {name: tensor for name, tensor in tensors.items() if name.startswith("model.")}

        def begin() -> None:
            self.spoil(f"loading {folder} has failed half way", "load" if optimizer else "weights")

        state = load_checkpoint(folder, tensors, verify=verify, exclude=exclude, begin=begin)
        for converter in self.converters:
            for part in self.parts:
                converter.after_step(part)
        if optimizer:
            counters = state.get("engine")
            if counters is None:
                raise EnvironmentProblem(
                    f"{folder} holds weights but no training state, so a run cannot be continued from it",
                    hint=f"start a new run from it with weights={folder}",
                )
            try:
                self._set_counters(counters, exclude)
            except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
                raise EnvironmentProblem(
                    f"{folder} holds a training state that titan does not write: "
                    f"{type(error).__name__}: {error}",
                    hint="take another checkpoint (--step N)",
                ) from error
        self.kept = kept or self.kept
        return state

    def _set_counters(self, counters: dict[str, Any], exclude: Exclusion) -> None:
        if not exclude.has("step"):
            step, tokens = counters["step"], counters["tokens_seen"]
            if type(step) is not int or type(tokens) is not int:
                raise TypeError(f"step {step!r}, tokens_seen {tokens!r}")
            version = counters.get("version", step)
            if type(version) is not int:
                raise TypeError(f"version {version!r}")
            self.step, self.tokens_seen = step, tokens
            self.version = max(self.version, version)
        if self.guard is not None and "guard" in counters and not exclude.has("guard"):
            self.guard.load_state(counters["guard"])

    def _has_new_weights(self, version: int) -> None:
        self.version = version
        self._forget_gradients()

    # ----------------------------------------------------------------------------------------- weights

    def weights(self) -> Iterator[NamedTensor]:
        """Hugging Face names and whole tensors, one at a time; the tensor on rank 0, None elsewhere. Adapters
        are merged into their base.

        They have the dtype of the parameters (`training.dtype`, fp32 unless said) and lie on the engine's
        device; one is good until the next is asked for. Collective: every rank must run it to its end.

        Raises:
            TitanError: the model's component declares no Hugging Face form.
        """
        self.ready("weights")
        call = self.call("weights")
        with call.agreed():
            form = self._form()
        wholes = self.whole_tensors()
        parameters = iter(wholes if self.adapters is None else self.adapters.merged(wholes))
        while True:
            with call.shared():
                parameter = next(parameters, None)
            if parameter is None:
                return
            for hf_name, value in form.to_hf(*parameter):
                yield hf_name, value if dist.get_rank() == 0 else None

    def push_weights(self, target: Target) -> int:
        """Hand all weights to something that samples, scores or stores them. Collective.

        Args:
            target: has `load_weights(iterator)`, or is called with each `(name, tensor)`; on rank 0 alone, in
                the order and the form of `weights()`. It must copy what it keeps.

        Returns:
            The version that the target has now (see `Status`).

        Raises:
            TitanError: as `weights`; or the target raised on rank 0, told on every rank (on rank 0 it is the
                target's own error).
        """
        self.ready("push_weights")
        call = self.call("push_weights")
        with call.agreed():
            self._form()
        with call.shared():
            push(self.weights(), target)
        return self.version

    @alone
    def load_weights(self, weights: Iterable[NamedTensor] | None) -> None:
        """Take weights under Hugging Face names, such as another engine's `weights()`. Collective.

        Rank 0's tensors are taken, cast to the parameters' dtype and cut for every rank, one at a time; what
        other ranks give is run through to keep pace, and may be None. The optimizer's state stays, and
        accumulated gradients are forgotten. What Hugging Face has no name for (a balancing bias) stays.

        Raises:
            TitanError: a name is unknown, missing or comes twice, or a shape is wrong: all are reported, on
                every rank, at the end. Weights that fit have been taken by then, and the engine is unusable
                until weights are loaded again. Or the model declares no Hugging Face form, or has adapters
                (which `weights` merges).
        """
        self.ready("load_weights", mends="weights")
        if self.adapters is not None:
            raise TitanError(
                "load_weights: this engine has adapters beside its base, and whole weights are neither",
                hint="build an engine without them, or load a checkpoint of theirs",
            )
        before, call = self.version, self.call("load_weights")
        with call.agreed():
            form = self._form()
        with call.shared():
            take_weights(
                self, form, weights, lambda: self.spoil("load_weights has failed half way", "weights")
            )
        self._has_new_weights(before + 1)
        for converter in self.converters:
            for part in self.parts:
                converter.after_step(part)
        self.unusable = None

    def _form(self) -> HFForm:
        if self.hf_form is None:
            raise TitanError("this model declares no Hugging Face form, so its weights have no names there")
        return self.hf_form

    # --------------------------------------------------------------------------------------------- end

    def close(self) -> None:
        """Free the model and the optimizer, and end the process group if `Engine.build` made it and no other
        engine uses it. A second call does nothing; any other verb is refused from now on."""
        if self.busy == CLOSED:
            return
        self.busy = CLOSED
        self.parts, self.optimizer, self._weight, self._loss = [], None, None, None
        self.watched = None
        self.runner = None  # type: ignore[assignment]
        self._ends.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: Any, error: Any, trace: Any) -> None:
        if error is not None and dist.is_initialized() and dist.get_world_size() > 1:
            # Other ranks may be in a collective that this one has left: to end the group would wait for them.
            self._ends.pop_all()
        self.close()


CLOSED = "is closed"


def token_counts(part: Any) -> dict[str, Tensor]:
    """How many tokens each expert had, by layer, where a model has experts that it balances."""
    return part.token_counts() if hasattr(part, "token_counts") else {}
