"""Schemas of every version become whole 2020-12 schemas."""

from typing import Any

import pytest
from tests.openapi.examples import built_schema
from tests.openapi.serving import document

from operations.openapi import HTTPServiceConfig, from_openapi
from operations.openapi.reading.keywords import FILE_SCHEMA
from operations.openapi.reading.references import References
from operations.openapi.reading.schemas import Direction, SchemaConverter
from operations.schema import Schema


def build(
    schema: Any, direction: Direction = Direction.REQUEST, *, version: str = "3.0", **schemas: Any
) -> Any:
    references = References({"components": {"schemas": schemas}})
    converter = SchemaConverter(references, ref_siblings=version != "3.0")
    built = built_schema(converter, schema, direction)
    Schema(built).compile()
    return built


REF = {"$ref": "#/components/schemas/A"}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"type": "string", "nullable": True}, {"type": ["string", "null"]}),
        ({"type": "string", "nullable": False}, {"type": "string"}),
        (
            {"type": "string", "nullable": True, "enum": ["a"]},
            {"type": ["string", "null"], "enum": ["a", None]},
        ),
        ({"nullable": True}, {}),
        (
            {"nullable": True, "allOf": [{"type": "object"}]},
            {"anyOf": [{"allOf": [{"type": "object"}]}, {"type": "null"}]},
        ),
        ({"minimum": 1, "exclusiveMinimum": True}, {"exclusiveMinimum": 1}),
        ({"maximum": 1, "exclusiveMaximum": False}, {"maximum": 1}),
        ({"exclusiveMaximum": 3}, {"exclusiveMaximum": 3}),
        ({"example": 1, "x-thing": 2, "xml": {}, "discriminator": {}}, {"examples": [1]}),
        ({"items": [{"type": "string"}], "additionalItems": False},
         {"prefixItems": [{"type": "string"}], "items": False}),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]},
         {"anyOf": [{"type": "integer"}, {"type": "number"}]}),
        ({"oneOf": [{"minimum": 1}], "anyOf": [{"type": "integer"}], "allOf": [{"maximum": 9}]},
         {"anyOf": [{"type": "integer"}], "allOf": [{"maximum": 9}, {"anyOf": [{"minimum": 1}]}]}),
        ({"type": "any"}, {}),
        ({"type": "int"}, {"type": "integer"}),
        ({"type": "String"}, {"type": "string"}),
        ({"type": ["string", "null"]}, {"type": ["string", "null"]}),
        ({"type": "made up"}, {}),
        ({"type": "file"}, {"type": "string"}),
        ({"required": True, "minLength": "3", "maxLength": -1, "maximum": "x"}, {"minLength": 3}),
        ({"required": ["a", "a", 1]}, {"required": ["a"]}),
        ({"enum": [], "allOf": [], "properties": [], "pattern": 7}, {}),
        ({"properties": {"a": None, "b": "x"}}, {"properties": {"a": True, "b": True}}),
        ({"dependentRequired": {"a": ["b"]}, "dependentSchemas": {"c": {"type": "object"}}},
         {"dependentRequired": {"a": ["b"]}, "dependentSchemas": {"c": {"type": "object"}}}),
        ({"multipleOf": 0}, {}),
        ({"pattern": "[", "maxLength": 3}, {"maxLength": 3}),
        ({"pattern": r"^(?!x)\p{L}+$"}, {"pattern": r"^(?!x)\p{L}+$"}),
        ({"patternProperties": {"(": {}, "^a": {}}, "additionalProperties": False},
         {"patternProperties": {"^a": {}}, "additionalProperties": True}),
        ({"type": "string", "enum": [1, 2]},
         {"type": ["string", "integer"], "enum": [1, 2, "1", "2"]}),
        ({"type": "integer", "enum": ["6", "12"]},
         {"type": ["integer", "string"], "enum": ["6", "12", 6, 12]}),
        ({"type": "boolean", "enum": ["0", "1", True]},
         {"type": ["boolean", "string"], "enum": ["0", "1", True]}),
        ({"type": "string", "enum": [True]},
         {"type": ["string", "boolean"], "enum": [True, "true"]}),
        ({"type": "string", "enum": ["a", None]}, {"type": "string", "enum": ["a", None]}),
        ({"type": "number", "enum": [1, 2.5]}, {"type": "number", "enum": [1, 2.5]}),
        ({"type": "integer", "enum": ["Basic", "Full"]},
         {"type": ["integer", "string"], "examples": ["Basic", "Full"]}),
        ({"type": "array", "items": {"type": "string"}, "enum": ["a", "b"]},
         {"type": "array", "items": {"type": "string", "enum": ["a", "b"]}}),
        ({"type": "array", "enum": [["a"], ["b"]]}, {"type": "array", "enum": [["a"], ["b"]]}),
        (None, True),
        ([], True),
        (False, False),
    ],
)  # fmt: skip
def test_a_schema_is_translated(before: Any, after: Any) -> None:
    assert build(before) == after


REST = {"type": "integer"}
CLOSED: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "string"}},
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [REF, {"properties": {"b": {"type": "integer"}}}]},
        {"allOf": [REF], "properties": {"b": {"type": "integer"}}},
        {"allOf": [{"allOf": [REF]}, {**CLOSED, "properties": {"b": {"type": "integer"}}}]},
        {"allOf": [{"$ref": "#/components/schemas/B"}, REF]},
    ],
)
def test_closed_parts_allow_the_properties_of_one_another(schema: Any) -> None:
    other = {"allOf": [REF], "properties": {"b": {"type": "integer"}}}
    built = Schema(build(schema, A=CLOSED, B=other))
    assert built.check({"a": "x", "b": 1})
    assert not built.check({"a": "x", "b": "x"})
    assert not built.check({"a": "x", "c": 1})


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [REF, {"properties": {"b": {"type": "string"}}}]},
        {"allOf": [REF], "properties": {"b": {"type": "string"}}},
        {"allOf": [REF], "properties": {"b": {"type": "string"}}, "additionalProperties": REST},
    ],
)
def test_a_schema_for_other_properties_does_not_apply_to_those_of_other_parts(schema: Any) -> None:
    base = {**CLOSED, "additionalProperties": {"$ref": "#/components/schemas/Rest"}}
    built = Schema(build(schema, A=base, Rest=REST))
    assert built.check({"a": "x", "b": "x", "c": 1})
    assert not built.check({"a": "x", "b": 1})
    assert not built.check({"a": "x", "c": "x"})
    assert built.cast({"a": "x", "b": "x", "c": 1}).changes == []


def test_a_closed_schema_stays_closed_if_its_parts_agree() -> None:
    built = build({"allOf": [REF, {"required": ["a"]}]}, A=CLOSED)
    assert built["allOf"][0] == {"$ref": "#/$defs/A"}
    assert not Schema(built).check({"a": "x", "b": 1})


def test_only_referenced_definitions_are_included() -> None:
    built = build(
        {"properties": {"a": REF}},
        A={"items": {"$ref": "#/components/schemas/B"}},
        B={"type": "object", "properties": {"again": REF}},
        C={"type": "string"},
    )
    assert built["properties"]["a"] == {"$ref": "#/$defs/A"}
    assert built["$defs"].keys() == {"A", "B"}
    assert Schema(built).check({"a": [{"again": [{}]}]})
    assert not Schema(built).check({"a": [{"again": 1}, 1]})


def test_patterns_that_are_not_checked_are_logged_with_their_places(
    caplog: pytest.LogCaptureFixture,
) -> None:
    unsafe = {"type": "string", "pattern": "^.{1,16000}$"}
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/A"}}}
    doc = document(
        "/x",
        "post",
        parameters=[{"name": "p", "in": "query", "schema": unsafe}],
        requestBody={"content": content},
        components={"schemas": {"A": {"properties": {"b": unsafe}}}},
    )
    (operation,) = from_openapi(doc, HTTPServiceConfig(namespace="api"))
    operation.spec.input_schema.check({})

    (logged,) = [text for text in caplog.messages if "run safely" in text]
    _, _, places = logged.partition("checked: ")
    pattern = unsafe["pattern"]
    assert places.split("; ") == [
        f"/properties/p/pattern: {pattern}",
        f"/$defs/A/properties/b/pattern: {pattern}",
    ]


def test_cyclic_and_broken_references_allow_anything(caplog: pytest.LogCaptureFixture) -> None:
    schemas: Any = {"A": {"$ref": "#/components/schemas/B"}, "B": REF}
    assert Schema(build(REF, **schemas)).check("anything")
    assert build({"$ref": "#/components/schemas/None"}) == {}
    assert build({"$ref": "https://elsewhere.example/schema.json"}) == {}
    assert "is not in this document" in caplog.text


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("3.0", {"$ref": "#/$defs/A", "description": "d"}),
        ("3.1", {"$ref": "#/$defs/A", "description": "d", "minLength": 2}),
    ],
)
def test_keywords_beside_a_reference_apply_from_3_1_on(version: str, expected: Any) -> None:
    built = build({**REF, "description": "d", "minLength": 2}, version=version, A={})
    assert {key: value for key, value in built.items() if key != "$defs"} == expected


def test_a_nullable_reference_may_be_null() -> None:
    schema = Schema(build({**REF, "nullable": True}, A={"type": "object"}))
    assert schema.check(None)
    assert schema.check({})
    assert not schema.check(1)


def test_read_only_properties_are_not_inputs_and_write_only_ones_not_outputs() -> None:
    thing = {
        "type": "object",
        "properties": {
            "id": {"type": "integer", "readOnly": True},
            "password": {"type": "string", "writeOnly": True},
            "name": {"type": "string"},
            "made": {"$ref": "#/components/schemas/Stamp"},
        },
        "required": ["id", "password", "name", "made"],
    }
    stamp = {"type": "string", "readOnly": True}
    request = build(thing, Direction.REQUEST, Stamp=stamp)
    response = build(thing, Direction.RESPONSE, Stamp=stamp)
    assert request["properties"].keys() == {"password", "name"}
    assert request["required"] == ["password", "name"]
    assert response["properties"].keys() == {"id", "name", "made"}
    assert response["required"] == ["id", "name", "made"]


def test_a_part_does_not_require_a_property_that_another_part_hides() -> None:
    base = {"type": "object", "properties": {"id": {"readOnly": True}, "name": {}}}
    schema = {"allOf": [REF, {"required": ["id", "name"]}]}
    assert build(schema, A=base)["allOf"][1] == {"required": ["name"]}
    assert build(schema, Direction.RESPONSE, A=base)["allOf"][1] == {"required": ["id", "name"]}


def test_a_discriminator_is_described_and_permits_overlapping_members() -> None:
    document = {
        "components": {
            "schemas": {
                "Pet": {
                    "oneOf": [{"$ref": "#/components/schemas/Cat"}, {"$ref": "#/components/schemas/Dog"}],
                    "discriminator": {"propertyName": "kind", "mapping": {"cat": "Cat", "dog": "Dog"}},
                },
                "Cat": {"type": "object", "properties": {"kind": {"type": "string"}}},
                "Dog": {"type": "object", "properties": {"kind": {"type": "string"}}},
            }
        }
    }  # fmt: skip
    converter = SchemaConverter(References(document), ref_siblings=True)
    built: Any = built_schema(converter, {"$ref": "#/components/schemas/Pet"}, Direction.REQUEST)
    assert built["$defs"]["Pet"] == {
        "anyOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
        "description": "The property 'kind' names the variant: cat, dog.",
    }
    assert Schema(built).check({"kind": "cat"})


def test_files_are_files_only_if_the_request_is_not_json() -> None:
    binary = {"type": "string", "format": "binary"}
    assert build(binary) == binary
    assert build(binary, Direction.UPLOAD) == FILE_SCHEMA
    assert build({"contentMediaType": "image/png"}, Direction.UPLOAD) == FILE_SCHEMA
    encoded = {"type": "string", "contentMediaType": "image/png", "contentEncoding": "base64"}
    assert build(encoded, Direction.UPLOAD) == encoded


@pytest.mark.parametrize(
    "ref",
    [
        "#/components/schemas/a~1b%7Bc%7D",
        "#/components/schemas/a~1b{c}",
        "#there",
        "https://x.example/id",
        "#/$defs/In",
    ],
)
def test_references_are_found_however_they_are_written(ref: str) -> None:
    schemas: Any = {
        "a/b{c}": {"type": "integer"},
        "B": {"$anchor": "there", "type": "integer"},
        "C": {"$id": "https://x.example/id", "type": "integer"},
        "D": {"$defs": {"In": {"type": "integer"}}},
    }
    built = build({"$ref": ref}, version="3.1", **schemas)
    assert Schema(built).check(1)
    assert not Schema(built).check("x")


def test_definitions_with_unsafe_names_get_safe_distinct_names() -> None:
    schemas: Any = {"a b": {"type": "string"}, "a_b": {"type": "integer"}, "a/b": {"type": "null"}}
    refs = [{"$ref": f"#/components/schemas/{name}"} for name in ("a b", "a_b", "a~1b")]
    built = build({"oneOf": refs}, **schemas)
    assert len(built["$defs"]) == 3
    assert Schema(built).check("x")
    assert Schema(built).check(1)
    assert Schema(built).check(None)
    assert not Schema(built).check([])


def test_endless_nesting_is_cut_off() -> None:
    deep: Any = {"type": "string"}
    for _ in range(400):
        deep = {"type": "array", "items": deep}
    assert Schema(build(deep), lenient=True).document


@pytest.mark.requirement("R20")
def test_parts_that_multiply_are_visited_once() -> None:
    schemas: Any = {
        f"A{level}": {
            "allOf": [{"$ref": f"#/components/schemas/A{level + 1}"}] * 10,
            "properties": {f"p{level}": {}},
        }
        for level in range(30)
    }
    schemas["A30"] = {"properties": {"id": {"readOnly": True}}, "required": ["id"]}
    references = References({"components": {"schemas": schemas}})
    converter = SchemaConverter(references, ref_siblings=True)
    root = {"$ref": "#/components/schemas/A0"}
    assert len(converter.definitions.properties(root)) == 31
    assert converter.definitions.flattened(root)["required"] == ["id"]
    assert isinstance(built_schema(converter, root, Direction.REQUEST), dict)


def test_one_of_in_a_response_stays() -> None:
    schema = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
    assert build(schema, Direction.RESPONSE) == schema
