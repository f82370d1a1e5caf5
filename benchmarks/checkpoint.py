"""Saving and loading 1 GB of training state: titan beside raw writes, safetensors, torch.save and plain DCP.

    python benchmarks/checkpoint.py [--rounds N] [--dir DIR] [--quick]

What is compared: the state of a Llama 3 of 88 M parameters and its AdamW (1.06 GB of fp32), sharded by FSDP2
on one gloo rank, saved under DIR (by default the current folder: /tmp may be memory) and loaded back into the
live tensors. Every file is flushed to the disk (fsync), by the peer itself or right after it; what was to be
written before is on the disk when a save begins. Files are read back through the page cache.

- titan: `Checkpointer.save` and `load_checkpoint` as a run does it, checksums written and verified; `async`
  says how long training stands still, and how long the save takes in all. What checksums cost is measured in
  one process, saves with and without them (the same code with a checksum that does nothing) in turn, by the
  fastest of each: a disk's slow moments last seconds, and are not the checksum's.
- raw: one file, `write` and `fsync`, `readinto`: what the disk gives.
- safetensors, torch.save: the whole state in one file, and its tensors copied into the live ones. DCP:
  `torch.distributed.checkpoint` with its own file system writer, as it comes.

Prints a table: seconds and GB/s (medians), and the time beside raw's in the same rounds; and then what titan
promises, beside what was measured (medians of the ratios within each round).
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import sidebyside as side

SIZES = dict(dim=768, n_layers=9, n_heads=12, hidden_dim=3072, vocab_size=2048)
FOLDER = "TITAN_BENCHMARK_FOLDER"


@contextmanager
def tensors() -> Iterator[dict[str, Any]]:
    """The live, sharded state of an engine on one gloo rank."""
    import torch

    from titancli.engine import Engine
    from titancli.models import Llama3
    from titancli.optimizers import AdamW

    torch.set_num_threads(1)
    with Engine.of(Llama3(**SIZES), device="cpu", optimizer=AdamW()) as engine:
        yield engine.save_state()[0]


def local(state: dict[str, Any]) -> dict[str, Any]:
    from torch.distributed.tensor import DTensor

    return {name: t.to_local() if isinstance(t, DTensor) else t for name, t in state.items()}


def timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def serve(
    state: dict[str, Any],
    save: Callable[[Path], Any],
    load: Callable[[Path], Any],
    *,
    rest: Callable[[], Any] = lambda: None,
    before: Callable[[], side.Numbers] = dict,
) -> None:
    """Each step saves as FOLDER/step-N, loads that and removes it.

    `rest` is what a save still needs when it has returned; `before` measures something else.
    """
    size = float(sum(t.numel() * t.element_size() for t in local(state).values()))
    names = (work_folder() / f"step-{number}" for number in count(1))

    def step() -> side.Numbers:
        target = next(names)
        os.sync()  # whatever the one before has left, files that were deleted included
        numbers = {"bytes": size, **before(), "save": timed(lambda: save(target)), "rest": timed(rest)}
        numbers |= {"total": numbers["save"] + numbers["rest"], "load": timed(lambda: load(target))}
        shutil.rmtree(target) if target.is_dir() else target.unlink()
        return numbers

    side.serve(step)


def work_folder() -> Path:
    """This process's own, below the one that the parent made."""
    folder = Path(os.environ[FOLDER]) / str(os.getpid())
    folder.mkdir(exist_ok=True)
    return folder


class NoHash:
    """In the place of the checksum: no work, and no thread."""

    def update(self, block: memoryview) -> None: ...

    def settle(self) -> None: ...

    def hexdigest(self) -> str:
        return "0" * 16

    def close(self) -> None: ...


def checksums() -> None:
    """Each step saves with and without checksums, three times each, in changing order."""
    from titancli.checkpoint import Checkpointer
    from titancli.checkpoint.format import hashed
    from titancli.recipe.schema import Checkpoint

    kinds: dict[str, Any] = {"with": hashed._Hash, "without": NoHash}
    with tensors() as state:
        saver = Checkpointer(work_folder(), Checkpoint(), lock_text="", run_id="benchmark")
        numbers = count(1)

        def once(kind: str) -> float:
            hashed._Hash = kinds[kind]  # type: ignore[misc]
            number = next(numbers)
            os.sync()
            seconds = timed(lambda: saver.save(number, state, {"engine": {}}))
            shutil.rmtree(work_folder() / f"step-{number}")
            return seconds

        def step() -> side.Numbers:
            order = ["with", "without", "without", "with", "with", "without"]
            found = [(kind, once(kind)) for kind in order]
            return {kind: min(seconds for k, seconds in found if k == kind) for kind in kinds}

        side.serve(step)


def titan(mode: str) -> None:
    from titancli.checkpoint import Checkpointer, load_checkpoint
    from titancli.recipe.schema import Checkpoint

    with tensors() as state:
        section = Checkpoint(async_mode=mode)  # type: ignore[arg-type]
        saver = Checkpointer(work_folder(), section, lock_text="", run_id="benchmark")
        warm = {name: t.clone() for name, t in local(state).items()} if mode == "async" else {}

        def save(target: Path) -> None:
            saver.save(int(target.name.removeprefix("step-")), state, {"engine": {}})

        def load(target: Path) -> None:
            load_checkpoint(target, state)

        def copy() -> None:
            for name, tensor in local(state).items():
                warm[name].copy_(tensor)

        def before() -> side.Numbers:
            return {"copy": timed(copy)} if warm else {}

        serve(state, save, load, rest=saver.wait, before=before)


def raw() -> None:
    with tensors() as state:
        arrays = [t.numpy() for t in local(state).values()]

        def save(target: Path) -> None:
            with open(target, "wb", buffering=0) as file:
                for array in arrays:
                    file.write(memoryview(array).cast("B") if array.ndim else array.tobytes())
                os.fsync(file.fileno())

        def load(target: Path) -> None:
            with open(target, "rb", buffering=0) as file:
                for array in arrays:
                    file.readinto(memoryview(array.reshape(-1)).cast("B"))

        serve(state, save, load)


def whole_file(library: str) -> None:
    import safetensors.torch
    import torch

    with tensors() as state:
        plain = local(state)

        def save(target: Path) -> None:
            if library == "safetensors":
                safetensors.torch.save_file(plain, target)
            else:
                torch.save(plain, target)
            with open(target, "rb") as file:
                os.fsync(file.fileno())

        def load(target: Path) -> None:
            loaded = (
                safetensors.torch.load_file(target)
                if library == "safetensors"
                else torch.load(target, weights_only=True)
            )
            for name, tensor in plain.items():
                tensor.copy_(loaded[name])

        serve(state, save, load)


def dcp(*, wait: bool) -> None:
    import torch.distributed.checkpoint as dcp

    with tensors() as state:
        pending: list[Any] = []

        def save(target: Path) -> None:
            if wait:
                dcp.save(state, checkpoint_id=target)
            else:
                pending[:] = [dcp.async_save(state, checkpoint_id=target)]

        def rest() -> None:
            for future in pending:
                future.result()

        serve(state, save, lambda target: dcp.load(state, checkpoint_id=target), rest=rest)


TABLE: dict[str, Callable[[], None]] = {
    "raw write + fsync": raw,
    "titan": partial(titan, "disabled"),
    "titan async": partial(titan, "async"),
    "safetensors": partial(whole_file, "safetensors"),
    "torch.save": partial(whole_file, "torch.save"),
    "DCP": partial(dcp, wait=True),
    "DCP async": partial(dcp, wait=False),
}


WORKERS = {**TABLE, "checksums": checksums}
QUICK = [name for name in TABLE if name != "torch.save" and not name.startswith("DCP")]
"""What the promises are measured with."""


def promises(results: dict[str, list[side.Numbers]], hashing: list[side.Numbers]) -> str:
    """What titan promises of its checkpoints, and what was measured."""
    titan, waiting = results["titan"], results["titan async"]
    speed = side.ratio(results["raw write + fsync"], titan, "total")
    blocking = statistics.median(step["save"] / step["copy"] for step in waiting)
    best = {kind: min(step[kind] for step in hashing) for kind in ("with", "without")}
    save_cost = best["with"] / best["without"] - 1
    load = side.ratio(results["safetensors"], titan, "load")
    rows = [
        ("save, beside raw write + fsync", "at least 0.80 x its speed", f"{speed:.2f}"),
        ("asynchronous save stands still, beside a copy", "at most 1.30 x its time", f"{blocking:.2f} x"),
        ("checksums cost a save", "at most 3 %", f"{save_cost:.1%}"),
        ("load, beside safetensors and a copy", "at least 0.90 x its speed", f"{load:.2f}"),
    ]
    table = "\n".join(f"| {what} | {aim} | {measured} |" for what, aim, measured in rows)
    return f"| titan | aim | measured |\n|---|---|---|\n{table}"


def main() -> None:
    if side.run_worker(WORKERS):
        return
    parser = side.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="measured saves of each variant")
    parser.add_argument("--dir", type=Path, default=Path(), help="where to save: on the disk to be measured")
    parser.add_argument("--quick", action="store_true", help="without torch.save and DCP")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.dir, prefix=".checkpoint-benchmark-") as folder:
        os.environ[FOLDER] = folder
        results = side.measure(QUICK if arguments.quick else list(TABLE), rounds=arguments.rounds)
        hashing = side.measure(["checksums"], rounds=arguments.rounds)["checksums"]
    reference = results["raw write + fsync"]
    size = reference[0]["bytes"]
    print(side.machine("titancli", "torch", "safetensors"))
    print(f"{size / 1e9:.2f} GB of state, one thread, medians of {arguments.rounds} rounds\n")
    print("| variant | training stands still, s | saved after, s | GB/s | x raw | load, s | GB/s |")
    print("|---|---|---|---|---|---|---|")
    for name, steps in results.items():
        total, load = side.median(steps, "total"), side.median(steps, "load")
        print(
            f"| {name} | {side.median(steps, 'save'):.2f} | {total:.2f} | {size / total / 1e9:.2f} "
            f"| {side.ratio(steps, reference, 'total').value:.2f} | {load:.2f} | {size / load / 1e9:.2f} |"
        )
    print(f"\n{promises(results, hashing)}")


if __name__ == "__main__":
    main()
