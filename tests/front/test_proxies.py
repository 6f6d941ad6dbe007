"""Behind a proxy: addresses of clients, prefixes, and cookies of several servers."""

from typing import Any

import aiohttp
import pytest
from tests.mcp_serving.support import MODERN_META, modern_headers
from tests.server.asgi import Client

from operations import Identity, OperationRegistry
from operations.mcp import to_mcp
from operations.server import APIKeys, Limits, create_app, hash_key
from operations.server.http11.running import running

KEYS = APIKeys({hash_key("key"): Identity("ann")})
LIST = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "tools/list",
    "params": {"_meta": MODERN_META},
}
MCP = modern_headers("tools/list")


def serving(**options: Any) -> Any:
    registry = OperationRegistry()

    @registry.operation("test.run")
    async def run() -> str:
        return "fine"

    return create_app(registry, mcp=True, **options)


@pytest.mark.requirement("R60")
async def test_failed_attempts_count_for_the_client_behind_a_trusted_proxy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("operations.front.credentials.DELAY_SECONDS", 0.01)
    limits = Limits(failed_attempts=2, failed_attempts_per_second=0.0001)

    async def statuses(*trusted: str) -> list[int]:
        app = serving(identity=KEYS, limits=limits)
        found: list[int] = []
        async with running(app, trusted_proxies=trusted) as url, aiohttp.ClientSession() as session:
            for number in range(4):
                headers = {"x-api-key": f"guess {number}", "x-forwarded-for": f"10.0.0.{number}"}
                async with session.post(f"{url}/test/run", headers=headers) as response:
                    found.append(response.status)
        return found

    assert await statuses("127.0.0.1") == [401] * 4
    # The header of a client that is not a trusted proxy is ignored.
    assert await statuses() == [401, 401, 429, 429]


@pytest.mark.parametrize("is_stripped", [True, False])
@pytest.mark.parametrize("slash", ["", "/"])
async def test_a_prefix_works_whether_the_proxy_strips_it_or_not(
    is_stripped: bool, slash: str
) -> None:
    prefix = "" if is_stripped else "/hub"
    async with running(serving(root_path="/hub")) as url, aiohttp.ClientSession() as session:
        async with session.post(f"{url}{prefix}/test/run") as response:
            assert await response.json() == "fine"
        async with session.post(f"{url}{prefix}/mcp{slash}", json=LIST, headers=MCP) as response:
            assert response.status == 200, await response.text()
        async with session.get(f"{url}{prefix}/openapi.json") as response:
            assert (await response.json())["servers"] == [{"url": "/hub"}]


@pytest.mark.parametrize("path", ["/hub", ""], ids=["unstripped", "stripped"])
async def test_the_prefix_alone_leads_to_the_console(path: str) -> None:
    client = Client(serving(root_path="/hub", console=True))

    response = await client.get(path)
    page = await client.get(response.headers["location"])

    assert (response.status, page.status) == (307, 200)
    # The addresses of its files are relative to the final slash.
    assert (await client.get("/hub/~console/main.js")).status == 200


@pytest.mark.parametrize("slash", ["", "/"])
async def test_mcp_alone_can_be_mounted_below_a_prefix(slash: str) -> None:
    registry = OperationRegistry()
    app = to_mcp(registry).asgi_app()
    async with app.running():
        client = Client(app)
        response = await client.post(f"/hub/mcp{slash}", json=LIST, headers=MCP, root_path="/hub")

    assert response.status == 200, response.body


async def test_two_servers_on_one_machine_do_not_share_a_cookie() -> None:
    names: set[str] = set()
    async with (
        running(serving(identity=KEYS)) as one,
        running(serving(identity=KEYS)) as two,
        aiohttp.ClientSession() as session,
    ):
        for url in (one, two):
            async with session.post(f"{url}/session", headers={"x-api-key": "key"}) as response:
                names.add(response.headers["set-cookie"].partition("=")[0])

    assert len(names) == 2


async def test_allowed_origins_work_at_mcp() -> None:
    page = {"origin": "https://app.example", "host": "localhost"}
    app = serving(allowed_origins=["https://app.example"])
    async with running(app) as url, aiohttp.ClientSession() as session:
        ask = {
            **page,
            "access-control-request-method": "POST",
            "access-control-request-headers": "mcp-session-id, mcp-protocol-version, content-type",
        }
        async with session.options(f"{url}/mcp", headers=ask) as response:
            assert response.status == 200
            allowed = response.headers["access-control-allow-headers"]
            assert {"mcp-session-id", "mcp-protocol-version"} <= set(allowed.split(", "))
        async with session.post(f"{url}/mcp", json=LIST, headers={**MCP, **page}) as response:
            assert response.status == 200
            assert response.headers["access-control-allow-origin"] == "https://app.example"
            assert "mcp-session-id" in response.headers["access-control-expose-headers"]
