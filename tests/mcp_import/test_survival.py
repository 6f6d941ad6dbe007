"""A connection outlives its server: process death, restart, loss of the session."""

import asyncio
import os
import shutil
import signal
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.conftest import PROJECT
from tests.limits import time_limit
from tests.mcp_import.support import (
    HERE,
    RAW,
    demo_server,
    eventually,
    is_alive,
    nothing_left_behind,
    raw,
    serving_demo,
)
from tests.servers import free_port

from operations import CallError, ErrorCode, OperationRegistry
from operations.base.retry import FAILURES, CircuitOpenError
from operations.mcp import MCPClientConfig, connect_mcp
from operations.tools import RetryPolicy, ToolConfig, configure_tools


def text_of(envelope: Any) -> str:
    return str(envelope.data[0]["text"])


async def test_a_server_killed_between_calls_is_started_again() -> None:
    registry = OperationRegistry()
    with time_limit(20), nothing_left_behind():
        async with connect_mcp("raw", raw()) as client:
            registry.register_all(client)
            first = int(text_of(await registry.execute("raw.pid", {})))
            os.kill(first, signal.SIGKILL)
            await eventually(lambda: not client.is_connected)

            second = int(text_of(await registry.execute("raw.pid", {})))

            assert second != first
        assert not is_alive(second)


async def test_a_call_after_closing_is_not_retried_although_the_server_was_lost(
    tmp_path: Path,
) -> None:
    script = tmp_path / "server.py"
    shutil.copy(RAW, script)
    config = MCPClientConfig(command=sys.executable, args=["-I", "-S", str(script), "normal"])
    with time_limit(20):
        async with connect_mcp("raw", config) as client:
            pid = int(text_of(await OperationRegistry(client).execute("raw.pid", {})))
            script.unlink()
            os.kill(pid, signal.SIGKILL)
            await eventually(lambda: client.next_attempt is not None)
        with pytest.raises(CallError) as caught:
            await OperationRegistry(client).execute("raw.pid", {})

    assert caught.value.message == "raw is closed"
    assert not caught.value.retryable


async def test_the_log_of_a_server_that_exits_again_and_again_is_short(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry = OperationRegistry()
    with time_limit(20):
        async with connect_mcp("raw", raw()) as client:
            registry.register_all(client)
            for _ in range(4):
                os.kill(int(text_of(await registry.execute("raw.pid", {}))), signal.SIGKILL)
                await eventually(lambda: not client.is_connected)

    lines = [record for record in caplog.records if record.levelname == "WARNING"]
    assert [record.message for record in lines] == ["raw went away; connecting again"]


async def test_the_log_of_a_server_that_does_not_read_cancellations_is_short(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry = OperationRegistry()
    with time_limit(20):
        async with connect_mcp("raw", raw()) as client:
            registry.register_all(client)
            process = int(text_of(await registry.execute("raw.pid", {})))
            os.kill(process, signal.SIGSTOP)
            # More than fits into the pipe.
            calls = [
                asyncio.create_task(registry.execute("raw.pid", {"more": "x" * 40_000}))
                for _ in range(5)
            ]
            await asyncio.sleep(0.2)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            os.kill(process, signal.SIGCONT)

    lines = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert lines == ["raw does not read its input: it may continue a cancelled call"]


_STOPS_READING = """
import json, pathlib, sys, time

def send(**message):
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)

for line in sys.stdin:
    message = json.loads(line)
    method, number = message.get("method"), message.get("id")
    if method == "initialize":
        info = {"name": "x", "version": "1"}
        capabilities = {"tools": {"listChanged": True}}
        result = {"protocolVersion": "2025-11-25", "capabilities": capabilities, "serverInfo": info}
        send(id=number, result=result)
    elif method == "tools/list":
        send(id=number, result={"tools": [{"name": "call", "inputSchema": {"type": "object"}}]})
    elif method == "tools/call":
        send(method="notifications/tools/list_changed")
        sys.stdin.readline()
        pathlib.Path(sys.argv[1]).touch()
        time.sleep(60)
"""


async def test_a_server_that_does_not_read_is_closed_at_once_while_it_is_listed_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = tmp_path / "asked"
    config = MCPClientConfig(
        command=sys.executable,
        args=["-c", _STOPS_READING, str(asked)],
        version="2025-11-25",
        shutdown_timeout=0.5,
    )
    with time_limit(20):
        async with connect_mcp("x", config) as client:
            registry = OperationRegistry(client)
            calls = [asyncio.create_task(registry.execute("x.call", {}))]
            await eventually(asked.exists)
            # More than fits into the pipe.
            calls += [
                asyncio.create_task(registry.execute("x.call", {"more": "x" * 40_000}))
                for _ in range(5)
            ]
            await asyncio.sleep(0.2)
        await asyncio.gather(*calls, return_exceptions=True)

    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == []


@pytest.mark.parametrize("code", [0, 3])
async def test_a_server_that_exits_while_its_child_holds_the_pipes_is_started_again(
    code: int,
) -> None:
    registry = OperationRegistry()
    with time_limit(40), nothing_left_behind():
        async with connect_mcp("raw", raw(timeout=None, max_timeout=3)) as client:
            registry.register_all(client)
            first = text_of(await registry.execute("raw.pid", {}))
            with pytest.raises(CallError) as caught:
                await registry.execute("raw.orphan", {"code": code})
            await eventually(lambda: client.is_connected)

            assert caught.value.code == ErrorCode.UNAVAILABLE
            assert text_of(await registry.execute("raw.pid", {})) != first


@pytest.mark.requirement("R36")
async def test_a_request_to_a_server_that_had_died_unnoticed_is_sent_to_the_next_one() -> None:
    registry = OperationRegistry()
    with time_limit(20), nothing_left_behind():
        async with connect_mcp("raw", raw()) as client:
            registry.register_all(client)
            first = int(text_of(await registry.execute("raw.pid", {})))
            os.kill(first, signal.SIGKILL)
            while is_alive(first):
                time.sleep(0.005)  # noqa: ASYNC251 - the loop must not notice

            assert int(text_of(await registry.execute("raw.pid", {}))) != first


@pytest.mark.requirement("R36")
async def test_of_many_requests_to_a_server_that_had_died_unnoticed_none_is_lost(
    tmp_path: Path,
) -> None:
    registry = OperationRegistry()
    with time_limit(20), nothing_left_behind():
        async with connect_mcp("raw", raw(env={"COUNTER": str(tmp_path / "counter")})) as client:
            registry.register_all(client)
            first = int(text_of(await registry.execute("raw.pid", {})))
            os.kill(first, signal.SIGKILL)
            while is_alive(first):
                time.sleep(0.005)  # noqa: ASYNC251 - the loop must not notice

            counted = await asyncio.gather(*(registry.execute("raw.count", {}) for _ in range(20)))

    assert sorted(int(text_of(each)) for each in counted) == list(range(1, 21))


async def test_calls_do_not_wait_past_their_timeout_for_a_server_that_restarts_silent(
    tmp_path: Path,
) -> None:
    config = raw("silent_later", str(tmp_path / "mark"), reconnect_timeout=0.5, connect_timeout=30)
    registry = OperationRegistry()
    with time_limit(25), nothing_left_behind():
        async with connect_mcp("raw", config) as client:
            registry.register_all(client)
            await registry.execute("raw.exit_after", {})
            await eventually(lambda: not client.is_connected)
            for _ in range(2):
                with pytest.raises(CallError) as caught:
                    await registry.execute("raw.pid", {})

    assert caught.value.code == ErrorCode.UNAVAILABLE


async def test_a_mutation_in_flight_fails_and_is_not_repeated(tmp_path: Path) -> None:
    counter = tmp_path / "counter"
    registry = OperationRegistry()
    with time_limit(20), nothing_left_behind():
        async with connect_mcp("raw", raw(env={"COUNTER": str(counter)})) as client:
            registry.register_all(client)
            with pytest.raises(CallError) as caught:
                await registry.execute("raw.die", {})

            assert caught.value.code == ErrorCode.UNAVAILABLE
            assert not caught.value.retryable, "it may have run"
            assert counter.read_text() == "x"
            assert text_of(await registry.execute("raw.count", {})) == "2"


async def test_a_query_in_flight_is_repeated_once(tmp_path: Path) -> None:
    counter = tmp_path / "counter"
    registry = OperationRegistry()
    with time_limit(20), nothing_left_behind():
        config = raw(env={"COUNTER": str(counter)}, queries=["die"])
        async with connect_mcp("raw", config) as client:
            registry.register_all(client)
            with pytest.raises(CallError) as caught:
                await registry.execute("raw.die", {})

        assert caught.value.code == ErrorCode.UNAVAILABLE
        assert counter.read_text() == "xx"


async def test_an_http_server_that_was_restarted_is_used_again() -> None:
    registry, port = OperationRegistry(), free_port()
    with time_limit(30):
        async with serving_demo(port) as url:
            client = connect_mcp("demo", MCPClientConfig(url=url, version="2025-11-25"))
            service = await client.__aenter__()
            registry.register_all(service)
            await registry.execute("demo.add", {"a": 1, "b": 2})
        async with serving_demo(port):
            envelope = await registry.execute("demo.add", {"a": 1, "b": 2})
            await client.__aexit__(None, None, None)

    assert envelope.data == {"result": 3}


async def test_a_retry_policy_repeats_a_mutation_that_did_not_reach_its_server() -> None:
    registry, port = OperationRegistry(), free_port()
    policy = RetryPolicy(attempts=1000, first_pause=0.05, last_pause=0.05, budget=1000)
    configure_tools(registry, {"demo.add": ToolConfig(retry=policy)})
    counters, stop = registry.count_calls()
    async with AsyncExitStack() as stack:
        stack.callback(stop)
        stack.enter_context(time_limit(30))
        async with serving_demo(port) as url:
            config = MCPClientConfig(url=url, version="2025-11-25", reconnect_timeout=0.05)
            registry.register_all(await stack.enter_async_context(connect_mcp("demo", config)))
            spec = registry.get_spec("demo.add")
            assert spec is not None
            assert not spec.replayable
        adding = asyncio.create_task(registry.execute("demo.add", {"a": 1, "b": 2}))
        await eventually(lambda: counters.of("demo.add").retries > 1)
        async with serving_demo(port):
            assert (await adding).data == {"result": 3}


@pytest.mark.parametrize("version", ["2025-11-25", "2026-07-28"])
async def test_the_server_of_the_sdk_is_called_as_a_child_and_restarted_after_a_kill(
    version: str,
) -> None:
    config = MCPClientConfig(
        command=sys.executable, args=[str(HERE / "sdk_server.py")], version=version
    )
    registry = OperationRegistry()
    with time_limit(150), nothing_left_behind():
        async with connect_mcp("demo", config) as client:
            registry.register_all(client)
            assert (await registry.execute("demo.add", {"a": 1, "b": 2})).data == {"result": 3}
            assert (await registry.execute("demo.resources.read", {"uri": "memo://today"})).data
            first = (await registry.execute("demo.pid", {})).data["result"]
            slow = asyncio.create_task(registry.execute("demo.slow", {"seconds": 30}))
            await anyio.sleep(0.2)
            # Its answer comes after the slow request has arrived.
            await registry.execute("demo.pid", {})
            os.kill(first, signal.SIGKILL)

            with pytest.raises(CallError) as caught:
                await slow
            assert caught.value.code == ErrorCode.UNAVAILABLE
            while True:
                try:
                    second = (await registry.execute("demo.pid", {})).data["result"]
                    break
                except CallError as error:
                    # A busy machine may need longer to start it than calls are willing to wait.
                    assert error.code == ErrorCode.UNAVAILABLE  # noqa: PT017 - and then once more
                    # A call that fails at once does not let others run.
                    await anyio.lowlevel.checkpoint()

    assert second != first


async def test_a_program_that_ends_without_closing_ends_its_servers() -> None:
    code = f"""
import asyncio, sys
from operations import OperationRegistry
from operations.mcp import MCPClientConfig, connect_mcp

async def main():
    global connecting, call
    config = MCPClientConfig(
        command=sys.executable, args=["-I", "-S", {RAW!r}, "stubborn"], shutdown_timeout=0.1
    )
    connecting = connect_mcp("raw", config)
    registry = OperationRegistry(await connecting.__aenter__())
    print((await registry.execute("raw.pid", {{}})).data[0]["text"], flush=True)
    call = asyncio.create_task(registry.execute("raw.never", {{}}))
    await asyncio.sleep(0.1)

asyncio.run(main())
"""
    with time_limit(180):
        done = await anyio.run_process(
            [sys.executable, "-W", "error", "-c", code], cwd=PROJECT, check=False
        )

    assert done.returncode == 0
    assert done.stderr == b""
    assert not is_alive(int(done.stdout))


async def test_a_server_that_stops_responding_is_not_asked_until_a_probe_succeeds() -> None:
    config = MCPClientConfig(server=demo_server(), timeout=1)
    async with connect_mcp("demo", config) as client:
        registry = OperationRegistry(client)
        found: list[str] = []
        for _ in range(FAILURES + 1):
            with pytest.raises(CallError) as caught:
                await registry.execute("demo.slow", {"seconds": 30})
            is_open = isinstance(caught.value, CircuitOpenError)
            found.append("open" if is_open else caught.value.code)
        assert found == [ErrorCode.TIMEOUT] * FAILURES + ["open"]

        with time_limit(20):
            while True:
                try:
                    assert (await registry.execute("demo.pid", {})).data
                    break
                except CallError as error:
                    # A probe fails if the machine is so slow that the response takes too long.
                    if not isinstance(error, CircuitOpenError) and error.code != ErrorCode.TIMEOUT:
                        raise
                    await anyio.sleep(0.05)
        assert (await registry.execute("demo.pid", {})).data
