"""`Schema`: cheap to create, compiled when needed, compared by content."""

import sys
from threading import Thread
from typing import Any

import msgspec
import pytest

from operations.schema import Change, Schema, from_schema


def test_the_document_is_kept_as_it_was_given() -> None:
    document = {"type": "string"}

    assert Schema(document).document is document
    assert from_schema(document).document is document
    assert Schema(True).document is True


def test_a_function_is_called_once_and_when_first_needed() -> None:
    calls: list[str] = []

    def document() -> dict[str, Any]:
        calls.append("called")
        return {"type": "string"}

    schema = Schema(document)
    assert repr(schema) == "Schema(...)"
    assert calls == []

    assert schema.check("a")
    assert not schema.check(1)
    assert schema.document == {"type": "string"}
    assert calls == ["called"]


@pytest.mark.parametrize(
    "document",
    [
        True,
        {},
        {"title": "t", "description": "d", "default": 1, "x-own": 1},
        {"$defs": {"a": {"type": "string"}}},
    ],
)
def test_a_schema_without_restrictions_is_unknown(document: Any) -> None:
    schema = Schema(document)

    assert schema.is_unknown
    assert schema.check([{"anything": None}])
    assert schema.cast({"a": (1, 2)}).value == {"a": [1, 2]}


@pytest.mark.parametrize(
    "document", [False, {"type": "string"}, {"not": {}}, {"$ref": "#/$defs/a", "$defs": {"a": {}}}]
)
def test_a_schema_with_restrictions_is_not_unknown(document: Any) -> None:
    assert not Schema(document).is_unknown


def test_the_false_schema_rejects_every_value_and_changes_none() -> None:
    schema = Schema(False)

    assert not schema.check(None)
    assert schema.cast(1) == (1, [Change("", "mismatch", 1, "is not allowed here")])


def test_schemas_are_equal_by_content() -> None:
    first = Schema({"type": "object", "title": "a"})
    second = Schema(lambda: {"title": "a", "type": "object"})

    assert first == second
    assert hash(first) == hash(second)
    assert first == first
    assert first != Schema({"type": "object"})
    assert first != {"type": "object", "title": "a"}


@pytest.mark.parametrize("step", range(1, 4))
def test_two_threads_can_build_a_document_at_once(step: int) -> None:
    schema, steps = Schema(lambda: {"type": "object"}), 0
    other = Thread(target=lambda: schema.document)

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal steps
        steps += event == "line"
        if steps == step and not other.ident:
            other.start()
            other.join()
        return trace if frame.f_code.co_name == "document" else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        document = schema.document
    finally:
        sys.settrace(before)
    assert other.ident
    assert document == {"type": "object"}


def test_the_repr_is_short() -> None:
    assert repr(Schema({"type": "string"})) == "Schema({'type': 'string'})"
    assert len(repr(Schema({"enum": list(range(1_000))}))) < 80


def test_compiling_happens_once() -> None:
    schema = Schema({"type": "string"})

    assert schema.compile() is schema.compile()


def test_changing_a_document_after_compiling_changes_nothing() -> None:
    document: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}}
    schema = Schema(document)
    schema.compile()
    document["properties"]["a"]["type"] = "integer"

    assert schema.check({"a": "x"})
    assert schema.cast({"a": 1}).value == {"a": "1"}


_FLAT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "id": {"type": "integer"},
        "name": {"type": "string"},
        "state": {"enum": ["open", "closed"]},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "value",
    [
        {"name": "a"},
        {"id": 1, "name": "é", "state": "open", "note": None},
        {"name": "a", "state": "new"},
        {"name": 1},
        {"id": 1},
        {"id": True, "name": "a"},
        {"name": "a", "id": 2**64},
    ],
)
def test_a_flat_decoder_accepts_only_valid_objects(value: dict[str, Any]) -> None:
    compiled = Schema(_FLAT).compile()
    decode = compiled.flat
    assert decode is not None
    try:
        decoded = decode(msgspec.msgpack.encode(value))
    except (OverflowError, ValueError):
        assert not compiled.check.is_valid(value) or value.get("id") == 2**64
    else:
        assert decoded == value
        assert compiled.check.is_valid(value)


@pytest.mark.parametrize(
    "changes",
    [
        {"properties": {"name": {"type": "object"}}},
        {"properties": {"name": {"type": "string", "maxLength": 5}}},
        {"additionalProperties": True},
        {"type": ["object", "null"]},
        {"anyOf": [{"required": ["id"]}]},
        {"minProperties": 1},
        {"properties": {"name": {"type": "string", "default": "a"}}},
    ],
)
def test_only_a_flat_schema_has_a_flat_decoder(changes: dict[str, Any]) -> None:
    assert Schema({**_FLAT, **changes}).compile().flat is None
