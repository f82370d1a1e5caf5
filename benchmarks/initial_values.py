"""Initial values of a float32 tensor of 1 GiB (truncated normal) on 1 and 4 ranks: memory and time.

Memory is what rank 0 needs beyond its shard. Beside it torch's own function on the whole tensor, of which a
rank then keeps its shard: on 4 ranks that takes the same on each.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from titancli.models.blocks.init import fill, trunc_normal_

SIZE, STD = 1 << 14, 0.02


def status(key: str) -> int:
    rows = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(rows[key].split()[0]) * 1024


def rank(way: str, dim: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    shape = [SIZE, SIZE]
    shape[dim] //= dist.get_world_size()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shard = DTensor.from_local(torch.ones(shape), mesh, [Shard(dim)], run_check=False)
    generator = torch.Generator().manual_seed(1)
    Path("/proc/self/clear_refs").write_text("5")
    before, start = status("VmRSS"), time.process_time()
    if way == "titan":
        trunc_normal_(shard, STD, generator)
    else:
        limit = 3 * STD
        fill(shard, lambda t: torch.nn.init.trunc_normal_(t, 0, STD, -limit, limit, generator=generator))
    seconds, peak = time.process_time() - start, status("VmHWM") - before
    if dist.get_rank() == 0:
        ranks = f"{dist.get_world_size()}, by {('rows', 'columns')[dim]}"
        print(f"{way:<8}{ranks:<14}{peak / 2**20:>12,.0f} MiB{seconds:>10.1f} CPU-s", flush=True)
    dist.destroy_process_group()


def main() -> None:
    for way, ranks, dim in (("whole", 1, 0), ("titan", 1, 0), ("titan", 4, 0), ("titan", 4, 1)):
        launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([*launch, __file__, way, str(dim)], check=True, env=environment)


if __name__ == "__main__":
    rank(sys.argv[1], int(sys.argv[2])) if len(sys.argv) > 1 else main()
