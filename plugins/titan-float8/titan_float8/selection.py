"""Which layers a converter changes: all that fit, without those that the recipe skips."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TypeVar

from torch import nn

from titan_float8.layer import CUTS
from titancli.errors import RecipeError
from titancli.recipe import nearest

# Below titan's own logger, so that its warnings reach users and the run's events.
logger = logging.getLogger("titancli.plugins.titan_float8")
M = TypeVar("M", bound=nn.Module)


def choose(
    converter: str,
    layers: Mapping[str, M],
    skip: Iterable[str],
    unfit: Callable[[str, M], str | None],
    what: str,
) -> dict[str, M]:
    """Return the layers to convert; warn once of those that do not fit.

    Args:
        unfit: the reason why a layer cannot be converted, or None.
        what: what the layers are called in messages, such as "linear layer".

    Raises:
        RecipeError: a name in `skip` matches no layer, or nothing is left to convert.
    """
    rest = _without(converter, layers, skip, what)
    reasons = {name: unfit(name, layer) for name, layer in rest.items()}
    left = {name: reason for name, reason in reasons.items() if reason is not None}
    if len(left) == len(rest):
        none = f"the model has no {what}" if not layers else "skip matches every layer"
        raise RecipeError(
            f"{converter} converts nothing: " + (_listed(left) if left else none),
            hint="remove the converter from the recipe",
        )
    if left:
        logger.warning("%s does not convert these layers: %s", converter, _listed(left))
    return {name: layer for name, layer in rest.items() if name not in left}


def _without(converter: str, layers: Mapping[str, M], skip: Iterable[str], what: str) -> dict[str, M]:
    rest = dict(layers)
    for pattern in skip:
        matched = [n for n in layers if fnmatchcase(n, pattern) or fnmatchcase(n, f"*.{pattern}")]
        if not matched:
            ends = {n.split(".", i)[-1]: None for n in layers for i in range(n.count(".") + 1)}
            hint = nearest(pattern, ends) or f"{what}s: {', '.join(families(layers))}"
            raise RecipeError(f"{converter}: skip = {pattern!r} matches no {what}", hint=hint)
        for name in matched:
            rest.pop(name, None)
    return rest


def split(name: str, plan: Mapping[str, str]) -> str | None:
    """Return how a model's tensor plan shards a layer."""
    styles = (style for pattern, style in plan.items() if fnmatchcase(f"{name}.weight", pattern))
    return next(styles, None)


def refuse_uncut(converter: str, styles: Mapping[str, str | None]) -> None:
    """Check that tensor parallelism shards all converted layers.

    Raises:
        RecipeError: a layer is replicated under tensor parallelism.
    """
    whole = [name for name, style in styles.items() if style not in (None, *CUTS)]
    if whole:
        names = families(whole)
        raise RecipeError(
            f"{converter}: with mesh.tp each rank has all of {', '.join(names)}, but only a part of "
            f"the sum that is the gradient of its output; casting the parts differs from casting the sum",
            hint=f"add {', '.join(map(repr, names))} to skip",
        )


def _listed(reasons: Mapping[str, str]) -> str:
    """Format as `names (reason); …`, with layers that differ only by their index combined."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        by_reason.setdefault(reason, []).append(name)
    return "; ".join(f"{', '.join(families(names))} ({reason})" for reason, names in by_reason.items())


def families(names: Iterable[str]) -> list[str]:
    """Return names without the indices of blocks, once each."""
    return list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names))
