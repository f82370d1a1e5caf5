"""`titan lm-eval`: tasks of lm-evaluation-harness on a trained model."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from titan_eval.trust import TRUST
from titancli.commands import Common, NumberOrAuto, note, print_json, short_path, split_overrides
from titancli.commands.evaluation import document, find_source, keep, launch, recipe_of
from titancli.errors import EnvironmentProblem, UsageError
from titancli.files import read_json
from titancli.observe.events import plain
from titancli.runs import RunFolder

RESULTS = "lm_eval.json"
LARGEST = 1 << 32
"""Bytes of the results, which have every answer."""


@click.command("lm-eval")
@click.argument("arguments", metavar="SRC [KEY=VALUE]...", nargs=-1, required=True)
@click.option("--tasks", required=True, metavar="TASK,...", help="Tasks, groups, or YAML files of tasks.")
@click.option(
    "--include-path",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    multiple=True,
    metavar="DIR",
    help="Folder with the YAML files of further tasks; may be repeated.",
)
@click.option("--num-fewshot", type=click.IntRange(0), metavar="N", help="Examples in front of each prompt.")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Documents of each task, for trying out.")
@click.option("--apply-chat-template", is_flag=True, help="Ask questions under the chat template.")
@click.option(
    "--fewshot-as-multiturn/--no-fewshot-as-multiturn",
    default=True,
    show_default=True,
    help="With the chat template: each example is a question and an answer of their own.",
)
@click.option("--system-instruction", metavar="TEXT", help="System message before each question.")
@click.option(
    "--batch-size",
    type=click.IntRange(1),
    default=8,
    show_default=True,
    metavar="N",
    help="Rows on each rank.",
)
@click.option("--step", type=click.IntRange(0), metavar="N", help="Of a run: the checkpoint of step N.")
@click.option("--nproc", type=NumberOrAuto(), help="Processes on this machine.  [default: one for each GPU]")
@click.option("--trust-code", is_flag=True, help="Run the Python code that files of tasks name.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_obj
def command(
    common: Common,
    arguments: tuple[str, ...],
    tasks: str,
    include_path: tuple[Path, ...],
    num_fewshot: int | None,
    limit: int | None,
    apply_chat_template: bool,
    fewshot_as_multiturn: bool,
    system_instruction: str | None,
    batch_size: int,
    step: int | None,
    nproc: int | str | None,
    trust_code: bool,
    as_json: bool,
) -> int:
    """Evaluate a trained model on tasks of lm-evaluation-harness, on any layout.

    SRC is RUN (its newest good checkpoint), RUN/checkpoints/step-N, or a Hugging Face folder. Results of a
    run are also written to RUN/evaluations/step-N/lm_eval-TASK.json, with every answer next to it, as .jsonl.

    \b
    titan lm-eval runs/mine --tasks arc_easy,hellaswag
    titan lm-eval runs/mine --tasks ./sums.yaml --nproc 2 mesh.tp=2
    titan lm-eval runs/tuned --tasks gsm8k --apply-chat-template
    """
    sources, overrides = split_overrides(arguments)
    if len(sources) != 1:
        raise UsageError(
            f"lm-eval takes one run, checkpoint or folder, not {' and '.join(sources) or 'none'}",
            hint="titan lm-eval SRC --tasks TASK,... [KEY=VALUE]...",
        )
    if trust_code:
        os.environ[TRUST] = "1"  # passed on to the ranks
    source = find_source(Path(sources[0]), step, note)
    loop: dict[str, Any] = {"type": "titan-eval/lm_eval", "tasks": _named(tasks), "batch_size": batch_size}
    loop |= {"include_path": [str(path.absolute()) for path in include_path]}
    loop |= {"apply_chat_template": apply_chat_template, "fewshot_as_multiturn": fewshot_as_multiturn}
    given = {"num_fewshot": num_fewshot, "limit": limit, "system_instruction": system_instruction}
    loop |= {name: value for name, value in given.items() if value is not None}
    loaded = recipe_of(source, loop, overrides, note)
    note(f"evaluating {source.name}: {', '.join(loop['tasks'])}")
    code, found = launch(loaded, nproc, common.plugin_files, _read, traceback=common.traceback)
    if found is None:
        return code
    rows: list[dict[str, Any]] = []
    for name, metrics in _scores(found):
        row: dict[str, Any] = {
            "name": f"lm_eval-{name}",
            "data": {"task": name, "num_fewshot": found["n-shot"].get(name), "limit": limit},
            "metrics": metrics,
        }
        kept = keep(source, row["name"], row)
        rows.append({**row, "file": None if kept is None else str(kept)})
        if kept is not None:
            samples = found["samples"].get(name, [])
            lines = "".join(f"{json.dumps(plain(sample))}\n" for sample in samples)
            kept.with_suffix(".jsonl").write_text(lines, encoding="utf-8")
            note(f"saved {short_path(kept)}")
    if as_json:
        print_json("evaluation", document(source, sources[0], rows))
        return 0
    for row in rows:
        figures = [f"{key.replace('_', ' ')} {value:.4f}" for key, value in row["metrics"].items()]
        print(f"{row['data']['task']}: {', '.join(figures)}")
    return 0


def _named(tasks: str) -> list[str]:
    """Return the tasks, with absolute paths for files.

    Raises:
        UsageError: no task is given, or a file does not exist.
    """
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    files = [name for name in names if name.endswith((".yaml", ".yml"))]
    if missing := [name for name in files if not Path(name).is_file()]:
        raise UsageError(f"--tasks: {missing[0]} does not exist", hint="give a task's YAML file, or its name")
    if not names:
        raise UsageError("--tasks: no task is named")
    return [str(Path(name).absolute()) if name in files else name for name in names]


def _read(folder: RunFolder) -> dict[str, Any]:
    """Return the results of a run.

    Raises:
        EnvironmentProblem: they cannot be read, or are none.
    """
    path = folder.path / RESULTS
    try:
        found = read_json(path, LARGEST)
    except (OSError, ValueError) as error:
        raise EnvironmentProblem(f"{path} cannot be read: {error}", hint="evaluate again") from error
    if not isinstance(found, dict):
        raise EnvironmentProblem(f"{path} is not an object", hint="evaluate again")
    return found


def _scores(found: dict[str, Any]) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield each task with its metrics: `acc`, or `exact_match,strict` for a named filter."""
    for name, results in found["results"].items():
        metrics = {
            key.removesuffix(",none"): float(value)
            for key, value in results.items()
            if isinstance(value, int | float) and "_stderr" not in key and "," in key
        }
        yield name, metrics
