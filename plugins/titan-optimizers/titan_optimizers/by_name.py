"""Learning rates and weight decay by parameter name, for any optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from titan_optimizers import ByName, Group
from titancli import TitanError
from titancli.protocols import Role
from titancli.registry.component import build as build_component


def build(
    config: ByName, *, named_parameters: list[tuple[str, nn.Parameter]], roles: Mapping[str, Role]
) -> torch.optim.Optimizer:
    """Build the optimizer, and divide its parameter groups by name.

    Raises:
        TitanError: a pattern matches no parameter of the whole model.
    """
    for number, group in enumerate(config.groups):
        for pattern in group.match:
            if not any(fnmatchcase(name, pattern) for name in roles):
                raise TitanError(
                    f"optimizer.groups.{number}.match: {pattern!r} matches no parameter that is trained",
                    hint=f"parameters have names such as {next(iter(roles))!r}",
                )
    optimizer = build_component(config.optimizer, named_parameters=named_parameters, roles=roles)
    named = {parameter: name for name, parameter in named_parameters}
    divided = []
    for whole in optimizer.param_groups:
        parts: dict[int | None, list[nn.Parameter]] = {}
        for parameter in whole["params"]:
            parts.setdefault(_first(config.groups, named[parameter]), []).append(parameter)
        for which, parameters in parts.items():
            part = {**whole, "params": parameters}
            divided.append(part if which is None else _changed(part, config.groups[which]))
    # As load_state_dict does: an optimizer of several, such as muon, gives each of them its groups anew.
    optimizer.__setstate__({"state": optimizer.state, "param_groups": divided})
    return optimizer


def _first(groups: list[Group], name: str) -> int | None:
    """Return the number of the first group that a parameter belongs to."""
    matching = (i for i, one in enumerate(groups) if any(fnmatchcase(name, p) for p in one.match))
    return next(matching, None)


def _changed(group: dict[str, Any], to: Group) -> dict[str, Any]:
    """Return an optimizer's group with the rates of one of the recipe's."""
    group["lr"] *= to.lr_factor
    if to.weight_decay is not None:
        group["weight_decay"] = to.weight_decay
    return group
