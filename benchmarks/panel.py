"""What watching a run costs it: no watcher, plain lines, and the live panel.

    python benchmarks/panel.py [--rounds N]

What is compared: rounds of 20 training steps of the debug model on 8 rows of 32 tokens, each followed by its
event (`metrics.log_freq = 1`, the most there can be). The panel draws on a pseudo-terminal that is read as it
is written, at most four times a second.

Prints one table: CPU-seconds a step and their ratio to no watcher's in the same rounds, then what one drawing
takes.
"""

from __future__ import annotations

import io
import os
import pty
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TextIO

import sidebyside as side

STEPS, ROWS, LENGTH = 20, 8, 32


def terminal() -> TextIO:
    """The near end of a pseudo-terminal whose far end a thread reads."""
    far, near = pty.openpty()

    def drain() -> None:
        while os.read(far, 65536):
            continue

    threading.Thread(target=drain, daemon=True).start()
    os.environ.update(TERM="xterm-256color", COLUMNS="100", LINES="30")
    return open(near, "w", encoding="utf-8")


def watcher(kind: str) -> Callable[[dict[str, Any]], None]:
    from titancli.observe.console import Console
    from titancli.observe.panel import Panel

    if kind == "panel":
        return Panel(terminal())
    return Console(io.StringIO(), live=False) if kind == "lines" else lambda event: None


def event(step: int, loss: float) -> dict[str, Any]:
    metrics = {"loss": loss, "grad_norm": 1.0, "lr": 1e-3, "tokens_per_second": 2e4, "memory_gib": 1.0}
    return {"event": "step", "step": step, "steps": 100000, "metrics": {**metrics, "eta_seconds": 99.0}}


def worker(kind: str) -> None:
    import torch
    from train_cpu import engine

    watch = watcher(kind)
    with engine(rows=ROWS, length=LENGTH) as step_on:
        done = 0

        def step() -> None:
            nonlocal done
            for _ in range(STEPS):
                tokens = torch.randint(0, 2048, (ROWS, LENGTH + 1))
                metrics = step_on(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
                done += 1
                watch(event(done, float(metrics["loss"])))

        side.serve(step)


def drawing_seconds() -> float:
    """The median of what one drawing takes, rich imported."""
    from titancli.observe.panel import Panel

    panel = Panel(terminal())
    times = []
    for number in range(200):
        panel._drawn_at = float("-inf")
        start = time.process_time()
        panel(event(number, 5.0 - number / 100))
        times.append(time.process_time() - start)
    return statistics.median(times)


WORKERS: dict[str, Callable[[], None]] = {kind: partial(worker, kind) for kind in ("none", "lines", "panel")}


def main() -> None:
    if side.run_worker(WORKERS):
        return
    parser = side.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="rounds of 20 steps of each variant")
    rounds = parser.parse_args().rounds
    results = side.measure(list(WORKERS), rounds=rounds)
    print(side.machine("titancli", "torch", "rich"))
    print(f"one thread, medians of {rounds} rounds of {STEPS} steps\n")
    print("| watcher | CPU-milliseconds a step | x none |\n|---|---|---|")
    for name, steps in results.items():
        factor = "" if name == "none" else f"{side.ratio(steps, results['none'], 'cpu'):.3f}"
        print(f"| {name} | {side.median(steps, 'cpu') / STEPS * 1e3:.1f} | {factor} |")
    one = drawing_seconds()
    print(f"\none drawing: {one * 1e3:.1f} CPU-milliseconds; at most 4 a second: {4 * one:.2%} of one core")


if __name__ == "__main__":
    main()
