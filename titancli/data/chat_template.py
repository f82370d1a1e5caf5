"""Conversations under a Hugging Face chat template: their ids, and which of them are the assistant's.

A template may mark assistant turns with `{% generation %}`; otherwise `titancli.data.turns` locates them. A
turn that cannot be located, or a template that leaves out what a message says, makes a bad row; nothing is
guessed.

A turn ends with its end marker. The line break that many templates put after it (ChatML: `<|im_end|>\\n`) is
not part of the turn unless requested: sampling stops at the marker.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from titancli.data.forms import Forms, printed_by_python
from titancli.data.marks import ChatRefused, Leaf, Messages, Trace
from titancli.data.turns import Turns, spans_of_tokens
from titancli.errors import EnvironmentProblem, RecipeError

__all__ = ["MARKERS", "ChatRefused", "ChatTemplate"]

MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
REMEDY = (
    "put {% generation %} and {% endgeneration %} around the assistant's messages in chat_template.jinja, "
    'or train on all tokens (dataset.train_on = "all")'
)

Options = Mapping[str, Any] | None
Span = tuple[int, int]
"""First character, and the one after the last."""


class ChatTemplate:
    """The chat template of a transformers tokenizer."""

    def __init__(self, tokenizer: Any, folder: Path) -> None:
        """Read the tokenizer's chat template.

        Raises:
            RecipeError: there is none.
        """
        if not tokenizer.chat_template:
            raise RecipeError(
                f"the tokenizer in {folder} has no chat template",
                hint="add a chat_template.jinja to the folder, or use the tokenizer of an instruct model",
            )
        self._tokenizer, self._folder = tokenizer, folder
        self.text = str(tokenizer.chat_template)
        self.has_markers = MARKERS.search(self.text) is not None
        added = [token for token in tokenizer.added_tokens_decoder.values() if token.content.strip()]
        self._tokens = tuple(token.content for token in added)
        self._special = tuple(token.content for token in added if token.special)
        self._forms = Forms()

    def ids(
        self, messages: Messages, options: Options = None, *, add_generation_prompt: bool = False
    ) -> list[int]:
        """Return the ids of a conversation; `options` are other arguments of the template, such as `tools`.

        Raises:
            ChatRefused: the template rejects these messages, or leaves out what one of them says.
        """
        trace = self._traced(messages, options, prompt=add_generation_prompt)
        return list(self._encoded(trace.text)["input_ids"])

    def ids_and_mask(
        self,
        messages: Messages,
        first: int = 0,
        options: Options = None,
        *,
        trailing_newline: bool = False,
        untrained: Collection[int] = (),
    ) -> tuple[list[int], list[bool]]:
        """Return the ids, and which of them belong to assistant turns among `messages[first:]`.

        A token belongs to the turn that it begins in; a token with both the end marker and the line break
        after it belongs to the turn.

        Args:
            options: other arguments of the template, such as `tools`.
            trailing_newline: include the line break after the end marker.
            untrained: numbers of messages whose turns are left out.

        Raises:
            ChatRefused: the template rejects these messages or leaves out what one of them says, or the
                tokens of a turn cannot be identified.
        """
        trace = self._traced(messages, options)
        encoded = self._encoded(trace.text)
        spoken = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        wanted = [number for number in spoken if number >= first and number not in untrained]
        if self.has_markers:
            spans = self._marked(trace, options, spoken, wanted, trailing_newline)
        else:
            spans = self._located(trace, options, encoded, wanted, trailing_newline)
        return list(encoded["input_ids"]), spans_of_tokens(encoded["offset_mapping"], spans)

    # ------------------------------------------------------------------------------------- the rendering

    def _traced(self, messages: Messages, options: Options, *, prompt: bool = False) -> Trace:
        """Render messages in the form that the template reads, and check that nothing is left out."""

        def attempt(formed: Messages) -> Trace:
            trace = Trace(self._renderer(options), formed, prompt=prompt)
            if printed_by_python(trace.text, formed):
                raise self._refused("prints a content or the arguments of a call as Python does")
            if lost := [leaf for leaf in trace.left_out() if leaf.kind != "thought"]:
                raise self._left_out(formed, lost[0])
            return trace

        found: Trace = self._forms.first(messages, attempt)
        return found

    def _left_out(self, messages: Messages, leaf: Leaf) -> ChatRefused:
        role = messages[leaf.message]["role"]
        text = leaf.text.strip()
        said = repr(text if len(text) <= 40 else f"{text[:39]}…")
        if leaf.kind in ("call", "argument"):
            remedy = "use the chat template of a model that calls tools, or remove the row"
        elif role in ("developer", "system"):
            other = "system" if role == "developer" else "user"
            remedy = f'if the template knows {other!r}, set dataset.roles = {{ "{role}" = "{other}" }}'
        else:
            remedy = f"the template does not know the role {role!r} here, or shortens what it says"
        return self._refused(f"leaves out {leaf.name} of {role!r}, {said}: {remedy}", remedy)

    def _refused(self, what: str, hint: str = REMEDY) -> ChatRefused:
        return ChatRefused(f"the chat template in {self._folder} {what}", hint=hint)

    def _renderer(self, options: Options) -> Any:
        def render(messages: Messages, prompt: bool) -> str:
            return self._render(messages, options, prompt)

        return render

    def _render(self, messages: Messages, options: Options, prompt: bool) -> str:
        import jinja2

        asked = {**(options or {}), "tokenize": False, "add_generation_prompt": prompt}
        try:
            text = str(self._tokenizer.apply_chat_template(list(messages), **asked))
            text.encode()  # half a surrogate pair is not a character
        except ImportError as error:
            raise EnvironmentProblem(
                f"a chat template needs another version of a package: {error}",
                hint="pip install -U jinja2 transformers",
            ) from error
        except jinja2.TemplateSyntaxError as error:
            raise RecipeError(
                f"the chat template in {self._folder} is not a template of Jinja: line {error.lineno}: "
                f"{error.message}",
                hint="download it again, or correct chat_template.jinja",
            ) from error
        except Exception as error:  # templates raise jinja exceptions of any class
            raise ChatRefused(
                f"the chat template in {self._folder} rejects a conversation: {error}",
                hint="check which roles the template allows, and in which order",
            ) from error
        return text

    def _encoded(self, text: str) -> Any:
        return self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)

    # ------------------------------------------------------------------------------------------ the turns

    def _located(
        self, trace: Trace, options: Options, encoded: Any, wanted: list[int], trailing_newline: bool
    ) -> list[Span]:
        """Return the spans of turns, found by the marks in their texts."""

        def divergence(before: str) -> int:
            ids = self._encoded(before)["input_ids"]
            pairs = zip(encoded["input_ids"], ids, encoded["offset_mapping"], strict=False)
            return next((start for one, other, (start, _) in pairs if one != other), len(before))

        if not trace.followed:
            raise self._refused("renders a conversation in another way if a word of it changes")
        turns = Turns(trace, self._renderer(options), self._tokens, self._special, divergence)
        spans = []
        for number in wanted:
            try:
                turn = turns.of(number)
            except ChatRefused as error:
                raise self._refused(f"has no {{% generation %}} markers, and {error.message}") from error
            end = turn.end
            if not trailing_newline:
                marker = trace.text[turn.content_end : turn.end]
                called = "tool_calls" in trace.messages[number]
                end = self._marker_end(trace.text, turn.start, end, bool(marker.strip()) and not called)
            spans.append((turn.start, end))
        return spans

    def _marker_end(self, text: str, start: int, end: int, marked: bool = False) -> int:
        """Return the end of a turn without the whitespace after its end marker.

        The marker is an added token of the vocabulary, or whatever else follows the content (`marked`). In a
        turn without one, the whitespace is its only end and is kept.
        """
        bare = text[start:end].rstrip()
        return start + len(bare) if marked or bare.endswith(self._tokens) else end

    def _marked(
        self, trace: Trace, options: Options, spoken: list[int], wanted: list[int], trailing_newline: bool
    ) -> list[Span]:
        """Return the spans of turns that the template marks."""
        spans = self._generated(trace, options)
        if wanted != spoken:
            if len(spans) != len(spoken):
                raise self._refused(
                    f"marks {len(spans)} spans in a conversation with {len(spoken)} assistant turns"
                )
            spans = [span for span, number in zip(spans, spoken, strict=True) if number in wanted]
        if trailing_newline:
            return spans
        return [(start, self._marker_end(trace.text, start, end)) for start, end in spans]

    def _generated(self, trace: Trace, options: Options) -> list[Span]:
        """Return the spans between `{% generation %}` and `{% endgeneration %}`, joined if they touch."""
        from transformers.utils.chat_template_utils import render_jinja_template

        given = {**self._tokenizer.special_tokens_map, **(options or {})}
        template = self._tokenizer.get_chat_template(tools=given.get("tools"))
        [text], [found] = render_jinja_template(
            conversations=[list(trace.messages)],
            chat_template=template,
            return_assistant_tokens_mask=True,
            **given,
        )
        if text != trace.text:
            raise self._refused("renders a conversation differently each time")
        spans: list[Span] = []
        for start, end in sorted(found):
            if spans and start <= spans[-1][1]:
                spans[-1] = spans[-1][0], max(end, spans[-1][1])
            elif start < end:
                spans.append((start, end))
        return spans
