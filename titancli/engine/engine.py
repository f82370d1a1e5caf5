"""The verbs. All are collective: every rank calls each, in the same order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor

from titancli.checkpoint.exclude import Exclusion
from titancli.checkpoint.hf.likeness import refuse_other_model
from titancli.checkpoint.remote.transfer import weights_here
from titancli.distributed import process_group
from titancli.engine import recipes
from titancli.engine.build import build_engine
from titancli.engine.core import Core, token_counts
from titancli.engine.grad_clip import divide_and_clip
from titancli.engine.inputs import (
    Given,
    Logits,
    LogProbs,
    batches_of,
    checked,
    checked_batches,
    loss_of,
    name_of,
)
from titancli.engine.optimizer_state import set_rates
from titancli.engine.rng import Stream
from titancli.engine.runners import Sums, largest, marked, quotient, summed
from titancli.engine.sampling import gathered, not_training, refuse_layout
from titancli.engine.skip_step import step_unless
from titancli.engine.status import EngineSettings, alone
from titancli.errors import TitanError
from titancli.parallel.aborted import forget_iteration
from titancli.parallel.fsdp import reshard
from titancli.process import determinism

if TYPE_CHECKING:
    from titancli.data.batch import Batch
    from titancli.engine.agreement import Call
    from titancli.recipe.schema import Recipe

__all__ = ["Engine", "EngineSettings", "Metrics"]

Metrics = dict[str, Any]
"""Names to scalars on the device (or plain numbers). Nothing is read to the host until a logger reads it."""


class Engine(Core):
    """A sharded model, its optimizer, and what can be done with them.

    Made by `build`, `frozen` or `of`; `close` it, or use it as a context manager. An engine without an
    optimizer is frozen: it computes, saves, loads and hands on weights, and cannot be trained. Batches are
    this data-parallel rank's: ranks of tp, cp and pp give the same one (see `titancli.Batch`).
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
    ) -> Engine:
        """The engine of a recipe, with initial weights or those that it names.

        It runs in the process group that is initialised; else in one of the ranks that torchrun has started;
        else in one of this process alone. A group that was made here ends with the last engine that is
        closed. Of the recipe it takes what concerns model, layout and optimisation, and of a group that was
        made here the time limits of `comm`; data, loggers, loop, launcher and `env` are a run's.

        Args:
            recipe: a path, a bundled name such as `"llama3_debug"`; a run folder (its newest good
                checkpoint) or a checkpoint, for the recipe and the weights; or a Recipe. (A Recipe with
                `checkpoint.initial_load_model_only = false` is built with initial values: `load` it.)
            overrides: as on the command line: `["optimizer.lr=1e-4", "mesh.tp=2"]`.
            device: None: this rank's GPU, or the CPU where there is none.
            frozen: without an optimizer.

        Raises:
            RecipeError: everything that is wrong with the recipe, or does not fit the ranks.
            EnvironmentProblem: weights are missing or damaged, or the ranks cannot meet.
            TitanError: the weights do not fit the model.
        """
        chosen = process_group.join(device, recipes.JOIN_SECONDS)
        try:
            engine, found = cls._built(lambda: recipes.recipe_from(recipe, overrides), chosen, frozen)
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
        """The same without an optimizer, forward only: a reference model, a scorer."""
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
        """The engine of a model's config and what else is given.

        `Engine.of(Llama3(dim=256, n_layers=4, ...), optimizer=AdamW(lr=1e-3), mesh=Mesh(tp=2))`. Parts are
        configs of components (`optimizer`, `loss`, `converters`, `parallelize`) and sections of a recipe
        (`training`, `lr_scheduler`, `mesh`, …; `titancli.recipe.schema`), and `weights`, a path. What is left
        out is as in a recipe, but for three things: without `lr_scheduler` the learning rate is constant,
        without `activation_checkpoint` nothing is recomputed, and on a CPU `training.mixed_precision_param`
        is float32.

        Raises:
            UsageError: a part that there is not, or of another kind.
            TitanError: as `build`.
        """
        chosen = process_group.join(device, recipes.JOIN_SECONDS)
        try:
            engine, _ = cls._built(lambda: recipes.recipe_of(model, parts, chosen), chosen, frozen)
            if "training" not in parts:  # nobody has said how long rows are
                engine.settings = replace(engine.settings, limits=engine.settings.limits.of_model())
            return engine
        finally:
            process_group.leave()

    @classmethod
    def _built(
        cls, recipe_here: Callable[[], Recipe], device: torch.device, frozen: bool
    ) -> tuple[Engine, Recipe]:
        """The engine, and its recipe as it was read here: all ranks must have read the same."""
        call = recipes.call()
        with call.shared():
            found = recipe_here()
        with call.agreed():
            recipes.compare(call, found, frozen)
        recipe = recipes.weights_alone(found) if frozen else found
        with ExitStack() as ends, call.shared():
            if recipe.debug.deterministic:
                ends.enter_context(determinism(recipe.debug.deterministic))
            recipes.limit(recipe.comm)
            engine = build_engine(cls, recipe, device=device, frozen=frozen)
            process_group.enlist(engine)
            ends.callback(process_group.leave, engine)
            engine._ends = ends.pop_all()
        return engine, found

    def _take_over(self, recipe: Recipe) -> None:
        """Load all of the state of the checkpoint that the recipe names, where it says so."""
        if recipe.weights is None or recipe.checkpoint.initial_load_model_only:
            return
        folder = weights_here(recipe.weights)
        refuse_other_model(recipe, folder)
        self.load(folder, exclude=Exclusion.once(recipe.checkpoint.exclude_from_loading, folder))

    # ----------------------------------------------------------------------------------------- forward

    @alone
    def forward(self, batch: Given, *, return_logits: bool = False) -> Tensor:
        """log p(targets), [B, S] fp32 in nats, 0 where there is no target; no gradients, no dropout.

        With `return_logits` the model's raw output, [B, S, V] in the dtype it computes in, for which the
        batch needs no targets; whole on every rank, which takes as much memory as it says.

        The same on all tp, cp and pp ranks.

        Raises:
            TitanError: the batch lacks tokens or targets, or their shapes or dtypes are wrong.
        """
        self.ready("forward")
        call, loss = self.call("forward"), Logits() if return_logits else LogProbs()
        with call.agreed():
            (own,), poison = self._looked_at([batch], loss)
            call.given_batches([own])
            call.given(f"with return_logits={return_logits}")
        with self._no_gradients("forward"), call.shared():
            out: Tensor = self.runner.forward(own.to(self.device), loss)
        return out if poison is None else out + poison.to(out.dtype)

    @alone
    def evaluate(self, batches: Given | Sequence[Given], loss: Any = None) -> Metrics:
        """The loss over all ranks and batches, without gradients and without dropout.

        Args:
            loss: as in `forward_backward`.

        Returns:
            `loss`, the average; `weight`, what it was divided by; and what the loss reports, divided too.
        """
        self.ready("evaluate")
        call, sums = self.call("evaluate"), dict[str, Any]()
        with call.agreed():
            loss, own, poison = self._taken(call, batches, loss)
        with self._no_gradients("evaluate"), call.shared():
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
        """The very module under training, to sample from: parameters gathered once, blocks uncompiled.

            with engine.sampling() as model:
                titancli.rl.decode.decode(model, prompts, rows, ...)

        Inside, ranks need not keep step, and the engine's verbs are refused; afterwards everything is as it
        was, training bit for bit. A gathered model is a copy of all weights in the compute dtype.

        Raises:
            TitanError: with mesh.tp, cp, pp or ep above 1, or a model without `new_cache`.
        """
        self.ready("sampling")
        call = self.call("sampling")
        with call.agreed():
            refuse_layout(self)
        model = self.model
        with torch.no_grad(), not_training([model]), gathered(model):
            self.busy = "is being sampled from: leave `with engine.sampling()` first"
            try:
                yield model
            finally:
                self.busy = None

    # ---------------------------------------------------------------------------------------- training

    @alone
    def forward_backward(self, batches: Given | Sequence[Given], loss: Any = None) -> Metrics:
        """Add the gradients of the loss's sum over one batch, or several as micro-batches of one reduction.

        It may be called any number of times before `optim_step`, which divides once by the weight of all of
        them; so calls, ranks and accumulation do not change the step. Random numbers of a step follow from
        the seed, the step and the data-parallel rank; the process's own generators stay as they are.

        Args:
            loss: the config of a loss component; an object or a function called with (out, batch), which
                returns a LossResult. `out` is log p(targets), [B, S] fp32, or with an attribute
                `output = "model"` the logits [B, S, V]. None: the recipe's.

        Returns:
            `loss` (the average over all ranks), `loss_max` (the worst rank's), `tokens` (input tokens over
            all ranks), and what the loss reports, each divided by the weight.

        Raises:
            TitanError: the engine is frozen or closed; the batch lacks something; the loss made something
                else than a LossResult, or one without gradient. Whatever a loss raises comes through; the
                gradients of the step so far are then forgotten.
        """
        optimizer = self.trained("forward_backward")
        call = self.call("forward_backward")
        with call.agreed():
            if not torch.is_grad_enabled():
                raise TitanError("forward_backward under torch.no_grad()", hint="call it outside")
            loss, own, poison = self._taken(call, batches, loss)
            placed = [batch.to(self.device) for batch in own]
        if self._weight is None:
            self._stream = Stream(self.device, self.settings.seed, self.step, self.mesh.dp_rank)
            optimizer.zero_grad(set_to_none=True)
            self._weight = torch.zeros((), dtype=torch.float32, device=self.device)
            self._loss = torch.zeros_like(self._weight)
        self._steady = self._steady and getattr(loss, "steady", True)
        # Some micro-batches' gradients may be there by then, and nobody knows which.
        with self._aborted("forward_backward", forget=True), self._drawing(), call.shared():
            sums = call.in_order(self.runner.forward_backward(placed, loss))
            metrics = self._reduce_metrics(marked(sums, poison))
        self._step_tokens += call.all_tokens
        self._accumulated += len(placed)
        return {**metrics, "tokens": call.all_tokens}

    def _reduce_metrics(self, sums: Sums) -> Metrics:
        worst = largest(quotient(sums["loss"], sums["weight"]), self.mesh.dp_group)
        totals = summed(sums, self.mesh.dp_group)
        weight = totals.pop("weight")
        self._weight = self._weight + weight  # type: ignore[operator]
        self._loss = self._loss + totals["loss"]  # type: ignore[operator]
        averages = {name: quotient(value, weight) for name, value in totals.items()}
        return {**averages, "loss_max": worst}

    @alone
    def optim_step(self, lr: float | None = None) -> Metrics:
        """Divide the gradients by the loss's total weight, clip, step, and advance the schedule.

        Where the guard finds the step's numbers wrong, weights and the optimizer's state stay as they are;
        all else goes on as after any other step.

        Args:
            lr: the learning rate of this step, in place of the recipe's peak times its schedule (None).
                Groups whose own peak is another (AdamW beside Muon) keep their ratio to it.

        Returns:
            `grad_norm` (before clipping), `lr`, `version` (see `Status`) and, with a guard, `skipped_steps`
            of the run so far.

        Raises:
            TitanError: no gradients have been made since the last step, or the engine is frozen or closed; or
                the learning rate is no finite number of 0 or more. In a script also after the step, where it
                was the last of `stability.max_skips` in a row that were skipped (on a GPU two steps later, on
                all ranks alike); the weights are those before them, and as many may be skipped again.
                Whatever else raises in the middle comes through; the engine is then unusable until `load`.
        """
        optimizer = self.trained("optim_step")
        call = self.call("optim_step")
        with call.agreed():
            if self._weight is None:
                raise TitanError("optim_step without gradients", hint="call forward_backward first")
            trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            if trained and all(parameter.grad is None for parameter in trained):
                raise TitanError(
                    "optim_step: the gradients of forward_backward were taken off the parameters",
                    hint="call engine.clear_gradients() to begin anew; optim_step clears them by itself",
                )
            rate = set_rates(optimizer, lr, self.settings.lr_factor(self.step))
            call.given("with the recipe's rate" if lr is None else f"with lr={rate!r}")
        try:
            with self.inside("optim_step"), call.shared():
                norm = self._step(optimizer, self._weight)
        except BaseException:
            self.spoil("optim_step has raised half way")
            raise
        told = {"grad_norm": norm, "lr": rate, "version": self.version}
        if self.guard is None:
            return told
        self.guard.check()
        return told | {"skipped_steps": self.guard.skipped}

    def _step(self, optimizer: torch.optim.Optimizer, weight: Tensor) -> Tensor:
        """Everything that `optim_step` does to the engine; the gradients' norm before clipping."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norm = divide_and_clip(parameters, weight, self.settings.max_norm, self.mesh.pp_group)
        wrong = self._judge(norm)
        with self._drawing():
            if wrong is None:
                optimizer.step()
            else:
                step_unless(wrong, optimizer)
            self._after_step(wrong)
            for converter in self.converters:
                for part in self.parts:
                    converter.after_step(part)
        self.step += 1
        self.version += 1
        self.tokens_seen += self._step_tokens
        self._forget_gradients()
        return norm

    def _judge(self, norm: Tensor) -> Tensor | None:
        """1.0 where the step must not be applied; None where nobody asks."""
        if self.guard is None or self._loss is None or self._weight is None:
            return None
        average = quotient(self._loss, self._weight)
        return self.guard.judge(self.step + 1, norm, average, steady=self._steady)

    def _after_step(self, wrong: Tensor | None) -> None:
        """Let the model move what moves without gradients, by the tokens that all ranks' experts had."""
        counts = {name: count for part in self.parts for name, count in token_counts(part).items()}
        if not counts:
            return
        total = torch.cat(list(counts.values()))
        for group in self.mesh.token_groups:
            dist.all_reduce(total, group=group)
        if wrong is not None:  # counts of nothing move nothing
            total = torch.where(wrong > 0, torch.zeros_like(total), total)
        sums = dict(zip(counts, total.split([len(count) for count in counts.values()]), strict=True))
        for part in self.parts:
            part.after_step({name: sums[name] for name in token_counts(part)})

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

    def _drawing(self) -> AbstractContextManager[None]:
        """Random numbers of the step; one that has begun goes on with them."""
        return self._stream.drawn()  # type: ignore[union-attr]

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
            with self.inside(verb):
                yield
        except BaseException:
            if forget:
                self._forget_gradients()
            if self.ranks.lost is None:  # else it would wait for ranks that are gone
                for part in self.parts:
                    forget_iteration(part)
                if self.runner.exchanging:
                    why = f"{verb} has raised while its pipeline's ranks were exchanging tensors"
                    self.spoil(why, "nothing")
            raise


def tokens_of(model: Any, batch: Batch) -> int:
    """How long the batch's rows are, in all: one after the other, the inputs that are the model's tokens."""
    names = getattr(model, "token_inputs", ("tokens",))
    return sum(batch.rows * batch[name].shape[model.sequence_dim[name]] for name in names)
