"""Compare masks under public chat templates with TRL's: `python -m tests.data.templates` prints the table.

The templates are those that TRL ships. TRL masks with a version of each that has `{% generation %}` markers,
with the template itself if it has them, or not at all. Two differences are titan's rules and count as the
same: the generation prompt and the line break after the end marker are no targets.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections import Counter
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from titancli.data.chat_template import MARKERS, ChatRefused
from titancli.data.hf_tokenizer import HFTokenizer

FOLDER = Path(str(find_spec("trl").origin)).parent / "chat_templates"  # type: ignore[union-attr]
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja") if not path.stem.endswith("_training"))

ENDS = {
    "deepseek": "<｜end▁of▁sentence｜>",
    "gptoss": "<|return|>",
    "phi3": "<|endoftext|>",
    "glm4moe": "<|endoftext|>",
}
OPEN, CLOSE = (
    r"<\|[\w.-]+\|>|<｜[\w▁]+｜>|<[|][\w-]+>|<[\w-]+[|]>",
    r"</?(?:s|bos|eos|sop|think|start_of_turn|end_of_turn|end_of_utterance|row_\w+)>",
)
TOKENS = re.compile(rf"{OPEN}|{CLOSE}|\[/?[A-Z_]+\]|\[gMASK\]")


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def calls(*arguments: Any) -> dict[str, Any]:
    made = [
        {"type": "function", "id": f"call_000{number}", "function": {"name": "weather", "arguments": one}}
        for number, one in enumerate(arguments)
    ]
    return says("", tool_calls=made)


def result(text: str, number: int = 0) -> dict[str, Any]:
    return {"role": "tool", "name": "weather", "content": text, "tool_call_id": f"call_000{number}"}


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tell the weather.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Where"}},
                "required": ["city"],
            },
        },
    }
]
ROME = {"city": "Rome"}
CALLED = [user("Rome?"), calls(ROME), result("sun"), says("Sunny.")]
SHAPES: dict[str, list[dict[str, Any]]] = {
    "one answer": [user("Hello"), says("Yes.")],
    "several turns": [user("Hello"), says("Yes."), user("And?"), says("No.")],
    "system": [{"role": "system", "content": "Be kind."}, user("Hello"), says("Yes.")],
    "developer": [{"role": "developer", "content": "Be kind."}, user("Hello"), says("Yes.")],
    "assistant first": [says("Hi."), user("Hello"), says("Yes.")],
    "two answers in a row": [user("Hello"), says("Yes."), says("No.")],
    "empty answer": [user("Hello"), says(""), user("And?"), says("No.")],
    "tool call": CALLED,
    "call, then a question": [*CALLED, user("Thanks"), says("Welcome.")],
    "two calls at once": [
        user("Rome, Oslo?"), calls(ROME, {"city": "Oslo"}), result("sun"), result("rain", 1), says("Mixed.")
    ],
    "arguments as JSON text": [user("Rome?"), calls('{"city": "Rome"}'), result("sun"), says("Sunny.")],
    "thought": [user("Hello"), says("Yes.", reasoning_content="hm")],
    "thoughts of several turns": [
        user("Hello"), says("Yes.", reasoning_content="hm"),
        user("And?"), says("No.", reasoning_content="well"),
    ],
    "thoughts in the text": [
        user("Hello"), says("<think>\nhm\n</think>\n\nYes."),
        user("And?"), says("<think>\nwell\n</think>\n\nNo."),
    ],
    "parts": [
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Yes."}]},
    ],
    "emoji": [user("Hello 🙂"), says("Yes 🙂"), user("And?"), says("No 🙂")],
}  # fmt: skip
"""Conversations by what is special about them."""


KNOWN = {
    (True, "<|tool_response>"): "TRL leaves out the token at which sampling stops for a tool's result",
    (True, "���"): "TRL leaves out all but the first token of the last character",
}
"""Differences in which titan is right, by whether titan alone trains on a text."""


class Outcome(NamedTuple):
    kind: str
    """`same`, `better` (TRL has no masks, other texts, or a fault), `refused`, or `worse`: titan's fault."""
    why: str


def tokenizer_of(folder: Path, template: str, end: str) -> Path:
    """Save a tokenizer of single bytes, with the tokens that a template names as added tokens."""
    tokens = Tokenizer(
        models.BPE({one: i for i, one in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    plain = {one for one in TOKENS.findall(template) if "think" in one}
    special = sorted({*TOKENS.findall(template), end, "<bos>"} - plain)
    tokens.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in special])
    tokens.add_tokens([AddedToken(one, special=False, normalized=False) for one in sorted(plain)])
    folder.mkdir(parents=True)
    tokens.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "bos_token": "<bos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    return folder


class Compared:
    """One template, and TRL's version of it."""

    def __init__(self, name: str, folder: Path) -> None:
        from transformers import PreTrainedTokenizerFast

        text = (FOLDER / f"{name}.jinja").read_text()
        trained = FOLDER / f"{name}_training.jinja"
        marked = trained.read_text() if trained.is_file() else text if MARKERS.search(text) else None
        end = next((end for start, end in ENDS.items() if name.startswith(start)), "<|eos|>")
        found = [one for one in TOKENS.findall(text) if re.search(r"im_end|eot_id|end_of_turn|<eos>", one)]
        end = found[0] if end == "<|eos|>" and found else end
        # one vocabulary for both, so that ids can be compared
        path = tokenizer_of(folder / name, text + (marked or ""), end)
        config = json.loads((path / "tokenizer_config.json").read_text())
        (path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": text}))
        self.ours = HFTokenizer(path)
        self.theirs = PreTrainedTokenizerFast.from_pretrained(path)
        self._marked = marked

    def outcome(self, shape: str) -> Outcome:
        """Return how the masks of a shape compare."""
        messages = SHAPES[shape]
        options = {"tools": TOOLS} if any("tool_calls" in one for one in messages) else {}
        try:
            ids, mask = self.ours.chat_with_mask(messages, options=options)
        except ChatRefused as error:
            return Outcome("refused", _why(error.message))
        trl = self._trl(messages, options)
        if isinstance(trl, str):
            return Outcome("better", trl)
        return self._compared(ids, mask, *trl, options)

    def _trl(self, messages: Any, options: dict[str, Any]) -> tuple[list[int], list[int]] | str:
        if self._marked is None:
            return "TRL has no markers for it"
        asked: dict[str, Any] = {"return_dict": True, "return_assistant_tokens_mask": True}
        try:
            found = self.theirs.apply_chat_template(messages, chat_template=self._marked, **asked, **options)
        except Exception:  # any exception of a template
            return "TRL's version rejects it"
        return found["input_ids"], found["assistant_masks"]

    def _compared(
        self, ids: list[int], mask: list[bool], theirs: list[int], marked: list[int], options: dict[str, Any]
    ) -> Outcome:
        if ids != theirs:
            return Outcome("better", "TRL's version renders another text")
        prompt = self.theirs.apply_chat_template(
            [user("Hello")], add_generation_prompt=True, tokenize=False, **options
        )
        kinds = set()
        for flag, run in groupby(zip(mask, marked, ids, strict=True), lambda one: one[0] == bool(one[1])):
            tokens = list(run)
            if flag:
                continue
            text, ours = self.theirs.decode([token for *_, token in tokens]), tokens[0][0]
            if not ours and (not text.strip() or text in prompt + "<｜tool▁outputs▁end｜>"):
                continue
            kinds.add(KNOWN.get((ours, text)) or f"{'only titan' if ours else 'only TRL'} trains on {text!r}")
        if not kinds:
            return Outcome("same", "")
        known = kinds <= set(KNOWN.values())
        return Outcome("better" if known else "worse", "; ".join(sorted(kinds)))


def _why(message: str) -> str:
    message = re.sub(r"the chat template in \S+ ", "", message)
    if "rejects" in message:
        return "the template rejects it"
    if found := re.search(r"leaves out messages\[\d+\]\.(\w+)", message):
        return f"the template leaves out {found[1]}"
    if "no generation prompt stands before it" in message:
        return "the template shows no header of the second answer"
    return message


def table(names: list[str] | None = None) -> dict[tuple[str, str], Outcome]:
    """Return the outcome of each template and shape."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names or NAMES:
            compared = Compared(name, Path(folder))
            for shape in SHAPES:
                found[name, shape] = compared.outcome(shape)
    return found


def main() -> None:
    found = table(sys.argv[1:])
    names = list(dict.fromkeys(name for name, _ in found))
    for name in names:
        print(name)
        for shape in SHAPES:
            kind, why = found[name, shape]
            if kind != "same":
                print(f"    {shape}: {kind}: {why}"[:230])
    for kind, count in Counter(one.kind for one in found.values()).most_common():
        print(f"{kind}: {count} of {len(found)}")
        for why, number in Counter(one.why for one in found.values() if one.kind == kind).most_common():
            print(f"    {number:4} {why}" if why else "", end="\n" if why else "")


if __name__ == "__main__":
    main()
