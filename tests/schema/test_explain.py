"""Every failure is reported with its location and a helpful message."""

import json
from typing import Any

import pytest

from operations.schema import Schema
from operations.schema.explain import MAX_ISSUES


def _faults(document: Any, value: Any) -> list[tuple[str, str, str]]:
    return [(f.path, f.message, f.keyword) for f in Schema(document).errors(value)]


@pytest.mark.parametrize(
    ("document", "value", "message", "keyword"),
    [
        ({"type": "string"}, 1, "must be a string, not an integer", "type"),
        ({"type": ["string", "null"]}, 1.5, "must be a string or null, not a number", "type"),
        ({"enum": ["a", 1, None]}, "b", 'must be one of "a", 1, null', "enum"),
        (
            {"enum": list(range(10))},
            "b",
            "must be one of 0, 1, 2, 3, 4, 5, 6, 7 and 2 more",
            "enum",
        ),
        ({"const": {"a": [True]}}, {"a": [1]}, 'must be {"a":[true]}', "const"),
        ({"minimum": 3}, 2, "must be at least 3", "minimum"),
        ({"maximum": 3}, 4, "must be at most 3", "maximum"),
        ({"exclusiveMinimum": 3}, 3, "must be more than 3", "exclusiveMinimum"),
        ({"exclusiveMaximum": 3}, 3, "must be less than 3", "exclusiveMaximum"),
        ({"multipleOf": 0.1}, 0.25, "must be a multiple of 0.1", "multipleOf"),
        ({"minLength": 1}, "", "must have at least 1 character, not 0", "minLength"),
        ({"maxLength": 2}, "abc", "must have at most 2 characters, not 3", "maxLength"),
        ({"pattern": "^a"}, "b", 'must match the pattern "^a"', "pattern"),
        ({"minItems": 2}, [1], "must have at least 2 items, not 1", "minItems"),
        ({"maxItems": 0}, [1], "must have at most 0 items, not 1", "maxItems"),
        (
            {"uniqueItems": True},
            [1, {"a": 1}, 1.0],
            "must not contain the same item twice",
            "uniqueItems",
        ),
        ({"minProperties": 1}, {}, "must have at least 1 property, not 0", "minProperties"),
        ({"maxProperties": 0}, {"a": 1}, "must have at most 0 properties, not 1", "maxProperties"),
        ({"not": {"type": "string"}}, "a", "matches a schema that it must not match", "not"),
        (False, 1, "is not allowed here", "false"),
        (
            {"contains": {"type": "string"}},
            [1],
            "must contain at least 1 matching item, not 0",
            "contains",
        ),
        (
            {"contains": {"type": "string"}, "minContains": 2},
            ["a"],
            "must contain at least 2 matching items, not 1",
            "contains",
        ),
        (
            {"contains": {"type": "string"}, "maxContains": 1},
            ["a", "b"],
            "must contain at most 1 matching item, not 2",
            "maxContains",
        ),
        (
            {"oneOf": [{"minimum": 1}, {"maximum": 9}]},
            5,
            "matches 2 of the alternatives instead of one",
            "oneOf",
        ),
        (
            {"anyOf": [{"type": "string"}, {"type": "null"}]},
            1,
            "must be of type string or null, not integer",
            "anyOf",
        ),
        (
            {"anyOf": [{"const": "a"}, {"enum": ["b", "c"]}]},
            "d",
            'must be one of "a", "b", "c"',
            "anyOf",
        ),
    ],
)
def test_a_failure_at_the_root_has_an_empty_path(
    document: Any, value: Any, message: str, keyword: str
) -> None:
    assert _faults(document, value) == [("", message, keyword)]


DRAFT_4 = "http://json-schema.org/draft-04/schema#"


@pytest.mark.parametrize(
    ("document", "value", "message"),
    [
        ({"minimum": 3, "exclusiveMinimum": True}, 3, "must be more than 3"),
        ({"maximum": 3, "exclusiveMaximum": True}, 3, "must be less than 3"),
    ],
)
def test_draft_4_has_boolean_exclusive_limits(document: Any, value: Any, message: str) -> None:
    assert _faults({"$schema": DRAFT_4, **document}, value)[0][1] == message


@pytest.mark.parametrize(
    ("document", "value", "faults"),
    [
        ({"required": ["a", "b"]}, {"b": 1}, [("/a", "is required", "required")]),
        (
            {"properties": {"a": {}}, "additionalProperties": False},
            {"a": 1, "b": 2, "c/d": 3},
            [
                ("/b", "is not a known property", "additionalProperties"),
                ("/c~1d", "is not a known property", "additionalProperties"),
            ],
        ),
        (
            {"additionalProperties": {"type": "integer"}},
            {"a": "x"},
            [("/a", "must be an integer, not a string", "type")],
        ),
        (
            {"patternProperties": {"^n_": {"type": "integer"}}},
            {"n_1": "x", "m": "x"},
            [("/n_1", "must be an integer, not a string", "type")],
        ),
        (
            {"propertyNames": {"maxLength": 1}},
            {"ab": 1},
            [("/ab", "has a name that must have at most 1 character, not 2", "propertyNames")],
        ),
        (
            {"dependentRequired": {"a": ["b", "c"]}},
            {"a": 1, "b": 1},
            [("/c", "is required beside 'a'", "dependentRequired")],
        ),
        ({"dependentRequired": {"a": ["b"]}}, {"b": 1}, []),
        (
            {"dependentSchemas": {"a": {"required": ["b"]}}},
            {"a": 1},
            [("/b", "is required", "required")],
        ),
        ({"items": {"type": "null"}}, [None, 1], [("/1", "must be null, not an integer", "type")]),
        (
            {"prefixItems": [{"type": "string"}], "items": False},
            [1, 2],
            [
                ("/0", "must be a string, not an integer", "type"),
                ("/1", "is one item too many", "items"),
            ],
        ),
        (
            {"allOf": [{"required": ["a"]}, {"required": ["b"]}]},
            {},
            [("/a", "is required", "required"), ("/b", "is required", "required")],
        ),
        (
            {"if": {"required": ["a"]}, "then": {"required": ["b"]}, "else": {"required": ["c"]}},
            {"a": 1},
            [("/b", "is required", "required")],
        ),
        (
            {"if": {"required": ["a"]}, "then": {"required": ["b"]}, "else": {"required": ["c"]}},
            {},
            [("/c", "is required", "required")],
        ),
        (
            {
                "properties": {"a": {}},
                "anyOf": [{"properties": {"b": {}}}],
                "unevaluatedProperties": False,
            },
            {"a": 1, "b": 1, "c": 1},
            [("/c", "is not a known property", "unevaluatedProperties")],
        ),
        (
            {
                "unevaluatedProperties": {"type": "null"},
                "dependentSchemas": {"a": {"properties": {"a": {}}}},
            },
            {"a": 1, "b": 1},
            [("/b", "must be null, not an integer", "type")],
        ),
        (
            {
                "$ref": "#/$defs/open",
                "unevaluatedProperties": False,
                "$defs": {"open": {"required": ["a"]}},
            },
            {"a": 1},
            [("/a", "is not a known property", "unevaluatedProperties")],
        ),
        (
            {
                "if": {"prefixItems": [{"const": 1}]},
                "then": {"prefixItems": [{}, {"type": "null"}]},
                "unevaluatedItems": False,
            },
            [1, None, 3],
            [("/2", "is one item too many", "unevaluatedItems")],
        ),
        (
            {
                "allOf": [{"unevaluatedItems": True}],
                "items": {"type": "null"},
                "unevaluatedItems": False,
            },
            [1],
            [("/0", "must be null, not an integer", "type")],
        ),
        (
            {"allOf": [{"unevaluatedItems": True}], "minItems": 2, "unevaluatedItems": False},
            [1],
            [("", "must have at least 2 items, not 1", "minItems")],
        ),
        (
            {
                "allOf": [{"unevaluatedProperties": True}],
                "minProperties": 2,
                "unevaluatedProperties": False,
            },
            {"a": 1},
            [("", "must have at least 2 properties, not 1", "minProperties")],
        ),
        (
            {"contains": {"const": 1}, "unevaluatedItems": {"type": "null"}},
            [1, 2],
            [("/1", "must be null, not an integer", "type")],
        ),
    ],
)
def test_failures_of_parts_have_their_places(document: Any, value: Any, faults: Any) -> None:
    assert _faults(document, value) == faults


def test_dependencies_of_draft_7() -> None:
    document = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "dependencies": {"a": ["b"], "c": {"required": ["d"]}},
    }

    assert [fault[0] for fault in _faults(document, {"a": 1, "c": 1})] == ["/b", "/d"]


PETS = {
    "oneOf": [
        {
            "type": "object",
            "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}},
            "required": ["kind"],
        },
        {
            "type": "object",
            "properties": {"kind": {"const": "dog"}, "tricks": {"type": "array"}},
            "required": ["kind"],
        },
        {"type": "null"},
    ]
}


def test_an_unknown_tag_is_explained_with_the_tags_of_all_alternatives() -> None:
    cat = {"properties": {"kind": {"const": "cat"}, "meow": {"type": "integer"}}}
    dog = {"properties": {"kind": {"const": "dog"}, "bark": {"type": "string"}}}
    schema = Schema({"oneOf": [cat, {"type": "null"}, {**dog, "required": ["kind"]}]})

    assert [(each.path, each.message) for each in schema.errors({"kind": "cow", "bark": "w"})] == [
        ("/kind", 'must be one of "cat", "dog"')
    ]
    assert [(each.path, each.message) for each in schema.errors({"kind": "dog", "bark": 1})] == [
        ("/bark", "must be a string, not an integer")
    ]


def test_of_alternatives_the_nearest_one_is_explained() -> None:
    assert _faults(PETS, {"kind": "dog", "tricks": 1}) == [
        ("/tricks", "must be an array, not an integer", "type")
    ]
    assert _faults(PETS, 1) == [("", "must be of type object or null, not integer", "oneOf")]


def test_a_wrong_constant_that_distinguishes_no_alternatives_hides_no_other_failure() -> None:
    cat = {"properties": {"kind": {"const": "cat"}}, "required": ["meow"]}
    loud = {**cat, "required": ["meow", "volume"]}
    for members in ([cat, {"type": "null"}], [cat, loud]):
        assert [
            (each.path, each.message) for each in Schema({"anyOf": members}).errors({"kind": "cow"})
        ] == [
            ("/meow", "is required"),
            ("/kind", 'must be "cat"'),
        ]


def test_several_failures_are_all_listed_once_each() -> None:
    document = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/text"}, "b": {"allOf": [{"$ref": "#/$defs/text"}]}},
        "required": ["c"],
        "$defs": {"text": {"type": "string"}},
    }

    assert [fault[0] for fault in _faults(document, {"a": 1, "b": 2})] == ["/c", "/a", "/b"]


def test_the_number_of_failures_is_bounded_and_long_lists_are_checked() -> None:
    document = {"type": "array", "items": {"type": "integer"}}

    assert len(_faults(document, ["x"] * 1_000)) == MAX_ISSUES
    assert [fault[0] for fault in _faults(document, [*range(50_000), "x"])] == ["/50000"]


def test_long_values_are_not_repeated() -> None:
    document = {"enum": ["x" * 1_000], "pattern": "y" * 500}

    assert all(len(message) < 200 for _, message, _ in _faults(document, "z" * 1_000_000))


def test_values_are_not_repeated_at_all() -> None:
    secret = "hunter2"
    document = {"type": "object", "properties": {"password": {"maxLength": 3, "pattern": "^x"}}}

    assert secret not in json.dumps(_faults(document, {"password": secret}))


def test_large_objects_are_searched_for_them_too() -> None:
    many = {f"p{i}": i for i in range(20_000)}

    assert [
        f[0] for f in _faults({"additionalProperties": {"type": "integer"}}, {**many, "z": "x"})
    ] == ["/z"]
    assert [
        f[0] for f in _faults({"patternProperties": {"^": {"type": "integer"}}}, {**many, "z": "x"})
    ] == ["/z"]
    assert [
        f[0] for f in _faults({"unevaluatedProperties": {"type": "integer"}}, {**many, "z": "x"})
    ] == ["/z"]


def test_an_invalid_item_is_found_among_many_nested_lists() -> None:
    level: Any = {"type": "integer"}
    value: Any = 1
    for _ in range(4):
        level, value = {"type": "array", "items": level}, [value] * 19
    value = [*value[:18], [*value[0][:18], [*value[0][0][:18], [*value[0][0][0][:18], "x"]]]]

    assert _faults(level, value) == [
        ("/18/18/18/18", "must be an integer, not a string", "type"),
    ]


def test_a_search_that_takes_too_long_ends() -> None:
    """Every object is small enough to be walked through, but there are many of them."""
    names = [f"p{index:02}" for index in range(19)]
    definitions: dict[str, Any] = {"0": {"type": "integer"}}
    value: Any = 1
    wrong: Any = "x"
    for depth in range(4):
        inner = {"$ref": f"#/$defs/{depth}"}
        definitions[str(depth + 1)] = {"type": "object", "properties": dict.fromkeys(names, inner)}
        value, wrong = dict.fromkeys(names, value), {**dict.fromkeys(names, value), "p18": wrong}
    document = {"$ref": "#/$defs/4", "$defs": definitions}

    assert _faults(document, wrong) == [("", "was not examined further: budget", "budget")]


def test_the_same_schema_met_twice_at_a_place_is_explained_once() -> None:
    text = {"$ref": "#/$defs/text"}
    document = {"allOf": [text, text, {"anyOf": [text]}], "$defs": {"text": {"type": "string"}}}

    assert _faults(document, 1) == [
        ("", "must be a string, not an integer", "type"),
        ("", "must be of type string, not integer", "anyOf"),
    ]


def test_a_condition_without_consequences_is_not_evaluated() -> None:
    document = {"maxProperties": 1, "if": {"$dynamicRef": "nowhere.json"}}
    assert _faults(document, {"a": 1, "b": 2}) == [
        ("", "must have at most 1 property, not 2", "maxProperties")
    ]


def test_failures_of_validator_only_keywords_have_a_message() -> None:
    scoped = {
        "$id": "https://example.com/root",
        "$ref": "list",
        "$defs": {
            "text": {"$dynamicAnchor": "items", "type": "string"},
            "list": {
                "$id": "list",
                "type": "array",
                "items": {"$dynamicRef": "#items"},
                "$defs": {"any": {"$dynamicAnchor": "items"}},
            },
        },
    }

    assert _faults(scoped, ["a", 1]) == [("", "does not match the schema", "schema")]
