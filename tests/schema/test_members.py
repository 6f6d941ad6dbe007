"""Unions: members that match, the nearest member, and the properties of members."""

from typing import Any

import pytest

from operations.schema import CastResult, Schema

CAT = {
    "type": "object",
    "properties": {"t": {"const": "cat"}, "lives": {"type": "integer"}},
    "required": ["t", "lives"],
}
DOG = {
    "type": "object",
    "properties": {"t": {"const": "dog"}, "trick": {"type": "string"}},
    "required": ["t", "trick"],
}
CLOSED_CAT = {**CAT, "additionalProperties": False}
CLOSED_DOG = {**DOG, "additionalProperties": False}


def _cast(document: Any, value: Any) -> CastResult:
    return Schema(document).cast(value, "create")


def _kinds(result: CastResult) -> list[tuple[str, str]]:
    """Return the place and kind of each change, except changes that every policy makes."""
    silent = {"stripped", "filled", "mismatch"}
    return [(change.path, change.kind) for change in result.changes if change.kind not in silent]


def _edited(result: CastResult) -> tuple[Any, list[tuple[str, str]]]:
    return result.value, _kinds(result)


@pytest.mark.parametrize("keyword", ["anyOf", "oneOf"])
@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("policy", ["cast", "create"])
def test_a_closed_member_removes_no_property_that_another_member_declares(
    keyword: str, order: int, policy: Any
) -> None:
    def closed(*names: str) -> dict[str, Any]:
        properties = {name: {"type": "integer"} for name in names}
        return {"type": "object", "properties": properties, "additionalProperties": False}

    nested = Schema({keyword: [closed("a"), closed("a", "b")][::order]})
    disjoint = Schema({keyword: [closed("a"), closed("b", "c")][::order]})

    assert nested.cast({"a": 1, "b": 2, "z": 3}, policy).value == {"a": 1, "b": 2}
    assert disjoint.cast({"a": 1, "b": 2, "c": 3}, policy).value == {"b": 2, "c": 3}


@pytest.mark.parametrize("keyword", ["anyOf", "oneOf"])
@pytest.mark.parametrize(
    ("value", "expected", "kinds"),
    [
        ({"t": "dog", "trick": "sit"}, {"t": "dog", "trick": "sit"}, []),
        ({"t": "dog", "trick": "sit", "x": 1}, {"t": "dog", "trick": "sit"}, []),
        ({"t": "dog"}, {"t": "dog", "trick": ""}, [("/trick", "created")]),
        ({"t": "dog", "lives": 7}, {"t": "dog", "trick": ""}, [("/trick", "created")]),
        ({"t": "cat", "lives": "7"}, {"t": "cat", "lives": 7}, [("/lives", "converted")]),
        ({}, {"t": "cat", "lives": 0}, [("/t", "created"), ("/lives", "created")]),
        ({"t": "cow"}, {"t": "cat", "lives": 0}, [("/t", "replaced"), ("/lives", "created")]),
        (None, {"t": "cat", "lives": 0}, [("", "replaced")]),
        ("cat", {"t": "cat", "lives": 0}, [("", "replaced")]),
    ],
)
@pytest.mark.parametrize("members", [[CAT, DOG], [CLOSED_CAT, CLOSED_DOG]], ids=["open", "closed"])
def test_a_value_goes_to_the_member_it_matches_or_comes_nearest_to(
    keyword: str, members: Any, value: Any, expected: Any, kinds: Any
) -> None:
    result = _cast({keyword: members}, value)

    assert result.value == expected
    assert _kinds(result) == kinds


@pytest.mark.parametrize(
    ("document", "value", "expected", "kinds"),
    [
        ([{"type": "number"}, {"type": "string"}], "s", "s", []),
        ([{"type": "number"}, {"type": "string"}], True, "true", [("", "converted")]),
        ([{"type": "integer"}, {"type": "null"}], "5", 5, [("", "converted")]),
        ([{"type": "null"}, {"type": "integer"}], {}, None, [("", "replaced")]),
        ([{"const": 0}, {"const": 1}], "x", 0, [("", "replaced")]),
        (
            [{"type": "array", "items": {"type": "integer"}}, CAT],
            [1, "x"],
            [1, 0],
            [("/1", "replaced")],
        ),
        (
            [
                {"type": "array", "items": {"type": "integer"}},
                {"type": "array", "items": {"type": "boolean"}},
            ],
            ["1"],
            [1],
            [("/0", "converted")],
        ),
        (
            [{"type": "array", "items": {"type": "integer"}}, {"type": "null"}],
            {"a": 1},
            [],
            [("", "replaced")],
        ),
        (
            [{"type": "integer", "minimum": 5}, {"type": "integer", "maximum": 1}],
            3,
            5,
            [("", "replaced")],
        ),
    ],
)
def test_unions_of_other_things(document: Any, value: Any, expected: Any, kinds: Any) -> None:
    result = _cast({"anyOf": document}, value)

    assert result.value == expected
    assert _kinds(result) == kinds


def test_the_default_of_a_union_comes_before_a_guess_but_after_a_conversion() -> None:
    document = {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": 9}

    assert _cast(document, "x").value == 9
    assert _cast(document, "7").value == 7
    assert _cast(
        {"anyOf": [CLOSED_CAT, CLOSED_DOG], "default": {"t": "cat", "lives": 9}},
        {"t": "dog", "trick": "sit", "x": 1},
    ).value == {"t": "dog", "trick": "sit"}


def test_a_property_known_to_any_matching_member_is_kept() -> None:
    document = {
        "anyOf": [
            {"type": "object", "properties": {"a": {}, "in": {"properties": {"p": {}}}}},
            {"type": "object", "properties": {"b": {}, "in": {"properties": {"q": {}}}}},
            {"type": "object", "properties": {"c": {}}, "required": ["z"]},
        ]
    }
    value = {"a": 1, "b": 2, "c": 3, "in": {"p": 1, "q": 2, "r": 3}}

    assert _edited(_cast(document, value)) == ({"a": 1, "in": {"p": 1, "q": 2}, "b": 2}, [])


def test_keywords_beside_a_union_apply_to_every_member() -> None:
    document = {
        "type": "object",
        "properties": {"id": {"type": "integer"}},
        "required": ["id"],
        "anyOf": [
            {"required": ["a"]},
            {"properties": {"b": {"type": "string"}}, "required": ["b"]},
        ],
    }

    assert _cast(document, {"id": 1, "b": "x", "c": 1}).value == {"id": 1, "b": "x"}
    assert _cast(document, {"id": "1", "a": 1, "c": 1}).value == {"id": 1, "a": 1}
    assert _cast(document, None).value == {"id": 0, "a": None}


def test_two_adjacent_unions_both_apply() -> None:
    document = {
        "type": "object",
        "allOf": [
            {
                "anyOf": [
                    {"properties": {"a": {"type": "integer"}}, "required": ["a"]},
                    {"required": ["x"]},
                ]
            },
            {
                "anyOf": [
                    {"properties": {"b": {"type": "integer"}}, "required": ["b"]},
                    {"required": ["y"]},
                ]
            },
        ],
    }

    assert _cast(document, {"a": 1, "b": 2, "c": 3}).value == {"a": 1, "b": 2}
    assert _cast(document, {"a": "1", "b": "2"}).value == {"a": 1, "b": 2}
    assert _cast(document, 5).value == {"a": 0, "b": 0}


def test_nested_unions_are_scored_as_one() -> None:
    document = {"anyOf": [{"anyOf": [CAT, {"type": "null"}]}, DOG]}

    assert _cast(document, {"t": "cat"}).value == {"t": "cat", "lives": 0}
    assert _cast(document, {"t": "dog"}).value == {"t": "dog", "trick": ""}


def test_a_tag_scores_one_hundred_a_valid_property_ten_a_present_one_one() -> None:
    first = {
        "type": "object",
        "properties": {"a": {"type": "string"}, "b": {"type": "string"}},
        "required": ["z"],
    }
    second = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "c": {}},
        "required": ["z"],
    }

    assert set(_cast({"anyOf": [first, second]}, {"a": 1}).value) == {"a", "z"}
    assert _cast({"anyOf": [first, second]}, {"a": 1}).value["a"] == 1
    assert _cast({"anyOf": [first, second]}, {"b": []}).value == {"b": "", "z": None}
    tagged = {"anyOf": [first, {"properties": {"k": {"const": 1}}, "required": ["k", "z"]}]}
    assert _cast(tagged, {"a": "x", "b": "y", "k": 1}).value == {"k": 1, "z": None}


def test_members_that_match_after_conversion_are_considered() -> None:
    """Casting once more would otherwise change the result."""
    document = {
        "type": "object",
        "properties": {"b": {"default": 1}},
        "anyOf": [
            {"required": ["b"], "properties": {"c": {"default": 2}}},
            {"properties": {"d": {}}},
        ],
    }

    assert _cast(document, {"x": 1}).value == {"b": 1, "c": 2}


def test_a_property_stripped_and_then_filled_counts_as_replaced() -> None:
    document = {
        "anyOf": [
            {"type": "object", "properties": {"b": {"type": "string", "default": "d"}}},
            {
                "type": "object",
                "properties": {"k": {"type": "array", "items": {"type": "integer"}}},
            },
        ]
    }
    result = _cast(document, {"b": [1], "k": [1, 2]})

    assert result.value == {"b": "d", "k": [1, 2]}
    assert _kinds(result) == [("/b", "replaced")]


def test_changes_of_removed_properties_are_not_reported() -> None:
    document = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "if": {"properties": {"a": {"type": "string"}}, "required": ["a"]},
        "then": {"properties": {"b": {"type": "integer"}}},
    }
    result = _cast(document, {"a": "5", "b": "6"})

    assert result.value == {"a": 5}
    assert _kinds(result) == [("/a", "converted")]


def test_changes_of_removed_items_are_not_reported() -> None:
    document = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "if": {"properties": {"a": {"type": "string"}}, "required": ["a"]},
        "then": {"properties": {"b": {"type": "array", "items": {"type": "integer"}}}},
        "else": {"properties": {"b": {"type": "array", "maxItems": 1}}},
    }
    result = _cast(document, {"a": "5", "b": ["6", "7"]})

    assert result.value == {"a": 5, "b": [6]}
    assert _kinds(result) == [("/a", "converted"), ("/b/0", "converted"), ("/b", "replaced")]


@pytest.mark.requirement("R20")
def test_trials_end_even_if_alternatives_multiply() -> None:
    """Every level has many members, which differ only in their last leaf."""
    member = [
        {
            "type": "object",
            "properties": {"a": {"$ref": "#"}, f"p{i}": {}},
            "required": ["a"],
            "additionalProperties": False,
        }
        for i in range(12)
    ]
    value: Any = {"wrong": True}
    for _ in range(40):
        value = {"a": value}
    result = _cast({"anyOf": [{"type": "integer"}, *member]}, value)

    assert Schema({"anyOf": [{"type": "integer"}, *member]}).check(result.value)
