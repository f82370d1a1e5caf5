"""`python -m tests.ranks FD RANK`: one rank of the pool."""

from __future__ import annotations

import datetime
import gc
import os
import pickle
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from tests import choice
from tests.ranks import GROUP_SECONDS, packed
from titancli.distributed.private import forget_meshes


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
        try:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(store, world),
                rank=rank,
                world_size=world,
                timeout=datetime.timedelta(seconds=GROUP_SECONDS),
            )
            dist.barrier()  # or a rank that is done at once leaves others in the middle of connecting
            result = (True, function(*args))
        except BaseException:
            result = (False, traceback.format_exc())
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
