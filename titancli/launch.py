"""What a launcher is to start. Torch-free."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titancli.runs import RunFolder


@dataclass(frozen=True)
class LaunchRequest:
    """The ranks that a launcher (`titancli.protocols.LauncherBuilder`) is to start on this machine, and what
    they run."""

    run_folder: Path
    lock_file: Path
    """The resolved recipe, with `run.json` beside it: the run folder's own, or one that rank 0 is to make the
    run folder of."""
    checkpoint: Path | None
    """The one to continue from."""
    plugin_files: list[Path]
    nproc: int
    """Ranks on each node."""
    nnodes: int
    rdzv: str | None
    """HOST:PORT at which the nodes meet."""
    json_events: bool
    """Whether events are printed to stdout as JSON Lines."""
    traceback: bool
    """Whether every error is raised with its traceback."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the ranks; they are set where the launcher is called."""
    min_nodes: int | None = None
    """The run goes on with as few nodes, `nnodes` being the most; None: always with `nnodes`. Only the
    launcher `local`, and those with its config as a base, are asked for it."""

    @property
    def world(self) -> int:
        """Return the number of ranks on all nodes."""
        return self.nproc * self.nnodes

    @property
    def worlds(self) -> list[int]:
        """Return the numbers of ranks that there may be, the largest last."""
        return [self.nproc * nodes for nodes in range(self.min_nodes or self.nnodes, self.nnodes + 1)]

    @property
    def nodes(self) -> str:
        """Return the number of nodes as on the command line: `4`, or `2:4`."""
        return str(self.nnodes) if self.min_nodes is None else f"{self.min_nodes}:{self.nnodes}"

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.run_folder)

    @property
    def prepared(self) -> bool:
        """Return whether the run folder exists; otherwise rank 0 makes it."""
        return self.lock_file == self.folder.recipe_lock

    def recorded(self) -> dict[str, Any]:
        """Return the ranks' data in an attempt of `run.json`."""
        ranks = {"nproc": self.nproc, "nnodes": self.nnodes, "rdzv": self.rdzv, "world": self.world}
        if self.min_nodes is not None:
            ranks["min_nodes"] = self.min_nodes
        return {**ranks, "env": dict(self.env)}

    def rank_arguments(self) -> list[str]:
        """Return the arguments after `python -m titancli.worker.rank`; `rank_options` reads them."""
        words = [str(self.run_folder)]
        if not self.prepared:
            words += ["--lock", str(self.lock_file)]
        if self.checkpoint is not None:
            words += ["--checkpoint", str(self.checkpoint)]
        for file in self.plugin_files:
            words += ["-p", str(file)]
        return words


def rank_options(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the arguments of `titancli.worker.rank.main`, from a rank's command line.

    Raises:
        SystemExit: they are not what `LaunchRequest.rank_arguments` writes, or --help.
    """
    parser = argparse.ArgumentParser(
        prog="python -m titancli.worker.rank", description="Run one rank of several, started by a launcher."
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument(
        "--lock", dest="lock_file", type=Path, help="resolved recipe of a run folder that is still to be made"
    )
    parser.add_argument("--checkpoint", type=Path, help="checkpoint folder to continue from")
    parser.add_argument("--store", type=Path, help="folder in which ranks that are all on one machine meet")
    parser.add_argument("-p", dest="plugin_files", type=Path, action="append", default=[], help="plugin file")
    return vars(parser.parse_args(arguments))
