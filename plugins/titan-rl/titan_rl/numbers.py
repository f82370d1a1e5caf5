"""The value of the last number of a text, exactly: integers, decimals, fractions (`3/4`, `\\frac{3}{4}`, ¾)
and mixed numbers (`1 1/2`, `1\\frac12`). Units, currencies and percent signs are not part of a number."""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

LONGEST = 400
"""Digits and exponents beyond this are no answer; they would take minutes to compute."""
_SIGN = r"[-+\u2212]?"
_DECIMAL = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
# A comma is part of a number only between thousands: `(3,4)` ends with 4. U+2212 is also a minus.
_ARGUMENT = rf"(?:\{{\s*(?P<%s>{_SIGN}{_DECIMAL})\s*\}}|(?P<%s_digit>\d))"
_OVER, _UNDER = (_ARGUMENT % (name, name) for name in ("over", "under"))
_LATEX = rf"(?:(?P<latex_whole>\d+)\s*)?\\[dtc]?frac\s*{_OVER}\s*{_UNDER}"
_SLASH = (
    rf"(?:(?P<slash_whole>\d+)[ \u00a0])?(?P<upper>{_DECIMAL})\s?[/\u2044]\s?(?P<lower>{_DECIMAL})"
    r"(?![\d/]|\.\d|\s?/\s?\d)"
)
_VULGAR = r"(?P<vulgar_whole>\d*)\s?(?P<vulgar>[\u00bc-\u00be\u2150-\u215e\u2189])"
_PLAIN = rf"(?P<plain>{_DECIMAL})(?:[eE](?P<exponent>[-+\u2212]?\d+))?"
NUMBER = re.compile(rf"(?P<sign>{_SIGN})(?:{_LATEX}|(?<![\d/]){_SLASH}|{_VULGAR}|{_PLAIN})")
REACH = 40
"""Characters before a number that are looked at."""
_OPERAND = r"(?:\d|[)}\]]|(?<![A-Za-z])[a-z])"
OPERAND = re.compile(_OPERAND + r"\Z")
BEFORE = re.compile(
    r"(?:[\^_]\{?|\\sqrt(?:\[.*\])?\{?|\u221a\(?|\\[dtc]?frac\{?|\}\{"
    rf"|{_OPERAND}\s*[-+*/\u00d7\u00b7\u00f7\u2212])\s*\Z"
)
"""What makes the number after it a part of an expression."""
AFTER = re.compile(
    r"\s*(?:\\(?:pi|sqrt|cdot|times|div|[dtc]?frac|infty|pm|ln|log|sin|cos|tan)(?![a-zA-Z])"
    r"|\^(?!\s*\{?\s*\\circ)|[\u221a\u03c0\u221e]|/\s*[xyzn]\b)|[xyzi]\b"
)
"""The same of the number before it."""


def last_number(text: str) -> Fraction | None:
    """Return the value of the last number of a text; None if there is none, or it is only a part of an
    expression (`2\\sqrt{3}`, `10^5`)."""
    text = re.sub(r"(?<=\d)(?:\{,\}|\\[,!])(?=\d{3})", ",", text)
    numbers = list(NUMBER.finditer(text))
    if not numbers:
        return None
    found = numbers[-1]
    before = text[max(0, found.start() - REACH) : found.start()]
    is_operator = found["sign"] and OPERAND.search(before)  # 2x+3
    if is_operator or BEFORE.search(before) or AFTER.match(text, found.end()):
        return None
    return _value(found)


def _value(found: re.Match[str]) -> Fraction | None:
    part = found.groupdict()
    if len(found[0]) > LONGEST:
        return None
    whole: str | None = None
    if part["plain"] is not None:
        exponent = int(_plain(part["exponent"] or "0"))
        small = abs(exponent) <= LONGEST
        value = Fraction(_plain(part["plain"])) * Fraction(10) ** exponent if small else None
    elif part["vulgar"] is not None:
        whole = part["vulgar_whole"]
        value = Fraction(unicodedata.numeric(part["vulgar"])).limit_denominator(1000)
    else:
        latex = part["over"] or part["over_digit"]
        upper = Fraction(_plain(latex or part["upper"]))
        lower = Fraction(_plain(part["under"] or part["under_digit"] if latex else part["lower"]))
        whole = part["latex_whole"] if latex else part["slash_whole"]
        value = upper / lower if lower else None
        if whole and value is not None and not 0 <= value < 1:
            whole = None  # two numbers: `step 2 5/3`
    if value is None:
        return None
    value += int(whole) if whole else 0
    return -value if found["sign"] in ("-", "\u2212") else value


def _plain(number: str) -> str:
    return number.replace(",", "").replace("\u2212", "-")
