"""Skipped steps: which steps are not applied, decided on the device.

A step is judged by its loss and gradient norm, which all ranks share. It is skipped if no rank had a target,
if a hook of any rank has vetoed it, if one of the two numbers is not finite, or if one exceeds the mean of
the last steps plus `sigma` standard deviations. (Skipping the data of a spike follows PaLM, arXiv
2204.02311.) Skipped steps leave the weights unchanged; so if several in a row agree on a number, it is a new
level, not a spike, and skipping would never end: from then on steps are judged by that level. The decision
reads nothing to the host, which reports skipped steps later.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from titancli.engine.grad_clip import divide
from titancli.errors import TitanError

if TYPE_CHECKING:
    from titancli.engine.step import Step
    from titancli.recipe.schema import Stability

logger = logging.getLogger(__name__)

LEAST_DEVIATION = 0.1
"""Minimum standard deviation relative to the mean: otherwise nearly constant numbers would make anything a
spike."""
LEVEL = 5
"""Steps in a row above the limit that make a new level, if they agree."""
LAG = 2
"""Steps after which a script reads the result of a GPU: all ranks read the same step, and hardly ever
wait."""
NAMES = ("the loss", "the gradient norm")


class Guard:
    """Judges steps, alike on every rank; the last hook (`titancli.engine.step`)."""

    def __init__(self, section: Stability, device: torch.device) -> None:
        self._section = section
        self._values = torch.zeros(2, section.window, device=device)
        """Losses and gradient norms of the last applied steps, the newest last."""
        self._applied = torch.zeros((), dtype=torch.int64, device=device)
        """The number of valid columns, up to the window."""
        self._above = torch.zeros(2, LEVEL, device=device)
        """Losses and gradient norms of the last steps in a row above their limits."""
        self._above_count = torch.zeros_like(self._applied)
        self._record = torch.zeros(16, dtype=torch.float64, device=device)
        """Skipped steps in total and in a row; of the last one: its number, which of the two numbers were not
        finite, both numbers, and both limits. The number of new levels; of the last one: its step, both means
        before and both means since. Finally 1 if the last skipped step had no weight, 2 if it was vetoed."""
        self._copies: deque[Copy] = deque(maxlen=16)
        self._lag = LAG if device.type == "cuda" else 0
        self._reads = type(self._values) is Tensor and device.type == "cpu"
        """Whether reading a number waits for nothing. (A fake tensor has no numbers.)"""
        self._is_asked = False
        """Whether a caller uses `too_many` and is responsible for skipped steps."""
        self._reported = [0.0, 0.0]
        """Skipped steps and new levels reported so far."""

    def gradients_ready(self, step: Step) -> Tensor:
        """Return 1.0 if a step must be skipped, else 0.0. Collective."""
        numbers = (step.number, step.norm, step.average, step.weight)
        return self.judge(*numbers, steady=step.steady, vetoed=step.vetoed)

    def step_applied(self, step: Step) -> dict[str, Tensor]:
        return {"skipped_steps": self.skipped}

    @torch.no_grad()
    def judge(
        self,
        step: int,
        norm: Tensor,
        loss: Tensor,
        weight: Tensor | None = None,
        *,
        steady: bool = True,
        vetoed: Tensor | bool | None = None,
    ) -> Tensor:
        """Return 1.0 if a step must be skipped, else 0.0: an fp32 scalar, the same on every rank. Collective.

        Args:
            weight: divisor of loss and gradients; None: above zero.
            steady: whether the loss keeps to a level; otherwise only non-finite numbers count, and nothing is
                remembered.
            vetoed: whether a hook of this rank wants the step skipped; None, on all ranks: no hook can veto.
        """
        mine = torch.stack((loss, norm)).float()
        empty = torch.zeros_like(mine[:1]) if weight is None else (weight <= 0).float().reshape(1)
        veto = () if vetoed is None else (torch.zeros_like(empty) + vetoed,)
        # Non-finite numbers are replaced before ranks compare: a maximum over NaN depends on the order.
        shared = torch.cat(((~mine.isfinite()).float(), mine.nan_to_num(0.0, 0.0, 0.0), empty, *veto))
        if dist.get_world_size() > 1:
            # The same bits on every rank: sums that differ in the last bit would make replicas diverge.
            dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        broken, numbers, (is_empty, *vetoes) = shared[:2] > 0, shared[2:4], shared[4:] > 0
        is_vetoed = vetoes[0] if vetoes else torch.zeros_like(is_empty)
        is_void = is_empty | is_vetoed
        limits = self._limits() if steady else torch.full_like(numbers, torch.inf)
        is_broken, above = broken.any(), (numbers > limits).any()
        if self._reads and not (is_broken | above | is_void):
            self._go_on(numbers if steady else None)
            return numbers.new_zeros(())
        is_level = self._is_level(numbers, limits, above & ~is_broken & ~is_void)
        wrong = (above & ~is_level) | is_void
        if self._section.skip_nonfinite:
            wrong = wrong | is_broken
        self._count(step, wrong, broken, numbers, limits, torch.where(is_empty, 1.0, 2.0 * is_vetoed))
        self._count_level(step, is_level)
        if steady:
            self._remember(numbers, is_level, keep=~(wrong | is_broken))
        self._copies.append(Copy(self._record))
        return wrong.float()

    def _go_on(self, numbers: Tensor | None) -> None:
        """Do the rest of `judge` for an ordinary step, with less work.

        Args:
            numbers: to be remembered; None: nothing.
        """
        self._above_count = torch.zeros_like(self._above_count)
        self._record = self._record.clone()
        self._record[1] = 0.0
        if numbers is not None:
            self._values = torch.cat((self._values[:, 1:], numbers[:, None]), dim=1)
            self._applied = (self._applied + 1).clamp(max=self._section.window)
        self._copies.append(Copy(self._record))

    @property
    def skipped(self) -> Tensor:
        """The number of steps skipped since the run began, a scalar on the device."""
        return self._record[0]

    def view(self) -> dict[str, Any]:
        """Return the limits of the next step, read to the host: `loss_limit` and `grad_norm_limit`, infinite
        until `steps` of the `window` have been applied."""
        loss, norm = self._limits().tolist()
        limits = {"loss_limit": loss, "grad_norm_limit": norm}
        return {**limits, "steps": int(self._applied), "window": self._section.window}

    def _limits(self) -> Tensor:
        """Return the limits of loss and norm, [2]; infinite until the window is full."""
        mean, deviation = self._values.mean(dim=1), self._values.std(dim=1, correction=0)
        limits = mean + self._section.sigma * deviation.maximum(LEAST_DEVIATION * mean.abs())
        known = (self._applied >= self._section.window) & (self._section.sigma > 0)
        return torch.where(known, limits, torch.full_like(limits, torch.inf))

    def _is_level(self, numbers: Tensor, limits: Tensor, is_above: Tensor) -> Tensor:
        """Return whether this step and those before it, all above their limits, agree on a new level.

        They do if each number that was too large varies by less than half of its rise.
        """
        moved = torch.cat((self._above[:, 1:], numbers[:, None]), dim=1)
        self._above = torch.where(is_above, moved, self._above)
        self._above_count = torch.where(is_above, (self._above_count + 1).clamp(max=LEVEL), 0)
        risen = self._above.mean(dim=1) - self._values.mean(dim=1)
        agree = self._above.std(dim=1, correction=0) <= risen / 2
        within = (self._above <= limits[:, None]).all(dim=1)
        return (self._above_count >= LEVEL) & (agree | within).all()

    def _remember(self, numbers: Tensor, is_level: Tensor, *, keep: Tensor) -> None:
        moved = torch.cat((self._values[:, 1:], numbers[:, None]), dim=1)
        self._values = torch.where(keep, moved, self._values)
        self._applied = (self._applied + keep).clamp(max=self._section.window)
        # A new level: the window restarts with the steps that made it.
        known = min(LEVEL, self._section.window)
        anew = torch.zeros_like(self._values)
        anew[:, -known:] = self._above[:, -known:]
        self._values = torch.where(is_level, anew, self._values)
        self._applied = torch.where(is_level, known, self._applied)
        self._above_count = torch.where(is_level, 0, self._above_count)

    def _count(
        self, step: int, wrong: Tensor, broken: Tensor, numbers: Tensor, limits: Tensor, void: Tensor
    ) -> None:
        total, in_a_row = self._record[0], self._record[1]
        head = torch.stack((total + 1, in_a_row + 1, torch.full_like(total, step)))
        found = (broken.double(), numbers.double(), limits.double(), self._record[9:15])
        skipped = torch.cat((head, *found, void.double().reshape(1)))
        applied = self._record.clone()
        applied[1].zero_()
        self._record = torch.where(wrong, skipped, applied)

    def _count_level(self, step: int, is_level: Tensor) -> None:
        count = self._record[9]
        head = torch.stack((count + 1, torch.full_like(count, step)))
        means = torch.cat((self._values.mean(dim=1), self._above.mean(dim=1))).double()
        found = torch.cat((self._record[:9], head, means, self._record[15:]))
        self._record = torch.where(is_level, found, self._record)

    # -------------------------------------------------------------------------------------- on the host

    def too_many(self) -> bool:
        """Report skipped steps, and return whether `max_skips` in a row were skipped.

        Does not wait: unfinished steps are reported by a later call. The caller becomes responsible for
        skipped steps: `check` does nothing from now on.
        """
        self._is_asked = True
        record = None
        while self._copies and (numbers := self._copies[0].read()) is not None:
            record = numbers
            self._copies.popleft()
        return record is not None and self._tell(record)

    def check(self) -> None:
        """Report skipped steps after a step of a script that does not call `too_many`. All ranks check the
        same step.

        Raises:
            TitanError: `max_skips` steps in a row were skipped. As many may be skipped again.
        """
        if self._is_asked or len(self._copies) <= self._lag:
            return
        record = self._copies.popleft().wait()
        if self._tell(record):
            self._copies.clear()
            self._record[1] = 0.0
            raise self.verdict(None, record)

    def _tell(self, record: list[float]) -> bool:
        """Report new skipped steps and levels; return whether too many in a row were skipped."""
        skipped, levels = record[0] - self._reported[0], record[9] - self._reported[1]
        self._reported = [record[0], record[9]]
        if skipped > 0:
            others = f" ({skipped - 1:.0f} more before it)" if skipped > 1 else ""
            logger.warning("step %.0f was skipped%s: %s", record[2], others, reason(record))
        if levels > 0:
            logger.warning(
                "step %.0f was applied: %s in %d steps in a row. This is treated as the new level, not "
                "as a spike; no step counts as a spike until %d steps have been applied at this level",
                *(record[10], new_level(record), LEVEL, self._section.window),
            )
        return record[1] >= self._section.max_skips

    def verdict(self, saved: str | None, record: list[float] | None = None) -> TitanError:
        """Return the error that ends a run whose steps were skipped.

        Args:
            saved: the run's last checkpoint, such as "checkpoints/step-60".
            record: the record read from the device; None: the current one.
        """
        record = self._record.tolist() if record is None else record
        in_a_row, step = int(record[1]), int(record[2])
        hint = "lower the learning rate, inspect the data of these steps, or change [stability]"
        if saved:
            hint = (
                f"{saved} holds the weights of step {step - in_a_row} and continues with the data after "
                f"step {step}: resume from it, or {hint}"
            )
        return TitanError(
            f"{in_a_row} steps in a row were skipped, up to step {step}: {reason(record)}", hint=hint
        )

    def state(self) -> dict[str, Any]:
        """Return the state that makes a resumed run decide alike: plain JSON, the same on every rank."""
        count = int(self._applied)
        total, in_a_row = self._record[:2].tolist()
        losses, norms = self._values[:, self._section.window - count :].tolist()
        above = self._above[:, LEVEL - int(self._above_count) :].tolist()
        found = {"skipped": int(total), "in_a_row": int(in_a_row), "losses": losses, "norms": norms}
        return found | {"above": {"losses": above[0], "norms": above[1]}}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from `state`. A run that ended because of skipped steps may skip as many again."""
        in_a_row = state["in_a_row"] if state["in_a_row"] < self._section.max_skips else 0
        self._record.zero_()
        self._record[0], self._record[1] = state["skipped"], in_a_row
        self._reported = [float(state["skipped"]), 0.0]
        known = torch.tensor([state["losses"], state["norms"]], device=self._values.device)
        known = known[:, -self._section.window :]
        self._values.zero_()
        self._values[:, self._section.window - known.shape[1] :] = known
        self._applied.fill_(known.shape[1])
        above = state["above"]
        count = len(above["losses"])
        self._above.zero_()
        self._above[:, LEVEL - count :] = torch.tensor([above["losses"], above["norms"]])
        self._above_count.fill_(count)
        self._copies.clear()


class Copy:
    """A copy of numbers to the host."""

    def __init__(self, numbers: Tensor) -> None:
        self._done: Any = None
        if numbers.is_cuda:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record(torch.cuda.current_stream(numbers.device))
        else:
            self._numbers = numbers.detach()

    def read(self) -> list[float] | None:
        """Return the numbers, or None while the copy is in progress."""
        return self._numbers.tolist() if self._done is None or self._done.query() else None

    def wait(self) -> list[float]:
        """Wait for the numbers and return them."""
        if self._done is not None:
            self._done.synchronize()
        return self._numbers.tolist()


def reason(record: list[float]) -> str:
    """Describe why the last step was skipped."""
    if record[15] == 1:
        return "the weight of its loss is not above 0, as where no token is a target"
    if record[15] == 2:
        return "a callback has vetoed it"
    broken, numbers, limits = record[3:5], record[5:7], record[7:9]
    infinite = [name for name, is_broken in zip(NAMES, broken, strict=True) if is_broken]
    reasons = (
        [f"{' and '.join(infinite)} {'is' if len(infinite) == 1 else 'are'} not finite"] if infinite else []
    )
    reasons += [
        f"{name} is {number:.4g}, but the previous steps suggest less than {limit:.4g}"
        for name, number, limit in zip(NAMES, numbers, limits, strict=True)
        if number > limit
    ]
    return "; ".join(reasons)


def new_level(record: list[float]) -> str:
    """Describe which numbers have risen, and by how much."""
    before, since = record[11:13], record[13:15]
    risen = (
        f"{name} is about {new:.4g} instead of {old:.4g}"
        for name, old, new in zip(NAMES, before, since, strict=True)
        if new > old
    )
    return " and ".join(risen)


def step_with(optimizer: torch.optim.Optimizer, scale: Tensor, wrong: Tensor | None) -> None:
    """Step on the gradients divided by `scale`, or leave weights and state unchanged if `wrong` is 1.0.

    Optimizers that apply `grad_scale` and `found_inf` on the device, such as torch's fused ones, receive
    them. For others, gradients are divided in a separate pass, and `wrong` is read to the host.
    """
    given: Any = optimizer
    home = next((p.device for group in optimizer.param_groups for p in group["params"]), scale.device)
    # Offloaded parameters: torch's fused steps would copy these to the CPU without waiting for the copy.
    scale, wrong = scale.to(home), None if wrong is None else wrong.to(home)
    divides = _divides(optimizer)
    if not divides:
        divide([p for group in optimizer.param_groups for p in group["params"]], scale)
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        try:
            if divides:
                given.grad_scale = scale
            given.found_inf = wrong
            optimizer.step()
        finally:
            if divides:
                given.grad_scale = None
            given.found_inf = None
    elif wrong is None or (1.0 - wrong).item():
        optimizer.step()


def _divides(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer divides gradients as it steps: torch's fused ones, and those with
    `grad_scale`; not if a script has hooks on its steps, which expect divided gradients."""
    hooks = (*optimizer._optimizer_step_pre_hooks, *optimizer._optimizer_step_post_hooks)
    if hooks or not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    return type(optimizer).__module__.startswith("torch.optim.") or hasattr(optimizer, "grad_scale")
