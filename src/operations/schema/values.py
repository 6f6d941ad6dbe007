"""Compare and convert JSON scalars, and test the keywords that need no other schema.

Rule 1: text becomes a number if it is a JSON number that can be represented exactly: `"42"` is 42 and `"1.50"` is 1.5,
        but `" 42 "`, `"042"`, `"4_2"`, `"0x2a"`, `"1e999"` and numbers with more digits than a float can hold stay
        text. A number becomes its JSON text.
Rule 2: true and 1 are different values. Booleans and text can be converted to each other, booleans and numbers cannot.
Rule 3: null is never converted.
Rule 4: the tests here only explain the result of the validator. If the two differ, the validator decides.
"""

import re
from collections.abc import Callable, Iterator, Sized
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from operator import ge, gt, le, lt
from typing import Any

from operations.base.json.values import SCALARS, canonical, is_list, is_object, kind_of
from operations.base.text import shortened, suggestion
from operations.base.types import JSONObject
from operations.schema.compiling import text_test

_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]{1,4})?", re.ASCII)

_MAX_DIGITS = 400
"""Longer texts are not converted to numbers, because parsing takes quadratic time."""

_MAX_PLAIN_DIGITS = 18
_WORD = 2**63

_EXACT = 2**53
"""Beyond this a float cannot distinguish neighbouring integers."""

_BOOLEANS = {"true": True, "false": False}


def conversions(value: Any, types: tuple[str, ...]) -> Iterator[Any]:
    """Yield the JSON scalar `value` converted to each of `types` that can represent it without loss."""
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


def convert_all(values: list[Any], kind: type) -> list[Any] | None:
    """Return scalars of one type converted to `kind`, in C; None unless that is what `conversions` does for each."""
    given: object = values[0]
    source = type(given)
    made: list[Any] | None = None
    try:
        if source is str and (kind is int or kind is float):
            if max(map(len, values)) <= _MAX_PLAIN_DIGITS:
                made = list(map(kind, values))
                # The text of another spelling differs, such as 042 or 1e2.
                made = made if list(map(repr, made)) == values else None
        elif kind is str and (source is float or source is int):
            made = list(map(repr, values)) if source is float or _are_words(values) else None
        elif source is float and kind is int and all(map(is_whole, values)):
            made = list(map(int, values))
    except ValueError:
        return None
    return made


def _are_words(values: list[int]) -> bool:
    return min(values) >= -_WORD and max(values) < _WORD


def is_whole(value: float) -> bool:
    """Return whether `value` is an integer written as a float."""
    return value.is_integer() and abs(value) <= _EXACT


def _from_text(text: str, name: str) -> Iterator[Any]:
    if name == "boolean" and text in _BOOLEANS:
        yield _BOOLEANS[text]
    if name not in {"integer", "number"} or len(text) > _MAX_DIGITS or not _NUMBER.fullmatch(text):
        return
    if text.lstrip("-").isdecimal():
        yield int(text)
        return
    exact = Decimal(text)
    if name == "integer":
        if exact.adjusted() < _MAX_DIGITS and exact == exact.to_integral_value():
            yield int(exact)
    elif Decimal(repr(float(text))) == exact:
        yield float(text)


_BOOLEANS_AS_TEXT = {value: text for text, value in _BOOLEANS.items()}


_SHOWN = 80
"""The largest number of characters of a value in a message."""

ARTICLES = {
    "string": "a string",
    "number": "a number",
    "integer": "an integer",
    "boolean": "a boolean",
    "null": "null",
    "object": "an object",
    "array": "an array",
}


_NAMES: dict[type, tuple[str, ...]] = {
    str: ("string",),
    int: ("integer", "number"),
    float: ("number",),
    bool: ("boolean",),
    type(None): ("null",),
    dict: ("object",),
    list: ("array",),
}
"""The JSON types of the values of each Python type."""


def has_type(value: Any, *names: Any) -> bool:
    """Return whether a JSON value is of one of the types `names`; a float without a fraction is an integer.

    False for a name that is no JSON type: the schema may be a third party's, which is not compiled yet.
    """
    kind: type = type(value)  # pyright: ignore[reportUnknownVariableType]
    known = _NAMES.get(kind, ())
    for name in names:  # noqa: SIM110 - a generator takes twice as long
        if name in known or (name == "integer" and kind is float and value.is_integer()):
            return True
    return False


@lru_cache
def scalar_types(names: tuple[str, ...]) -> frozenset[type]:
    """Return the Python types of the scalars among the JSON types `names`."""
    return frozenset(kind for kind in SCALARS if not set(names).isdisjoint(_NAMES[kind]))


def type_of(value: Any) -> str:
    """Return the JSON Schema name of the type of a JSON value; a float without a fraction is an integer."""
    return "integer" if has_type(value, "integer") else kind_of(value)


def same(first: Any, second: Any) -> bool:
    """Return whether two JSON values are equal as JSON: `1` is `1.0`, but `true` is not `1`."""
    return bool(identity(first) == identity(second))


def shown(value: Any) -> str:
    """Return `value` as JSON for a message, truncated if it is long."""
    return shortened(canonical(value).decode(), _SHOWN)


def listed(values: list[Any]) -> str:
    """Return the first few values for a message."""
    names = ", ".join(shown(value) for value in values[:8])
    return names if len(values) <= 8 else f"{names} and {len(values) - 8} more"


_MOST_CHOICES = 100
"""The largest number of choices that a wrong text is compared with, because a value may have many wrong texts."""


def one_of(choices: list[Any], value: Any) -> str:
    """Return the message about a value that is none of these, with the most similar text."""
    near = ""
    if isinstance(value, str) and len(choices) <= _MOST_CHOICES:
        near = suggestion(value, (each for each in choices if isinstance(each, str)))
    return f"must be one of {listed(choices)}{near and '.'}{near}"


def flat_failures(schema: JSONObject, value: Any) -> Iterator[tuple[str, str]]:
    """Yield the keyword and the message of every failure that needs no other schema."""
    for keyword, test in _TESTS.items():
        if keyword in schema:
            message = test(schema[keyword], value, schema)
            if message is not None:
                yield keyword, message


def _type(expected: Any, value: Any, _schema: JSONObject) -> str | None:
    names = expected if is_list(expected) else [expected]
    if has_type(value, *names):
        return None
    wanted = " or ".join(ARTICLES[name] for name in names)
    return f"must be {wanted}, not {ARTICLES[type_of(value)]}"


def _enum(members: list[Any], value: Any, _schema: JSONObject) -> str | None:
    # Once, because a value may be much larger than the members.
    wanted = identity(value)
    if any(identity(member) == wanted for member in members):
        return None
    return one_of(members, value)


def _const(expected: Any, value: Any, _schema: JSONObject) -> str | None:
    return None if same(value, expected) else f"must be {shown(expected)}"


def _number(
    test: Callable[[Any, Any], bool], words: str
) -> Callable[[Any, Any, JSONObject], str | None]:
    def check(limit: Any, value: Any, _schema: JSONObject) -> str | None:
        if isinstance(limit, bool) or not has_type(value, "number") or test(value, limit):
            return None
        return f"must be {words} {shown(limit)}"

    return check


def _minimum(limit: Any, value: Any, schema: JSONObject) -> str | None:
    # Draft 4 has `exclusiveMinimum: true` beside the limit.
    check = _MORE if schema.get("exclusiveMinimum") is True else _AT_LEAST
    return check(limit, value, schema)


def _maximum(limit: Any, value: Any, schema: JSONObject) -> str | None:
    check = _LESS if schema.get("exclusiveMaximum") is True else _AT_MOST
    return check(limit, value, schema)


_AT_LEAST, _MORE = _number(ge, "at least"), _number(gt, "more than")
_AT_MOST, _LESS = _number(le, "at most"), _number(lt, "less than")


def _is_multiple(value: Any, limit: Any) -> bool:
    return _fraction(value) % _fraction(limit) == 0


def _fraction(number: Any) -> Fraction:
    # Calculated in decimal, because the multiples of 0.1 are not those of its binary approximation.
    return Fraction(number) if isinstance(number, int) else Fraction(repr(number))


def _size(
    kind: type[Sized], unit: str, *, at_least: bool
) -> Callable[[Any, Any, JSONObject], str | None]:
    def check(limit: Any, value: Any, _schema: JSONObject) -> str | None:
        if not isinstance(value, kind):
            return None
        if len(value) >= limit if at_least else len(value) <= limit:
            return None
        words = "at least" if at_least else "at most"
        plural = unit.replace("y", "ies") if unit.endswith("y") else unit + "s"
        return f"must have {words} {limit} {unit if limit == 1 else plural}, not {len(value)}"

    return check


def _pattern(pattern: str, value: Any, _schema: JSONObject) -> str | None:
    if type(value) is not str or text_test(pattern)(value):
        return None
    return f"must match the pattern {shown(pattern)}"


def _unique(wanted: Any, value: Any, _schema: JSONObject) -> str | None:
    if wanted is not True or not is_list(value) or len(distinct(value)) == len(value):
        return None
    return "must not contain the same item twice"


def distinct(items: list[Any]) -> list[Any]:
    """Return `items` without duplicates, compared as JSON."""
    found: dict[Any, Any] = {}
    for item in items:
        found.setdefault(identity(item), item)
    return list(found.values())


def identity(value: Any) -> Any:
    """Return a hashable key that is equal only for equal JSON values."""
    if is_object(value):
        return frozenset((name, identity(item)) for name, item in value.items())
    if is_list(value):
        return tuple(map(identity, value))
    return type(value) is bool, value


_TESTS: dict[str, Callable[[Any, Any, JSONObject], str | None]] = {
    "type": _type,
    "enum": _enum,
    "const": _const,
    "minimum": _minimum,
    "exclusiveMinimum": _MORE,
    "maximum": _maximum,
    "exclusiveMaximum": _LESS,
    "multipleOf": _number(_is_multiple, "a multiple of"),
    "minLength": _size(str, "character", at_least=True),
    "maxLength": _size(str, "character", at_least=False),
    "pattern": _pattern,
    "minItems": _size(list, "item", at_least=True),
    "maxItems": _size(list, "item", at_least=False),
    "uniqueItems": _unique,
    "minProperties": _size(dict, "property", at_least=True),
    "maxProperties": _size(dict, "property", at_least=False),
}
