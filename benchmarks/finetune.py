"""What recipes for fine-tuning need on their GPU by `titan plan`: written into them, and into a table.

    python benchmarks/finetune.py [--write]

A recipe names its GPU in a comment (`# Planned for one H100 (80 GB): …`), whose figures are written here, as
is the table of recipes/finetune/README.md. Without `--write` both are only compared. Beside the estimate,
GRPO while it samples: weights, optimizer state, and keys and values of as many rows as are sampled at once,
each as long as a row of training.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from titancli.observe.peaks import DEVICES
from titancli.planning.estimate import estimate
from titancli.recipe import bundled_folder, load_recipe
from titancli.registry import current
from titancli.registry.component import component_info

PLANNED = re.compile(r"^# Planned for one (\w+) \((\d+) GB\):.*$", re.MULTILINE)
PAGE = bundled_folder() / "finetune" / "README.md"
MARKS = ("<!-- the table: made by benchmarks/finetune.py -->", "<!-- end of the table -->")
METHODS = {
    "sft": "SFT, all weights",
    "lora": "LoRA",
    "qlora": "QLoRA",
    "dpo": "DPO",
    "grpo": "GRPO",
    "distil": "distillation",
}
GIB = 2**30


@dataclass(frozen=True)
class Planned:
    """A recipe on its GPU; sizes in GiB."""

    name: str
    recipe: Any
    gpu: str
    memory: int
    """Of the GPU, as it is sold, in GB."""
    peak: float
    usable: float

    @property
    def line(self) -> str:
        card = f"{self.gpu} ({self.memory} GB)"
        return f"# Planned for one {card}: {self.peak:.1f} GiB of {self.usable:.1f} usable."

    @property
    def row(self) -> str:
        method = METHODS[self.name.rpartition(":")[2].partition("_")[0]]
        adapters = any(component_info(one).name == "lora" for one in self.recipe.converters)
        if adapters and method != METHODS["lora"]:
            method += " with LoRA"
        training = self.recipe.training
        tokens = "sampled"
        if self.recipe.dataset is not None:
            tokens = f"{(training.global_batch_size or training.local_batch_size) * training.seq_len:,}"
        cells = (f"`{self.name}`", method, tokens, f"{self.memory} GB", f"{self.peak:.1f} GiB")
        return f"| {' | '.join(cells)} |"


def recipes() -> dict[str, Path]:
    """The recipes that name a GPU, by the name that `titan train` takes."""
    found = {}
    for plugin, folder in current().recipe_folders():
        for file in folder.rglob("*.toml"):
            if PLANNED.search(file.read_text(encoding="utf-8")):
                found[file.stem if plugin == "titan" else f"{plugin}:{file.stem}"] = file
    order = list(METHODS)
    return dict(sorted(found.items(), key=lambda item: (order.index(item[1].stem.partition("_")[0]), item)))


def planned(name: str, file: Path) -> Planned:
    """Plan a recipe for the GPU that it names.

    Raises:
        SystemExit: it names none, cannot be planned, or does not fit.
    """
    line = PLANNED.search(file.read_text(encoding="utf-8"))
    if line is None:
        raise SystemExit(f"{file} names no GPU: add a line '# Planned for one H100 (80 GB):'")
    recipe = load_recipe(file).recipe
    found = estimate(recipe, recipe.degrees(1), DEVICES[line[1]])
    if found is None or found.limit is None:
        raise SystemExit(f"{file}: its memory on one {line[1]} cannot be planned")
    static = sum(found.worst.classes[part] for part in ("parameters", "optimizer", "frozen"))
    peak = max(found.worst.total, static + _sampling(recipe))
    if peak > found.limit:
        has = f"{found.limit / GIB:.1f} on one {line[1]}"
        raise SystemExit(f"{file} needs {peak / GIB:.1f} GiB of {has}: name a larger GPU")
    return Planned(name, recipe, line[1], int(line[2]), peak / GIB, found.limit / GIB)


def _sampling(recipe: Any) -> float:
    """Bytes of keys and values, in the compute dtype, of all rows that are sampled at once."""
    generator, model = getattr(recipe.loop, "generator", None), recipe.model
    if generator is None:
        return 0.0
    width = model.n_kv_heads * (getattr(model, "head_dim", None) or model.dim // model.n_heads)
    of_token = 2 * model.n_layers * width * getattr(torch, recipe.training.mixed_precision_param).itemsize
    return float(of_token * generator.batch_size * recipe.training.seq_len)


def table(found: list[Planned]) -> str:
    head = "| recipe | method | tokens a step | one GPU of | planned |\n|---|---|---|---|---|"
    return "\n".join([head, *(one.row for one in found)])


def page_with(page: str, rows: str) -> str:
    """A page with this table between its marks."""
    before, _, rest = page.partition(MARKS[0])
    return f"{before}{MARKS[0]}\n\n{rows}\n\n{MARKS[1]}{rest.partition(MARKS[1])[2]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--write", action="store_true", help="into the recipes, and into the table")
    write, stale, found = parser.parse_args().write, [], []
    for name, file in recipes().items():
        found.append(planned(name, file))
        text = file.read_text(encoding="utf-8")
        wanted = PLANNED.sub(found[-1].line, text)
        if wanted != text:
            stale.append(name)
            if write:
                file.write_text(wanted, encoding="utf-8")
    print(table(found))
    page = PAGE.read_text(encoding="utf-8")
    if (wanted := page_with(page, table(found))) != page:
        stale.append(PAGE.name)
        if write:
            PAGE.write_text(wanted, encoding="utf-8")
    print(f"{'written' if write else 'stale'}: {', '.join(stale) or 'nothing'}", file=sys.stderr)
    return int(bool(stale) and not write)


if __name__ == "__main__":
    raise SystemExit(main())
