"""What a new recipe learns, and from which data. Torch is imported only to look into files."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from titancli.data.compressed import SUFFIXES
from titancli.data.formats import READ, ROWS, TABLES, TEXT, formats_of
from titancli.data.paths import absolute, is_saved
from titancli.errors import EnvironmentProblem, UsageError

Kind = Literal["pretrain", "sft", "dpo", "grpo"]
PROMPTS = ("prompt", "question", "problem", "instruction", "messages", "query", "input")
"""Keys of a prompt, the likeliest first."""
ANSWERS = ("answer", "solution", "ground_truth", "final_answer", "target", "output", "response")
TEXTS = ("text", "content", "document")
"""Keys of a text."""
LOOKED_AT = 100
"""Rows that are read to find out what they hold."""
LONGEST = 1 << 20
"""Characters of a row that are read."""
FILES = (*ROWS, *TEXT, *TABLES, *SUFFIXES, ".json", ".parquet", ".arrow")
"""Suffixes of names that are those of files, and of no dataset of the Hub."""
HUB = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Task:
    """What is learned, and from which data."""

    kind: Kind
    data: str | None
    """A path, a pattern, or a name on the Hub; None: the recipe names an example."""

    @property
    def lr(self) -> float:
        """Learning rate for all weights."""
        return {"pretrain": 1e-5, "sft": 1e-5, "dpo": 5e-7, "grpo": 1e-6}[self.kind]

    @property
    def rows(self) -> int:
        """Rows on each GPU at once, the least that the loop takes."""
        return 2 if self.kind == "dpo" else 1

    @property
    def rows_of_step(self) -> int | None:
        """Rows of a step; None: the loop says how many there are."""
        return {"pretrain": 16, "sft": 16, "dpo": 32, "grpo": None}[self.kind]

    def sections(self, length: int) -> dict[str, dict[str, Any]]:
        """Return the sections for rows of `length` tokens.

        Raises:
            TitanError: the first rows of local data are not of the kind that is learned, or cannot be read.
        """
        if self.kind == "grpo":
            return self._grpo(length)
        if self.kind == "pretrain":
            return {"dataset": _text(self.data)}
        if self.kind == "sft":
            _require_conversations(self.data)
            dataset = {"type": "titan/chat", "path": self.data, "pack": True}
            return {"dataset": dataset, "loss": {"type": "titan/sft"}, "loop": {"type": "titan/sft"}}
        rows = _rows(self.data)
        for key in ("chosen", "rejected"):
            _key(rows, (key,), key, self.data)
        dataset = {"type": "titan-preference/preference", "path": self.data}
        loss = {"type": "titan-preference/dpo", "beta": 0.1}
        return {"dataset": dataset, "loss": loss, "loop": {"type": "titan-preference/dpo"}}

    def _grpo(self, length: int) -> dict[str, dict[str, Any]]:
        rows = _rows(self.data)
        prompt = _key(rows, PROMPTS, "prompt", self.data)
        answer = _key(rows, ANSWERS, "answer", self.data)
        answers = [str(row.get(answer, "")) for row in rows]
        # "#### 42" at the end of a worked solution, as in GSM8K; else a bare number, or any text
        reward: dict[str, Any] = {"type": "titan-rl/exact_match"}
        if answers and all(re.search(r"####\s*[-\d]", one) for one in answers):
            reward = {"type": "titan-rl/numeric", "after": "####"}
        elif answers and all(re.fullmatch(r"\s*[-+$]?[\d,]+(\.\d+)?\s*%?\s*", one) for one in answers):
            reward = {"type": "titan-rl/numeric"}
        task = {
            "type": "titan-rl/prompts",
            "path": self.data,
            "prompt": prompt,
            "answer": answer,
            "chat": True,
            **(
                {"system": "Think step by step, and end with #### and the number."} if len(reward) > 1 else {}
            ),
        }
        return {
            "loop": {"type": "titan-rl/grpo", "prompts": 16, "samples": 8},
            "loop.task": task,
            "[loop.rewards]": reward,
            "loop.advantage": {"type": "titan-rl/group_norm"},
            "loop.generator": {"type": "titan/local", "max_new_tokens": length // 2},
            "loss": {"type": "titan-rl/grpo", "clip_high": 0.28, "length_norm": "token"},
        }


def task_of(kind: Kind, data: str) -> Task:
    """Return a task after checking that its data are there.

    Args:
        data: a path or pattern, which the recipe gets with `./` in front; or a name on the Hub.

    Raises:
        EnvironmentProblem: there is no such file.
    """
    path = Path(data).expanduser()
    if path.exists() or (set("*?[") & set(data) and any(Path().glob(data))):
        return Task(kind, data if data.startswith(("/", "./", "../", "~")) else f"./{data}")
    if HUB.fullmatch(data) and not data.endswith(FILES):
        return Task(kind, data)
    raise EnvironmentProblem(
        f"{data} does not exist",
        hint="give a file, a folder, a quoted pattern, or a dataset of the Hub (OWNER/NAME)",
    )


def _text(data: str | None) -> dict[str, Any]:
    """Return the dataset of text that reads a path."""
    if data is None:
        return {"type": "titan/text_files", "paths": ["text/*.txt"]}
    if not os.path.isabs(found := absolute(data)) or is_saved(found):
        return {"type": "titan/hf", "path": data}
    from titancli.data.files import files_of
    from titancli.data.parquet import footer

    files = files_of([Path(found)])
    kinds = set(formats_of(file.path for file in files))
    if "text" in kinds and len(kinds) > 1:
        raise UsageError(
            f"{data} has files of text beside {READ[min(kinds - {'text'})]}",
            hint="name those of one kind, for example by a quoted pattern: 'corpus/*.txt'",
        )
    if kinds == {"text"}:
        return {"type": "titan/text_files", "paths": [data]}
    kind = "parquet" if kinds == {"parquet"} else "jsonl"
    # the dataset parquet converts nothing into the cache: its files may be large
    rows = [dict.fromkeys(footer(files[0])[0].names)] if kind == "parquet" else _rows(data)
    key = _key(rows, TEXTS, TEXTS[0], data)
    return {"type": f"titan/{kind}", "paths": [data]} | ({} if key == TEXTS[0] else {"text": key})


def _located(data: str | None) -> list[tuple[str, Any]]:
    """Return the first rows of local data with their locations, or why they are bad; none of the Hub's."""
    from titancli.data import Chat
    from titancli.data.chat_source import rows_of

    config: Any = Chat(path=str(data), shuffle=False, max_bytes=LONGEST)
    if not os.path.isabs(config.path):
        return []
    return list(rows_of(config, "rows", seed=0, dp_rank=1).first(LOOKED_AT))


def _rows(data: str | None) -> list[dict[str, Any]]:
    return [row for _, row in _located(data) if isinstance(row, dict)]  # the run reports bad rows


def _require_conversations(data: str | None) -> None:
    from titancli.data.row_formats import Names, detected

    detected(_located(data), Names())


def _key(rows: list[dict[str, Any]], names: tuple[str, ...], what: str, data: str | None) -> str:
    if not rows:
        return what
    for name in names:
        if all(name in row for row in rows):
            return name
    raise UsageError(
        f"the rows of {data} have no {what}: they have {', '.join(rows[0])}",
        hint=f"rename a key to one of {', '.join(names)}, or learn something else: "
        "--sft conversations, --dpo pairs, --grpo questions with answers, --pretrain text",
    )
