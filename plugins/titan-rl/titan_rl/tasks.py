"""Sources of prompts: generated, or the rows of a file or dataset."""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from titancli.data.source import document_order
from titancli.errors import EnvironmentProblem
from titancli.protocols.samples import Prompt

if TYPE_CHECKING:
    import titan_rl as rl

logger = logging.getLogger(f"titancli.plugins.{__name__}")

OPTIONS = ("tools", "functions", "chat_template_kwargs")
"""Fields of a row that only chat templates read."""
TOLD = 5
"""Number of bad rows that are reported one by one."""


class Made:
    """Generated prompts, each from its own generator seeded by (seed, number)."""

    def __init__(self, name: str, make: Callable[[random.Random], Prompt], seed: int) -> None:
        self._make, self._seed = make, seed
        self.identity = {"task": name, "seed": seed}

    def prompt(self, number: int) -> Prompt:
        return self._make(random.Random(f"{self._seed} {number}"))


def build_digit(config: rl.Digit, *, seed: int) -> Made:
    """Build `[loop.task] type = "digit"`."""

    def make(numbers: random.Random) -> Prompt:
        digit = str(numbers.randrange(10))
        return Prompt(digit, digit)

    return Made("digit", make, seed)


def build_sum(config: rl.Sum, *, seed: int) -> Made:
    """Build `[loop.task] type = "sum"`."""

    def make(numbers: random.Random) -> Prompt:
        a, b = numbers.randrange(10), numbers.randrange(10)
        text = f"{a}+{b}="
        messages = ({"role": "user", "content": text},) if config.chat else ()
        return Prompt(text, str((a + b) % 10), messages)

    return Made("sum", make, seed)


class FromRows:
    """Prompts from rows: each epoch has every row once, in an order that depends on (seed, epoch)."""

    def __init__(self, prompts: list[Prompt], identity: dict[str, Any], *, shuffle: bool, seed: int) -> None:
        self._prompts, self._shuffle, self._seed = prompts, shuffle, seed
        self.identity = {**identity, "prompts": len(prompts)}
        self.count = len(prompts)
        self._epoch, self._order = -1, document_order(seed, 0, 0, shuffle=False)

    def prompt(self, number: int) -> Prompt:
        epoch, place = divmod(number, len(self._prompts))
        if epoch != self._epoch:
            count = len(self._prompts)
            self._epoch, self._order = epoch, document_order(self._seed, epoch, count, shuffle=self._shuffle)
        return self._prompts[int(self._order[place])]


def build_prompts(config: rl.Prompts, *, seed: int) -> FromRows:
    """Build `[loop.task] type = "prompts"`; all rows are read at once.

    Raises:
        EnvironmentProblem: the data are empty or cannot be read, or with `strict` a row is not a prompt.
    """
    from titancli.data.chat_source import rows_of
    from titancli.data.jsonl import BadRow

    listed: Any = dataclasses.replace(config, shuffle=False)
    rows = rows_of(listed, "prompts", seed=seed, dp_rank=1)
    prompts, skipped, unread = [], 0, dict[str, str]()
    for where, row, _ in rows.read(0, None):
        try:
            if isinstance(row, BadRow):
                raise row
            prompts.append(_prompt(row, config))
            if not prompts[-1].messages and (given := [key for key in OPTIONS if row.get(key)]):
                unread.setdefault(given[0], where)
        except BadRow as reason:
            if config.strict:
                raise EnvironmentProblem(
                    f"{where}: {reason}", hint="fix the row, or set loop.task.strict = false to skip it"
                ) from reason
            skipped += 1
            if skipped <= TOLD:
                logger.warning("skipped a row: %s: %s", where, reason)
    if skipped > TOLD:
        logger.warning("skipped %d rows of %s that are not prompts", skipped, config.path)
    for key, where in unread.items():
        logger.warning(
            "%s: it has %r, but its prompt is a text, which goes through no chat template: to use it, set "
            "loop.task.chat = true",
            where,
            key,
        )
    if not prompts:
        raise EnvironmentProblem(
            f"no row of {config.path} has a prompt", hint="set loop.task.prompt to the key of the prompt"
        )
    identity = {**rows.identity, "order": f"shuffled by seed {seed}" if config.shuffle else "as listed"}
    return FromRows(prompts, identity, shuffle=config.shuffle, seed=seed)


def _prompt(row: dict[str, Any], config: rl.Prompts) -> Prompt:
    from titancli.data.jsonl import BadRow, check_characters, value_of
    from titancli.data.row_formats import Names, check_messages, options_of

    found = value_of(row, config.prompt)
    answer = row.get(config.answer)
    if answer is not None and not isinstance(answer, (str, int, float)):
        raise BadRow(f"{config.answer!r} is {type(answer).__name__}, neither a string nor a number")
    known = None if answer is None else str(answer)
    if isinstance(found, str) and not config.chat:
        if not found:
            raise BadRow(f"{config.prompt!r} is empty")
        check_characters(config.prompt, found)
        return Prompt(found, known, row=row)
    said = [{"role": "user", "content": found}] if isinstance(found, str) else found
    messages = check_messages(config.prompt, said)
    if config.system is not None:
        messages = [{"role": "system", "content": config.system}, *messages]
    text = "\n".join(f"{message['role']}: {message.get('content', '')}" for message in messages)
    return Prompt(text, known, tuple(messages), row, options_of(row, Names()))
