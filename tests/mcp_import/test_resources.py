"""Resources, templates and prompts of a server."""

import asyncio
import json
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from mcp.server.mcpserver import MCPServer
from tests.limits import time_limit
from tests.mcp_import.support import demo_server, raw
from tests.mcp_serving import upstream

from operations import (
    CallError,
    ErrorCode,
    Identity,
    OperationContext,
    OperationRegistry,
    OperationType,
)
from operations.mcp import MCPClientConfig, connect_mcp


@pytest.fixture(params=["2025-11-25", "2026-07-28"])
async def registry(request: pytest.FixtureRequest) -> AsyncGenerator[OperationRegistry]:
    config = MCPClientConfig(server=demo_server(), version=request.param)
    async with connect_mcp("demo", config) as client:
        yield OperationRegistry(client)


async def test_resources_and_prompts_are_queries(registry: OperationRegistry) -> None:
    kinds = {operation.spec.name: operation.spec.type for operation in registry}

    for name in (
        "resources.list",
        "resources.read",
        "resources.templates",
        "templates.day",
        "prompts.summarise",
    ):
        assert kinds[name] is OperationType.QUERY


async def test_resources_are_listed_and_read(registry: OperationRegistry) -> None:
    listed = (await registry.execute("demo.resources.list", {})).data
    templates = (await registry.execute("demo.resources.templates", {})).data
    read = await registry.execute("demo.resources.read", {"uri": "memo://today"})

    assert [entry["uri"] for entry in listed] == ["memo://today"]
    assert [entry["uriTemplate"] for entry in templates] == ["memo://day/{name}"]
    assert read.data == [{"uri": "memo://today", "mimeType": "text/plain", "text": "Sunday"}]
    assert len(read.meta.content) == 1  # type: ignore[union-attr]


@pytest.mark.requirement("R01")
@pytest.mark.parametrize("name", ["monday", "a/b", "..a", "%41", "a?x=1", "a#f"])
async def test_a_template_is_filled_in_safely_and_read(
    registry: OperationRegistry, name: str
) -> None:
    read = await registry.execute("demo.templates.day", {"name": name})

    assert read.data[0]["uri"].count("/") == 3
    assert read.data[0]["uri"].startswith("memo://day/")


@pytest.mark.requirement("R01")
@pytest.mark.parametrize(
    "name", ["..", ".", "../x", "%2e%2e", "%252e.", "a\\..\\b", "..;a", "a\nb", "a\0"], ids=repr
)
async def test_a_template_rejects_values_that_leave_their_segment(
    registry: OperationRegistry, name: str
) -> None:
    with pytest.raises(CallError) as caught:
        await registry.execute("demo.templates.day", {"name": name})

    assert caught.value.code == ErrorCode.VALIDATION_ERROR


async def test_a_prompt_takes_its_arguments(registry: OperationRegistry) -> None:
    prompt = await registry.execute("demo.prompts.summarise", {"text": "tea"})

    assert prompt.data["messages"] == [
        {"role": "user", "content": {"type": "text", "text": "Summarise: tea"}}
    ]
    with pytest.raises(CallError) as caught:
        await registry.execute("demo.prompts.summarise", {})
    assert caught.value.code == ErrorCode.VALIDATION_ERROR


async def test_a_resource_that_is_not_there_is_an_error_with_the_servers_code(
    registry: OperationRegistry,
) -> None:
    with pytest.raises(CallError) as caught:
        await registry.execute("demo.resources.read", {"uri": "memo://nowhere"})

    assert caught.value.code == ErrorCode.EXECUTION_ERROR
    assert isinstance(caught.value.details["code"], int)


@pytest.mark.parametrize("pin", ["strict", "off"])
async def test_malformed_resources_are_left_out_of_a_list(pin: str) -> None:
    good = {"uri": "memo://today", "name": "today"}
    entries = json.dumps(["x", None, 3, {"name": "no address"}, {"uri": 5, "name": "n"}, good])
    async with connect_mcp("raw", raw("resources", entries, pin=pin)) as client:
        listed = await OperationRegistry(client).execute("raw.resources.list", {})

    assert listed.data == [good]


async def test_a_server_without_them_has_tools_only() -> None:
    server = MCPServer("plain")

    @server.tool()
    def only() -> str:
        return "me"

    async with connect_mcp("plain", MCPClientConfig(server=server)) as client:
        assert [each.spec.id for each in client] == ["plain.only"]
    async with connect_mcp("raw", raw(allow=["pid"])) as client:
        assert [each.spec.id for each in client] == ["raw.pid"]


SUBSCRIBED = """
import json, sys
CAPABILITIES = {"resources": {"subscribe": True}}
for line in sys.stdin:
    request = json.loads(line)
    with open(sys.argv[1], "a") as file:
        print(request["method"], file=file)
    if "id" not in request or request["method"] == "resources/unsubscribe":
        continue
    result = {
        "initialize": {
            "protocolVersion": "2025-11-25",
            "capabilities": CAPABILITIES,
            "serverInfo": {"name": "notes", "version": "1"},
        },
        "resources/list": {"resources": [{"uri": "note://a", "name": "a"}]},
        "resources/subscribe": {},
        "resources/templates/list": {"resourceTemplates": []},
    }.get(request["method"])
    answer = {"error": {"code": -32601, "message": "unknown"}} if result is None else {"result": result}
    print(json.dumps({"jsonrpc": "2.0", "id": request["id"], **answer}), flush=True)
    if request["method"] == "resources/subscribe" and sys.argv[2:] == ["once"]:
        break
    if request["method"] == "resources/subscribe" and sys.argv[2:] == ["many"]:
        for number in (*range(499), *range(500)):
            params = {"uri": f"note://a/{number}"}
            notice = {"method": "notifications/resources/updated", "params": params}
            print(json.dumps({"jsonrpc": "2.0", **notice}), flush=True)
"""


@pytest.mark.requirement("R27")
async def test_arguments_for_suggestions_are_described_and_checked() -> None:
    prompt = {"type": "ref/prompt", "name": "about", "title": "About"}
    async with connect_mcp("up", MCPClientConfig(server=upstream.build())) as client:
        registry = OperationRegistry(client)
        found = await registry.execute(
            "up.completions.complete", {"ref": prompt, "argument": {"name": "topic", "value": "x"}}
        )
        with pytest.raises(CallError) as caught:
            await registry.execute(
                "up.completions.complete",
                {"ref": prompt, "argument": {"name": "topic", "value": 7}},
            )

    assert found.data["values"] == ["xa", "xb"]
    assert caught.value.code == ErrorCode.VALIDATION_ERROR


async def test_closing_does_not_wait_for_the_end_of_subscriptions(tmp_path: Path) -> None:
    script, received = tmp_path / "server.py", tmp_path / "received"
    script.write_text(SUBSCRIBED)
    config = MCPClientConfig(command=sys.executable, args=[str(script), str(received)])
    async with connect_mcp("notes", config) as client:
        registry = OperationRegistry(client)
        changes = registry.subscribe("notes.resources.watch", {"uri": "note://a"})
        await anext(changes)

    assert "resources/subscribe" in received.read_text().split()
    assert "resources/unsubscribe" not in received.read_text().split()


async def test_a_slow_subscriber_receives_hundreds_of_changes_once(tmp_path: Path) -> None:
    """As of a folder in which a program has changed many files at once."""
    script, received = tmp_path / "server.py", tmp_path / "received"
    script.write_text(SUBSCRIBED)
    config = MCPClientConfig(command=sys.executable, args=[str(script), str(received), "many"])
    async with connect_mcp("notes", config) as client:
        registry = OperationRegistry(client)
        changes = registry.subscribe("notes.resources.watch", {"uri": "note://a"})
        await anext(changes)
        # The response follows the notifications.
        await registry.execute("notes.resources.list", {})
        with time_limit(20):
            found = [(await anext(changes)).data["uri"] for _ in range(500)]

    assert found == [f"note://a/{number}" for number in range(500)]


async def test_the_connection_of_a_lost_subscription_is_not_closed_for_another_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("operations.mcp.source.connection.MAX_CALLERS", 1)
    monkeypatch.setattr("operations.mcp.source.listing._RENEW_SECONDS", 60)
    script, received = tmp_path / "server.py", tmp_path / "received"
    script.write_text(SUBSCRIBED)
    config = MCPClientConfig(
        command=sys.executable, args=[str(script), str(received), "once"], per_caller=True
    )
    ann, bob = (OperationContext(identity=Identity(name)) for name in ("ann", "bob"))
    with time_limit(30):
        async with connect_mcp("notes", config) as client:
            registry = OperationRegistry(client)
            opened = received.read_text().split().count("initialize")
            changes = registry.subscribe("notes.resources.watch", {"uri": "note://a"}, ann)
            await anext(changes)
            while received.read_text().split().count("initialize") < opened + 2:
                await asyncio.sleep(0.01)
            with pytest.raises(CallError) as caught:
                await registry.execute("notes.resources.read", {"uri": "note://a"}, bob)

    assert caught.value.code == ErrorCode.RESOURCE_EXHAUSTED


async def test_a_wrong_handshake_does_not_add_tools_to_a_server_without_capabilities(
    tmp_path: Path,
) -> None:
    script, received = tmp_path / "server.py", tmp_path / "received"
    text = SUBSCRIBED.replace('{"resources": {"subscribe": True}}', "{}")
    script.write_text(text.replace('"name": "notes"', '"name": 5'))
    config = MCPClientConfig(command=sys.executable, args=[str(script), str(received)])
    async with connect_mcp("notes", config) as client:
        assert list(client) == []
