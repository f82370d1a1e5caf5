"""Checkpoints as GGUF files: `titan convert-checkpoint SRC OUT.gguf --to gguf`. It imports no torch here."""

from __future__ import annotations

from titancli import Command, hookimpl


@hookimpl
def titan_commands() -> list[Command]:
    return [
        Command(
            "convert-checkpoint --to gguf",
            "Convert a checkpoint to a GGUF file.",
            "titan_gguf.command:command",
        )
    ]
