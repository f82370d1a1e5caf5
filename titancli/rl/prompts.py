"""The prompts of a run in order, and the position reached: the same on every rank."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

from titancli.data.packing import STATE_VERSION, refuse_other_data, tokenizer_identity
from titancli.errors import TitanError
from titancli.protocols import Task
from titancli.protocols.samples import Prompt

logger = logging.getLogger(__name__)

TRIES = 1000
"""After this many prompts in a row that are too long, all are taken to be."""


class TokenizedPrompt(NamedTuple):
    """A prompt and its token ids."""

    prompt: Prompt
    tokens: list[int]


class PromptSource:
    """The tokenized prompts of a task; prompts that are too long for a row are skipped."""

    def __init__(self, task: Task, tokenizer: Any, *, longest: int) -> None:
        """Prepare the prompts of at most `longest` tokens."""
        self._task, self._tokenizer, self._longest = task, tokenizer, longest
        self._identity = {**task.identity, "tokenizer": tokenizer_identity(tokenizer)}
        self._next = 0
        self.too_long = 0
        """Number of prompts skipped as too long since this process began."""

    def take(self, count: int) -> list[TokenizedPrompt]:
        """Return the next `count` prompts.

        Raises:
            TitanError: the tokenizer has no chat template; or the task returned something else than a prompt,
                or an empty one; or all prompts are too long.
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
        """Return the first prompt from a number on that is not too long, and the next number."""
        for tried in range(number, number + TRIES):
            prompt = self._task.prompt(tried)
            if not isinstance(prompt, Prompt):
                raise TitanError(
                    f"the task {type(self._task).__name__} returned a {type(prompt).__name__} as prompt "
                    f"{tried}",
                    hint='it must return a titancli.protocols.samples.Prompt: Prompt("3+9=", answer="2")',
                )
            tokens = self._tokens(prompt)
            if not tokens:
                raise TitanError(
                    f"prompt {tried} of the task {type(self._task).__name__} has no tokens: {prompt.text!r}",
                    hint="a prompt needs text, or a tokenizer with an end marker to start from",
                )
            if len(tokens) <= self._longest:
                return TokenizedPrompt(prompt, tokens), tried + 1
            self.too_long += 1
            if self.too_long == 1:
                logger.warning(
                    "skipped prompt %d: it has %d tokens, but training.seq_len has room for %d; further "
                    "ones are skipped without a message",
                    tried,
                    len(tokens),
                    self._longest,
                )
        raise TitanError(
            f"{TRIES} prompts in a row have more than {self._longest} tokens",
            hint="use a larger training.seq_len or shorter prompts",
        )

    def _tokens(self, prompt: Prompt) -> list[int]:
        if prompt.messages:
            return self._tokenizer.chat(list(prompt.messages), add_generation_prompt=True)
        if not isinstance(prompt.text, str):
            raise TitanError(
                f"a prompt's text must be a string, not a {type(prompt.text).__name__}",
                hint="Prompt(text, answer)",
            )
        ids = self._tokenizer.encode(prompt.text)
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
