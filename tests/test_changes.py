"""Changes of normalisation at every entry point, and the settings of the policy."""

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp import web
from mcp import Client as MCPClient
from tests.mcp_serving.support import ERAS
from tests.openapi.serving import serving as serving_http
from tests.server.asgi import Client

from operations import (
    HTTPResponseMeta,
    OperationContext,
    OperationRegistry,
    OperationSpec,
    Schema,
    local_envelope,
)
from operations.base.types import JSONObject
from operations.calls import CallGraph, from_calls, serve_calls
from operations.contract.envelopes import read_changes
from operations.contract.specs import Operation, OperationType, OutputPolicy
from operations.mcp import MCPClientConfig, connect_mcp, to_mcp
from operations.openapi import HTTPServiceConfig, from_openapi, to_openapi
from operations.pubsub.memory import MemoryTarget
from operations.server import create_app
from operations.server.http11.running import running
from operations.telemetry import CallMetrics

pytestmark = pytest.mark.requirement("R52")

ROW: JSONObject = {
    "type": "object",
    "properties": {
        "id": {"type": "integer"},
        "state": {"enum": ["active"]},
        "size": {"type": "integer", "default": 3},
    },
    "required": ["id"],
}
SENT: JSONObject = {"id": "5", "state": "paused", "extra": True}
MATCHING: JSONObject = {**SENT, "state": "active"}
KINDS = {"mismatch": 1, "stripped": 1, "filled": 1, "converted": 1}


def rows(
    policy: OutputPolicy | None = None, sent: JSONObject = SENT, *, exact: bool | None = None
) -> OperationRegistry:
    """Return a registry whose results have one change of each kind."""

    async def get(input: Any, context: OperationContext) -> Any:
        return sent

    async def watch(input: Any, context: OperationContext) -> AsyncIterator[Any]:
        yield sent
        yield sent

    registry = OperationRegistry()
    for name, kind, handler in (
        ("get", OperationType.QUERY, get),
        ("watch", OperationType.SUBSCRIPTION, watch),
    ):
        spec = OperationSpec(namespace="row", name=name, type=kind, output_schema=Schema(ROW))
        registry.register(Operation(spec, handler, policy, exact_schemas=exact))
    return registry


def kinds(changes: Any) -> dict[str, int]:
    return {
        change["kind"] if isinstance(change, dict) else change.kind: (
            change["count"] if isinstance(change, dict) else change.count
        )
        for change in changes
    }


async def test_python_callers_see_every_change() -> None:
    envelope = await rows().execute("row.get")

    assert envelope.data == {"id": 5, "state": "paused", "size": 3}
    assert kinds(envelope.meta.changes) == KINDS
    assert envelope.meta.changes[0].kind == "mismatch"
    assert envelope.meta.changes_count == 4


async def test_http_callers_see_their_number_and_all_of_them_on_request() -> None:
    client = Client(create_app(rows()))

    plain = await client.get("/row/get")
    with_meta = await client.get("/row/get", headers={"operations-meta": "true"})
    called = await client.post("/call", json={"operation": "row.get", "input": {}})

    assert plain.headers["operations-changes"] == "4"
    assert kinds(json.loads(with_meta.headers["operations-meta"])["changes"]) == KINDS
    assert kinds(called.json["meta"]["changes"]) == KINDS
    unchanged = await Client(create_app(rows("off"))).get("/row/get")
    assert "operations-changes" not in unchanged.headers


@pytest.mark.parametrize("era", ERAS)
async def test_mcp_clients_see_them_in_meta_and_our_importer_restores_them(era: Any) -> None:
    server = to_mcp(rows(sent=MATCHING))
    repaired = {"stripped": 1, "filled": 1, "converted": 1}
    async with MCPClient(server, mode=era) as client:
        result = await client.call_tool("row__get", {})
        stream = await client.call_tool("row__watch", {})
    assert result.meta is not None
    noted = result.meta["alkdev.operations/changes"]
    assert kinds(noted["changes"]) == repaired
    assert noted["changesCount"] == 3
    assert stream.meta is not None
    assert stream.meta["alkdev.operations/changes"]["changesCount"] == 6

    config = MCPClientConfig(server=server, output="off", trust_annotations=True)
    async with connect_mcp("far", config) as far:
        envelope = await OperationRegistry(far).execute("row.get", {})
    assert kinds(envelope.meta.changes) == repaired


@pytest.mark.parametrize("era", ERAS)
async def test_mcp_clients_see_a_mismatch_as_an_error_of_a_call_that_ran(era: Any) -> None:
    async with MCPClient(to_mcp(rows()), mode=era) as client:
        results = [await client.call_tool(name, {}) for name in ("row__get", "row__watch")]

    for result, count in zip(results, (1, 2), strict=True):
        assert result.is_error
        assert result.meta is not None
        details = result.meta["alkdev.operations/error"]["details"]
        assert kinds(details["mismatches"]) == {"mismatch": count}


async def test_our_importer_restores_them_from_http() -> None:
    here = OperationRegistry()
    there = rows("keep")
    async with running(create_app(there)) as url:
        config = HTTPServiceConfig("far", base_url=url, restore=True)
        async with from_openapi(to_openapi(there), config) as far:
            here.register_all(far)
            envelope = await here.execute("row.get", {})

    assert envelope.data == {"id": 5, "state": "paused", "size": 3}
    assert kinds(envelope.meta.changes) == KINDS
    assert envelope.meta.changes_count == 4
    assert isinstance(envelope.meta, HTTPResponseMeta)
    assert "operations-meta" not in envelope.meta.headers


def test_the_number_of_changes_is_kept_if_they_do_not_fit_a_header() -> None:
    envelope = read_changes(local_envelope(1, "a.b"), {"omitted": True, "changesCount": 300})

    assert (envelope.meta.changes, envelope.meta.changes_count) == ((), 300)


def test_an_undeclared_name_is_counted_in_full_among_many_others() -> None:
    schema = Schema({"type": "array", "items": ROW})
    sent = [{"id": 1, f"other {index}": 1, "extra": 1} for index in range(150)]

    changes = schema.cast(sent).changes

    (extra,) = [change for change in changes if change.path == "/0/extra"]
    assert extra.count == 150
    assert sum(change.count for change in changes if change.kind == "stripped") == 300


async def test_a_later_hop_appends_its_own_changes() -> None:
    target = MemoryTarget()
    here = OperationRegistry()
    async with serve_calls(rows("keep"), target), from_calls(target) as service:
        here.register_all(service)
        envelope = await here.execute("row.get")

    assert envelope.data == {"id": 5, "state": "paused", "size": 3}
    assert kinds(envelope.meta.changes) == KINDS


async def test_a_later_hop_does_not_count_changes_beyond_the_limit_again() -> None:
    names = [f"p{number}" for number in range(30)]
    schema = Schema({"type": "object", "properties": {name: {"type": "integer"} for name in names}})

    async def many(input: Any, context: OperationContext) -> JSONObject:
        return {**dict.fromkeys(names, "x"), "more": 1}

    spec = OperationSpec(
        name="many", namespace="test", type=OperationType.QUERY, output_schema=schema
    )
    first, target = OperationRegistry([Operation(spec, many)]), MemoryTarget()
    async with serve_calls(first, target), from_calls(target) as remote:
        second = OperationRegistry(remote)
        here, there = await first.execute("test.many"), await second.execute("test.many")

    assert here.meta.changes_count == there.meta.changes_count == 31
    assert here.meta.changes == there.meta.changes


async def test_metrics_and_the_call_graph_count_changes_by_kind() -> None:
    registry = rows()
    metrics, graph = CallMetrics(registry), CallGraph()
    registry.record(graph)

    await registry.execute("row.get")
    _ = [item async for item in registry.subscribe("row.watch")]

    lines = metrics.render().decode().splitlines()
    assert 'operations_changes_total{operation="row.get",kind="stripped"} 1' in lines
    assert 'operations_changes_total{operation="row.watch",kind="stripped"} 2' in lines
    assert [record.changes["mismatch"] for record in graph] == [1, 2]


OPENAPI: JSONObject = {
    "openapi": "3.1.0",
    "info": {"title": "Rows", "version": "1"},
    "paths": {
        "/row": {
            "get": {
                "operationId": "get",
                "responses": {
                    "200": {"description": "", "content": {"application/json": {"schema": ROW}}}
                },
            }
        }
    },
}


@pytest.mark.parametrize("policy", [None, "keep", "off"])
async def test_an_imported_service_has_a_policy_of_its_own(policy: OutputPolicy | None) -> None:
    expected = {
        None: {"id": 5, "state": "paused", "size": 3},
        "keep": {"id": 5, "state": "paused", "extra": True, "size": 3},
        "off": SENT,
    }[policy]
    registry = OperationRegistry()
    target = MemoryTarget()

    async def respond(request: web.Request) -> web.StreamResponse:
        return web.json_response(SENT)

    async with (
        serving_http(respond) as url,
        from_openapi(OPENAPI, {"namespace": "http", "base_url": url, "output": policy}) as http,
        connect_mcp(
            "mcp",
            MCPClientConfig(
                server=to_mcp(rows("off", exact=False)),
                output=policy,
                trust_annotations=True,
            ),
        ) as mcp,
        serve_calls(rows("off"), target),
        from_calls(target, namespace="calls", output=policy) as calls,
    ):
        for service in (http, mcp, calls):
            registry.register_all(service)
        results = {
            name: (await registry.execute(name, {})).data
            for name in ("http.get", "row.get", "calls.row.get")
        }

    assert results == dict.fromkeys(results, expected)


CONFIGURABLE: list[Callable[[Any], Any]] = [
    rows,
    lambda output: OperationRegistry(output=output),
    lambda output: OperationRegistry().operation("a.b", output=output)(lambda: 1),
    lambda output: from_calls(MemoryTarget(), output=output),
    lambda output: MCPClientConfig(command="server", output=output),
    lambda output: HTTPServiceConfig("api", output=output),
]


@pytest.mark.parametrize("configure", CONFIGURABLE)
@pytest.mark.parametrize("output", ["stric", "", 5])
def test_a_policy_that_does_not_exist_is_rejected(configure: Any, output: Any) -> None:
    with pytest.raises(ValueError, match="output must be one of cast, keep, create"):
        configure(output)


async def test_the_policy_of_the_operation_overrides_the_registry() -> None:
    registry = OperationRegistry(output="off")
    strict = rows("keep").get("row.get")
    assert strict is not None
    registry.register(strict)

    assert "size" in (await registry.execute("row.get")).data
