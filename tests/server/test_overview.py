"""`/operations` and `/calls` show a caller only its own operations and calls."""

import gc
from contextlib import AsyncExitStack
from typing import Any

import pytest
from starlette.testclient import TestClient
from tests.server.asgi import Client

from operations import Identity, OperationContext, OperationRegistry
from operations.authority.grants import Grants
from operations.recorder.graph import CallGraph
from operations.server import APIKeys, create_app, credential_resolver, hash_key
from operations.server.system import MAX_CALLS

ALICE = {"authorization": "Bearer alice"}
BOB = {"authorization": "Bearer bob"}
WHO: list[tuple[str, dict[str, str]]] = [("alice", ALICE), ("bob", BOB), ("nobody", {})]


def build() -> OperationRegistry:
    registry = OperationRegistry()

    @registry.operation("open.hello", type="query", tags=["greeting"])
    async def hello(context: OperationContext) -> str:
        """Says hello."""
        return "hello"

    @registry.operation("open.outer", type="query", calls=["closed.inner"])
    async def outer(context: OperationContext) -> Any:
        """Call an operation that its caller may not call."""
        return (await context.env.closed.inner({})).data

    @registry.operation("closed.inner", type="query", scopes=["inner"])
    async def inner() -> int:
        """Only for some."""
        return 1

    return registry


def client(registry: OperationRegistry, *, known: bool = True, graph: bool = True) -> TestClient:
    keys = APIKeys(
        {
            hash_key("alice"): Identity("alice", []),
            hash_key("bob"): Identity("bob", ["inner"], {"shop:1": ["read"]}),
        }
    )
    app = create_app(
        registry, identity=keys if known else None, graph=CallGraph() if graph else None
    )
    return TestClient(app, base_url="http://127.0.0.1")


def ids(response: Any) -> list[str]:
    return [operation["id"] for operation in response.json()["operations"]]


@pytest.mark.requirement("R07")
def test_operations_are_listed_to_callers_with_access() -> None:
    http = client(build())

    assert ids(http.get("/operations")) == ["open.hello", "open.outer"]
    assert ids(http.get("/operations", headers=BOB)) == ["closed.inner", "open.hello", "open.outer"]
    assert http.get("/operations").json()["operations"][0] == {
        "id": "open.hello",
        "type": "query",
        "source": "local",
        "description": "Says hello.",
        "tags": ["greeting"],
    }


def test_a_cached_list_is_revalidated() -> None:
    registry = build()
    http = client(registry)
    tags = {who: http.get("/operations", headers=headers).headers["etag"] for who, headers in WHO}
    assert len(set(tags.values())) == 3

    for who, headers in WHO:
        again = http.get("/operations", headers={**headers, "if-none-match": tags[who]})
        assert (again.status_code, again.content) == (304, b"")
        assert "content-length" not in again.headers
        for held in (f"W/{tags[who]}", f'"x", {tags[who]}', f'W/"x",W/{tags[who]}', "*"):
            again = http.get("/operations", headers={**headers, "if-none-match": held})
            assert (again.status_code, again.headers["etag"]) == (304, tags[who])
        assert http.get("/operations", headers={**headers, "if-none-match": '"x"'}).content
    registry.unregister("open.hello")
    changed = http.get("/operations", headers={**BOB, "if-none-match": tags["bob"]})
    assert ids(changed) == ["closed.inner", "open.outer"]
    assert changed.headers["etag"] != tags["bob"]


@pytest.mark.requirement("R11")
def test_calls_are_shown_to_their_callers() -> None:
    http = client(build())
    http.post("/call", json={"operation": "open.outer", "input": {}}, headers=ALICE)
    http.post("/call", json={"operation": "open.hello", "input": {}}, headers=BOB)
    http.post("/call", json={"operation": "open.hello", "input": {}})

    outer, inner = http.get("/calls", headers=ALICE).json()["calls"]
    assert outer["operationId"] == "open.outer"
    assert outer["outcome"] == "success"
    assert outer["duration"] >= 0
    assert inner["parentRequestId"] == outer["requestId"]
    assert "operationId" not in inner, "its name is not alice's to see"
    [hello] = http.get("/calls", headers=BOB).json()["calls"]
    assert hello["operationId"] == "open.hello"
    assert http.get("/calls").json()["calls"] == [], "those who did not sign in are not one person"


@pytest.mark.requirement("R11")
def test_agents_see_their_own_calls_and_their_person_sees_all() -> None:
    grants = Grants("k" * 32, subjects=lambda name: Identity(name, []))
    tokens = [grants.create("alice", name, operations=["open.*"]) for name in ("bot", "bot")]
    keys = APIKeys({hash_key("alice"): Identity("alice", [])})
    resolvers = [keys, credential_resolver(grants.resolve)]
    app = create_app(build(), identity=resolvers, graph=CallGraph())
    http = TestClient(app, base_url="http://127.0.0.1")
    callers = [{"authorization": f"Bearer {each}"} for each in ("alice", *tokens)]
    for caller in callers:
        assert http.get("/open/outer", headers=caller).status_code == 200

    seen = [http.get("/calls", headers=caller).json()["calls"] for caller in callers]

    assert [len(calls) for calls in seen] == [6, 2, 2]
    first, second = ({call["requestId"] for call in calls} for calls in seen[1:])
    assert first.isdisjoint(second)


def test_the_watches_of_open_pages_are_no_calls() -> None:
    registry = build()

    @registry.operation("hub.watch", type="query")
    async def watch() -> int:
        return 1

    http = client(registry, known=False)
    http.post("/call", json={"operation": "hub.watch", "input": {}})
    http.post("/call", json={"operation": "open.hello", "input": {}})

    (call,) = http.get("/calls").json()["calls"]
    assert call["operationId"] == "open.hello"


def test_without_sign_in_all_callers_are_the_same() -> None:
    http = client(build(), known=False)
    http.post("/call", json={"operation": "open.hello", "input": {}})

    assert len(http.get("/calls").json()["calls"]) == 1


def test_only_the_latest_calls_are_returned() -> None:
    http = client(build(), known=False)
    for _ in range(MAX_CALLS // 100 + 1):
        calls = [{"operation": "open.hello", "input": {}}] * 100
        http.post("/batch", json={"calls": calls})

    assert len(http.get("/calls").json()["calls"]) == MAX_CALLS


def test_without_a_graph_there_are_no_calls_to_see() -> None:
    http = client(build(), graph=False)

    assert http.get("/calls").status_code == 404
    assert http.get("/operations").json()["hasCalls"] is False
    assert client(build()).get("/operations").json()["hasCalls"] is True


async def test_an_app_removes_its_observers_from_the_registry() -> None:
    registry = OperationRegistry()
    apps = [create_app(registry, graph=CallGraph()) for _ in range(3)]
    assert registry.counters is not None

    async with AsyncExitStack() as stack:
        for app in apps:
            await stack.enter_async_context(app.router.lifespan_context(app))

    assert registry.counters is None
    assert not registry.observed


async def test_an_app_that_was_never_started_adds_no_observers_to_the_registry() -> None:
    registry = OperationRegistry()
    app = create_app(registry, graph=CallGraph())

    del app
    gc.collect()

    assert registry.counters is None
    assert not registry.observed


async def test_an_app_counts_again_when_it_is_started_again() -> None:
    registry = OperationRegistry()

    @registry.operation("test.run")
    async def run() -> None: ...

    app = create_app(registry)
    for _ in range(2):
        async with app.router.lifespan_context(app):
            await registry.execute("test.run")
            for path in ("/test/run", "/call"):
                called = await Client(app).post(path, json={"operation": "test.run"})
                assert called.status == (422 if path == "/test/run" else 200)
            text = (await Client(app).get("/metrics")).body.decode()
            assert 'operations_calls_total{operation="test.run",code=""} 2' in text
            assert 'operations_calls_total{operation="test.run",code="VALIDATION_ERROR"} 1' in text
            # The call from this process is counted, but not timed.
            assert 'operations_call_seconds_count{operation="test.run"} 2' in text
