"""A page about runs: `titan report`. This file imports no torch."""

from __future__ import annotations

from titancli import Command, hookimpl


@hookimpl
def titan_commands() -> list[Command]:
    return [Command("report", "Write a report of runs as one HTML page.", "titan_report.command:command")]
