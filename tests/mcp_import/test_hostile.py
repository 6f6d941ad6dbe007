"""Servers that misbehave on stdio: each fault has a defined outcome, and none causes a hang or a leak."""

import asyncio
import base64
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator
from typing import Any

import anyio
import httpx2
import pytest
from pydantic import TypeAdapter, ValidationError
from tests.conftest import PROJECT
from tests.limits import processor_limit, scaled, time_limit
from tests.mcp_import.support import RAW, children, eventually, is_alive, nothing_left_behind, raw

from operations import (
    CallError,
    ErrorCode,
    MCPResponseMeta,
    OperationContext,
    OperationRegistry,
)
from operations.contract.channel import CallerChannel
from operations.mcp import MCPClient, MCPClientConfig, connect_mcp
from operations.mcp.source.listing import list_entries


@pytest.fixture(autouse=True)
async def bounded_and_clean() -> AsyncGenerator[None]:
    with nothing_left_behind():
        yield


async def failure_of(config: MCPClientConfig) -> CallError:
    with time_limit(20), pytest.raises(CallError) as caught:
        async with connect_mcp("raw", config):
            pass
    return caught.value


async def connected(client: MCPClient) -> OperationRegistry:
    registry = OperationRegistry()
    registry.register_all(client)
    return registry


@pytest.mark.requirement("R44")
async def test_a_server_that_exits_at_start_is_unavailable_and_its_stderr_is_hidden_from_callers() -> (
    None
):
    error = await failure_of(raw("exit"))

    assert error.code == ErrorCode.UNAVAILABLE
    assert error.details["exitCode"] == 1
    assert "the configuration is missing" in str(error)
    assert "the configuration is missing" not in str(error.to_wire())


async def test_a_server_that_never_answers_is_abandoned_in_time() -> None:
    with time_limit(20):
        error = await failure_of(raw("silent", connect_timeout=1))

    assert error.code == ErrorCode.UNAVAILABLE


async def test_output_of_a_server_before_the_protocol_is_ignored() -> None:
    async with connect_mcp("raw", raw("noisy")) as client:
        registry = await connected(client)
        envelope = await registry.execute("raw.answer", {"result": {"content": []}})

    assert envelope.data == []


async def test_a_call_without_a_response_ends_at_the_configured_time() -> None:
    async with connect_mcp("raw", raw(timeout=1.5)) as client:
        registry = await connected(client)
        with time_limit(20), pytest.raises(CallError) as caught:
            await registry.execute("raw.never", {})
        still = await registry.execute("raw.answer", {"result": {"content": []}})

    assert caught.value.code == ErrorCode.TIMEOUT
    assert still.data == []


async def test_a_garbage_response_fails_only_its_call() -> None:
    async with connect_mcp("raw", raw(timeout=1.5)) as client:
        registry = await connected(client)
        with time_limit(20), pytest.raises(CallError) as caught:
            await registry.execute("raw.garbage", {})
        still = await registry.execute("raw.answer", {"result": {"content": []}})

    assert caught.value.code == ErrorCode.TIMEOUT
    assert still.data == []


async def test_a_malformed_response_fails_its_call_at_once() -> None:
    codes: list[str] = []
    async with connect_mcp("raw", raw()) as client:
        registry = await connected(client)
        for what in ("no object", "surrogate", "deep"):
            with time_limit(20), pytest.raises(CallError) as caught:
                await registry.execute("raw.malformed", {"what": what})
            codes.append(caught.value.code)

    assert codes == ["EXECUTION_ERROR", "EXECUTION_ERROR", "RESOURCE_EXHAUSTED"]


@pytest.mark.requirement("R55")
async def test_too_many_values_fail_only_that_call() -> None:
    async with connect_mcp("raw", raw(max_message_values=1000)) as client:
        registry = await connected(client)
        result = {"content": [], "structuredContent": {"values": [0] * 1000}}
        with time_limit(30), pytest.raises(CallError) as caught:
            await registry.execute("raw.answer", {"result": result})
        result["structuredContent"] = {"values": [0] * 900}
        answer = await registry.execute("raw.answer", {"result": result})

    assert caught.value.code == ErrorCode.RESOURCE_EXHAUSTED
    assert answer.data == {"values": [0] * 900}


@pytest.mark.requirement("R18")
@pytest.mark.parametrize("tool", ["big", "long_line_other_end"])
async def test_a_message_of_100_megabytes_fails_only_its_call_and_uses_little_memory(
    tool: str,
) -> None:
    async with connect_mcp("raw", raw(max_message_bytes=1_000_000, timeout=100)) as client:
        registry = await connected(client)
        pid = (await registry.execute("raw.pid", {})).data
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with time_limit(90), pytest.raises(CallError) as caught:
            await registry.execute(f"raw.{tool}", {"bytes": 100_000_000})
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before

        assert (await registry.execute("raw.pid", {})).data == pid

    assert caught.value.code == ErrorCode.RESOURCE_EXHAUSTED
    assert grown < 17_000


async def test_five_thousand_tools_on_fifty_pages_are_all_there() -> None:
    async with connect_mcp("raw", raw("many")) as client:
        registry = await connected(client)

        assert len(registry) == 5000
        assert "raw.tool_4999" in registry


async def test_tools_beyond_the_limit_are_reported() -> None:
    async with connect_mcp("raw", raw("many", max_tools=250)) as client:
        assert len(client) == 250
        assert client.skipped == {"tools": "there are more than 250"}


async def test_an_endless_list_is_ended() -> None:
    with time_limit(20):
        async with connect_mcp("raw", raw("endless")) as client:
            assert len(client) == 2
            assert "repeats itself" in client.skipped["tools"]


async def test_a_list_whose_pages_never_end_is_ended() -> None:
    with time_limit(60):
        async with connect_mcp("raw", raw("pages")) as client:
            assert client.skipped["tools"] == "the list has more than 1000 pages"


async def test_a_server_that_announces_changes_constantly_is_listed_less_often() -> None:
    with time_limit(20):
        async with connect_mcp("raw", raw("storm")) as client:
            registry = await connected(client)
            began, listings = time.monotonic(), 0
            await anyio.sleep(2.5)
            while listings < 2:
                listings = int((await registry.execute("raw.listings", {})).data[0]["text"])
            took = time.monotonic() - began

    assert listings <= 8 * took / 2.5


async def test_equal_change_notifications_are_combined(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: Counter[str] = Counter()
    hear = MCPClient._hear

    async def recorded(client: MCPClient, calls: Any, message: Any) -> None:
        heard[type(message).__name__] += 1
        await hear(client, calls, message)

    monkeypatch.setattr(MCPClient, "_hear", recorded)
    kinds = {
        "tools/list_changed": "ToolListChangedNotification",
        "prompts/list_changed": "PromptListChangedNotification",
        "resources/list_changed": "ResourceListChangedNotification",
        "resources/updated": "ResourceUpdatedNotification",
    }
    lines = "".join(
        json.dumps({"jsonrpc": "2.0", "method": f"notifications/{kind}", "params": {"uri": "a:b"}})
        + "\n"
        for kind in kinds
    ).encode()
    async with connect_mcp("raw", raw()) as client:
        registry = await connected(client)
        flood = base64.b64encode(lines * 5_000).decode()
        await registry.execute("raw.say", {"bytes": flood})
        await registry.execute("raw.change", {"tool": "new"})
        await eventually(lambda: "raw.new" in registry)

    assert heard.keys() == set(kinds.values())
    assert heard.total() < 5_000


async def test_a_server_that_stops_reading_fails_only_the_calls_that_wait_for_it() -> None:
    with time_limit(60):
        async with connect_mcp("raw", raw(timeout=1.5)) as client:
            registry = await connected(client)
            await registry.execute("raw.deaf", {})
            large = {"result": "x" * 1_000_000}
            for _ in range(2):
                with pytest.raises(CallError) as caught:
                    await registry.execute("raw.answer", large)

    assert caught.value.code == ErrorCode.TIMEOUT


async def test_endless_output_is_a_timeout_and_does_not_block_closing() -> None:
    with time_limit(20):
        async with connect_mcp("raw", raw(timeout=1.5)) as client:
            registry = await connected(client)
            assert (await registry.execute("raw.flood", {})).data[0]["text"] == "here it comes"
            with pytest.raises(CallError) as caught:
                await registry.execute("raw.pid", {})

    assert caught.value.code == ErrorCode.TIMEOUT


@pytest.mark.requirement("R25")
async def test_malformed_tools_are_omitted_or_renamed_and_hide_no_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with connect_mcp("raw", raw("odd")) as client:
        names = {operation.spec.name for operation in client}
        skipped = client.skipped

    assert names == {"good", "twice", "files_read_me", "x_y", "bad_schemas", "good_too"}
    assert skipped.keys() == {
        r"a\nb", "twice", "no_schema", "tools[6]", "tools[7]", "tools[8]", "x/y", r"\u202ereversed",
    }  # fmt: skip
    (warning,) = [text for text in caplog.messages if "skipped" in text]
    assert "no_schema (" in warning
    assert "and 3 more" in warning


async def test_schemas_that_cannot_be_used_count_as_unknown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with connect_mcp("raw", raw("odd")) as client:
        (odd,) = [each for each in client if each.spec.name == "bad_schemas"]

        assert odd.spec.input_schema.is_unknown
        assert odd.spec.output_schema.is_unknown
    assert any(record.levelno == logging.WARNING for record in caplog.records)


async def test_a_server_that_ignores_closed_input_is_killed() -> None:
    before = children()
    with time_limit(20):
        async with connect_mcp("raw", raw("stubborn", shutdown_timeout=0.2)) as client:
            registry = await connected(client)
            pid = int((await registry.execute("raw.pid", {})).data[0]["text"])
            assert is_alive(pid)

    assert not is_alive(pid)
    assert children() == before


async def test_children_of_a_server_end_with_it() -> None:
    async with connect_mcp("raw", raw("parent")) as client:
        registry = await connected(client)
        pid = int((await registry.execute("raw.pid", {})).data[0]["text"])
        with open(f"/proc/{pid}/task/{pid}/children") as file:  # noqa: ASYNC230, PTH123 - /proc
            (grandchild,) = map(int, file.read().split())

    await eventually(lambda: not is_alive(grandchild))


async def test_children_that_left_the_process_group_do_not_delay_closing() -> None:
    with time_limit(20):
        async with connect_mcp("raw", raw("daemon")) as client:
            registry = await connected(client)
            pid = int((await registry.execute("raw.pid", {})).data[0]["text"])
            with open(f"/proc/{pid}/task/{pid}/children") as file:  # noqa: ASYNC230, PTH123 - /proc
                (daemon,) = map(int, file.read().split())

    assert not is_alive(pid)
    assert is_alive(daemon)  # it has its own session and is no longer a child of the server
    os.kill(daemon, signal.SIGKILL)


@pytest.mark.requirement("R15")
async def test_servers_end_when_we_are_killed() -> None:
    code = f"""
import asyncio, os, signal, sys
from operations import OperationRegistry
from operations.mcp import MCPClientConfig, connect_mcp

async def main():
    config = MCPClientConfig(command=sys.executable, args=["-I", "-S", {RAW!r}, "stubborn"])
    async with connect_mcp("raw", config) as client:
        registry = OperationRegistry(client)
        print((await registry.execute("raw.pid", {{}})).data[0]["text"], flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""
    done = subprocess.run(  # noqa: ASYNC221 - a process of its own, killed on purpose
        [sys.executable, "-c", code],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=scaled(200),
        check=False,
    )

    assert done.returncode == -9
    await eventually(lambda: not is_alive(int(done.stdout)))


@pytest.mark.requirement("R15")
async def test_a_child_sees_only_the_variables_it_is_meant_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_PARENT", "canary")
    async with connect_mcp("raw", raw(env={"GIVEN": "yes"})) as client:
        registry = await connected(client)
        shown = (await registry.execute("raw.env", {})).data[0]["text"]

    assert "canary" not in shown
    assert '"GIVEN": "yes"' in shown


HOSTILE_PATTERNS = [r"^(a+)+$", r"(\w{1,500}){1,100}$", r"^(?=(a+)+b)"]


@pytest.mark.requirement("R19")
@pytest.mark.parametrize("pattern", HOSTILE_PATTERNS)
async def test_a_pattern_of_a_servers_output_schema_cannot_block_the_loop(pattern: str) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "string", "pattern": pattern}}}
    tool = {"name": "answer", "inputSchema": {"type": "object"}, "outputSchema": schema}
    value = "a" * 10_000 + "!"
    async with connect_mcp("raw", raw("tools", json.dumps([tool]))) as client:
        registry = await connected(client)
        result = {"content": [], "structuredContent": {"x": value}}
        await registry.execute("raw.answer", {"result": {"content": []}})
        with processor_limit(5):
            envelope = await registry.execute("raw.answer", {"result": result})

    assert envelope.data == {"x": value}


@pytest.mark.requirement("R28")
@pytest.mark.parametrize("what", ["nan", "deep"])
async def test_a_result_that_is_not_json_is_rejected(what: str) -> None:
    async with connect_mcp("raw", raw()) as client:
        registry = await connected(client)
        with time_limit(20), pytest.raises(CallError) as caught:
            await registry.execute("raw.not_json", {"what": what})

    assert caught.value.code == ErrorCode.EXECUTION_ERROR


async def test_a_server_that_crashes_again_and_again_fails_calls_soon(tmp_path: Any) -> None:
    config = raw("crash_later", str(tmp_path / "mark"), reconnect_timeout=0.3)
    async with connect_mcp("raw", config) as client:
        registry = await connected(client)
        await registry.execute("raw.exit_after", {})
        with time_limit(20), pytest.raises(CallError) as caught:
            await registry.execute("raw.pid", {})
        with time_limit(10), pytest.raises(CallError):
            await registry.execute("raw.pid", {})

    assert caught.value.code == ErrorCode.UNAVAILABLE


MALFORMED = [
    b"",
    b"nonsense",
    b"{",
    b"[]",
    b"[[[]]]",
    b"null",
    b"7",
    b'"text"',
    b"\xff\xfe\x00",
    b'{"jsonrpc": "1.0", "id": 1, "result": {}}',
    b'{"jsonrpc": "2.0", "id": null, "result": {}}',
    b'{"jsonrpc": "2.0", "id": 999999, "result": {}}',
    b'{"jsonrpc": "2.0", "id": 1e999, "result": {}}',
    b'{"jsonrpc": "2.0", "id": NaN, "result": {}}',
    b'{"jsonrpc": "2.0", "id": ' + b"9" * 5000 + b', "result": {}}',
    b'{"jsonrpc": "2.0", "id": 1, "id": 2, "error": {}}',
    b'{"jsonrpc": "2.0", "method": 7, "params": []}',
    b'{"jsonrpc": "2.0", "method": "notifications/progress", "params": {"progressToken": [], "progress": "x"}}',
    b'{"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": {}}}',
    b'{"jsonrpc": "2.0", "method": "notifications/tools/list_changed", "params": 1}',
    b'{"jsonrpc": "2.0", "id": 5, "method": "no/such/method"}',
    b'{"jsonrpc": "2.0", "id": {}, "method": "ping"}',
    b"[" * 100_000,
    b'{"a":' * 100_000,
]


@pytest.mark.requirement("R13")
async def test_unexpected_messages_between_responses_break_no_call() -> None:
    with time_limit(30):
        async with connect_mcp("raw", raw()) as client:
            registry = await connected(client)
            pid = (await registry.execute("raw.pid", {})).data
            for line in MALFORMED:
                arguments = {"bytes": base64.b64encode(line).decode()}
                assert (await registry.execute("raw.say", arguments)).data[0]["text"] == "said"

            assert (await registry.execute("raw.pid", {})).data == pid


@pytest.mark.requirement("R13")
async def test_progress_with_infinite_numbers_is_dropped() -> None:
    seen: list[float] = []

    async def progress(done: float, total: float | None, message: str | None) -> None:
        seen.append(done)

    context = OperationContext(channel=CallerChannel(progress=progress))
    with time_limit(20):
        async with connect_mcp("raw", raw()) as client:
            registry = await connected(client)
            pid = (await registry.execute("raw.pid", {})).data
            for token in range(1, 20):
                params = f'{{"progressToken": {token}, "progress": 1{"0" * 400}}}'
                line = (
                    f'{{"jsonrpc": "2.0", "method": "notifications/progress", "params": {params}}}'
                )
                arguments = {"bytes": base64.b64encode(line.encode()).decode()}
                await registry.execute("raw.say", arguments, context)

            assert (await registry.execute("raw.pid", {})).data == pid
            await registry.execute("raw.progress", {}, context)
            await eventually(lambda: seen == [1, 2, 3])


async def test_unread_progress_does_not_accumulate() -> None:
    reports = 0

    async def hang(done: float, total: float | None, message: str | None) -> None:
        nonlocal reports
        reports += 1
        await anyio.sleep_forever()

    with time_limit(20):
        async with connect_mcp("raw", raw()) as client:
            registry = await connected(client)
            context = OperationContext(channel=CallerChannel(progress=hang))
            assert (await registry.execute("raw.progress", {"steps": 2000}, context)).data

    assert reports == 100


GOOD = '{"name": "good", "inputSchema": {"type": "object"}}'


@pytest.mark.requirement("R25")
@pytest.mark.parametrize("value", ["NaN", "9" * 10_000, "[" * 400 + "]" * 400])
async def test_a_tool_that_is_not_json_hides_no_others(value: str) -> None:
    bad = f'{{"name": "bad", "inputSchema": {{"default": {value}}}}}'
    cut = '{"name": "cut", "description": "a\\ud800", "inputSchema": {}}'
    async with connect_mcp(
        "raw", raw("result", "tools/list", f'{{"tools": [{bad}, {cut}, {GOOD}]}}')
    ) as client:
        assert [operation.spec.name for operation in client] == ["cut", "good"]
        assert client.operations[0].spec.description == "a?"
        assert client.skipped["bad"].startswith("it is not JSON: /inputSchema/")


async def test_a_date_of_the_wrong_type_costs_only_the_annotations() -> None:
    tool = {"name": "a", "inputSchema": {}, "annotations": {"lastModified": 7, "title": "A"}}
    async with connect_mcp("raw", raw("tools", json.dumps([tool]))) as client:
        (operation,) = client

    assert "annotations" not in operation.spec.meta


@pytest.mark.parametrize("result", ["{}", '{"tools": null}', '{"tools": {"a": 1}}'])
async def test_a_response_without_a_list_of_tools_is_reported(result: str) -> None:
    async with connect_mcp("raw", raw("result", "tools/list", result)) as client:
        assert client.skipped == {"tools": "the response of the server has no list of them"}


@pytest.mark.requirement("R13")
@pytest.mark.parametrize(
    ("method", "fields"),
    [
        ("initialize", '"serverInfo": {"name": "a", "version": "1", "icons": "x"}'),
        ("initialize", '"serverInfo": {"name": "a", "version": "1", "icons": [{"src": 7}]}'),
        ("initialize", '"serverInfo": {"name": "a", "version": "1", "icons": ["http://a/b.png"]}'),
        ("initialize", '"serverInfo": {"name": "\\ud800", "title": 7}, "instructions": 7'),
        ("initialize", '"serverInfo": null, "instructions": "\\ud800", "_meta": 7'),
        ("initialize", '"capabilities": null'),
        ("initialize", '"capabilities": {"tools": true, "prompts": 7, "experimental": 7}'),
        ("initialize", '"capabilities": {"tools": {"listChanged": "x"}, "x": 7}'),
        ("server/discover", '"instructions": 7, "ttlMs": "x", "cacheScope": 7'),
        ("server/discover", '"instructions": "\\ud800", "capabilities": {"tools": true}'),
    ],
)  # fmt: skip
async def test_malformed_fields_of_a_handshake_are_ignored(method: str, fields: str) -> None:
    versions = '"protocolVersion": "2025-11-25", "supportedVersions": ["2026-07-28"]'
    config = raw("result", method, f"{{{versions}, {fields}}}")
    with time_limit(20):
        async with connect_mcp("raw", config) as client:
            assert "pid" in {operation.spec.name for operation in client}
            assert client.server_info is not None
            assert client.server_info.name in ("a", "?", "raw")


async def test_a_byte_order_mark_is_ignored() -> None:
    with time_limit(20):
        async with connect_mcp("raw", raw("bom", version="2025-11-25")) as client:
            assert len(client)


@pytest.mark.requirement("R13")
async def test_requests_of_a_server_that_does_not_read_are_dropped_beyond_a_limit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    most = 0

    async def count_tasks() -> None:
        nonlocal most
        while True:
            most = max(most, len(asyncio.all_tasks()))
            await asyncio.sleep(0.01)

    async with connect_mcp("raw", raw()) as client, anyio.create_task_group() as tasks:
        registry = await connected(client)
        tasks.start_soon(count_tasks)
        with time_limit(60):
            await registry.execute("raw.pings", {"count": 10_000})
            assert (await registry.execute("raw.pid", {})).data
        tasks.cancel_scope.cancel()

    assert most < 1500
    warnings = [each.message for each in caplog.records if each.levelno == logging.WARNING]
    assert warnings == ["dropped a request of raw: too many of its requests are open"]


@pytest.mark.requirement("R12")
async def test_a_call_to_a_server_that_does_not_read_ends_soon_after_its_time_limit() -> None:
    async with connect_mcp("raw", raw(timeout=1)) as client:
        registry = await connected(client)
        await registry.execute("raw.deaf", {})
        with time_limit(10), pytest.raises(CallError) as caught:
            await registry.execute("raw.answer", {"result": "x" * 1_000_000})

    assert caught.value.code == ErrorCode.TIMEOUT


class Turns(logging.Handler):
    """Counts the turns of another task, and the lines that are logged between two of them."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.count = 0
        self.lines: Counter[int] = Counter()

    async def take(self) -> None:
        while True:
            self.count += 1
            await asyncio.sleep(0)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines[self.count] += 1


async def test_a_flood_of_empty_lines_does_not_block_other_tasks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    turns = Turns()
    logger = logging.getLogger("operations.mcp")
    caplog.set_level(logging.DEBUG, logger.name)
    async with connect_mcp("raw", raw()) as client:
        registry = await connected(client)
        logger.addHandler(turns)
        others = asyncio.create_task(turns.take())
        lines = base64.b64encode(b"\n" * 5000).decode()
        await registry.execute("raw.say", {"bytes": lines})
        assert turns.count > 5000
        await registry.execute("raw.say", {"bytes": lines, "stream": "stderr"})
        await eventually(lambda: turns.lines.total() > 5000)
        others.cancel()
        logger.removeHandler(turns)

    assert max(turns.lines.values()) <= 256


@pytest.mark.requirement("R55")
async def test_a_long_list_does_not_block_other_tasks() -> None:
    prompts = [{"name": f"prompt_{number}"} for number in range(5_000)]

    async def fetch(method: str, params: dict[str, Any]) -> dict[str, Any]:
        return {"prompts": prompts}

    turns = Turns()
    others = asyncio.create_task(turns.take())
    listed = await list_entries(fetch, "prompts", 10_000)
    others.cancel()

    assert listed == prompts
    assert turns.count >= 10


@pytest.mark.requirement("R16")
async def test_malformed_notifications_are_logged_seldom_and_without_their_data(
    caplog: pytest.LogCaptureFixture,
) -> None:
    line = b'{"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "canary"}}\n'
    async with connect_mcp("raw", raw()) as client:
        registry = await connected(client)
        await registry.execute("raw.say", {"bytes": base64.b64encode(line * 50).decode()})
        await registry.execute("raw.pid", {})

    assert len([record for record in caplog.records if record.name == "client"]) <= 1
    assert "canary" not in caplog.text


@pytest.mark.requirement("R16")
async def test_error_results_and_reports_of_a_server_contain_no_secrets(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[Any] = []

    async def log(level: str, data: Any, logger: str | None) -> None:
        seen.append(data)

    async def progress(done: float, total: float | None, message: str | None) -> None:
        seen.append(message)

    block = {"type": "text", "text": "the key canary-1 is not valid"}
    result = {"content": [block], "structuredContent": {"key": "canary-1"}, "isError": True}
    called = OperationContext(channel=CallerChannel(log=log, progress=progress))
    with time_limit(20):
        async with connect_mcp("raw", raw(secrets=["canary-1", "step 2"])) as client:
            registry = await connected(client)
            failed = await registry.execute("raw.answer", {"result": result})
            await registry.execute("raw.log", {"data": "canary-1"})
            await registry.execute("raw.log", {"data": {"key": "canary-1"}}, called)
            await registry.execute("raw.progress", {}, called)
            await eventually(lambda: len(seen) == 4)

    assert failed.data == {"key": "***"}
    assert isinstance(failed.meta, MCPResponseMeta)
    assert "canary" not in repr(failed.meta)
    assert seen == [{"key": "***"}, "step 1", "***", "step 3"]
    assert "raw: ***" in caplog.text
    assert "canary" not in caplog.text


@pytest.mark.requirement("R16")
async def test_the_log_of_a_server_that_does_not_start_contains_no_secrets(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "operations")
    program = """
import json, sys
for line in sys.stdin:
    error = {"code": -32000, "message": "can" + "ary-1"}
    print(json.dumps({"jsonrpc": "2.0", "id": json.loads(line).get("id"), "error": error}), flush=True)
"""
    config = MCPClientConfig(command=sys.executable, args=["-c", program], secrets=["canary-1"])
    error = await failure_of(config)

    assert "***" in error.message
    assert "raw failed" in caplog.text
    assert "canary-1" not in caplog.text


@pytest.mark.parametrize(
    "lost", [httpx2.RemoteProtocolError("closed"), anyio.BrokenResourceError()]
)
async def test_the_sdk_logs_no_traceback_of_a_lost_connection(
    lost: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    async with connect_mcp("raw", raw()):
        pass
    try:
        raise lost
    except type(lost):
        logging.getLogger("mcp.client.sse").exception("Error in sse_reader")

    assert not any(record.exc_info for record in caplog.records)


async def test_records_of_an_application_that_logs_as_client_are_not_changed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with connect_mcp("raw", raw()):
        pass
    for _ in range(2):
        try:
            TypeAdapter(int).validate_python("x")
        except ValidationError:
            logging.getLogger("client").exception("https://example.com/?a=b is not a number")

    records = [record for record in caplog.records if record.name == "client"]
    assert [record.exc_info is not None for record in records] == [True, True]
    assert "?a=b" in records[0].getMessage()
