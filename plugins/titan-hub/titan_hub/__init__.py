"""Models on the Hugging Face Hub: `titan hub push`, `titan hub card`. This file imports no torch."""

from __future__ import annotations

from titancli import Command, hookimpl


@hookimpl
def titan_commands() -> list[Command]:
    return [Command("hub", "Push models to the Hugging Face Hub.", "titan_hub.command:command")]
