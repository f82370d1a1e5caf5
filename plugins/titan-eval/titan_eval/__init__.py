"""lm-evaluation-harness on a titan engine: a loop, and a command. This file imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Gt, MinLen

from titancli import Command, component, hookimpl


@component("loop", "lm_eval", target="titan_eval.loop:build")
class LmEval:
    """Tasks of lm-evaluation-harness, once, without an optimizer: what `titan lm-eval` runs."""

    trains: ClassVar[bool] = False

    tasks: Annotated[list[Annotated[str, MinLen(1)]], MinLen(1)]
    """Names of tasks or groups, or YAML files. A file that runs code is refused, unless the person who starts
    the run says `titan lm-eval --trust-code`, or sets TITAN_EVAL_TRUST_CODE=1."""
    include_path: list[Path] = field(default_factory=list)
    """Folders with the YAML files of further tasks."""
    num_fewshot: Annotated[int, Ge(0)] | None = None
    """Examples in front of each prompt; None: as the task says."""
    limit: Annotated[int, Gt(0)] | None = None
    """Documents of each task; None: all. For trying out."""
    batch_size: Annotated[int, Gt(0)] = 8
    """Rows per forward pass on each data-parallel rank."""
    add_bos: bool | None = None
    """Begin each text with the tokenizer's BOS; None: as the tokenizer's files say."""
    checkpoint: Path | None = None
    """Checkpoint to evaluate; None: the weights that the recipe starts from."""

    def check(self, recipe: Any) -> Iterator[tuple[str, str]]:
        """Yield what files of tasks would run."""
        from titan_eval.trust import TRUST, code_of, trusted

        if not trusted():
            for key, found in code_of(self.tasks, self.include_path):
                allow = f"if you trust it: titan lm-eval --trust-code, or {TRUST}=1 in the shell"
                yield key, f"a recipe names tasks as data: {found}; {allow}"


@hookimpl
def titan_components() -> list[type]:
    return [LmEval]


@hookimpl
def titan_commands() -> list[Command]:
    return [
        Command(
            "lm-eval",
            "Evaluate a model on tasks of lm-evaluation-harness.",
            "titan_eval.command:command",
        )
    ]
