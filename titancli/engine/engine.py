"""The verbs. All are collective: every rank calls each, in the same order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from titancli.checkpoint.exclude import NOTHING, Exclusion
from titancli.data.batch import Batch
from titancli.engine.gradients import divide_and_clip
from titancli.engine.guard import Guard, step_unless
from titancli.engine.runners import Runner, Sums
from titancli.engine.seeds import seed_step
from titancli.engine.state import load_state, optimizer_tensors, whole_tensors
from titancli.errors import TitanError
from titancli.models.blocks.state import named_state

if TYPE_CHECKING:
    from titancli.checkpoint.manifest import Verify
    from titancli.parallel.mesh import Mesh
    from titancli.parallel.pipeline import Placement
    from titancli.recipe.schema import Recipe
    from titancli.registry.kinds import Converter, HFForm, Loss

Metrics = dict[str, Any]
"""Names to scalars on the device (or plain numbers). Nothing is read to the host until a logger reads it."""


@dataclass(frozen=True)
class EngineSettings:
    """What the verbs need to know of a recipe."""

    seed: int
    max_norm: float
    """Gradients are clipped to it; 0: never."""
    accumulation: int
    """Micro-batches in one step, for the loop."""
    lr_factor: Callable[[int], float]
    """What the peak learning rate is multiplied by at a step, counted from 0."""


@dataclass
class Engine:
    """A sharded model, its optimizer, and what can be done with them.

    Built by `Engine.build`. An engine without an optimizer is frozen: `forward` and `evaluate` only.
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
    guard: Guard | None = None
    """Which steps are not applied; None: all are."""
    step: int = 0
    """Optimizer steps done, those that were skipped for their numbers included."""
    tokens_seen: int = 0
    """Input tokens of all steps, over all ranks."""
    _weight: Tensor | None = field(default=None, repr=False)
    _loss: Tensor | None = field(default=None, repr=False)
    """The sum that is to be divided by the weight, of all calls since the last step."""
    _step_tokens: int = 0

    @property
    def model(self) -> Any:
        """The whole model.

        Raises:
            TitanError: it is cut into pipeline stages.
        """
        if self.mesh.degrees.pp > 1:
            raise TitanError("this rank has only some stages of the model: mesh.pp is not 1")
        return self.parts[0]

    @classmethod
    def build(cls, recipe: Recipe, *, device: torch.device | None = None, frozen: bool = False) -> Engine:
        """The engine of a recipe, in the process group that is initialised, with initial or loaded weights.

        Raises:
            TitanError: the recipe does not fit the ranks, or its weights do not fit the model.
        """
        from titancli.engine.build import build_engine

        return build_engine(recipe, device=device, frozen=frozen)

    # ------------------------------------------------------------------------------------------ forward

    def forward(self, batch: Batch) -> Tensor:
        """log p(targets), [B, S] fp32, 0 where there is no target; no gradients."""
        with self._no_gradients():
            return self.runner.forward(batch.to(self.device), _LogProbs())

    def evaluate(self, batches: Batch | Sequence[Batch], loss: Loss | None = None) -> Metrics:
        """The loss over all ranks and batches, without gradients: `loss` and `weight`."""
        total = torch.zeros(2, dtype=torch.float32, device=self.device)
        with self._no_gradients():
            for batch in _listed(batches):
                result = self.runner.forward(batch.to(self.device), loss or self.loss)
                total += torch.stack((result.sum.float(), result.weight.float()))
        dist.all_reduce(total, group=self.mesh.dp_group)
        return {"loss": _quotient(total[0], total[1]), "weight": total[1]}

    # ----------------------------------------------------------------------------------------- training

    def forward_backward(self, batches: Batch | Sequence[Batch], loss: Loss | None = None) -> Metrics:
        """Add the gradients of the loss's sum over one batch, or several as micro-batches of one reduction.

        Returns:
            `loss` (the average over all ranks), `loss_max` (the worst rank's), `tokens`, and what the loss
            reports, each divided by the weight.
        """
        optimizer = self._trained("forward_backward")
        batches = _listed(batches)
        if self._weight is None:
            seed_step(self.settings.seed, self.step, self.mesh.dp_rank)
            optimizer.zero_grad(set_to_none=True)
            self._weight = torch.zeros((), dtype=torch.float32, device=self.device)
            self._loss = torch.zeros_like(self._weight)
        sums = self.runner.forward_backward([batch.to(self.device) for batch in batches], loss or self.loss)
        tokens = sum(tokens_of(self.parts[0], batch) for batch in batches) * self.mesh.degrees.dp
        self._step_tokens += tokens
        return {**self._reduce_metrics(sums), "tokens": tokens}

    def _reduce_metrics(self, sums: Sums) -> Metrics:
        worst = _quotient(sums["loss"], sums["weight"])
        total = torch.stack(list(sums.values()))
        dist.all_reduce(total, group=self.mesh.dp_group)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=self.mesh.dp_group)
        totals = dict(zip(sums, total.unbind(), strict=True))
        weight = totals.pop("weight")
        self._weight = self._weight + weight  # type: ignore[operator]
        self._loss = self._loss + totals["loss"]  # type: ignore[operator]
        averages = {name: _quotient(value, weight) for name, value in totals.items()}
        return {**averages, "loss_max": worst}

    def optim_step(self, lr: float | None = None) -> Metrics:
        """Divide the gradients by the loss's total weight, clip, step, and advance the schedule.

        Where the guard finds the step's numbers wrong, weights and the optimizer's state stay as they are;
        all else goes on as after any other step.

        Args:
            lr: the learning rate of this step; None: the recipe's peak times its schedule.

        Returns:
            `grad_norm` (before clipping), `lr` and, with a guard, `skipped_steps`, of the run so far.

        Raises:
            TitanError: no gradients have been made since the last step.
        """
        optimizer = self._trained("optim_step")
        if self._weight is None:
            raise TitanError("optim_step without gradients", hint="call forward_backward first")
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norm = divide_and_clip(parameters, self._weight, self.settings.max_norm, self.mesh.pp_group)
        factor = self.settings.lr_factor(self.step)
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor if lr is None else lr
        wrong = self._judge(norm)
        if wrong is None:
            optimizer.step()
        else:
            step_unless(wrong, optimizer)
        self._after_step(wrong)
        for converter in self.converters:
            for part in self.parts:
                converter.after_step(part)
        self.step += 1
        self.tokens_seen += self._step_tokens
        self.clear_gradients()
        skipped = {"skipped_steps": self.guard.skipped} if self.guard else {}
        return {"grad_norm": norm, "lr": optimizer.param_groups[0]["lr"], **skipped}

    def _judge(self, norm: Tensor) -> Tensor | None:
        """1.0 where the step must not be applied; None where nobody asks."""
        if self.guard is None or self._loss is None or self._weight is None:
            return None
        return self.guard.judge(self.step + 1, norm, _quotient(self._loss, self._weight))

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

    def clear_gradients(self) -> None:
        """Forget what `forward_backward` has added since the last step."""
        self._trained("clear_gradients").zero_grad(set_to_none=True)
        for part in self.parts:
            if token_counts(part):
                part.forget_token_counts()
        self._weight = self._loss = None
        self._step_tokens = 0

    # -------------------------------------------------------------------------------------------- state

    def save_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything a resume needs: tensors by name (the live ones, sharded), and counters as plain JSON."""
        tensors = {f"model.{name}": tensor for name, tensor in self.plain_parameters()}
        if self.optimizer is not None:
            tensors |= optimizer_tensors(self.optimizer, self.named_parameters())
        guard = {"guard": self.guard.state()} if self.guard else {}
        return tensors, {"step": self.step, "tokens_seen": self.tokens_seen, **guard}

    def save(self, folder: str | Path, *, lock_text: str = "", run_id: str = "") -> None:
        """Write a checkpoint of this engine, whole or not at all.

        Raises:
            EnvironmentProblem: the disk is full or cannot be written, on any rank.
        """
        from titancli.checkpoint import save_checkpoint

        tensors, state = self.save_state()
        save_checkpoint(
            Path(folder),
            tensors,
            {"engine": state},
            lock_text=lock_text,
            run_id=run_id,
            mesh=asdict(self.mesh.degrees),
        )

    def load(
        self,
        folder: str | Path,
        *,
        optimizer: bool = True,
        verify: Verify = "full",
        exclude: Exclusion = NOTHING,
    ) -> dict[str, Any]:
        """Continue from a checkpoint made on any layout; with optimizer=False take its weights alone.

        Returns:
            The checkpoint's state, for what the engine does not own (the data position).

        Raises:
            EnvironmentProblem: it is no checkpoint, is damaged, or lacks the optimizer's state where wanted.
            TitanError: it is of another model, or `exclude` names what it does not hold.
        """
        return load_state(self, Path(folder), optimizer=optimizer, verify=verify, exclude=exclude)

    def weights(self) -> Iterator[tuple[str, Tensor | None]]:
        """Hugging Face names and whole tensors, one at a time; the tensor on rank 0, None elsewhere.

        Collective: every rank must run it to its end.

        Raises:
            TitanError: the model's component declares no Hugging Face form.
        """
        if self.hf_form is None:
            raise TitanError("this model declares no Hugging Face form, so its weights have no names there")
        for name, whole in whole_tensors(self):
            for hf_name, value in self.hf_form.to_hf(name, whole):
                yield hf_name, value if dist.get_rank() == 0 else None

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters by the names of the plain model on one device."""
        return [named for part in self.parts for named in part.named_parameters()]

    def plain_parameters(self) -> list[tuple[str, Tensor]]:
        """The same and what else is state, detached and without the converters' tensor classes: what is
        saved, and loaded into."""
        found = []
        for name, live in (named for part in self.parts for named in named_state(part)):
            tensor = live.detach()
            for converter in reversed(self.converters):
                tensor = converter.plain(name, tensor)
            found.append((name, tensor))
        return found

    @property
    def status(self) -> dict[str, int]:
        return {"step": self.step, "tokens_seen": self.tokens_seen}

    # ------------------------------------------------------------------------------------------ helpers

    @contextmanager
    def _no_gradients(self) -> Iterator[None]:
        # no_grad, never inference_mode: parameters gathered inside it would poison the next training step.
        with torch.no_grad():
            yield
        # Backward frees what forward gathered; without one, the next step would use weights gone stale.
        for module in (module for part in self.parts for module in part.modules()):
            if isinstance(module, FSDPModule):
                module.reshard()

    def _trained(self, verb: str) -> torch.optim.Optimizer:
        if self.optimizer is None:
            raise TitanError(f"{verb} on a frozen engine", hint="build it with frozen=False")
        return self.optimizer


class _LogProbs:
    """The loss that is none: hands the log-probabilities on."""

    output = "logprobs"

    def __call__(self, out: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return out


def token_counts(part: Any) -> dict[str, Tensor]:
    """How many tokens each expert had, by layer, where a model has experts that it balances."""
    return part.token_counts() if hasattr(part, "token_counts") else {}


def _listed(batches: Batch | Sequence[Batch]) -> list[Batch]:
    listed = [batches] if isinstance(batches, Batch) else list(batches)
    if not listed:
        raise TitanError("no batch was given")
    return listed


def tokens_of(model: Any, batch: Batch) -> int:
    """How long the batch's rows are, in all: one after the other, the inputs that are the model's tokens."""
    names = getattr(model, "token_inputs", ("tokens",))
    return sum(batch.rows * batch[name].shape[model.sequence_dim[name]] for name in names)


def _quotient(total: Tensor, weight: Tensor) -> Tensor:
    """total / weight, and 0 where nothing was weighed."""
    return torch.where(weight > 0, total / weight, torch.zeros_like(total))
