"""The W3C trace context of a call reaches observers and upstreams from every entry point."""

from typing import Any

import pytest
from mcp import Client
from tests.mcp_serving.support import serving

from operations import OperationContext, OperationRegistry
from operations.contract.events import CallStarted, trace_context
from operations.mcp import MCPClientConfig, connect_mcp, to_mcp
from operations.openapi import HTTPServiceConfig, from_openapi_url
from operations.server import create_app
from operations.server.http11.running import running

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRACE = {"traceparent": PARENT, "tracestate": "vendor=1"}


def upstream(seen: list[Any]) -> OperationRegistry:
    registry = OperationRegistry()

    @registry.operation("far.look", type="query")
    async def look(context: OperationContext) -> str:
        seen.append(dict(context.metadata))
        return "seen"

    return registry


def observed(registry: OperationRegistry) -> list[str | None]:
    parents: list[str | None] = []

    def note(event: Any) -> None:
        if isinstance(event, CallStarted):
            parents.append(event.traceparent)

    registry.observe(note)
    return parents


@pytest.mark.parametrize("mode", ["legacy", "auto"])
@pytest.mark.parametrize("stateless", [False, True])
@pytest.mark.parametrize("lean", [False, True])
async def test_the_meta_of_an_mcp_request_reaches_observers_and_handlers(
    mode: Any, stateless: bool, lean: bool
) -> None:
    seen: list[Any] = []
    registry = upstream(seen)
    parents = observed(registry)
    app = to_mcp(registry, stateless=stateless).asgi_app(lean=lean)
    meta: Any = TRACE
    async with serving(app) as url, Client(f"{url}/mcp", mode=mode) as client:
        await client.call_tool("far__look", {}, meta=meta)
        await client.call_tool("far__look", {})

    assert seen == [TRACE, {}]
    assert parents == [PARENT, None]


async def test_the_trace_context_reaches_an_mcp_server_behind_the_hub() -> None:
    seen: list[Any] = []
    config = MCPClientConfig(server=to_mcp(upstream(seen)))
    async with connect_mcp("hub", config) as client:
        registry = OperationRegistry(client)
        await registry.execute("hub.far__look", {}, OperationContext(metadata={**TRACE, "own": 1}))
        await registry.execute("hub.far__look", {})

    assert seen == [TRACE, {}]


async def test_the_trace_context_reaches_an_http_api_behind_the_hub() -> None:
    seen: list[Any] = []
    config = HTTPServiceConfig(namespace="api", restore=True)
    async with running(create_app(upstream(seen))) as url, OperationRegistry() as registry:
        registry.register_all(await from_openapi_url(f"{url}/openapi.json", config))
        await registry.execute("far.look", {}, OperationContext(metadata=TRACE))
        await registry.execute("far.look", {})

    assert seen == [TRACE, {}]


@pytest.mark.parametrize("parent", ["", "x", f"{PARENT}\r\nx: y", PARENT.upper(), 5, None])
def test_an_invalid_trace_context_is_dropped(parent: Any) -> None:
    assert trace_context({"traceparent": parent, "tracestate": "a=b"}) == {}


@pytest.mark.parametrize("state", ["", "a\n", "ü", "x" * 513, 5, None])
def test_a_state_that_cannot_be_sent_is_dropped(state: Any) -> None:
    assert trace_context({"traceparent": PARENT, "tracestate": state}) == {"traceparent": PARENT}
