"""Conversations under a Hugging Face chat template: their ids, and which of them are the assistant's.

A template may mark assistant turns with `{% generation %}`; otherwise `titancli.data.turns` locates
them. A turn that cannot be located, or a template that leaves out what a message says, makes a bad row;
nothing is guessed.

A turn ends with its end marker. The line break that many templates put after it (ChatML: `<|im_end|>\\n`) is
not part of the turn unless requested: sampling stops at the marker.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import xxhash

from titancli.data.forms import Forms, printed_by_python
from titancli.data.marks import ChatRefused, Leaf, Messages, Trace
from titancli.data.remarks import remark
from titancli.data.trial import harms_of
from titancli.data.turns import Turns, common, spans_of_tokens
from titancli.errors import EnvironmentProblem, RecipeError

__all__ = ["MARKERS", "ChatRefused", "ChatTemplate"]

MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
REMEDY = (
    "put {% generation %} and {% endgeneration %} around the assistant's messages in chat_template.jinja, "
    'or train on all tokens (dataset.train_on = "all")'
)

OTHER_ROLES = {"developer": "system", "system": "user", "function": "tool", "ipython": "tool"}
"""Roles that a template may know in place of one that it leaves out."""

Options = Mapping[str, Any] | None
Span = tuple[int, int]
"""First character, and the one after the last."""


def not_jinja(folder: Path, line: int, message: str | None) -> RecipeError:
    """Return the error about a mistake in the syntax of a folder's template."""
    return RecipeError(
        f"the chat template in {folder} is not a template of Jinja: line {line}: {message}",
        hint="download it again, or correct chat_template.jinja",
    )


class ChatTemplate:
    """The chat template of a transformers tokenizer."""

    def __init__(self, tokenizer: Any, folder: Path) -> None:
        """Read the tokenizer's chat template.

        Raises:
            RecipeError: there is none.
            EnvironmentProblem: it takes more memory or time to render than any template should.
        """
        if not tokenizer.chat_template:
            raise RecipeError(
                f"the tokenizer in {folder} has no chat template",
                hint="add a chat_template.jinja to the folder, or use the tokenizer of an instruct model",
            )
        self._tokenizer, self._folder = tokenizer, folder
        self.text = str(tokenizer.chat_template)
        texts = tokenizer.chat_template
        for text in texts.values() if isinstance(texts, dict) else [texts]:
            self._require_harmless(str(text))
        added = [token for token in tokenizer.added_tokens_decoder.values() if token.content.strip()]
        self._tokens = tuple(token.content for token in added)
        self._special = tuple(token.content for token in added if token.special)
        self._forms = Forms(lambda talk: self._checked(talk, None))

    def _require_harmless(self, text: str) -> None:
        digest = xxhash.xxh3_128_hexdigest(text.encode(errors="surrogatepass"))
        for reason in harms_of("template", "jinja2", {text: digest}).values():
            raise EnvironmentProblem(
                f"the chat template in {self._folder} cannot be used: {reason}",
                hint="download it again, or correct chat_template.jinja",
            )

    def ids(
        self, messages: Messages, options: Options = None, *, add_generation_prompt: bool = False
    ) -> list[int]:
        """Return the ids of a conversation; `options` are other arguments of the template, such as `tools`.

        Raises:
            ChatRefused: the template rejects these messages, or leaves out what one of them says.
        """
        text = self.rendered(messages, options, add_generation_prompt=add_generation_prompt)
        return list(self._encoded(text)["input_ids"])

    def rendered(
        self, messages: Messages, options: Options = None, *, add_generation_prompt: bool = False
    ) -> str:
        """Return the text of a conversation; see `ids`."""
        return self._traced(messages, options, prompt=add_generation_prompt).text

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
        if MARKERS.search(self._template_of(options)):
            spans = self._marked(trace, options, spoken, wanted, trailing_newline)
        else:
            spans = self._located(trace, options, encoded, wanted, trailing_newline)
        return list(encoded["input_ids"]), spans_of_tokens(encoded["offset_mapping"], spans)

    def text_and_mask(self, text: str) -> tuple[list[int], list[bool]]:
        """Return the ids of a conversation that is rendered already, and which of them belong to turns of the
        assistant: from the generation prompt to the next end marker.

        Raises:
            RecipeError: the template writes nothing before an answer, or no special token after it.
        """
        before, after = self._around_answers
        spans, at = [], 0
        while (found := text.find(before, at)) >= 0:
            start = found + len(before)
            end = re.compile(after).search(text, start)
            at = end.end() if end else len(text)
            spans.append((start, at))
        encoded = self._encoded(text)
        return list(encoded["input_ids"]), spans_of_tokens(encoded["offset_mapping"], spans)

    @cached_property
    def _around_answers(self) -> tuple[str, str]:
        """Return what the template writes before an answer, and the special tokens that may follow one, as a
        pattern."""
        talk = [{"role": role, "content": f"{role} {n}"} for n in "01" for role in ("user", "assistant")]
        trace = self._traced(talk, None)
        turns = self._turns(trace, None, self._encoded(trace.text))
        prompt, before, after = turns.prompt, turns.prompt, set()
        role = prompt[: turns.role_end(prompt)]
        for n in "01":
            asked, said = (trace.text.index(f"{one} {n}") + len(one) + 2 for one in ("user", "assistant"))
            between = trace.text[asked : said - len("assistant 0")]
            at = between.find(role) if role.strip() else -1
            before = common(before, between[at:]) if at >= 0 else ""
            after |= {one for one in self._special if trace.text.startswith(one, said)}
        if not before or not after:
            raise RecipeError(
                f"the chat template in {self._folder} writes nothing before an answer, or no special token "
                f"after it, by which turns can be found in a text",
                hint='set dataset.markers = "read" to train on all of the text, or give the messages',
            )
        return before, "|".join(map(re.escape, sorted(after)))

    # ------------------------------------------------------------------------------------- the rendering

    def _traced(self, messages: Messages, options: Options, *, prompt: bool = False) -> Trace:
        """Render messages in the form that the template reads, and check that nothing is left out."""

        def attempt(formed: Messages) -> tuple[Trace, list[Leaf]]:
            return self._checked(formed, options, prompt=prompt)

        trace, lost = self._forms.first(messages, attempt)
        self._remark(trace, lost, options)
        found: Trace = trace
        return found

    def _checked(
        self, messages: Messages, options: Options, *, prompt: bool = False
    ) -> tuple[Trace, list[Leaf]]:
        """Render messages as they are; return the rendering, and thoughts that it leaves out."""
        trace = Trace(self._renderer(options), messages, prompt=prompt)
        if printed_by_python(trace):
            raise self._refused("prints a content or the arguments of a call as Python does")
        lost = trace.left_out()
        if said := [leaf for leaf in lost if leaf.kind != "thought"]:
            raise self._left_out(messages, said[0])
        return trace, lost

    def _remark(self, trace: Trace, lost: Sequence[Leaf], options: Options) -> None:
        """Remark on what a rendering lacks, or has too much, without being wrong."""
        asked = [number for number, message in enumerate(trace.messages) if message["role"] == "user"]
        if last := [leaf for leaf in lost if leaf.message > max(asked, default=-1)]:
            remark(
                "thoughts",
                f"the chat template leaves out {last[0].name}, so it is not learned: use the template of a "
                f"model that thinks, or remove it from the rows",
            )
        for tool in (options or {}).get("tools") or ():
            name = tool.get("function", tool).get("name")
            if isinstance(name, str) and name not in trace.text:
                remark(
                    "tools",
                    f"the chat template leaves out the row's tools ({name}): use the template of a model "
                    f"that calls tools, or remove them from the rows",
                )
        for leaf in trace.leaves:
            if token := next((token for token in self._special if token in leaf.text), None):
                remark(
                    "forged",
                    f"{leaf.name} has {token!r}, which the model reads as the special token, not as text: "
                    f"remove it from the rows",
                )

    def _left_out(self, messages: Messages, leaf: Leaf) -> ChatRefused:
        role = messages[leaf.message]["role"]
        text = leaf.text.strip()
        said = repr(text if len(text) <= 40 else f"{text[:39]}…")
        if leaf.kind in ("call", "argument"):
            remedy = "use the chat template of a model that calls tools, or remove the row"
        elif other := OTHER_ROLES.get(role):
            remedy = f'if the template knows {other!r}, set dataset.roles = {{ "{role}" = "{other}" }}'
        else:
            remedy = f"the template does not know the role {role!r} here, or shortens what it says"
        return self._refused(f"leaves out {leaf.name} of {role!r}, {said}: {remedy}", remedy)

    def _refused(self, what: str, hint: str = REMEDY) -> ChatRefused:
        return ChatRefused(f"the chat template in {self._folder} {what}", hint=hint)

    def _renderer(self, options: Options) -> Any:
        def render(messages: Messages, prompt: bool) -> str:
            return self.render(messages, options, prompt)

        return render

    def render(self, messages: Messages, options: Options, prompt: bool) -> str:
        """Return what the template makes of messages as they are, unchecked.

        Raises:
            ChatRefused: the template rejects them.
            RecipeError: it is not a template of Jinja.
            EnvironmentProblem: a package that renders it is of another version.
        """
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
            raise not_jinja(self._folder, error.lineno, error.message) from error
        except Exception as error:  # templates raise jinja exceptions of any class
            raise ChatRefused(
                f"the chat template in {self._folder} rejects a conversation: {error}",
                hint="check which roles the template allows, and in which order",
            ) from error
        return text

    def _template_of(self, options: Options) -> str:
        """Return the text of the template; a folder may have another one for rows with tools."""
        return str(self._tokenizer.get_chat_template(tools=(options or {}).get("tools")))

    def _encoded(self, text: str) -> Any:
        return self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)

    # ------------------------------------------------------------------------------------------ the turns

    def _located(
        self, trace: Trace, options: Options, encoded: Any, wanted: list[int], trailing_newline: bool
    ) -> list[Span]:
        """Return the spans of turns, found by the marks in their texts."""
        if not trace.followed:
            raise self._refused("renders a conversation in another way if a word of it changes")
        turns = self._turns(trace, options, encoded)
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

    def _turns(self, trace: Trace, options: Options, encoded: Any) -> Turns:
        def divergence(before: str) -> int:
            ids = self._encoded(before)["input_ids"]
            pairs = zip(encoded["input_ids"], ids, encoded["offset_mapping"], strict=False)
            return next((start for one, other, (start, _) in pairs if one != other), len(before))

        return Turns(trace, self._renderer(options), self._tokens, divergence)

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
            owners = [self._speaker(trace, span, spoken, wanted) for span in spans]
            spans = [span for span, owner in zip(spans, owners, strict=True) if owner in wanted]
        if trailing_newline:
            return spans
        return [(start, self._marker_end(trace.text, start, end)) for start, end in spans]

    def _speaker(self, trace: Trace, span: Span, spoken: list[int], wanted: list[int]) -> int:
        """Return the number of the assistant's message that a marked span is of."""
        start, end = span
        inside = [trace.owner(mark) for mark in trace.marks if start <= mark.at <= end]
        before = [trace.owner(mark) for mark in trace.marks if mark.at < start]
        owners = [owner for owner in inside if owner in spoken] or before[-1:]
        if not owners or owners[0] not in spoken or len({owner in wanted for owner in owners}) > 1:
            raise self._refused("marks a span that is not of one assistant turn alone")
        return owners[0]

    def _generated(self, trace: Trace, options: Options) -> list[Span]:
        """Return the spans between `{% generation %}` and `{% endgeneration %}`, joined if they touch."""
        from transformers.utils.chat_template_utils import render_jinja_template

        given = {**self._tokenizer.special_tokens_map, **(options or {})}
        [text], [found] = render_jinja_template(
            conversations=[list(trace.messages)],
            chat_template=self._template_of(options),
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
