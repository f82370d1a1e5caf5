"""Locate the assistant's turns in a rendered conversation.

A turn begins after the generation prompt, or where the rendering diverges from it (`<think>`), and ends with
whatever the template puts after it. Both are found by rendering the messages before the turn, and those up to
it, and comparing what follows their last mark (`titancli.data.marks`) with the same place of the whole.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from titancli.data.marks import ChatRefused, Mark, Render, Trace


class Turn(NamedTuple):
    """A turn of the assistant in the rendering, in characters."""

    message: int
    start: int
    """After the generation prompt."""
    content_end: int
    """Where what the message says ends."""
    end: int
    """After the end marker and what the template puts behind it."""


class Turns:
    """Locates the assistant's turns in a rendering of a template without `{% generation %}` markers."""

    def __init__(
        self,
        trace: Trace,
        render: Render,
        tokens: Sequence[str],
        divergence: Callable[[str], int],
    ) -> None:
        """Prepare to locate turns.

        Args:
            tokens: the added tokens of the vocabulary.
            divergence: returns where, at the earliest, a token of the rendering begins that a text does not
                have in common with it.
        """
        self._trace, self._render, self._divergence = trace, render, divergence
        self._tokens = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or r"(?!)")

    def of(self, number: int) -> Turn:
        """Return the turn of a message.

        Raises:
            ChatRefused: its start or its end cannot be determined.
        """
        trace = self._trace
        own = [index for index in trace.firsts if trace.owner(trace.marks[index]) == number]
        before = [index for index, mark in enumerate(trace.marks) if trace.owner(mark) < number]
        first = own[0] if own else max(before, default=-1) + 1
        last = own[-1] if own else first - 1
        if own and any(trace.owner(trace.marks[index]) != number for index in range(first, last)):
            raise self._unclear(number, "other messages stand within it")
        start = self._start(number, first, bool(own))
        anchor = trace.marks[last] if last >= 0 else None
        content_end = max(start, trace.content_end(anchor)) if own and anchor else start
        end = len(trace.text)
        if number + 1 < len(trace.messages):
            following = trace.marks[last + 1].at if last + 1 < len(trace.marks) else len(trace.text)
            at = anchor.at if anchor else 0
            end = at + self._end(number, anchor, trace.text[at:following])
        if not start <= content_end <= end:
            raise self._unclear(number, "its end comes before its start")
        return Turn(number, start, content_end, end)

    def _start(self, number: int, first: int, said: bool) -> int:
        trace = self._trace
        before = trace.marks[first - 1] if first else None
        base = before.at if before else 0
        limit = trace.marks[first].at if first < len(trace.marks) else len(trace.text)
        region = trace.text[base:limit]
        if before and not region and trace.messages[number - 1]["role"] == "assistant":
            return base  # the template joins two answers
        prompted = trace.tail(number, True)
        if prompted is not None and _same(prompted[0], before):
            if region.startswith(prompted[1]):
                start = base + len(prompted[1])
                after_tool = number > 0 and trace.messages[number - 1]["role"] not in ("user", "assistant")
                # after results of tools, a template may put a prompt into history that it does not ask with
                again = after_tool and region.startswith(self.prompt, start - base)
                return start + len(self.prompt) * again
            plain = trace.tail(number, False)
            context = plain[1] if plain is not None and _same(plain[0], before) else None
            known = context is not None and region.startswith(context) and prompted[1].startswith(context)
            if context is not None and known and self._is_prompt(region, prompted[1], len(context)):
                return max(base + len(context), self._divergence(trace.text[:base] + prompted[1]))
        # Nothing comes before the turn that the template accepts by itself: look for its prompt elsewhere.
        prompt = self.prompt
        if not prompt.strip() and first == 0 and said:
            return limit
        for length in range(len(prompt), self.role_end(prompt) - 1, -1):
            if (at := region.find(prompt[:length])) >= 0:
                place = base + at
                whole = length == len(prompt)
                return place + length if whole else self._divergence(trace.text[:place] + prompt)
        raise self._unclear(number, "no generation prompt stands before it")

    def role_end(self, prompt: str, start: int = 0) -> int:
        """Return where the role ends in a generation prompt: less is no prompt (`<|assistant|>`)."""
        found = self._tokens.match(prompt, start) or re.compile(r"\W*\w+").match(prompt, start)
        return found.end() if found else max(len(prompt), start + 1)

    def _is_prompt(self, region: str, prompted: str, start: int) -> bool:
        """Return whether a region has the role of a generation prompt, which begins at `start`."""
        return region[: (end := self.role_end(prompted, start))] == prompted[:end]

    def _end(self, number: int, anchor: Mark | None, rest: str) -> int:
        """Return how many characters of `rest`, which follows the anchor, belong to the turn."""
        if not rest and self._trace.messages[number + 1]["role"] == "assistant":
            return 0  # the template joins two answers
        alone = self._trace.tail(number + 1, False)
        known = alone is not None and _same(alone[0], anchor)
        # alone, a first turn of the assistant may be no conversation: a plain answer ends as it does
        found = alone[1] if alone is not None and known else self._answer_end
        if found is None or not rest.startswith(found):
            found = self._history_end(number, anchor, alone, rest)
        if found is None:
            raise self._unclear(number, "it ends differently when it is the last one")
        return len(found)

    def _history_end(self, number: int, anchor: Mark | None, alone: Any, rest: str) -> str | None:
        """Return the end of a turn that has another one as the last turn (gpt-oss: `<|return|>`, Phi 3: the
        end of the text): what stands before a generation prompt that follows the turn."""
        prompted = self._trace.tail(number + 1, True)
        if prompted is None or not _same(prompted[0], anchor):
            return None
        found, prompt = prompted[1], self.prompt
        if prompt and found.endswith(prompt):
            end = found[: -len(prompt)]
        elif alone is not None and _same(alone[0], anchor):
            end = found[: self._common_tokens(found, alone[1])]
        else:
            return None
        return end if end.strip() and rest.startswith(end) else None

    @cached_property
    def prompt(self) -> str:
        """Return the generation prompt after a user's message; "" if there is none."""
        plain, prompted = (self._neutral(1, prompt) for prompt in (False, True))
        if plain is None or prompted is None:
            return ""
        if prompted.startswith(plain):
            return prompted[len(plain) :]
        return prompted[self._common_tokens(prompted, plain) :].lstrip()

    def _common_tokens(self, text: str, other: str) -> int:
        """Return the length of what two texts begin with, up to the last added token in it."""
        both = len(common(text, other))
        return max((end for token in self._tokens.finditer(text) if (end := token.end()) <= both), default=0)

    @cached_property
    def _answer_end(self) -> str | None:
        """Return what follows an answer that is the last message."""
        return self._neutral(2, False)

    def _neutral(self, count: int, prompt: bool) -> str | None:
        """Return what follows the last of the first messages of a plain conversation."""
        talk = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Yes"}][:count]
        try:
            found = Trace(self._render, talk, prompt=prompt)
        except ChatRefused:
            return None
        return found.text[found.marks[-1].at :] if found.marks else None

    def _unclear(self, number: int, why: str) -> ChatRefused:
        return ChatRefused(f"the tokens of turn {number + 1} cannot be identified: {why}")


def _same(one: Mark | None, other: Mark | None) -> bool:
    """Return whether two renderings have the same last mark."""
    return (one and one[:2]) == (other and other[:2])


def common(one: str, other: str) -> str:
    """Return what both texts begin with."""
    length = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    return min(one, other, key=len) if length is None else one[:length]


def spans_of_tokens(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[bool]:
    """Return which tokens begin in a span; a token without characters is in none.

    Args:
        offsets: first character of each token, and the one after its last.
        spans: in order, without overlaps.
    """
    starts = [start for start, _ in spans]
    found = []
    for at, after in offsets:
        place = bisect_left(starts, at + 1) - 1
        found.append(place >= 0 and at < spans[place][1] and after > at)
    return found
