"""Runs as Slurm jobs: the launcher `slurm`, and `titan launch`. This file imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import field
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge, Gt, Le

from titancli import Command, component, hookimpl
from titancli.errors import nearest_name
from titancli.launchers import Local

if TYPE_CHECKING:
    from titancli import Recipe

SET_BY_TITAN = frozenset(
    ("job-name", "nodes", "ntasks", "ntasks-per-node", "output", "error", "open-mode", "signal", "requeue")
)
NOT_SUPPORTED = frozenset(("array", "wrap", "clusters", "no-requeue", "parsable", "wait", "chdir"))
_ALLOWED = (
    # resources
    "mem mem-per-cpu mem-per-gpu tmp gres gres-flags gpus gpus-per-task gpus-per-socket gpu-bind gpu-freq "
    "cpus-per-gpu cpu-freq core-spec thread-spec cores-per-socket sockets-per-node threads-per-core mincpus "
    "extra-node-info hint mem-bind tres-per-task exclusive oversubscribe overcommit licenses network "
    "resv-ports "
    # placement
    "constraint prefer nodelist exclude contiguous distribution spread-job switches use-min-nodes segment "
    "wait-all-nodes "
    # time and accounting
    "begin deadline delay-boot time-min dependency kill-on-invalid-dep hold nice priority reservation wckey "
    "mcs-label acctg-freq comment mail-type mail-user"
)
ALLOWED = _ALLOWED.split()
"""Options of sbatch that a recipe may set: numbers and words for the scheduler, none of which selects a
program, an environment, a container or a file."""
FIELDS = {"time": "time", "partition": "partition", "account": "account", "qos": "qos"}
FIELDS |= {"gpus-per-node": "gpus_per_node", "cpus-per-task": "cpus_per_node"}
"""Options of sbatch with a field of their own."""


@component("launcher", "slurm", target="titancli.launchers.local:launch")
class Slurm(Local):
    """Submit the run as a Slurm job with `titan launch slurm`; `titan train` runs as with `local`."""

    partition: str | None = None
    """Partition of the job (`sbatch --partition`)."""
    account: str | None = None
    """Account that is charged (`sbatch --account`)."""
    qos: str | None = None
    """Quality of service (`sbatch --qos`)."""
    time: str | None = None
    """Time limit (`sbatch --time`): minutes, `HH:MM:SS`, `D-HH` or `D-HH:MM:SS`."""
    gpus_per_node: Annotated[int, Gt(0)] | None = None
    """GPUs of each node (`sbatch --gpus-per-node`), and, with `nproc = "auto"`, ranks on each node."""
    cpus_per_node: Annotated[int, Gt(0)] | None = None
    """CPU cores of each node (`sbatch --cpus-per-task`; a node has one task, which starts its ranks)."""
    spare_nodes: Annotated[int, Ge(0)] = 0
    """Spare nodes of the job beyond `--nodes`: each replaces a node that fails, within the same job."""
    signal_seconds: Annotated[int, Gt(0), Le(65535)] = 300
    """Seconds before the time limit at which the run saves and stops, to be requeued (`sbatch --signal`)."""
    sbatch: dict[str, str | int | bool] = field(default_factory=dict)
    """Further options of sbatch, without the dashes: `{exclusive = true, mem = "0", constraint = "h100"}`.
    Options that select a program, an environment or a file are given with `titan launch slurm --sbatch`."""

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        """Yield the values that sbatch would reject or misread."""
        words = {name: getattr(self, name) for name in ("partition", "account", "qos", "time")}
        for name, value in {
            **words,
            **{f"sbatch.{key}": value for key, value in self.sbatch.items()},
        }.items():
            if isinstance(value, str) and (not value or not value.isprintable()):
                yield name, f"{value!r} is empty, or is more than one line"
        for option, value in self.sbatch.items():
            if wrong := wrong_option(option) or _not_for_a_recipe(option, value):
                yield f"sbatch.{option}", wrong
        if self.spare_nodes and self.max_restarts == 0:
            message = "a spare node replaces a lost one only if ranks may be restarted"
            yield "spare_nodes", f"{message}; set launcher.max_restarts"
        if self.time is not None:
            seconds = seconds_of(self.time)
            if seconds is None:
                yield "time", f"{self.time!r} is not a time limit: write minutes, HH:MM:SS or D-HH:MM:SS"
            elif seconds < self.signal_seconds + 120:  # Slurm may send the signal a minute early
                message = (
                    f"would be stopped {self.signal_seconds} seconds before its end, just after it begins"
                )
                hint = "use a longer time, or a smaller launcher.signal_seconds"
                yield "time", f"a job of {self.time} {message}; {hint}"


def wrong_option(option: str) -> str | None:
    """Return what is wrong with an option of sbatch in any source; None if nothing is."""
    if option in FIELDS:
        return f"--{option} has a field of its own: launcher.{FIELDS[option]}"
    if option in SET_BY_TITAN | NOT_SUPPORTED:
        return f"--{option} cannot be set: `titan launch slurm` relies on its own"
    if not re.fullmatch(r"[a-z][a-z0-9-]+", option):
        return "is not the long name of an option of sbatch, without the dashes"
    return None


def _not_for_a_recipe(option: str, value: str | int | bool) -> str | None:
    if option not in ALLOWED:
        near = nearest_name(option, ALLOWED)
        meant = f"did you mean {near!r}? Otherwise give" if near and near[0] == option[0] else "give"
        return (
            f"a recipe cannot set --{option}: only options that select no program, environment or file are "
            f"allowed; {meant} it on the command line: titan launch slurm … --sbatch {option}=…"
        )
    if option in ("nodelist", "exclude") and "/" in str(value):
        return f"{value!r} would be read as the name of a file: list the nodes"
    if option == "mail-user" and not re.fullmatch(r"\w[\w.+-]*(@[\w.-]+)?", str(value)):
        return f"{value!r} is neither a user nor an address"
    return None


def seconds_of(time: str) -> float | None:
    """Return the seconds of sbatch's time limits: `M`, `M:S`, `H:M:S`, `D-H`, `D-H:M` or `D-H:M:S`.

    None if the text is not a time limit; infinite for `UNLIMITED`.
    """
    if time.upper() in ("UNLIMITED", "INFINITE"):
        return float("inf")
    if not re.fullmatch(r"(\d+-\d+(:\d+){0,2}|\d+(:\d+){0,2})", time, re.ASCII):
        return None
    days, dash, rest = time.rpartition("-")
    numbers = [int(number) for number in rest.split(":")]
    if dash or len(numbers) == 3:
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
    else:
        hours, (minutes, seconds) = 0, (*numbers, 0)[:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


@hookimpl
def titan_components() -> list[type]:
    return [Slurm]


@hookimpl
def titan_commands() -> list[Command]:
    help = "Train as a job of a cluster: submit, follow, cancel."
    return [Command("launch", help, "titan_slurm.command:command")]
