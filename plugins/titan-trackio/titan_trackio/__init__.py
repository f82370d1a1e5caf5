"""Trackio logger. This file has the config and imports nothing; `logger.py` has the code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from titancli import component, hookimpl

if TYPE_CHECKING:
    from titancli import Recipe


@component("logger", "trackio", target="titan_trackio.logger:build")
class Trackio:
    """Trackio: metrics, resolved recipe and environment in its database on this machine (`trackio show`)."""

    project: str | None = None
    """Trackio project; None: the recipe's name."""
    group: str | None = None
    """Group of runs that belong together."""

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        if sum(isinstance(one, Trackio) for one in recipe.loggers) > 1:
            yield "type", "two trackio loggers would write to the same Trackio run: remove one"


@hookimpl
def titan_components() -> list[type]:
    return [Trackio]
