"""Training steps on one GPU: titan beside a plain compiled loop and torchtitan.

    python benchmarks/train_gpu.py [--models 1B 3B 8B] [--batch 8B=1] [--only titan plain] [--steps N]
    python benchmarks/train_gpu.py --plan            # what it would run, and for how long; needs no GPU
    python benchmarks/train_gpu.py --device cpu          # every line of it, on a 6 M parameter model

What is compared: whole optimizer steps (forward, backward, clipping to 1, AdamW) on random tokens, rows of
8192, everything compiled. Each variant is a process of its own, started afresh, one after the other: one GPU
holds one. All variants of a model take turns, `--repeats` times, so that a GPU that slows down slows all of
them; the table has medians, and the range beside them. A variant that does not fit is tried again with half
the rows, down to one, and else reported as out of memory.

- titan bf16: the recipe `llama3_1b`, `llama3_3b`, `llama3_8b` as it is shipped (fp32 weights and gradients,
  bf16 products and moments, chunked loss), on a process group of one rank.
- titan float8: the same with the converter `float8_linear` (tensorwise, not the output), if titan-float8 is
  installed.
- plain: `plain_llama.py` under `torch.compile` and bf16 autocast, fp32 weights, fused AdamW: what anybody
  would write. plain-bf16: the same with weights, gradients and moments all in bf16: half the bytes, other
  numerics.
- torchtitan: 0.2's Llama 3 through its own `parallelize_llama` as its trainer does it on one GPU (compile
  block by block, autocast, selective activation checkpointing, fused AdamW, compiled loss); its 1B and 3B do
  not tie embeddings, so they have more parameters. Left out, with a line, where torchtitan 0.2 cannot be
  imported.

tokens/s is over all measured steps, the device synchronised before and after. Memory is the allocator's peak.
MFU = flops_per_token x tokens/s / peak, where flops_per_token = 6 x matrix weights + 12 x layers x heads x
head_dim x sequence (titan's `model.flops_per_token`, the same for all variants of a model; causality is not
discounted, recomputation not counted), and peak is the device's dense bf16 rate
(`titancli/observe/peaks.py`), for float8 as well. Raw numbers go to `--out` as JSON, written anew after each
process: a run that is cut off keeps what it had. `wheels.sh` gathers what a machine without network needs.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import sidebyside as side
import torch
import torch.distributed as dist

RECIPES = {"debugmodel": "llama3_debug", "1B": "llama3_1b", "3B": "llama3_3b", "8B": "llama3_8b"}
VARIANTS = ("titan bf16", "titan float8", "plain", "plain-bf16", "torchtitan")
RESULTS = Path(__file__).parent / "results"
OUT_OF_MEMORY = 77
START_SECONDS = 150
"""Of one process until its first step is done: imports, initial values, compilation. For `--plan`."""
PLANNED_RATE = 0.4 * 989e12
"""FLOP/s that `--plan` takes for granted."""


@dataclass(frozen=True)
class Case:
    """One process: what it measures."""

    model: str
    variant: str
    rows: int
    seq_len: int
    steps: int
    warmup: int
    device: str


Step = Callable[[torch.Tensor, torch.Tensor], Any]


# ---------------------------------------------------------------------------------------------- variants


def titan(case: Case, device: torch.device) -> Step:
    from titancli.data.batch import Batch
    from titancli.engine import Engine

    engine = Engine.build(recipe(case), device=device)

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> Any:
        metrics = engine.forward_backward(Batch({"tokens": tokens, "targets": targets}))
        return metrics | engine.optim_step()

    return step


def recipe(case: Case) -> Any:
    from titancli.recipe import load_recipe

    overrides = [f"training.seq_len={case.seq_len}", f"training.local_batch_size={case.rows}"]
    if case.device == "cpu":
        overrides += ["compile.enable=true", "training.mixed_precision_param=bfloat16"]
    if case.variant == "titan float8":
        overrides.append('converters=[{type="float8_linear", recipe="tensorwise", skip=["output"]}]')
    return load_recipe(RECIPES[case.model], overrides).recipe


def plain(case: Case, device: torch.device) -> Step:
    from plain_llama import SIZES, Llama
    from torch.nn.functional import cross_entropy

    all_bf16 = case.variant == "plain-bf16"
    with device:
        # Filled on the device: on the CPU the large ones take minutes.
        model = Llama(**SIZES[case.model], seq_len=case.seq_len)  # type: ignore[arg-type]
    if all_bf16:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )

    @torch.compile
    def loss_of(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> Any:
        with nullcontext() if all_bf16 else torch.autocast(device.type, torch.bfloat16):
            loss = loss_of(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return {"loss": loss.detach()}

    return step


TORCHTITAN_SIZES: dict[str, dict[str, Any]] = {
    "debugmodel": dict(dim=256, n_layers=6, n_heads=16, vocab_size=2048),
    "1B": dict(dim=2048, n_layers=16, n_heads=32, n_kv_heads=8, ffn_dim_multiplier=1.5),
    "3B": dict(dim=3072, n_layers=28, n_heads=24, n_kv_heads=8),
    "8B": dict(dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, ffn_dim_multiplier=1.3, multiple_of=1024),
}


def torchtitan(case: Case, device: torch.device) -> Step:
    from torchtitan.components.loss import build_cross_entropy_loss
    from torchtitan.config import JobConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.models.llama3.infra.parallelize import parallelize_llama
    from torchtitan.models.llama3.model.args import TransformerModelArgs
    from torchtitan.models.llama3.model.model import Transformer

    config = JobConfig()
    config.training.seq_len = case.seq_len
    config.compile.enable = True
    config.activation_checkpoint.mode = "selective"
    with device:
        model = Transformer(
            TransformerModelArgs(**TORCHTITAN_SIZES[case.model], rope_theta=500000, max_seq_len=case.seq_len)
        )
    dims = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=1)
    parallelize_llama(model, dims, config)
    with torch.no_grad():
        model.init_weights(buffer_device=device)
    loss_function = build_cross_entropy_loss(config)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> Any:
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_function(model(tokens), targets) / targets.numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return {"loss": loss.detach()}

    return step


BUILD: dict[str, Callable[[Case, torch.device], Step]] = {
    "titan bf16": titan,
    "titan float8": titan,
    "plain": plain,
    "plain-bf16": plain,
    "torchtitan": torchtitan,
}


# -------------------------------------------------------------------------------------------- the worker


def worker(case: Case) -> None:
    """Measure one case and print its numbers; exit with OUT_OF_MEMORY if it does not fit."""
    device = torch.device("cuda", 0) if case.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(os.path.join(folder, "store"), 1)
        backend = "cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        try:
            numbers = measure(case, device)
        except torch.OutOfMemoryError as error:
            print(str(error).splitlines()[0], file=sys.stderr)
            sys.exit(OUT_OF_MEMORY)
        finally:
            dist.destroy_process_group()
    side.answer(numbers)


def measure(case: Case, device: torch.device) -> dict[str, Any]:
    step = BUILD[case.variant](case, device)
    generator = torch.Generator(device).manual_seed(0)
    flops, vocabulary = facts(case)

    def run(count: int) -> tuple[float, float]:
        synchronize(device)
        start, loss = time.perf_counter(), float("nan")
        for number in range(count):
            shape = (case.rows, case.seq_len + 1)
            tokens = torch.randint(0, vocabulary, shape, generator=generator, device=device)
            metrics = step(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
            if number == count - 1:
                loss = float(metrics["loss"])
        synchronize(device)
        return time.perf_counter() - start, loss

    warmup_seconds, _ = run(case.warmup)
    seconds, loss = run(case.steps)
    rate = case.rows * case.seq_len * case.steps / seconds
    return {
        "tokens_per_second": rate,
        "mfu": mfu(flops * rate, device),
        "flops_per_token": flops,
        "peak_memory_bytes": peak_memory(device),
        "step_seconds": seconds / case.steps,
        "warmup_seconds": warmup_seconds,
        "loss": loss,
    }


def facts(case: Case) -> tuple[float, int]:
    """FLOPs of a token and the vocabulary, by titan's own model."""
    from titancli.registry.component import build

    config = recipe(case).model
    with torch.device("meta"):
        return build(config, seq_len=case.seq_len).flops_per_token(case.seq_len), config.vocab_size


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory(device: torch.device) -> float:
    """Bytes: the most that the allocator has held on a GPU, else the process's peak resident set."""
    if device.type != "cuda":
        return side.peak_rss()
    return float(torch.cuda.max_memory_reserved(device))


def mfu(flops_per_second: float, device: torch.device) -> float | None:
    from titancli.observe.peaks import device_peak

    peak = device_peak(device)
    return flops_per_second / peak if peak else None


# -------------------------------------------------------------------------------------------- the parent


def run_case(case: Case) -> dict[str, Any]:
    """The numbers of a case; `{"failed": why}` where there are none."""
    command = [sys.executable, __file__, "--case", json.dumps(asdict(case))]
    # One segment can then grow into another's space: less is lost to fragments when memory is nearly full.
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", **os.environ}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode == 0:
        return {**asdict(case), **json.loads(done.stdout.splitlines()[-1])}
    if done.returncode == OUT_OF_MEMORY and case.rows > 1:
        return run_case(replace(case, rows=case.rows // 2))
    why = "out of memory" if done.returncode == OUT_OF_MEMORY else f"failed: {done.stderr.strip()[-2000:]}"
    return {**asdict(case), "failed": why}


def missing(variant: str) -> str | None:
    """Why a variant cannot be run here."""
    if variant == "titan float8":
        from titancli import registry
        from titancli.errors import TitanError

        try:
            registry.current().find("converter", "float8_linear")
        except TitanError as error:
            return f"titan float8 left out: {str(error).splitlines()[0]}"
    if variant == "torchtitan":
        try:
            found = importlib.metadata.version("torchtitan")
        except importlib.metadata.PackageNotFoundError:
            return "torchtitan left out: not installed (pip install torchtitan==0.2.2)"
        if not found.startswith("0.2."):
            return f"torchtitan left out: {found} is installed, and this script drives 0.2"
    return None


def environment() -> dict[str, Any]:
    versions = {}
    for package in ("titancli", "titan-float8", "torch", "torchao", "torchtitan", "triton"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU"
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "device": device,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "versions": versions,
        "command": " ".join(sys.argv),
    }


def row(results: list[dict[str, Any]]) -> str:
    """A line of the table: the repeats of one variant."""
    first = results[0]
    name = f"| {first['model']} | {first['variant']} | {first['rows']} x {first['seq_len']}"
    done = [result for result in results if "failed" not in result]
    if not done:
        return f"{name} | {first['failed'].splitlines()[-1]} | | | |"
    rates = [result["tokens_per_second"] for result in done]
    middle = sorted(done, key=lambda result: result["tokens_per_second"])[len(done) // 2]
    utilisation = f"{middle['mfu']:.1%}" if middle["mfu"] else "—"
    memory = max(result["peak_memory_bytes"] for result in done) / 2**30
    spread = f"{min(rates):,.0f} to {max(rates):,.0f}"
    missing = f", {len(results) - len(done)} failed" if len(done) < len(results) else ""
    return (
        f"{name} | {middle['tokens_per_second']:,.0f} | {spread}{missing} | {utilisation} | {memory:.1f} | "
        f"{middle['loss']:.4f} |"
    )


def seconds(case: Case) -> float:
    """How long a process takes, roughly."""
    flops, _ = facts(case)
    return START_SECONDS + (case.warmup + case.steps) * case.rows * case.seq_len * flops / PLANNED_RATE


def show_plan(cases: list[Case]) -> None:
    """Print every process in its order, and how long all take."""
    for number, case in enumerate(cases, start=1):
        print(
            f"{number:3}. {case.model:10} {case.variant:14} {case.rows} x {case.seq_len}, "
            f"{case.warmup} + {case.steps} steps, about {seconds(case) / 60:.0f} min"
        )
    print(f"about {sum(map(seconds, cases)) / 60:.0f} min in all")


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
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the raw numbers")
    parser.add_argument("--plan", action="store_true", help="print what would run and for how long, and end")
    arguments = parser.parse_args()
    small = arguments.device == "cpu"
    arguments.models = arguments.models or (["debugmodel"] if small else ["1B", "3B", "8B"])
    arguments.seq_len = arguments.seq_len or (256 if small else 8192)
    arguments.steps = arguments.steps or (2 if small else 30)
    arguments.warmup = arguments.warmup or (1 if small else 5)
    arguments.repeats = arguments.repeats or (1 if small else 3)
    return arguments


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[1] == "--case":
        worker(Case(**json.loads(sys.argv[2])))
        return
    arguments = parse()
    about = environment()
    if arguments.device == "cuda" and about["device"] == "CPU" and not arguments.plan:
        raise SystemExit("there is no GPU here; --device cpu runs every line on a tiny model")
    from titancli.recipe import load_recipe

    batches = {
        model: load_recipe(RECIPES[model]).recipe.training.local_batch_size for model in arguments.models
    }
    batches |= {model: int(rows) for model, _, rows in (text.partition("=") for text in arguments.batch)}
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    print(f"{about['date']}, {about['device']}, Python {about['python']}; {versions}\n")
    notes = [note for variant in arguments.only if (note := missing(variant))]
    variants = [variant for variant in arguments.only if not missing(variant)]
    cases = [
        Case(
            model=model,
            variant=variant,
            rows=batches[model],
            seq_len=arguments.seq_len,
            steps=arguments.steps,
            warmup=arguments.warmup,
            device=arguments.device,
        )
        for model in arguments.models
        for _ in range(arguments.repeats)
        for variant in variants
    ]
    if arguments.plan:
        print("\n".join(notes))
        show_plan(cases)
        return
    path = arguments.out / f"train_gpu-{about['date'].replace(':', '')}.json"
    results: list[dict[str, Any]] = []
    for case in cases:
        results.append(run_case(case))
        print(row(results[-1:]), flush=True)
        if arguments.device == "cuda" or arguments.out != RESULTS:
            arguments.out.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(".part")  # a run that is cut off here keeps the file before it
            partial.write_text(json.dumps({"environment": about, "results": results}, indent=2) + "\n")
            partial.replace(path)
    print("\n| model | variant | batch | tokens/s | range | MFU | peak memory, GiB | loss |")
    print("|---|---|---|---|---|---|---|---|")
    for model in arguments.models:
        for variant in variants:
            print(row([r for r in results if (r["model"], r["variant"]) == (model, variant)]))
    print("\n".join(["", *notes]))
    if path.exists():
        print(f"raw numbers: {path}")


if __name__ == "__main__":
    main()
