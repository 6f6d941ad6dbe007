"""`[tools]` in the file applies to operations of every kind of source, and overrides the settings of their source."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.limits import time_limit
from tests.servers import RedisServer
from tests.servers import running as broker_running

from operations import CallError, ErrorCode, Identity, OperationContext, OperationRegistry
from operations.calls import serve_calls
from operations.hub import Hub, open_hub
from operations.openapi import to_openapi
from operations.pubsub.redis import connect_redis
from operations.server import create_app
from operations.server.http11.running import running
from operations.tools.pages import NEXT

pytestmark = pytest.mark.anyio

SOURCES = ("api", "far", "bus")
ANN = OperationContext(identity=Identity("ann", ["use"]))


def build(calls: list[str]) -> OperationRegistry:
    registry = OperationRegistry(output="off")

    @registry.operation("shop.list", type="query")
    async def list_(count: int = 1) -> dict[str, Any]:
        calls.append("list")
        return {"items": [{"id": number, "secret": "s" * 20} for number in range(count)]}

    @registry.operation("shop.flaky", type="query")
    async def flaky() -> int:
        calls.append("flaky")
        if calls.count("flaky") % 2:
            raise CallError(ErrorCode.UNAVAILABLE, "away", retryable=True)
        return 7

    @registry.operation("shop.slow", type="query")
    async def slow() -> int:
        await asyncio.sleep(20)
        return 1

    @registry.operation("shop.wrong", type="query")
    @registry.operation("shop.odd", type="query")
    async def wrong() -> int:
        return "no number"  # type: ignore[return-value]

    return registry


@asynccontextmanager
async def hub_of(folder: Path, config: str, calls: list[str]) -> AsyncGenerator[Hub]:
    registry, broker = build(calls), RedisServer()
    (folder / "shop.json").write_text(json.dumps(to_openapi(registry)))
    with broker_running(broker):
        async with (
            running(create_app(registry, mcp=True)) as url,
            connect_redis(broker.url) as target,
            serve_calls(registry, target),
        ):
            (folder / "operations.toml").write_text(
                config.replace("URL", url).replace("REDIS", broker.url)
            )
            async with open_hub(folder / "operations.toml") as hub:
                assert {each.name: each.problem for each in hub.absent()} == {}
                yield hub


CONFIG = """
output = "off"
[record.trace]
enabled = false
[openapi.api]
document = "shop.json"
base_url = "URL"
retries = 0
scopes = ["source"]
output = "strict"
timeout = 15
[mcp.far]
url = "URL/mcp"
scopes = ["source"]
queries = ["*"]
output = "strict"
[brokers.bus]
url = "REDIS"
workers = true
namespace = "bus"
advanced.access = { required_scopes = ["source"] }
output = "strict"
[tools."*.*list*"]
scopes = ["use"]
select = ["/items/*/id"]
max_bytes = 1000
cache = 60
[tools."*.*flaky*"]
scopes = []
retry = 3
[tools."*.*slow*"]
scopes = []
timeout = 0.3
[tools."*.*wrong*"]
scopes = []
[tools."*.*odd*"]
scopes = []
output = "warn"
"""


def find(hub: Hub, source: str, name: str) -> str:
    """Return the id of an operation; of an API, the one that is a query."""
    name = f"{name}.get" if source == "api" else name
    [found] = [
        spec.id
        for spec in hub.registry.specs()
        if spec.id.startswith(f"{source}.") and spec.id.endswith(name)
    ]
    return found


async def code_of(call: Any) -> str:
    with pytest.raises(CallError) as caught:
        await call
    return caught.value.code


async def test_settings_apply_to_operations_of_every_source_and_override_it(tmp_path: Path) -> None:
    calls = list[str]()
    with time_limit(60):
        async with hub_of(tmp_path, CONFIG, calls) as hub:
            for source in SOURCES:
                run = hub.registry.execute
                listing = find(hub, source, "list")
                # Scopes of the table replace those of the source.
                other = OperationContext(identity=Identity("eve", ["source"]))
                assert await code_of(run(listing, {}, other)) == ErrorCode.ACCESS_DENIED
                calls.clear()
                for _ in range(2):
                    assert (await run(listing, {"count": 2}, ANN)).data == {
                        "items": [{"id": 0}, {"id": 1}]
                    }
                assert calls == ["list"]
                page = (await run(listing, {"count": 300}, ANN)).data
                ids = page["value"]["items"]
                while "cursor" in page:
                    page = (await run(NEXT, {"cursor": page["cursor"]}, ANN)).data
                    ids += page["value"]
                assert ids == [{"id": number} for number in range(300)]

                if source != "far":
                    # The error of an MCP tool is a result, and is not repeated.
                    calls.clear()
                    assert (await run(find(hub, source, "flaky"))).data == 7
                assert await code_of(run(find(hub, source, "slow"))) == ErrorCode.TIMEOUT
                # The source overrides the file, and the table overrides the source.
                wrong, odd = find(hub, source, "wrong"), find(hub, source, "odd")
                assert hub.registry.output_of(wrong) == "strict"
                assert hub.registry.output_of(odd) == "warn"
                assert "no number" in str((await run(odd)).data)
                if source != "far":
                    # An MCP server lists a schema that every result matches.
                    assert await code_of(run(wrong)) == ErrorCode.EXECUTION_ERROR
