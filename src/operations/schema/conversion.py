"""Writing a scalar as another JSON type without losing anything.

Rule 1: lossless means that the way back gives the same text. `"42"` is 42, but `" 42 "`, `"042"`, `"4_2"`,
`"0x2a"`, `"42.0"` and `"1e2"` are no number that would be written that way again, and stay text.
Rule 2: true and 1 mean different things. A boolean becomes text and text becomes a boolean; numbers do neither.
Rule 3: null is never converted: it stands for nothing, not for some text.
"""

from collections.abc import Iterator
from typing import Any

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
        elif name == "string" and value is not None:
            yield _BOOLEANS_AS_TEXT[value] if isinstance(value, bool) else repr(value)
        elif name == "integer" and isinstance(value, float) and is_whole(value):
            yield int(value)


def is_whole(value: float) -> bool:
    """Whether `value` is an integer written as a float."""
    return value.is_integer() and abs(value) <= _EXACT


def _from_text(text: str, name: str) -> Iterator[Any]:
    if name == "boolean" and text in _BOOLEANS:
        yield _BOOLEANS[text]
    if name not in {"integer", "number"} or len(text) > _MAX_DIGITS:
        return
    for read in (int, float) if name == "number" else (int,):
        try:
            number = read(text)
        except ValueError:
            continue
        # The difference is 0 for every number and NaN for infinities and NaN.
        if repr(number) == text and number - number == 0:
            yield number


_BOOLEANS_AS_TEXT = {value: text for text, value in _BOOLEANS.items()}
