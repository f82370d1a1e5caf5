"""The ids of what a model is asked: one function for training, rollouts, `titan generate` and evaluation.

A text begins with BOS if the tokenizer's own files add it to a text (as transformers does); a conversation
begins as its chat template writes it, and nothing is added to that.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from titancli.data.forms import text_of
from titancli.data.jsonl import BadRow
from titancli.errors import RecipeError

Messages = Sequence[Mapping[str, Any]]


def prompt_ids(
    tokenizer: Any,
    asked: str | Messages,
    *,
    system: str | None = None,
    options: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    bos: bool | None = None,
) -> list[int]:
    """Return the ids of a text or of a conversation.

    Args:
        asked: a text to continue, or messages, which go through the tokenizer's chat template.
        system: a system message before the messages.
        options: other arguments of the chat template, such as `tools`.
        add_generation_prompt: end messages with the prompt for an answer of the assistant; if the last
            message is the assistant's, the answer has begun with it, as in TRL.
        bos: begin a text with BOS; None: if the tokenizer does that to a text.

    Raises:
        RecipeError: BOS is requested, but the tokenizer has none; a system message or options are given with
            a text; or there is no chat template, or it rejects the messages (`ChatRefused`).
        BadRow: the tokenizer's chat template takes no options.
    """
    if isinstance(asked, str):
        if system is not None or options:
            raise RecipeError(
                "a system message and arguments of a chat template need messages, but the prompt is a text",
                hint="send the text as a user message (chat = true)",
            )
        return begun(tokenizer, tokenizer.encode(asked), bos)
    before = [] if system is None else [{"role": "system", "content": system}]
    how = dict(options or {})
    if add_generation_prompt and asked and asked[-1]["role"] == "assistant":
        add_generation_prompt, how["continue_final_message"] = False, True
    found: list[int] = tokenizer.chat(
        [*before, *asked],
        add_generation_prompt=add_generation_prompt,
        **templated(tokenizer.chat, how),
    )
    return found


def answered(asked: Messages, text: str) -> list[Mapping[str, Any]]:
    """Return messages with an answer, which goes on with the last message if that is the assistant's."""
    if not asked or asked[-1]["role"] != "assistant":
        return [*asked, {"role": "assistant", "content": text}]
    *before, last = asked
    return [*before, {**last, "content": text_of(last.get("content")) + text}]


def begun(tokenizer: Any, ids: list[int], bos: bool | None = None) -> list[int]:
    """Return the ids of a text with BOS before them, once, if `bos` or (None) the tokenizer asks for it.

    Raises:
        RecipeError: BOS is requested, but the tokenizer has none.
    """
    if bos and tokenizer.bos_id is None:
        raise RecipeError("a text is to begin with BOS, but the tokenizer has no BOS token")
    adds = tokenizer.adds_bos if bos is None else bos
    return [tokenizer.bos_id, *ids] if adds and ids[:1] != [tokenizer.bos_id] else ids


def templated(call: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row's own arguments of a chat template as a keyword of the tokenizer's method.

    Raises:
        BadRow: there are some, and the method takes none.
    """
    if options and "options" not in inspect.signature(call).parameters:
        raise BadRow(f"the tokenizer's chat template takes no {' or '.join(map(repr, options))}")
    return {"options": options} if options else {}


def has_chat_template(tokenizer: Any) -> bool:
    """Return whether a tokenizer can render conversations."""
    try:
        tokenizer.chat_fingerprint  # noqa: B018 - it raises without a template
    except RecipeError:
        return False
    return True
