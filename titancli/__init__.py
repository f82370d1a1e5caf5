"""titan: train language models from a recipe.

The public API. Nothing here imports torch: every name is loaded when first used.
"""

from __future__ import annotations

from titancli.version import __version__

_WHERE = {
    "component": "titancli.registry.component",
    "Command": "titancli.registry.command",
    "Component": "titancli.registry.fields",
    "LocalPath": "titancli.registry.fields",
    "Slot": "titancli.registry.fields",
    "hookimpl": "titancli.registry.hookspecs",
    "load_recipe": "titancli.recipe",
    "Recipe": "titancli.recipe.schema",
    "TitanError": "titancli.errors",
    "Batch": "titancli.protocols.batch",
    "IGNORE": "titancli.protocols.batch",
    "Completion": "titancli.protocols.samples",
    "SamplingParams": "titancli.protocols.samples",
    "build": "titancli.registry.component",
    "section": "titancli.registry.component",
    "LossResult": "titancli.protocols.result",
    "Sample": "titancli.protocols.samples",
    "report": "titancli.observe.metrics",
    "phase": "titancli.observe.phases",
    "Engine": "titancli.engine",
}

__all__ = ["__version__", *sorted(_WHERE)]

TYPE_CHECKING = False  # as in typing, whose import takes longer than all else here
if TYPE_CHECKING:
    from typing import Any

    from titancli.engine import Engine as Engine
    from titancli.errors import TitanError as TitanError
    from titancli.observe.metrics import report as report
    from titancli.observe.phases import phase as phase
    from titancli.protocols.batch import IGNORE as IGNORE
    from titancli.protocols.batch import Batch as Batch
    from titancli.protocols.result import LossResult as LossResult
    from titancli.protocols.samples import Completion as Completion
    from titancli.protocols.samples import Sample as Sample
    from titancli.protocols.samples import SamplingParams as SamplingParams
    from titancli.recipe import load_recipe as load_recipe
    from titancli.recipe.schema import Recipe as Recipe
    from titancli.registry.command import Command as Command
    from titancli.registry.component import build as build
    from titancli.registry.component import component as component
    from titancli.registry.component import section as section
    from titancli.registry.fields import Component as Component
    from titancli.registry.fields import LocalPath as LocalPath
    from titancli.registry.fields import Slot as Slot
    from titancli.registry.hookspecs import hookimpl as hookimpl


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        import importlib

        value = getattr(importlib.import_module(_WHERE[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'titancli' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
