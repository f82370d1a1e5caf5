"""What a step of every bundled recipe may move, in GiB: tests/engine/traffic.json.

python -m tests.engine.traffic        # after a change that moves less, or more for a reason: writes it anew
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from pytest import MonkeyPatch

from titancli.engine.dry_run import traffic_of
from titancli.losses import chunked
from titancli.optimizers import adamw
from titancli.recipe import load_recipe
from titancli.recipe.find import bundled_folder

FILE = Path(__file__).with_suffix(".json")
OF_PLUGINS = ("hf_causal_lm_debug", "qwen3_next_debug", "qwen3_next_80b_a3b")
RECIPES = sorted({*(path.stem for path in bundled_folder().glob("*.toml")), *OF_PLUGINS})
FEW_LAYERS = {"deepseek_v3_671b": 4, "hf_causal_lm_debug": None}
"""Where two are not enough, or are not a setting."""
ONE_RANK = [f"mesh.{degree}=1" for degree in ("pp", "cp", "tp", "ep")]


def measured(name: str) -> dict[str, Any]:
    """Return the bytes by verb and kind of operator, in GiB, and the places that wait for the device."""
    layers = FEW_LAYERS.get(name, 2)
    overrides = ONE_RANK + ([] if layers is None else [f"model.n_layers={layers}"])
    recipe = load_recipe(name, overrides).recipe
    with MonkeyPatch.context() as patch:  # the sizes and operators of a GPU
        number = getattr(torch, recipe.training.mixed_precision_param).itemsize
        of_fp32 = chunked.CHUNK_BYTES_COMPILED * 4 // number
        chunk = of_fp32 if recipe.compile.loss(on_gpu=True) else chunked.CHUNK_BYTES_GPU
        patch.setitem(chunked.CHUNK_BYTES, "cpu", chunk)
        patch.setattr(chunked, "sums_in_float32", lambda device, dtype: True)
        patch.setattr(adamw, "PIECES", 1)
        found = traffic_of(recipe)
    moved = {
        verb: {kind: round(size / 2**30, 4) for kind, size in sorted(traffic.moved.items())}
        for verb, traffic in found.items()
    }
    return {"moved": moved, "waits": [place for traffic in found.values() for place in traffic.waits]}


def main() -> None:
    budgets = {name: measured(name)["moved"] for name in RECIPES}
    FILE.write_text(json.dumps(budgets, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
