"""Whether another launcher has started this command in several processes, each of which would be a run of its
own. Torch-free."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

from titancli.errors import UsageError


def refuse_other_launchers(nnodes: int) -> None:
    """Refuse a start in which torchrun, accelerate, mpirun or srun runs the command once for each rank.

    Several machines may each start the command once, with `--nnodes`.

    Args:
        nnodes: machines of the run, by the command line.

    Raises:
        UsageError: one does; the hint is the command to type in its place.
    """
    for name, (world, local) in (("torchrun", _ranks()), ("mpirun", _mpi()), ("srun", _slurm())):
        nodes = -(-world // local)
        if local > 1 or nodes > max(1, nnodes):
            raise UsageError(
                f"{name}, or a program like it, has started this command {world} times, and each would be a "
                "run of its own: titan starts the processes of a run itself",
                hint=f"without it{', once on each machine' * (nodes > 1)}: {_command(local, nodes)}",
            )


def _ranks() -> tuple[int, int]:
    """Return the ranks in all and on each machine, by the variables of torchrun; (1, 1) without them."""
    world = _number("WORLD_SIZE") if "RANK" in os.environ else 1
    # Operators of clusters set RANK and WORLD_SIZE to count machines, without the others.
    alone = "LOCAL_RANK" not in os.environ
    return world, _number("LOCAL_WORLD_SIZE", 1 if alone else world)


def _mpi() -> tuple[int, int]:
    return _number("OMPI_COMM_WORLD_SIZE"), _number("OMPI_COMM_WORLD_LOCAL_SIZE")


def _slurm() -> tuple[int, int]:
    """Return the tasks of this step on one machine, twice: `titan launch slurm` starts one on each."""
    found = re.match(r"\d+", os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    tasks = max(1, int(found[0])) if found else 1
    return tasks, tasks


def _number(name: str, default: int = 1) -> int:
    text = os.environ.get(name, "")
    return max(1, int(text)) if text.isdecimal() else default


def _command(local: int, nodes: int) -> str:
    """Return the command as it was typed, with the options for so many processes."""
    given = sys.argv[1:] if Path(sys.argv[0]).name in ("titan", "__main__.py") else ["train", "RECIPE"]
    words = ["titan", *given]
    if not any(word.partition("=")[0] == "--nproc" for word in words):
        words += ["--nproc", str(local)]
    if nodes > 1:
        words += ["--nnodes", str(nodes)]
        words += [] if any(word.partition("=")[0] == "--run-dir" for word in words) else ["--run-dir", "DIR"]
    return shlex.join(words)
