"""/search /schema /call /batch /subscribe."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.server.asgi import Client

from operations import CallError, ErrorDefinition, Identity, OperationRegistry
from operations.server import APIKeys, create_app, hash_key

ALICE = {"authorization": "Bearer k"}


def serving(**options: Any) -> Client:
    registry = OperationRegistry()

    @registry.operation("task.get", type="query", tags=["read"])
    async def get(id: int) -> dict[str, int]:
        """One task."""
        if id == 0:
            raise ValueError("CANARY")
        if id < 0:
            raise CallError("GONE", "it is gone")
        return {"id": id}

    @registry.operation(
        "task.create", scopes=["write"], errors=[ErrorDefinition("GONE", http_status=410)]
    )
    async def create(title: str) -> bytes:
        """Add a task."""
        if not title:
            raise CallError("GONE", "it is gone")
        return title.encode()

    @registry.operation("task.watch", scopes=["write"])
    async def watch(count: int = 2) -> AsyncIterator[int]:
        """Follow tasks."""
        for number in range(count):
            yield number

    keys = APIKeys({hash_key("k"): Identity("alice", ["write"])})
    options.setdefault("scopes_supported", ["write"])
    return Client(create_app(registry, identity=keys, **options))


def ids(response: Any) -> list[str]:
    return [found["id"] for found in response.json["operations"]]


@pytest.mark.requirement("R07")
async def test_search_finds_operations_that_the_caller_may_call() -> None:
    client = serving()

    assert ids(await client.get("/search?query=task")) == ["task.get"]
    assert ids(await client.get("/search", headers=ALICE)) == [
        "task.create",
        "task.get",
        "task.watch",
    ]
    assert ids(await client.get("/search?query=task&type=query&tags=read", headers=ALICE)) == [
        "task.get"
    ]
    body = {"query": "add", "limit": 1, "namespace": "task", "tags": []}
    assert ids(await client.post("/search", json=body, headers=ALICE)) == ["task.create"]


@pytest.mark.parametrize(
    "target",
    [
        "/search?limit=0",
        "/search?limit=201",
        "/search?limit=x",
        "/search?type=x",
        "/search?q=x",
        "/schema",
    ],
)
async def test_requests_that_do_not_match_are_rejected(target: str) -> None:
    assert (await serving().get(target)).status == 422


async def test_an_integer_may_be_written_as_a_number_with_zero_decimals() -> None:
    client = serving()

    assert ids(await client.get("/search?limit=1.0")) == ["task.get"]
    assert ids(await client.post("/search", json={"limit": 1.0})) == ["task.get"]


async def test_a_request_that_does_not_match_is_reported_with_its_path() -> None:
    response = await serving().post("/batch", json={"calls": [{"operation": 7}]})

    assert response.status == 422
    (issue,) = response.json["details"]["errors"]
    assert issue["path"] == "/calls/0/operation"


@pytest.mark.parametrize(
    ("target", "advice"),
    [
        ("/search?q=x", "/q is not a known property"),
        ("/search?querry=x", '/querry is not a known property. Did you mean "query"?'),
    ],
)
async def test_an_unknown_parameter_is_reported(target: str, advice: str) -> None:
    response = await serving().get(target)

    assert response.json["message"].startswith(f"Invalid request: {advice}")
    (issue,) = response.json["details"]["errors"]
    assert issue["path"] == target[7:].partition("=")[0].replace("?", "/")


async def test_a_repeated_or_unreadable_parameter_is_malformed() -> None:
    client = serving()

    assert (await client.get("/search?query=a&query=b")).status == 422
    assert (await client.get("/search?query=%ff")).status == 400


@pytest.mark.requirement("R07")
async def test_a_schema_is_shown_to_callers_with_access() -> None:
    client = serving()

    assert (await client.get("/schema?operation=task.get")).json["type"] == "query"
    assert (await client.get("/schema?operation=task.create")).status == 404
    assert (await client.get("/schema?operation=nope")).status == 404
    shown = await client.post("/schema", json={"operation": "task.create"}, headers=ALICE)
    assert shown.json["errorSchemas"][0]["code"] == "GONE"


async def test_the_schema_of_the_output_is_shown_on_request() -> None:
    client = serving()

    plain = (await client.get("/schema?operation=task.get")).json
    whole = (await client.get("/schema?operation=task.get&output=true")).json

    assert "inputSchema" in plain
    assert "outputSchema" not in plain
    assert whole.items() >= plain.items()
    assert "outputSchema" in whole


async def test_a_call_returns_the_envelope() -> None:
    client = serving()

    answer = await client.post("/call", json={"operation": "task.get", "input": {"id": 7}})
    binary = await client.post(
        "/call", json={"operation": "task.create", "input": {"title": "hi"}}, headers=ALICE
    )

    assert answer.json["data"] == {"id": 7}
    assert answer.json["meta"]["operationId"] == "task.get"
    assert binary.json["data"] == "aGk="
    assert binary.json["encoding"] == "base64"


@pytest.mark.requirement("R07", "R17")
@pytest.mark.parametrize(
    ("operation", "input", "headers", "status"),
    [
        ("nope", None, {}, 404),
        ("task.get", {}, {}, 422),
        ("task.get", {"id": 0}, {}, 500),
        ("task.create", {"title": "x"}, {}, 401),
        ("task.create", {"title": ""}, ALICE, 410),
        ("task.watch", {}, ALICE, 422),
    ],
)
async def test_a_call_fails_with_its_status(
    operation: str, input: Any, headers: dict[str, str], status: int
) -> None:
    body = {"operation": operation, "input": input}

    response = await serving().post("/call", json=body, headers=headers)

    assert response.status == status
    assert b"CANARY" not in response.body


async def test_the_log_names_the_operation_that_failed_in_a_batch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls = [{"operation": "task.get", "input": {"id": 0}}]
    response = await serving().post("/batch", json={"calls": calls})

    (result,) = response.json["results"]
    request_id = result["error"]["requestId"]
    assert f"request {request_id} failed in task.get" in caplog.text
    assert response.headers["x-request-id"] == request_id


@pytest.mark.requirement("R07", "R17")
async def test_a_batch_runs_each_call_as_the_caller() -> None:
    calls = [
        {"operation": "task.get", "input": {"id": 1}},
        {"operation": "task.get", "input": {"id": 0}},
        {"operation": "task.create", "input": {"title": "x"}},
    ]
    client = serving()

    response = await client.post("/batch", json={"calls": calls})

    first, second, third = response.json["results"]
    assert first["envelope"]["data"] == {"id": 1}
    assert second["error"]["code"] == "EXECUTION_ERROR"
    assert third["error"]["code"] == "ACCESS_DENIED"
    assert b"CANARY" not in response.body
    too_many = await client.post("/batch", json={"calls": calls * 50})
    assert (too_many.status, too_many.json["code"]) == (429, "RESOURCE_EXHAUSTED")
    assert "retry-after" not in too_many.headers
    assert (await client.post("/batch", json={"calls": [{"input": 1}]})).status == 422


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_subscription_yields_its_items(method: str) -> None:
    client = serving()
    if method == "GET":
        response = await client.get(
            '/subscribe?operation=task.watch&input={"count":1}', headers=ALICE
        )
    else:
        body = {"operation": "task.watch", "input": {"count": 1}}
        response = await client.post("/subscribe", json=body, headers=ALICE)

    assert response.headers["content-type"] == "text/event-stream"
    assert response.body == b"data: 0\n\nevent: complete\ndata: {}\n\n"


@pytest.mark.parametrize(
    ("operation", "headers", "status"),
    [("nope", {}, 404), ("task.watch", {}, 401), ("task.get", {}, 422)],
)
async def test_a_subscription_rejected_at_once_has_its_status(
    operation: str, headers: dict[str, str], status: int
) -> None:
    response = await serving().get(f"/subscribe?operation={operation}", headers=headers)

    assert response.status == status


async def test_gateway_paths_have_their_methods() -> None:
    client = serving()

    for path in ("/call", "/batch"):
        response = await client.get(path)
        assert (response.status, response.headers["allow"]) == (405, "POST")
    assert (await client.request("PUT", "/search")).status == 405
