"""One run of a recipe on the null device, in a process of its own, and what it asked of the device.

    python -m tests.null_gpu.run RECIPE [KEY=VALUE]... [--unset KEY]... [--resume] [--json FILE] [--blocks]

`--resume` goes on for one more step from what was saved, and exports that. `--blocks` prints the blocks of
memory that lie there at the peak, the largest first, by the line of titan that asked for them, and the plan.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tests.null_gpu.device import total, waits
from tests.null_gpu.table import MIB, Row
from titancli.cli import main as titan
from titancli.engine import Engine
from titancli.observe.peaks import DEVICES
from titancli.planning.estimate import Estimate, estimate
from titancli.recipe import load_recipe
from titancli.registry.component import build, build_hf

OPERATOR = re.compile(
    r"at::_ops::(\w+)::|structured_(\w+?)_(?:out_)?(?:cuda|functional)|at::native::(\w+_cuda)\("
)


@dataclass
class Watch:
    """What a run had asked of the device when each of its steps ended."""

    blocks: bool = False
    launches: list[int] = field(default_factory=list)
    waited: list[int] = field(default_factory=list)
    """How many of the waits were before."""
    peaks: list[int] = field(default_factory=list)
    """Bytes, since the step before ended."""
    waits: list[str] = field(default_factory=list)
    snapshot: Any = None
    """The allocator's record, from the beginning to the end of the fourth step."""


@contextmanager
def watched(blocks: bool) -> Iterator[Watch]:
    found, step = Watch(), Engine.optim_step
    if blocks:
        torch.cuda.memory._record_memory_history(max_entries=2**24, stacks="all")

    def optim_step(engine: Engine, *args: Any, **named: Any) -> Any:
        metrics = step(engine, *args, **named)
        found.launches.append(total("launches"))
        found.waited.append(len(found.waits))
        found.peaks.append(requested("peak"))
        if blocks and len(found.peaks) == 4:
            found.snapshot = torch.cuda.memory._snapshot()
            torch.cuda.memory._record_memory_history(enabled=None)
        torch.cuda.reset_peak_memory_stats()
        return metrics

    Engine.optim_step = optim_step  # type: ignore[method-assign]
    try:
        with waits() as found.waits:
            yield found
    finally:
        Engine.optim_step = step  # type: ignore[method-assign]


def requested(when: str) -> int:
    """Return the bytes that torch's allocator was asked for: blocks that it gives may be 1 MiB larger, which
    is much of a small model's memory."""
    return int(torch.cuda.memory_stats()[f"requested_bytes.all.{when}"])


def workspaces() -> int:
    """Return the bytes that cuBLAS has had, after they were freed."""
    gc.collect()
    with_them = requested("current")
    torch._C._cuda_clearCublasWorkspaces()
    return with_them - requested("current")


def planned(name: str, words: list[str], unset: list[str]) -> Estimate | None:
    recipe = load_recipe(name, words, unset=unset).recipe
    return estimate(recipe, recipe.degrees(1), DEVICES["H100"])


def hollow(recipe: Any, folder: Path) -> None:
    """Write a model's Hugging Face folder, whose weights are zeros that take no room on the disk."""
    with torch.device("meta"):
        model: Any = build(recipe.model, seq_len=recipe.training.seq_len)
    form: Any = build_hf(recipe.model)
    header: dict[str, Any] = {}
    end = 0
    for name, parameter in model.named_parameters():
        for hf_name, tensor in form.to_hf(name, parameter.detach()):
            begin, end = end, end + 2 * tensor.numel()
            header[hf_name] = {"dtype": "BF16", "shape": [*tensor.shape], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(form.config_json()))
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def run(name: str, words: list[str], unset: list[str], *, resume: bool, blocks: bool) -> Row:
    """Train in the current folder, and maybe resume and export. Once in a process."""
    recipe = load_recipe(name, words, unset=unset).recipe
    if recipe.weights is not None:
        hollow(recipe, Path(recipe.weights))
    if (teacher := getattr(recipe.loop, "teacher", None)) is not None:
        hollow(replace(recipe, model=teacher.model), Path(teacher.weights))
    without = [word for key in unset for word in ("--unset", key)]
    with watched(blocks) as watch:
        assert titan(["train", name, "--run-dir", "run", *words, *without]) == 0
        last, of_cublas = len(watch.peaks), workspaces()
        if resume:
            assert titan(["train", "run", "--resume", f"training.steps={last + 1}"]) == 0
            assert titan(["convert-checkpoint", f"run/checkpoints/step-{last + 1}", "out", "--to", "hf"]) == 0
    plan = planned(name, words, unset)
    if blocks:
        print(*at_peak(watch.snapshot, plan), sep="\n")
    return Row(
        name,
        launches=watch.launches[last - 1] - watch.launches[last - 2],
        waits=watch.waits[watch.waited[1] : watch.waited[last - 1]],
        peak=max(watch.peaks[1:last]) - of_cublas,
        plan=None if plan is None else int(plan.worst.total),
        done=f"{last} steps" + ", saved, resumed, exported" * resume,
    )


def at_peak(snapshot: Any, plan: Estimate | None) -> Iterator[str]:
    """Yield lines about the peak of the steps, and about that of the plan."""
    there: dict[int, Any] = {}
    largest: dict[int, Any] = {}
    now = most = 0
    for event in snapshot["device_traces"][0]:
        if event["action"] == "alloc":
            there[event["addr"]] = event
            now += event["size"]
            if now > most:
                most, largest = now, dict(there)
        elif event["action"] == "free_requested" and event["addr"] in there:
            now -= there.pop(event["addr"])["size"]
    blocks = Counter((_place(event["frames"]), event["size"]) for event in largest.values())
    yield f"{most / MIB:.2f} MiB at the peak"
    for (place, size), times in sorted(blocks.items(), key=lambda one: -one[0][1] * one[1])[:60]:
        yield f"{size * times / MIB:9.3f} MiB = {times:4} x {size / MIB:9.3f}  {place}"
    if plan is not None:
        yield f"plan: {plan.worst.total / MIB:.2f} MiB, at: {plan.worst.moment}"
        yield from (f"{size / MIB:9.3f} {kind}" for kind, size in plan.worst.classes.items())


def _place(frames: list[dict[str, Any]]) -> str:
    """Return the lines of titan that asked, the innermost first; in backward, the operators of torch."""
    ours = [f for f in frames if "/titan" in f["filename"] and "/tests/" not in f["filename"]]
    if ours:
        return " < ".join(f"{Path(f['filename']).name}:{f['line']} {f['name']}" for f in ours[:3])
    ops = [found[found.lastindex or 1] for f in frames if (found := OPERATOR.search(f["name"]))]
    return "backward: " + " < ".join([*dict.fromkeys(ops)][:3])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe")
    parser.add_argument("words", nargs="*")
    parser.add_argument("--unset", action="append", default=[])
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--blocks", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_intermixed_args()
    row = run(given.recipe, given.words, given.unset, resume=given.resume, blocks=given.blocks)
    if given.json:
        given.json.write_text(json.dumps(asdict(row)))
    print(row)


if __name__ == "__main__":
    main()
