"""The built-in components, offered through the same hooks and the same entry point as any plugin's."""

from __future__ import annotations

from titancli.registry.hookspecs import hookimpl


@hookimpl
def titan_components() -> list[type]:
    from titancli import data, launchers, loggers, loops, losses, models, optimizers, parallel

    rooms = (models, data, parallel, losses, optimizers, loggers, loops, launchers)
    return [config for room in rooms for config in room.COMPONENTS]
