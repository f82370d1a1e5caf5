"""Convert job configs of torchtitan to recipes: `titan recipe from-torchtitan`."""

from __future__ import annotations

from titancli import Command, hookimpl


@hookimpl
def titan_commands() -> list[Command]:
    return [
        Command(
            "recipe from-torchtitan",
            "Convert a job config of torchtitan 0.2.2 or earlier.",
            "titan_torchtitan.command:command",
        )
    ]
