"""The tokens that end a turn of the assistant under a chat template, found by rendering short conversations.

Most templates put a marker of their own after a turn (ChatML: `<|im_end|>`). Some put none: a turn ends where
the next role's marker begins (GLM-4.5: `<|user|>`, after calls of tools `<|observation|>`). That marker is
then what a model has to learn to write, so it is a target, also after the last turn of a conversation.
"""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any, NamedTuple

from titancli.data.chat_template import ChatTemplate
from titancli.data.marks import Messages
from titancli.errors import RecipeError

ASKED, SAID, NEXT = "heron", "walnut", "pebble"
"""Contents of the rendered conversations; no template writes them itself."""
PROBE: tuple[dict[str, Any], ...] = (
    {"role": "user", "content": ASKED},
    {"role": "assistant", "content": SAID},
)
RESULT = {"role": "tool", "name": "find", "tool_call_id": "call00001", "content": NEXT}


class TurnEnds(NamedTuple):
    """What ends a turn of the assistant. Tokens are None if no single one does."""

    answer: int | None = None
    """The token that ends an answer."""
    call: int | None = None
    """The token that ends a turn that calls tools, if the template knows them."""
    answer_follows: bool = False
    """Whether the end of an answer begins what follows the turn, so that a last turn has none."""
    call_follows: bool = False
    """The same of a turn that calls tools."""
    speaker: int | None = None
    """The added token with which a turn of the assistant begins, if any."""
    markers: frozenset[int] = frozenset()
    """All added tokens."""

    @property
    def ids(self) -> tuple[int, ...]:
        """The tokens, without repetitions."""
        return tuple(dict.fromkeys(one for one in (self.answer, self.call) if one is not None))

    def closed(self, ids: list[int], mask: list[bool], messages: Messages) -> tuple[list[int], list[bool]]:
        """Return the ids of a conversation and which are trained on, with the ends of turns.

        A marker that follows a turn, and ends it, is trained on; after a last turn it is added.
        """
        if not (self.answer_follows or self.call_follows) or not any(mask):
            return ids, mask
        ends = self.markers - ({self.speaker} - {self.answer}) if self.answer_follows else {self.call}
        found = list(mask)
        for at, (trained, following) in enumerate(pairwise(mask), start=1):
            found[at] = following or (trained and ids[at] in ends)
        calls = bool(messages[-1].get("tool_calls"))
        end = self.call if calls else self.answer
        if mask[-1] and end is not None and (self.call_follows if calls else self.answer_follows):
            return [*ids, end], [*found, True]
        return ids, found


class Learned(NamedTuple):
    """The ends of turns that a run trains on, with the end and the beginning of its tokenizer's texts."""

    ends: tuple[int, ...]
    eos_id: int
    bos_id: int | None


class _Probe:
    """Renders conversations, and finds the added tokens after what the assistant says in them."""

    def __init__(self, template: ChatTemplate, tokenizer: Any) -> None:
        self._template, self._tokenizer = template, tokenizer
        self._added = {name: i for name, i in tokenizer.get_added_vocab().items() if name.strip()}
        longest_first = sorted(self._added, key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self.markers = frozenset(self._added.values())

    def text(self, messages: Messages, *, prompt: bool = False) -> str:
        """Return a conversation as text; nothing if the template rejects it, or is not valid."""
        try:
            return self._template.render(messages, None, prompt)
        except RecipeError:
            return ""

    def tokens(self, text: str) -> list[int]:
        return [self._added[name] for name in self._names.findall(text)]

    def after(self, messages: Messages, until: str | None = None) -> list[int] | None:
        """Return the added tokens after what the assistant says, up to what the next message says; None if
        the template leaves it out."""
        _, there, rest = self.text(messages).rpartition(SAID)
        return self.tokens(rest if until is None else rest.partition(until)[0]) if there else None

    def closing(self, messages: Messages) -> int | None:
        """Return the special token that ends a conversation and does not occur before in its last turn."""
        _, there, rest = self.text(messages).partition(SAID)
        found = self.tokens(rest)
        if not there or not found or found.count(found[-1]) > 1:
            return None
        token = self._tokenizer.added_tokens_decoder[found[-1]]
        return found[-1] if token.special and rest.rstrip().endswith(token.content) else None


def ends_of_turns(template: ChatTemplate, tokenizer: Any) -> TurnEnds:
    """Return what ends turns under a chat template; nothing if the template rejects a question with its
    answer, or leaves the answer out.

    Args:
        tokenizer: the transformers tokenizer of the template.
    """
    probe = _Probe(template, tokenizer)
    prompt = probe.text(PROBE[:1], prompt=True)
    speaker = next(iter(probe.tokens(prompt.rpartition(ASKED)[2])), None)
    last, within = probe.after(PROBE), probe.after([*PROBE, {"role": "user", "content": NEXT}], NEXT)
    if last is None:
        return TurnEnds()
    call, call_follows = _end_of_calls(probe)
    answer: int | None
    if last:
        # A last turn may have more after it than others have (Phi 3), or another end (gpt-oss).
        answer = ([one for one in last if one in (within or ())] or last)[-1]
    elif probe.text(PROBE).rpartition(SAID)[2].strip():  # it ends in plain text
        answer = None
    else:
        answer = next(iter(within or ()), None)
    return TurnEnds(answer, call, not last and answer is not None, call_follows, speaker, probe.markers)


def _end_of_calls(probe: _Probe) -> tuple[int | None, bool]:
    """Return the token that ends a turn that calls tools, and whether it begins what follows the turn."""
    for arguments in ({"key": SAID}, json.dumps({"key": SAID})):  # some templates need text
        one, two = ([_calling(arguments, count)] for count in (1, 2))
        called = probe.after([PROBE[0], *one])
        if called is None:
            continue
        several = [PROBE[0], *two]
        end = probe.closing(several if probe.text(several) else [PROBE[0], *one])
        if end is not None:
            return end, False
        followed = probe.after([PROBE[0], *one, RESULT], NEXT) or []
        beyond = followed[len(called) :] if followed[: len(called)] == called else []
        return (beyond[0], True) if beyond else (None, False)
    return None, False


def _calling(arguments: Any, count: int) -> dict[str, Any]:
    """Return a turn with calls of a tool."""
    function = {"name": "find", "arguments": arguments}
    calls = [{"type": "function", "id": f"call0000{1 + n}", "function": function} for n in range(count)]
    return {"role": "assistant", "content": "", "tool_calls": calls}
