"""A source whose calls all fail is not reported as connected."""

import json
from pathlib import Path

from aiohttp import web
from tests.limits import time_limit
from tests.servers import free_port

from operations import CallError, OperationContext
from operations.hub import Hub, open_hub
from operations.telemetry.metrics import source_metrics

OPERATOR = OperationContext(trusted=True)


async def look(hub: Hub) -> tuple[str, str | None]:
    """The state and the problem of the only source, as the console shows them."""
    (source,) = (await hub.registry.execute("hub.sources", {}, OPERATOR)).data
    return source["state"], source.get("problem")


async def call(hub: Hub) -> bool:
    try:
        await hub.registry.execute("shop.items", {}, OPERATOR)
    except CallError:
        return False
    return True


async def test_a_source_whose_calls_all_fail_is_not_connected(tmp_path: Path) -> None:
    accepts = False

    async def items(_request: web.Request) -> web.Response:
        return web.json_response([], status=200 if accepts else 401)

    app, port = web.Application(), free_port()
    app.router.add_get("/items", items)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    paths = {"/items": {"get": {"operationId": "items", "responses": {}}}}
    (tmp_path / "shop.json").write_text(json.dumps({"openapi": "3.1.0", "paths": paths}))
    config = tmp_path / "operations.toml"
    config.write_text(
        f"[openapi.shop]\ndocument = 'shop.json'\nbase_url = 'http://127.0.0.1:{port}'\n"
    )
    try:
        with time_limit(60):
            async with open_hub(config) as hub:
                _ = hub.app
                seen = [await look(hub)]
                for _ in range(5):
                    assert not await call(hub)
                seen.append(await look(hub))
                accepts = True
                assert await call(hub)
                seen.append(await look(hub))
                accepts = False
                assert not await call(hub)
                seen.append(await look(hub))
    finally:
        await runner.cleanup()

    reason = "all of its last 5 calls failed, with EXECUTION_ERROR"
    connected = ("connected", None)
    assert seen == [connected, ("failing", reason), connected, connected]
    assert b'operations_source_connected{source="openapi:shop"} 0' in source_metrics(
        {"openapi:shop": "failing"}
    )
