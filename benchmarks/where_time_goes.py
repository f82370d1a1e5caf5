"""The device time of a step by what it is spent on, from torch's profiler, beside the least possible."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

KINDS = (
    # The first that is found in a kernel's name (on a CPU: an operator's) counts.
    ("attention", r"flash|fmha|attention|flex|sdpa|cudnn_generated"),
    ("optimizer", r"adam|lerp|multi_tensor_apply_kernel.*(Adam|Lerp|Addc)"),
    ("norm", r"lpnorm|foreach_norm|linalg_vector_norm|l2norm|clip_grad|ForeachNorm|_foreach_mul"),
    ("products", r"gemm|nvjet|cutlass|cublas|xmma|scaled_mm|::(add)?mm|::bmm|::linear|splitK|::_mkl_linear"),
    ("collectives", r"nccl|all_gather|reduce_scatter|allreduce"),
    (
        "elementwise",
        r"triton_(?!\w+?_fused_+(to_copy|copy|clone)_*\d*$)",
    ),  # fused with casts, but not casts alone
    ("copies and casts", r"copy|clone|memcpy|memset|convert|::to\b|zero_|fill"),
    ("elementwise", r"."),
)

IDEAL_8B = {
    "products": 527.0,
    "attention": 116.0,
    "elementwise": 70.0,
    "optimizer": 37.0,
    "copies and casts": 22.0,
    "norm": 8.0,
}
"""Milliseconds of a step of Llama 3 8B on 8192 tokens on one H200: products at about 700 TFLOP/s, attention
at 400, and every byte that must be moved once at 4.3 TB/s. Reasoned, not measured."""


def ideal(model: dict[str, float], tokens: int, seq_len: int) -> dict[str, float]:
    """Scale `IDEAL_8B` to a model, given its `matrix` and `parameters` counts, `layers` and `dim`, in ms."""
    eight = {"matrix": 7.5e9, "parameters": 8.03e9, "layers": 32, "dim": 4096}
    share = {key: model[key] / eight[key] for key in eight}
    rows = tokens / 8192
    wide = share["layers"] * share["dim"] * rows
    factor = {
        "products": share["matrix"] * rows,
        "attention": wide * seq_len / 8192,
        "elementwise": wide,
        "optimizer": share["parameters"],
        "copies and casts": share["parameters"],
        "norm": share["parameters"],
    }
    return {kind: IDEAL_8B[kind] * factor[kind] for kind in IDEAL_8B}


def kind_of(name: str) -> str:
    return next(kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE))


def profile(steps: Callable[[], object], device: torch.device, count: int) -> dict[str, Any]:
    """Run `count` steps and return milliseconds of one by kind, of its 40 longest kernels, and of the whole.

    Also `idle`: the share of the time between the first kernel and the last in which none ran, on a GPU.
    """
    from torch.profiler import ProfilerActivity

    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CUDA] if cuda else [ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profiler:
        steps()
        if cuda:
            torch.cuda.synchronize(device)
    kernels: dict[str, float] = defaultdict(float)
    times = []
    for event in profiler.events():
        if cuda and (event.device_type.name == "CPU" or event.is_user_annotation):
            continue  # what launches kernels, and ranges that have names and cover several of them
        spent = event.time_range.elapsed_us() if cuda else event.self_cpu_time_total
        kernels[event.name] += spent / 1000 / count
        times.append((event.time_range.start, event.time_range.end))
    kinds: dict[str, float] = defaultdict(float)
    for name, spent in kernels.items():
        kinds[kind_of(name)] += spent
    longest = sorted(kernels.items(), key=lambda item: -item[1])[:40]
    busy, idle = covered(times)
    return {
        "kinds": dict(kinds),
        "kernels": {name[:160]: spent for name, spent in longest},
        "step_ms": (busy + idle) / 1000 / count,
        "idle": idle / (busy + idle) if busy else None,
    }


def covered(times: list[tuple[float, float]]) -> tuple[float, float]:
    """How much of the time from the first start to the last end these ranges cover, and how much not."""
    busy, end = 0.0, min((start for start, _ in times), default=0.0)
    first = end
    for start, stop in sorted(times):
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return busy, end - first - busy


def table(profiles: dict[str, dict[str, Any]], best: dict[str, float]) -> str:
    """Milliseconds of a step: a line for each kind, a column for each variant and one for the ideal."""
    lines = [
        "| ms a step | ideal | " + " | ".join(profiles) + " |",
        "|---" * (len(profiles) + 2) + "|",
    ]
    for kind in dict.fromkeys(kind for kind, _ in KINDS):
        found = [profiled["kinds"].get(kind, 0.0) for profiled in profiles.values()]
        lines.append(line(kind, best.get(kind, 0.0), found))
    idle = [profiled["step_ms"] * (profiled["idle"] or 0.0) for profiled in profiles.values()]
    whole = [profiled["step_ms"] for profiled in profiles.values()]
    return "\n".join([*lines, line("nothing runs", 0.0, idle), line("the step", sum(best.values()), whole)])


def line(kind: str, best: float, found: list[float]) -> str:
    return f"| {kind} | {best:,.0f} | " + " | ".join(f"{ms:,.0f}" for ms in found) + " |"
