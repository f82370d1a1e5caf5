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
    """Evaluate tasks of lm-evaluation-harness once, without an optimizer: run by `titan lm-eval`."""

    trains: ClassVar[bool] = False

    tasks: Annotated[list[Annotated[str, MinLen(1)]], MinLen(1)]
    """Names of tasks or groups, or YAML files. Files that run code are rejected, unless the user starts
    the run with `titan lm-eval --trust-code`, or sets TITAN_EVAL_TRUST_CODE=1."""
    include_path: list[Path] = field(default_factory=list)
    """Folders with YAML files of further tasks."""
    num_fewshot: Annotated[int, Ge(0)] | None = None
    """Examples before each prompt; None: as defined by the task."""
    limit: Annotated[int, Gt(0)] | None = None
    """Maximum number of documents per task, for trying out; None: all."""
    batch_size: Annotated[int, Gt(0)] = 8
    """Rows per forward pass on each data-parallel rank."""
    add_bos: bool | None = None
    """Begin each text with the tokenizer's BOS token; None: as defined by the tokenizer's files."""
    apply_chat_template: bool = False
    """Ask each question as a user's message, under the tokenizer's chat template."""
    fewshot_as_multiturn: bool = True
    """With the chat template, make each example a question and an answer of their own; false: all examples
    are part of the question."""
    system_instruction: Annotated[str, MinLen(1)] | None = None
    """System message before each question; without the chat template, a text before it."""
    checkpoint: Path | None = None
    """Checkpoint to evaluate; None: the weights that the recipe starts from."""

    def check(self, recipe: Any) -> Iterator[tuple[str, str]]:
        """Yield the code that the tasks' files would run."""
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
