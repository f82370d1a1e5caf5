"""`python -m tests.ranks FD RANK`: one rank of the pool."""

from __future__ import annotations

import datetime
import gc
import os
import pickle
import sys
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from tests import choice
from tests.ranks import GROUP_SECONDS, packed
from titancli.distributed.private import forget_meshes

DONE, LINGER = "done", 5.0
"""Key of the number of ranks that are done, and the seconds that one waits for the others."""


def leave_together(store: dist.Store, world: int) -> None:
    """Wait until all ranks are done: one that closes its groups fails others that still connect to them.

    The store counts, not a collective, which a case may have left behind. A case whose rank waits in vain for
    one that has left is over after `LINGER` seconds, as it would be at once.
    """
    store.add(DONE, 1)
    end = time.monotonic() + LINGER
    while store.add(DONE, 0) < world and time.monotonic() < end:
        time.sleep(0.002)


def serve(connection: Connection[Any, Any], rank: int) -> None:
    """Run cases until the pipe that they come through closes."""
    torch.set_num_threads(1)
    while True:
        try:
            world, store, function, args, test = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        choice.now(test)
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world)
        )
        gc.freeze()  # what is there by now is no garbage, and need not be looked through
        met = dist.FileStore(store, world)
        try:
            dist.init_process_group(
                "gloo",
                store=met,
                rank=rank,
                world_size=world,
                timeout=datetime.timedelta(seconds=GROUP_SECONDS),
            )
            dist.barrier()  # or a rank that is done at once leaves others in the middle of connecting
            result = (True, function(*args))
            leave_together(met, world)
        except BaseException:
            result = (False, traceback.format_exc())
            met.add(DONE, 1)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
                forget_meshes()
            # Engines lie in cycles, and with them live their groups, each with three threads that wake up
            # over and over: after some dozen cases they would take more time than the cases do.
            gc.collect()
        connection.send_bytes(packed(result))


if __name__ == "__main__":
    pipe: Connection[Any, Any] = Connection(int(sys.argv[1]))
    sys.path[:] = pipe.recv()
    serve(pipe, int(sys.argv[2]))
