"""The built-in components and recipes, offered through the same hooks and entry point as any plugin's."""

from __future__ import annotations

from pathlib import Path

from titancli.registry.hookspecs import hookimpl


@hookimpl
def titan_components() -> list[type]:
    from titancli import (
        callbacks,
        converters,
        data,
        launchers,
        loggers,
        loops,
        losses,
        models,
        optimizers,
        parallel,
        rl,
    )
    from titancli.checkpoint import remote as stores

    rooms = (models, data, converters, parallel, losses, optimizers, stores, loggers, callbacks, loops, rl)
    return [config for room in (*rooms, launchers) for config in room.COMPONENTS]


@hookimpl
def titan_recipes() -> Path:
    from titancli.recipe.find import bundled_folder

    return bundled_folder()
