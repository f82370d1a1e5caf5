"""The forms in which chat templates read messages: contents as text or as parts, arguments of calls as
objects or as JSON text.

A template reads one form and fails on another, or prints it as Python does (`{'city': 'Rome'}`). Which one
it reads is found with a short conversation, once for each template: no row depends on the rows before it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

from titancli.data.marks import ChatRefused, Messages, Trace, leaves_of


class Form(NamedTuple):
    """A form of messages."""

    content: Literal["given", "text", "parts"]
    """Contents as they are given, as text (empty if there is none), or as a list of parts."""
    arguments: Literal["object", "text"]
    """Arguments of calls of tools as objects, or as JSON text."""


FORMS = [Form(content, way) for way in ("object", "text") for content in ("given", "text", "parts")]
"""Forms in the order in which they are tried."""

TALK: Messages = ({"role": "user", "content": "walnut"}, {"role": "assistant", "content": "heron"})
CALL = {"type": "function", "id": "call00001", "function": {"name": "find", "arguments": {"key": "pebble"}}}
CALLING: Messages = (TALK[0], {"role": "assistant", "content": "", "tool_calls": [CALL]})
"""Conversations by which a template's form is found, without and with a call of a tool."""


class Forms:
    """The forms in which a template reads messages."""

    def __init__(self, read: Callable[[Messages], Any]) -> None:
        """Create them; `read` raises ChatRefused for messages that the template does not read."""
        self._read = read
        self._order: dict[bool, list[Form]] = {}

    def first(self, messages: Messages, attempt: Callable[[Messages], Any]) -> Any:
        """Return what `attempt` returns for the messages in the first form in which it succeeds. If the
        template reads calls of tools, their arguments are given in its form alone.

        Raises:
            ChatRefused: it raises this for each form; the error is that of the form tried first.
        """
        refused: ChatRefused | None = None
        for formed in self._formed(messages):
            try:
                return attempt(formed)
            except ChatRefused as error:
                refused = refused or error
        raise refused or ChatRefused("a conversation has no messages")

    def _formed(self, messages: Messages) -> Iterator[Messages]:
        """Yield the messages in each form, if it differs from the earlier ones."""
        seen: list[Messages] = []
        for form in self._forms(calls=any(message.get("tool_calls") for message in messages)):
            formed = [_message(message, form) for message in messages]
            if formed not in seen:
                seen.append(formed)
                yield formed

    def _forms(self, *, calls: bool) -> list[Form]:
        """Return the forms in the order in which they are tried."""
        if calls not in self._order:
            forms = self._forms(calls=False) if calls else FORMS
            own = next((form for form in forms if self._reads(CALLING if calls else TALK, form)), None)
            found = sorted(forms, key=lambda form: form != own)
            known = own is not None and calls
            self._order[calls] = [form for form in found if not known or form.arguments == found[0].arguments]
        return self._order[calls]

    def _reads(self, talk: Messages, form: Form) -> bool:
        try:
            self._read([_message(message, form) for message in talk])
        except ChatRefused:
            return False
        return True


def _message(message: dict[str, Any], form: Form) -> dict[str, Any]:
    found = dict(message)
    content = message.get("content")
    if form.content == "text" and not isinstance(content, str):
        found["content"] = text_of(content)
    elif form.content == "parts" and isinstance(content, str):
        found["content"] = [{"type": "text", "text": content}]
    if message.get("tool_calls"):
        found["tool_calls"] = [_call(call, form) for call in message["tool_calls"]]
    return found


def text_of(content: Any) -> str:
    """Return the text of a content, whose parts are texts."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content or ())


def _call(call: dict[str, Any], form: Form) -> dict[str, Any]:
    nested = isinstance(call.get("function"), dict)
    function = dict(call["function"] if nested else call)
    given = function.get("arguments")
    if form.arguments == "text" and isinstance(given, dict):
        function["arguments"] = json.dumps(given, ensure_ascii=False)
    elif form.arguments == "object" and isinstance(given, str):
        function["arguments"] = json.loads(given) if given.strip() else {}
    return {**call, "function": function} if nested else function


def printed_by_python(trace: Trace) -> bool:
    """Return whether a rendering contains a list or an object of its messages as Python prints it, other than
    in a text that shows the same."""
    text, messages = trace.marked
    texts = [leaf.text for leaf in leaves_of(messages)]
    printed = {one for value in _structures(messages) if (one := str(value)) in text}
    return any(text.count(one) > sum(said.count(one) for said in texts) for one in printed)


def _structures(messages: Messages) -> Iterator[Any]:
    for message in messages:
        if isinstance(message.get("content"), list):
            yield message["content"]
        calls = message.get("tool_calls") or ()
        yield from calls
        for call in calls:
            arguments = call.get("function", call).get("arguments")
            if isinstance(arguments, dict) and arguments and json.dumps(arguments) != str(arguments):
                yield arguments
