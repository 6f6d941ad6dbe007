"""Hostile schemas are rejected or evaluated within a time limit."""

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.limits import processor_limit
from tests.schema.material import Canary

from operations.base.errors import SchemaError
from operations.schema import Schema, assert_is_schema
from operations.schema.casting import CastPolicy
from operations.schema.compiling import MAX_SCHEMA_DEPTH, MAX_SCHEMA_VALUES
from operations.schema.references import MAX_SUBSCHEMAS

QUICKLY = 6.0
"""Seconds of processor time. The promise is 0.2 on a quiet machine; without the limits these schemas take minutes."""


def _nested(levels: int, leaf: Any) -> Any:
    for _ in range(levels):
        leaf = {"anyOf": [leaf, leaf]}
    return leaf


def _nested_by_reference(levels: int, keyword: str = "anyOf") -> dict[str, Any]:
    definitions: dict[str, Any] = {
        f"l{i}": {keyword: [{"$ref": f"#/$defs/l{i + 1}"}, {"$ref": f"#/$defs/l{i + 1}"}]}
        for i in range(levels)
    }
    definitions[f"l{levels}"] = {"type": "string"}
    return {"$ref": "#/$defs/l0", "$defs": definitions}


def _ladder(levels: int) -> Any:
    """Unions in unions that do not multiply."""
    schema: Any = {"type": "string"}
    for i in range(levels):
        rung = {
            "type": "object",
            "properties": {f"p{i}": {"type": "integer"}},
            "required": [f"p{i}"],
        }
        schema = {"anyOf": [schema, rung]}
    return schema


def _deep(levels: int, leaf: Any = 1, name: str = "a") -> Any:
    for _ in range(levels):
        leaf = {name: leaf}
    return leaf


def _operator(name: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "op": {"const": name},
            "args": {"type": "array", "items": {"$ref": "#/$defs/expression"}},
        },
        "required": ["op", "args"],
        "additionalProperties": False,
    }


EXPRESSION = {
    "$ref": "#/$defs/expression",
    "$defs": {"expression": {"oneOf": [{"type": "integer"}, *map(_operator, "abcdefgh")]}},
}


def _expression(levels: int, leaf: Any) -> Any:
    for i in range(levels):
        leaf = {"op": "abcdefgh"[i % 8], "args": [leaf, 1]}
    return leaf


def _doubling_defaults(last: str) -> dict[str, Any]:
    """A schema of twenty levels with two defaults each, and values of type `last` below them."""
    definitions: dict[str, Any] = {
        f"n{i}": {
            "type": "object",
            "properties": {
                side: {"$ref": f"#/$defs/n{i + 1}", "default": {}} for side in ("l", "r")
            },
        }
        for i in range(20)
    }
    return {"$ref": "#/$defs/n0", "$defs": definitions | {"n20": {"type": last}}}


OBJECTS = [{"a": i, "b": {"c": [i]}} for i in range(4_000)]

TREE = {
    "type": "object",
    "properties": {"a": {"$ref": "#"}, "x": {"type": "string"}},
    "anyOf": [{"properties": {"a": {"$ref": "#"}}}, {"patternProperties": {"a": {"$ref": "#"}}}],
    "required": ["a"],
}

ANSWERED: dict[str, tuple[Any, Any]] = {
    "a ladder of 16 unions": (_ladder(16), {"p3": "x"}),
    "a ladder of 16 unions, nothing fits": (_ladder(16), 1),
    "unique objects": ({"type": "array", "uniqueItems": True}, OBJECTS),
    "an object twice among thousands": (
        {"type": "array", "uniqueItems": True},
        [*OBJECTS, OBJECTS[0]],
    ),
    "an expression": (EXPRESSION, _expression(20, 1)),
    "an expression with a fault deep inside": (EXPRESSION, _expression(20, "x")),
    "a tree met from two sides": (TREE, _deep(60)),
    "many missing properties": ({"required": [f"p{i}" for i in range(2_000)]}, {}),
    "many wrong items": ({"type": "array", "items": {"type": "integer"}}, ["x"] * 5_000),
    "defaults that double at each level": (_doubling_defaults("object"), {}),
    "typed defaults that double at each level": (_doubling_defaults("string"), {}),
    "requirements that double at each level": (
        {
            "$ref": "#/$defs/n0",
            "$defs": {
                f"n{i}": {
                    "type": "object",
                    "properties": {side: {"$ref": f"#/$defs/n{i + 1}"} for side in ("l", "r")},
                    "required": ["l", "r"],
                }
                for i in range(20)
            }
            | {"n20": {"type": "object"}},
        },
        {},
    ),
    "more items than anyone has": (
        {"type": "array", "items": {"type": "null"}, "minItems": 10**9},
        [],
    ),
    "more characters than anyone has": ({"type": "string", "minLength": 10**9}, 1),
    "wrong properties below a long name": (
        {"additionalProperties": {"additionalProperties": {"type": "integer"}}},
        {"a" * 4_000_000: {f"p{i}": "x" for i in range(2_000)}},
    ),
    "properties below a long name, to be converted": (
        {"additionalProperties": {"additionalProperties": {"type": "integer"}}},
        {"a" * 4_000_000: {f"p{i}": "1" for i in range(2_000)}},
    ),
    "tiny steps": ({"type": "number", "multipleOf": 1e-300}, 1e300),
}


@pytest.mark.requirement("R20")
@pytest.mark.parametrize("name", ANSWERED)
def test_suspicious_patterns_are_evaluated_in_time(name: str) -> None:
    document, value = ANSWERED[name]
    schema = Schema(document)
    with processor_limit(QUICKLY):
        valid = schema.check(value)
        faults = schema.errors(value)
        result = schema.cast(value)

    assert bool(faults) is not valid
    assert schema.cast(result.value).value == result.value


@pytest.mark.requirement("R42")
@pytest.mark.parametrize(
    "document",
    [
        {"additionalProperties": {"properties": {"a": {"default": 1}}}},
        {
            "additionalProperties": {
                "items": {"properties": {"a": {}}, "additionalProperties": False}
            }
        },
        {"patternProperties": {"^a": {"properties": {"a": {"default": 1}}}}},
    ],
)
@pytest.mark.parametrize("policy", ["cast", "keep", "create"])
def test_long_names_are_not_stored(document: Any, policy: CastPolicy) -> None:
    schema = Schema({"type": "object", **document})

    def cast(number: int) -> None:
        name = "a" * 1_000_000 + str(number)
        schema.cast({name: {"b": 1}}, policy)
        schema.cast({name: [{"a": 1, name: 1}, {"a": 1, name: 2}]}, policy)
        schema.cast({name: [{"a": 1, "b": 1}, {"a": 1, "b": 2}]}, policy)

    cast(0)
    tracemalloc.start()
    try:
        for number in range(1, 6):
            cast(number)
        assert tracemalloc.get_traced_memory()[0] < 500_000
    finally:
        tracemalloc.stop()


REFUSED: dict[str, Any] = {
    "16 nested unions, written out": _nested(16, {"type": "string"}),
    "16 nested unions, by reference": _nested_by_reference(16),
    "16 nested exclusive unions": _nested_by_reference(16, "oneOf"),
    "16 nested intersections": _nested_by_reference(16, "allOf"),
    "a reference to itself": {"$ref": "#"},
    "two references to each other": {
        "$ref": "#/$defs/a",
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
    },
    "itself among alternatives": {"anyOf": [{"type": "string"}, {"not": {"$ref": "#"}}]},
    "itself under a condition": {"if": {"$ref": "#"}, "then": {"type": "string"}},
    "too many schemas": {"properties": {f"p{i}": {} for i in range(MAX_SUBSCHEMAS)}},
    "too many values": {"enum": list(range(MAX_SCHEMA_VALUES))},
    "too deep": {"const": _deep(MAX_SCHEMA_DEPTH)},
}
REFUSED["endless"] = {"not": REFUSED}


@pytest.mark.requirement("R20")
@pytest.mark.parametrize("name", REFUSED)
def test_patterns_without_bound_are_rejected(name: str) -> None:
    with processor_limit(QUICKLY), pytest.raises(SchemaError):
        Schema(REFUSED[name]).compile()


@pytest.mark.requirement("R20")
def test_recursion_that_consumes_data_works_and_is_as_deep_as_data_may_be() -> None:
    schema = Schema({"type": "object", "properties": {"a": {"$ref": "#"}}})

    assert schema.check(_deep(63, {}))
    assert not schema.check(_deep(64, {}))
    assert not schema.check(_deep(10_000, {}))
    assert schema.errors(_deep(10_000, {}))[0].keyword == "json"
    assert schema.cast(_deep(63, {"x": 1})).value == _deep(63, {})
    deep = _deep(10_000, {})
    assert schema.cast(deep).value is deep


@pytest.mark.requirement("R20")
def test_mutual_recursion_works() -> None:
    schema = Schema(
        {
            "$ref": "#/$defs/folder",
            "$defs": {
                "folder": {
                    "properties": {"entries": {"type": "array", "items": {"$ref": "#/$defs/entry"}}}
                },
                "entry": {
                    "properties": {"name": {"type": "string"}, "folder": {"$ref": "#/$defs/folder"}}
                },
            },
        }
    )

    assert schema.check({"entries": [{"name": "a", "folder": {"entries": [{"name": "b"}]}}]})
    assert [
        fault.path for fault in schema.errors({"entries": [{"folder": {"entries": [{"name": 1}]}}]})
    ] == ["/entries/0/folder/entries/0/name"]
    assert schema.cast({"entries": [{"folder": {"x": 1}, "y": 1}]}).value == {
        "entries": [{"folder": {}}]
    }


@pytest.mark.requirement("R04")
@pytest.mark.parametrize("keyword", ["$ref", "$dynamicRef"])
@pytest.mark.parametrize("scheme", ["http", "file"])
def test_nothing_outside_the_document_is_read(
    keyword: str, scheme: str, tmp_path: Path, canary: Canary
) -> None:
    secret = tmp_path / "canary.json"
    secret.write_text('{"type": "string"}')
    address = canary.url if scheme == "http" else secret.as_uri()

    with pytest.raises(SchemaError) as caught:
        Schema({"properties": {"a": {keyword: address}}}).compile()

    assert address in str(caught.value)
    assert canary.hits == 0


@pytest.mark.parametrize(
    ("document", "place"),
    [
        ({"properties": {"a": {"minimum": "x"}}}, "/properties/a/minimum"),
        ({"properties": {"a": {"type": "strin"}}}, "/properties/a/type"),
        ({"items": [{"type": "foo"}]}, "/items/0/type"),
        (
            {"$schema": "http://json-schema.org/draft-07/schema#", "items": {"type": 3}},
            "/items/type",
        ),
        ({"$ref": "#/$defs/nope"}, "/$defs/nope"),
        ({"properties": {"a": {"pattern": "("}}}, "/properties/a/pattern"),
        ({"default": float("nan")}, "/default"),
        ({"enum": ["\ud800"]}, "/enum/0"),
        ({"properties": {"a": {"default": object()}}}, "/properties/a/default"),
        ({"properties": {"\ud800": {}}}, "surrogate"),
        ({"properties": {(1, 2): {}}}, "/properties"),
        ({"const": 10**5_000}, "/const"),
        ("string", "object"),
        ([], "object"),
        (None, "object"),
    ],
)
def test_a_bad_document_is_rejected_with_the_location(document: Any, place: str) -> None:
    with pytest.raises(SchemaError) as caught:
        assert_is_schema(document)

    assert place in str(caught.value)


def test_a_valid_document_is_accepted() -> None:
    assert_is_schema(True)
    assert_is_schema({"type": "object", "x-note": {"anything": [1.5, None]}})


def _chain(length: int, link: Callable[[str], Any]) -> dict[str, Any]:
    links = {f"d{i}": link(f"#/$defs/d{i + 1}") for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{length}": {"type": "string"}}}


@pytest.mark.parametrize(
    "link",
    [
        lambda to: {"$ref": to},
        lambda to: {"anyOf": [{"$ref": to}]},
        lambda to: {"$ref": to, "unevaluatedProperties": False},
    ],
)
def test_a_long_chain_of_references_is_rejected_before_anything_follows_it(link: Any) -> None:
    with pytest.raises(SchemaError, match="a chain of more than"):
        Schema({**_chain(2_500, link), "unevaluatedProperties": False}).compile()


def test_a_long_chain_through_the_data_is_validated() -> None:
    schema = Schema(_chain(1_000, lambda to: {"type": "object", "properties": {"a": {"$ref": to}}}))

    assert schema.check({"a": {"a": {}}})
    assert schema.cast({"a": {"a": {}, "b": 1}}).value == {"a": {"a": {}}}


def test_alternatives_that_multiply_are_rejected_before_they_are_compiled() -> None:
    both = [{"$ref": "#/$defs/d0"}] * 2
    doubling = _chain(19, lambda to: {"anyOf": [{"$ref": to}, {"$ref": to}]})

    with pytest.raises(SchemaError, match="too many alternatives"):
        Schema({**doubling, "anyOf": both, "unevaluatedProperties": False}).compile()


@pytest.mark.parametrize(
    "document",
    [
        {"type": "object", "required": [f"n{i}" for i in range(20_000)]},
        {"allOf": [{"enum": list(range(5_000))}, {"enum": list(range(5_000, 10_000))}]},
        {
            "properties": {f"n{i}": {"type": "string"} for i in range(1_000)},
            "patternProperties": {f"^x{i}y": {"type": "string"} for i in range(200)},
        },
        {"allOf": [{"properties": {f"n{i}_{j}": {} for j in range(10)}} for i in range(500)]},
    ],
)
def test_large_schemas_take_time_in_proportion_to_their_size(document: Any) -> None:
    with processor_limit(QUICKLY):
        schema = Schema(document)
        schema.cast({"a": 1})


def test_patterns_have_one_budget_for_all_of_a_document() -> None:
    costly = {f"n{i}": {"type": "string", "pattern": rf"(?=a)\w{{15}}{i}"} for i in range(400)}

    with pytest.raises(SchemaError, match="pattern"):
        Schema({"type": "object", "properties": costly}).compile()


def test_two_schemas_of_one_name_are_rejected() -> None:
    clash = {"properties": {"a": {"$id": "b", "type": "string"}, "c": {"$id": "b"}}}

    with pytest.raises(SchemaError, match="'b' already"):
        Schema(clash).compile()
    assert Schema(clash, lenient=True).check({"a": 1})


@pytest.mark.requirement("R20")
def test_properties_that_no_alternative_names_share_one_plan_per_alternative() -> None:
    count = 400
    schema = Schema({"oneOf": [{"type": "object", "required": [f"k{n}"]} for n in range(count)]})
    value = {f"k{n}": 1 for n in range(count)}
    schema.check(value)
    tracemalloc.start()
    try:
        assert schema.cast(value).value == value
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # One plan for each alternative and property would need more than 6 MB.
    assert kept < 3_000_000
