"""Training steps on one GPU: titan beside a plain compiled loop and torchtitan 0.2.2 and 0.3.0.

    python benchmarks/train_gpu.py --plan                # what it would run, and for how long; needs no GPU
    python benchmarks/train_gpu.py --out FOLDER [--models 1B 8B] [--only titan plain] [--batch 8B=1]
    python benchmarks/train_gpu.py --device cpu          # every line of it, on a 6 M parameter model

What is compared: whole optimizer steps (forward, backward, clipping to 1, AdamW) on rows of 8192 tokens, the
same for all, everything compiled. Each variant is a process of its own, started afresh, one after the other:
one GPU holds one. All variants of a model take turns, `--repeats` times, so that a GPU that slows down slows
all of them; the table has medians, and the range beside them. A variant that does not fit is tried again with
half the rows, down to one, and else reported as out of memory.

- titan: the recipe `llama3_1b`, `llama3_3b`, `llama3_8b` as it is shipped (fp32 weights and gradients, bf16
  products and moments, chunked loss), through `Engine`. titan none: without activation checkpointing. titan
  equal: with fp32 moments, the numerics of torchtitan and of the plain loop. titan float8: with the converter
  `float8_linear` (tensorwise, not the output), if titan-float8 is installed. titan lora: adapters of rank 16
  on all linear layers of the blocks, in bf16 as the frozen weights. titan documents: rows packed with
  documents of 1 to 2048 tokens, each of which attends to itself alone. titan bf16: weights and gradients in
  bf16 as well. titan graphs: with `compile.cuda_graphs = "step"`, not all in the allocator's peak.
- titan train: the command, end to end, on the same tokens in a file.
- plain: `plain_llama.py` under `torch.compile` and bf16 autocast, fp32 weights, fused AdamW: what anybody
  would write. plain bf16: the same with weights, gradients and moments all in bf16: half the bytes, other
  numerics.
- torchtitan: its own Trainer (`torchtitan_step.py`), compiled. own: its recipe for 8B (activation
  checkpointing by operator). none: without. budget: by a memory budget of one half. 0.2.2 and 0.3.0 want
  folders of their own: `--torchtitan 0.2.2=FOLDER 0.3.0=FOLDER`; else the one that is installed is measured.

tokens/s is over all measured steps, the device synchronised before and after, no loss read between. Memory is
the allocator's peak. MFU = flops_per_token x tokens/s / peak, where flops_per_token = 6 x matrix weights +
12 x layers x heads x head_dim x sequence (titan's `model.flops_per_token`, the same for all variants of a
model; causality is not discounted, recomputation not counted), and peak is the device's dense bf16 rate
(`titancli/observe/peaks.py`), for float8 as well.

The first repeat of each variant also reads the losses of `--curve` steps, drawn in losses-MODEL.svg, and has
its kernels timed: the table "where the step goes". FOLDER gets results.json and report.md, written anew after
each process: a run that is cut off keeps what it had, and the same command goes on where it ended.
`wheels.sh` gathers what a machine without network needs.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import sidebyside as side
import torch
import torch.distributed.fsdp
from gpu_report import report, row
from gpu_steps import OUT_OF_MEMORY, RECIPES, TORCHTITAN, VARIANTS, Case, facts, recipe, worker

START_SECONDS = 120
"""Of one process until its first step is done: imports, initial values, compilation. For `--plan`."""
PLANNED_RATE = 0.4 * 989e12
"""FLOP/s that `--plan` takes for granted."""

Result = dict[str, Any]


def run_case(case: Case, paths: dict[str, str], lock: int) -> Result:
    """The numbers of a case; `{"failed": why}` where there are none. Its process holds the lock as well."""
    command = [sys.executable, __file__, "--case", json.dumps(asdict(case))]
    # One segment can then grow into another's space: less is lost to fragments when memory is nearly full.
    setting = "expandable_segments:True"
    environment = {"PYTORCH_ALLOC_CONF": setting, "PYTORCH_CUDA_ALLOC_CONF": setting, **os.environ}
    if path := paths.get(TORCHTITAN.get(case.variant, ("",))[0]):
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (path, os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, check=False, pass_fds=[lock]
    )
    if done.returncode == 0:
        return {**asdict(case), **json.loads(done.stdout.splitlines()[-1])}
    if done.returncode == OUT_OF_MEMORY and case.rows > 1:
        return run_case(replace(case, rows=case.rows // 2), paths, lock)
    why = "out of memory"
    if done.returncode < 0:  # the kernel kills what takes too much of the host's memory
        why = f"failed: killed by {signal.Signals(-done.returncode).name}"
    elif done.returncode != OUT_OF_MEMORY:
        why = f"failed: {done.stderr.strip()[-2000:]}"
    return {**asdict(case), "failed": why}


def missing(variant: str, paths: dict[str, str]) -> str | None:
    """Why a variant cannot be run here."""
    if variant == "titan float8":
        from titancli import registry
        from titancli.errors import TitanError

        try:
            registry.current().find("converter", "float8_linear")
        except TitanError as error:
            return f"titan float8 left out: {str(error).splitlines()[0]}"
    if variant in TORCHTITAN:
        version, _ = TORCHTITAN[variant]
        path = paths.get(version)
        if path is None and installed("torchtitan") != version:
            return f"{variant} left out: give --torchtitan {version}=FOLDER (see wheels.sh)"
        if version == "0.3.0" and not hasattr(torch.distributed.fsdp, "DataParallelMeshDims"):
            return f"{variant} left out: its FSDP2 wants a newer torch than {torch.__version__}"
        if path is not None and not (Path(path) / "torchtitan").is_dir():
            return f"{variant} left out: {path} holds no torchtitan"
    return None


def installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def environment() -> dict[str, Any]:
    packages = ("titancli", "titan-float8", "torch", "torchao", "triton")
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU"
    return {
        "device": device,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "source": source(),
        "versions": {package: found for package in packages if (found := installed(package))},
    }


def source() -> str:
    """A hash of titan's code: what was measured with other code is of another run."""
    import titancli

    digest = hashlib.sha256()
    for path in sorted(Path(titancli.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def wanted(arguments: argparse.Namespace, variants: list[str]) -> list[Case]:
    """Every process, in the order in which they run."""
    from titancli.recipe import load_recipe

    batches = {name: load_recipe(RECIPES[name]).recipe.training.local_batch_size for name in arguments.models}
    if arguments.device == "cpu":
        batches = dict.fromkeys(batches, 2)
    batches |= {name: int(rows) for name, _, rows in (text.partition("=") for text in arguments.batch)}
    return [
        Case(
            model=model,
            variant=variant,
            repeat=repeat,
            rows=batches[model],
            seq_len=arguments.seq_len,
            steps=arguments.steps,
            warmup=arguments.warmup,
            curve=0 if repeat or variant == "titan train" else arguments.curve,
            profile=0 if repeat or variant == "titan train" else arguments.profile,
            device=arguments.device,
            compile=not arguments.no_compile,
        )
        for model in arguments.models
        for repeat in range(arguments.repeats)
        for variant in variants
    ]


def seconds(case: Case) -> float:
    """How long a process takes, roughly."""
    flops, _ = facts(case)
    count = max(case.warmup + case.steps, case.curve) + case.profile
    return START_SECONDS + count * case.rows * case.seq_len * flops / PLANNED_RATE


def planned(case: Case) -> str:
    """What `titan plan` says of titan's memory on an H200; float8 is computed as bf16."""
    from titancli.observe.peaks import DEVICES
    from titancli.planning.estimate import estimate

    if not case.variant.startswith("titan"):
        return ""
    made = recipe(case)
    found = estimate(made, made.degrees(1), DEVICES["H200"])
    if found is None:
        return ""
    return f", {found.worst.total / 2**30:.1f} GiB planned"


def show_plan(cases: list[Case]) -> None:
    """Print every process in its order, and how long all take."""
    for number, case in enumerate(cases, start=1):
        extra = f", losses of {case.curve}, {case.profile} profiled" if case.curve or case.profile else ""
        print(
            f"{number:3}. {case.model:10} {case.variant:24} {case.rows} x {case.seq_len}, "
            f"{case.warmup} + {case.steps} steps{extra}, about {seconds(case) / 60:.1f} min{planned(case)}"
        )
    print(f"about {sum(map(seconds, cases)) / 60:.0f} min in all")


def kept(path: Path, about: dict[str, Any], cases: list[Case]) -> list[Result]:
    """What an earlier run left; of these cases only what was asked for, and has not failed."""
    if not path.exists():
        return []
    try:
        found = json.loads(path.read_text())
        there = found["environment"]
        [(key_of(result), result["rows"], result["asked_rows"]) for result in found["results"]]
    except (ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"{path} is damaged ({error!r}): move it away, or choose another --out") from None
    if there != about:
        raise SystemExit(f"{path} is of another machine or code: {there}; choose another --out")
    asked = {key_of(asdict(case)): asdict(case) for case in cases}

    def stays(result: Result) -> bool:
        case = asked.get(key_of(result))
        same = case is None or {key: result.get(key) for key in case} | {"rows": result["asked_rows"]} == case
        return same and result.get("failed", "out of memory") == "out of memory"

    return [result for result in found["results"] if stays(result)]


def key_of(result: Result) -> tuple[str, str, int]:
    return result["model"], result["variant"], result["repeat"]


def locked(folder: Path) -> int:
    """A lock on the folder that ends with this process and the one that it measures with: two would slow
    each other, and each would write its results over the other's."""
    lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SystemExit(
            f"{folder} is in use: another run measures there, or what one that was killed had started"
        ) from None
    return lock


def write(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".part")  # a run that is cut off here keeps the file before it
    partial.write_text(text)
    partial.replace(path)


def parse() -> argparse.Namespace:
    parser = side.parser(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--models", nargs="+", choices=tuple(RECIPES), help="[default: 1B 3B 8B]")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=VARIANTS, metavar="VARIANT")
    parser.add_argument(
        "--batch", nargs="+", default=[], metavar="MODEL=ROWS", help="[default: the recipe's]"
    )
    parser.add_argument("--seq-len", type=int, help="[default: 8192]")
    parser.add_argument("--steps", type=int, help="measured steps [default: 30]")
    parser.add_argument("--warmup", type=int, help="steps before them [default: 5]")
    parser.add_argument("--repeats", type=int, help="processes of each variant [default: 3]")
    parser.add_argument("--curve", type=int, help="steps whose losses are compared; 0: none [default: 200]")
    parser.add_argument("--profile", type=int, default=3, help="steps whose kernels are timed; 0: none")
    parser.add_argument("--torchtitan", nargs="+", default=[], metavar="VERSION=FOLDER")
    parser.add_argument("--no-compile", action="store_true", help="everything eager")
    parser.add_argument("--out", type=Path, help="folder for the results")
    parser.add_argument("--plan", action="store_true", help="print what would run and for how long, and end")
    arguments = parser.parse_args()
    small = arguments.device == "cpu"
    arguments.models = arguments.models or (["debugmodel"] if small else ["1B", "3B", "8B"])
    arguments.seq_len = arguments.seq_len or (64 if small else 8192)
    arguments.steps = arguments.steps or (2 if small else 30)
    arguments.warmup = arguments.warmup or (1 if small else 5)
    arguments.repeats = arguments.repeats or (1 if small else 3)
    if arguments.curve is None:
        arguments.curve = 5 if small else 200
    arguments.torchtitan = dict(text.split("=", 1) for text in arguments.torchtitan)
    return arguments


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[1] == "--case":
        worker(Case(**json.loads(sys.argv[2])))
        return
    arguments = parse()
    about = environment()
    if arguments.device == "cuda" and about["device"] == "CPU" and not arguments.plan:
        raise SystemExit("there is no GPU here; --device cpu runs every line on a tiny model")
    if arguments.out is None and not arguments.plan:
        raise SystemExit("--out: give a folder for the results; --plan needs none")
    why = {variant: missing(variant, arguments.torchtitan) for variant in arguments.only}
    notes = [note for note in why.values() if note]
    cases = wanted(arguments, [variant for variant in arguments.only if not why[variant]])
    print("\n".join(notes))
    if arguments.plan:
        show_plan(cases)
        return
    if not cases:
        raise SystemExit("nothing is left to measure")
    arguments.out.mkdir(parents=True, exist_ok=True)
    lock = locked(arguments.out)
    path = arguments.out / "results.json"
    results = kept(path, about, cases)
    have = {key_of(result) for result in results}
    date = time.strftime("%Y-%m-%d", time.gmtime())
    versions = ", ".join(f"{name} {found}" for name, found in about["versions"].items())
    heading = f"{date}, {about['device']}, Python {about['python']}, CUDA {about['cuda']}; {versions}"
    for case in cases:
        if key_of(asdict(case)) in have:
            continue
        results.append({**run_case(case, arguments.torchtitan, lock), "asked_rows": case.rows})
        print(row(results[-1:]), flush=True)
        write(path, json.dumps({"environment": about, "results": results}, indent=1) + "\n")
        text, pictures = report(results)
        write(arguments.out / "report.md", "\n\n".join([heading, text, *notes]) + "\n")
        for name, picture in pictures.items():
            write(arguments.out / name, picture)
    print("\n" + (arguments.out / "report.md").read_text())


if __name__ == "__main__":
    main()
