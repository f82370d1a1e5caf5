"""Runs as Slurm jobs: the launcher `slurm` and `titan launch`. This file imports no torch."""

from __future__ import annotations

from titancli import Command, hookimpl


@hookimpl
def titan_components() -> list[type]:
    from titan_slurm.config import Slurm

    return [Slurm]


@hookimpl
def titan_commands() -> list[Command]:
    help = "Train as a job of a cluster: submit, follow, cancel."
    return [Command("launch", help, "titan_slurm.command:command")]
