"""Translate every training config of a project's checkout: `python survey.py TOOL CHECKOUT [--all]`.

Prints a table: keys of the config, how many the recipe carries over, expresses differently, does not need,
are null, are reported as lost; and whether the recipe is valid, with a small folder as the base model. Every
key is in exactly one column, or the script ends with an error. Configs that train nothing are counted apart.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from titan_migrate.config import Asked
from titan_migrate.document import read
from titan_migrate.translate import translate
from titancli.errors import RecipeError, TitanError
from titancli.recipe import load_recipe
from titancli.registry import current

FOLDERS = {
    "axolotl": ("examples", "src/axolotl/integrations"),
    "llamafactory": ("examples",),
    "torchtune": ("recipes/configs",),
}
"""Where a checkout has its configs."""
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 512,
    "max_position_embeddings": 1048576,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
COLUMNS = ("keys", "carried over", "changed", "not needed", "null", "reported")


@dataclass(frozen=True)
class Row:
    """What became of one config."""

    name: str
    counts: tuple[int, ...] = ()
    refused: str = ""
    invalid: str = ""
    """The first mistake in the recipe, if it has one."""


def stand_in(folder: Path) -> Path:
    """Write a small Llama's config.json and a tokenizer.json; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    vocabulary = {"<s>": 0, "</s>": 1, "<unk>": 2} | {chr(97 + number): number + 3 for number in range(26)}
    model = {"type": "BPE", "vocab": vocabulary, "merges": [], "unk_token": "<unk>"}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return folder


def survey(tool: str, checkout: Path, base: Path) -> Iterator[Row]:
    """Yield a row for each YAML file; `base` is the folder of the base model.

    Raises:
        AssertionError: a key is in no column, or in two.
    """
    registry = current()
    files = [file for name in FOLDERS[tool] for file in sorted((checkout / name).rglob("*.y*ml"))]
    for file in files:
        name = str(file.relative_to(checkout))
        try:
            found = translate(tool, file, "surveyed", registry, Asked(str(base)))
        except RecipeError as error:
            yield Row(name, refused=error.problems[0].message if error.problems else str(error))
            continue
        keys = {leaf.name for leaf in read(file)}
        lost = {row.name for row in found.lost if row.line is not None}
        changed = {row.name for row in found.changed if row.line is not None} - lost
        unset = {row.name for row in found.unset}
        moved = set(found.moved) - changed - lost
        idle = {row.name for row in found.idle} - moved - changed - lost
        columns = (moved, changed - unset, idle, unset, lost)
        assert set().union(*columns) == keys, (name, keys - set().union(*columns))
        assert sum(map(len, columns)) == len(keys), name
        yield Row(name, (len(keys), *map(len, columns)), invalid=_mistake(found.text))


def _mistake(text: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "surveyed.toml"
        file.write_text(text, encoding="utf-8")
        try:
            load_recipe(file)
        except TitanError as error:
            problems = getattr(error, "problems", None)
            return problems[0].message if problems else error.message
    return ""


def main(tool: str, checkout: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        rows = list(survey(tool, Path(checkout), stand_in(Path(folder) / "base")))
    print(f"| config | {' | '.join(COLUMNS)} | recipe |\n|---|{'---:|' * len(COLUMNS)}---|")
    done = [row for row in rows if row.counts]
    for row in done:
        print(f"| {row.name} | {' | '.join(map(str, row.counts))} | {row.invalid or 'valid'} |")
    sums = [sum(row.counts[column] for row in done) for column in range(len(COLUMNS))]
    valid = sum(not row.invalid for row in done)
    print(f"| **{len(done)} configs** | {' | '.join(map(str, sums))} | {valid} valid |")
    for row in rows:
        if row.refused:
            print(f"refused: {row.name}: {row.refused}".replace(f"{checkout.rstrip('/')}/", ""))


if __name__ == "__main__":
    main(*sys.argv[1:3])
