"""Operations that a caller may not call look as if they did not exist, unless their scopes are advertised."""

import logging
import re
from typing import Any

import aiohttp
import pytest
from mcp import Client as MCPClient
from starlette.applications import Starlette
from tests.server.asgi import Client, Response

from operations import AccessControl, Identity, OperationRegistry
from operations.authority import Grants
from operations.front.limits import Limits
from operations.mcp import to_mcp
from operations.server import APIKeys, create_app, credential_resolver, hash_key
from operations.server.http11.running import running

_REQUEST_ID = re.compile(rb"[0-9a-f]{32}")
KEY = {"x-api-key": "bob"}


def application(**options: Any) -> Starlette:
    registry = OperationRegistry()

    @registry.operation("task.secret", scopes=["admin"])
    async def secret() -> str:
        return "secret"

    @registry.operation("task.known", scopes=["write"])
    async def known() -> str:
        return "known"

    @registry.operation("task.owned", access=AccessControl(resource_type="t", resource_action="r"))
    async def owned() -> str:
        return "owned"

    keys = APIKeys({hash_key("bob"): Identity("bob", ["read"])})
    return create_app(registry, identity=keys, scopes_supported=["write"], **options)


def serving(**options: Any) -> Client:
    return Client(application(**options))


def seen(response: Response) -> tuple[int, dict[str, str], bytes]:
    """Return the parts of a response that a client can compare, without the request id."""
    request_id = response.headers.get("x-request-id", "-")
    headers = {name: value for name, value in response.headers.items() if name != "x-request-id"}
    return response.status, headers, response.body.replace(request_id.encode(), b"")


@pytest.mark.requirement("R07", "R54")
@pytest.mark.parametrize("options", [{}, {"console": True}], ids=["plain", "console"])
@pytest.mark.parametrize(
    "headers", [{}, KEY, {"x-api-key": "wrong"}], ids=["nobody", "bob", "wrong"]
)
@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS"])
@pytest.mark.parametrize("hidden", ["secret", "owned"])
async def test_a_hidden_operation_gets_the_same_response_as_an_unknown_path(
    hidden: str, method: str, headers: dict[str, str], options: Any
) -> None:
    client = serving(**options)

    there = await client.request(method, f"/task/{hidden}", headers=headers)
    nowhere = await client.request(method, "/task/nothing", headers=headers)

    assert seen(there) == seen(nowhere)
    assert there.status in (401, 404, 405)


async def test_the_log_contains_why_a_call_was_rejected(caplog: pytest.LogCaptureFixture) -> None:
    app, grants = application(), Grants(b"k" * 32)
    client = Client(app)
    token = grants.create(Identity("bob", ["admin"]), "bot", operations=["task.known"])
    registry = app.state.pipeline.front.registry
    agents = Client(create_app(registry, identity=credential_resolver(grants.resolve)))

    with caplog.at_level(logging.INFO, "operations.server"):
        assert (await client.post("/task/secret", headers=KEY)).status == 404
        assert (await client.post("/call", json={"operation": "task.secret"})).status == 404
        bearer = {"authorization": f"Bearer {token}"}
        assert (await agents.post("/task/secret", headers=bearer)).status == 404

    needed = 'task.secret, which requires {"requiredScopes":["admin"]}'
    assert [record.getMessage() for record in caplog.records] == [
        f"bob may not call {needed}",
        f"a caller without identity may not call {needed}",
        "bob may not call task.secret: its grant does not cover it",
    ]


@pytest.mark.requirement("R07")
@pytest.mark.parametrize("headers", [{}, KEY], ids=["nobody", "bob"])
async def test_the_gateway_does_not_reveal_hidden_operations(headers: dict[str, str]) -> None:
    client = serving()
    answers: list[Any] = []
    for name in ("task.secret", "task.nothing"):
        call = {"operation": name}
        replies = [
            await client.post("/call", json=call, headers=headers),
            await client.post("/schema", json=call, headers=headers),
            await client.post("/subscribe", json=call, headers=headers),
            await client.post("/batch", json={"calls": [call]}, headers=headers),
        ]
        answers.append(
            [
                (r.status, _REQUEST_ID.sub(b"", seen(r)[2].replace(name.encode(), b"")))
                for r in replies
            ]
        )

    assert answers[0] == answers[1]
    assert [status for status, _ in answers[0]] == [404, 404, 404, 200]


@pytest.mark.requirement("R07", "R54")
@pytest.mark.parametrize(
    ("is_absent", "code"), [(False, "OPERATION_NOT_FOUND"), (True, "UNAVAILABLE")]
)
async def test_the_websocket_does_not_reveal_hidden_operations(is_absent: bool, code: str) -> None:
    variants: list[dict[str, Any]] = [{}, {"attempt": 2}, {"credit": 1}, {"requiredVersion": 9}]
    replies: dict[str, list[str]] = {"task.secret": [], "task.nothing": []}
    app = application(websocket=True)
    registry: OperationRegistry = app.state.pipeline.front.registry
    registry.follow_sources(is_absent=lambda _: is_absent, awaits_any=lambda: is_absent)
    async with (
        running(app) as url,
        aiohttp.ClientSession() as http,
        http.ws_connect(f"{url}/ws") as socket,
    ):
        for name, received in replies.items():
            for number, options in enumerate(variants):
                payload = {"requestId": f"{name}-{number}", "operationId": name, **options}
                event = {"type": "call.requested", "id": "", "payload": {"input": {}, **payload}}
                await socket.send_json(event)
                reply = await socket.receive_str(timeout=60)
                if "call.offered" in reply:
                    # A request that may have killed a worker starts only if its caller confirms it.
                    received.append(reply.replace(name, ""))
                    confirmed = {"requestId": payload["requestId"]}
                    await socket.send_json(
                        {"type": "call.confirmed", "id": "", "payload": confirmed}
                    )
                    reply = await socket.receive_str(timeout=60)
                received.append(reply.replace(name, ""))

    assert replies["task.secret"] == replies["task.nothing"]
    assert len(replies["task.secret"]) == len(variants) + 1
    assert code in replies["task.secret"][0]


@pytest.mark.parametrize(
    ("headers", "status", "challenge"),
    [({}, 401, "Bearer"), (KEY, 403, 'Bearer error="insufficient_scope", scope="write"')],
)
async def test_an_operation_with_advertised_scopes_has_a_challenge(
    headers: dict[str, str], status: int, challenge: str
) -> None:
    response = await serving().post("/task/known", headers=headers)

    assert (response.status, response.headers["www-authenticate"]) == (status, challenge)
    response = await serving().post("/call", json={"operation": "task.known"}, headers=headers)
    assert (response.status, response.headers["www-authenticate"]) == (status, challenge)


@pytest.mark.requirement("R07")
async def test_a_source_that_is_not_connected_does_not_reveal_its_hidden_operations() -> None:
    app = application(limits=Limits(rate_per_caller=0.001, burst=4))
    registry: OperationRegistry = app.state.pipeline.front.registry
    registry.follow_sources(is_absent=lambda _: True, awaits_any=lambda: True)
    client = Client(app)

    paths = [
        (await client.get(f"/task/{name}", headers=KEY)).status
        for name in ("secret", "nothing", "secret", "secret", "secret")
    ]
    async with MCPClient(to_mcp(registry)) as mcp:
        secret, nothing = [
            str(await mcp.call_tool(f"task__{name}", {})).replace(name, "")
            for name in ("secret", "nothing")
        ]

    assert paths == [503, 503, 503, 503, 429]
    assert secret == nothing
    assert "UNAVAILABLE" in secret
