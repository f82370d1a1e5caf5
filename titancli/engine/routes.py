"""Checks of recorded routes: the experts that tokens are to visit in a mixture of experts."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from titancli.errors import TitanError
from titancli.protocols import Routing

ROUTES = "routes"
"""Their name in a batch, and in a sample."""
NO_RECORD = -1


def routes_of(index: int, given: Any, tokens: int, routing: Routing | None) -> Tensor:
    """Return the routes of a sample, [tokens, layers, top_k] int16; -1 where there is no record.

    Raises:
        TitanError: they are not routes through this model; names the sample's index.
    """
    who = f"sample {index}: its routes"
    try:
        found = given.detach().cpu() if isinstance(given, Tensor) else torch.from_numpy(np.array(given))
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise TitanError(f"{who} must be a list of experts: {error}") from error
    known = check_routes(who, found, found.shape[:1], routing)
    if len(found) > tokens:
        raise TitanError(f"{who} are of {len(found)} tokens, but it has {tokens}")
    whole = torch.full((tokens, known.layers, known.top_k), NO_RECORD, dtype=torch.int16)
    whole[: len(found)] = found
    return whole


def check_routes(who: str, routes: Tensor, places: torch.Size, routing: Routing | None) -> Routing:
    """Check routes, and return the model's numbers. (Values on a device are waited for.)

    Args:
        who: begins the message.
        places: the shape of the tokens.

    Raises:
        TitanError: the model has no experts to visit, or the routes have another shape or dtype, or name an
            expert that it does not have, or one twice.
    """
    if routing is None:
        raise TitanError(
            f"{who} cannot be replayed: the model has no layers of experts, of titan's own and alike",
            hint="pass none (routes=None)",
        )
    if routes.is_floating_point() or routes.is_complex() or routes.dtype == torch.bool:
        raise TitanError(f"{who} are {routes.dtype}, but must be integers")
    if routes.shape != (*places, *routing[:2]):
        raise TitanError(
            f"{who} are {list(routes.shape)}, but must be {[*places, *routing[:2]]}: the model has "
            f"{routing.layers} layers of experts, and a token visits {routing.top_k} in each"
        )
    small = routes.dtype in (torch.uint8, torch.int16)  # as recorded
    values = routes.short() if small else routes.long()
    wrong = (values < NO_RECORD) | (values >= routing.num_experts)
    if bool(wrong.any()):
        place = wrong.nonzero()[0].tolist()
        raise TitanError(
            f"{who} have the expert {int(values[tuple(place)])} at {place}, but the model has 0 to "
            f"{routing.num_experts - 1}",
            hint="-1 leaves the choice to the router",
        )
    unset = values == NO_RECORD
    again = (values.sort(-1).values.diff(dim=-1) == 0) & ~unset.all(-1, keepdim=True)
    again = again.any(-1) | (unset.any(-1) & ~unset.all(-1))
    if bool(again.any()):
        place = again.nonzero()[0].tolist()
        raise TitanError(
            f"{who} at {place} are {values[tuple(place)].tolist()}, which are not {routing.top_k} different "
            "experts",
            hint="a token visits an expert once; -1 for all of a layer leaves the choice to its router",
        )
    return routing
