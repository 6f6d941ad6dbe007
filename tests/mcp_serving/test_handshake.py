"""Streamable HTTP for clients before 2026-07-28, over real connections: JSON, streams, questions, resumption."""

import asyncio
import gc
import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx2
import msgspec
import pytest
from mcp import Client
from tests.limits import time_limit
from tests.mcp_serving.support import MODERN, MODERN_META, error_of, example, serving
from tests.mcp_serving.test_http import PLAIN, identify

from operations import OperationContext, OperationRegistry, mcp_envelope
from operations.base.types import JSONObject
from operations.contract.envelopes import AudioContent, ResourceLink, TextContent
from operations.front.front import Front
from operations.front.limits import Limits
from operations.front.timing import CLIENT_CHECK_SECONDS
from operations.io.sse import ALIVE
from operations.mcp import release_stream, to_mcp
from operations.mcp.serving import sessions
from operations.mcp.serving.sessions import STANDALONE, EventLog, Session, SessionTable

VERSIONS = pytest.mark.parametrize("version", ["2025-03-26", "2025-06-18", "2025-11-25"])
BOTH = "application/json, text/event-stream"


class Peer:
    """A client that sends JSON-RPC by hand."""

    def __init__(self, http: httpx2.AsyncClient, headers: dict[str, str]) -> None:
        self.http = http
        self.headers = {"accept": BOTH, **headers}
        self.session = ""

    def _sent(self, method: str, params: JSONObject, request_id: Any) -> JSONObject:
        message: JSONObject = {"jsonrpc": "2.0", "method": method, "params": params}
        return message if request_id is None else {**message, "id": request_id}

    async def post(
        self, method: str, params: JSONObject, request_id: Any = 1, **headers: str
    ) -> httpx2.Response:
        message = self._sent(method, params, request_id)
        return await self.http.post("/mcp", json=message, headers={**self.headers, **headers})

    async def call(self, name: str, **params: Any) -> httpx2.Response:
        return await self.post("tools/call", {"name": name, "arguments": {}, **params})

    async def answer(self, request_id: Any, result: JSONObject) -> httpx2.Response:
        message = {"jsonrpc": "2.0", "id": request_id, "result": result}
        return await self.http.post("/mcp", json=message, headers=self.headers)

    @asynccontextmanager
    async def streamed(
        self, name: str, request_id: Any = 1, **params: Any
    ) -> AsyncGenerator[AsyncIterator[JSONObject]]:
        """Call a tool whose response is a stream, and give its events."""
        message = self._sent("tools/call", {"name": name, "arguments": {}, **params}, request_id)
        async with self.http.stream("POST", "/mcp", json=message, headers=self.headers) as response:
            assert response.headers["content-type"] == "text/event-stream"
            yield events(response)

    @asynccontextmanager
    async def get(self, **headers: str) -> AsyncGenerator[AsyncIterator[JSONObject]]:
        sent = {**self.headers, **headers}
        async with self.http.stream("GET", "/mcp", headers=sent, timeout=60) as response:
            assert response.status_code == 200, response.status_code
            yield events(response)


async def events(response: httpx2.Response) -> AsyncIterator[JSONObject]:
    """Give each event as a dict of its fields, the data decoded."""
    event: JSONObject = {}
    async for line in response.aiter_lines():
        name, _, value = line.partition(": ")
        if line.startswith(":"):
            continue
        if line:
            event[name] = msgspec.json.decode(value) if name == "data" and value else value
        elif event:
            yield event
            event = {}


@asynccontextmanager
async def connected(
    app: Any, version: str = "2025-11-25", capabilities: Any = None, **headers: str
) -> AsyncGenerator[Peer]:
    with time_limit(20):
        async with serving(app) as address, httpx2.AsyncClient(base_url=address) as client:
            peer = Peer(client, headers)
            await handshake(peer, version, capabilities)
            yield peer


async def handshake(peer: Peer, version: str = "2025-11-25", capabilities: Any = None) -> None:
    opening = {
        "protocolVersion": version,
        "capabilities": capabilities or {},
        "clientInfo": {"name": "t", "version": "1"},
    }
    opened = await peer.post("initialize", opening)
    assert opened.json()["result"]["protocolVersion"] == version
    peer.session = opened.headers["mcp-session-id"]
    peer.headers |= {"mcp-session-id": peer.session, "mcp-protocol-version": version}
    assert (await peer.post("notifications/initialized", {}, None)).status_code == 202


class Jobs:
    """Operations that wait, report and ask."""

    def __init__(self) -> None:
        self.registry = OperationRegistry()
        self.started, self.stopped, self.release = (asyncio.Event() for _ in range(3))
        add = self.registry.operation

        @add("job.wait")
        async def wait() -> str:
            self.started.set()
            try:
                await self.release.wait()
            finally:
                self.stopped.set()
            return "done"

        @add("job.report")
        async def report(context: OperationContext) -> str:
            await context.progress(1, 2, "half")
            return await wait()

        @add("job.log")
        async def log(context: OperationContext) -> str:
            await context.log("info", "note")
            return "done"

        @add("job.ask")
        async def ask(context: OperationContext) -> str:
            reply = await context.elicit("Who?", {"type": "object", "properties": {}})
            return str(reply["action"])

        @add("job.large")
        async def large() -> str:
            return "x" * 3_000_000


def token(value: int | str) -> JSONObject:
    return {"_meta": {"progressToken": value}}


# ---------------------------------------------------------------- JSON or a stream


@VERSIONS
@pytest.mark.parametrize("lean", [True, False])
async def test_plain_requests_get_json_responses(version: str, lean: bool) -> None:
    async with connected(to_mcp(example()).asgi_app(lean=lean), version) as peer:
        answers = [
            await peer.post("ping", {}),
            await peer.post("tools/list", {}),
            await peer.post("tools/call", {"name": "math__add", "arguments": {"a": 1}}, "one"),
            await peer.post("prompts/list", {}),
        ]

    assert [answer.headers["content-type"] for answer in answers] == ["application/json"] * 4
    assert answers[2].json()["id"] == "one"
    assert answers[2].json()["result"]["structuredContent"] == {"result": 2}


@VERSIONS
async def test_the_first_report_turns_the_response_into_a_stream(version: str) -> None:
    jobs = Jobs()
    jobs.release.set()
    async with connected(to_mcp(jobs.registry).asgi_app(), version) as peer:
        async with peer.streamed("job__report", **token("t")) as stream:
            sent = [event async for event in stream]
        silent = await peer.call("job__report")

    if version == "2025-11-25":
        start = sent.pop(0)
        assert start == {"id": "1", "retry": "500", "data": ""}
    assert [event["data"].get("params") for event in sent] == [
        {"progressToken": "t", "progress": 1, "total": 2, "message": "half"},
        None,
    ]
    assert sent[-1]["data"]["result"]["content"][0]["text"] == "done"
    assert silent.headers["content-type"] == "application/json", "no token, so nothing to report"


async def test_log_messages_are_streamed_from_the_level_the_client_set() -> None:
    async with connected(to_mcp(Jobs().registry).asgi_app()) as peer:
        async with peer.streamed("job__log") as stream:
            logged = [event["data"] async for event in stream if event["data"]]
        await peer.post("logging/setLevel", {"level": "error"})
        below = await peer.call("job__log")

    assert logged[0]["params"] == {"level": "info", "data": "note"}
    assert below.headers["content-type"] == "application/json"


async def test_without_a_session_reports_are_streamed_but_nothing_is_asked() -> None:
    jobs = Jobs()
    jobs.release.set()
    app = to_mcp(jobs.registry, stateless=True).asgi_app()
    async with serving(app) as address, httpx2.AsyncClient(base_url=address) as client:
        peer = Peer(client, {})
        async with peer.streamed("job__report", **token(1)) as stream:
            sent = [event async for event in stream]
        result = (await peer.call("job__ask")).json()["result"]
        got = await client.get("/mcp", headers=peer.headers)

    assert [set(event) for event in sent] == [{"event", "data"}] * 2
    assert result["isError"]
    assert (got.status_code, got.headers["allow"]) == (405, "POST")


async def test_a_client_that_prefers_streams_gets_a_stream_from_the_beginning() -> None:
    accept = {"accept": "text/event-stream, application/json"}
    async with connected(to_mcp(example()).asgi_app()) as peer:
        peer.headers |= accept
        async with peer.streamed("math__add", arguments={"a": 1}) as stream:
            sent = [event async for event in stream]

    assert [event["data"] and event["data"]["id"] for event in sent] == ["", 1]


async def test_a_call_that_is_silent_for_long_keeps_its_connection_open() -> None:
    jobs = Jobs()
    async with (
        connected(to_mcp(jobs.registry, heartbeat=0.02).asgi_app()) as peer,
        peer.streamed("job__wait") as stream,
    ):
        start = await anext(stream)
        jobs.release.set()
        result = await anext(stream)

    assert start["data"] == ""
    assert result["data"]["result"]["content"][0]["text"] == "done"


async def test_a_stream_that_cannot_be_resumed_ends_with_the_reason_if_its_result_is_refused() -> (
    None
):
    limits = Limits(output_bytes_per_caller=100_000)
    registry = OperationRegistry()

    @registry.operation("job.large")
    async def large(context: OperationContext) -> str:
        await context.progress(1)
        return "x" * 3_000_000

    app = to_mcp(registry, stateless=True, limits=limits).asgi_app()
    headers = {"accept": "application/json, text/event-stream"}
    async with (
        serving(app) as address,
        httpx2.AsyncClient(base_url=address) as client,
        Peer(client, headers).streamed("job__large", _meta={"progressToken": 1}) as stream,
    ):
        progress, last = [event["data"] async for event in stream]

    assert progress["method"] == "notifications/progress"
    assert last["id"] == 1
    assert last["error"]["code"] == -32603
    assert last["error"]["message"].startswith("Too many response bytes")


async def test_a_result_may_be_larger_than_an_event_may_be() -> None:
    async with (
        serving(to_mcp(Jobs().registry).asgi_app()) as address,
        Client(f"{address}/mcp", mode="legacy") as client,
    ):
        result = await client.call_tool("job__large", {})

    assert len(result.content[0].text) == 3_000_000  # type: ignore[union-attr]


@VERSIONS
async def test_in_a_session_the_lean_path_responds_as_the_sdk_does(version: str) -> None:
    async with (
        connected(to_mcp(example()).asgi_app(), version) as lean,
        connected(to_mcp(example()).asgi_app(lean=False), version) as sdk,
    ):
        for method, params in PLAIN:
            ours, theirs = await lean.post(method, params), await sdk.post(method, params)
            assert ours.status_code == theirs.status_code, (method, params)
            if ours.headers["content-type"] == "application/json":
                assert ours.json() == theirs.json(), (method, params)
            else:
                assert ours.text == theirs.text, (method, params)


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize(
    ("version", "kinds"),
    [
        ("2024-11-05", ["text", "text", "text"]),
        ("2025-03-26", ["text", "audio", "text"]),
        ("2025-06-18", ["text", "audio", "resource_link"]),
    ],
)
async def test_blocks_that_an_older_client_does_not_know_become_text(
    version: str, kinds: list[str], lean: bool
) -> None:
    registry = OperationRegistry()
    blocks: list[Any] = [
        TextContent(text="hi"),
        AudioContent(data="AA==", mime_type="audio/wav"),
        ResourceLink(uri="note://a", name="a"),
    ]

    @registry.operation("job.blocks")
    async def mixed() -> Any:
        return mcp_envelope(None, is_error=False, content=blocks)

    @registry.operation("job.prompt", type="query", meta={"mcp": {"prompt": True}})
    async def prompt() -> Any:
        return [{"role": "user", "content": block} for block in msgspec.to_builtins(blocks)]

    async with connected(to_mcp(registry).asgi_app(lean=lean), version) as peer:
        result = (await peer.call("job__blocks")).json()["result"]
        filled_in = (await peer.post("prompts/get", {"name": "job__prompt"})).json()["result"]

    assert [block["type"] for block in result["content"]] == kinds
    assert [message["content"]["type"] for message in filled_in["messages"]] == kinds
    if kinds[2] == "text":
        assert '"uri":"note://a"' in result["content"][2]["text"]


# ---------------------------------------------------------------- questions and cancellation


@pytest.mark.requirement("R11")
async def test_a_question_is_answered_by_its_own_session_only() -> None:
    app = to_mcp(Jobs().registry, identify=identify).asgi_app()
    async with connected(app, capabilities={"elicitation": {}}, **{"x-key": "ann"}) as peer:
        other = Peer(peer.http, {"x-key": "bob"})
        await handshake(other, capabilities={"elicitation": {}})
        async with peer.streamed("job__ask") as stream:
            await anext(stream)
            question = (await anext(stream))["data"]
            assert question["method"] == "elicitation/create"
            await other.answer(question["id"], {"action": "cancel"})
            stolen = Peer(peer.http, {**other.headers, "mcp-session-id": peer.session})
            assert (await stolen.answer(question["id"], {"action": "cancel"})).status_code == 404
            response = await peer.answer(question["id"], {"action": "decline"})
            result = (await anext(stream))["data"]

    assert response.status_code == 202
    assert result["result"]["content"][0]["text"] == "decline"


@pytest.mark.requirement("R11", "R31")
@pytest.mark.parametrize("lean", [True, False])
async def test_a_client_cancels_its_own_requests_only(lean: bool) -> None:
    jobs = Jobs()
    async with connected(to_mcp(jobs.registry).asgi_app(lean=lean)) as peer:
        other = Peer(peer.http, {})
        await handshake(other)
        call = asyncio.create_task(peer.call("job__wait"))
        await jobs.started.wait()
        for unknown in (None, "1", 2):
            await peer.post("notifications/cancelled", {"requestId": unknown}, None)
        await other.post("notifications/cancelled", {"requestId": 1}, None)
        assert not jobs.stopped.is_set()
        await peer.post("notifications/cancelled", {"requestId": 1}, None)
        await jobs.stopped.wait()
        answer = await call

    assert answer.json()["error"] == {"code": -32800, "message": "Request cancelled"}


async def test_a_question_of_a_cancelled_call_is_withdrawn() -> None:
    app = to_mcp(Jobs().registry).asgi_app()
    async with (
        connected(app, capabilities={"elicitation": {}}) as peer,
        peer.streamed("job__ask") as stream,
    ):
        await anext(stream)
        question = (await anext(stream))["data"]
        await peer.post("notifications/cancelled", {"requestId": 1}, None)
        withdrawn, answer = [event["data"] async for event in stream]

    assert withdrawn["params"] == {"requestId": question["id"]}
    assert answer["error"]["code"] == -32800


@pytest.mark.requirement("R31")
async def test_a_call_ends_with_its_client_as_long_as_it_cannot_be_resumed() -> None:
    jobs = Jobs()
    async with connected(to_mcp(jobs.registry).asgi_app()) as peer:
        call = asyncio.create_task(peer.call("job__wait"))
        await jobs.started.wait()
        call.cancel()
        await jobs.stopped.wait()


# ---------------------------------------------------------------- resumption


class Stubborn:
    """An operation that ignores its cancellation, and one that does not."""

    def __init__(self) -> None:
        self.over = asyncio.Event()
        self.finished = asyncio.Event()
        self.nested_code = ""
        self.registry = registry = OperationRegistry()

        @registry.operation("do.wait")
        async def wait() -> str:
            await asyncio.Event().wait()
            return ""

        @registry.operation("do.stubborn")
        async def stubborn(context: OperationContext, reports: bool) -> str:
            if reports:
                await context.progress(1)
            try:
                await context.env.do.wait()
            except BaseException as error:  # noqa: BLE001 - that is the point
                self.nested_code = getattr(error, "code", type(error).__name__)
            for _ in range(2):
                with suppress(asyncio.CancelledError):
                    await self.over.wait()
            await context.log("error", "nobody reads this")
            self.finished.set()
            return "late"


@pytest.mark.parametrize("reports", [False, True])
async def test_a_tool_that_ignores_its_cancellation_is_answered_in_time(reports: bool) -> None:
    jobs = Stubborn()
    params = {"arguments": {"reports": reports}, "_meta": {"progressToken": "p"}}
    async with connected(to_mcp(jobs.registry, timeout=1).asgi_app()) as peer:
        if reports:
            async with peer.streamed("do__stubborn", **params) as stream:
                received = [event["data"] async for event in stream if event.get("data")]
            methods = [message.get("method") for message in received]
            assert methods == ["notifications/progress", None]
            result = received[-1]["result"]
        else:
            response = await peer.call("do__stubborn", **params)
            assert response.headers["content-type"] == "application/json"
            result = response.json()["result"]
        assert error_of(result)["code"] == "TIMEOUT"
        assert re.search(r"within (1|0\.\d+) s", error_of(result)["message"])

        waited = await peer.call("do__wait")
        assert error_of(waited.json()["result"])["code"] == "TIMEOUT"
        jobs.over.set()
        await jobs.finished.wait()
        assert jobs.nested_code == "CancelledError"
        assert (await peer.post("tools/list", {})).status_code == 200


async def test_a_tool_that_ignores_its_cancellation_is_answered_in_time_without_a_handshake() -> (
    None
):
    jobs = Stubborn()
    app = to_mcp(jobs.registry, timeout=1).asgi_app()
    with time_limit(20):
        async with serving(app) as address, Client(f"{address}/mcp") as client:
            late = await client.call_tool("do__stubborn", {"reports": False})
            waited = await client.call_tool("do__wait", {})
            jobs.over.set()
            await jobs.finished.wait()

    assert error_of(late)["code"] == error_of(waited)["code"] == "TIMEOUT"


@pytest.mark.parametrize("mode", ["session", "stateless", "modern"])
async def test_a_request_is_freed_without_the_garbage_collector(mode: str) -> None:
    """Full collections took 70 ms each: with reference cycles, they were the 99th percentile of the latency."""
    app = to_mcp(example(), stateless=mode == "stateless").asgi_app()
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def post(method: str, params: JSONObject, *headers: tuple[bytes, bytes]) -> None:
        body = msgspec.json.encode({"jsonrpc": "2.0", "id": 1, "method": method, "params": params})
        bodies = [{"type": "http.request", "body": body}]

        async def receive() -> Any:
            return bodies.pop() if bodies else await asyncio.Event().wait()

        kinds = ((b"accept", BOTH.encode()), (b"content-type", b"application/json"))
        sent_headers = [(b"host", b"localhost"), *kinds, *headers]
        request: JSONObject = {"type": "http", "method": "POST", "path": "/mcp", "client": None}
        scope = {**request, "headers": sent_headers}
        sent.clear()
        await asyncio.create_task(app(scope, receive, send))
        assert sent[0]["status"] == 200, sent

    headers = [(b"mcp-protocol-version", b"2025-06-18")]
    params: JSONObject = {"name": "math__add", "arguments": {"a": 1}}
    if mode == "session":
        client = {"name": "t", "version": "1"}
        opening = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": client}
        await post("initialize", opening, *headers)
        headers += [pair for pair in sent[0]["headers"] if pair[0] == b"mcp-session-id"]
    elif mode == "modern":
        headers = [(b"mcp-protocol-version", MODERN.encode())]
        headers += [(b"mcp-method", b"tools/call"), (b"mcp-name", b"math__add")]
        params["_meta"] = MODERN_META
    await post("tools/call", params, *headers)
    await asyncio.sleep(0)
    gc.collect()
    gc.disable()
    try:
        cycles: list[int] = []
        # The least of three, because tasks of earlier tests may end meanwhile.
        for _ in range(3):
            for _ in range(20):
                await post("tools/call", params, *headers)
            cycles.append(gc.collect())
        assert min(cycles) < 20
    finally:
        gc.enable()


async def test_a_lost_stream_is_resumed_where_it_was_lost() -> None:
    jobs = Jobs()
    async with connected(to_mcp(jobs.registry).asgi_app()) as peer:
        async with peer.streamed("job__report", **token(1)) as stream:
            start = await anext(stream)
        await jobs.started.wait()
        async with peer.get(**{"last-event-id": start["id"]}) as stream:
            reported = await anext(stream)
            jobs.release.set()
            result = await anext(stream)
            rest = [event async for event in stream]
        async with peer.get(**{"last-event-id": reported["id"]}) as stream:
            again = [event async for event in stream]

    assert reported["data"]["params"]["message"] == "half"
    assert result["data"]["result"]["content"][0]["text"] == "done"
    assert rest == [], "the stream ends with the result"
    assert again == [result]


async def test_a_stream_is_resumed_whose_server_reports_the_lost_client_as_an_error() -> None:
    jobs, lost = Jobs(), asyncio.Event()
    app = to_mcp(jobs.registry).asgi_app()

    async def losing(scope: Any, receive: Any, send: Any) -> None:
        async def send_or_fail(message: Any) -> None:
            if lost.is_set() and scope["method"] == "POST":
                raise ConnectionResetError
            await send(message)

        await app(scope, receive, send_or_fail)

    async with connected(losing) as peer:
        async with peer.streamed("job__report", **token(1)) as stream:
            await anext(stream)
            reported = await anext(stream)
        lost.set()
        jobs.release.set()
        async with peer.get(**{"last-event-id": reported["id"]}) as stream:
            rest = [event async for event in stream]

    assert [event["data"]["result"]["content"][0]["text"] for event in rest] == ["done"]


@pytest.mark.parametrize("accept", [BOTH, "text/event-stream, application/json"])
async def test_a_released_call_is_answered_on_a_stream_of_its_own(accept: str) -> None:
    registry, release = OperationRegistry(), asyncio.Event()

    @registry.operation("job.long")
    async def long() -> str:
        assert await release_stream()
        await release.wait()
        return "done"

    async with connected(to_mcp(registry).asgi_app()) as peer:
        peer.headers["accept"] = accept
        async with peer.streamed("job__long", 1) as stream:
            first = [event async for event in stream]
        async with peer.streamed("job__long", 2) as stream:
            second = [event async for event in stream]
        # After this time the server notices clients that disconnected.
        await asyncio.sleep(2 * CLIENT_CHECK_SECONDS)
        release.set()
        async with peer.get(**{"last-event-id": second[0]["id"]}) as stream:
            answers = [event["data"]["id"] async for event in stream]

    assert [len(first), len(second)] == [1, 1]
    assert answers == [2]


async def test_changes_are_announced_on_the_stream_that_belongs_to_no_request() -> None:
    registry = example()
    async with connected(to_mcp(registry).asgi_app()) as peer:

        def change(name: str) -> None:
            registry.operation(name)(lambda: 1)

        async with peer.get() as stream:
            second = await peer.http.get("/mcp", headers=peer.headers)
            change("new.one")
            announced = await anext(stream)
        change("new.two")
        # Resume at the lost event, although the server has not noticed that the first stream broke.
        async with peer.get(**{"last-event-id": announced["id"]}) as stream:
            missed = await anext(stream)
        async with peer.get(**{"last-event-id": "99"}) as stream:
            unknown = [event async for event in stream]

    assert second.status_code == 409
    assert announced["data"]["method"] == "notifications/tools/list_changed"
    assert int(missed["id"]) == int(announced["id"]) + 1
    assert unknown == []


async def test_kept_events_are_bounded_by_number_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_EVENTS", 3)
    monkeypatch.setattr(sessions, "MAX_EVENT_BYTES", 200)
    log = EventLog()
    stream = log.open_stream()
    for _ in range(4):
        log.add(stream, b"{}")
    assert [log.find(str(number)) is None for number in range(1, 5)] == [True, False, False, False]
    log.add(STANDALONE, b"x" * 300)
    assert [log.find(str(number)) for number in range(1, 6)] == [None] * 4 + [(5, STANDALONE)]
    for unknown in ("", "0", "99", "-1", "x", "\u00b2"):
        assert log.find(unknown) is None


async def test_a_silent_stream_sends_comments_and_ends_when_another_reader_takes_over() -> None:
    log = EventLog()
    first = log.follow(STANDALONE, 0, 0.01)
    assert await anext(first) == ALIVE
    second = log.follow(STANDALONE, 0, 0.01)
    assert await anext(second) == ALIVE
    assert [part async for part in first] == []
    assert log.is_read(STANDALONE)
    await second.aclose()
    assert not log.is_read(STANDALONE)


async def test_a_silent_stream_sends_comments_while_other_streams_are_busy() -> None:
    log = EventLog()
    busy = log.open_stream()

    async def report() -> None:
        while True:
            log.add(busy, b"{}")
            await asyncio.sleep(0.001)

    reporting = asyncio.create_task(report())
    with time_limit(10):
        async for part in log.follow(STANDALONE, 0, 0.2):
            assert part == ALIVE
            break
    reporting.cancel()


# ---------------------------------------------------------------- the end of a session


async def test_a_deleted_session_ends_its_calls_and_streams() -> None:
    jobs = Jobs()
    async with connected(to_mcp(jobs.registry).asgi_app()) as peer:
        call = asyncio.create_task(peer.call("job__wait"))
        await jobs.started.wait()
        async with peer.get() as stream:
            deleted = await peer.http.delete("/mcp", headers=peer.headers)
            rest = [event async for event in stream]
        answer = await call
        after = await peer.post("ping", {})

    assert (deleted.status_code, after.status_code, rest) == (200, 404, [])
    assert answer.json()["error"]["code"] == -32800
    assert jobs.stopped.is_set()


async def test_an_idle_session_ends_and_a_used_one_stays() -> None:
    table, monitor = SessionTable(0.05), Front(OperationRegistry()).credentials
    idle, used = Session("at:1", None), Session("at:2", None)
    ended = asyncio.Event()
    idle.connection.exit_stack.callback(ended.set)
    for session in (used, idle):
        table.add(session, None, monitor)
    with table.in_use(used, None, monitor):
        expiring = asyncio.create_task(table.expire())
        with time_limit(20):
            await ended.wait()
        expiring.cancel()

    assert table.find(idle.id, None) is None
    assert table.find(used.id, None) is used


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"accept": "application/json"}, 406),
        ({"accept": "text/event-stream"}, 406),
        ({"accept": "*/*"}, 200),
        ({"accept": "application/*;q=0.5, TEXT/event-stream"}, 200),
        ({"content-type": "text/plain"}, 415),
        ({"mcp-session-id": "unknown"}, 404),
    ],
)
async def test_requests_with_wrong_headers_are_rejected(
    headers: dict[str, str], status: int
) -> None:
    async with connected(to_mcp(example()).asgi_app()) as peer:
        answer = await peer.post("tools/list", {}, **headers)

    assert answer.status_code == status
    if status != 200:
        assert answer.json()["error"]["code"] == -32600


async def test_requests_without_a_session_are_rejected() -> None:
    async with (
        serving(to_mcp(example()).asgi_app()) as address,
        httpx2.AsyncClient(base_url=address, headers={"accept": BOTH}) as client,
    ):
        peer = Peer(client, {})
        assert (await peer.post("tools/list", {})).status_code == 400
        assert (await peer.post("ping", {})).status_code == 400
        assert (await peer.post("initialize", {}, None)).status_code == 400
        refused = await peer.post("initialize", {"protocolVersion": 1})
        assert refused.json()["error"]["code"] == -32602
        assert (await client.get("/mcp")).status_code == 400
        assert (await client.delete("/mcp")).status_code == 400
        assert (await client.put("/mcp")).status_code == 405
        assert (await client.get("/mcp", headers={"accept": "text/html"})).status_code == 406


@pytest.mark.parametrize(
    ("body", "code"),
    [(b"{", -32700), (b"[]", -32600), (b'{"jsonrpc": "2.0", "id": {}, "method": "x"}', -32600)],
)
async def test_bodies_that_are_not_messages_are_rejected(body: bytes, code: int) -> None:
    async with connected(to_mcp(example()).asgi_app()) as peer:
        headers = {**peer.headers, "content-type": "application/json"}
        answer = await peer.http.post("/mcp", content=body, headers=headers)

    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == code


async def test_numbers_of_any_length_are_unknown_events_and_answers() -> None:
    digits = "9" * 5_000
    async with connected(to_mcp(example()).asgi_app()) as peer:
        async with peer.get(**{"last-event-id": digits}) as stream:
            assert [event async for event in stream] == []
        assert (await peer.answer(digits, {})).status_code == 202


async def test_unknown_methods_get_the_error_message_of_the_sdk() -> None:
    async with connected(to_mcp(example()).asgi_app()) as peer:
        answer = await peer.post("no/such", {})

    assert answer.json()["error"]["code"] == -32601
