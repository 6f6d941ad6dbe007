from typing import Any

import pytest

from operations import OperationSpec, OperationType, Schema
from operations.mcp.serving.tools import Tool, items_schema
from operations.mcp.shared.codec import (
    EXACT_OUTPUT,
    META_KEY,
    WRAPPED,
    accepts_only_objects,
    boxed,
    inlined,
    object_schema,
    pruned,
    restore_spec,
    with_alternative,
)
from operations.schema.references import possible_types, with_items

TREE: dict[str, Any] = {
    "type": "array",
    "items": {"anyOf": [{"type": "integer"}, {"$ref": "#"}, {"$ref": "#/$defs/leaf"}]},
    "$defs": {"leaf": {"type": "object", "required": ["v"]}, "unused": {"type": "null"}},
}


@pytest.mark.parametrize(
    "document",
    [
        {"type": "object"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "object"}}},
        {"allOf": [{"type": "object"}, {"required": ["x"]}]},
        {"anyOf": [{"type": "object"}, {"type": "object"}]},
        {"oneOf": [{"type": "object"}]},
        {"$ref": "#/properties/a", "properties": {"a": {"type": "object"}}},
        {"enum": [{"a": 1}]},
    ],
)
def test_a_schema_of_objects_gets_its_type_at_the_root(document: Any) -> None:
    assert accepts_only_objects(document)
    assert object_schema(document)["type"] == "object"


@pytest.mark.parametrize(
    "document",
    [
        {},
        True,
        {"type": ["object", "null"]},
        {"anyOf": [{"type": "object"}, {"type": "null"}]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
        {"$ref": "#/$defs/missing"},
        {"$ref": "#/$defs/a/$defs/b", "$defs": {"a": {"type": "object", "$defs": {"b": {}}}}},
        {"anyOf": [{"type": "object"}, {"type": "number", "const": 1}]},
        {"type": ["object"]},
    ],
)
def test_a_schema_that_accepts_other_types_is_not_treated_as_an_object_schema(
    document: Any,
) -> None:
    assert not accepts_only_objects(document)


@pytest.mark.parametrize(
    ("document", "never"),
    [
        ({"type": "string"}, True),
        ({"type": ["string", "integer"]}, True),
        ({"enum": ["a"]}, True),
        ({"const": 1}, True),
        ({"anyOf": [{"type": "string"}, {"const": 1}]}, True),
        ({"type": ["string", "null"]}, False),
        ({"enum": ["a", None]}, False),
        ({"const": None}, False),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, False),
        ({"minimum": 1}, False),
        (True, False),
    ],
)
def test_a_schema_that_may_accept_null_is_detected(document: Any, never: bool) -> None:
    assert ("null" not in possible_types(document, document)) is never


@pytest.mark.parametrize("value", [[], [1, [2]], [{"v": 1}]])
@pytest.mark.parametrize("wrong", ["x", [None], [{}]])
def test_a_boxed_schema_accepts_the_same_values(value: Any, wrong: Any) -> None:
    box = Schema(boxed(TREE, "result"))
    items = Schema(items_schema(TREE))

    assert Schema(TREE).check(value)
    assert box.check({"result": value})
    assert not box.check({"result": wrong})
    assert items.check({"items": [value], "complete": True})
    assert not items.check({"items": [wrong], "complete": True})


def test_unused_definitions_are_omitted() -> None:
    assert set(pruned(TREE, 1000)["$defs"]) == {"leaf"}  # type: ignore[index]


def test_definitions_beyond_the_budget_accept_everything() -> None:
    cut = pruned(TREE, 5)

    assert cut["$defs"] == {"leaf": {}}  # type: ignore[index]
    assert Schema(cut).check([{"v": 1}])


def test_a_schema_without_definitions_is_unchanged() -> None:
    document = {"type": "string"}

    assert pruned(document, 1) is document
    assert pruned(True, 1) is True


def test_definitions_take_the_place_of_their_references() -> None:
    document: Any = {
        "type": "object",
        "properties": {
            "lines": {"type": "array", "items": {"$ref": "#/$defs/Line"}},
            "first": {"$ref": "#/$defs/Line", "description": "The first line."},
        },
        "$defs": {
            "Line": {"title": "Line", "properties": {"colour": {"$ref": "#/$defs/Colour"}}},
            "Colour": {"enum": ["red", "green"]},
            "Unused": {"$ref": "#/$defs/Unused"},
        },
    }
    line = {"title": "Line", "properties": {"colour": {"enum": ["red", "green"]}}}

    assert inlined(document, 1000) == {
        "type": "object",
        "properties": {
            "lines": {"type": "array", "items": line},
            "first": {**line, "description": "The first line."},
        },
    }


def test_definitions_of_a_union_with_a_discriminator_take_the_place_of_their_references() -> None:
    cat = {"properties": {"kind": {"const": "cat"}}}
    document: Any = {
        "type": "object",
        "properties": {
            "pet": {
                "oneOf": [{"$ref": "#/$defs/Cat"}],
                "discriminator": {"propertyName": "kind", "mapping": {"cat": "#/$defs/Cat"}},
            },
            "discriminator": {"type": "string"},
        },
        "$defs": {"Cat": cat},
    }

    found: Any = inlined(document, 1000)
    assert found["properties"] == {"pet": {"oneOf": [cat]}, "discriminator": {"type": "string"}}


@pytest.mark.parametrize(
    "document",
    [
        {"type": "object"},
        True,
        TREE,
        {"items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"items": {"$ref": "#/$defs/a"}}}},
        {"items": {"$ref": "#/$defs/missing"}, "$defs": {"a": {}}},
        {"items": {"$ref": "#/$defs/a"}, "$defs": {"a": True}},
        {"items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"title": "x" * 1000}}},
        {"items": {"$ref": "#/$defs/a", "required": ["b"]}, "$defs": {"a": {"type": "object"}}},
        {"items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"$id": "a", "items": {"$ref": "#"}}}},
        {"items": {"$dynamicRef": "#a"}, "$defs": {"a": {"$dynamicAnchor": "a"}}},
        {"contentSchema": {"$ref": "#/$defs/a"}, "$defs": {"a": {}}},
        {
            "items": {"$ref": "#/$defs/0"},
            "$defs": {
                **{str(n): {"items": {"$ref": f"#/$defs/{n + 1}"}} for n in range(20)},
                "20": {},
            },
        },
        {
            "items": {"$ref": "#/$defs/0"},
            "$defs": {
                **{
                    str(n): {"anyOf": [{"$ref": f"#/$defs/{n + 1}"}, {"$ref": f"#/$defs/{n + 1}"}]}
                    for n in range(30)
                },
                "30": {},
            },
        },
    ],
    ids=range(13),
)
def test_a_schema_stays_unchanged_if_its_definitions_cannot_take_the_place_of_references(
    document: Any,
) -> None:
    assert inlined(document, 1000) is document


def test_every_array_of_an_input_has_items_because_clients_reject_tools_without() -> None:
    arrays: dict[str, Any] = {
        "bare": {"type": "array"},
        "maybe": {"anyOf": [{"type": ["array", "null"]}]},
        "pair": {"type": "array", "prefixItems": [{"type": "integer"}]},
    }
    document = {"type": "object", "properties": arrays}
    spec = OperationSpec(
        namespace="a", name="b", type=OperationType.QUERY, input_schema=Schema(document)
    )

    wire = Tool("a__b", spec, 1000).wire(modern=True)

    assert wire["inputSchema"]["properties"] == {
        "bare": {"type": "array", "items": {}},
        "maybe": {"anyOf": [{"type": ["array", "null"], "items": {}}]},
        "pair": {"type": "array", "prefixItems": [{"type": "integer"}], "items": {}},
    }
    assert restore_spec(spec, wire["_meta"]).input_schema.document == document


@pytest.mark.parametrize("closed", [{"unevaluatedItems": False}, {"unevaluatedItems": True}])
def test_arrays_stay_unchanged_if_further_items_depend_on_them(closed: Any) -> None:
    document = {"allOf": [{"type": "array"}], **closed}

    assert with_items(document) is document


def test_an_alternative_keeps_definitions_at_the_root_and_the_exact_schema() -> None:
    exact: Any = {
        "type": "object",
        "properties": {"item": {"$ref": "#/$defs/Item"}, "self": {"$ref": "#"}},
        "$defs": {"Item": {"properties": {"next": {"$ref": "#/$defs/Item"}}}},
    }

    listed = with_alternative(exact)

    assert listed["anyOf"][0]["properties"]["item"] == {"$ref": "#/$defs/Item"}
    assert listed["anyOf"][0]["properties"]["self"] == {"$ref": "#/anyOf/0"}
    assert listed["$defs"] == exact["$defs"]
    assert Schema(listed).check({"item": "x"}), "other results are accepted"
    assert not Schema(listed).check("no object")
    tool = OperationSpec(
        namespace="a", name="b", type=OperationType.QUERY, output_schema=Schema(listed)
    )
    restored = restore_spec(tool, {META_KEY: {"outputSchema": EXACT_OUTPUT}})
    assert restored.output_schema.document == exact


def test_a_box_of_another_server_stays_marked() -> None:
    """FastMCP's own servers mark boxed results like this, and its client reads the root only."""
    theirs: Any = {
        "type": "object",
        "properties": {"result": {"type": "integer"}},
        "required": ["result"],
        WRAPPED: True,
    }

    listed = with_alternative(theirs)

    assert listed[WRAPPED] is True
    assert listed["properties"] == {"result": {}}
    assert listed["anyOf"] == [theirs, {}]
