"""From the config to an optimizer: assign the parameters, and combine two optimizers into one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from titan_muon import Muon
from titan_muon.sharded import ShardedMuon
from titancli import TitanError
from titancli.optimizers import AdamW
from titancli.protocols import Role
from titancli.registry.component import build as build_component


def build(
    config: Muon,
    *,
    named_parameters: list[tuple[str, nn.Parameter]],
    roles: Mapping[str, Role],
) -> torch.optim.Optimizer:
    """Build Muon for the matrices, and the fallback for the rest, if there is any.

    Raises:
        TitanError: a pattern of `exclude` matches nothing, or no matrix is left for Muon.
    """
    for pattern in config.exclude:
        if not any(fnmatchcase(name, pattern) for name in roles):
            raise TitanError(
                f"optimizer.exclude: {pattern!r} matches no parameter",
                hint=f"parameters have names such as {next(iter(roles))!r}",
            )
    matrices: list[tuple[str, nn.Parameter]] = []
    others: list[tuple[str, nn.Parameter]] = []
    for name, parameter in named_parameters:
        is_ours = roles[name] in config.roles and parameter.ndim in (2, 3)
        is_ours = is_ours and not any(fnmatchcase(name, pattern) for pattern in config.exclude)
        (matrices if is_ours else others).append((name, parameter))
    fallback = AdamW() if config.fallback is None else config.fallback
    if not matrices:
        if len(named_parameters) < len(roles):  # other pipeline stages have some
            return build_component(fallback, named_parameters=others, roles=roles)
        raise TitanError(
            f"the model has no matrices for muon (optimizer.roles: {', '.join(config.roles) or 'none'})",
            hint="shorten optimizer.exclude, or use optimizer=adamw",
        )
    muon = ShardedMuon(
        [parameter for _, parameter in matrices],
        lr=config.lr,
        momentum=config.momentum,
        nesterov=config.nesterov,
        weight_decay=config.weight_decay,
        ns_steps=config.ns_steps,
        adjust_lr_fn=config.adjust_lr,
    )
    if not others:
        return muon
    rest = build_component(fallback, named_parameters=others, roles=roles)
    return Together([muon, rest])


class Together(torch.optim.Optimizer):
    """Several optimizers as one, with concatenated parameter groups and a shared state."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts: list[Any] = list(parts)
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        self._share()
        # torch's marker for an optimizer that honors `grad_scale` and `found_inf`.
        self._step_supports_amp_scaling = all(
            getattr(part, "_step_supports_amp_scaling", False) for part in self.parts
        )
        self.grad_scale: torch.Tensor | None = None
        self.found_inf: torch.Tensor | None = None

    def _share(self) -> None:
        """Give each part the groups that hold its parameters, and the shared state."""
        for part in self.parts:
            own = {parameter for group in part.param_groups for parameter in group["params"]}
            part.param_groups = [group for group in self.param_groups if own.issuperset(group["params"])]
            part.state = self.state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # load_state_dict and by_name end here, with other groups
        self._share()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        for part in self.parts:
            if self._step_supports_amp_scaling:
                part.grad_scale, part.found_inf = self.grad_scale, self.found_inf
            try:
                part.step()
            finally:
                if self._step_supports_amp_scaling:
                    part.grad_scale = part.found_inf = None
        return loss
