"""Sort two digits: fine-tuning by examples, then by a reward, once by a script and once by recipes.

    python benchmarks/sort_two_digits.py [--seeds 0 1 2 3 4 5] [--only script recipe]

A Llama of 2 layers (width 64), fp32, one thread. Of all 100 prompts, `31=` for one, the greedy completion is
to be the digits in order, `13`: counted after the examples, and after the last step of rewards.

- script: that of docs/post-training.md, as it stands there; it ends when all are right.
- recipe: `titan train` of two_digits/sft.toml, and of two_digits/grpo.toml from its checkpoint, with the
  reward of the plugin two_digits/in_order.py. Prompts are counted here, from the checkpoints.

Prints one table; CPU-seconds are of the processes that train, with their start and imports.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from titancli import Engine, SamplingParams, registry

HERE = Path(__file__).resolve().parent
FOLDER, PAGE = HERE / "two_digits", HERE.parent / "docs" / "post-training.md"
PROMPTS = [f"{number:02}=" for number in range(100)]


class Outcome(NamedTuple):
    """How many of the 100 prompts are answered after the examples, and at the end; CPU-seconds."""

    examples: int
    end: int
    cpu: float


def run(command: list[str], folder: Path) -> tuple[str, float]:
    """What a command prints, and the CPU-seconds that it takes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done.stdout, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def solved(checkpoint: Path) -> int:
    """How many prompts the greedy completions of a checkpoint answer."""
    with Engine.frozen(checkpoint) as engine:
        asked = [engine.tokenizer.encode(prompt) for prompt in PROMPTS]
        made = engine.sample(asked, 1, SamplingParams(max_tokens=4, temperature=0.0))
    return sum(one.text == "".join(sorted(prompt[:2])) for prompt, (one,) in zip(PROMPTS, made, strict=True))


def by_script(seed: int, folder: Path) -> Outcome:
    """The script of the page on post-training."""
    found = re.search(r"<!-- file: sorts.py -->\n```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    if found is None:
        raise SystemExit(f"{PAGE} has no sorts.py")
    (folder / "sorts.py").write_text(found[1], "utf-8")
    said, cpu = run([sys.executable, "sorts.py", str(seed)], folder)
    examples, end = re.findall(r"(\d+) of 100 right", said)
    return Outcome(int(examples), int(end), cpu)


def by_recipe(seed: int, folder: Path) -> Outcome:
    """Both recipes, the second from the checkpoint of the first."""
    train = [sys.executable, "-m", "titancli", "train"]
    registry.configure(files=[FOLDER / "in_order.py"], checks=False)  # which the second run's lock file names
    into = [f"training.seed={seed}", "--quiet", "--run-dir"]
    _, examples = run([*train, "./sft.toml", *into, str(folder / "sft")], FOLDER)
    (learnt,) = (folder / "sft" / "checkpoints").glob("step-*")
    plugin = ["-p", "./in_order.py", f"weights={learnt}"]
    _, rewards = run([*train, "./grpo.toml", *plugin, *into, str(folder / "grpo")], FOLDER)
    (end,) = (folder / "grpo" / "checkpoints").glob("step-*")
    return Outcome(solved(learnt), solved(end), examples + rewards)


WAYS: dict[str, Callable[[int, Path], Outcome]] = {"script": by_script, "recipe": by_recipe}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(6)))
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS))
    chosen = parser.parse_args()
    print("| | seed | after examples | at the end | CPU-seconds |\n|---|---|---|---|---|")
    for name in chosen.only:
        for seed in chosen.seeds:
            with tempfile.TemporaryDirectory() as folder:
                found = WAYS[name](seed, Path(folder))
            print(f"| {name} | {seed} | {found.examples} | {found.end} | {found.cpu:.0f} |", flush=True)


if __name__ == "__main__":
    main()
