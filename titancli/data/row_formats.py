"""The formats of rows of conversations: which one rows have, and the messages in a row.

`FORMATS` lists them. A row in any of them becomes a `Talk`: messages as transformers' chat templates read
them, and the template's other arguments (`tools`, `chat_template_kwargs`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from titancli.data import RowsOfExamples
from titancli.data.jsonl import BadRow, check_characters, value_of
from titancli.data.marks import THOUGHTS
from titancli.data.remarks import remark
from titancli.errors import EnvironmentProblem

SAMPLED = 16
"""Rows at the start of the data by which the format is detected."""
ROLES = ("system", "developer", "user", "assistant", "tool", "ipython", "function")
"""Roles of messages that chat templates know."""
SPEAKERS = {
    "human": "user",
    "user": "user",
    "system": "system",
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response", "function-response"), "tool"),
    **dict.fromkeys(("function_call", "function-call", "tool_call"), "function_call"),
}
"""Roles by their names in ShareGPT; a `function_call` is a message of the assistant that calls tools."""
UNREAD = ("train", "training", "trainable", "loss")
"""Keys by which other trainers leave a message out of what is trained on."""
NOT_OF_TEMPLATES = {
    *("conversation", "messages", "chat_template", "add_generation_prompt", "continue_final_message"),
    *("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
    *("return_assistant_tokens_mask", "tokenizer_kwargs", "sanitize_control_tokens"),
}
"""Arguments of `apply_chat_template` that are none of the template, which a row may therefore not set."""


class Names(NamedTuple):
    """What a dataset calls the fields of rows, and the roles of messages."""

    fields: Mapping[str, str] = {}
    """Own names by those that the formats use."""
    roles: Mapping[str, str] = {}
    """Roles by their own names."""

    @classmethod
    def of(cls, config: RowsOfExamples) -> Names:
        return cls(config.fields, config.roles)

    def field(self, name: str) -> str:
        return self.fields.get(name, name)


class Talk(NamedTuple):
    """A conversation as a chat template reads it."""

    messages: list[dict[str, Any]]
    first: int = 0
    """Number of messages that are only context: the assistant's turns among them are not trained on."""
    options: Mapping[str, Any] = {}
    """Other arguments of the template, such as `tools`."""
    text: str | None = None
    """Plain text, in place of messages; every token of it is trained on."""
    untrained: tuple[int, ...] = ()
    """Numbers of the assistant's messages whose `weight` is 0."""
    plain: tuple[str, str] | None = None
    """The same prompt and answer as texts, for a tokenizer without a chat template."""


class Format(NamedTuple):
    """A format of rows."""

    title: str
    needs: tuple[str, ...]
    """Fields by which its rows are known."""
    read: Callable[[dict[str, Any], Names], Talk]


# -------------------------------------------------------------------------------------------- messages


def check_messages(key: str, value: Any, names: Names = Names()) -> list[dict[str, Any]]:  # noqa: B008 - a constant
    """Return messages, without the null keys that tabular formats add; ShareGPT's turns become messages.

    Args:
        value: a list of messages, or one message; each has `role` and `content`, or ShareGPT's `from` and
            `value`.

    Raises:
        BadRow: the value is not messages, or one is incomplete or of an unknown role.
    """
    value = [value] if isinstance(value, dict) else value
    if not isinstance(value, list):
        raise BadRow(f"{key!r} is {type(value).__name__}, not a list of messages")
    if not value:
        raise BadRow(f"{key!r} has no messages")
    return [_message(f"{key}[{number}]", message, names) for number, message in enumerate(value)]


def _message(where: str, message: Any, names: Names) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise BadRow(f"{where} is {type(message).__name__}, not an object")
    found = {name: value for name, value in message.items() if value is not None}
    if "role" not in found and names.field("from") in found:
        found = _spoken(where, found, names)
    if "function_call" in found:  # what OpenAI's messages had before `tool_calls`
        found["tool_calls"] = [{"type": "function", "function": found.pop("function_call")}]
    for name in ("role", "content"):
        if name not in found and not (name == "content" and "tool_calls" in found):
            has = ", ".join(map(repr, found)) or "no keys"
            raise BadRow(f"{where} has no {name!r}, only {has}"[:200])
    if not isinstance(found["role"], str):
        raise BadRow(f"{where}: 'role' is {type(found['role']).__name__}, not a string")
    if (role := names.roles.get(found["role"], found["role"])) not in (*ROLES, *names.roles.values()):
        likely = known if (known := SPEAKERS.get(role.lower())) in ROLES else "assistant"
        raise BadRow(
            f"{where}: the role {role!r} is unknown; if it is right, say which one it is, for example "
            f'dataset.roles = {{ "{role}" = "{likely}" }}'
        )
    if "content" in found:
        _check_content(where, found["content"])
    if (weight := found.get("weight", 1)) not in (0, 1):
        raise BadRow(f"{where}: the weight {weight!r} is not supported: use 0 or 1")
    if left := [name for name in UNREAD if name in found and not found[name]]:
        remark(
            "unread",
            f"{where} has {left[0]!r}: {found[left[0]]!r}, which titan does not read: set its weight to 0 to "
            f"leave it out of what is trained on",
        )
    if not found.get("tool_calls", True):
        del found["tool_calls"]  # an empty list
    _check_calls(where, found.get("tool_calls", []))
    for name in ("role", *THOUGHTS):
        if not isinstance(text := found.get(name, ""), str):
            raise BadRow(f"{where}: {name!r} is {type(text).__name__}, not a string")
        check_characters(f"{where}.{name}", text)
    return {**found, "role": role}


def _check_content(where: str, content: Any) -> None:
    """Check that a content is text, or a list of parts that are text."""
    for place, part in enumerate(content) if isinstance(content, list) else ():
        here = f"{where}.content[{place}]"
        kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
        if kind != "text":
            raise BadRow(f"{here} is of type {kind!r}, which is not supported: only text is trained on")
        if not isinstance(text := part.get("text"), str):
            raise BadRow(f"{here} has no text")
        check_characters(here, text)
    if isinstance(content, str):
        check_characters(f"{where}.content", content)
    elif not isinstance(content, list):
        raise BadRow(f"{where}: 'content' is {type(content).__name__}, not a string or a list of parts")


def _check_calls(where: str, calls: Any) -> None:
    """Check that calls of tools have names, and objects, or their JSON, as arguments."""
    if not isinstance(calls, list):
        raise BadRow(f"{where}: 'tool_calls' is {type(calls).__name__}, not a list")
    for number, call in enumerate(calls):
        here = f"{where}.tool_calls[{number}]"
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRow(f'{here} is not a call of a tool: {{"function": {{"name": …, "arguments": …}}}}')
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            arguments = _json(f"{here}.arguments", arguments) if arguments.strip() else {}
        if not isinstance(arguments, dict):
            raise BadRow(f"{here}: 'arguments' is {type(arguments).__name__}, not an object")


def _spoken(where: str, turn: dict[str, Any], names: Names) -> dict[str, Any]:
    """Return a turn of ShareGPT as a message."""
    speaker, key = turn.pop(names.field("from")), names.field("value")
    if key not in turn:
        has = ", ".join(map(repr, [names.field("from"), *turn]))
        raise BadRow(f"{where} has no {key!r}, only {has}"[:200])
    if not isinstance(speaker, str):
        raise BadRow(f"{where}.{names.field('from')} is {type(speaker).__name__}, not a string")
    said = turn.pop(key)
    role = SPEAKERS.get(speaker.lower(), speaker)
    if speaker in names.roles or role != "function_call":
        return {**turn, "role": speaker if speaker in names.roles else role, "content": said}
    calls = _json(f"{where}.{key}", said)
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and "name" in call for call in calls):
        raise BadRow(f'{where}.{key} is not a call of a tool: {{"name": …, "arguments": …}}')
    return {**turn, "role": "assistant", "tool_calls": [{"type": "function", "function": c} for c in calls]}


def options_of(row: dict[str, Any], names: Names) -> dict[str, Any]:
    """Return the arguments of the chat template that a row has besides its messages."""
    key, more = names.field("tools"), row.get("chat_template_kwargs")
    if more is not None and not isinstance(more, dict):
        raise BadRow(f"'chat_template_kwargs' is {type(more).__name__}, not an object")
    if wrong := NOT_OF_TEMPLATES & set(more or ()):
        raise BadRow(f"'chat_template_kwargs' has {min(wrong)!r}, which is no argument of a chat template")
    found = {"tools": tools} if (tools := row.get(key)) else {}
    if isinstance(functions := row.get("functions"), list) and functions and key != "functions":
        if tools:  # `functions` is what OpenAI's files had before `tools`
            raise BadRow(f"it has both {key!r} and 'functions'")
        found = {"tools": [{"type": "function", "function": one} for one in functions]}
    found |= more or {}
    if tools := found.get("tools"):
        found["tools"] = tools = _json(key, tools) if isinstance(tools, str) else tools
        if not isinstance(tools, list) or not all(map(_is_tool, tools)):
            raise BadRow(f"{key!r} is not a list of tools")
    return found


def _is_tool(tool: Any) -> bool:
    return isinstance(tool, dict) and isinstance(tool.get("function", {}), dict)


def said_by(role: str, key: str, value: Any, names: Names) -> list[dict[str, Any]]:
    """Return a text as one message of a role; messages as they are."""
    if not isinstance(value, str):
        return check_messages(key, value, names)
    check_characters(key, value)
    return [{"role": role, "content": value}]


def _json(where: str, text: Any) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRow(f"{where!r} is not JSON: {error}") from error


# --------------------------------------------------------------------------------------------- formats


def _listed(name: str) -> Callable[[dict[str, Any], Names], Talk]:
    def read(row: dict[str, Any], names: Names) -> Talk:
        key = names.field(name)
        messages = check_messages(key, value_of(row, key), names)
        return Talk(system_of(row, names, messages), options=options_of(row, names))

    return read


def system_of(row: dict[str, Any], names: Names, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages after the row's own `system`, if it has one."""
    key = names.field("system")
    text = row.get(key)
    return messages if not text else said_by("system", key, text, names) + messages


def alpaca_prompt(row: dict[str, Any], names: Names) -> list[dict[str, Any]]:
    """Return the messages before an answer in the format of Alpaca: system, history, and the instruction with
    its input on a line of its own, as LLaMA-Factory joins them."""
    asked = []
    for name in ("instruction", "input"):
        key = names.field(name)
        text = value_of(row, key) if name == "instruction" else row.get(key)
        if not isinstance(text or "", str):
            raise BadRow(f"{key!r} is {type(text).__name__}, not a string")
        check_characters(key, text or "")
        asked += [text] if text else []
    if not asked:
        raise BadRow(f"{names.field('instruction')!r} is empty")
    messages: list[dict[str, Any]] = []
    history = row.get(names.field("history")) or []
    if not isinstance(history, list):
        raise BadRow(f"'history' is {type(history).__name__}, not a list of questions and answers")
    for number, turn in enumerate(history):
        if not (isinstance(turn, list) and len(turn) == 2 and all(isinstance(text, str) for text in turn)):
            raise BadRow(f"'history[{number}]' is not a question and its answer")
        messages += [{"role": role, "content": text} for role, text in zip(("user", "assistant"), turn)]  # noqa: B905
    return system_of(row, names, [*messages, {"role": "user", "content": "\n".join(asked)}])


def answered(row: dict[str, Any], name: str, names: Names) -> Talk:
    """Return an answer with its prompt, which is context. The prompt is in `prompt` (messages, or a user's
    text), `messages`, `conversations` or Alpaca's `instruction`, or it is all but the last message of the
    answer.

    Raises:
        BadRow: one of them is missing, or is neither text nor messages.
    """
    key, options = names.field(name), options_of(row, names)
    answer = said_by("assistant", key, value_of(row, key), names)
    if answer[0]["role"] != "assistant":
        whole = system_of(row, names, answer)
        return weighed(Talk(whole, len(whole) - 1, options))
    asked = [names.field(one) for one in ("prompt", "messages", "conversations")]
    plain = None
    if not any(one in row for one in asked) and names.field("instruction") in row:
        prompt = alpaca_prompt(row, names)
    else:
        key = next((one for one in asked if one in row), asked[0])
        prompt = system_of(row, names, said_by("user", key, value_of(row, key), names))
        plain = _plain(row[key], row[names.field(name)], prompt)
    return weighed(Talk(prompt + answer, len(prompt), options, plain=plain))


def _plain(prompt: Any, answer: Any, messages: list[dict[str, Any]]) -> tuple[str, str] | None:
    """Return a prompt and its answer if both are texts, and no system message comes before them."""
    texts = isinstance(prompt, str) and isinstance(answer, str) and len(messages) == 1
    return (prompt, answer) if texts else None


def weighed(talk: Talk) -> Talk:
    """Return a conversation without the weights of its messages, as the numbers of those with weight 0."""
    untrained = tuple(
        number
        for number, message in enumerate(talk.messages)
        if message["role"] == "assistant" and message.get("weight", 1) == 0
    )
    plain = [{key: one for key, one in message.items() if key != "weight"} for message in talk.messages]
    return talk._replace(messages=plain, untrained=untrained)


def _alpaca(row: dict[str, Any], names: Names) -> Talk:
    prompt, key = alpaca_prompt(row, names), names.field("output")
    if not (answer := value_of(row, key)):
        raise BadRow(f"{key!r} is empty")
    return Talk(prompt + said_by("assistant", key, answer, names), options=options_of(row, names))


def _completion(row: dict[str, Any], names: Names) -> Talk:
    asked, given = names.field("prompt"), names.field("completion")
    prompt = system_of(row, names, said_by("user", asked, value_of(row, asked), names))
    if not (completion := value_of(row, given)):
        raise BadRow(f"{given!r} is empty")
    answer = said_by("assistant", given, completion, names)
    plain = _plain(row[asked], completion, prompt)
    return Talk(prompt + answer, len(prompt), options_of(row, names), plain=plain)


def _text(row: dict[str, Any], names: Names) -> Talk:
    key = names.field("text")
    text = value_of(row, key)
    if not isinstance(text, str) or not text:
        raise BadRow(f"{key!r} is {'empty' if text == '' else f'{type(text).__name__}, not a string'}")
    check_characters(key, text)
    return Talk([], text=text)


FORMATS = {
    "messages": Format("messages", ("messages",), _listed("messages")),
    "sharegpt": Format("ShareGPT", ("conversations",), _listed("conversations")),
    "alpaca": Format("Alpaca", ("instruction", "output"), _alpaca),
    "prompt_completion": Format("prompt and completion", ("prompt", "completion"), _completion),
    "text": Format("plain text", ("text",), _text),
}
"""Formats by their names in a recipe, the first that fits a row being the row's."""


def format_of_row(row: Mapping[str, Any], names: Names) -> str | None:
    """Return the format of a row, a key of `FORMATS`; None if it has none of them."""
    found = (name for name, one in FORMATS.items() if all(names.field(key) in row for key in one.needs))
    return next(found, None)


def words(name: str, names: Names) -> str:
    """Return a format as messages name it: with the fields that it is read from."""
    one = FORMATS[name]
    return f"{one.title}, from {' and '.join(f'`{names.field(key)}`' for key in one.needs)}"


def detected(rows: Iterable[tuple[str, dict[str, Any] | BadRow]], names: Names) -> str:
    """Return the format of the first rows.

    Args:
        rows: the location of each row as shown to users, and the row, or why it is bad.

    Raises:
        EnvironmentProblem: no row has a known format, or two of them have different ones.
    """
    seen: dict[str, str] = {}
    odd = ""
    for where, row in rows:
        if isinstance(row, BadRow):
            continue
        if (name := format_of_row(row, names)) is not None:
            seen.setdefault(name, where)
        else:
            odd = odd or f"{where} has {', '.join(map(repr, row)) or 'no keys'}"[:200]
    if len(seen) > 1:
        (one, first), (other, second), *_ = seen.items()
        raise EnvironmentProblem(
            f"rows have different formats: {first} is {FORMATS[one].title}, {second} is "
            f"{FORMATS[other].title}",
            hint=f'separate them into two datasets of a mix, or set dataset.format = "{one}", so that the '
            f"others are bad rows",
        )
    if not seen and odd:
        known = "; ".join(" and ".join(one.needs) for one in FORMATS.values())
        raise EnvironmentProblem(
            f"the format of the rows is not known: {odd}",
            hint=f"rows have {known}; name other fields in dataset.fields, for example "
            f'{{ messages = "dialogue" }}; chosen and rejected are read by the dataset preference',
        )
    return next(iter(seen), "messages")


def talk_of(row: dict[str, Any], name: str, names: Names) -> Talk:
    """Return the conversation of a row.

    Raises:
        BadRow: the row is incomplete, or has another format.
    """
    one = FORMATS[name]
    if any(names.field(key) not in row for key in one.needs):
        other = format_of_row(row, names)
        if other is not None:
            raise BadRow(
                f"it is {FORMATS[other].title}, but the first rows are {one.title} "
                f"({', '.join(names.field(key) for key in one.needs)}): move it to a file of its own"
            )
    return weighed(one.read(row, names))


def require_answer(talk: Talk) -> None:
    """Refuse a conversation that does not end with an answer to train on.

    Raises:
        BadRow: no message is the assistant's, or the last one is not.
    """
    if talk.text is not None:
        return
    speakers = [message["role"] for message in talk.messages]
    if "assistant" not in speakers[talk.first :]:
        raise BadRow("it has no assistant message")
    if speakers[-1] != "assistant":
        raise BadRow(
            f"its last message is of {speakers[-1]!r}, with no answer to learn: remove the message, "
            f'or train on all tokens (dataset.train_on = "all")'
        )
