"""References inside one document, by pointer, identifier and anchor."""

from typing import Any

import pytest

from operations.base.errors import SchemaError
from operations.schema import Schema
from operations.schema.references import ALL_TYPES, Document, possible_types

ANCHORED: dict[str, Any] = {
    "$id": "https://example.com/root",
    "$defs": {
        "inner": {
            "$id": "nested/inner",
            "$defs": {"text": {"$anchor": "text", "type": "string"}},
            "properties": {"a": {"$ref": "#text"}, "b": {"$ref": "#/$defs/text"}},
        },
        "a/b~c%d": {"type": "integer"},
    },
    "properties": {
        "pointer": {"$ref": "#/$defs/a~1b~0c%25d"},
        "relative": {"$ref": "nested/inner"},
        "absolute": {"$ref": "https://example.com/nested/inner#text"},
        "root": {"$ref": "#"},
        "item": {"$ref": "#/x-list/0"},
    },
    "x-list": [{"type": "boolean"}],
}


@pytest.mark.parametrize(
    ("value", "places"),
    [
        ({"pointer": 1}, []),
        ({"pointer": "x"}, ["/pointer"]),
        ({"relative": {"a": "x", "b": "y"}}, []),
        ({"relative": {"a": 1, "b": 2}}, ["/relative/a", "/relative/b"]),
        ({"absolute": 1}, ["/absolute"]),
        ({"root": {"pointer": "x"}}, ["/root/pointer"]),
        ({"item": 1}, ["/item"]),
    ],
)
def test_every_kind_of_reference_is_resolved(value: Any, places: list[str]) -> None:
    schema = Schema(ANCHORED)

    assert schema.check(value) is not bool(places)
    assert [fault.path for fault in schema.errors(value)] == places


def test_the_cast_follows_references() -> None:
    value = {"relative": {"a": "x", "z": 1}, "root": {"pointer": 1, "z": 1}, "z": 1}

    assert Schema(ANCHORED).cast(value).value == {"relative": {"a": "x"}, "root": {"pointer": 1}}


@pytest.mark.parametrize(
    "reference", ["#/$defs/none", "#none", "#/$defs/list/7", "#/$defs/list/x", "#/title"]
)
def test_a_reference_that_leads_nowhere_has_no_target(reference: str) -> None:
    document = Document({"$ref": reference, "title": "t", "$defs": {"list": [{}], "none_": {}}})

    assert [target for _, target in document.references(document.root)] == [None]


@pytest.mark.requirement("R13")
@pytest.mark.parametrize(
    "document",
    [
        {"properties": {"a": {"$ref": "http://[x"}}},
        {"$id": "http://[x", "properties": {"a": {"$ref": "#/properties/b"}}},
        {"$defs": {"a": {"$id": "//\u2100.example"}}},
    ],
)
def test_a_schema_with_a_malformed_address_cannot_be_used(document: Any) -> None:
    assert Schema(document, lenient=True).cast({"a": 1}).value == {"a": 1}
    with pytest.raises(SchemaError, match="not a valid URI"):
        Schema(document).check({"a": 1})


def test_identifiers_that_are_only_fragments_are_anchors_up_to_draft_7() -> None:
    schema = Schema(
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "definitions": {"a": {"$id": "#text", "type": "string"}},
            "properties": {"a": {"$ref": "#text"}},
        }
    )

    assert [fault.path for fault in schema.errors({"a": 1})] == ["/a"]


def test_up_to_draft_7_an_identifier_beside_a_reference_is_ignored() -> None:
    schema = Schema(
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "$id": "http://example.com/a",
            "definitions": {"a": {"type": "string"}},
            "properties": {"a": {"$id": "elsewhere", "$ref": "#/definitions/a"}},
        }
    )

    assert [fault.path for fault in schema.errors({"a": 1})] == ["/a"]


def test_a_value_in_place_of_a_schema_is_skipped() -> None:
    odd = {
        "properties": 5,
        "allOf": {},
        "items": 3,
        "prefixItems": [4, {}],
        "not": None,
        "$defs": [1],
        "a": {},
    }

    assert [site.pointer for site in Document(odd).sites] == ["", "/prefixItems/1"]


def test_urns_can_be_identifiers() -> None:
    schema = Schema(
        {
            "$id": "urn:uuid:deadbeef-1234-ffff-ffff-4321feebdaed",
            "properties": {"a": {"$ref": "#/$defs/text"}},
            "$defs": {"text": {"type": "string"}},
        }
    )

    assert [fault.path for fault in schema.errors({"a": 1})] == ["/a"]


TREE: dict[str, Any] = {
    "$id": "https://example.com/tree",
    "$dynamicAnchor": "node",
    "type": "object",
    "properties": {"data": True, "children": {"type": "array", "items": {"$dynamicRef": "#node"}}},
}


def test_a_dynamic_reference_with_one_anchor_is_an_ordinary_one() -> None:
    schema = Schema(TREE)

    assert schema.cast({"children": [{"data": 1, "x": 1}]}).value == {"children": [{"data": 1}]}
    assert [fault.path for fault in schema.errors({"children": [{"children": 1}]})] == [
        "/children/0/children"
    ]


def test_a_dynamic_reference_with_several_anchors_is_left_to_the_validator() -> None:
    schema = Schema(
        {
            "$id": "https://example.com/strict-tree",
            "$dynamicAnchor": "node",
            "$ref": "tree",
            "unevaluatedProperties": False,
            "$defs": {"tree": TREE},
        }
    )
    value = {"children": [{"data": 1, "anything": 1}]}

    assert schema.check({"children": [{"data": 1}]})
    assert not schema.check(value)
    # The schema of the children depends on the path, so their properties are not stripped.
    assert schema.cast({"children": [{"data": 1}], "x": 1}).value == {"children": [{"data": 1}]}
    assert schema.cast(value).value == value


def test_a_recursive_reference_of_2019_works() -> None:
    schema = Schema(
        {
            "$schema": "https://json-schema.org/draft/2019-09/schema",
            "$recursiveAnchor": True,
            "type": "object",
            "properties": {"a": {"$recursiveRef": "#"}},
        }
    )

    assert schema.cast({"a": {"a": {}, "x": 1}}).value == {"a": {"a": {}}}
    assert [fault.path for fault in schema.errors({"a": {"a": 1}})] == ["/a/a"]


def test_recursive_references_with_several_anchors_are_left_alone() -> None:
    document = Document(
        {
            "$schema": "https://json-schema.org/draft/2019-09/schema",
            "$id": "https://example.com/a",
            "$recursiveAnchor": True,
            "properties": {
                "a": {"$id": "b", "$recursiveAnchor": True, "items": {"$recursiveRef": "#"}}
            },
        }
    )
    site = next(site for site in document.sites if "$recursiveRef" in str(site.schema)[:20])

    assert list(document.references(site)) == [("$recursiveRef", None)]


def test_a_reference_to_a_meta_schema_is_followed_by_the_validator_alone() -> None:
    schema = Schema({"properties": {"a": {"$ref": "https://json-schema.org/draft/2020-12/schema"}}})

    assert schema.check({"a": {"type": "string"}})
    assert [fault.path for fault in schema.errors({"a": {"type": 1}})] == ["/a"]
    assert schema.cast({"a": {"type": "string", "own": 1}}).value == {
        "a": {"type": "string", "own": 1}
    }


def test_properties_with_the_names_of_keywords_are_properties() -> None:
    schema = Schema(
        {
            "type": "object",
            "properties": {
                "$ref": {"type": "string"},
                "$id": {"type": "string"},
                "properties": {"type": "integer"},
                "enum": {"type": "string", "pattern": "^a"},
            },
            "const": {"properties": 1, "$ref": "x", "$id": "y", "enum": "a"},
        }
    )

    assert schema.check({"properties": 1, "$ref": "x", "$id": "y", "enum": "a"})
    assert not schema.check({"properties": 1, "$ref": "x", "$id": "y", "enum": "b"})


def test_the_types_of_unions_that_refer_to_each_other_are_found_without_end() -> None:
    names = [f"kind{number}" for number in range(40)]
    document: dict[str, Any] = {
        "$ref": "#/$defs/base",
        "$defs": {
            "base": {"oneOf": [{"$ref": f"#/$defs/{name}"} for name in names]},
            **{name: {"allOf": [{"$ref": "#/$defs/base"}, {"title": name}]} for name in names},
        },
    }

    assert possible_types(document, document) == ALL_TYPES
    document["$defs"]["kind0"]["type"] = "integer"
    assert possible_types({"$ref": "#/$defs/kind0"}, document) == {"number"}
    assert possible_types({"allOf": [{"type": "number"}, {"type": "integer"}]}, {}) == {"number"}


@pytest.mark.requirement("R55")
def test_reading_the_types_of_a_hostile_schema_is_bounded() -> None:
    definitions = {
        f"kind{n}": {"anyOf": [{"$ref": f"#/$defs/kind{n + 1}"}] * 50, "minimum": n}
        for n in range(15)
    }
    document = {"$defs": {**definitions, "kind15": {"type": "string"}}, "$ref": "#/$defs/kind0"}

    assert possible_types(document, document) == ALL_TYPES
