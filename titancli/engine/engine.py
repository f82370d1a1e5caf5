"""The engine. All its verbs are collective: every rank calls each, in the same order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titancli.checkpoint import load_checkpoint, save_checkpoint
from titancli.checkpoint.exclude import NOTHING, Exclusion
from titancli.checkpoint.format.manifest import DamagedCheckpoint, names_and_sizes
from titancli.checkpoint.hf.kept import kept_of
from titancli.checkpoint.hf.likeness import refuse_other_model
from titancli.checkpoint.load import on_every_rank
from titancli.checkpoint.start_from import start_from
from titancli.distributed import process_group
from titancli.distributed.private import forget_iteration
from titancli.engine import recipes
from titancli.engine.agreement import Call
from titancli.engine.build import build_engine
from titancli.engine.digest import Digests, row_hashes
from titancli.engine.experts import hold_biases, move_biases
from titancli.engine.grad_clip import norm_and_scale
from titancli.engine.inputs import (
    Given,
    Logits,
    LogProbs,
    batches_of,
    checked,
    checked_batches,
    loss_of,
    name_of,
    tokens_of,
)
from titancli.engine.optimizer_state import counters_of, optimizer_tensors, set_rates
from titancli.engine.ranks import RankGroup, rank_group
from titancli.engine.recheck import Recheck
from titancli.engine.rng import Stream
from titancli.engine.runners import Runner, largest, marked, quotient, summed
from titancli.engine.sampling import gathered, not_training, refuse_layout
from titancli.engine.skip_step import Guard, step_with
from titancli.engine.status import (
    Accumulated,
    EngineSettings,
    MendedBy,
    Status,
    Turn,
    Unusable,
    Watched,
    refuse_modes,
)
from titancli.engine.weights import (
    Intake,
    Known,
    NamedTensor,
    Target,
    adapters_of,
    all_known,
    base_parameters,
    plain_parameters,
    push,
    saved_parameters,
    take_weights,
    told_adapters,
    weights_changed,
    whole_tensors,
)
from titancli.errors import TitanError
from titancli.observe.phases import phase
from titancli.parallel.fsdp import reshard
from titancli.process import determinism
from titancli.protocols import LossDefaults, ModelDefaults
from titancli.registry.defaults import with_defaults

if TYPE_CHECKING:
    from titancli.checkpoint.format.manifest import Verify
    from titancli.data.batch import Batch
    from titancli.distributed.mesh import Mesh
    from titancli.parallel.pipeline import Placement
    from titancli.protocols import Converter, HFForm, Loss
    from titancli.recipe.schema import Recipe

__all__ = ["Engine", "EngineSettings", "Metrics"]

Metrics = dict[str, Any]
"""Names to scalars on the device (or plain numbers). Nothing is read to the host until a logger reads it."""


@dataclass(eq=False)
class Engine:
    """A sharded model, its optimizer, and the verbs that work on them.

    Created by `build`, `frozen` or `of`; `close` it, or use it as a context manager. An engine without an
    optimizer is frozen: it can compute, save, load and send weights, but cannot be trained. Batches are
    those of this data-parallel rank: the ranks of tp, cp and pp must pass the same ones (see
    `titancli.Batch`).
    """

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
    digests: Digests | None = None
    """Where the digest of each step goes; None: nowhere."""
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
    ranks: RankGroup = field(default_factory=rank_group, repr=False)
    """Those of the process group that this engine was built in."""
    number: int = field(init=False)
    """Which of the group's engines it is, the same on every rank."""
    unusable: Unusable | None = None
    """Why no verb but `load` may be called any more, if so."""
    adapters_from: Path | None = None
    """A checkpoint of adapters that is to be loaded before any verb is called."""
    watched: Watched = field(init=False, repr=False)
    """The parameters that it was built with."""
    turn: Turn = field(default_factory=Turn, repr=False)
    """Whether a verb is running."""
    _accumulated: Accumulated | None = field(default=None, repr=False)
    _given: tuple[Any, Any] | None = field(default=None, repr=False)
    """The loss that was given last, and what was made of it."""
    _ends: ExitStack = field(default_factory=ExitStack, repr=False)
    """What `close` undoes."""

    def __post_init__(self) -> None:
        self.number = self.ranks.enlist()
        self.watched = Watched(self.parts)

    # ---------------------------------------------------------------------------------------- building

    @classmethod
    def build(
        cls,
        recipe: Recipe | str | Path,
        overrides: Sequence[str] = (),
        *,
        device: torch.device | str | None = None,
        frozen: bool = False,
        checkpoint: Path | None = None,
    ) -> Engine:
        """Build the engine of a recipe, with new initial weights or those that the recipe names.

        It runs in the process group that is initialized; else in one of the ranks that torchrun has started;
        else in one of this process alone. A group that was created here is destroyed with the last engine
        that is closed. It uses the parts of the recipe that concern model, layout and optimization, and in a
        group created here also the time limits of `comm`; data, loggers, loop, launcher and `env` belong to
        a run.

        Args:
            recipe: a path, a bundled name such as `"llama3_debug"`; a run folder (its newest good
                checkpoint) or a checkpoint, for the recipe and the weights; or a Recipe. (A Recipe with
                `checkpoint.initial_load_model_only = false` is built with new initial values: `load` the
                checkpoint.)
            overrides: as on the command line: `["optimizer.lr=1e-4", "mesh.tp=2"]`.
            device: None: this rank's GPU, or the CPU if there is none.
            frozen: build it without an optimizer.
            checkpoint: of a run of this recipe, to be loaded next: what it contains is not read from
                `weights` first, and until it is loaded the engine is unusable.

        Raises:
            RecipeError: everything that is wrong with the recipe or does not fit the ranks.
            EnvironmentProblem: weights are missing or damaged, or the ranks cannot connect.
            TitanError: the weights do not fit the model.
        """
        chosen = process_group.join(device, recipes.JOIN_SECONDS)
        try:
            engine, found = cls._built(
                lambda: recipes.recipe_from(recipe, overrides), chosen, frozen, checkpoint
            )
            if found is not recipe and not frozen:
                engine._take_over(found)
            return engine
        finally:
            process_group.leave()  # nothing is ended where an engine stands now

    @classmethod
    def frozen(
        cls,
        recipe: Recipe | str | Path,
        overrides: Sequence[str] = (),
        *,
        device: torch.device | str | None = None,
    ) -> Engine:
        """Build the engine without an optimizer, for forward passes only: a reference model or a scorer."""
        return cls.build(recipe, overrides, device=device, frozen=True)

    @classmethod
    def of(
        cls,
        model: Any,
        *,
        device: torch.device | str | None = None,
        frozen: bool = False,
        **parts: Unpack[recipes.Parts],
    ) -> Engine:
        """Build an engine from a model's config and other parts.

        `Engine.of(Llama3(dim=256, n_layers=4, ...), optimizer=AdamW(lr=1e-3), mesh=Mesh(tp=2))`. Parts are
        configs of components (`optimizer`, `loss`, `converters`, `parallelize`) and sections of a recipe
        (`training`, `lr_scheduler`, `mesh`, …; `titancli.recipe.schema`), and `weights`, a path. Everything
        else has the defaults of a recipe, with three exceptions: without `lr_scheduler` the learning rate is
        constant, without `activation_checkpoint` nothing is recomputed, and on a CPU
        `training.mixed_precision_param` is float32.

        Raises:
            UsageError: a part that does not exist or is of another kind.
            TitanError: as for `build`.
        """
        chosen = process_group.join(device, recipes.JOIN_SECONDS)
        try:
            engine, _ = cls._built(lambda: (recipes.recipe_of(model, parts, chosen), None), chosen, frozen)
            if "training" not in parts:  # nobody has said how long rows are
                engine.settings = replace(engine.settings, limits=engine.settings.limits.of_model())
            return engine
        finally:
            process_group.leave()

    @classmethod
    def _built(
        cls,
        recipe_here: Callable[[], tuple[Recipe, Path | None]],
        device: torch.device,
        frozen: bool,
        checkpoint: Path | None = None,
    ) -> tuple[Engine, Recipe]:
        """The engine, and its recipe as it was read here: all ranks must have read the same."""
        call = recipes.call()
        with call.shared():
            found, run = recipe_here()
        with call.agreed():
            recipes.compare(call, found, frozen, checkpoint)
        recipe = recipes.weights_alone(found) if frozen else found
        with ExitStack() as ends, call.shared():
            if recipe.debug.deterministic:
                ends.enter_context(determinism(recipe.debug.deterministic))
            recipes.limit(recipe.comm)
            damaged: dict[Path, str] = {}
            while True:
                try:
                    engine = build_engine(cls, recipe, device=device, frozen=frozen, checkpoint=checkpoint)
                    break
                except DamagedCheckpoint as error:  # found on the way into the tensors
                    if run is None or error.folder != recipe.weights:
                        raise
                    damaged[error.folder] = error.why
                    verify = names_and_sizes(recipe.checkpoint.verify)
                    recipe = replace(
                        recipe, weights=recipes.checkpoint_of(run, verify=verify, damaged=damaged)
                    )
            process_group.enlist(engine)
            ends.callback(process_group.leave, engine)
            if engine.adapters_from is not None:
                adapters = run or engine.adapters_from
                engine.load(adapters, optimizer=False, verify=recipe.checkpoint.verify)
            engine._ends = ends.pop_all()
        return engine, found

    def _take_over(self, recipe: Recipe) -> None:
        """Load all of the state of the checkpoint that the recipe names, where it says so."""
        start = start_from(recipe)
        if start.kind == "state":

            def look() -> Exclusion:
                refuse_other_model(recipe, start.folder)
                return start.exclusion

            self.load(start.folder, exclude=on_every_rank(f"reading {start.folder}", look))

    # ------------------------------------------------------------------------------------------- state

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
            accumulated=0 if self._accumulated is None else self._accumulated.batches,
            tokens_seen=self.tokens_seen,
        )

    def ready(self, verb: str, mends: MendedBy | None = None) -> None:
        """Check that a verb can be called.

        Args:
            mends: what the verb does for an engine that is unusable, if anything.

        Raises:
            TitanError: the engine is closed, in the middle of `sampling` or another verb, or unusable; its
                ranks have lost contact; or a script has replaced or unfrozen parameters of the model.
        """
        self._usable(verb, mends)
        refuse_modes(verb, self.device)
        self.turn.require(verb)
        self.watched.check(verb, self.parts, self.optimizer)

    def _usable(self, verb: str, mends: MendedBy | None = None) -> None:
        if self.busy is not None:
            raise TitanError(f"{verb}: the engine {self.busy}")
        self.ranks.require(verb)
        if self.unusable is not None and not self.unusable.mended_by_this(mends):
            raise self.unusable.error(verb)

    @contextmanager
    def _verb(self, name: str, mends: MendedBy | None = None) -> Iterator[Call]:
        """Run a verb inside the block: one at a time, of all threads, and on every rank; see `ready`."""
        with self.turn.of(name):
            self.ready(name, mends)
            yield self.call(name)

    def call(self, verb: str) -> Call:
        """Begin a verb that every rank calls."""
        return Call(self.ranks, verb, self.number, self.mesh.degrees)

    def spoil(self, why: str, mended_by: MendedBy = "load") -> None:
        """Have each later verb refused: something has raised where nothing can be put back. Of several
        reasons the worst stays, or the first of them."""
        found = Unusable(why, mended_by)
        if self.unusable is None or found.worse_than(self.unusable.mended_by):
            self.unusable = found
            self.version += 1  # weights may have changed

    def _trained(self, verb: str) -> torch.optim.Optimizer:
        """The optimizer.

        Raises:
            TitanError: there is none.
        """
        if self.optimizer is None:
            raise TitanError(f"{verb} on a frozen engine", hint="build the engine with frozen=False")
        return self.optimizer

    # --------------------------------------------------------------------------------------- parameters

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
        return adapters_of(self.converters)

    @contextmanager
    def as_base(self) -> Iterator[None]:
        """Disable the adapters of the model inside the block; only for computing."""
        if self.adapters is None:
            raise TitanError("as_base: this engine has no adapters (such as those of the converter lora)")
        with self.adapters.disabled(self.parts):
            yield

    # ----------------------------------------------------------------------------------------- forward

    def forward(self, batch: Given, *, return_logits: bool = False) -> Tensor:
        """Return log p(targets), [B, S] fp32 in nats, 0 where there is no target; without gradients or
        dropout.

        With `return_logits`, return the model's raw output, [B, S, V] in the compute dtype, for which the
        batch needs no targets; whole on every rank, which takes the corresponding memory. The result is the
        same on all tp, cp and pp ranks.

        Raises:
            TitanError: the batch lacks tokens or targets, or their shapes or dtypes are wrong.
        """
        with self._verb("forward") as call:
            loss = Logits() if return_logits else LogProbs()
            with call.agreed():
                (own,), poison = self._looked_at([batch], loss)
                call.given_batches([own])
                call.given(f"with return_logits={return_logits}")
            with self._no_gradients("forward"), call.shared():
                out: Tensor = self.runner.forward(own.to(self.device), loss)
            return out if poison is None else out + poison.to(out.dtype)

    def evaluate(self, batches: Given | Sequence[Given], loss: Any = None) -> Metrics:
        """Compute the loss over all ranks and batches, without gradients and dropout.

        Args:
            loss: as in `forward_backward`.

        Returns:
            `loss`, the average; `weight`, its divisor; and the metrics of the loss, also divided.
        """
        with self._verb("evaluate") as call:
            sums: dict[str, Any] = {}
            with call.agreed():
                loss, own, poison = self._taken(call, batches, loss)
            with phase("evaluation"), self._no_gradients("evaluate"), call.shared():
                for batch in own:
                    result = checked(self.runner.forward(batch.to(self.device), loss), loss)
                    numbers = {"loss": result.sum, "weight": result.weight, **result.metrics}
                    for name, value in numbers.items():
                        sums[name] = sums.get(name, 0.0) + value.float()
                totals = summed(marked(call.in_order(sums), poison), self.mesh.dp_group)
            weight = totals.pop("weight")
            averages = {name: quotient(value, weight) for name, value in totals.items()}
            return {**averages, "weight": weight}

    @contextmanager
    def sampling(self) -> Iterator[Any]:
        """Gather the module under training, to sample from it, with uncompiled blocks.

            with engine.sampling() as model:
                titancli.rl.decode.decode(model, prompts, rows, ...)

        Inside, ranks do not have to stay in step, and the engine's verbs are rejected; afterwards training
        continues bit for bit. A gathered model is a copy of all weights in the compute dtype.

        Raises:
            TitanError: with mesh.tp, cp, pp or ep above 1, or a model without `new_cache`.
        """
        self.ready("sampling")
        call = self.call("sampling")
        with call.agreed():
            refuse_layout(self.parts[0], self.mesh.degrees)
        model = self.model
        with torch.no_grad(), not_training([model]), gathered(model):
            self.busy = "is in use by `with engine.sampling()`; leave that block first"
            try:
                yield model
            finally:
                self.busy = None

    # ---------------------------------------------------------------------------------------- training

    def forward_backward(self, batches: Given | Sequence[Given], loss: Any = None) -> Metrics:
        """Add the gradients of the loss over one batch, or over several batches as micro-batches of one
        reduction.

        It may be called any number of times before `optim_step`, which divides once by the total weight; so
        the distribution over calls, ranks and micro-batches does not change the step. (A model whose routers
        have losses, `model.moe.aux_loss_coeff` or `z_loss_coeff`, takes one call a step: they are means over
        all of its tokens, which must be known before the first gradient.) Random numbers of a
        step follow from the seed, the step and the data-parallel rank; the generators of the process are not
        changed.

        Args:
            loss: the config of a loss component, or an object or a function called with (out, batch) that
                returns a LossResult. `out` is log p(targets), [B, S] fp32, or with an attribute `output =
                "model"` the logits [B, S, V]. None: the loss of the recipe.

        Returns:
            `loss` (the average over all ranks), `loss_max` (of the worst rank), `tokens` (input tokens over
                all ranks), and the metrics of the loss, each divided by the weight.

        Raises:
            TitanError: the engine is frozen or closed; the batch lacks something; the loss returned
                something other than a LossResult, or one without gradient; or it is the second call of a step
                and the model's routers have losses. Errors of the loss are passed on;
                the gradients of the step so far are then discarded.
        """
        with self._verb("forward_backward") as call:
            optimizer = self._trained("forward_backward")
            with call.agreed():
                if not torch.is_grad_enabled():
                    raise TitanError(
                        "forward_backward under torch.no_grad()", hint="call it outside that block"
                    )
                if self._accumulated is not None:
                    self.runner.router_losses.refuse(
                        "forward_backward for the second time in a step",
                        hint="pass all micro-batches of the step to one call: "
                        "engine.forward_backward([first, second])",
                    )
                loss, own, poison = self._taken(call, batches, loss)
                placed = [batch.to(self.device) for batch in own]
            accumulated, recheck = self._accumulated, None
            if accumulated is None:
                optimizer.zero_grad(set_to_none=True)
                stream = Stream(self.device, self.settings.seed, self.step, self.mesh.dp_rank)
                nothing = torch.zeros((), dtype=torch.float32, device=self.device)
                accumulated = self._accumulated = Accumulated(stream, nothing, nothing, nothing.long())
                recheck = self._rehearse(call, placed, loss, stream.copy())
            accumulated.steady = accumulated.steady and with_defaults(LossDefaults, loss).steady
            # Some micro-batches' gradients may be there by then, and nobody knows which.
            with self._aborted("forward_backward", forget=True), accumulated.stream.drawn(), call.shared():
                with nullcontext() if recheck is None else recheck.recorded():
                    found = self.runner.forward_backward(placed, loss)
                sums = marked(call.in_order(found), poison)
                worst = largest(quotient(sums["loss"], sums["weight"]), self.mesh.dp_group)
                totals = summed(sums, self.mesh.dp_group)
                weight = totals.pop("weight")
                accumulated.weight = accumulated.weight + weight
                accumulated.loss = accumulated.loss + totals["loss"]
                averages = {name: quotient(value, weight) for name, value in totals.items()}
                if self.digests is not None:
                    accumulated.rows += sum(row_hashes(batch).sum() for batch in placed)
            if recheck is not None:
                with self._aborted("forward_backward", forget=True), phase("recheck"):
                    recheck.compare(self.ranks, self.step + 1, self.device)
            accumulated.tokens += call.all_tokens
            accumulated.batches += len(placed)
            return {**averages, "loss_max": worst, "tokens": call.all_tokens}

    def _rehearse(self, call: Call, batches: list[Batch], loss: Any, stream: Stream) -> Recheck | None:
        """The first of two passes, where the step is one that is computed twice; see `Recheck`."""
        every = self.settings.recheck_every
        if not every or (self.step + 1) % every:
            return None
        recheck = Recheck(self.parts, self.placement, compiled=self.settings.compiled)
        aborted = self._aborted("forward_backward", forget=True)
        with aborted, stream.drawn(), call.shared(), phase("recheck"), recheck.rehearsed():
            self.runner.forward_backward(batches, loss)
        return recheck

    def optim_step(self, lr: float | None = None) -> Metrics:
        """Divide the gradients by the total weight of the loss, clip them, step, and advance the
        schedule.

        If the guard rejects the numbers of the step, or no token of it was a target (the weight is not above
        0), weights and optimizer state stay unchanged; everything else continues as after any other step.

        Args:
            lr: the learning rate of this step, instead of the recipe's peak times its schedule (None).
                Parameter groups with another peak (AdamW beside Muon) keep their ratio to it.

        Returns:
            `grad_norm` (before clipping), `lr`, `version` (see `Status`) and `skipped_steps` of the run so
                far.

        Raises:
            TitanError: there are no gradients since the last step, the engine is frozen or closed, or the
                learning rate is not a finite number of at least 0. In a script also after the last of
                `stability.max_skips` skipped steps in a row (on a GPU two steps later, on all ranks alike);
                the weights are those before the skipped steps, and as many may be skipped again. Any other
                error in the middle is passed on; the engine is then unusable until `load`.
        """
        with self._verb("optim_step") as call:
            optimizer = self._trained("optim_step")
            with call.agreed():
                accumulated = self._accumulated
                if accumulated is None:
                    raise TitanError("optim_step without gradients", hint="call forward_backward first")
                trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
                if trained and all(parameter.grad is None for parameter in trained):
                    raise TitanError(
                        "optim_step: the gradients of forward_backward were removed from the parameters",
                        hint="call engine.clear_gradients() to start over; optim_step clears them itself",
                    )
                rate = set_rates(optimizer, lr, self.settings.lr_factor(self.step))
                call.given("with the recipe's rate" if lr is None else f"with lr={rate!r}")
            try:
                with call.shared():
                    norm = self._step(optimizer, accumulated)
            except BaseException:
                self.spoil("optim_step raised an error after it had started")
                raise
            told = {"grad_norm": norm, "lr": rate, "version": self.version}
            if self.guard is None:
                return told
            self.guard.check()
            return told | {"skipped_steps": self.guard.skipped}

    def _step(self, optimizer: torch.optim.Optimizer, accumulated: Accumulated) -> Tensor:
        """Everything that `optim_step` does to the engine; the gradients' norm before clipping."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        wrong = None
        gradients = None if self.digests is None else self.digests.of_gradients(self.step + 1)
        with phase("clip"):
            max_norm, stages = self.settings.max_norm, self.mesh.pp_group
            norm, scale = norm_and_scale(parameters, accumulated.weight, max_norm, stages)
            if self.guard is not None:
                average = quotient(accumulated.loss, accumulated.weight)
                given = (self.step + 1, norm, average, accumulated.weight)
                wrong = self.guard.judge(*given, steady=accumulated.steady)
        with phase("optimizer"), accumulated.stream.drawn():
            step_with(optimizer, scale, wrong)
            move_biases(self.parts, self.mesh.token_groups, wrong)
            weights_changed(self.parts, self.converters)
        if self.digests is not None and gradients is not None:
            average = quotient(accumulated.loss, accumulated.weight)
            self.digests.record(self.step + 1, accumulated.rows, gradients, average, norm, wrong)
        self.step += 1
        self.version += 1
        self.tokens_seen += accumulated.tokens
        self._forget_gradients()
        return norm

    def clear_gradients(self) -> None:
        """Discard the gradients added by `forward_backward` since the last step.

        Raises:
            TitanError: the engine is frozen or closed.
        """
        with self._verb("clear_gradients"):
            self._trained("clear_gradients")
            self._forget_gradients()

    def _forget_gradients(self) -> None:
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        for part in self.parts:
            with_defaults(ModelDefaults, part).forget_token_counts()
        self._accumulated = None

    # ------------------------------------------------------------------------------------- checkpoints

    def save_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return everything that a resume needs: tensors by name (the live ones, sharded), and counters
        as plain JSON."""
        self.ready("save_state")
        return self.live_state()

    def live_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the state of an engine that may be unusable, to load into it."""
        tensors = self._live_tensors(optimizer=True)
        more: dict[str, Any] = {"guard": self.guard.state()} if self.guard else {}
        if self.adapters is not None:
            more["adapters"] = {**self.adapters.facts, "base": self.base}
        counters = {"step": self.step, "version": self.version, "tokens_seen": self.tokens_seen}
        return tensors, {**counters, **more}

    def _live_tensors(self, *, optimizer: bool) -> dict[str, Tensor]:
        saved = saved_parameters(self.parts, self.converters)
        tensors = {f"model.{name}": tensor for name, tensor in saved}
        if optimizer and self.optimizer is not None:
            tensors |= optimizer_tensors(self.optimizer, self.named_parameters())
        return tensors

    def save(self, folder: str | Path, *, lock_text: str = "", run_id: str = "") -> None:
        """Save a checkpoint of this engine, complete or not at all: safetensors and JSON. Collective.

        Accumulated gradients are not part of it. An older checkpoint with the same name is replaced.

        Args:
            folder: the path; a last part such as `step-100` gives the step.
            lock_text: the resolved recipe to store with it (`titancli.recipe.lock_text`).
            run_id: the run that owns the checkpoint; one of another run is never replaced.

        Raises:
            EnvironmentProblem: the disk is full or not writable, on any rank; or the folder belongs to
                another run.
        """
        with self._verb("save") as call:
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

    def load(
        self,
        folder: str | Path,
        *,
        optimizer: bool | None = None,
        verify: Verify = "full",
        exclude: Exclusion = NOTHING,
    ) -> dict[str, Any]:
        """Load a checkpoint of any layout; with optimizer=False only its weights.

        Accumulated gradients are discarded. Collective. If it raises after it has started to replace
        anything, the engine is unusable until a `load` succeeds.

        Args:
            folder: a checkpoint, or a run (its newest good checkpoint).
            optimizer: None: True, or False for a frozen engine.

        Returns:
            The state in the checkpoint that the engine does not own (the position in the data).

        Raises:
            EnvironmentProblem: it is not a checkpoint, is damaged, or lacks the optimizer's state if that is
                needed.
            TitanError: it belongs to another model, or `exclude` matches nothing in it; or the engine is
                frozen and the optimizer's state was requested.
        """
        wanted = self.optimizer is not None if optimizer is None else optimizer
        everything = wanted or self.optimizer is None
        mends: MendedBy | None = "load" if everything else "weights"
        if exclude.patterns:
            mends = None if exclude.may_have_weights else "weights"
        with self.turn.of("load"):
            self.ready("load" if everything else "load(optimizer=False)", mends)
            if wanted:
                self._trained("load(optimizer=True)")
            before, call = self.version, self.call("load")
            with call.agreed():
                call.given(f"of {Path(folder).name}, {'the whole state' if wanted else 'only its weights'}")
            with call.shared():
                state = self._load_newest(Path(folder), optimizer=wanted, verify=verify, exclude=exclude)
            if self.begins_unbalanced:
                self.holds_biases = hold_biases(self.parts, self.device, self.holds_biases)
            self._has_new_weights(max(self.version, before + 1))
            self.unusable = None
            return state

    def _load_newest(self, folder: Path, *, verify: Verify, **how: Any) -> dict[str, Any]:
        """Load a checkpoint, or of a run the newest that turns out to be good: ranks hash what they read."""
        damaged: dict[Path, str] = {}
        while True:
            found = recipes.checkpoint_of(folder, verify=names_and_sizes(verify), damaged=damaged)
            try:
                return self._load_state(found, verify=verify, **how)
            except DamagedCheckpoint as error:
                if error.folder != found or found == folder.absolute():
                    raise
                damaged[found] = error.why

    def _load_state(
        self, folder: Path, *, optimizer: bool, verify: Verify, exclude: Exclusion
    ) -> dict[str, Any]:
        """Fill the engine's tensors from a checkpoint and set its counters; see `load`."""

        def look() -> dict[str, bytes]:
            told_adapters(self.adapters, folder, base=self.base)
            return kept_of(folder)

        kept = on_every_rank(f"reading {folder}", look)
        tensors = self._live_tensors(optimizer=optimizer)

        def begin() -> None:
            self.spoil(f"loading {folder} failed after it had started", "load" if optimizer else "weights")

        state = load_checkpoint(folder, tensors, verify=verify, exclude=exclude, begin=begin)
        weights_changed(self.parts, self.converters)
        if optimizer:
            counters = counters_of(state, folder, self.guard, exclude)
            if counters is not None:
                self.step, self.tokens_seen = counters.step, counters.tokens_seen
                self.version = max(self.version, counters.version)
        self.kept = kept or self.kept
        return state

    def _has_new_weights(self, version: int) -> None:
        self.version = version
        self._forget_gradients()

    # ----------------------------------------------------------------------------------------- weights

    def weights(self) -> Iterator[NamedTensor]:
        """Yield Hugging Face names and whole tensors, one at a time: the tensor on rank 0, None on other
        ranks. Adapters are merged into their base.

        Tensors have the dtype of the parameters (`training.dtype`, fp32 by default) and are on the engine's
        device; a tensor is valid until the next one is requested. Collective: every rank must iterate to the
        end.

        Raises:
            TitanError: the model has no Hugging Face form.
        """
        self.ready("weights")
        call, version = self.call("weights"), self.version
        with call.agreed():
            form = self._form()
        with call.shared():
            mine = dict(self.plain_parameters())
            home = with_defaults(ModelDefaults, self.parts[0]).parameter_device or self.device
            wholes = whole_tensors(mine, self._all_known(mine), self.mesh, home)
        parameters = iter(wholes if self.adapters is None else self.adapters.merged(wholes))
        while True:
            if self.busy is not None:
                raise TitanError(f"weights: the engine {self.busy}")
            if self.version != version and self.turn.verb != "load_weights":  # which may be fed from here
                raise TitanError(
                    f"weights: the weights have changed since the first was sent (version {version}, now "
                    f"{self.version})",
                    hint="call weights() again, and send all of them before the next step",
                )
            with call.shared():
                parameter = next(parameters, None)
            if parameter is None:
                return
            for hf_name, value in form.to_hf(*parameter):
                yield hf_name, value if dist.get_rank() == 0 else None

    def push_weights(self, target: Target) -> int:
        """Send all weights to a target that samples from them, scores with them or stores them.
        Collective.

        Args:
            target: an object with `load_weights(iterator)`, or a function called with each `(name, tensor)`;
                only on rank 0, in the order and form of `weights()`. It must copy what it keeps.

        Returns:
            The version that the target now has (see `Status`).

        Raises:
            TitanError: as for `weights`; or the target raised on rank 0, which is reported on every rank (on
                rank 0 as the target's own error).
        """
        self.ready("push_weights")
        call = self.call("push_weights")
        with call.agreed():
            self._form()
        with call.shared():
            push(self.weights(), target)
        return self.version

    def load_weights(self, weights: Iterable[NamedTensor] | None) -> None:
        """Load weights under Hugging Face names, such as another engine's `weights()`. Collective.

        The tensors of rank 0 are cast to the dtype of the parameters and sharded for every rank, one at a
        time; the iterators of other ranks are only advanced in step, and may be None. The optimizer's state
        is kept, and accumulated gradients are discarded. Weights without a Hugging Face name (a balancing
        bias) are kept.

        Raises:
            TitanError: names are unknown, missing or duplicate, or shapes are wrong: all are reported, on
                every rank, at the end. Weights that fit have been loaded by then, and the engine is unusable
                until weights are loaded again. Or the model has no Hugging Face form, or has adapters (which
                `weights` merges).
        """
        with self._verb("load_weights", mends="weights") as call:
            if self.adapters is not None:
                raise TitanError(
                    "load_weights: this engine has adapters in addition to its base and cannot load whole "
                    "weights",
                    hint="build an engine without adapters, or load a checkpoint of adapters",
                )
            before = self.version
            with call.agreed():
                form = self._form()
            with call.shared():
                own = base_parameters(self.parts, self.converters)
                shapes = {one.name: one.shape for one in self._all_known(own)}

                def begin() -> None:
                    self.spoil("load_weights failed after it had started", "weights")

                intake = Intake(dict(self.plain_parameters()), shapes, form, begin)
                take_weights(intake, weights, self.device)
            self._has_new_weights(before + 1)
            weights_changed(self.parts, self.converters)
            self.unusable = None

    def _all_known(self, tensors: dict[str, Tensor]) -> list[Known]:
        return all_known(tensors.items(), self.parts, self.mesh, self.placement)

    def _form(self) -> HFForm:
        if self.hf_form is None:
            raise TitanError("this model has no Hugging Face form, so its weights have no Hugging Face names")
        return self.hf_form

    # --------------------------------------------------------------------------------------------- end

    def close(self) -> None:
        """Free the model and the optimizer, and destroy the process group if `Engine.build` created it
        and no other engine uses it. A second call does nothing; any other verb is rejected from then on."""
        if self.busy == CLOSED:
            return
        self.busy = CLOSED
        self.parts, self.optimizer, self._accumulated = [], None, None
        self.watched = Watched([])
        self.runner = None  # type: ignore[assignment]
        self._ends.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: Any, error: Any, trace: Any) -> None:
        if error is not None and dist.is_initialized() and dist.get_world_size() > 1:
            # Other ranks may be in a collective that this one has left: to end the group would wait for them.
            self._ends.pop_all()
        self.close()

    # ----------------------------------------------------------------------------------------- helpers

    def _looked_at(self, given: Given | Sequence[Given], loss: Any) -> tuple[list[Batch], Tensor | None]:
        """What was given as batches, checked before anything is exchanged: see `checked_batches`."""
        return checked_batches(batches_of(given), self.parts[0], loss, self.settings.limits, self.device)

    def _taken(
        self, call: Call, given: Given | Sequence[Given], loss: Any
    ) -> tuple[Any, list[Batch], Tensor | None]:
        """The loss, and the batches as `_looked_at` has them."""
        loss = self._loss_of(loss)
        own, poison = self._looked_at(given, loss)
        call.given_batches(own, sum(tokens_of(self.parts[0], batch) for batch in own))
        call.given(f"with the loss {name_of(loss)}")
        return loss, own, poison

    def _loss_of(self, given: Any) -> Any:
        """The loss to use. One that is given again stays the same object: a pipeline asks a new one for the
        names of what it reports."""
        if given is None:
            return self.loss
        if self._given is None or self._given[0] is not given:
            self._given = (given, loss_of(given))
        return self._given[1]

    @contextmanager
    def _no_gradients(self, verb: str) -> Iterator[None]:
        # no_grad, never inference_mode: parameters gathered inside it would poison the next training step.
        stream = Stream(self.device, self.settings.seed, self.step, self.mesh.dp_rank, "no gradients")
        with self._aborted(verb), torch.no_grad(), not_training(self.parts), stream.drawn():
            yield
        for part in self.parts:
            reshard(part)

    @contextmanager
    def _aborted(self, verb: str, *, forget: bool = False) -> Iterator[None]:
        """Where something raises inside, have the parts as they are between two verbs.

        Args:
            forget: the gradients of the step so far, too.
        """
        try:
            yield
        except BaseException:
            if forget:
                self._forget_gradients()
            if self.ranks.lost is None:  # else it would wait for ranks that are gone
                for part in self.parts:
                    forget_iteration(part)
                if self.runner.exchanging:
                    why = f"{verb} raised an error while the ranks of its pipeline were exchanging tensors"
                    self.spoil(why, "nothing")
            raise


CLOSED = "is closed"
