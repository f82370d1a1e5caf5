"""What it costs until something happens: CPU-seconds of the torch-free commands, seconds to the first step.

    python benchmarks/startup.py [--runs N]

Prints one table. `import torch` stands beside it as the yardstick, taken in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TITAN = [sys.executable, "-m", "titancli"]
COMMANDS = {
    "titan --help": [*TITAN, "--help"],
    "titan list-components": [*TITAN, "list-components"],
    "titan validate llama3_debug": [*TITAN, "validate", "llama3_debug"],
    "import torch": [sys.executable, "-c", "import torch"],
}
# A step as small as can be: what is measured is everything before it.
TRAIN = [
    "train",
    "llama3_debug",
    "training.steps=1",
    "lr_scheduler.warmup_steps=0",
    "checkpoint.enable=false",
]


def cpu_and_wall(command: list[str]) -> tuple[float, float]:
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return cpu, time.perf_counter() - start


def first_step(folder: Path) -> float:
    """Seconds from the start of the command to the event of the first finished step."""
    start = time.perf_counter()
    command = [*TITAN, *TRAIN, "--json", "--run-dir", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        for line in process.stdout or ():
            if json.loads(line)["event"] == "step":
                elapsed = time.perf_counter() - start
                process.communicate()
                return elapsed
    raise SystemExit(f"the run ended without a step: {' '.join(command)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    print(f"{os.cpu_count()} cores, Python {sys.version.split()[0]}, median of {runs} after one warm-up\n")
    print("| command | CPU-seconds | seconds |\n|---|---|---|")
    for name, command in COMMANDS.items():
        times = [cpu_and_wall(command) for _ in range(runs + 1)][1:]
        cpu, wall = (statistics.median(column) for column in zip(*times, strict=True))
        print(f"| `{name}` | {cpu:.2f} | {wall:.2f} |")
    with tempfile.TemporaryDirectory() as folder:
        steps = [first_step(Path(folder) / str(number)) for number in range(runs + 1)][1:]
    print(f"| `titan train llama3_debug`, to the first finished step | | {statistics.median(steps):.2f} |")


if __name__ == "__main__":
    main()
