"""Try a chat template before a run: it is one of Jinja, and uses nothing that is not there. Torch-free.

A template is a program of whoever published the folder, so it runs in a process of its own, within limits.
Only if it fails there is transformers imported, which has the last word.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from titancli.data.chat_template import ChatRefused, not_jinja
from titancli.data.forms import TALK
from titancli.data.row_formats import Talk
from titancli.data.trial import reason, run_child
from titancli.errors import EnvironmentProblem, RecipeError, causes
from titancli.files import read_bytes, read_json

LARGEST = 1 << 20
"""Bytes of a template."""
TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


def try_template(tokenizer: Any, talks: Iterable[Talk]) -> None:
    """Try the chat template of a folder, if it is the only one in it, with some conversations.

    Args:
        tokenizer: the run's, of the type hf.

    Raises:
        RecipeError: it is not a template of Jinja, or uses something undefined in all conversations.
        EnvironmentProblem: it runs out of its limits.
    """
    folder = Path(tokenizer.files["tokenizer.json"]).parent
    config = _config(folder)
    text = _only_template(tokenizer.files, config)
    if text is None:
        return
    tokens = {name: _token(config.get(name)) for name in TOKENS if config.get(name) is not None}
    asked = [Talk([*map(dict, TALK)]), *(talk for talk in talks if talk.text is None)]
    how = {**tokens, "tools": None, "documents": None, "add_generation_prompt": False}
    found = _in_child(
        {
            "template": text,
            "conversations": [{**how, **talk.options, "messages": talk.messages} for talk in asked],
        },
        folder,
    )
    if "message" in found:
        raise not_jinja(folder, found["line"], found["message"])
    if all(found.get("undefined", [None])):
        _require_one(tokenizer, asked)


def _require_one(tokenizer: Any, talks: Iterable[Talk]) -> None:
    """
    Raises:
        RecipeError: the template uses something undefined in each conversation, in each form of its messages.
    """
    for talk in talks:
        try:
            tokenizer.chat_text(talk.messages, options=talk.options)
            return
        except ChatRefused as error:
            if not any(type(cause).__name__ == "UndefinedError" for cause in causes(error)):
                return  # it refuses this conversation, and perhaps no other
            refused = error
    raise RecipeError(refused.message, hint="download it again, or correct it")


def _config(folder: Path) -> dict[str, Any]:
    try:
        found = read_json(folder / "tokenizer_config.json")
    except (OSError, ValueError):  # transformers says what is wrong
        return {}
    return found if isinstance(found, dict) else {}


def _only_template(files: Mapping[str, str | Path], config: dict[str, Any]) -> str | None:
    """Return the template of a folder; None: there are several, or none that can be read."""
    named = {name: path for name, path in files.items() if name.endswith(".jinja")}
    if named.keys() == {"chat_template.jinja"}:
        try:
            return read_bytes(Path(named["chat_template.jinja"]), LARGEST).decode()
        except (OSError, ValueError):
            return None
    text = config.get("chat_template")
    return text if not named and isinstance(text, str) and len(text) <= LARGEST else None


def _token(value: Any) -> Any:
    return value.get("content") if isinstance(value, dict) else value


def _in_child(given: dict[str, Any], folder: Path) -> dict[str, Any]:
    done = run_child("conversations", given)
    if done.returncode == 0:
        found: dict[str, Any] = json.loads(done.stdout)
        return found
    raise EnvironmentProblem(
        f"the chat template in {folder} cannot be used: {reason('template', 'jinja2', done)}",
        hint="download it again, or correct it",
    )
