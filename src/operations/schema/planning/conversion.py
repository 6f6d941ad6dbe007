"""Writing a scalar as another JSON type without losing anything.

Rule 1: a text becomes a number if it is written as JSON writes numbers and the number is exactly what it says. So
`"42"` is 42 and `"1.50"` is 1.5, but `" 42 "`, `"042"`, `"4_2"`, `"0x2a"`, `"1e999"` and more digits than a float
keeps are no numbers. A number becomes the text that JSON writes for it.
Rule 2: true and 1 mean different things. A boolean becomes text and text becomes a boolean; numbers do neither.
Rule 3: null is never converted: it stands for nothing, not for some text.
"""

import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]{1,4})?", re.ASCII)

_MAX_DIGITS = 400
"""Longer texts are no numbers anyone meant; reading them takes quadratic time."""

_EXACT = 2**53
"""Beyond this a float no longer tells one integer from the next."""

_BOOLEANS = {"true": True, "false": False}


def conversions(value: Any, types: tuple[str, ...]) -> Iterator[Any]:
    """`value`, a JSON scalar, in each of `types` that can hold it without loss."""
    for name in types:
        if isinstance(value, str):
            yield from _from_text(value, name)
        elif name == "string":
            yield from _as_text(value)
        elif name == "integer" and isinstance(value, float) and is_whole(value):
            yield int(value)


def _as_text(value: Any) -> Iterator[str]:
    if isinstance(value, bool):
        yield _BOOLEANS_AS_TEXT[value]
    elif isinstance(value, float) or (isinstance(value, int) and abs(value) < 10**_MAX_DIGITS):
        yield repr(value)


def is_whole(value: float) -> bool:
    """Whether `value` is an integer written as a float."""
    return value.is_integer() and abs(value) <= _EXACT


def _from_text(text: str, name: str) -> Iterator[Any]:
    if name == "boolean" and text in _BOOLEANS:
        yield _BOOLEANS[text]
    if name not in {"integer", "number"} or len(text) > _MAX_DIGITS or not _NUMBER.fullmatch(text):
        return
    exact = Decimal(text)
    if text.lstrip("-").isdecimal():
        yield int(text)
    elif name == "integer":
        if exact.adjusted() < _MAX_DIGITS and exact == exact.to_integral_value():
            yield int(exact)
    elif Decimal(repr(float(text))) == exact:
        yield float(text)


_BOOLEANS_AS_TEXT = {value: text for text, value in _BOOLEANS.items()}
