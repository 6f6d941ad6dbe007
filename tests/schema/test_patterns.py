"""Regular expressions of third parties are bounded with both engines."""

import logging
from typing import Any

import pytest
from tests.limits import processor_limit

from operations.base.errors import SchemaError
from operations.schema import Schema
from operations.schema.compiling import MAX_LENGTH, is_linear, longest_text, text_test

QUICKLY = 5.0
"""Seconds of processor time; the promise is 0.05 on a quiet machine."""


@pytest.mark.requirement("R19")
@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (r"^(a+)+$", "a" * 10_000 + "!"),
        (r"^[ab]*a[ab]{300}b[ab]{300}a[ab]*$", "ab" * 5_000 + "!"),
        (r"^(?=.*a)(?!.*b).*(x+x+)+y$", "ax" * 5_000),
        (r"^(\w+\s?)*$", "word " * 2_000 + "!"),
        (r"(?=(a+))\1b", "a" * 10_000),
    ],
)
def test_no_text_makes_a_pattern_slow(pattern: str, text: str) -> None:
    schema = Schema({"type": "string", "pattern": pattern})
    with processor_limit(QUICKLY):
        schema.check(text)
        schema.errors(text)
        schema.cast(text)


@pytest.mark.requirement("R19")
@pytest.mark.parametrize(
    "pattern",
    [
        r"(\w{1,500}){1,100}$",
        r"^.{0,262144}$",
        r"((a{1,50}){1,50}){1,50}",
        r"a{99999999999999999999}",
        r"(ab{,5000})c",
        r"a{2000,}a{200}",
        r"\p{L}{1,2000}",
        r"(",
    ],
)
def test_a_pattern_that_is_too_expensive_is_rejected_with_its_location(pattern: str) -> None:
    documents: list[Any] = [{"pattern": pattern}, {"patternProperties": {pattern: {}}}]
    for document in documents:
        with pytest.raises(SchemaError) as caught:
            Schema({"properties": {"a": document}}).compile()
        assert "/properties/a/pattern" in str(caught.value)


@pytest.mark.requirement("R19")
def test_a_lenient_schema_drops_such_a_pattern_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    document = {
        "type": "object",
        "properties": {"a": {"type": "string", "pattern": r"(\w{1,500}){1,100}$" + "x" * 100}},
        "patternProperties": {"^(.{1,999}){99}": {"type": "null"}, "^n_": {"type": "integer"}},
    }
    schema = Schema(document, lenient=True)

    with caplog.at_level(logging.WARNING, "operations"):
        assert schema.check({"a": "x" * 10_000, "n_1": 1})
        assert not schema.check({"a": 1})
        assert not schema.check({"n_1": "x"})

    assert len(caplog.records) == 1
    assert "/properties/a/pattern" in caplog.text
    assert schema.document is document


@pytest.mark.requirement("R19")
def test_longer_patterns_are_allowed_shorter_texts() -> None:
    short, long = longest_text("^a+$"), longest_text("^[a-z]{1,2000}$")

    assert short is not None
    assert long is not None
    assert short > 1_000_000 > long >= 2_000


@pytest.mark.requirement("R19")
def test_a_text_too_long_for_its_pattern_is_invalid() -> None:
    schema = Schema({"type": "string", "pattern": "^(?!b)a+$"})

    assert schema.check("a" * 10_000)
    assert not schema.check("a" * 10_001)
    assert schema.errors("a" * 10_001)[0].keyword == "maxLength"


@pytest.mark.requirement("R19")
def test_property_names_have_the_same_pattern_limits() -> None:
    schema = Schema(
        {
            "patternProperties": {"^(?!b)a+$": {"type": "integer"}},
            "propertyNames": {"maxLength": 20_000, "pattern": "a"},
        }
    )

    assert schema.check({"a" * 10_000: 1})
    assert not schema.check({"a" * 10_000: "x"})
    assert not schema.check({"a" * 10_001: 1})
    assert not schema.check({"b": 1})


@pytest.mark.parametrize(
    ("pattern", "length"),
    [
        ("abc", 3),
        ("^a|b$", 2),
        ("a{3}", 3),
        ("(ab){3}", 6),
        ("((a{2}){3}b){4}", 28),
        (r"[a-z\]]{5}x", 6),
        (r"\p{Lu}{4}", 4),
        (r"\d{2,}", 3),
        ("a{,3}", 3),
        ("a{x}", 4),
        ("a{", 2),
        ("", 1),
        ("[unclosed", 1),
        (r"\u{61}", 1),
        ("a)", 2),
    ],
)
def test_repetitions_count_written_out(pattern: str, length: int) -> None:
    cap = longest_text(pattern)

    assert cap in {None, 10_000, MAX_LENGTH**2 // length}


def test_both_engines_find_matches_anywhere_in_a_text() -> None:
    assert is_linear("b+")
    assert not is_linear("(?=b)")
    assert text_test("b+")("abc")
    assert text_test("(?=b)")("abc")
    assert not text_test("(?=b)")("ac")
    assert not text_test("(")("(")


def test_an_object_whose_every_pattern_is_dropped_is_an_ordinary_one() -> None:
    schema = Schema({"type": "object", "patternProperties": {"(": {}}}, lenient=True)

    assert schema.cast({"a": 1}).value == {"a": 1}


@pytest.mark.requirement("R19")
@pytest.mark.requirement("R52")
@pytest.mark.parametrize("pattern", ["(", r"^\p{L}{1,500}$"])
def test_properties_of_a_dropped_pattern_are_kept(pattern: str) -> None:
    schema = Schema(
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "patternProperties": {pattern: {}},
            "additionalProperties": False,
        },
        lenient=True,
    )
    result = schema.cast({"a": 1, "b": 2})
    assert (result.value, result.changes) == ({"a": 1, "b": 2}, [])
    assert schema.check({"b": 2})


def test_patterns_in_tuples_of_old_are_bounded_too() -> None:
    with pytest.raises(SchemaError):
        Schema({"items": [{}], "additionalItems": {"pattern": r"(\w{1,500}){1,100}$"}}).compile()


def test_patterns_beside_other_limits_keep_the_lower_one() -> None:
    schema = Schema({"pattern": "a", "maxLength": 3})

    assert schema.check("aaa")
    assert not schema.check("aaaa")


def test_limits_do_not_modify_the_document() -> None:
    document: dict[str, Any] = {
        "properties": {"a": {"pattern": "a"}},
        "patternProperties": {"b": True},
    }
    Schema(document).compile()

    assert document == {"properties": {"a": {"pattern": "a"}}, "patternProperties": {"b": True}}
