"""`to_openapi`, and importing its result."""

import json
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from openapi_spec_validator import validate

from operations import (
    AccessControl,
    ErrorDefinition,
    Operation,
    OperationContext,
    OperationRegistry,
    OperationSpec,
    OperationType,
    from_schema,
)
from operations.openapi import HTTPServiceConfig, from_openapi
from operations.openapi.serving import to_openapi
from operations.openapi.serving.components import (
    Components,
    has_definitions,
    item_schema,
    read_extension,
    restore_schema,
)


async def nothing(input: Any, context: OperationContext) -> None:
    pass


async def no_items(input: Any, context: OperationContext) -> AsyncGenerator[None]:
    return
    yield


def spec(**fields: Any) -> OperationSpec:
    return OperationSpec(**{"namespace": "test", "name": "run", "type": "query", **fields})


def document_of(*specs: OperationSpec, **options: Any) -> Any:
    document = to_openapi(specs, **options)
    validate(document)
    return document


def restored(document: Any, operation_id: str) -> OperationSpec:
    """The spec of an operation, from the document alone."""
    namespace, _, name = operation_id.partition(".")
    operation = document["paths"][f"/{namespace}/{name}"]["post"]
    exported = read_extension(operation)
    assert exported is not None
    assert exported.type is not None
    shared = document["components"]["schemas"]
    content = operation["responses"]["200"]["content"]
    output = (
        item_schema(content["text/event-stream"]["schema"])
        if exported.type is OperationType.SUBSCRIPTION
        else content.get("application/json", {}).get("schema")
    )
    given = operation["requestBody"]["content"]["application/json"]["schema"]

    def schema(shown: Any, whole: Any) -> Any:
        return whole if whole is not None else restore_schema(shown, shared, exported.components)

    return OperationSpec(
        namespace=namespace,
        name=name,
        version=exported.version,
        type=exported.type,
        title=None if exported.untitled else operation["summary"],
        description=operation.get("description", ""),
        tags=exported.own_tags(tuple(operation["tags"])),
        input_schema=from_schema(schema(given, exported.input_schema)),
        output_schema=from_schema(schema(output, exported.output_schema)),
        error_schemas=exported.error_schemas(shared),
        idempotent=exported.idempotent,
    )


@dataclass
class Node:
    value: int
    children: "list[Node]"


def build() -> OperationRegistry:
    registry = OperationRegistry()
    gone = ErrorDefinition("GONE", "It is gone.", from_schema({"type": "object"}), 410)
    busy = ErrorDefinition("BUSY", "Later.", from_schema({}), 422)

    @registry.operation("tree.get", type="query", errors=[gone, busy], title="Get", tags=["t"])
    async def get(id: int, deep: bool = False, near: Node | None = None) -> Node:
        """One node."""
        raise NotImplementedError

    @registry.operation("tree.add", scopes=["write", "tree"], version="2.1.0", idempotent=True)
    async def add(node: Node) -> bytes:
        """Add a node."""
        return b""

    @registry.operation("tree.watch")
    async def watch(ids: list[int]):  # type: ignore[no-untyped-def]
        """Follow nodes."""
        yield Node(1, [])

    return registry


def test_a_registry_becomes_a_valid_document_of_its_api() -> None:
    document = to_openapi(build(), title="Trees", version="3.0", description="All of them.")
    validate(document)

    assert document["openapi"].startswith("3.1.")
    assert document["info"] == {"title": "Trees", "version": "3.0", "description": "All of them."}
    paths = document["paths"]
    assert {path: sorted(item) for path, item in paths.items()} == {
        "/tree/add": ["post"],
        "/tree/get": ["get", "post"],
        "/tree/watch": ["get", "post"],
    }
    identifiers = [
        operation["operationId"] for item in paths.values() for operation in item.values()
    ]
    assert len(set(identifiers)) == 5
    get = paths["/tree/get"]["get"]
    assert [(p["name"], p["required"], sorted(p.keys() & {"schema", "content"})) for p in get["parameters"]] == [
        ("id", True, ["schema"]), ("deep", False, ["schema"]), ("near", False, ["schema"]),
    ]  # fmt: skip
    assert paths["/tree/watch"]["get"]["parameters"][0]["schema"]["minItems"] == 1
    assert "text/event-stream" in paths["/tree/watch"]["post"]["responses"]["200"]["content"]


def test_a_query_parameter_describes_only_what_a_query_can_express() -> None:
    nullable: Any = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
    properties: Any = {
        "pick": {"enum": ["a", 1, None], "default": None},
        "tags": {"type": "array", "items": {"type": "string"}, "default": []},
        "ids": {"type": "array", "items": nullable, "default": [1]},
    }
    document = document_of(
        spec(input_schema=from_schema({"type": "object", "properties": properties}))
    )

    item = document["paths"]["/test/run"]
    assert {each["name"]: each["schema"] for each in item["get"]["parameters"]} == {
        "pick": {"enum": ["a", 1]},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 1},
        "ids": {"type": "array", "items": {"type": "integer"}, "default": [1], "minItems": 1},
    }
    body = item["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body["properties"] == properties


def test_a_query_parameter_in_json_describes_null_only_if_its_absence_is_something_else() -> None:
    anything = {"anyOf": [{"type": "array", "items": {}}, {"type": "null"}]}
    properties: Any = {
        "absent": {**anything, "default": None},
        "typed": {"type": ["object", "null"], "default": None},
        "other": {**anything, "default": [1]},
        "given": anything,
    }
    schema = {"type": "object", "properties": properties, "required": ["given"]}
    document = document_of(spec(input_schema=from_schema(schema)))

    parameters = document["paths"]["/test/run"]["get"]["parameters"]
    found = {each["name"]: each["schema"]["contentSchema"] for each in parameters}
    assert found == {
        "absent": {"type": "array", "items": {}},
        "typed": {"type": "object"},
        "other": {**anything, "default": [1]},
        "given": anything,
    }


@pytest.mark.parametrize(
    "schema", [{"type": ["null"]}, {"anyOf": [{"type": "null"}]}, {"enum": [None]}], ids=str
)
def test_a_query_parameter_that_can_only_be_null_has_a_valid_description(schema: Any) -> None:
    document = document_of(spec(input_schema={"type": "object", "properties": {"x": schema}}))

    (parameter,) = document["paths"]["/test/run"]["get"]["parameters"]
    assert parameter["schema"] == schema


_BYTES: Any = {"type": "string", "contentEncoding": "base64"}
_BINARY: Any = {"schema": {"type": "string", "format": "binary"}}


@pytest.mark.parametrize(
    ("output", "content"),
    [
        (_BYTES, {"application/octet-stream": _BINARY}),
        ({**_BYTES, "contentMediaType": "image/png"}, {"image/png": _BINARY}),
        (
            {"anyOf": [_BYTES, {"type": "null"}]},
            {
                "application/octet-stream": _BINARY,
                "application/json": {"schema": {"const": None}},
            },
        ),
        (
            {"oneOf": [_BYTES, {"type": "integer"}, {"type": "object"}]},
            {
                "application/octet-stream": _BINARY,
                "application/json": {
                    "schema": {"oneOf": [{"type": "integer"}, {"type": "object"}]}
                },
            },
        ),
    ],
    ids=["bytes", "picture", "optional", "union"],
)
def test_bytes_are_declared_as_they_are_sent(output: Any, content: Any) -> None:
    document = document_of(spec(output_schema=output))

    for method in ("get", "post"):
        result = document["paths"]["/test/run"][method]["responses"]["200"]
        assert result["content"] == content
    assert restored(document, "test.run").output_schema.document == output


def test_optional_bytes_are_described_without_trust_in_the_export() -> None:
    document = document_of(spec(output_schema={"anyOf": [_BYTES, {"type": "null"}]}))
    config = HTTPServiceConfig(namespace="api", base_url="http://127.0.0.1:1")

    for operation in from_openapi(document, config):
        schema = operation.spec.output_schema
        assert schema.check(None)
        assert schema.check("AQI=")
        assert not schema.check(1)


def test_the_media_type_of_an_imported_file_is_declared() -> None:
    good = {"description": "A picture.", "content": {"image/png": {}}}
    imported = from_openapi(
        {
            "openapi": "3.1.0",
            "info": {"title": "Pictures", "version": "1"},
            "paths": {"/picture": {"get": {"operationId": "get", "responses": {"200": good}}}},
        },
        HTTPServiceConfig(namespace="pictures", base_url="http://127.0.0.1:1"),
    )

    document = document_of(*(operation.spec for operation in imported))
    responses = document["paths"]["/pictures/get"]["get"]["responses"]
    assert responses["200"]["content"] == {"image/png": _BINARY}


@pytest.mark.parametrize(
    ("title", "description", "summary"),
    [
        ("Get", "Return a node. Or not.", "Get"),
        (
            None,
            "Return a node, e.g. a leaf,\nby its id. It has\n\nmore text.",
            "Return a node, e.g. a leaf, by its id",
        ),
        (None, "", "test.run"),
        (None, "word " * 50, "word " * 22 + "word..."),
    ],
)
def test_every_operation_has_a_summary_because_linters_require_it(
    title: str | None, description: str, summary: str
) -> None:
    untitled = spec(title=title, description=description)
    document = document_of(untitled)

    assert {each["summary"] for each in document["paths"]["/test/run"].values()} == {summary}
    assert restored(document, "test.run") == untitled


def test_every_response_component_is_used() -> None:
    assert "Denied" in to_openapi(build())["components"]["responses"]
    assert "Denied" not in to_openapi([spec()])["components"]["responses"]


def test_a_stream_is_a_text_of_events_and_only_a_message_has_no_name() -> None:
    document = document_of(spec(type="subscription"))

    content = document["paths"]["/test/run"]["post"]["responses"]["200"]["content"]
    stream = content["text/event-stream"]["schema"]
    assert stream["type"] == "string"
    events = stream["contentSchema"]["anyOf"]
    assert [each["required"] for each in events] == [["data"], ["event", "data"], ["event", "data"]]


def test_declared_errors_are_responses() -> None:
    responses = to_openapi(build())["paths"]["/tree/get"]["post"]["responses"]

    assert set(responses) == {"200", "400", "401", "410", "422", "default"}
    gone = responses["410"]["content"]["application/json"]["schema"]
    assert gone["properties"]["code"] == {"const": "GONE"}
    # The declared error of a status that has other meanings, too.
    both = responses["422"]["content"]["application/json"]["schema"]["anyOf"]
    assert [member.get("$ref", member.get("properties", {}).get("code")) for member in both] == [
        {"const": "BUSY"},
        "#/components/schemas/Error",
    ]


def test_security_is_declared_for_operations_that_require_access() -> None:
    document = to_openapi(build())

    assert document["paths"]["/tree/add"]["post"]["security"] == [{"bearer": ["write", "tree"]}]
    assert "403" in document["paths"]["/tree/add"]["post"]["responses"]
    assert "security" not in document["paths"]["/tree/get"]["post"]
    assert document["security"] == []
    assert list(document["components"]["securitySchemes"]) == ["bearer"]
    own = to_openapi(
        build(), security_schemes={"key": {"type": "apiKey", "in": "header", "name": "k"}}
    )
    assert own["paths"]["/tree/add"]["post"]["security"] == [{"key": ["write", "tree"]}]
    assert "securitySchemes" not in to_openapi([spec()])["components"]


def test_only_schemas_that_are_used_are_kept_and_each_once() -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}}
    other = {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}, "title": "other"}
    using = {"$ref": "#/$defs/Node"}
    document = document_of(
        spec(
            name="a", output_schema={**using, "$defs": {"Node": node, "Unused": {"type": "string"}}}
        ),
        spec(name="b", output_schema={**using, "$defs": {"Node": node}}),
        spec(name="c", output_schema={**using, "$defs": {"Node": other}}),
        spec(name="d", output_schema={**using, "$defs": {"Node": other}}),
    )

    assert sorted(document["components"]["schemas"]) == ["Error", "Node", "Node_2"]
    assert [
        document["paths"][f"/test/{name}"]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
        for name in "abcd"
    ] == [{"$ref": f"#/components/schemas/{name}"} for name in ("Node", "Node", "Node_2", "Node_2")]  # fmt: skip
    for name in "abcd":
        assert restored(document, f"test.{name}").output_schema.document != {}


def test_definitions_that_differ_only_in_references_stay_separate() -> None:
    def using(leaf: dict[str, Any]) -> dict[str, Any]:
        tree = {"properties": {"leaf": {"$ref": "#/$defs/Leaf"}}}
        return {"$ref": "#/$defs/Tree", "$defs": {"Tree": tree, "Leaf": leaf}}

    specs = [
        spec(name="a", output_schema=using({"type": "string"})),
        spec(name="b", output_schema=using({"type": "integer"})),
        spec(name="c", output_schema=using({"type": "integer"})),
    ]
    document = document_of(*specs)

    assert sorted(document["components"]["schemas"]) == [
        "Error",
        "Leaf",
        "Leaf_2",
        "Tree",
        "Tree_2",
    ]
    for exported in specs:
        assert restored(document, exported.id) == exported


@pytest.mark.parametrize(
    "schema",
    [
        True,
        False,
        {},
        {"type": "string", "contentEncoding": "base64"},
        {"type": "object", "properties": {"self": {"$ref": "#"}}},
        {"properties": {"a": {"type": "string"}, "b": {"$ref": "#/properties/a"}}},
        {"$ref": "#/definitions/x", "definitions": {"x": {"type": "string"}}},
        {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "string"}}},
        {"$ref": "#/$defs/a b", "$defs": {"a b": {"type": "string"}}},
        {"$ref": "#/$defs/x/properties/y", "$defs": {"x": {"properties": {"y": {"type": "null"}}}}},
        {"$ref": "#/$defs/Error", "$defs": {"Error": {"type": "string"}}},
        {"$ref": "#/$defs/t", "$defs": {"t": True}},
        {"enum": [{"$ref": "#/$defs/nowhere"}], "default": {"$ref": "x"}},
        {"$id": "http://example.org/x", "$ref": "#/$defs/y", "$defs": {"y": {"type": "string"}}},
        {"$ref": "#name", "$defs": {"y": {"$anchor": "name", "type": "string"}}},
        {"$schema": "http://json-schema.org/draft-07/schema#", "items": [{"type": "string"}]},
        {"items": [{"type": "string"}]},
        {"$ref": "http://json-schema.org/draft-07/schema#"},
        {"oneOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    ],
    ids=range(19),
)  # fmt: skip
def test_every_schema_round_trips(schema: Any) -> None:
    exported = spec(type="mutation", input_schema=schema, output_schema=schema)
    document = document_of(exported)

    back = restored(document, "test.run")
    if schema is True or schema == {"$ref": "#/$defs/t", "$defs": {"t": True}}:
        schema = {} if schema is True else {"$ref": "#/$defs/t", "$defs": {"t": {}}}
    elif schema is False:
        schema = {"not": {}}
    assert back.input_schema.document == schema
    assert back.output_schema.document == schema


def test_a_named_result_is_one_component_for_all_operations() -> None:
    task = {
        "title": "Task",
        "type": "object",
        "properties": {"id": {"type": "integer"}, "parent": {"$ref": "#/$defs/Task"}},
    }
    whole = {**task, "$defs": {"Task": task}}
    plain = {"title": "Plain", "type": "object", "properties": {"id": {"type": "integer"}}}
    other = {**plain, "properties": {"id": {"type": "string"}}}
    outputs = {"a": whole, "b": whole, "c": plain, "d": plain, "e": other}
    using = {"type": "object", "properties": {"x": {"$ref": "#/$defs/Plain"}}}
    specs = [
        spec(name=name, input_schema={**using, "$defs": {"Plain": plain}}, output_schema=output)
        for name, output in outputs.items()
    ]
    document = document_of(*specs)

    assert sorted(document["components"]["schemas"]) == ["Error", "Plain", "Plain_2", "Task"]
    found = [
        document["paths"][f"/test/{name}"]["post"]["responses"]["200"]["content"][
            "application/json"
        ]["schema"]["$ref"].rpartition("/")[2]
        for name in outputs
    ]
    assert found == ["Task", "Task", "Plain", "Plain", "Plain_2"]
    for exported in specs:
        assert restored(document, exported.id) == exported


def test_subschemas_are_objects_because_client_generators_require_it() -> None:
    pair = {"type": "array", "prefixItems": [{"type": "integer"}, True], "items": False}
    schema = {
        "type": "object",
        "properties": {"pair": pair, "any": True, "shared": {"$ref": "#/$defs/shared"}},
        "additionalProperties": False,
        "$defs": {"shared": {"type": "object", "properties": {"none": False}}},
    }
    exported = spec(type="mutation", input_schema=schema, output_schema=True)
    document = document_of(exported)

    (content,) = document["paths"]["/test/run"]["post"]["requestBody"]["content"].values()
    found = content["schema"]
    assert found["properties"]["any"] == {}
    assert found["properties"]["pair"]["prefixItems"][1] == {}
    assert found["additionalProperties"] is False
    shared = document["components"]["schemas"]["shared"]
    assert shared["properties"] == {"none": {"not": {}}}
    back: Any = restored(document, "test.run").input_schema.document
    assert back["properties"]["pair"]["items"] is False
    assert back["$defs"] == schema["$defs"]


def test_arrays_have_items_because_linters_and_client_generators_require_it() -> None:
    schema = {"type": "object", "properties": {"bare": {"type": ["array", "null"]}}}
    exported = spec(type="mutation", input_schema=schema)
    document = document_of(exported)

    operation = document["paths"]["/test/run"]["post"]
    (content,) = operation["requestBody"]["content"].values()
    bare = {"type": ["array", "null"], "items": {"description": "Any value."}}
    assert content["schema"]["properties"] == {"bare": bare}
    assert restored(document, "test.run") == exported


_INTEGER = {"type": "integer"}
_STRING = {"type": "string"}
_LIST = {"type": "array", "items": _STRING}


@pytest.mark.parametrize(
    ("given", "items", "limit"),
    [
        ({"prefixItems": [_INTEGER, _STRING], "maxItems": 2}, [_INTEGER, _STRING], 2),
        ({"prefixItems": [_INTEGER], "items": False}, [_INTEGER, _INTEGER], 1),
        ({"prefixItems": [_INTEGER, _STRING], "items": False, "maxItems": 1}, [_INTEGER, _STRING], 1),
        ({"prefixItems": [_LIST, _STRING], "items": False}, [{}, {}], 2),
        ({"prefixItems": [_INTEGER, _STRING]}, [{}, {}], None),
    ],
    ids=["limited", "closed", "both", "nested", "open"],
)  # fmt: skip
def test_tuples_have_a_union_as_items_because_client_generators_fail_for_false(
    given: Any, items: Any, limit: Any
) -> None:
    exported = spec(
        type="mutation",
        input_schema={"type": "object", "properties": {"pair": {"type": "array", **given}}},
    )
    document = document_of(exported)

    (content,) = document["paths"]["/test/run"]["post"]["requestBody"]["content"].values()
    pair = content["schema"]["properties"]["pair"]
    assert (pair["items"]["anyOf"], pair.get("maxItems")) == (items, limit)
    assert restored(document, "test.run") == exported


def test_the_first_tag_is_the_namespace_because_client_generators_group_by_it() -> None:
    specs = [
        spec(namespace="a", tags=("x", "y")),
        spec(namespace="b", tags=("x", "b"), type="mutation"),
        spec(namespace="c"),
    ]
    document = document_of(*specs)

    tags = {path: item["post"]["tags"] for path, item in document["paths"].items()}
    assert tags == {"/a/run": ["a", "x", "y"], "/b/run": ["b", "x"], "/c/run": ["c"]}
    assert [each["name"] for each in document["tags"]] == ["a", "x", "y", "b", "c"]
    assert document["paths"]["/a/run"]["get"]["tags"] == ["a", "x", "y"]
    for exported in specs:
        assert restored(document, exported.id).tags == exported.tags


def test_arrays_are_restored_with_and_without_items() -> None:
    schema = {
        "type": "object",
        "properties": {
            "bare": {"anyOf": [{"type": "array"}, {"type": "null"}]},
            "open": {"type": "array", "items": {}},
            "named": {"$ref": "#/$defs/Named"},
        },
        "$defs": {"Named": {"type": "array"}},
    }
    exported = spec(input_schema=schema, output_schema={"type": "array"})

    assert restored(document_of(exported), "test.run") == exported


def test_a_result_that_is_always_null_has_no_type_because_client_generators_fail_for_it() -> None:
    exported = spec(type="mutation", output_schema={"type": "null"})
    document = document_of(exported)

    content = document["paths"]["/test/run"]["post"]["responses"]["200"]["content"]
    assert content == {"application/json": {"schema": {"const": None}}}
    assert restored(document, "test.run") == exported


def test_the_same_operations_produce_the_same_text_in_any_order() -> None:
    operations = list(build())

    texts = {json.dumps(to_openapi(order)) for order in (operations, operations[::-1], build())}

    assert len(texts) == 1


def test_an_empty_registry_has_a_valid_document() -> None:
    assert document_of()["paths"] == {}


def test_an_unreadable_extension_is_ignored() -> None:
    for odd in (
        {},
        {"x-operations": 7},
        {"x-operations": {"id": 7}},
        {"x-operations": {"type": "x"}},
    ):
        assert read_extension(odd) is None
    assert item_schema({"type": "string"}) == {"type": "string"}


# ------------------------------------------------------------ any registry

NAMES = st.from_regex(r"[A-Za-z][A-Za-z0-9_]{0,6}", fullmatch=True)
LEAVES: st.SearchStrategy[Any] = st.sampled_from([
    {}, True, {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": ["null", "number"]},
    {"enum": ["a", 1, None]}, {"const": False}, {"type": "string", "format": "date-time"},
])  # fmt: skip
REFERENCES = st.sampled_from(["#/$defs/A", "#/$defs/B", "#"]).map(lambda ref: {"$ref": ref})
SCHEMAS = st.recursive(
    LEAVES | REFERENCES,
    lambda inner: st.one_of(
        st.fixed_dictionaries(
            {"type": st.just("object"), "properties": st.dictionaries(NAMES, inner, max_size=3)},
            optional={"additionalProperties": st.booleans()},
        ),
        st.fixed_dictionaries({"type": st.just("array"), "items": inner}),
        st.fixed_dictionaries({"anyOf": st.lists(inner, min_size=1, max_size=3)}),
    ),
    max_leaves=6,
)


@st.composite
def roots(draw: st.DrawFn) -> Any:
    root = draw(SCHEMAS)
    if not isinstance(root, dict) or root == {"$ref": "#"}:
        return {"type": "object"}
    return {**root, "$defs": {"A": draw(SCHEMAS), "B": draw(LEAVES)}}


@st.composite
def specs(draw: st.DrawFn) -> OperationSpec:
    return OperationSpec(
        namespace=draw(NAMES),
        name=draw(NAMES),
        version=draw(st.sampled_from(["1.0.0", "2.3.4-beta"])),
        type=draw(st.sampled_from(OperationType)),
        title=draw(st.none() | st.text(min_size=1, max_size=10)),
        description=draw(st.text(max_size=10)),
        tags=tuple(draw(st.lists(NAMES, max_size=2))),
        input_schema=from_schema(draw(roots()), lenient=True),
        output_schema=from_schema(draw(roots()), lenient=True),
        error_schemas=tuple(
            ErrorDefinition(code, "Why.", from_schema(draw(LEAVES)), draw(st.none() | st.integers(400, 599)))
            for code in draw(st.lists(NAMES, max_size=2, unique=True))
        ),
        access_control=draw(st.sampled_from([AccessControl(), AccessControl(["a"])])),
        idempotent=draw(st.booleans()),
    )  # fmt: skip


def used_only(schema: Any) -> Any:
    """A schema as it comes back: without unused definitions, and with `true` as `{}`."""
    components = Components({})
    placed = components.place(schema, "x")
    return schema if placed is None else restore_schema(placed[0], components.schemas, placed[1])


@settings(max_examples=15, deadline=None)
@given(st.lists(specs(), max_size=4, unique_by=lambda s: s.id.lower()))
def test_an_exported_schema_is_read_back_unchanged(exported: list[OperationSpec]) -> None:
    registry = OperationRegistry(
        Operation(each, no_items if each.type is OperationType.SUBSCRIPTION else nothing)
        for each in exported
    )
    document = json.loads(json.dumps(to_openapi(registry)))

    for each in exported:
        back = restored(document, each.id)
        assert back.input_schema.document == used_only(each.input_schema.document)
        assert back.output_schema.document == used_only(each.output_schema.document)
        assert back.type is each.type
        assert back.version == each.version
        assert (back.title, back.description, back.tags) == (
            each.title,
            each.description,
            each.tags,
        )
        assert [replace(error, schema=True) for error in back.error_schemas] == [
            replace(error, schema=True) for error in each.error_schemas
        ]
        for here, there in zip(each.error_schemas, back.error_schemas, strict=True):
            expected = here.schema.document
            assert there.schema.document == (
                used_only(expected) if has_definitions(expected) else expected
            )
        assert back.idempotent is each.idempotent


def test_errors_that_share_definitions_do_not_repeat_them() -> None:
    large = {f"D{n}": {"description": "x" * 1000, "type": "string"} for n in range(20)}
    properties = {name: {"$ref": f"#/$defs/{name}"} for name in large}
    why = {"type": "object", "properties": properties, "$defs": large}
    specs = [
        spec(name=f"n{n}", error_schemas=[ErrorDefinition("BAD", "", from_schema(why))])
        for n in range(50)
    ]

    document = document_of(*specs)

    assert len(json.dumps(document)) < 300_000
    assert restored(document, "test.n7").error_schemas[0].schema.document == why


def test_hundreds_of_operations_over_shared_definitions_export_quickly() -> None:
    definitions = {
        f"D{n}": {
            "type": "object",
            "properties": {"next": {"$ref": f"#/$defs/D{(n * 7 + 1) % 100}"}},
        }
        for n in range(100)
    }
    specs = [
        spec(name=f"n{n}", output_schema={"$ref": f"#/$defs/D{n % 100}", "$defs": definitions})
        for n in range(300)
    ]

    document = to_openapi(specs)

    assert len(document["paths"]) == 300
    assert len(document["components"]["schemas"]) == 101


def test_defaults_that_are_not_of_their_type_are_omitted_and_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    schema: Any = {
        "type": "object",
        "properties": {
            "count": {"type": "integer", "default": "ten"},
            "size": {"type": ["integer", "null"], "default": 1.0},
            "item": {"$ref": "#/$defs/Item"},
        },
        "$defs": {"Item": {"type": "object", "default": None, "properties": {}}},
    }
    given = json.loads(json.dumps(schema))
    document = document_of(spec(input_schema=from_schema(schema)))
    post = document["paths"]["/test/run"]["post"]
    shown = post["requestBody"]["content"]["application/json"]["schema"]["properties"]
    assert shown["count"] == {"type": "integer"}
    assert shown["size"]["default"] == 1.0
    assert "default" not in document["components"]["schemas"]["Item"]
    assert "defaults that do not match their type" in caplog.text
    assert "test.run.input" in caplog.text
    assert "Item" in caplog.text
    assert schema == given

    caplog.clear()
    document_of(spec(input_schema=from_schema({"type": "integer", "default": 3})))
    assert caplog.text == ""


@pytest.mark.requirement("R25")
@pytest.mark.parametrize("kind", ["any", ["file"], {"a": 1}, None])
def test_a_schema_with_an_unknown_type_does_not_hide_other_operations(kind: Any) -> None:
    schema = {"type": "object", "properties": {"x": {"type": kind, "default": 1}}}
    odd = spec(input_schema=from_schema(schema, lenient=True))

    assert len(to_openapi([odd, spec(name="other")])["paths"]) == 2


@pytest.mark.requirement("R25")
@pytest.mark.parametrize(
    "malformed",
    [{"properties": None}, {"properties": {"x": 5}}, {"properties": {"x": {}}, "required": None}],
    ids=str,
)
def test_malformed_parameters_do_not_hide_other_operations(malformed: Any) -> None:
    schema = from_schema({"type": "object", **malformed}, lenient=True)
    document = to_openapi([spec(type="query", input_schema=schema), spec(name="other")])

    assert len(document["paths"]) == 2
    (parameter,) = document["paths"]["/test/run"]["get"]["parameters"]
    assert parameter["name"] == "input"


def test_a_discriminator_refers_to_the_components() -> None:
    """Generators such as openapi-typescript resolve its mapping, and fail if a target is missing."""
    pet: Any = {
        "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
        "discriminator": {
            "propertyName": "kind",
            "mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"},
        },
    }
    cat, dog = ({"type": "object", "properties": {"kind": {"const": n}}} for n in ("cat", "dog"))
    schema: Any = {
        "type": "object",
        "properties": {"pet": pet},
        "$defs": {"Cat": cat, "Dog": dog},
    }

    def shown(document: Any) -> Any:
        (media,) = document["paths"]["/test/run"]["post"]["responses"]["200"]["content"].values()
        return media["schema"]["properties"]["pet"]["discriminator"]

    document = document_of(spec(output_schema=from_schema(schema)))

    moved = {"cat": "#/components/schemas/Cat", "dog": "#/components/schemas/Dog"}
    assert shown(document) == {"propertyName": "kind", "mapping": moved}
    assert restored(document, "test.run").output_schema == from_schema(schema)
    pet["discriminator"]["mapping"]["fox"] = "#/$defs/Fox"
    assert shown(document_of(spec(output_schema=from_schema(schema))))["mapping"] == moved


def test_the_items_of_a_stream_are_described_without_trust_in_the_export() -> None:
    registry = OperationRegistry()

    @registry.operation("task.watch")
    async def watch() -> AsyncIterator[int]:
        yield 1

    service = from_openapi(to_openapi(registry), HTTPServiceConfig(namespace="hub"))

    for operation in service:
        assert operation.spec.output_schema.check(1), operation.spec.id


def operation_ids(*names: str) -> dict[str, str]:
    """Return the id of each exported operation, by its operation and method."""
    document = document_of(*(spec(name=name) for name in names))
    return {
        f"{operation['x-operations']['id']} {method}": operation["operationId"]
        for item in document["paths"].values()
        for method, operation in item.items()
    }


def test_operation_ids_differ_in_more_than_punctuation_because_generators_remove_it() -> None:
    assert operation_ids("a.b", "a_b", "aB", "list", "list.get") == {
        "test.a.b post": "test.a.b",
        "test.aB post": "test.aB_e8e00272",
        "test.a_b post": "test.a_b_ca25def3",
        "test.list post": "test.list",
        "test.list.get post": "test.list.get",
        "test.a.b get": "test.a.b.get",
        "test.aB get": "test.aB.get_7a681c8b",
        "test.a_b get": "test.a_b.get_c66721e6",
        "test.list get": "test.list.get_dc182778",
        "test.list.get get": "test.list.get.get",
    }


def test_an_added_operation_changes_the_ids_of_at_most_one_other_operation() -> None:
    before = operation_ids("aB", "a_b", "a_B")
    after = operation_ids("a.b", "aB", "a_b", "a_B")
    changed = {key.partition(" ")[0] for key in before if after[key] != before[key]}
    assert changed == {"test.aB"}


def test_component_names_differ_in_more_than_punctuation_because_generators_remove_it() -> None:
    names = ("Row.A", "Row_A", "rowA", "error")
    definitions = {name: {"type": "object", "title": name} for name in names}
    schema = {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in names], "$defs": definitions}
    exported = spec(output_schema=schema)
    document = document_of(exported)

    shared = document["components"]["schemas"]
    assert list(shared) == ["Error", "Row.A", "Row_A_2", "error_2", "rowA_3"]
    assert restored(document, exported.id) == exported
