"""Results that are larger than `max_bytes` are split into pages of valid JSON, with a cursor that only their
caller can use."""

import base64
import time
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mcp import Client as MCPClient
from tests.limits import processor_limit, time_limit
from tests.server.asgi import Client as HTTPClient

from operations import (
    CallError,
    ErrorCode,
    Identity,
    Operation,
    OperationContext,
    OperationRegistry,
    OperationSpec,
    OperationType,
    mcp_envelope,
)
from operations.authority import Grants
from operations.base.errors import RegistrationError
from operations.calls import from_calls
from operations.contract.channel import CallerChannel
from operations.pubsub.websocket import connect_websocket
from operations.server import create_app, credential_resolver
from operations.server.http11.running import running
from operations.tools import ToolConfig, configure_tools
from operations.tools import pages as result_pages
from operations.tools.pages import NEXT, split

pytestmark = pytest.mark.anyio

NOBODY = OperationContext()
ANN, BEN = (OperationContext(identity=Identity(name, ["use"])) for name in ("ann", "ben"))
ROWS = [{"id": number, "name": "n" * 50, "tags": ["a", "b"]} for number in range(200)]
RESULT = {"total": 200, "rows": ROWS, "note": "last"}

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
values = st.recursive(
    scalars | st.text(min_size=300, max_size=900),
    lambda inner: st.lists(inner, max_size=12) | st.dictionaries(st.text(max_size=20), inner),
    max_leaves=60,
)


def tokens(path: str) -> list[str]:
    return [part.replace("~1", "/").replace("~0", "~") for part in path.split("/")[1:]]


def joined(pages: list[tuple[str, Any]]) -> Any:
    """Return the value that a client assembles from pages."""
    holder: dict[str, Any] = {}
    for path, fragment in pages:
        parent: Any = holder
        key: Any = "root"
        for token in tokens(path):
            parent = parent[key]
            key = int(token) if isinstance(parent, list) else token
        if isinstance(parent, dict) and key not in parent:
            parent[key] = fragment
        elif isinstance(fragment, dict):
            parent[key].update(fragment)
        else:
            parent[key] = parent[key] + fragment
    return holder["root"]


@given(value=values, limit=st.integers(min_value=250, max_value=2_000))
@settings(max_examples=60, deadline=None)
def test_pages_are_bounded_and_together_are_the_value(value: Any, limit: int) -> None:
    pages = list(split(value, limit))

    assert joined(msgspec.json.decode(msgspec.json.encode(pages))) == msgspec.json.decode(
        msgspec.json.encode(value)
    )
    for path, fragment in pages:
        if len(msgspec.json.encode(path)) < limit // 2:
            assert len(msgspec.json.encode(fragment)) <= limit


def test_items_stay_whole_if_they_fit() -> None:
    pages = list(split(RESULT, 1_000))

    rows = [row for path, page in pages for row in (page if path else page.get("rows", []))]
    assert rows == ROWS
    assert pages[0][1]["total"] == 200
    assert pages[-1] == ("", {"note": "last"})


def test_a_long_text_is_not_copied_for_each_page() -> None:
    text = "x" * 40_000_000

    with processor_limit(4):
        pages = sum(1 for _ in split({"text": text}, 8_192))

    assert pages > 4_000


def test_a_long_name_is_not_copied_for_each_item() -> None:
    value = {"k" * 1_000_000: [{"kept": "whole"}] * 100_000}

    with processor_limit(4):
        pages = list(split(value, 2_500_000))

    assert len(pages) == 2


def build(**tools: Any) -> OperationRegistry:
    registry = OperationRegistry()
    configure_tools(registry, {"shop.*": ToolConfig(max_bytes=1_000, **tools)})

    @registry.operation("shop.list", type="query", scopes=["use"])
    async def list_(count: int = 200) -> dict[str, Any]:
        return {**RESULT, "rows": ROWS[:count]}

    @registry.operation("shop.file", type="query")
    async def file() -> bytes:
        return bytes(range(256)) * 20

    @registry.operation("shop.watch")
    async def watch() -> AsyncIterator[dict[str, Any]]:
        yield {"id": 1}
        yield RESULT

    @registry.operation("shop.report")
    async def report(context: OperationContext) -> int:
        return len((await context.env.call("shop.list")).data["rows"])

    return registry


async def rest(registry: OperationRegistry, page: Any, context: OperationContext) -> Any:
    pages = [page]
    while "cursor" in pages[-1]:
        pages.append((await registry.execute(NEXT, {"cursor": pages[-1]["cursor"]}, context)).data)
    assert all(len(msgspec.json.encode(each)) <= 1_000 for each in pages)
    return joined([(each["path"], each["value"]) for each in pages])


async def code_of(call: Any) -> str:
    with pytest.raises(CallError) as caught:
        await call
    return caught.value.code


async def test_a_large_result_is_read_page_by_page_and_a_small_one_is_as_before() -> None:
    registry = build(cache=60)

    assert (await registry.execute("shop.list", {"count": 2}, ANN)).data["rows"] == ROWS[:2]
    for _ in range(2):
        first = await registry.execute("shop.list", {}, ANN)
        assert first.meta.source == "local"
        assert await rest(registry, first.data, ANN) == RESULT


async def test_bytes_items_and_nested_calls() -> None:
    registry = build()
    page = (await registry.execute("shop.file")).data
    assert page["encoding"] == "base64"
    text = await rest(registry, page, OperationContext())
    assert base64.b64decode(text) == bytes(range(256)) * 20

    small, large = [each.data async for each in registry.subscribe("shop.watch", {}, ANN)]
    assert small == {"id": 1}
    assert await rest(registry, large, ANN) == RESULT
    # Code of an operation reads whole results.
    assert (await registry.execute("shop.report", {}, ANN)).data == 200


@pytest.mark.requirement("R07")
async def test_a_cursor_is_valid_only_for_its_caller_while_it_has_access() -> None:
    registry = build()
    cursor = {"cursor": (await registry.execute("shop.list", {}, ANN)).data["cursor"]}
    wrong = [
        registry.execute(NEXT, cursor, BEN),
        registry.execute(NEXT, cursor, OperationContext()),
        registry.execute(NEXT, cursor, OperationContext(identity=Identity("ann", ["other"]))),
        *(
            registry.execute(NEXT, {"cursor": each}, ANN)
            for each in (
                "",
                "x.1",
                cursor["cursor"] + "0000",
                cursor["cursor"].split(".")[0] + ".0",
                cursor["cursor"].split(".")[0] + ".0000000019",
            )
        ),
    ]
    for call in wrong:
        assert await code_of(call) == ErrorCode.VALIDATION_ERROR
    for _ in range(2):
        assert (await registry.execute(NEXT, cursor, ANN)).data["value"]

    given = registry.registered("shop.list")
    assert given is not None
    registry.unregister("shop.list")
    assert await code_of(registry.execute(NEXT, cursor, ANN)) == ErrorCode.VALIDATION_ERROR


async def test_a_grant_for_an_operation_includes_the_pages_of_its_results() -> None:
    registry = build()
    grants = Grants(b"k" * 32, subjects={"ann": Identity("ann", ["use"])}.get)
    token = grants.create("ann", "bot", operations=["shop.list"], approve=["results.*"])
    other = grants.create("ann", "bot", operations=["shop.file"])
    agent, stranger = [
        OperationContext(identity=await grants.resolve(each)) for each in (token, other)
    ]

    first = (await registry.execute("shop.list", {}, agent)).data
    assert await rest(registry, first, agent) == RESULT
    assert (
        await code_of(registry.execute(NEXT, {"cursor": first["cursor"]}, stranger))
        == ErrorCode.VALIDATION_ERROR
    )

    client = HTTPClient(create_app(registry, identity=credential_resolver(grants.resolve)))
    headers = {"authorization": f"Bearer {token}"}
    page = await client.post("/shop/list", json={}, headers=headers)
    cursor = {"cursor": page.json["cursor"]}
    assert (await client.post("/results/next", json=cursor, headers=headers)).json["value"]
    listed = (await client.get("/operations", headers=headers)).json["operations"]
    assert [each["id"] for each in listed] == [NEXT, "shop.list"]
    # An open operation that the grant does not cover is as hidden as any other.
    assert (await client.get("/shop/file", headers=headers)).status == 404


async def test_sessions_without_identity_have_their_own_cursors() -> None:
    registry = build(scopes=[])
    one, two = (OperationContext(channel=CallerChannel(session=name)) for name in ("one", "two"))
    cursor = {"cursor": (await registry.execute("shop.list", {}, one)).data["cursor"]}

    assert (await registry.execute(NEXT, cursor, one)).data["value"]
    assert await code_of(registry.execute(NEXT, cursor, two)) == ErrorCode.VALIDATION_ERROR


async def test_pages_expire_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = build()
    monkeypatch.setattr(result_pages, "MAX_CALLER_BYTES", 60_000)
    monkeypatch.setattr(result_pages, "MAX_BYTES", 70_000)

    async def cursor(context: OperationContext) -> dict[str, str]:
        return {"cursor": (await registry.execute("shop.list", {}, context)).data["cursor"]}

    async def is_known(held: dict[str, str], context: OperationContext) -> bool:
        try:
            await registry.execute(NEXT, held, context)
        except CallError:
            return False
        return True

    # A result is about 18 KB.
    anns = [await cursor(ANN) for _ in range(4)]
    assert [await is_known(each, ANN) for each in anns] == [False, True, True, True]
    bens = await cursor(BEN)
    assert await is_known(bens, BEN)
    assert [await is_known(each, ANN) for each in anns] == [False, False, True, True]
    now = time.monotonic()
    monkeypatch.setattr(result_pages, "monotonic", lambda: now + result_pages.LIFETIME + 1)
    assert not await is_known(bens, BEN)


@pytest.mark.requirement("R18")
async def test_a_result_whose_pages_would_not_be_stored_is_an_error() -> None:
    registry = build()

    @registry.operation("shop.odd", type="query")
    async def odd() -> dict[str, list[int]]:
        # Every page repeats the name, so that a megabyte would take gigabytes of pages.
        return {"k" * 1_000_000: list(range(50_000))}

    tracemalloc.start()
    try:
        with pytest.raises(CallError) as caught:
            await registry.execute("shop.odd")
        assert tracemalloc.get_traced_memory()[1] < 100_000_000
    finally:
        tracemalloc.stop()
    assert caught.value.code == ErrorCode.RESOURCE_EXHAUSTED


async def test_blocks_of_an_mcp_result_are_paged_and_do_not_repeat_it() -> None:
    registry = OperationRegistry()
    configure_tools(registry, {"*": ToolConfig(max_bytes=1_000)})
    image = {"type": "image", "data": "A" * 4_000, "mimeType": "image/png"}

    async def tool(input: Any, context: OperationContext) -> Any:
        text = {"type": "text", "text": msgspec.json.encode(RESULT).decode()}
        if input["kind"] == "image":
            return mcp_envelope(
                {"w": 1}, is_error=False, content=[image], structured_content={"w": 1}
            )
        return mcp_envelope(RESULT, is_error=True, content=[text], structured_content=RESULT)

    registry.register(
        Operation(OperationSpec(namespace="far", name="tool", type=OperationType.QUERY), tool)
    )
    envelope = await registry.execute("far.tool", {"kind": "text"})
    meta: Any = envelope.meta
    assert meta.is_error
    assert meta.structured_content == envelope.data
    assert msgspec.json.decode(meta.content[0].text) == envelope.data
    assert await rest(registry, envelope.data, OperationContext()) == RESULT

    page = (await registry.execute("far.tool", {"kind": "image"})).data
    whole = await rest(registry, page, OperationContext())
    assert whole == {"content": [image], "data": {"w": 1}}


async def test_every_entry_point_returns_pages() -> None:
    registry = build(scopes=[])
    app = create_app(registry, mcp=True, websocket=True)

    with time_limit(30):
        async with running(app) as url:
            client = HTTPClient(app)
            page = (await client.get("/shop/list")).json
            pages = [page]
            while "cursor" in pages[-1]:
                reply = await client.get(f"/results/next?cursor={pages[-1]['cursor']}")
                assert len(reply.body) <= 1_000
                pages.append(reply.json)
            assert joined([(each["path"], each["value"]) for each in pages]) == RESULT
            body = {"operation": "shop.list", "input": {}}
            assert "cursor" in (await client.post("/call", json=body)).json["data"]

            async with MCPClient(f"{url}/mcp") as agent:
                result = await agent.call_tool("shop__list", {})
                assert result.structured_content is not None
                cursor = {"cursor": result.structured_content["cursor"]}
                following = await agent.call_tool("results__next", cursor)
                assert following.structured_content is not None
                assert following.structured_content["path"] == "/rows"

            address = url.replace("http", "ws", 1) + "/ws"
            async with connect_websocket(address) as target, from_calls(target) as remote:
                far = OperationRegistry(remote)
                assert await rest(far, (await far.execute("shop.list")).data, NOBODY) == RESULT


async def test_the_operation_appears_with_the_first_setting_and_disappears_with_the_last() -> None:
    registry = OperationRegistry()
    settings = configure_tools(registry, {})
    assert NEXT not in registry
    settings.change({"a.*": ToolConfig(max_bytes=1_000)})
    assert NEXT in registry
    settings.change({"a.*": ToolConfig(timeout=1)})
    assert NEXT not in registry

    @registry.operation(NEXT)
    async def own() -> int:
        return 1

    with pytest.raises(RegistrationError):
        settings.change({"a.*": ToolConfig(max_bytes=1_000)})
    assert settings.tools == {"a.*": ToolConfig(timeout=1)}
    with pytest.raises(ValueError, match="max_bytes"):
        ToolConfig(max_bytes=10)
