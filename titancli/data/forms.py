"""The forms in which chat templates read messages: contents as text or as parts, arguments of calls as
objects or as JSON text.

A template reads one form and fails on another, or prints it as Python does (`{'city': 'Rome'}`). Which one it
reads is found by trying, once for each template.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

from titancli.data.marks import ChatRefused, Messages


class Form(NamedTuple):
    """A form of messages."""

    content: Literal["given", "text", "parts"]
    """Contents as they are given, as text, or as a list of parts."""
    arguments: Literal["object", "text"]
    """Arguments of calls of tools as objects, or as JSON text."""


FORMS = [Form(content, way) for way in ("object", "text") for content in ("given", "text", "parts")]
"""Forms in the order in which they are tried."""


class Forms:
    """Remembers which form a template has read."""

    def __init__(self) -> None:
        self._order = list(FORMS)

    def first(self, messages: Messages, attempt: Callable[[Messages], Any]) -> Any:
        """Return what `attempt` returns for the messages in the first form in which it succeeds.

        Raises:
            ChatRefused: it raises this for each form; the error is that of the form tried first.
        """
        refused: ChatRefused | None = None
        for form, formed in self._formed(messages):
            try:
                found = attempt(formed)
            except ChatRefused as error:
                refused = refused or error
                continue
            if refused is not None:
                self._order.remove(form)
                self._order.insert(0, form)
            return found
        raise refused or ChatRefused("a conversation has no messages")

    def _formed(self, messages: Messages) -> Iterator[tuple[Form, Messages]]:
        """Yield the messages in each form, if it differs from the earlier ones."""
        seen: list[Messages] = []
        for form in list(self._order):
            formed = [_message(message, form) for message in messages]
            if formed not in seen:
                seen.append(formed)
                yield form, formed


def _message(message: dict[str, Any], form: Form) -> dict[str, Any]:
    found = dict(message)
    content = message.get("content")
    if form.content == "text" and isinstance(content, list):
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


def printed_by_python(text: str, messages: Messages) -> bool:
    """Return whether a rendering contains a list or an object of the messages as Python prints it."""
    return any(str(value) in text for value in _structures(messages))


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
