"""The engine, whose verbs are all collective: every rank calls each, in the same order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack, overload

import torch
import torch.distributed as dist
from torch import Tensor

from titancli.checkpoint import save_checkpoint
from titancli.checkpoint.exclude import NOTHING, Exclusion
from titancli.distributed import process_group
from titancli.engine import checkpoints, exchange, recipes, samples
from titancli.engine.copies import Form, export, own_lock, snapshot
from titancli.engine.core import EngineCore
from titancli.engine.inputs import Given, Logits, LogProbs, Values, checked
from titancli.engine.opening import opened, take_over
from titancli.engine.optimizer_state import set_rates
from titancli.engine.samples import How, are_samples, as_list, refuse_how
from titancli.engine.sampling import refuse_layout, sampled, whole_model
from titancli.engine.status import EngineSettings, Watched
from titancli.engine.step import Hooks, Metrics
from titancli.engine.sums import nan_if_invalid, quotient, summed
from titancli.engine.training import accumulating, apply, refuse_another
from titancli.engine.weights import NamedTensor, Target, push
from titancli.errors import TitanError
from titancli.observe.phases import phase
from titancli.protocols.samples import Completion, SamplingParams

if TYPE_CHECKING:
    from titancli.checkpoint.format.manifest import Verify
    from titancli.protocols import Tokenizer
    from titancli.protocols.result import Result
    from titancli.protocols.samples import Sample
    from titancli.recipe.schema import Recipe

__all__ = ["Engine", "EngineSettings", "Metrics"]


class Engine(EngineCore):
    """A sharded model, its optimizer, and the verbs that work on them.

    Create it by `build`, `frozen` or `of`; `close` it, or use it as a context manager. An engine without an
    optimizer is frozen: it can compute, save, load and send weights, but not train. Batches are those of this
    data-parallel rank: the ranks of tp, cp and pp must pass the same ones (see `titancli.Batch`).
    """

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

        It runs in the initialized process group; otherwise in a new one, of the ranks started by torchrun or
        of this process alone, which is destroyed when its last engine is closed. It uses the parts of the
        recipe for model, layout and optimization, and in a new group also the time limits of `comm`; data,
        loggers, loop, launcher and `env` belong to a run.

        Args:
            recipe: a path, a bundled name such as `"llama3_debug"`; a run folder (its newest good
                checkpoint) or a checkpoint, for the recipe and the weights; or a Recipe. (A Recipe with
                `checkpoint.initial_load_model_only = false` is built with new initial values: `load` the
                checkpoint.)
            overrides: as on the command line: `["optimizer.lr=1e-4", "mesh.tp=2"]`.
            device: None: this rank's GPU, or the CPU if there is none.
            frozen: build it without an optimizer.
            checkpoint: a checkpoint of a run of this recipe that is loaded next: its contents are not read
                from `weights` first, and the engine is unusable until it is loaded.

        Raises:
            RecipeError: lists all problems of the recipe, also with these ranks.
            EnvironmentProblem: weights are missing or damaged, or the ranks cannot connect.
            TitanError: the weights do not fit the model.
        """
        chosen = process_group.join(device, recipes.JOIN_SECONDS)
        try:
            engine, found = opened(
                cls, lambda: recipes.recipe_from(recipe, overrides), chosen, frozen, checkpoint
            )
            if found is not recipe and not frozen:
                take_over(engine, found)
            return engine
        finally:
            process_group.leave()  # destroys the group unless an engine uses it

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
            UsageError: a part does not exist, or is of another kind.
            TitanError: as for `build`.
        """
        chosen = process_group.join(device, recipes.JOIN_SECONDS)
        try:
            engine, _ = opened(cls, lambda: (recipes.recipe_of(model, parts, chosen), None), chosen, frozen)
            if "training" not in parts:  # no part sets the length of rows
                engine.settings = replace(engine.settings, limits=engine.settings.limits.of_model())
            return engine
        finally:
            process_group.leave()

    def snapshot(self) -> Self:
        """Return a frozen engine with the same layout and a copy of the current weights, to compare later
        weights with. The caller closes it. Collective."""
        return snapshot(self)

    # ------------------------------------------------------------------------------------------- state

    @property
    def model(self) -> Any:
        """The whole model.

        Raises:
            TitanError: it is split into pipeline stages.
        """
        self._usable("model")
        if self.mesh.degrees.pp > 1:
            raise TitanError("this rank has only some stages of the model: mesh.pp is not 1")
        return self.parts[0]

    # ----------------------------------------------------------------------------------------- forward

    @overload
    def forward(
        self,
        batch: Given,
        *,
        return_logits: bool = False,
        return_values: bool = False,
        temperature: float = 1.0,
    ) -> Tensor: ...
    @overload
    def forward(
        self,
        batch: Sequence[Sample],
        *,
        return_values: bool = False,
        temperature: float = 1.0,
        budget: int | None = None,
        shared: bool = True,
    ) -> list[Tensor]: ...
    def forward(
        self,
        batch: Any,
        *,
        return_logits: bool = False,
        return_values: bool = False,
        temperature: float = 1.0,
        budget: int | None = None,
        shared: bool = True,
    ) -> Tensor | list[Tensor]:
        """Return log p(targets), [B, S] fp32 in nats, 0 where there is no target; without gradients or
        dropout. For a list of samples, return log p of each one's tokens, [tokens], 0 where the mask is
        0; see `forward_backward`. Logits are divided by `temperature` before.

        With `return_logits`, return the model's raw output, [B, S, V] in the compute dtype, for which the
        batch needs no targets; whole on every rank, which takes the corresponding memory. The result is the
        same on all tp, cp and pp ranks. With `return_values`, return what the loss of the recipe computes for
        each target instead (`titancli.protocols.LossDefaults.values`), such as the values of a critic.

        Raises:
            TitanError: the batch lacks tokens or targets, or their shapes or dtypes are wrong; or the loss
                has no values, or logits are asked for beside them.
        """
        given, how = as_list(batch), How(budget, shared)

        def loss_to_call() -> Any:
            if return_logits and return_values:
                raise TitanError("forward returns logits or values, not both", hint="call it twice")
            if return_values:
                return Values(self.loss, temperature)
            return Logits() if return_logits else LogProbs(temperature)

        if are_samples(given, how) and not return_logits:
            return samples.forward(self, given, how, loss_to_call)
        refuse_how(how)
        with self._verb("forward") as call:
            with call.agreed():
                loss = loss_to_call()
                (own,), poison, _ = self._checked_batches([given], loss)
                call.given_batches([own])
                call.given(f"with return_logits={return_logits} and temperature={temperature}")
                call.given(f"with return_values={return_values}")
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
                loss, own, poison = self._checked_call(call, batches, loss)
            with phase("evaluation"), self._no_gradients("evaluate"), call.shared():
                for batch in own:
                    result = checked(self.runner.forward(batch.to(self.device), loss), loss)
                    numbers = {"loss": result.sum, "weight": result.weight, **result.metrics}
                    for name, value in numbers.items():
                        sums[name] = sums.get(name, 0.0) + value.float()
                totals = summed(nan_if_invalid(call.in_order(sums), poison), self.mesh.dp_group)
            weight = totals.pop("weight")
            averages = {name: quotient(value, weight) for name, value in totals.items()}
            return {**averages, "weight": weight}

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        n: int = 1,
        params: SamplingParams | None = None,
        *,
        seeds: Sequence[Sequence[int]] | None = None,
        limits: Sequence[int] | None = None,
        tokenizer: Tokenizer | None = None,
        batch_size: int = 256,
    ) -> list[list[Completion]]:
        """Continue this data-parallel rank's prompts (token ids), each n times; a rank may have none.

        A completion depends only on the seed, the prompt and its number, not on other completions.

        Args:
            params: None: `SamplingParams()`.
            seeds: the seed of each completion of each prompt; replaces n and `params.seed`.
            limits: maximum new tokens of each prompt, if less than `params.max_tokens`.
            tokenizer: None: that of the recipe, if any.
            batch_size: completions that a rank generates together.

        Raises:
            TitanError: as for `sampling`; a prompt, named by its index, is empty, too long, or has ids that
                the model does not have; the model returns numbers that are not finite.
        """
        how: dict[str, Any] = {"seeds": seeds, "limits": limits, "tokenizer": tokenizer}
        return sampled(self, prompts, n, params or SamplingParams(), **how, batch_size=batch_size)

    @contextmanager
    def sampling(self) -> Iterator[Any]:
        """Gather the module under training to sample from it; its blocks run without compilation.

            with engine.sampling() as model:
                titancli.rl.decode.decode(model, prompts, rows, ...)

        In the block, ranks need not stay in step, and the engine's verbs are rejected; afterwards training
        continues bit for bit. Gathering copies all weights to each rank, in the compute dtype.

        Raises:
            TitanError: with mesh.pp above 1, or a model without `new_cache`.
        """
        self.ready("sampling")
        call = self.call("sampling")
        with call.agreed():
            refuse_layout(self.parts[0], self.mesh.degrees)
        with torch.no_grad(), whole_model(self) as model:
            self.busy = "is in use by `with engine.sampling()`; leave that block first"
            try:
                yield model
            finally:
                self.busy = None

    # ---------------------------------------------------------------------------------------- training

    @overload
    def forward_backward(self, batches: Given, loss: Any = None) -> Metrics: ...
    @overload
    def forward_backward(
        self, batches: Sequence[Sample], loss: Any = None, *, budget: int | None = None, shared: bool = True
    ) -> Result: ...
    @overload
    def forward_backward(self, batches: Sequence[Given], loss: Any = None) -> Metrics: ...
    def forward_backward(
        self, batches: Any, loss: Any = None, *, budget: int | None = None, shared: bool = True
    ) -> Metrics | Result:
        """Add the gradients of the loss over one batch, over several batches as micro-batches of one
        reduction, or over a list of `titancli.Sample`.

        Samples are shifted, packed into rows and micro-batches, and dealt to the data-parallel ranks; a rank
        without any computes rows without targets.

        It may be called any number of times before `optim_step`, which divides once by the total weight; so
        the distribution over calls, ranks and micro-batches does not change the step. (A model with router
        losses, `model.moe.aux_loss_coeff` or `z_loss_coeff`, takes one call per step: they are means over all
        tokens of the step.) Random numbers of a step follow from the seed, the step and the data-parallel
        rank; the generators of the process are not changed.

        Args:
            loss: the name or config of a loss component, or an object or a function called with (out, batch)
                that returns a LossResult. `out` is log p(targets), [B, S] fp32, or with an attribute `output
                = "model"` the logits [B, S, V]. With samples, a function without such an attribute is called
                once, with the log-probabilities [tokens] of all samples of the call and the samples. None:
                the loss of the recipe.
            budget: of samples: tokens of a micro-batch, all of which then have the same shape; None: at most
                training.local_batch_size x seq_len, as few as the samples need.
            shared: of samples: all ranks pass the same list; else each data-parallel rank its own, which may
                be empty.

        Returns:
            `loss` (the average over all ranks), `loss_max` (the maximum over ranks), `tokens` (input tokens
                over all ranks, without padding), `targets` (how many of them are targets), `padding` (the
                other positions), and the metrics of the loss, each divided by the weight. For samples a
                `Result` with these metrics, and the log-probabilities of the samples that were passed here.

        Raises:
            TitanError: the engine is frozen or closed; a batch or sample lacks something; the loss returned
                something other than a LossResult, or one without gradient; or it is the second call of a step
                and the model has router losses. Errors of the loss are passed on, after the gradients of the
                step so far are discarded.
        """
        given, how = as_list(batches), How(budget, shared)
        if are_samples(given, how):
            return samples.forward_backward(self, given, loss, how)
        refuse_how(how)
        with self._verb("forward_backward") as call:
            self._trained("forward_backward")
            with call.agreed():
                refuse_another(self)
                loss, own, poison = self._checked_call(call, given, loss)
                placed = [batch.to(self.device) for batch in own]
            with accumulating(self, call, placed, loss, poison) as added:
                added.sums = self.runner.forward_backward(placed, loss)
            return added.metrics

    def optim_step(self, lr: float | None = None) -> Metrics:
        """Divide the gradients by the total weight of the loss, clip them, step, and advance the
        schedule.

        If the guard rejects the step, or it had no target (the weight is not above 0), weights and optimizer
        state stay unchanged; everything else continues as after any other step.

        Args:
            lr: the learning rate of this step, instead of the recipe's peak times its schedule (None).
                Parameter groups with another peak (AdamW beside Muon) keep their ratio to it.

        Returns:
            `grad_norm` (before clipping), `lr`, `version` (see `Status`) and `skipped_steps` of the run so
                far.

        Raises:
            TitanError: there are no gradients since the last step, the engine is frozen or closed, or the
                learning rate is not a finite number of at least 0. In a script also after
                `stability.max_skips` skipped steps in a row (on a GPU two steps later); the weights are those
                before these steps, and as many may be skipped again. Any other error in the middle is passed
                on; the engine is then unusable until `load`.
        """
        with self._verb("optim_step") as call:
            optimizer = self._trained("optim_step")
            with call.agreed():
                step = self.pending
                if step is None:
                    raise TitanError("optim_step without gradients", hint="call forward_backward first")
                trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
                if trained and all(parameter.grad is None for parameter in trained):
                    raise TitanError(
                        "optim_step: the gradients of forward_backward were removed from the parameters",
                        hint="call engine.clear_gradients() to start over; optim_step clears them itself",
                    )
                factor = self.settings.lr_factor(self.step) if lr is None else 1.0
                rate = set_rates(optimizer, lr, factor)
                step.lr, step.lr_given = rate, lr
                # To 9 digits: cos may round its last bit differently on another machine.
                call.given(f"with the schedule at {factor:.9g}" if lr is None else f"with lr={rate!r}")
            try:
                reported = apply(self, call, optimizer, step)
            except BaseException:
                self.mark_unusable("optim_step raised an error after it had started")
                raise
            if self.guard is not None:
                self.guard.check()
            return {"grad_norm": step.norm, "lr": rate, "version": self.version, **reported}

    def clear_gradients(self) -> None:
        """Discard the gradients added by `forward_backward` since the last step.

        Raises:
            TitanError: the engine is frozen or closed.
        """
        with self._verb("clear_gradients"):
            self._trained("clear_gradients")
            self._forget_gradients()

    # ------------------------------------------------------------------------------------- checkpoints

    def save_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the complete state for a resume: the live sharded tensors by name, and counters as plain
        JSON."""
        self.ready("save_state")
        return self.live_state()

    def live_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the state of an engine, even an unusable one, to load into it."""
        return checkpoints.live_state(self)

    def save(self, folder: str | Path, *, lock_text: str | None = None, run_id: str = "") -> None:
        """Save a checkpoint of this engine, complete or not at all: safetensors and JSON. Collective.

        Accumulated gradients are not part of it. An older checkpoint with the same name is replaced.

        Args:
            folder: the path; a last part such as `step-100` gives the step.
            lock_text: the resolved recipe to store with it; None: the engine's own.
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
                    lock_text=own_lock(self) if lock_text is None else lock_text,
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
        return checkpoints.load(self, Path(folder), optimizer=optimizer, verify=verify, exclude=exclude)

    def export(self, folder: str | Path, form: Form = "hf", dtype: str | None = None) -> None:
        """Export the weights as a folder that transformers, or peft, loads as it is. Collective.

        Args:
            folder: a new folder on a disk shared by all ranks, with room for two copies.
            form: "hf" for the whole model, adapters merged; "peft" for the adapters alone.
            dtype: "float32", "bfloat16" or "float16"; None keeps that of the parameters.

        Raises:
            TitanError: the folder is not empty, or the model or its adapters have no such form.
        """
        export(self, Path(folder), form, dtype)

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
        return exchange.weights(self)

    def push_weights(self, target: Target) -> int:
        """Send all weights to a target that samples from, scores with or stores them. Collective.

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
            exchange.hf_form(self)
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
            TitanError: names are unknown, missing or duplicate, or shapes are wrong: lists all, on every
                rank, at the end. The other weights are loaded by then, and the engine is unusable until
                weights are loaded again. Or the model has no Hugging Face form, or has adapters (which
                `weights` merges).
        """
        exchange.load_weights(self, weights)

    # --------------------------------------------------------------------------------------------- end

    def close(self) -> None:
        """Free the model and the optimizer, and destroy the process group if `Engine.build` created it
        and no other engine uses it. A second call does nothing; any other verb is rejected from then on."""
        if self.busy == CLOSED:
            return
        self.busy = CLOSED
        self.parts, self.optimizer, self.pending, self.hooks = [], None, None, Hooks()
        self.watched = Watched([])
        self.runner = None  # type: ignore[assignment]
        self._ends.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: Any, error: Any, trace: Any) -> None:
        if error is not None and dist.is_initialized() and dist.get_world_size() > 1:
            # Others may be in a collective that this rank has left; destroying the group would wait for them.
            self._ends.pop_all()
        self.close()


CLOSED = "is closed"
