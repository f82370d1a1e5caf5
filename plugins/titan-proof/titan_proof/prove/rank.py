"""One rank of a proof: `python -m titan_proof.prove.rank FD RANK [-pFILE | -pno:NAME]...`.

Jobs come through a pipe as JSON, and answers go back through it. Rank 0 keeps the references and compares.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import shutil
import sys
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titan_proof.prove.compare import (
    FLOOR,
    FLOOR_BF16,
    Reference,
    adds_up,
    compared,
    not_finite,
    reference_of,
)
from titan_proof.prove.measure import Refusal, engine_of, measure
from titan_proof.prove.uses import exported, generated
from titancli import Recipe, load_recipe, registry
from titancli.distributed import process_group
from titancli.engine import on_meta
from titancli.errors import RankFailure, TitanError
from titancli.process import die_with_parent, quiet
from titancli.registry.plugins import own_traceback

NUDGE = 1e-6
"""Relative size of the change of weights that measures the effect of rounding."""
NUDGES = 8
"""Number of nudges with converters and in bfloat16: if a number of few bits is rounded the other way, one
nudge changes ten times as much as the next."""
LARGEST = 20_000_000
"""Maximum number of parameters of a small copy."""
SEEDS = 5
"""Number of seeds for weights and rows that are tried, until the choice of experts is clear."""
EXCHANGE_SECONDS = 60


class Rank:
    """The state that a rank keeps between jobs."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.references: dict[str, Reference] = {}

    def answer(self, job: dict[str, Any]) -> dict[str, Any]:
        """Do a job.

        Returns:
            `status`: `right`, `wrong`, `refused`, `large` or `failed`, and the keys that belong to it.
        """
        began = time.perf_counter()
        try:
            if job["do"] == "reference":
                found = self._reference(job)
            else:
                found = self._case(job)
        except Refusal as error:
            found = {"status": "refused", "reason": str(error)}
        except Exception as error:
            traceback.print_exc()
            reason = str(error) if isinstance(error, TitanError) else own_traceback(error)
            found = {"status": "failed", "reason": reason, "echo": _is_echo(error)}
        return found | {"seconds": time.perf_counter() - began}

    def _reference(self, job: dict[str, Any]) -> dict[str, Any]:
        """Measure one process, without a nudge of its weights and with nudges."""
        recipe = _recipe(job, 0)
        sizes = {name: parameter.numel() for name, parameter in on_meta(recipe).named_parameters()}
        if sum(sizes.values()) > LARGEST:
            name = max(sizes, key=lambda name: sizes[name])
            sizes_found = {"largest": name, "numbers": sizes[name], "parameters": sum(sizes.values())}
            return {"status": "large", **sizes_found}
        _make_base(recipe, job)
        for seed in [job["seed"]] if "seed" in job else range(SEEDS):
            recipe = _recipe(job, seed)
            with _group(job, f"plain-{seed}"):
                plain = measure(recipe, job["sizes"], how=job["how"])
            if (bad := not_finite(plain)) is not None:
                return {"status": "failed", "reason": bad}
            with _group(job, f"nudged-{seed}"):
                nudged = measure(recipe, job["sizes"], nudge=NUDGE, how=job["how"])
            routes = [key for key in plain.tensors if " routes" in key]
            if all(torch.equal(plain.tensors[key], nudged.tensors[key]) for key in routes):
                break
        is_bf16 = recipe.training.mixed_precision_param != "float32"
        more = range(2, NUDGES + 1) if recipe.converters or is_bf16 else ()
        with _group(job, "nudged-again"):
            again = [measure(recipe, job["sizes"], nudge=NUDGE, draw=draw, how=job["how"]) for draw in more]
        reference = reference_of(plain, nudged, *again, floor=FLOOR_BF16 if is_bf16 else FLOOR)
        self.references[job["key"]] = reference
        by_rows = False
        if recipe.converters:
            with _group(job, "halves"):
                by_rows = not adds_up(recipe, sum(job["sizes"]), reference)
        return {
            "status": "right",
            "seed": seed,
            "random": plain.random,
            "parameters": sum(sizes.values()),
            "noise": reference.noise,
            "by_rows": by_rows,
            "where": None,
        }

    def _case(self, job: dict[str, Any]) -> dict[str, Any]:
        recipe = _recipe(job, job["seed"])
        saved = Path(job["store"] + "-saved")
        if self.rank == 0 and job["reference"]["key"] not in self.references:  # the ranks were restarted
            self._reference({**job, **job["reference"], "store": job["store"] + "-again"})
        reference = self.references.get(job["reference"]["key"])  # rank 0 has it
        with _group(job, "case"):
            if "generation" in job["more"]:
                return generated(recipe, job["sizes"], reference, by_rows=job["by_rows"])
            if "export" in job["more"]:
                return exported(recipe, job["sizes"], saved)
            resumed = saved / "step-1" if "resume" in job["more"] else None
            results = measure(recipe, job["sizes"], saved=resumed, how=job["how"])
        if reference is None:
            return {"status": "right"}
        shutil.rmtree(saved, ignore_errors=True)
        return compared(results, reference)


def _recipe(job: dict[str, Any], seed: int) -> Recipe:
    return load_recipe(Path(job["file"]), [*job["overrides"], f"training.seed={seed}"]).recipe


def _make_base(recipe: Recipe, job: dict[str, Any]) -> None:
    """Save weights for converters that add some beside a base."""
    if job["base"] is None or Path(job["base"]).exists():
        return
    alone = dataclasses.replace(recipe, weights=None, converters=[])
    with _group(job, "base"), engine_of(alone) as engine:
        engine.save(Path(job["base"]))  # without the file's text, which may have fewer layers


class _group:
    """A new process group of a job's ranks, destroyed on exit."""

    def __init__(self, job: dict[str, Any], name: str) -> None:
        self.world = 1 if job["do"] == "reference" else job["world"]
        self.store, self.device = f"{job['store']}-{name}", job["device"]

    def __enter__(self) -> None:
        rank = int(os.environ["TITAN_PROVE_RANK"]) if self.world > 1 else 0
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.world, "LOCAL_WORLD_SIZE": self.world}
        os.environ.update({name: str(value) for name, value in place.items()})
        backend = "gloo"
        if self.device == "cuda":
            torch.cuda.set_device(rank)
            backend = "cpu:gloo,cuda:nccl"
        gc.freeze()  # nothing that exists by now is garbage
        dist.init_process_group(
            backend,
            store=dist.FileStore(self.store, self.world),
            rank=rank,
            world_size=self.world,
            timeout=timedelta(seconds=EXCHANGE_SECONDS),
        )
        dist.barrier()  # otherwise a rank that is done at once leaves while others still connect

    def __exit__(self, *error: object) -> None:
        process_group.destroy()
        gc.collect()  # engines are in reference cycles, and keep their groups and the threads of these


def _is_echo(error: Exception) -> bool:
    """Return whether an error only says that another rank has failed."""
    return isinstance(error, (RankFailure, dist.DistError)) or any(
        name in str(error) for name in ("gloo", "NCCL")
    )


def main(arguments: list[str]) -> None:
    """Answer until the pipe closes."""
    die_with_parent()
    quiet()
    torch.set_num_threads(1)
    pipe: Connection[Any, Any] = Connection(int(arguments[0]))
    os.environ["TITAN_PROVE_RANK"] = arguments[1]
    plugins = [argument.removeprefix("-p") for argument in arguments[2:]]
    registry.configure(
        files=[Path(name) for name in plugins if not name.startswith("no:")],
        blocked=[name.removeprefix("no:") for name in plugins if name.startswith("no:")],
    )
    rank = Rank(int(arguments[1]))
    while True:
        try:
            job = json.loads(pipe.recv_bytes())
        except EOFError:
            return
        pipe.send_bytes(json.dumps(rank.answer(job)).encode())


if __name__ == "__main__":
    main(sys.argv[1:])
