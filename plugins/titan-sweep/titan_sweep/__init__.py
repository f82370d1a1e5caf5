"""A run for every combination of values: `titan sweep`. This file imports no torch."""

from __future__ import annotations

from titancli import Command, hookimpl


@hookimpl
def titan_commands() -> list[Command]:
    return [Command("sweep", "Train every combination of some values.", "titan_sweep.command:command")]
