"""The loop `lm_eval`: runs the harness on the run's engine; rank 0 writes the results."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from jinja2 import BaseLoader, StrictUndefined
from jinja2.sandbox import SandboxedEnvironment
from lm_eval import utils
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager

from titan_eval.lm import TitanLM
from titan_eval.trust import code_of, trusted
from titancli.errors import EnvironmentProblem, TitanError

if TYPE_CHECKING:
    from titan_eval import LmEval
    from titancli.engine import Engine
    from titancli.loops.run import Run

RESULTS = "lm_eval.json"
"""File in the run folder."""
KEPT = ("results", "n-shot", "n-samples", "versions", "samples")
SEED = 1234
"""Seed of few-shot examples, as in the harness."""


def build(
    config: LmEval, *, engine: Engine, data: None, tokenizer: Any, observers: Any, run: Run
) -> Callable[[], None]:
    """Load the tasks.

    Raises:
        EnvironmentProblem: a task does not exist, or its data cannot be read.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns about every default of a task
    lm = TitanLM(engine, tokenizer, batch_size=config.batch_size, add_bos=config.add_bos)
    return partial(go, config, lm, load_tasks(config), run)


def go(config: LmEval, lm: TitanLM, tasks: Any, run: Run) -> None:
    """Evaluate. Collective."""
    found = evaluate(
        lm,
        tasks,
        limit=config.limit,
        bootstrap_iters=0,
        apply_chat_template=config.apply_chat_template,
        fewshot_as_multiturn=config.apply_chat_template and config.fewshot_as_multiturn,
        system_instruction=config.system_instruction,
    )
    if dist.get_rank() == 0 and found is not None and run.folder is not None:
        kept = {name: found.get(name, {}) for name in KEPT}
        (run.folder / RESULTS).write_text(json.dumps(kept, default=str), encoding="utf-8")


def load_tasks(config: LmEval) -> Any:
    """Return the tasks as required by `lm_eval.evaluator.evaluate`.

    The harness's own tasks are indexed, which takes seconds, only if a task is neither a file nor in a
    folder. Templates are rendered in Jinja's sandbox, since they could otherwise call any Python function.

    Raises:
        EnvironmentProblem: a task does not exist, its data cannot be read, or its file would run code.
    """
    if not trusted():
        for _, found in code_of(config.tasks, config.include_path):  # files may have changed since the check
            raise EnvironmentProblem(found)
        _render_in_sandbox()
    paths = [str(path) for path in config.include_path]
    known = all(name.endswith((".yaml", ".yml")) for name in config.tasks) or bool(paths)
    try:
        manager = TaskManager(include_path=paths or None, include_defaults=not known)
        if known and any(not _is_there(name, manager) for name in config.tasks):
            manager = TaskManager(include_path=paths or None)
        tasks = manager.load(config.tasks)
    except TitanError:
        raise
    except Exception as error:  # errors of the harness, of datasets, or of a task's own code
        raise EnvironmentProblem(
            f"the tasks {', '.join(config.tasks)} cannot be loaded: {type(error).__name__}: {error}",
            hint="give names of tasks, or YAML files: --tasks arc_easy,mine.yaml",
        ) from error
    for task in tasks["tasks"].values():
        if config.num_fewshot is not None or task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=config.num_fewshot or 0)
        task.set_fewshot_seed(seed=SEED)
    return tasks


def _render_in_sandbox() -> None:
    given = utils.env
    if not isinstance(given, SandboxedEnvironment):
        utils.env = SandboxedEnvironment(
            loader=BaseLoader(), undefined=StrictUndefined, keep_trailing_newline=given.keep_trailing_newline
        )
        utils.env.filters |= given.filters


def _is_there(name: str, manager: TaskManager) -> bool:
    return name.endswith((".yaml", ".yml")) or bool(manager.match_tasks([name]))
