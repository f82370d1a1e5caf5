"""`launcher = "on_pool"`: whole runs on the ranks that the tests have started already, all but torchrun."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

from tests.ranks import Ranks
from titancli.launch import LaunchRequest

pool: Ranks | None = None
"""Set by the fixture `train_on`."""


def launch(config: Any, *, request: LaunchRequest) -> int:
    """Run the workers to their end, and draw what they tell; see `titancli.launchers.local.launch`."""
    from titancli.launchers.local import exit_code
    from titancli.observe.console import Console
    from titancli.observe.events import Tail

    assert pool is not None
    tail = Tail(request.folder.events)
    ends = pool(
        *(request.nproc, run_rank),
        *(request.run_folder, request.checkpoint, request.plugin_files, free_port()),
    )
    console = Console(sys.stderr, live=False)
    for event in tail.poll():
        console(event)
    for end in ends:
        if isinstance(end, Exception):
            raise end
    return exit_code(ends[0])


def run_rank(folder: Path, checkpoint: Path | None, files: list[Path], port: int) -> Any:
    """One rank of a run: its outcome, or the error that a user is told."""
    import torch.distributed as dist

    from titancli import registry
    from titancli.distributed.private import forget_meshes
    from titancli.errors import TitanError
    from titancli.runs import ATTEMPT
    from titancli.worker.rank import Place, main

    place = Place(dist.get_rank(), dist.get_world_size(), dist.get_rank())
    dist.barrier()  # or the others may find nobody where they still connect to
    dist.destroy_process_group()  # the run makes its own
    forget_meshes()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.pop(ATTEMPT, None)  # of the run that these ranks were started in
    before = Path.cwd()
    os.chdir(folder.parent)
    try:
        return main(folder, checkpoint=checkpoint, plugin_files=files, place=place)
    except TitanError as error:
        return error
    finally:
        os.chdir(before)
        registry.configure()
        for file in files:
            sys.modules.pop(file.stem, None)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
