"""Sessions are limited per caller and in total, and anonymous clients cannot lock out others."""

import logging
from typing import Any

import msgspec
import pytest
from starlette.requests import Request
from tests.mcp_opening import INITIALIZE, MCP_HEADERS
from tests.mcp_serving.support import example
from tests.server.asgi import Client, Response

from operations import Identity
from operations.mcp import MCPServerSettings, to_mcp
from operations.server import Limits, create_app

PING = {"jsonrpc": "2.0", "id": 2, "method": "ping"}


def identify(request: Request) -> Identity | None:
    key = request.headers.get("x-api-key")
    return None if key is None else Identity(key)


def serving(limits: Limits) -> Any:
    return to_mcp(example(), identify=identify, limits=limits).asgi_app()


async def opened(client: Client, **headers: str) -> Response:
    return await client.post("/mcp", json=INITIALIZE, headers={**MCP_HEADERS, **headers})


async def pinged(client: Client, session: str, **headers: str) -> int:
    sent = {**MCP_HEADERS, "mcp-session-id": session, **headers}
    return (await client.post("/mcp", json=PING, headers=sent)).status


@pytest.mark.requirement("R60")
async def test_anonymous_clients_cannot_lock_out_others() -> None:
    app = serving(Limits(sessions=20, sessions_per_caller=5))
    async with app.running():
        ann = Client(app)
        mine = (await opened(ann, **{"x-api-key": "ann"})).headers["mcp-session-id"]
        for number in range(100):
            crowd = Client(app, address=f"10.0.{number}.1")
            assert (await opened(crowd)).status == 200
        assert await pinged(ann, mine, **{"x-api-key": "ann"}) == 200
        assert (await opened(ann, **{"x-api-key": "bob"})).status == 200


@pytest.mark.requirement("R60")
async def test_a_caller_with_too_many_sessions_loses_its_oldest_one() -> None:
    app = serving(Limits(sessions_per_caller=3, sessions_per_address=2))
    async with app.running():
        client, other = Client(app), Client(app, address="10.0.0.2")
        ann = {"x-api-key": "ann"}
        kept = (await opened(other)).headers["mcp-session-id"]
        sessions = [(await opened(client, **ann)).headers["mcp-session-id"] for _ in range(4)]

        found = [await pinged(client, session, **ann) for session in sessions]
        assert found == [404, 200, 200, 200]
        assert await pinged(other, kept) == 200
        # The least recently used one is the oldest.
        await pinged(client, sessions[1], **ann)
        sessions.append((await opened(client, **ann)).headers["mcp-session-id"])
        found = [await pinged(client, session, **ann) for session in sessions[1:]]
        assert found == [200, 404, 200, 200]


async def test_anonymous_clients_behind_one_address_keep_their_sessions() -> None:
    app = serving(Limits())
    async with app.running():
        client = Client(app)
        first = (await opened(client)).headers["mcp-session-id"]
        for _ in range(999):
            assert (await opened(client)).status == 200
        assert await pinged(client, first) == 200


async def test_a_session_that_ends_for_another_one_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = serving(Limits(sessions_per_address=1))
    async with app.running():
        client = Client(app)
        await opened(client)
        assert not caplog.text
        await opened(client)

    assert (
        "ended the idle MCP session of 127.0.0.1 for a new one: limits.sessions_per_address"
        in caplog.text
    )


async def test_sessions_that_end_make_room() -> None:
    app = serving(Limits(sessions=1, sessions_per_caller=1))
    async with app.running():
        client = Client(app)
        key = {"x-api-key": "ann"}
        session = (await opened(client, **key)).headers["mcp-session-id"]
        other = {"x-api-key": "bob"}
        assert (await opened(client, **other)).status == 429, "a session of another caller stays"
        await client.request(
            "DELETE", "/mcp", headers={**MCP_HEADERS, **key, "mcp-session-id": session}
        )
        assert (await opened(client, **other)).status == 200


async def test_the_access_log_has_the_request_id(caplog: pytest.LogCaptureFixture) -> None:
    registry = example()
    ids: list[str] = []
    registry.observe(lambda event: ids.append(event.request_id))
    client = Client(create_app(registry, mcp=MCPServerSettings(stateless=True)))
    call = {**PING, "method": "tools/call", "params": {"name": "math__add", "arguments": {"a": 1}}}
    with caplog.at_level(logging.INFO, "operations.access"):
        for headers in ({}, {"mcp-param-x": "not plain"}):
            answer = await client.post("/mcp", json=call, headers={**MCP_HEADERS, **headers})
            assert answer.status == 200

    logged = [msgspec.json.decode(record.getMessage())["requestId"] for record in caplog.records]
    assert len(logged) == 2
    assert set(logged) == set(ids)
