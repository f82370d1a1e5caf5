"""The systems that titan has been run on: dates and commands. Torch-free.

README's table is made of these, and `titan doctor` prints the rows that match the machine. A row changes only
when its command has been run. A row without a date has none on record.
"""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """A system and the command that was run on it."""

    what: str
    on: str
    date: str
    command: str

    def summary_line(self) -> str:
        """Return the row as a line."""
        when = f", {self.date}" if self.date else ""
        return f"{self.what}: {self.on}{when} ({self.command})"


VERSIONS = "tests/versions.sh"
TORCH = {
    "2.11": Row("torch 2.11.0", "CPU", "2026-11-22", f"TORCHES=2.11.0 {VERSIONS}"),
    "2.12": Row("torch 2.12.0", "CPU", "2026-11-22", f"TORCHES=2.12.0 {VERSIONS}"),
    "2.13": Row("torch 2.13.0", "CPU; what titan is developed on", "", "make test"),
    "2.14": Row("torch 2.14.1", "CUDA wheel, on a CPU", "", f"TORCHES=2.14.1 {VERSIONS}"),
    "2.15": Row("torch 2.15.0", "CUDA wheel, on a CPU", "2026-11-25", f"TORCHES=2.15.0 {VERSIONS}"),
}
"""By minor version, the oldest first."""
PYTHON = {
    "3.11": Row("Python 3.11", "CPU; what titan is developed on", "", "make test"),
    "3.12": Row("Python 3.12", "CPU", "", "PYTHONS=python3.12 make test-versions"),
    "3.13": Row("Python 3.13", "CPU", "", "PYTHONS=python3.13 make test-versions"),
}
GPU = Row(
    "GPUs",
    "one H200 with torch 2.11.0 and CUDA 13.0; [speed and memory](benchmarks/README.md#one-gpu). "
    "**Not yet run on several**",
    "2026-11-26",
    "pytest -m gpu",
)
LAYOUTS = Row(
    "layouts: loss, gradients and weights of one rank",
    "CPUs, 2 to 4 ranks, gloo",
    "2026-11-25",
    "pytest tests/ranks",
)
ROWS = [
    LAYOUTS,
    Row(
        "several nodes: rendezvous, lost nodes, spares",
        "network namespaces of one machine, gloo",
        "2026-11-25",
        "pytest -m 'not slow' tests/faults/test_nodes.py tests/run/test_several_nodes.py "
        "tests/run/test_elastic.py tests/run/test_faults_on_nodes.py",
    ),
    Row("jobs of Slurm", "Slurm 22.05, CPUs", "2026-11-23", "make test-programs"),
    *TORCH.values(),
    *PYTHON.values(),
    GPU,
]
