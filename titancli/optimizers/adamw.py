"""AdamW: torch's own where parameters and state are float32, titan's step where either is bfloat16."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titancli.errors import RecipeError
from titancli.optimizers import AdamW
from titancli.optimizers.rounding import indices, place_of, random_halves, salt_of, scattered, store
from titancli.protocols import Role

logger = logging.getLogger(__name__)

CHUNK, PIECES = 2**18, 256
"""Elements updated at a time on a CPU, so that intermediates stay in its cache. Tensors of more than CHUNK
* PIECES elements use larger chunks, because a dry run pays a fixed cost per chunk."""
SIZES = 64
"""Maximum number of distinct parameter sizes with a compiled kernel each; torch's default is 8."""


def build(
    config: AdamW,
    *,
    named_parameters: list[tuple[str, nn.Parameter]],
    roles: Mapping[str, Role] | None = None,
) -> torch.optim.Optimizer:
    """Build the optimizer, with a second parameter group for the parameters that `no_decay` matches.

    A pattern that matches no parameter of the whole model is a warning: lists for many families have some.

    Raises:
        RecipeError: `lr` is negative or not finite (possible from a script, not from a recipe file).
    """
    if not (math.isfinite(config.lr) and config.lr >= 0):
        raise RecipeError(f"optimizer.lr is {config.lr}, but a learning rate must be finite and at least 0")
    model_names = [name for name, _ in named_parameters] if roles is None else list(roles)
    for remark in config.unmatched(model_names):
        logger.warning(remark)
    decaying: list[nn.Parameter] = []
    exempt: list[nn.Parameter] = []
    for name, parameter in named_parameters:
        is_exempt = any(fnmatchcase(name, pattern) for pattern in config.no_decay)
        (exempt if is_exempt else decaying).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": params, "weight_decay": decay}
        for params, decay in ((decaying, config.weight_decay), (exempt, 0.0))
        if params
    ]
    shared: dict[str, Any] = {"lr": config.lr, "betas": (config.beta1, config.beta2), "eps": config.eps}
    state_dtype = getattr(torch, config.state_dtype)
    if state_dtype == torch.float32 and all(p.dtype == torch.float32 for _, p in named_parameters):
        fused, foreach = config.implementation == "fused", config.implementation == "foreach"
        return torch.optim.AdamW(groups, **shared, fused=fused, foreach=foreach)
    fused, names = config.implementation == "fused", {p: name for name, p in named_parameters}
    return MixedAdamW(groups, **shared, state_dtype=state_dtype, fused=fused, names=names)


class MixedAdamW(torch.optim.Optimizer):
    """AdamW whose parameters and moments may each be float32 or bfloat16, with float32 arithmetic.

    torch's own steps reject float32 parameters with bfloat16 moments, always give bfloat16 parameters
    bfloat16 moments, and round to nearest, which loses small updates for good. Here, bfloat16 values are
    rounded stochastically (`titancli.optimizers.rounding`). With `fused`, a GPU updates each parameter in one
    compiled kernel that reads and writes every element once. (torch 2.13's fused kernel accepts bfloat16
    moments too, but rounds them to nearest.)

    As with torch's fused steps, gradients are divided by `grad_scale`, and the step is skipped where
    `found_inf` is 1.0; both are device scalars or None. The step never synchronizes with the host.

    Args:
        names: each parameter's name in the plain model, which seeds its random bits; None: its index.
    """

    _step_supports_amp_scaling = True
    """torch's marker for an optimizer that honors `grad_scale` and `found_inf`."""

    def __init__(
        self,
        params: Any,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float = 0.0,
        state_dtype: torch.dtype,
        fused: bool = False,
        names: Mapping[nn.Parameter, str] | None = None,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.state_dtype = state_dtype
        self.grad_scale: Tensor | None = None
        self.found_inf: Tensor | None = None
        self._fused = fused
        every = [parameter for group in self.param_groups for parameter in group["params"]]
        self._salts = {
            parameter: salt_of(str(number) if names is None else names[parameter])
            for number, parameter in enumerate(every)
        }
        self._places = {parameter: place_of(parameter) for parameter in every}
        # Computed once per parameter. Cached by a function, because saving warns about unknown attributes of
        # the optimizer.
        self._place_on_device = cache(partial(_place_on_device, self._salts, self._places))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in parameters:
                self._begin(parameter)
            for parameter, rates, salt in self._rates(group, parameters):
                self._update(parameter, rates, salt, group)
        return loss

    def _begin(self, parameter: nn.Parameter) -> None:
        state = self.state[parameter]
        if not state:
            # On the device: only the device knows whether the last step was skipped.
            state["step"] = torch.zeros((), dtype=torch.float32, device=_local(parameter).device)
            state["exp_avg"] = torch.zeros_like(parameter, dtype=self.state_dtype)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=self.state_dtype)

    def _rates(
        self, group: dict[str, Any], parameters: list[nn.Parameter]
    ) -> Iterator[tuple[nn.Parameter, _Rates, Tensor]]:
        """Advance the step counts; yield each parameter with its rates and a salt, all scalars on its
        device."""
        if not parameters:
            return
        counts = [self.state[parameter]["step"] for parameter in parameters]
        scale, wrong = (_on(counts[0], given) for given in (self.grad_scale, self.found_inf))
        # As a list: a single tensor would be copied to the host.
        torch._foreach_add_(counts, 1.0 if wrong is None else [1.0 - wrong] * len(counts))
        steps = torch.stack(counts).double()
        beta1, beta2 = group["betas"]
        # A number that changes every step must be a tensor; a constant would trigger recompilation.
        decay = torch.full_like(counts[0], 1 - group["lr"] * group["weight_decay"])
        sizes = (group["lr"] / (1 - beta1**steps)).float().unbind()
        corrections = (1 - beta2**steps).float().unbind()
        for parameter, size, correction, salt in zip(
            parameters, sizes, corrections, scattered(steps.int()).unbind(), strict=True
        ):
            yield parameter, _Rates(decay, size, correction, scale, wrong), salt

    def _update(self, parameter: nn.Parameter, rates: _Rates, salt: Tensor, group: dict[str, Any]) -> None:
        state, grad = self.state[parameter], parameter.grad
        tensors = tuple(map(_local, (parameter, grad, state["exp_avg"], state["exp_avg_sq"])))
        if not tensors[0].numel():
            return  # a parameter sharded over more ranks than it has rows
        flat = [tensor.reshape(-1) for tensor in tensors]
        beta1, beta2 = group["betas"]
        fixed = (beta1, beta2, group["eps"])
        if self._in_one_kernel(tensors):
            _compiled_update()(*flat, rates.given(), *fixed, salt, *self._place_on_device(parameter), 0)
            return
        place = (self._salts[parameter], *self._places[parameter])
        count = flat[0].numel()
        size = max(CHUNK, count // PIECES) if flat[0].device.type == "cpu" else count
        for start in range(0, count, size):
            weight, gradient, first, second = (tensor[start : start + size] for tensor in flat)
            _update_(weight, gradient, first, second, rates, *fixed, salt, *place, start)
        for tensor, changed in zip(tensors, flat, strict=True):
            if not tensor.is_contiguous() and tensor is not tensors[1]:  # reshape made a copy
                tensor.copy_(changed.view(tensor.shape))

    def _in_one_kernel(self, tensors: Sequence[Tensor]) -> bool:
        return self._fused and all(tensor.is_cuda and tensor.is_contiguous() for tensor in tensors)


class _Rates(NamedTuple):
    """Factors for one parameter in one step: float32 scalars on its device."""

    decay: Tensor
    """Factor on the weight, for decoupled weight decay."""
    size: Tensor
    """Learning rate divided by the first moment's bias correction."""
    correction: Tensor
    """Second moment's bias correction."""
    scale: Tensor | None
    """Divisor of the gradient."""
    wrong: Tensor | None
    """1.0 where the step is skipped, else 0.0."""

    def given(self) -> _Rates:
        """Return the rates with defaults for `scale` and `wrong`, so that all steps share one graph."""
        scale = torch.ones_like(self.decay) if self.scale is None else self.scale
        return self._replace(
            scale=scale, wrong=torch.zeros_like(self.decay) if self.wrong is None else self.wrong
        )


def _update_(
    weight: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    rates: _Rates,
    beta1: float,
    beta2: float,
    eps: float,
    step_salt: Any,
    name_salt: Any,
    offset: Any,
    steps: Any,
    start: int,
) -> None:
    """Update elements of one parameter in place; all tensors are one-dimensional.

    Args:
        step_salt, name_salt, offset, steps, start: inputs of the random bits, see
            `titancli.optimizers.rounding`.
    """
    gradient = gradient.float() if rates.scale is None else gradient.float().div(rates.scale)
    copy = partial(torch.Tensor.to, dtype=torch.float32, copy=True)  # a skipped step needs the old values
    mean = copy(first).lerp_(gradient, 1 - beta1)
    square = copy(second).mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    denominator = square.div(rates.correction).sqrt_().add_(eps)
    moved = copy(weight).mul_(rates.decay).sub_(mean.mul(rates.size).div_(denominator))
    halves: Iterator[Tensor] = iter(())
    if torch.bfloat16 in (weight.dtype, first.dtype, second.dtype):
        index = indices(start, weight.numel(), offset, steps, weight.device)
        halves = random_halves(index, name_salt, step_salt)
    for into, values in ((weight, moved), (first, mean), (second, square)):
        kept = values if rates.wrong is None else torch.where(rates.wrong > 0, into.float(), values)
        store(into, kept, halves)


@cache
def _compiled_update() -> Callable[..., None]:
    # One graph per size: kernels for dynamic sizes cannot assume alignment and are several times slower.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, SIZES)
    return torch.compile(_update_, dynamic=False, fullgraph=True)


def _place_on_device(
    salts: Mapping[nn.Parameter, int], places: Mapping[nn.Parameter, Any], parameter: nn.Parameter
) -> tuple[Any, ...]:
    """Return salt, offset and steps as device scalars, filled on the device to avoid a synchronizing copy."""
    offset, steps = places[parameter]
    device = _local(parameter).device
    salt, first, *rest = (
        torch.full((), number, dtype=torch.int32, device=device)
        for number in (salts[parameter], offset, *(steps or ()))
    )
    return salt, first, tuple(rest) or None


def _on(like: Tensor, scalar: Tensor | None) -> Tensor | None:
    """Return a scalar on the device of `like`; only parameters on the host need a copy."""
    return None if scalar is None else scalar.to(like.device, non_blocking=like.is_cuda)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
