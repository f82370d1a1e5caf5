"""What `titan plan` computes, held against dry runs: bundled recipes x activation checkpointing x dtypes.

    python benchmarks/plan.py [--only NAME ...] [--cache FILE] [--write]

Each case is one optimizer step of `titan plan --check`, whose peak is exact for a CPU's kernels, and the
figure that `titan plan` computes for the same device. Recipes of large models keep their widths, vocabularies
and meshes, and are cut to a few layers, with fp32 moments, so that a case takes seconds; `whole` are the
recipes as they are.

Prints a table by recipe: the worst and the mean deviation, and the case with the worst one. `--write` puts it
into docs/plan.md. `--cache` keeps the dry runs' peaks in a JSON file and reuses them: they do not depend on
the sums.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from titancli.observe.peaks import DEVICES
from titancli.planning.estimate import estimate
from titancli.recipe import load_recipe
from titancli.recipe.schema import Recipe

BOUND = 0.08
"""What docs/plan.md promises."""
PAGE = Path(__file__).parents[1] / "docs" / "plan.md"
MARKS = ("<!-- deviations: made by benchmarks/plan.py -->", "<!-- end of deviations -->")

FEW = ("model.n_layers=2", "optimizer.state_dtype=float32")
RECIPES: dict[str, tuple[int, tuple[str, ...], tuple[str, ...]]] = {
    # Ranks; the recipe's mesh where it names none; and what makes it small.
    "llama3_debug": (1, (), ()),
    "sft_debug": (1, (), ()),
    "dpo_debug": (1, (), ()),
    "grpo_digit": (1, (), ()),
    "qwen3_debug": (1, (), ()),
    "qwen3_moe_debug": (1, (), ()),
    "llama4_debug": (1, (), ()),
    "deepseek_v3_debug": (1, (), ()),
    "gpt_oss_debug": (1, (), ()),
    "llama3_1b": (8, (), FEW),
    "llama3_3b": (8, (), FEW),
    "llama3_8b": (8, (), FEW),
    "llama3_70b": (64, (), FEW),
    "llama3_405b": (512, ("mesh.tp=8",), FEW),
    "qwen3_0.6b": (8, (), FEW),
    "qwen3_1.7b": (8, (), FEW),
    "qwen3_30b_a3b": (8, (), FEW),
    "grpo_qwen3_0.6b": (8, (), FEW),
    "llama4_17bx16e": (16, (), FEW),
    "llama4_17bx128e": (64, (), FEW),
    "deepseek_v3_16b": (8, (), FEW),
    "deepseek_v3_671b": (256, (), ("model.n_layers=16", FEW[1])),
    "gpt_oss_20b": (8, (), FEW),
    "gpt_oss_120b": (16, (), FEW),
}
TOO_LONG = ("llama4_17bx128e", "deepseek_v3_671b", "gpt_oss_120b")
"""Recipes that a dry run of every layer takes half an hour for."""
MODES = {
    "none": ("activation_checkpoint.mode=none",),
    "op": ("activation_checkpoint.mode=selective", "activation_checkpoint.selective_ac_option=op"),
    "every 2nd": ("activation_checkpoint.mode=selective", 'activation_checkpoint.selective_ac_option="2"'),
    "full": ("activation_checkpoint.mode=full",),
}
PARAM, STORED = "training.mixed_precision_param", "training.dtype"
DTYPES = {
    "fp32": (f"{PARAM}=float32", f"{STORED}=float32"),
    "bf16": (f"{PARAM}=bfloat16", f"{STORED}=float32"),
    "bf16 stored": (f"{PARAM}=bfloat16", f"{STORED}=bfloat16"),
}


@dataclass(frozen=True)
class Case:
    recipe: str
    name: str
    world: int
    overrides: tuple[str, ...]

    @property
    def key(self) -> str:
        return " ".join([self.recipe, str(self.world), *self.overrides])

    def load(self) -> Recipe:
        return load_recipe(self.recipe, [*self.overrides, "compile.enable=false"]).recipe


def cases() -> Iterator[Case]:
    for recipe, (world, mesh, small) in RECIPES.items():
        for mode, chosen in MODES.items():
            for dtype, numbers in DTYPES.items():
                if small and dtype == "bf16 stored":
                    continue  # a CPU rounds such parameters in hundreds of pieces, for minutes
                yield Case(recipe, f"{mode}, {dtype}", world, (*mesh, *small, *chosen, *numbers))
    for recipe, (world, mesh, small) in RECIPES.items():
        if small and recipe not in TOO_LONG:
            yield Case(recipe, "whole", world, mesh)


def counted(case: Case) -> dict[str, int]:
    """The peak of a dry run by rank of the pipeline: of the first stage and of the last."""
    from titancli.engine.dry_run import dry_run

    recipe = case.load()
    pp = recipe.degrees(case.world).pp
    ranks = sorted({stage * (case.world // pp) for stage in (0, pp - 1)})
    return {str(rank.place["pp"]): rank.peak_bytes for rank in dry_run(recipe, case.world, ranks).ranks}


def computed(case: Case) -> dict[str, float]:
    recipe = case.load()
    found = estimate(recipe, recipe.degrees(case.world), DEVICES["cpu"])
    if found is None:
        raise SystemExit(f"{case.name}: the model is not estimated")
    return {str(rank.pp_rank): rank.total - rank.classes["frozen"] for rank in found.ranks}


def deviations(case: Case, peaks: dict[str, int]) -> Iterator[float]:
    """By rank: +0.1 is a tenth too much."""
    found = computed(case)
    for rank, peak in peaks.items():
        yield found[rank] / peak - 1


def table(peaks: dict[str, dict[str, int]], chosen: list[Case]) -> list[str]:
    lines = ["| recipe | ranks | cases | mean | worst | in | over 8 % |", "|---|---|---|---|---|---|---|"]
    total: list[float] = []
    for recipe, (world, *_) in RECIPES.items():
        found = [
            (deviation, case.name)
            for case in chosen
            if case.recipe == recipe and case.key in peaks
            for deviation in deviations(case, peaks[case.key])
        ]
        if not found:
            continue
        sizes = [abs(deviation) for deviation, _ in found]
        worst, name = max(found, key=lambda one: abs(one[0]))
        over = sum(size > BOUND for size in sizes)
        total += sizes
        lines.append(
            f"| `{recipe}` | {world} | {len(found)} | {sum(sizes) / len(sizes):.1%} | {worst:+.1%} | "
            f"{name} | {over or '–'} |"
        )
    over = sum(size > BOUND for size in total)
    lines.append(
        f"| all | | {len(total)} | {sum(total) / len(total):.1%} | {max(total):.1%} | | {over or '–'} |"
    )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="these recipes alone")
    parser.add_argument("--cache", type=Path, help="peaks of dry runs, kept between calls")
    parser.add_argument("--write", action="store_true", help="put the table into docs/plan.md")
    parser.add_argument("--all", action="store_true", help="a line for each case, too")
    options = parser.parse_args()
    chosen = [case for case in cases() if not options.only or case.recipe in options.only]
    peaks: dict[str, dict[str, int]] = {}
    if options.cache and options.cache.exists():
        peaks = json.loads(options.cache.read_text())
    for case in chosen:
        if case.key in peaks:
            continue
        began = time.perf_counter()
        peaks[case.key] = counted(case)
        print(f"{case.recipe}, {case.name}: {time.perf_counter() - began:.1f} s", file=sys.stderr)
        if options.cache:
            options.cache.write_text(json.dumps(peaks, indent=1))
    if options.all:
        for case in chosen:
            shown = " ".join(f"{deviation:+.1%}" for deviation in deviations(case, peaks[case.key]))
            print(f"{case.recipe}, {case.name}: {shown}")
    lines = table(peaks, chosen)
    print("\n".join(lines))
    if options.write:
        text, (begin, end) = PAGE.read_text(), MARKS
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        PAGE.write_text(pattern.sub("\n".join([begin, "", *lines, "", end]), text))


if __name__ == "__main__":
    main()
