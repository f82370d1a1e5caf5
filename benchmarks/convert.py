"""`titan convert-checkpoint` both ways beside `cp` of the same bytes: GB/s, and the peak of anonymous memory.

    python benchmarks/convert.py [--sizes 0.5 2] [--rounds N] [--dir DIR]

What is converted: a Llama 3 in bfloat16, of as many layers as make up the size, its largest tensor 131 MB.
Files are read through the page cache, and written below DIR (the current folder: /tmp may be memory).

- cp: `cp -r` of the checkpoint, and then fsync of every file and folder. titan does that too; so the disk is
  part of all numbers.
- to hf, to titan: what the command does between its imports and its last line, checksums compared and made.
  `4 ranks`: out of a checkpoint whose tensors lie in four files, each cut along its rows, as FSDP leaves it;
  `float16`: every value is cast on the way.
- memory: the most RssAnon that /proc/self/status shows, read every 2 ms, less what it showed before.

Prints one table a size, medians, and each ratio to cp within a round.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import sidebyside as side

FOLDER = "TITAN_BENCHMARK_FOLDER"
SHAPE = dict(dim=2048, n_heads=16, hidden_dim=8192, vocab_size=32000)
LAYER, REST = 67_112_960 * 2, 2 * 32000 * 2048 * 2
"""Bytes of one layer, and of the embedding and the output."""
LIMIT = 2 * 32000 * 2048 * 2 + (64 << 20)
"""Bytes: twice the largest tensor and 64 MiB."""


class AnonymousMemory:
    """The peak of this process's anonymous memory above what it was, in bytes, while the block runs."""

    def __enter__(self) -> AnonymousMemory:
        self._done = threading.Event()
        self._first = self.peak = anonymous_now()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()
        self.peak -= self._first

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self.peak = max(self.peak, anonymous_now())


def anonymous_now() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("this kernel does not tell a process's anonymous memory")


def make_checkpoint(folder: Path, layers: int, ranks: int) -> None:
    """Weights alone, in one file, or cut along their rows over the files of several ranks."""
    import torch

    from titancli.checkpoint.format.disk import write_file
    from titancli.checkpoint.format.hashed import PIECE
    from titancli.checkpoint.format.layout import Chunk
    from titancli.checkpoint.format.manifest import MANIFEST, manifest_bytes
    from titancli.checkpoint.format.metadata import METADATA, Cell, Group, index_bytes, part_bytes, part_name
    from titancli.checkpoint.format.stream import Job, write_files
    from titancli.checkpoint.format.tensorfile import Entry
    from titancli.checkpoint.hf.detect_model import parameter_shapes
    from titancli.checkpoint.save import Draft
    from titancli.models import Llama3

    shapes = parameter_shapes(Llama3(**SHAPE, n_layers=layers))
    noise = torch.randn(32000 * 2048, generator=torch.Generator().manual_seed(0)).bfloat16()
    folder.mkdir()
    cells: dict[str, list[Cell]] = {name: [] for name in shapes}
    files = {}
    for rank in range(ranks):
        jobs = []
        for name, (rows, *rest) in shapes.items():
            first, last = rows * rank // ranks, rows * (rank + 1) // ranks
            entry = Entry(f"model.{name}", "BF16", (last - first, *rest))
            values = noise[: entry.nbytes // 2].view(entry.shape)
            jobs.append(Job(name, (entry,), lambda values=values: [values]))
            offsets = (first, *(0 for _ in rest))
            cells[name].append(Cell(rank, offsets, entry.shape))
        [file] = write_files(folder, jobs, lambda i, n, rank=rank: f"rank-{rank:05d}.safetensors")
        files[file.name] = file.digest
        chunks = {
            entry.key: [Chunk(cells[n][-1].offsets, entry.shape, file.name, entry.key, s, PIECE, entry.start)]
            for n, entry, s in zip(shapes, file.entries, file.checksums, strict=True)
        }
        part = part_bytes(chunks, {file.name: file.header})
        files[part_name(rank)] = write_file(folder / part_name(rank), part)
    groups = [Group.of("BF16", shape, [f"model.{n}"], cells[n]) for n, shape in shapes.items()]
    files[METADATA] = write_file(folder / METADATA, index_bytes(groups))
    model = {"type": "titan/llama3", **SHAPE, "n_layers": layers}
    draft = Draft(folder, {"model": model}, "", "benchmark", {"dp_shard": ranks}, ranks)
    write_file(folder / MANIFEST, manifest_bytes(draft.manifest(files, serial=1)))


def serve(convert: Callable[[Path, Path], Any]) -> None:
    """Each step converts below the folder that the parent made, and removes what came of it."""
    folder = Path(os.environ[FOLDER])
    names = (folder / f"out-{os.getpid()}-{number}" for number in count(1))

    def step() -> side.Numbers:
        target = next(names)
        start = time.perf_counter()
        with AnonymousMemory() as memory:
            convert(folder, target)
        seconds = time.perf_counter() - start
        shutil.rmtree(target)
        return {"seconds": seconds, "anonymous": float(memory.peak)}

    side.serve(step)


def copy() -> None:
    def convert(folder: Path, target: Path) -> None:
        subprocess.run(["cp", "-r", folder / "whole", target], check=True)
        for path in [*target.iterdir(), target]:
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)

    serve(convert)


def titan(way: str, source: str, **options: Any) -> None:
    from titancli.checkpoint.hf import convert

    function = convert.to_hf if way == "hf" else convert.to_titan
    serve(lambda folder, target: function(folder / source, target, say=lambda line: None, **options))


WORKERS: dict[str, Callable[[], None]] = {
    "cp, fsync": copy,
    "to hf": partial(titan, "hf", "whole"),
    "to hf, 4 ranks": partial(titan, "hf", "ranks"),
    "to hf, float16": partial(titan, "hf", "whole", dtype="float16"),
    "to titan": partial(titan, "titan", "hf"),
}


def main() -> None:
    if side.run_worker(WORKERS):
        return
    parser = side.parser(__doc__)
    parser.add_argument("--sizes", type=float, nargs="+", default=[0.5, 2.0], help="GB")
    parser.add_argument("--rounds", type=int, default=3, help="measured conversions of each kind")
    parser.add_argument("--dir", type=Path, default=Path(), help="where to write: on the disk to be measured")
    arguments = parser.parse_args()
    print(side.machine("titancli", "torch"))
    for size in arguments.sizes:
        table(size, arguments.rounds, arguments.dir)


def table(size: float, rounds: int, where: Path) -> None:
    """Measure one size and print what came out."""
    with tempfile.TemporaryDirectory(dir=where, prefix=".convert-benchmark-") as name:
        folder = Path(name).absolute()
        os.environ[FOLDER] = name = str(folder)
        layers = max(1, round((size * 1e9 - REST) / LAYER))
        code = (
            "import convert; from pathlib import Path; from titancli.checkpoint.hf.convert import to_hf\n"
            f"folder = Path({name!r})\n"
            f"convert.make_checkpoint(folder / 'whole', {layers}, 1)\n"
            f"convert.make_checkpoint(folder / 'ranks', {layers}, 4)\n"
            "to_hf(folder / 'whole', folder / 'hf', say=print)"
        )
        subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent, stdout=sys.stderr)
        weights = sum(path.stat().st_size for path in (folder / "whole").glob("*.safetensors"))
        results = side.measure(list(WORKERS), rounds=rounds)
    print(f"\n{weights / 1e9:.2f} GB of bfloat16, medians of {rounds} rounds\n")
    print("| | seconds | GB/s | x cp | anonymous memory, MiB | limit |")
    print("|---|---|---|---|---|---|")
    for variant, steps in results.items():
        for step, reference in zip(steps, results["cp, fsync"], strict=True):
            step["speed"] = reference["seconds"] / step["seconds"]
        seconds, speed = side.median(steps, "seconds"), side.median(steps, "speed")
        peak = max(step["anonymous"] for step in steps)
        memory = "| |" if variant.startswith("cp") else f"{peak / 2**20:.0f} | {LIMIT / 2**20:.0f} |"
        print(f"| {variant} | {seconds:.2f} | {weights / seconds / 1e9:.2f} | {speed:.2f} | {memory}")


if __name__ == "__main__":
    main()
