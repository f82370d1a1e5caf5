"""Numbers gone wrong: which steps are not applied, decided on the device.

A step is judged by two numbers that all ranks share, its gradient norm and its loss. It is skipped where one
of them is not finite, or lies above what the last steps lead to expect: their mean plus `sigma` standard
deviations. (That it helps to leave out the data of a spike is the experience of PaLM, arXiv 2204.02311.)
Nothing is read to the host for it: what the host tells the user, it hears of later.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from titancli.errors import TitanError

if TYPE_CHECKING:
    from titancli.recipe.schema import Stability

logger = logging.getLogger(__name__)

LEAST_DEVIATION = 0.1
"""Of the mean: numbers that hardly vary would make a spike of anything."""
NAMES = ("the loss", "the gradient norm")


class Guard:
    """Judges steps. Every rank has one, and all decide alike."""

    def __init__(self, section: Stability, device: torch.device) -> None:
        self._section = section
        self._values = torch.zeros(2, section.window, device=device)
        """Losses and gradient norms of the last steps that were applied, the newest last."""
        self._applied = torch.zeros((), dtype=torch.int64, device=device)
        """How many of these columns are steps; no more is counted."""
        self._record = torch.zeros(9, dtype=torch.float64, device=device)
        """Skipped steps in all and in a row; of the last one its number, which of the two numbers were not
        finite, both numbers, and what they should have stayed below."""
        self._copy: Copy | None = None
        self._told = 0.0

    @torch.no_grad()
    def judge(self, step: int, norm: Tensor, loss: Tensor) -> Tensor:
        """1.0 where a step must not be applied, else 0.0: fp32 scalar, the same on every rank. Collective."""
        mine = torch.stack((loss, norm)).float()
        # What is not finite is replaced before ranks compare: a maximum over NaN is whatever comes first.
        shared = torch.cat(((~mine.isfinite()).float(), mine.nan_to_num(0.0, 0.0, 0.0)))
        if dist.get_world_size() > 1:
            # The same bits on every rank, or replicas whose sums differ in the last one would part for ever.
            dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        broken, numbers = shared[:2] > 0, shared[2:]
        limits = self._limits()
        wrong = (numbers > limits).any()
        if self._section.skip_nonfinite:
            wrong = wrong | broken.any()
        self._remember(numbers, keep=~(wrong | broken.any()))
        self._count(step, wrong, broken, numbers, limits)
        return wrong.float()

    @property
    def skipped(self) -> Tensor:
        """Steps skipped since the run began, a scalar on the device."""
        return self._record[0]

    def _limits(self) -> Tensor:
        """[2], infinite until the window is full."""
        mean, deviation = self._values.mean(dim=1), self._values.std(dim=1, correction=0)
        limits = mean + self._section.sigma * deviation.maximum(LEAST_DEVIATION * mean.abs())
        known = (self._applied >= self._section.window) & (self._section.sigma > 0)
        return torch.where(known, limits, torch.full_like(limits, torch.inf))

    def _remember(self, numbers: Tensor, *, keep: Tensor) -> None:
        moved = torch.cat((self._values[:, 1:], numbers[:, None]), dim=1)
        self._values = torch.where(keep, moved, self._values)
        self._applied = (self._applied + keep).clamp(max=self._section.window)

    def _count(self, step: int, wrong: Tensor, broken: Tensor, numbers: Tensor, limits: Tensor) -> None:
        total, in_a_row = self._record[0], self._record[1]
        head = torch.stack((total + 1, in_a_row + 1, torch.full_like(total, step)))
        skipped = torch.cat((head, broken.double(), numbers.double(), limits.double()))
        applied = self._record.clone()
        applied[1] = 0.0
        self._record = torch.where(wrong, skipped, applied)
        if self._copy is None:
            self._copy = Copy(self._record)

    # -------------------------------------------------------------------------------------- on the host

    def too_many(self) -> bool:
        """Tell of steps that were skipped, and whether they are `max_skips` in a row.

        Waits for nothing: what the device has not done yet is told at a later call.
        """
        record = self._copy.read() if self._copy is not None else None
        if record is None:
            return False
        self._copy = None
        new, self._told = record[0] - self._told, record[0]
        if new > 0:
            others = f" ({new - 1:.0f} more before it)" if new > 1 else ""
            logger.warning("step %.0f is skipped%s: %s", record[2], others, reason(record))
        return record[1] >= self._section.max_skips

    def verdict(self, saved: str | None) -> TitanError:
        """Why a run ends whose steps were skipped.

        Args:
            saved: its last checkpoint, such as "checkpoints/step-60".
        """
        record = self._record.tolist()
        in_a_row, step = int(record[1]), int(record[2])
        hint = "lower the learning rate, look at the data of these steps, or change [stability]"
        if saved:
            hint = (
                f"{saved} holds the weights of step {step - in_a_row}, and goes on with the data after step "
                f"{step}: continue from it, or {hint}"
            )
        return TitanError(
            f"{in_a_row} steps in a row were skipped, up to step {step}: {reason(record)}", hint=hint
        )

    def state(self) -> dict[str, Any]:
        """What a resumed run needs to judge as this one would: plain JSON, the same on every rank."""
        count = int(self._applied)
        total, in_a_row = self._record[:2].tolist()
        losses, norms = self._values[:, self._section.window - count :].tolist()
        return {"skipped": int(total), "in_a_row": int(in_a_row), "losses": losses, "norms": norms}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from `state`. A run that ended for its skipped steps may skip as many again."""
        in_a_row = state["in_a_row"] if state["in_a_row"] < self._section.max_skips else 0
        self._record.zero_()
        self._record[0], self._record[1] = state["skipped"], in_a_row
        self._told = float(state["skipped"])
        known = torch.tensor([state["losses"], state["norms"]], device=self._values.device)
        known = known[:, -self._section.window :]
        self._values.zero_()
        self._values[:, self._section.window - known.shape[1] :] = known
        self._applied.fill_(known.shape[1])
        self._copy = None


class Copy:
    """Numbers on their way to the host."""

    def __init__(self, numbers: Tensor) -> None:
        self._done: Any = None
        if numbers.is_cuda:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()
        else:
            self._numbers = numbers.detach()

    def read(self) -> list[float] | None:
        """The numbers, or None as long as they are under way."""
        return self._numbers.tolist() if self._done is None or self._done.query() else None


def reason(record: list[float]) -> str:
    """In words: what of the last skipped step was wrong."""
    broken, numbers, limits = record[3:5], record[5:7], record[7:9]
    infinite = [name for name, is_broken in zip(NAMES, broken, strict=True) if is_broken]
    told = (
        [f"{' and '.join(infinite)} {'is' if len(infinite) == 1 else 'are'} not finite"] if infinite else []
    )
    told += [
        f"{name} is {number:.4g}, and the last steps' lead to expect less than {limit:.4g}"
        for name, number, limit in zip(NAMES, numbers, limits, strict=True)
        if number > limit
    ]
    return "; ".join(told)


def step_unless(wrong: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Step, or leave weights and state alone where `wrong` is 1.0.

    An optimizer that heeds `found_inf` on the device, as torch's fused ones do for gradient scaling, is given
    it; for any other the number is read to the host.
    """
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.grad_scale, optimizer.found_inf = None, wrong  # type: ignore[attr-defined]
        try:
            optimizer.step()
        finally:
            optimizer.found_inf = None  # type: ignore[attr-defined]
    elif (1.0 - wrong).item():
        optimizer.step()
