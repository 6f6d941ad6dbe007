"""Host and Origin, before any work."""

from typing import Any

import pytest
from starlette.types import Message
from tests.server.asgi import Client

from operations import OperationRegistry
from operations.server import create_app

ran: list[str] = []


def serving(**options: Any) -> Client:
    registry = OperationRegistry()
    ran.clear()

    @registry.operation("test.run")
    async def run() -> str:
        ran.append("call")
        return "done"

    def resolve(_: Any) -> None:
        ran.append("resolve")

    return Client(create_app(registry, identity=resolve, **options))


@pytest.mark.requirement("R21")
@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8000", 200),
        ("127.0.0.1", 200),
        ("127.0.0.1:1234", 200),
        ("[::1]", 200),
        ("[::1]:8000", 200),
        ("evil.example", 421),
        ("evil.example:8000", 421),
        ("localhost.evil.example", 421),
        ("localhost.", 421),
        ("localhost:80:80", 421),
        ("localhost:x", 421),
        ("localhost@evil.example", 421),
        ("evil.example#localhost", 421),
        ("127.0.0.1.nip.io", 421),
        ("2130706433", 421),
        ("127.1", 421),
        ("0.0.0.0", 421),
        ("::1", 421),
        ("", 421),
    ],
)
async def test_only_our_host_names_are_accepted(host: str, status: int) -> None:
    response = await serving().post("/test/run", headers={"host": host})

    assert response.status == status
    assert ran == (["resolve", "call"] if status == 200 else [])


@pytest.mark.requirement("R21")
@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost:8000", 200),
        ("https://localhost:8000", 200),
        ("HTTP://LOCALHOST:8000", 200),
        ("http://localhost", 403),
        ("http://localhost:8001", 403),
        ("http://127.0.0.1:8000", 403),
        ("http://evil.example", 403),
        ("null", 403),
        ("", 403),
        ("file://localhost:8000", 403),
        ("http://localhost:8000@evil.example", 403),
        ("http://localhost:8000.evil.example", 403),
        ("http://[", 403),
    ],
)
async def test_only_pages_of_our_origins_may_connect(origin: str, status: int) -> None:
    headers = {"host": "localhost:8000", "origin": origin}

    response = await serving().post("/test/run", headers=headers)

    assert response.status == status
    assert ran == (["resolve", "call"] if status == 200 else [])
    assert not any(name.startswith("access-control") for name in response.headers)


@pytest.mark.parametrize(
    ("path", "names", "status"),
    [
        ("/test/run", ["host", "host"], 421),
        ("/test/run", [], 421),
        ("/healthz", ["host", "host"], 421),
        # HTTP/1.0, which some load balancers use.
        ("/healthz", [], 200),
    ],
)
async def test_a_request_has_exactly_one_host(path: str, names: list[str], status: int) -> None:
    app = serving().app
    sent: list[Message] = []

    async def receive() -> Message:
        raise AssertionError("nothing is read")

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": "GET", "path": path, "query_string": b"",
        "headers": [(name.encode(), b"localhost") for name in names],
    }  # fmt: skip
    await app(scope, receive, send)

    assert sent[0]["status"] == status


@pytest.mark.requirement("R21")
@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": "localhost", "origin": "http://evil.example"},
    ],
)
async def test_a_websocket_from_another_origin_is_rejected_in_its_handshake(
    headers: dict[str, str],
) -> None:
    app = serving(websocket=True).app
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {
        "type": "websocket", "path": "/ws", "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }  # fmt: skip
    await app(scope, None, send)  # type: ignore[arg-type]

    assert [message["type"] for message in sent] == ["websocket.close"]


@pytest.mark.requirement("R21")
@pytest.mark.parametrize("target", ["/healthz", "/readyz"])
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "localhost:8000"}, 200),
        ({"host": "10.0.0.7:8000"}, 200),
        ({"host": "10.0.0.7"}, 200),
        ({"host": "[fd00::7]:8000"}, 200),
        ({"host": "evil.example"}, 421),
        ({"host": "10.0.0.7.nip.io"}, 421),
        ({"host": "167772167"}, 421),
        ({"host": ""}, 421),
        ({"host": "10.0.0.7:8000", "origin": "http://evil.example"}, 403),
        ({"host": "10.0.0.7:8000", "origin": "http://10.0.0.7:8000"}, 200),
    ],
)
async def test_probes_also_answer_to_any_address(
    target: str, headers: dict[str, str], status: int
) -> None:
    assert (await serving().get(target, headers=headers)).status == status


async def test_names_and_pages_can_be_allowed() -> None:
    client = serving(
        allowed_hosts=["api.example", "other.example:444"], allowed_origins=["https://app.example/"]
    )
    page = {"host": "api.example", "origin": "https://app.example"}

    assert (await client.post("/test/run", headers={"host": "api.example:8443"})).status == 200
    assert (await client.post("/test/run", headers={"host": "other.example:444"})).status == 200
    assert (await client.post("/test/run", headers={"host": "other.example"})).status == 421
    assert (await client.post("/test/run", headers={"host": "localhost"})).status == 421
    answer = await client.post("/test/run", headers=page)
    assert answer.headers["access-control-allow-origin"] == "https://app.example"
    assert "access-control-allow-credentials" not in answer.headers
    preflight = await client.request(
        "OPTIONS", "/test/run", headers={**page, "access-control-request-method": "POST"}
    )
    assert preflight.status == 200
    assert (await client.post("/test/run", headers={**page, "origin": "https://b"})).status == 403
    assert (
        await serving(allowed_hosts=["*"]).post("/test/run", headers={"host": "x"})
    ).status == 200


@pytest.mark.requirement("R21")
@pytest.mark.parametrize(
    ("site", "mode", "dest", "status"),
    [
        ("cross-site", "no-cors", "image", 403),
        ("same-site", "no-cors", "script", 403),
        ("cross-site", "navigate", "iframe", 403),
        ("cross-site", "navigate", "document", 200),
        ("same-origin", "cors", "empty", 200),
        ("none", "navigate", "document", 200),
    ],
)
async def test_pages_of_other_sites_may_not_embed_these(
    site: str, mode: str, dest: str, status: int
) -> None:
    sent = {"sec-fetch-site": site, "sec-fetch-mode": mode, "sec-fetch-dest": dest}

    response = await serving().get("/schema?operation=test.run", headers=sent)

    assert response.status == status
    assert (ran == []) == (status == 403)


@pytest.mark.parametrize("path", ["/healthz", "/openapi.json", "/search?query=run", "/metrics"])
async def test_fixed_paths_answer_head(path: str) -> None:
    assert (await serving().request("HEAD", path)).status == 200
    rejected = await serving().request("HEAD", "/call")
    assert (rejected.status, rejected.headers["allow"]) == (405, "POST")


async def test_a_request_that_is_rejected_at_once_has_an_id() -> None:
    rejected = [
        await serving().request("GET", "/test/run", headers=headers)
        for headers in ({"host": "evil.example"}, {"origin": "https://evil.example"})
    ]

    ids = [response.headers["x-request-id"] for response in rejected]
    assert ids == [response.json["requestId"] for response in rejected]
    assert len({*ids}) == 2
    assert all(len(each) == 32 for each in ids)
