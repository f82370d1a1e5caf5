"""The built-in rewards, without torch."""

from __future__ import annotations

import json
import re
from fractions import Fraction
from typing import TYPE_CHECKING

from titan_rl.numbers import last_number
from titancli.errors import RecipeError
from titancli.protocols.samples import Completion, Prompt

if TYPE_CHECKING:
    import titan_rl as rl

FENCED = re.compile(r"\s*```(?:json)?\s*\n(.*?)\n?\s*```\s*\Z", re.DOTALL)


class ExactMatch:
    """1 if the completion equals the answer, ignoring surrounding whitespace."""

    def __init__(self, config: rl.ExactMatch) -> None:
        self._ignore_case = config.ignore_case

    def __call__(self, prompt: Prompt, completion: Completion) -> float:
        said, right = completion.text.strip(), _answer(prompt).strip()
        if self._ignore_case:
            said, right = said.casefold(), right.casefold()
        return float(said == right)


class Regex:
    """1 if the pattern matches; its group `answer`, if any, must equal the prompt's answer."""

    def __init__(self, config: rl.Regex) -> None:
        self._pattern = re.compile(config.pattern)
        self._whole = config.whole

    def __call__(self, prompt: Prompt, completion: Completion) -> float:
        look = self._pattern.fullmatch if self._whole else self._pattern.search
        found = look(completion.text)
        if found is None:
            return 0.0
        if "answer" not in self._pattern.groupindex:
            return 1.0
        return float((found["answer"] or "").strip() == _answer(prompt).strip())


class Numeric:
    """1 if the last number of the completion equals that of the answer."""

    def __init__(self, config: rl.Numeric) -> None:
        self._tolerance, self._after = Fraction(config.tolerance), config.after

    def refuses(self, prompt: Prompt) -> str | None:
        """Return why a prompt's answer cannot be compared with numbers; None if it can."""
        if prompt.answer is None:
            return "the prompt has no answer to compare to"
        if last_number(prompt.answer) is None:
            return f"the prompt's answer {prompt.answer[-80:]!r} does not end with a number or a fraction"
        return None

    def __call__(self, prompt: Prompt, completion: Completion) -> float:
        right = last_number(_answer(prompt))
        if right is None:
            raise ValueError(self.refuses(prompt))
        text = completion.text
        if self._after is not None:
            _, marker, text = text.rpartition(self._after)
            if not marker:
                return 0.0
        said = last_number(text)
        return float(said is not None and abs(said - right) <= self._tolerance * max(Fraction(1), abs(right)))


class JsonSchema:
    """1 if the completion is JSON that is valid under the schema; a surrounding ``` fence is removed."""

    def __init__(self, config: rl.JsonSchema) -> None:
        try:
            from jsonschema.validators import validator_for
            from jsonschema_specifications import REGISTRY
        except ImportError as error:
            raise RecipeError(
                "the reward json_schema needs the package jsonschema, which is not installed",
                hint="pip install jsonschema",
            ) from error
        kind = validator_for(config.schema)
        try:
            kind.check_schema(config.schema)
        except Exception as error:
            raise RecipeError(f"loop.rewards: invalid JSON Schema: {error}") from error
        self._validator = kind(config.schema, registry=REGISTRY)  # the default one fetches references

    def __call__(self, prompt: Prompt, completion: Completion) -> float:
        fenced = FENCED.match(completion.text)
        try:
            value = json.loads(fenced[1] if fenced else completion.text)
        except (ValueError, RecursionError):
            return 0.0
        return float(self._validator.is_valid(value))


class Length:
    """0 up to `free` tokens, then falling to -1 at `limit` (DAPO, arXiv 2503.14476, eq. 13)."""

    def __init__(self, config: rl.Length) -> None:
        self._free, self._limit = config.free, config.limit

    def __call__(self, prompt: Prompt, completion: Completion) -> float:
        over = (len(completion.tokens) - self._free) / (self._limit - self._free)
        return -min(1.0, max(0.0, over))


def _answer(prompt: Prompt) -> str:
    if prompt.answer is None:
        raise ValueError("the prompt has no answer to compare to")
    return prompt.answer
