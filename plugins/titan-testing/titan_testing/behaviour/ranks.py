"""Checks that need two ranks: jobs queued by checks, run together by two processes that start once.

The processes are `python -m titan_testing.behaviour.ranks FOLDER`. They read the jobs from `jobs.json`, with
batches and one rank's results in safetensors, and write faults to `faults.json`.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titancli.errors import TitanError
from titancli.registry.plugins import own_traceback

if TYPE_CHECKING:
    from torch import Tensor

    from titancli import Batch

WORLD = 2
SECONDS = 240
"""Time limit for all jobs."""
EXCHANGE_SECONDS = 15
"""Time limit for a rank to wait for the other in a collective."""

_jobs: list[Job] = []


@dataclass(frozen=True)
class Job:
    """A computation on two ranks, to be compared with the result of one."""

    label: str
    check: str
    parts: dict[str, Any]
    """Arguments of `engine_of`: configs, lists of them, and a path."""
    layouts: dict[str, dict[str, int]]
    measure: str
    """`gradients` of the first batch, or `weights` after a step on each."""
    tolerance: float
    batches: list[Batch]
    reference: dict[str, Tensor]


def later(job: Job) -> None:
    """Queue a job for `run_jobs`."""
    _jobs.append(job)


def take_jobs() -> list[Job]:
    """Return the queued jobs, and clear the queue."""
    found = list(_jobs)
    _jobs.clear()
    return found


def run_jobs(jobs: list[Job], files: list[Path]) -> Iterator[str]:
    """Run jobs on two ranks, and yield faults, each with its component and check.

    Args:
        files: single-file plugins that the ranks load too.
    """
    if not jobs:
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write(jobs, files, folder)
        common = {
            "OMP_NUM_THREADS": "1",
            "WORLD_SIZE": str(WORLD),
            "LOCAL_WORLD_SIZE": str(WORLD),
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        ranks = []
        for rank in range(WORLD):
            environment = {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            log = (folder / f"rank-{rank}.log").open("w")
            command = [sys.executable, "-m", "titan_testing.behaviour.ranks", name]
            ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
            log.close()
        try:
            for process in ranks:
                process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            yield f"two ranks did not respond within {SECONDS} s: {_last_words(folder)}"
            return
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        if not (folder / "faults.json").is_file():
            yield f"two ranks could not be run: {_last_words(folder)}"
            return
        yield from json.loads((folder / "faults.json").read_text())


def _last_words(folder: Path) -> str:
    logs = [(folder / f"rank-{rank}.log").read_text().strip() for rank in range(WORLD)]
    return "\n".join(log[-2000:] for log in logs if log) or "they printed nothing"


def _write(jobs: list[Job], files: list[Path], folder: Path) -> None:
    from safetensors.torch import save_file

    listed = []
    for number, job in enumerate(jobs):
        save_file({k: v.contiguous() for k, v in job.reference.items()}, folder / f"{number}.reference")
        for place, batch in enumerate(job.batches):
            tensors = {name: tensor.contiguous().clone() for name, tensor in batch.items()}
            save_file(tensors, folder / f"{number}.batch.{place}")
        listed.append(
            {
                "label": job.label,
                "check": job.check,
                "parts": {name: _as_data(part) for name, part in job.parts.items()},
                "layouts": job.layouts,
                "measure": job.measure,
                "tolerance": job.tolerance,
                "units": [batch.unit for batch in job.batches],
            }
        )
    (folder / "jobs.json").write_text(json.dumps({"jobs": listed, "files": [str(file) for file in files]}))


def _as_data(part: Any) -> Any:
    """Return a config, or a list of them, as plain data."""
    from titancli.recipe import DEFAULT, Node, resolved_data
    from titancli.registry import current
    from titancli.registry.component import component_info

    if isinstance(part, list):
        return [_as_data(config) for config in part]
    if isinstance(part, str):
        return part
    data = resolved_data(part, Node({}, DEFAULT), current())
    return {"kind": component_info(part).kind, "name": data.pop("type"), "values": data}


# ------------------------------------------------------------------------------------------ on each rank


def main(folder: Path) -> None:
    """Run all jobs as one rank. Results of each layout are exchanged through a file, since a rank that
    raises leaves the others in the middle of a collective; the remaining layouts are then skipped."""
    import torch
    import torch.distributed as dist

    from titancli import registry
    from titancli.distributed import process_group

    torch.set_num_threads(1)
    listed = json.loads((folder / "jobs.json").read_text())
    registry.configure(files=[Path(file) for file in listed["files"]])
    rank, store = int(os.environ["RANK"]), dist.FileStore(str(folder / "store"), WORLD)
    store.set_timeout(timedelta(seconds=SECONDS / 4))
    faults: list[str] = []
    for number, job in enumerate(listed["jobs"]):
        for layout, mesh in job["layouts"].items():
            key = f"{number} {layout}"
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(key, store),
                rank=rank,
                world_size=WORLD,
                timeout=timedelta(seconds=EXCHANGE_SECONDS),
            )
            try:
                outcome = {"fault": _compared(folder, number, job, mesh), "raised": False}
            except Exception as error:
                outcome = {"fault": f"it raises: {own_traceback(error)}", "raised": True}
            finally:
                process_group.destroy()
            store.set(f"{key} {rank}", json.dumps(outcome))
            both = [json.loads(store.get(f"{key} {other}")) for other in range(WORLD)]
            found = sorted((one["fault"] for one in both if one["fault"]), key=_secondhand)
            faults += [f"{job['label']}: [{job['check']}] {layout}: {fault}" for fault in found[:1]]
            if any(one["raised"] for one in both):
                faults.append(f"{job['label']}: [{job['check']}] the layouts after {layout} were not checked")
                _finish(folder, rank, faults)
                return
    _finish(folder, rank, faults)


def _finish(folder: Path, rank: int, faults: list[str]) -> None:
    if rank == 0:
        part = folder / "faults.part"
        part.write_text(json.dumps(faults))
        part.rename(folder / "faults.json")


def _secondhand(fault: str) -> bool:
    """Return whether a rank's error only reports that another one failed."""
    return any(words in fault for words in ("gloo", "Connection closed", "timeout", "rank 0", "rank 1"))


def _compared(folder: Path, number: int, job: dict[str, Any], mesh: dict[str, int]) -> str | None:
    """Return the fault of a job on one layout, as seen by this rank; None if there is none, or a
    TitanError rejects the layout."""
    from safetensors.torch import load_file

    from titan_testing.behaviour.engines import engine_of, gradients, step, weights
    from titan_testing.behaviour.subject import first_difference
    from titancli import Batch

    parts = {name: _bound(part) for name, part in job["parts"].items()}
    reference = load_file(folder / f"{number}.reference")
    with contextlib.ExitStack() as ends:
        try:
            engine = ends.enter_context(engine_of(**parts, mesh=mesh))
        except TitanError:
            return None
        dp = engine.mesh.degrees.dp
        batches = [
            _mine(Batch(load_file(folder / f"{number}.batch.{place}"), unit=unit), dp, engine.mesh.dp_rank)
            for place, unit in enumerate(job["units"])
        ]
        if job["measure"] == "gradients":
            found = gradients(engine, batches[0])
        else:
            saved = folder / f"{number}.saved" / "step-1"
            step(engine, batches[0])
            engine.save(saved)
            step(engine, batches[1])
            found = weights(engine)
            fresh = ends.enter_context(engine_of(**parts, mesh=mesh))
            fresh.load(saved)
            step(fresh, batches[1])
            if difference := first_difference(found, weights(fresh), 0.0):
                return f"a step after a resume is different: {difference}"
        if missing := [name for name in found if name not in reference]:
            return f"parameters have different names: {', '.join(missing)}"
        if difference := first_difference({n: reference[n] for n in found}, found, job["tolerance"]):
            return f"its result differs from that of one rank: {difference}"
    return None


def _bound(part: Any) -> Any:
    from titancli.registry import current
    from titancli.registry.binding import bind

    if isinstance(part, list):
        return [_bound(config) for config in part]
    if isinstance(part, str):
        return part
    return bind(current().find(part["kind"], part["name"]), part["values"], current())


def _mine(batch: Batch, dp: int, dp_rank: int) -> Batch:
    """Return this data-parallel rank's rows."""
    return batch.split(batch.rows // dp)[dp_rank]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
