"""The verdict on JSON values, and on other values."""

import datetime
import decimal
import enum
import logging
import uuid
from collections import OrderedDict
from typing import Any

import pytest

from operations.base.errors import SchemaError
from operations.schema import Schema, from_schema

CLOSED = {
    "type": "object",
    "properties": {
        "a": {"type": "integer"},
        "b": {"enum": ["x", "y"]},
        "c": {"type": "array", "items": {"type": ["string", "null"]}},
        "d": {"anyOf": [{"const": 1}, {"$ref": "#/$defs/inner"}]},
        "e": {"allOf": [{"minimum": 1}, {"type": "number"}]},
        "f": {"type": "object", "additionalProperties": {"type": "boolean"}},
        "g": {"type": "array", "prefixItems": [{"type": "string"}], "items": False},
    },
    "additionalProperties": False,
    "$defs": {"inner": {"type": "object", "additionalProperties": False}},
}


class Color(enum.Enum):
    RED = "x"


class Word(enum.StrEnum):
    A = "a"


NOT_JSON: list[Any] = [
    float("nan"),
    float("inf"),
    -float("inf"),
    "\ud800",
    {1.5: 2},
    {None: 1},
    {"\ud800": 1},
    object(),
    10**5_000,
    Color,
]


@pytest.mark.requirement("R28")
@pytest.mark.parametrize(
    "document", [CLOSED, {}, {"type": ["object", "array", "number", "string"]}, True]
)
@pytest.mark.parametrize("value", NOT_JSON, ids=lambda value: type(value).__name__)
def test_a_value_that_is_not_json_is_invalid_with_its_path(document: Any, value: Any) -> None:
    schema = Schema(document)

    for path, wrapped in (("", value), ("/a", {"a": value}), ("/c/0", {"c": [value]})):
        assert not schema.check(wrapped)
        fault = schema.errors(wrapped)[0]
        assert fault.keyword == "json"
        assert fault.path.startswith(path)


@pytest.mark.requirement("R28")
def test_integers_are_exact_at_any_size() -> None:
    schema = Schema({"type": "integer", "maximum": 10**30})

    assert schema.check(10**30)
    assert not schema.check(10**30 + 1)
    assert schema.cast(10**40, "create").value == 0


def test_a_key_with_a_surrogate_is_reported_at_its_object() -> None:
    fault = Schema({}).errors({"\ud800": {"a/b~": float("nan")}})[0]

    assert fault.path == ""
    assert "surrogate" in fault.message
    assert Schema({}).errors({"a/b~": [float("nan")]})[0].path == "/a~1b~0/0"


CONVERTED: list[tuple[Any, str]] = [
    (("a",), "array"),
    (Color.RED, "string"),
    (Word.A, "string"),
    ({Word.A: 1}, "object"),
    (OrderedDict(a=1), "object"),
    (decimal.Decimal("1.5"), "string"),
    (datetime.date(2024, 1, 2), "string"),
    (uuid.UUID(int=1), "string"),
    (b"bytes", "string"),
    ({1, 2}, "array"),
    ({1: 2}, "object"),
]


@pytest.mark.parametrize(("value", "kind"), CONVERTED, ids=lambda value: type(value).__name__)
def test_values_are_converted_to_json_before_they_are_checked(value: Any, kind: str) -> None:
    for name in ("array", "integer", "number", "object", "string"):
        schema = Schema({"type": name})

        assert schema.check(value) is (name == kind)
        assert bool(schema.errors(value)) is (name != kind)
        closed = Schema({"properties": {"a": {"type": name}}, "additionalProperties": False})
        assert closed.check({"a": value}) is (name == kind)


def test_lists_of_another_class_are_looked_through() -> None:
    class Rows(list[Any]):
        """A list with changed behaviour."""

    assert Schema({}).check(Rows([1]))
    assert not Schema({}).check(Rows([float("nan")]))


def test_formats_are_annotations() -> None:
    assert Schema({"type": "string", "format": "date-time"}).check("yesterday")
    draft_7 = {"$schema": "http://json-schema.org/draft-07/schema#", "format": "email"}
    assert Schema(draft_7).check("nobody")


@pytest.mark.parametrize(
    ("dialect", "document", "valid", "invalid"),
    [
        (
            "https://json-schema.org/draft/2020-12/schema",
            {"prefixItems": [{"type": "null"}]},
            [None],
            [1],
        ),
        (
            "https://json-schema.org/draft/2019-09/schema",
            {"items": [{"type": "null"}]},
            [None],
            [1],
        ),
        ("http://json-schema.org/draft-07/schema#", {"items": [{"type": "null"}]}, [None], [1]),
        ("http://json-schema.org/draft-06/schema", {"exclusiveMinimum": 1}, 2, 1),
        ("http://json-schema.org/draft-04/schema#", {"minimum": 1, "exclusiveMinimum": True}, 2, 1),
    ],
)
def test_a_document_is_read_in_the_dialect_it_names(
    dialect: str, document: Any, valid: Any, invalid: Any
) -> None:
    schema = Schema({"$schema": dialect, **document})

    assert schema.check(valid)
    assert not schema.check(invalid)
    assert schema.errors(invalid)


def test_a_document_without_dialect_and_with_array_items_is_read_as_2019_09() -> None:
    schema = Schema({"items": [{"type": "integer"}, {"type": "string"}], "additionalItems": False})

    assert schema.check([1, "a"])
    assert not schema.check([1, "a", None])
    assert [fault.path for fault in schema.errors(["x", "a", None])] == ["/0", "/2"]


def test_up_to_draft_7_keywords_beside_a_reference_are_ignored() -> None:
    document = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "definitions": {"text": {"type": "string"}},
        "properties": {"a": {"$ref": "#/definitions/text", "maxLength": 1, "default": "x"}},
    }
    schema = Schema(document)

    assert schema.check({"a": "long"})
    assert schema.cast({"a": "long"}).value == {"a": "long"}
    assert schema.cast({}).value == {}


@pytest.mark.parametrize(
    ("dialect", "document", "value"),
    [
        (
            "https://json-schema.org/draft/2020-12/schema",
            {"additionalItems": {"type": "nonsense"}},
            [1],
        ),
        (
            "https://json-schema.org/draft/2019-09/schema",
            {"prefixItems": [{"type": "nonsense"}]},
            [1],
        ),
        (
            "http://json-schema.org/draft-07/schema#",
            {"dependentSchemas": {"a": 5}, "prefixItems": 5},
            {"a": 1},
        ),
        ("http://json-schema.org/draft-06/schema#", {"if": {}, "then": {"type": "nonsense"}}, 1),
        (
            "http://json-schema.org/draft-04/schema#",
            {"const": 1, "contains": 5, "propertyNames": 5},
            2,
        ),
    ],
)
def test_keywords_of_other_dialects_are_ignored(dialect: str, document: Any, value: Any) -> None:
    schema = Schema({"$schema": dialect, **document})

    assert schema.check(value)
    assert schema.cast(value) == (value, [])


def test_a_lenient_schema_that_cannot_be_compiled_counts_as_unknown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    schema = from_schema({"type": "nonsense"}, lenient=True)

    with caplog.at_level(logging.WARNING, "operations"):
        assert schema.is_unknown
        assert schema.check({"anything": 1})
        assert schema.cast({"anything": (1,)}).value == {"anything": [1]}

    assert len(caplog.records) == 1


@pytest.mark.requirement("R13")
def test_a_part_that_cannot_be_compiled_alone_accepts_any_value() -> None:
    draft_4 = {"$schema": "http://json-schema.org/draft-04/schema#", "$dynamicRef": "a.json"}
    schema = from_schema({"required": ["a"], "not": draft_4}, lenient=True)
    assert not schema.check({})
    assert schema.errors({})
    assert schema.cast({"a": 1}).value == {"a": 1}


def test_a_strict_schema_that_cannot_be_compiled_raises_when_used() -> None:
    schema = from_schema({"type": "nonsense"})

    for use in (
        schema.compile,
        lambda: schema.check(1),
        lambda: schema.errors(1),
        lambda: schema.cast(1),
    ):
        with pytest.raises(SchemaError):
            use()
    with pytest.raises(SchemaError):
        _ = schema.is_unknown


def test_a_message_about_a_document_does_not_repeat_all_of_it() -> None:
    with pytest.raises(SchemaError) as caught:
        Schema({"properties": {"a": "x" * 10_000}}).compile()

    assert len(str(caught.value)) < 500
