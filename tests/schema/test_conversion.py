"""Writing a scalar as another JSON type without losing anything."""

from typing import Any

import pytest

from operations.schema.values import conversions, is_whole


@pytest.mark.parametrize(
    ("text", "integer", "number"),
    [
        ("42", [42], [42]),
        ("-42", [-42], [-42]),
        ("42.0", [42], [42.0]),
        ("1e2", [100], [100.0]),
        ("1.50", [], [1.5]),
        ("0.1", [], [0.1]),
        ("9007199254740993", [9007199254740993], [9007199254740993]),
        ("0.12345678901234567890123", [], []),
        ("042", [], []),
        (" 42 ", [], []),
        ("+42", [], []),
        ("4_2", [], []),
        ("0x2a", [], []),
        ("1.", [], []),
        (".5", [], []),
        ("1e999", [], []),
        ("1e-999", [], []),
        ("1" * 401, [], []),
        ("inf", [], []),
        ("nan", [], []),
        ("٤٢", [], []),
        ("", [], []),
    ],
)
def test_a_text_becomes_exactly_its_number(text: str, integer: Any, number: Any) -> None:
    assert list(conversions(text, ("integer",))) == integer
    assert list(conversions(text, ("number",))) == number


@pytest.mark.parametrize(
    ("value", "types", "expected"),
    [
        ("true", ("boolean",), [True]),
        ("True", ("boolean",), []),
        ("1", ("boolean", "integer"), [1]),
        (True, ("string",), ["true"]),
        (False, ("integer", "number"), []),
        (1, ("boolean",), []),
        (42, ("string",), ["42"]),
        (1.5, ("string",), ["1.5"]),
        (10**500, ("string",), []),
        (1.0, ("integer",), [1]),
        (1.5, ("integer",), []),
        (1e300, ("integer",), []),
        (None, ("string", "integer", "boolean"), []),
        ("a", ("null", "object", "array"), []),
    ],
)
def test_other_conversions(value: Any, types: tuple[str, ...], expected: Any) -> None:
    assert list(conversions(value, types)) == expected


def test_a_float_is_an_integer_only_in_the_exact_range() -> None:
    assert is_whole(2.0**53)
    assert not is_whole(2.0**54)
    assert not is_whole(0.5)
