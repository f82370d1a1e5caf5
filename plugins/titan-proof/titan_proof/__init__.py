"""Proofs: every layout against one process, runs repeated and compared, a step seen from inside.

This file imports no torch.
"""

from __future__ import annotations

from titancli import Command, hookimpl

COMMANDS = {
    "prove": "Prove that every layout computes what one process does.",
    "reproduce": "Run a recorded run again and compare the numbers.",
    "replay": "Repeat a step of a run and look at it from inside.",
    "bisect": "Find where two runs that should agree part.",
}


@hookimpl
def titan_commands() -> list[Command]:
    return [Command(name, help, f"titan_proof.commands.{name}:command") for name, help in COMMANDS.items()]
