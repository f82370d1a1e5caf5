"""What the digest of a step costs: the same steps, and the time inside the hashing.

    python benchmarks/digests.py [--steps N]

The 6.16 M parameter Llama 3 of `train_cpu.py`, fp32, on this machine's first device; prints the median times
of a step, of its digest, and their ratio. A digest reads as many values whatever the batch, so its share
grows as steps get smaller: 8 rows of 512 tokens (aim: 1 %), 2 of 256, and 1 of 32.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from titancli import Batch, Engine
from titancli.engine.digest import Digests
from titancli.engine.step import Backward
from titancli.losses import CrossEntropy
from titancli.models import Llama3
from titancli.observe.digests import DigestWriter
from titancli.recipe.schema import Training


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=6)
    steps = parser.parse_args().steps
    print("| tokens a step | device | step, ms | digest, ms | share |\n|---|---|---|---|---|")
    for rows, length in ((8, 512), (2, 256), (1, 32)):
        device, whole, cost = measured(steps, rows, length)
        print(
            f"| {rows} x {length} | {device} | {1e3 * whole:,.0f} | {1e3 * cost:.1f} | {cost / whole:.2%} |",
            flush=True,
        )


def measured(steps: int, rows: int, length: int) -> tuple[torch.device, float, float]:
    """The device, and the median seconds of a step and of its digest."""
    training = Training(steps=steps, seq_len=length, local_batch_size=rows, mixed_precision_param="float32")
    config = Llama3(dim=256, n_layers=6, n_heads=16, hidden_dim=768, vocab_size=2048)
    whole, hashing = [], []
    with (
        Engine.of(config, loss=CrossEntropy(), training=training) as engine,
        tempfile.TemporaryDirectory() as folder,
    ):
        named = engine.trained_parameters()
        header = {"attempt": 1, "restart": 0, "rank": 0, "world": 1, "dp_rank": 0, "mesh": {}, "names": []}
        digests = Digests(DigestWriter(Path(folder), header), named)

        def wait() -> float:
            if engine.device.type == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter()

        for _ in range(steps):
            tokens = torch.randint(0, 2048, (rows, length + 1))
            batch = Batch({"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()})
            began = wait()
            engine.forward_backward(batch)
            whole.append(wait() - began)
            began, pending = wait(), engine.pending
            assert pending is not None
            backward = Backward(pending, [batch.to(engine.device)], None, True, print, print)
            with digests.around_backward(backward):
                pass
            digests.gradients_ready(pending)
            digests.step_applied(pending)
            hashing.append(wait() - began)
            began = wait()
            engine.optim_step()
            whole[-1] += wait() - began
        return engine.device, statistics.median(whole), statistics.median(hashing)


if __name__ == "__main__":
    main()
