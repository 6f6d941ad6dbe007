"""Problems of a document are reported before operations are called."""

from pathlib import Path
from typing import Any

import pytest
from tests.conftest import PROJECT

from operations import Schema
from operations.openapi import HTTPServiceConfig, from_openapi, from_openapi_file
from operations.openapi.source.diagnosis import Diagnosis, accepts_nothing, diagnose
from operations.schema.plans import Plan

DOCUMENTS = PROJECT.parent / "shared" / "openapi"
CONFIG = HTTPServiceConfig(namespace="api", base_url="https://api.example")


def described(**content: Any) -> dict[str, Any]:
    return {"description": "", "content": {"application/json": content}}


def operation(name: str, **more: Any) -> dict[str, Any]:
    return {"operationId": name, "responses": {"200": {"description": ""}}, **more}


def parameter(name: str, place: str = "query", **schema: Any) -> dict[str, Any]:
    return {"in": place, "name": name, "required": True, "schema": schema}


ITEM = {"type": "object", "properties": {"id": {"type": "integer"}}, "additionalProperties": False}
DOCUMENT: dict[str, Any] = {
    "openapi": "3.1.0",
    "info": {"title": "test", "version": "1"},
    "paths": {
        "/impossible": {
            "get": operation(
                "impossible",
                parameters=[
                    parameter("a", type="integer", minimum=3, maximum=2),
                    parameter("b", type="string", enum=["x", "y"], maxLength=0),
                    parameter("fine", type="string", enum=["x", "y"]),
                ],
            )
        },
        "/headers": {
            "get": operation(
                "headers",
                parameters=[
                    parameter("Cookie", "header", type="string"),
                    parameter("Accept", "header", type="string"),
                    parameter("X-Plain", "header", type="string"),
                ],
            )
        },
        "/several": {
            "get": operation(
                "several",
                responses={
                    "200": described(schema=ITEM, example={"id": 1}),
                    "202": described(
                        schema=ITEM, examples={"a": {"value": {"id": "2"}}, "b": {"value": [1]}}
                    ),
                    "204": {"description": ""},
                    "404": described(example={"anything": ["at", "all"]}),
                },
            )
        },
        "/lost": {"get": operation("lost", responses={"200": described(schema={"$ref": "#/no"})})},
    },
}


async def found_in(document: dict[str, Any]) -> Diagnosis:
    async with from_openapi(document, CONFIG) as service:
        return await diagnose(service)


async def test_every_kind_of_unsatisfiable_argument_is_found() -> None:
    found = await found_in(DOCUMENT)

    assert found.unsatisfiable == {"api.impossible": ["a", "b"]}
    assert found.hidden_headers == {"api.headers": ["Cookie"]}
    assert found.several_responses == {"api.several": ["200", "202", "204"]}
    assert len(found.unresolved) == 1
    assert "#/no" in found.unresolved[0].reason


async def test_examples_are_compared_with_the_data_of_callers() -> None:
    found = await found_in(DOCUMENT)

    assert found.examples == 4
    assert [(each.operation_id, each.status, each.changes) for each in found.changed] == [
        ("api.several", 202, {"converted": 1})
    ]


@pytest.mark.parametrize("produces", [[{}], [5], True, [[]]], ids=repr)
async def test_a_malformed_media_type_is_ignored(produces: Any) -> None:
    response = {"description": "", "schema": {"type": "integer", "example": "5"}}
    operation = {"operationId": "find", "produces": produces, "responses": {"200": response}}
    found = await found_in({"swagger": "2.0", "paths": {"/a": {"get": operation}}})
    assert [each.changes for each in found.changed] == [{"converted": 1}]


LOOP = {"allOf": [{"$ref": "#/$defs/Loop"}]}
ROOT = {"$defs": {"Never": False, "Text": {"type": "string"}}}


def _plan(schema: Any) -> Plan:
    document = schema if isinstance(schema, bool) else {**ROOT, **schema}
    return Schema(document, lenient=True).compile().plan


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"type": "string", "enum": [1, 2]},
        {"const": "x", "type": "integer"},
        {"minLength": 3, "maxLength": 2},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        {"type": "integer", "allOf": [{"$ref": "#/$defs/Text"}]},
        {"$ref": "#/$defs/Never"},
        {"anyOf": [False, {"$ref": "#/$defs/Never"}]},
        {"type": "object", "required": ["a"], "properties": {"a": False}},
        {"type": "object", "required": ["a"], "additionalProperties": False},
        {"type": "array", "minItems": 1, "items": False},
    ],
)
def test_a_schema_that_accepts_nothing_is_detected(schema: Any) -> None:
    assert accepts_nothing(_plan(schema), {})


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"type": ["string", "null"], "enum": [None]},
        {"allOf": [{"type": "number"}, {"type": "integer"}]},
        {"$ref": "#/$defs/Loop", "$defs": {"Loop": LOOP}},
        {"$ref": "https://elsewhere.example/schema"},
        {"anyOf": [False, {"type": "string"}]},
        {"type": ["object", "null"], "required": ["a"], "properties": {"a": False}},
        {"type": "array", "items": False},
        {"type": "object", "required": ["a"], "additionalProperties": False, "patternProperties": {"a": {}}},
    ],
)  # fmt: skip
def test_a_satisfiable_schema_is_not_reported(schema: Any) -> None:
    assert not accepts_nothing(_plan(schema), {})


def test_types_that_refer_to_each_other_are_examined_once() -> None:
    names = "abcdefgh"
    properties = {name: {"$ref": "#/$defs/Node"} for name in names}
    node = {"type": "object", "required": list(names), "properties": properties}
    known: dict[Plan, bool] = {}
    assert not accepts_nothing(_plan({"$ref": "#/$defs/Node", "$defs": {"Node": node}}), known)
    assert len(known) < 2 * len(names)


@pytest.mark.skipif(not DOCUMENTS.exists(), reason="the shared documents are not here")
@pytest.mark.parametrize("name", ["adyen__AccountService-v6.json", "pagerduty__scim.json"])
async def test_documents_of_vendors_are_examined(name: str) -> None:
    async with await from_openapi_file(Path(DOCUMENTS / name), CONFIG) as service:
        found = await diagnose(service)

    assert found.unsatisfiable == {}
    assert found.examples > 40
    assert all(each.changes.keys() <= {"stripped", "filled"} for each in found.changed)
