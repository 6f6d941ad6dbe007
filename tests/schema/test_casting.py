"""The rules of casting, one by one."""

import dataclasses
import datetime as dt
import decimal
import enum
import json
import sqlite3
import uuid
from collections import OrderedDict, UserList
from typing import Any, NamedTuple

import msgspec
import pytest

from operations.base.json.values import JSONValueError, to_json
from operations.schema import CastPolicy, CastResult, Change, Schema


def _cast(document: Any, value: Any) -> CastResult:
    return Schema(document).cast(value, "create")


def _kinds(result: CastResult) -> list[tuple[str, str]]:
    """Return the place and kind of each change, except changes that every policy makes."""
    silent = {"stripped", "filled", "mismatch"}
    return [(change.path, change.kind) for change in result.changes if change.kind not in silent]


def _edited(result: CastResult) -> tuple[Any, list[tuple[str, str]]]:
    return result.value, _kinds(result)


POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"type": "integer", "default": 0}},
    "required": ["x"],
}


# Excess


@pytest.mark.parametrize(
    ("document", "value", "expected"),
    [
        (POINT, {"x": 1, "y": 2, "z": 3}, {"x": 1, "y": 2}),
        ({**POINT, "additionalProperties": False}, {"x": 1, "y": 2, "z": 3}, {"x": 1, "y": 2}),
        (
            {**POINT, "additionalProperties": True},
            {"x": 1, "y": 2, "z": 3},
            {"x": 1, "y": 2, "z": 3},
        ),
        (
            {**POINT, "additionalProperties": POINT},
            {"x": 1, "y": 2, "z": {"x": 1, "q": 1}},
            {"x": 1, "y": 2, "z": {"x": 1, "y": 0}},
        ),
        (
            {**POINT, "patternProperties": {"^n_": {}}},
            {"x": 1, "y": 2, "n_1": 3, "m": 4},
            {"x": 1, "y": 2, "n_1": 3},
        ),
        ({**POINT, "unevaluatedProperties": False}, {"x": 1, "y": 2, "z": 3}, {"x": 1, "y": 2}),
        (
            {**POINT, "unevaluatedProperties": {"type": "null"}},
            {"x": 1, "y": 2, "z": None},
            {"x": 1, "y": 2, "z": None},
        ),
        ({"type": "object"}, {"x": {"y": 1}}, {"x": {"y": 1}}),
        ({"type": "object", "properties": {}}, {"x": 1}, {"x": 1}),
        ({"type": "object", "additionalProperties": False}, {"x": 1}, {}),
        (
            {"type": "object", "properties": {"a": {}}, "required": ["b"]},
            {"a": 1, "b": 2, "c": 3},
            {"a": 1, "b": 2},
        ),
        ({"type": "object", "properties": {"a": {}, "b": False}}, {"a": 1, "b": 2}, {"a": 1}),
        ({"type": "array", "items": POINT}, [{"x": 1, "z": 1}], [{"x": 1, "y": 0}]),
        (
            {"type": "array", "prefixItems": [POINT], "items": POINT},
            [{"x": 1, "z": 1}, {"x": 2, "z": 1}],
            [{"x": 1, "y": 0}, {"x": 2, "y": 0}],
        ),
        (
            {"type": "object", "additionalProperties": POINT},
            {"p": {"x": 1, "z": 1}},
            {"p": {"x": 1, "y": 0}},
        ),
    ],
)
def test_undeclared_properties_are_stripped(document: Any, value: Any, expected: Any) -> None:
    assert _edited(_cast(document, value)) == (expected, [])


def test_extras_are_kept_even_if_other_parts_failed() -> None:
    result = _cast({**POINT, "additionalProperties": True}, {"x": "no", "z": 3})

    assert result.value == {"x": 0, "y": 0, "z": 3}
    assert _kinds(result) == [("/x", "replaced")]


def test_stripping_never_makes_a_valid_value_invalid() -> None:
    few = {"type": "object", "properties": {"a": {}}, "minProperties": 2}
    alike = {
        "type": "array",
        "uniqueItems": True,
        "items": {"type": "object", "properties": {"a": {}}},
    }

    assert _edited(_cast(few, {"a": 1, "b": 2})) == ({"a": 1, "b": 2}, [])
    assert _edited(_cast(alike, [{"a": 1, "b": 1}, {"a": 1, "b": 2}])) == (
        [{"a": 1, "b": 1}, {"a": 1, "b": 2}],
        [],
    )
    # The same with changes by the thorough pass.
    both = {**few, "properties": {"a": {"type": "integer"}}}
    assert _edited(_cast(both, {"a": 1.0, "b": 2})) == ({"a": 1.0, "b": 2}, [])


# Defaults


@pytest.mark.parametrize(
    ("document", "value", "expected"),
    [
        (POINT, {"x": 1}, {"x": 1, "y": 0}),
        ({"properties": {"a": {"default": {"b": []}}}}, {}, {"a": {"b": []}}),
        (
            {"properties": {"a": {**POINT, "default": {"x": 1, "z": 2}}}},
            {},
            {"a": {"x": 1, "y": 0}},
        ),
        (
            {"properties": {"a": {"type": "array", "items": POINT, "default": [{"x": 1}]}}},
            {},
            {"a": [{"x": 1, "y": 0}]},
        ),
        (
            {"properties": {"a": {"$ref": "#/$defs/d"}}, "$defs": {"d": {"default": 1}}},
            {},
            {"a": 1},
        ),
        (
            {
                "properties": {"a": {"$ref": "#/$defs/d", "default": 2}},
                "$defs": {"d": {"default": 1}},
            },
            {},
            {"a": 2},
        ),
        ({"properties": {"a": {"type": "integer", "default": "no"}}}, {}, {}),
        ({"properties": {"a": {"type": "integer", "default": "5"}}}, {}, {"a": 5}),
        (
            {"properties": {"a": {"type": "integer", "default": None}}, "required": ["a"]},
            {},
            {"a": None},
        ),
        (
            {
                "patternProperties": {"^a": {"type": "string"}},
                "properties": {"a": {"default": "x"}},
            },
            {},
            {"a": "x"},
        ),
        (
            {"additionalProperties": True, "properties": {"a": {"default": [1]}}},
            {"b": 1},
            {"a": [1], "b": 1},
        ),
    ],
)
def test_declared_defaults_are_filled(document: Any, value: Any, expected: Any) -> None:
    assert _edited(_cast({"type": "object", **document}, value)) == (expected, [])


def test_a_filled_default_is_a_copy() -> None:
    for document in (
        {
            "type": "object",
            "properties": {"a": {"type": "array", "items": {"type": "integer"}, "default": [1]}},
        },
        {"type": "object", "properties": {"a": {"default": [1]}}},
    ):
        schema = Schema(document)
        schema.cast({}, "create").value["a"].append(2)

        assert schema.cast({}, "create").value == {"a": [1]}
        assert document["properties"]["a"]["default"] == [1]  # type: ignore[index]


def test_a_recursive_default_is_never_filled() -> None:
    node = {
        "type": "object",
        "properties": {"next": {"$ref": "#", "default": {}}, "v": {"default": 1}},
    }

    assert _cast(node, {}).value == {"v": 1}
    assert _cast(node, {"next": {}}).value == {"next": {"v": 1}, "v": 1}


def test_a_default_too_deep_to_be_data_is_not_filled() -> None:
    deep: Any = 1
    for _ in range(80):
        deep = [deep]

    assert _cast({"type": "object", "properties": {"a": {"default": deep}}}, {}).value == {}


# Scalars


@pytest.mark.parametrize(
    ("document", "value", "expected", "kind"),
    [
        ({"type": "integer"}, "42", 42, "converted"),
        ({"type": "number"}, "1.50", 1.5, "converted"),
        ({"type": "string"}, 42, "42", "converted"),
        ({"type": "string"}, True, "true", "converted"),
        ({"type": "boolean"}, "false", False, "converted"),
        ({"type": "integer"}, 1.0, 1, "converted"),
        ({"enum": [1, 2]}, "2", 2, "converted"),
        ({"type": ["integer", "null"]}, "7", 7, "converted"),
        ({"type": "integer", "minimum": 5}, "3", 5, "replaced"),
        ({"type": "integer"}, "4.5", 0, "replaced"),
        ({"type": "integer"}, " 42 ", 0, "replaced"),
        ({"type": "integer"}, 1.5, 0, "replaced"),
        ({"type": "number"}, "1e999", 0, "replaced"),
        ({"type": "number"}, True, 0, "replaced"),
        ({"type": "boolean"}, 1, False, "replaced"),
        ({"type": "string"}, None, "", "replaced"),
        ({"type": "string"}, {}, "", "replaced"),
        ({"type": "string", "minLength": 2}, "a", "  ", "replaced"),
        ({"type": "string", "default": "d"}, [], "d", "replaced"),
        ({"type": "number", "minimum": 10}, 3, 10, "replaced"),
        ({"type": "number", "exclusiveMinimum": 10}, 3, 11, "replaced"),
        ({"type": "number", "exclusiveMinimum": 1, "exclusiveMaximum": 2}, 3, 1.5, "replaced"),
        ({"type": "number", "maximum": -5}, 3, -5, "replaced"),
        ({"type": "integer", "exclusiveMaximum": -5}, 3, -6, "replaced"),
        ({"type": "integer", "minimum": 1, "multipleOf": 4}, 3, 4, "replaced"),
        ({"type": "integer", "exclusiveMinimum": 4, "multipleOf": 4}, 3, 8, "replaced"),
        ({"type": "integer", "maximum": -1, "multipleOf": 4}, 3, -4, "replaced"),
        ({"type": "integer", "minimum": 1.5}, 0, 2, "replaced"),
        ({"type": "null"}, 0, None, "replaced"),
        ({"const": "a"}, "b", "a", "replaced"),
        ({"enum": ["a", "b"]}, "c", "a", "replaced"),
        ({"enum": ["a", "b"], "default": "b"}, None, "b", "replaced"),
        ({"type": "string", "enum": [1, "a"]}, None, "a", "replaced"),
    ],
)
def test_a_scalar_that_fails_is_converted_or_replaced(
    document: Any, value: Any, expected: Any, kind: str
) -> None:
    result = _cast(document, value)

    assert result.value == expected
    assert type(result.value) is type(expected)
    assert _kinds(result) == [("", kind)]


@pytest.mark.parametrize(
    ("document", "value"),
    [
        ({"type": "integer"}, 7),
        ({"type": "number"}, 7),
        ({"type": "number"}, 1.0),
        ({"const": 1}, 1.0),
        ({"type": "integer"}, 1e300),
        ({"anyOf": [{"type": "integer"}, {"type": "number"}]}, 1.0),
        ({"type": ["integer", "string"]}, "7"),
        ({"minimum": 3}, "text"),
        ({}, None),
    ],
)
def test_a_valid_scalar_is_unchanged(document: Any, value: Any) -> None:
    result = _cast(document, value)

    assert type(result.value) is type(value)
    assert result == (value, [])


@pytest.mark.parametrize(
    ("document", "value"),
    [
        ({"type": "string", "pattern": "^a"}, "b"),
        ({"type": "string", "pattern": "^a"}, 5),
        ({"not": {"type": "string"}}, "a"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, {"a": [1]}),
        ({"type": "integer", "minimum": 5, "maximum": 3}, 0),
        ({"enum": []}, 1),
        ({"enum": ["a"], "type": "integer"}, "b"),
        ({"type": "string", "minLength": 10_000}, 1),
        ({"type": "array", "minItems": 10_000}, 1),
        ({"const": json.loads("[" * 80 + "]" * 80)}, 1),
        ({"minimum": 3}, 2),
        ({"type": "array", "items": {"type": "string", "pattern": "^a"}, "minItems": 1}, 5),
        (
            {
                "type": "object",
                "required": ["a"],
                "properties": {"a": {"type": "string", "pattern": "^a"}},
            },
            5,
        ),
        ({"type": "object", "required": ["a"], "properties": {"a": False}}, 5),
        (False, {"a": [1]}),
    ],
)
def test_a_value_that_cannot_be_repaired_stays_unchanged(document: Any, value: Any) -> None:
    assert _edited(_cast(document, value)) == (value, [])


# Objects and arrays


@pytest.mark.parametrize(
    ("document", "value", "expected", "kinds"),
    [
        (POINT, {}, {"x": 0, "y": 0}, [("/x", "created")]),
        (POINT, None, {"x": 0, "y": 0}, [("", "replaced")]),
        (POINT, [1], {"x": 0, "y": 0}, [("", "replaced")]),
        ({**POINT, "default": {"x": 9}}, "s", {"x": 9, "y": 0}, [("", "replaced")]),
        (POINT, {"x": None, "y": "3"}, {"x": 0, "y": 3}, [("/x", "replaced"), ("/y", "converted")]),
        ({"type": "object", "required": ["a"]}, {}, {"a": None}, [("/a", "created")]),
        (
            {
                "type": "object",
                "required": ["a", "b"],
                "properties": {"a": {"required": ["c"]}, "b": {"minItems": 1}},
            },
            {},
            {"a": {"c": None}, "b": [None]},
            [("/a", "created"), ("/b", "created")],
        ),
        (
            {
                "type": "array",
                "items": {"$ref": "#/$defs/b"},
                "maxItems": 1,
                "$defs": {"b": {"type": "integer"}},
            },
            ["x", "y"],
            [0],
            [("/0", "replaced"), ("", "replaced")],
        ),
        (
            {
                "type": "object",
                "properties": {"a": {}},
                "required": ["a", "b"],
                "additionalProperties": False,
            },
            {},
            {"a": None},
            [("/a", "created")],
        ),
        ({"type": "array", "items": {"type": "integer"}}, 5, [], [("", "replaced")]),
        ({"type": "array", "default": [1]}, 5, [1], [("", "replaced")]),
        (
            {"type": "array", "items": {"type": "integer"}},
            [1, "x", "2"],
            [1, 0, 2],
            [("/1", "replaced"), ("/2", "converted")],
        ),
        (
            {"type": "array", "items": {"type": "integer"}, "minItems": 2},
            [],
            [0, 0],
            [("/0", "created")],
        ),
        (
            {"type": "array", "items": {"type": "integer"}, "maxItems": 1},
            [1, 2],
            [1],
            [("", "replaced")],
        ),
        (
            {"type": "array", "items": {"type": "integer"}, "maxItems": 1, "default": [1, 2]},
            None,
            [1],
            [("", "replaced")],
        ),
        ({"type": "array", "uniqueItems": True}, [1, 1, 2], [1, 2], [("", "replaced")]),
        (
            {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
            ["a", "b"],
            [0],
            [("", "replaced")],
        ),
        (
            {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "minItems": 3},
            [0, 1],
            [0, 1],
            [],
        ),
        (
            {
                "type": "array",
                "prefixItems": [{"type": "integer"}, {"type": "string"}],
                "items": False,
            },
            [1, "a", 3],
            [1, "a"],
            [("", "replaced")],
        ),
        (
            {
                "type": "array",
                "prefixItems": [{"type": "integer"}, {"type": "string"}],
                "items": False,
            },
            None,
            [0, ""],
            [("", "replaced")],
        ),
        (
            {
                "type": "array",
                "prefixItems": [{"type": "integer"}, {"type": "string"}],
                "minItems": 2,
            },
            ["x"],
            [0, ""],
            [("/0", "replaced"), ("/1", "created")],
        ),
        (
            {"type": "object", "additionalProperties": {"type": "integer"}},
            {"a": "1", "b": None},
            {"a": 1, "b": 0},
            [("/a", "converted"), ("/b", "replaced")],
        ),
        (
            {"type": "object", "properties": {"a/b~": {"type": "integer"}}},
            {"a/b~": "1"},
            {"a/b~": 1},
            [("/a~1b~0", "converted")],
        ),
        (
            {
                "type": "object",
                "properties": {
                    "a": {"type": ["integer", "object"], "properties": {"b": {"type": "integer"}}}
                },
            },
            {"a": {"b": "1", "c": 1}},
            {"a": {"b": 1}},
            [("/a/b", "converted")],
        ),
    ],
)
def test_containers_are_rebuilt_part_by_part(
    document: Any, value: Any, expected: Any, kinds: Any
) -> None:
    result = _cast(document, value)

    assert result.value == expected
    assert _kinds(result) == kinds


def test_every_change_has_a_kind() -> None:
    result = _cast(POINT, {"x": "1", "y": None})

    assert result.changes == [
        Change("/x", "converted", 1, "was converted from string to integer"),
        Change("/y", "replaced", 1, "was null and is now 0"),
    ]


def test_properties_stay_in_the_order_of_the_value() -> None:
    point: Any = {
        "type": "object",
        "properties": {
            "x": {"type": "integer"},
            "z": {"type": "integer", "default": 0},
            "y": {"type": ["integer", "string"]},
        },
        "required": ["x"],
    }
    points = {"type": "array", "items": point}
    held = {"type": "object", "properties": {"id": {"type": "string"}, "in": points}}
    chosen = {"anyOf": [held, {**held, "required": ["other"]}]}
    for value in (
        {"y": 1, "z": 3, "x": 2},
        {"y": "1", "x": 2},
        {"y": dt.date(2020, 1, 1), "x": "2"},
        {"y": 1, "more": 1, "z": 3, "x": 2},
    ):
        expected = [name for name in (*value, *({"z"} - {*value})) if name != "more"]
        assert list(_cast(point, value).value) == expected
        assert [list(item) for item in _cast(points, [value, value]).value] == [expected] * 2
        for schema in (held, chosen):
            result = _cast(schema, {"in": [value], "id": "a"}).value
            assert list(result) == ["in", "id"]
            assert list(result["in"][0]) == expected


class _Key(enum.Enum):
    X = "x"


def test_lists_of_objects_with_the_same_names_are_cast_like_others() -> None:
    point: Any = {
        "type": "object",
        "properties": {
            "x": {"type": "integer"},
            "y": {"type": "string"},
            "tags": {"type": "array", "items": {"type": "string"}, "default": ["new"]},
        },
        "required": ["x"],
    }
    schema = Schema({"type": "array", "items": point})
    few = [{"more": 1, "x": 1}, {"more": 2, "x": 2}]
    many = [{"x": index, "more": index} for index in range(3)]
    values: list[Any] = [
        few,
        [{"y": "a", "x": 1, "z": 2}, {"x": 2, "y": "b", "z": 2}],
        [*few, {"x": 3, "y": "a"}],
        [*few, {"x": 3, "other": 1}],
        [{_Key.X: 1, "more": 1}, {_Key.X: 2, "more": 2}],
        [*few, {_Key.X: 3, "more": 1}],
        [*many, {"x": 3, "more": {"x": 1}}],
        [{"x": 1, "tags": ["a"]}],
        many,
        [],
    ]
    first: list[CastResult] = []
    for value in (*values, *values):
        result = schema.cast(value)
        lists = [item["tags"] for item in result.value]
        assert len(set(map(id, lists))) == len(lists)
        plain = to_json(value)
        assert [list(item) for item in result.value] == [
            [name for name in {**item, "tags": None} if name in point["properties"]]
            for item in plain
        ]
        for kind, names in (("stripped", {"more", "other", "z"}), ("filled", {"tags"})):
            count = sum((name in item) is (kind == "stripped") for item in plain for name in names)
            assert sum(c.count for c in result.changes if c.kind == kind) == count
        first.append(result)
    assert first[: len(values)] == first[len(values) :]


# Intersections and references


BOTH = {
    "allOf": [
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "in": {"properties": {"p": {}}}},
            "required": ["a"],
        },
        {
            "type": "object",
            "properties": {"b": {"type": "string"}, "in": {"properties": {"q": {}}}},
            "required": ["b"],
        },
    ]
}


@pytest.mark.parametrize(
    ("value", "expected", "kinds"),
    [
        ({"a": 1, "b": "x", "c": 1}, {"a": 1, "b": "x"}, []),
        ({"a": 1}, {"a": 1, "b": ""}, [("/b", "created")]),
        ({"a": "bad", "b": "x"}, {"a": 0, "b": "x"}, [("/a", "replaced")]),
        (None, {"a": 0, "b": ""}, [("", "replaced")]),
        (
            {"a": 1, "b": "x", "in": {"p": 1, "q": 2, "r": 3}},
            {"a": 1, "in": {"p": 1, "q": 2}, "b": "x"},
            [],
        ),
    ],
)
def test_an_intersection_keeps_the_properties_of_all_members(
    value: Any, expected: Any, kinds: Any
) -> None:
    result = _cast(BOTH, value)

    assert result.value == expected
    assert _kinds(result) == kinds


def test_a_closed_member_of_an_intersection_forbids_other_properties() -> None:
    document = {
        "allOf": [
            {"type": "object", "properties": {"a": {}}, "additionalProperties": False},
            {"properties": {"b": {}}},
        ]
    }

    assert _edited(_cast(document, {"a": 1, "b": 2})) == ({"a": 1}, [])


def test_extras_of_one_member_meet_its_schema_even_if_another_knows_them() -> None:
    document = {
        "allOf": [
            {
                "type": "object",
                "properties": {"a": {}},
                "additionalProperties": {"type": "integer"},
            },
            {"properties": {"b": {"maximum": 9}}},
        ]
    }

    assert _cast(document, {"a": 1, "b": "5", "c": "6"}).value == {"a": 1, "b": 5, "c": 6}


def test_the_type_that_all_members_allow_counts() -> None:
    document = {"allOf": [{"type": ["number", "string", "null"]}, {"type": ["null", "integer"]}]}

    assert _cast(document, "x").value == 0
    assert _cast(document, None).value is None
    assert (
        _cast({"allOf": [{"type": "number"}, {"type": "number", "default": 1000}]}, None).value
        == 1000
    )
    assert _cast({"allOf": [{"enum": [1, 2, 3]}, {"enum": [2, 3]}]}, "x").value == 2


def test_recursive_schemas_are_cast_as_deep_as_the_data_goes() -> None:
    node = {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"id": {"type": "string"}, "next": {"$ref": "#/$defs/node"}},
                "required": ["id"],
            }
        },
    }
    result = _cast(node, {"id": "a", "x": 1, "next": {"id": 1, "next": {"y": 1}}})

    assert result.value == {"id": "a", "next": {"id": "1", "next": {"id": ""}}}
    assert _kinds(result) == [("/next/id", "converted"), ("/next/next/id", "created")]


def test_a_value_that_requires_itself_stays_incomplete() -> None:
    endless = {"type": "object", "properties": {"self": {"$ref": "#"}}, "required": ["self"]}

    assert _edited(_cast(endless, {})) == ({}, [])
    assert _edited(_cast(endless, None)) == (None, [])


# Conditions


def test_properties_of_a_condition_are_never_stripped() -> None:
    document = {
        "type": "object",
        "properties": {"a": {}},
        "if": {"properties": {"kind": {"const": "x"}}, "required": ["kind"]},
        "then": {"properties": {"b": {"type": "integer"}}, "required": ["b"]},
        "else": {"properties": {"c": {"type": "integer", "default": 3}}},
    }

    assert _cast(document, {"kind": "x", "b": "1", "c": 1, "d": 1}).value == {"kind": "x", "b": 1}
    assert _cast(document, {"kind": "y", "b": 1, "d": 1}).value == {"kind": "y", "c": 3}
    assert _cast({**document, "default": {"kind": "y"}}, None).value == {"kind": "y", "c": 3}
    assert _cast(document, None).value == {"c": 3}


def test_a_condition_without_an_alternative() -> None:
    document = {
        "type": "object",
        "if": {"required": ["a"]},
        "then": {"properties": {"a": {"type": "integer"}}},
    }

    assert _cast(document, {"a": "1"}).value == {"a": 1}
    assert _cast(document, {"b": 1}).value == {"b": 1}
    otherwise = {"type": "object", "if": {"required": ["a"]}, "else": {"required": ["b"]}}
    assert _cast(otherwise, {}).value == {"b": None}
    assert _cast(otherwise, {"a": 1}).value == {"a": 1}


@pytest.mark.parametrize(
    "dialect",
    ["https://json-schema.org/draft/2020-12/schema", "http://json-schema.org/draft-07/schema#"],
)
def test_dependent_schemas_apply_if_their_property_is_present(dialect: str) -> None:
    keyword = "dependentSchemas" if "2020" in dialect else "dependencies"
    document = {
        "$schema": dialect,
        "type": "object",
        "properties": {"card": {"type": "integer"}},
        keyword: {"card": {"properties": {"address": {"type": "string"}}, "required": ["address"]}},
    }
    if keyword == "dependencies":
        document[keyword]["other"] = ["card"]  # type: ignore[index]

    assert _cast(document, {"card": 1, "address": "here", "x": 1}).value == {
        "card": 1,
        "address": "here",
    }
    assert _cast(document, {"card": 1}).value == {"card": 1, "address": ""}
    assert _cast(document, {"address": "here"}).value == {}


# Values that are not JSON yet


class Color(enum.Enum):
    RED = "red"


class Pair(NamedTuple):
    first: int
    second: str


@dataclasses.dataclass
class Point:
    x: int
    y: int = 5
    secret: str = "s"


class Record(msgspec.Struct):
    x: int
    when: dt.date


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("document", "value", "expected"),
    [
        (POINT, Point(1), {"x": 1, "y": 5}),
        ({"type": "array", "items": POINT}, [Point(1)], [{"x": 1, "y": 5}]),
        ({"type": "array", "items": POINT}, (Point(1),), [{"x": 1, "y": 5}]),
        (
            {"type": "object", "properties": {"when": {"type": "string"}}},
            Record(1, dt.date(2020, 1, 2)),
            {"when": "2020-01-02"},
        ),
        (
            {"type": "object", "properties": {"c": {"enum": ["red"]}}},
            {"c": Color.RED},
            {"c": "red"},
        ),
        (
            {"type": "object", "properties": {"red": {"type": "integer"}}},
            {Color.RED: 1},
            {"red": 1},
        ),
        ({"type": "object", "properties": {"1": {"type": "integer"}}}, {1: 1}, {"1": 1}),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, {1: 1}, {"1": 1}),
        ({"type": "object", "additionalProperties": POINT}, {1: Point(1)}, {"1": {"x": 1, "y": 5}}),
        ({"type": "array", "items": {"type": "string"}}, {Text("a")}, ["a"]),
        ({"type": "array", "items": {"type": ["string", "integer"]}}, Pair(1, "a"), [1, "a"]),
        ({"type": "string"}, Text("a"), "a"),
        ({"type": "string"}, uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        ({"type": "object", "properties": {"a": {}}}, OrderedDict(a=(1,), b=2), {"a": [1]}),
        ({"anyOf": [POINT, {"type": "null"}]}, Point(1), {"x": 1, "y": 5}),
        ({"anyOf": [{**POINT, "required": ["q"]}, POINT]}, Point(1), {"x": 1, "y": 5}),
        (
            {"anyOf": [POINT, {"type": "object", "properties": {"p": POINT}, "required": ["p"]}]},
            {"p": Point(1)},
            {"p": {"x": 1, "y": 5}},
        ),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, Text("a"), "a"),
        ({"type": ["object", "string"], "properties": {"a": {}}}, Text("a"), "a"),
        ({"minLength": 1}, Text("a"), "a"),
        ({}, {"a": Point(1)}, {"a": {"x": 1, "y": 5, "secret": "s"}}),
    ],
)
def test_an_unchanged_result_lists_no_change(document: Any, value: Any, expected: Any) -> None:
    result = _cast(document, value)

    assert Schema(document).check(result.value)
    assert _edited(result) == (expected, [])


def test_stripped_values_need_not_be_json() -> None:
    connection = object()

    assert _edited(_cast(POINT, {"x": 1, "y": 1, "_connection": connection})) == (
        {"x": 1, "y": 1},
        [],
    )
    assert _cast(POINT, {"x": "1", "_connection": connection}).value == {"x": 1, "y": 0}


@pytest.mark.requirement("R28")
@pytest.mark.parametrize(
    ("document", "value", "path"),
    [
        ({"type": "number"}, float("nan"), ""),
        ({"type": "object", "properties": {"a": {"type": "number"}}}, {"a": float("inf")}, "/a"),
        ({"type": "object", "properties": {"a": {"type": "string"}}}, {"a": "\ud800"}, "/a"),
        ({"type": "object", "additionalProperties": {"type": "string"}}, {"\ud800": "a"}, ""),
        ({"type": "array", "items": {"type": "string"}}, ["a", "\ud800"], "/1"),
        ({"type": "array", "items": {}}, [1, {"a": object()}], "/1/a"),
        ({"anyOf": [POINT, {"type": "object", "properties": {"q": {}}}]}, {"q": object()}, "/q"),
        ({"type": "object", "properties": {"a": POINT}}, {"a": object()}, "/a"),
        ({}, [[object()]], "/0/0"),
    ],
)
def test_kept_values_must_be_json(document: Any, value: Any, path: str) -> None:
    schema = Schema(document)

    with pytest.raises(JSONValueError) as caught:
        schema.compile().normaliser("create")(value)
    assert caught.value.path == path
    assert schema.cast(value, "create").value is value


def test_decimals_in_a_field_for_numbers() -> None:
    result = _cast(
        {"type": "object", "properties": {"a": {"type": "number"}}}, {"a": decimal.Decimal("1.5")}
    )

    assert result.value == {"a": 1.5}


@pytest.mark.requirement("R20")
@pytest.mark.parametrize(
    "document",
    [
        {"type": "array", "items": {"$ref": "#"}},
        {"type": "array", "prefixItems": [{"$ref": "#"}]},
        {"type": "array", "uniqueItems": True, "items": {"$ref": "#"}},
        {
            "anyOf": [
                {"type": "array", "items": {"$ref": "#"}},
                {"type": "array", "minItems": 1, "items": {"$ref": "#"}},
            ]
        },
        {},
    ],
)
def test_data_that_is_too_deep_is_rejected_by_every_kind_of_schema(document: Any) -> None:
    deep: Any = []
    for _ in range(70):
        deep = [deep]

    with pytest.raises(JSONValueError):
        Schema(document).compile().normaliser("create")(deep)


def test_a_shape_deeper_than_the_limit_is_cast_up_to_the_limit() -> None:
    document: dict[str, Any] = {"type": "integer"}
    for _ in range(70):
        document = {
            "type": "array",
            "items": {"$ref": f"#/$defs/d{_}"},
            "$defs": {f"d{_}": document},
        }
    definitions = {
        f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(70)
    }
    definitions["d70"] = {"type": "integer"}
    schema = Schema({"$ref": "#/$defs/d0", "$defs": definitions})

    assert schema.cast([[[]]], "create").value == [[[]]]
    assert schema.cast([["x"]], "create").value == [[[]]]


# Guarantees of normalise beyond the result


@pytest.mark.parametrize("policy", ["cast", "keep", "create"])
def test_no_changes_are_represented_by_none(policy: CastPolicy) -> None:
    normalise = Schema(POINT).compile().normaliser(policy)

    assert normalise({"x": 1, "y": 2}) == ({"x": 1, "y": 2}, None)
    assert normalise({"x": "1", "y": 2})[1]


def test_conditions_that_contradict_each_other_settle_on_one_value() -> None:
    """Each branch makes a value that the other branch applies to."""
    named = {"type": "object", "required": ["kind"]}
    schema = Schema(
        {
            "type": "object",
            "if": {"properties": {"kind": {"type": "number"}}},
            "then": {**named, "properties": {"kind": {"type": "string"}}},
            "else": {**named, "properties": {"kind": {"type": "number"}}},
        }
    )

    once = schema.cast({"kind": 0}, "create").value

    assert schema.cast(once, "create").value == once
    assert schema.cast({"kind": "0"}, "create").value == once


def test_an_invalid_declared_default_is_reported() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "default": None}}}
    compiled = Schema({**schema, "required": ["a"]}).compile()

    value, changes = compiled.normaliser("create")({})

    assert changes is not None, "it is still to be checked"
    assert not compiled.check.is_valid(value)


def test_an_unsatisfiable_alternative_is_never_chosen() -> None:
    compiled = Schema(
        {
            "type": ["object", "null"],
            "properties": {"a": {"type": "string"}},
            "anyOf": [False, {"type": "null"}],
        }
    ).compile()

    value, changes = compiled.normaliser("create")({"a": "x"})

    assert changes is not None or compiled.check.is_valid(value)


@pytest.mark.parametrize("constant", [2**63 - 1, 2**63, 2**64, -(2**63) - 1])
def test_large_constants_are_kept(constant: int) -> None:
    schema = Schema({"type": "object", "properties": {"a": {"const": constant}}})

    assert schema.cast({"a": constant}, "create").value == {"a": constant}


@pytest.mark.parametrize("odd", [range(3), UserList([1]), sqlite3.Row])
def test_an_object_lookalike_is_not_converted(odd: Any) -> None:
    schema = Schema({"type": "object", "properties": {"a": {"type": "object", "properties": {}}}})

    for value in (odd, {"a": odd}):
        try:
            result = schema.compile().normaliser("create")(value)
        except JSONValueError:
            continue
        assert result[1], f"{value!r} became {result[0]} in silence"


@pytest.mark.parametrize("number", [{"type": "number"}, {"type": "number", "minimum": 0}])
def test_a_decimal_is_text_and_becomes_a_number_if_the_schema_requires_one(number: Any) -> None:
    value = decimal.Decimal("0.50")
    for schema in (number, {"anyOf": [number, {"type": "null"}]}):
        assert Schema(schema).cast(value) == Schema(schema).cast("0.50")
        holder = Schema({"type": "object", "properties": {"n": schema}})
        assert holder.cast({"n": value}) == holder.cast({"n": "0.50"})
        assert holder.cast({"n": value}).value == {"n": 0.5}
    assert Schema({"type": "string"}).cast(value) == CastResult("0.50", [])


@pytest.mark.requirement("R52")
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "number"},
        {"anyOf": [{"type": "number"}, {"type": "null"}]},
        {"type": "array", "items": {"type": "object", "additionalProperties": {"type": "number"}}},
        {"type": ["number", "array"], "items": {"type": "string"}},
        {"anyOf": [{"enum": [1.5]}, {"type": "array", "items": {"type": "string"}}]},
    ],
)
def test_a_decimal_with_more_digits_than_a_float_stays_text(schema: Any) -> None:
    amount = decimal.Decimal("1.00000000000000000000001")
    value = [{"x": amount}] if schema.get("type") == "array" else amount
    result = Schema({"type": "object", "properties": {"n": schema}}).cast({"n": value})

    assert result.value == to_json({"n": value})
    assert [change.kind for change in result.changes] == ["mismatch"]


def test_a_decimal_stays_text_if_text_and_numbers_are_allowed() -> None:
    schema = Schema({"type": "object", "properties": {"n": {"type": ["string", "number"]}}})

    assert schema.cast({"n": decimal.Decimal("1.50")}) == CastResult({"n": "1.50"}, [])


def test_a_declared_property_is_kept_if_its_key_is_a_number() -> None:
    document = {
        "type": "object",
        "properties": {"1": {"type": "string"}, "a": {"type": "integer", "default": 5}},
    }

    assert Schema(document).cast({1: "x"}) == CastResult(
        {"1": "x", "a": 5}, [Change("/a", "filled", 1, "was absent and is now 5")]
    )


def test_items_that_are_not_objects_are_not_counted_as_filled() -> None:
    document = {
        "type": "array",
        "items": {
            "type": ["object", "string"],
            "properties": {"a": {}, "b": {"type": "integer", "default": 3}},
            "required": ["a"],
        },
    }
    result = Schema(document).cast([{"a": 1}, "x", {"a": 2}])

    assert [(change.kind, change.count) for change in result.changes] == [("filled", 2)]


def test_a_whole_float_is_reported_as_a_number() -> None:
    assert Schema({"type": "integer"}).cast(1.0).changes == [
        Change("", "converted", 1, "was converted from number to integer")
    ]


def test_a_key_that_is_not_unicode_is_not_json() -> None:
    with pytest.raises(JSONValueError, match="surrogate"):
        Schema({"type": "object"}).compile().normaliser("create")({"\ud800": 1})


@pytest.mark.parametrize("root", ["schemas/", "http://x/schemas/", "root.json", "/abs/root.json"])
def test_identifiers_relative_to_a_relative_one_are_found(root: str) -> None:
    item = {"$id": "item.json", "type": "object", "properties": {"n": {"type": "integer"}}}
    schema = Schema({"$id": root, "type": "object", "properties": {"k": item}})

    assert schema.cast({"k": {"n": "1"}}, "create").value == {"k": {"n": 1}}
    assert schema.cast({"k": True}, "create").changes
