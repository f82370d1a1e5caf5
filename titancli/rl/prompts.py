"""The prompts of a run in order, and the position reached: the same on every rank."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from titancli.data.chat_template import ChatRefused
from titancli.data.jsonl import BadRow
from titancli.data.packing import STATE_VERSION, refuse_other_data, tokenizer_identity
from titancli.data.prompt import prompt_ids
from titancli.errors import TitanError
from titancli.protocols import Task
from titancli.protocols.samples import Prompt

logger = logging.getLogger(__name__)

TRIES = 1000
"""After this many prompts in a row that are skipped, all are taken to be."""


class TokenizedPrompt(NamedTuple):
    """A prompt and its token ids."""

    prompt: Prompt
    tokens: list[int]


class PromptSource:
    """The tokenized prompts of a task, without those that are too long for a row, or that the chat template
    or a reward rejects."""

    def __init__(self, task: Task, tokenizer: Any, *, longest: int) -> None:
        """Prepare the prompts of at most `longest` tokens."""
        self._task, self._tokenizer, self._longest = task, tokenizer, longest
        self._identity = {**task.identity, "tokenizer": tokenizer_identity(tokenizer)}
        if tokenizer.adds_bos and not self.are_messages:  # earlier versions left it out
            self._identity["bos"] = tokenizer.bos_id
        self._next = 0
        self.too_long = 0
        """Number of prompts skipped as too long since this process began."""
        self.rejected = 0
        """Number of prompts that the chat template, or a reward, rejected since this process began."""
        self._refuses: Callable[[Prompt], str | None] = lambda prompt: None
        self._strict = False

    def require(self, refuses: Callable[[Prompt], str | None], *, strict: bool) -> None:
        """Skip prompts for which a function returns a reason, or raise at the first if `strict`."""
        self._refuses, self._strict = refuses, strict

    @property
    def are_messages(self) -> bool:
        """Return whether the first prompt is messages, to be answered by a turn of the assistant."""
        return bool(getattr(self._task.prompt(0), "messages", ()))

    def take(self, count: int) -> list[TokenizedPrompt]:
        """Return the next `count` prompts.

        Raises:
            TitanError: the tokenizer has no chat template; or the task returned something else than a prompt,
                or an empty one; or all prompts are skipped.
        """
        found = []
        for _ in range(count):
            asked, self._next = self._from(self._next)
            found.append(asked)
        return found

    def first(self, count: int) -> list[TokenizedPrompt]:
        """Return the first `count` prompts, whatever the position; each once, if there are fewer."""
        last = self._task.count
        found: list[TokenizedPrompt] = []
        number = 0
        while len(found) < count:
            asked, number = self._from(number)
            if last is not None and number > last:
                break
            found.append(asked)
        return found

    def _from(self, number: int) -> tuple[TokenizedPrompt, int]:
        """Return the first prompt from a number on that is not skipped, and the next number."""
        why = ""
        for tried in range(number, number + TRIES):
            prompt = self._task.prompt(tried)
            if not isinstance(prompt, Prompt):
                raise TitanError(
                    f"the task {type(self._task).__name__} returned a {type(prompt).__name__} as prompt "
                    f"{tried}",
                    hint='it must return a titancli.protocols.samples.Prompt: Prompt("3+9=", answer="2")',
                )
            try:
                if (reason := self._refuses(prompt)) is not None:
                    raise BadRow(reason)
                tokens = self._tokens(prompt)
            except (ChatRefused, BadRow) as error:
                why = str(error.message if isinstance(error, TitanError) else error)
                if self._strict:
                    raise TitanError(
                        f"prompt {tried}: {why}",
                        hint="fix its row, or set loop.task.strict = false to skip it",
                    ) from error
                self.rejected += 1
                self._skipped(tried, why, first=self.rejected == 1)
                continue
            if not tokens:
                raise TitanError(
                    f"prompt {tried} of the task {type(self._task).__name__} has no tokens: {prompt.text!r}",
                    hint="a prompt needs text, or a tokenizer with an end marker to start from",
                )
            if len(tokens) <= self._longest:
                return TokenizedPrompt(prompt, tokens), tried + 1
            why = f"it has {len(tokens)} tokens, but training.seq_len has room for {self._longest}"
            self.too_long += 1
            self._skipped(tried, why, first=self.too_long == 1)
        raise TitanError(
            f"{TRIES} prompts in a row were skipped; of the last one: {why}",
            hint="use a larger training.seq_len, or other prompts",
        )

    def _skipped(self, number: int, why: str, *, first: bool) -> None:
        if first:
            logger.warning("skipped prompt %d: %s; further ones are skipped without a message", number, why)

    def _tokens(self, prompt: Prompt) -> list[int]:
        if prompt.messages:
            return prompt_ids(self._tokenizer, prompt.messages, options=prompt.options)
        if not isinstance(prompt.text, str):
            raise TitanError(
                f"a prompt's text must be a string, not a {type(prompt.text).__name__}",
                hint="Prompt(text, answer)",
            )
        ids = prompt_ids(self._tokenizer, prompt.text)
        # An empty text begins with the end marker of another.
        return ids or ([] if self._tokenizer.eos_id is None else [self._tokenizer.eos_id])

    # -------------------------------------------------------------------------- as the data of a run

    @property
    def state(self) -> dict[str, Any]:
        """The position after the last prompt that was taken: plain JSON."""
        return {"version": STATE_VERSION, "prompts": self._next, "data": self._identity}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from a position.

        Raises:
            EnvironmentProblem: it belongs to other prompts, or to none.
        """
        refuse_other_data(state, self._identity, "loop.task", "prompts")
        self._next = state["prompts"]

    def close(self) -> None:
        """Do nothing."""
