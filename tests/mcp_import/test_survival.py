"""A connection outlives its server: process death, restart, loss of the session."""

import os
import signal
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.mcp_import.support import (
    eventually,
    free_port,
    is_alive,
    nothing_left_behind,
    raw,
    serving_demo,
)

from operations import CallError, ErrorCode, OperationRegistry
from operations.mcp import MCPClientConfig, connect_mcp


def text_of(envelope: Any) -> str:
    return str(envelope.data[0]["text"])


async def test_a_server_killed_between_calls_is_started_again() -> None:
    registry = OperationRegistry()
    with anyio.fail_after(20), nothing_left_behind():
        async with connect_mcp("raw", raw()) as client:
            registry.register_all(client)
            first = int(text_of(await registry.execute("raw.pid", {})))
            os.kill(first, signal.SIGKILL)
            await eventually(lambda: not client.is_connected)

            second = int(text_of(await registry.execute("raw.pid", {})))

            assert second != first
        assert not is_alive(second)


async def test_a_mutation_in_flight_fails_and_is_not_repeated(tmp_path: Path) -> None:
    counter = tmp_path / "counter"
    registry = OperationRegistry()
    with anyio.fail_after(20), nothing_left_behind():
        async with connect_mcp("raw", raw(env={"COUNTER": str(counter)})) as client:
            registry.register_all(client)
            with pytest.raises(CallError) as caught:
                await registry.execute("raw.die", {})

            assert caught.value.code == ErrorCode.UNAVAILABLE
            assert caught.value.retryable
            assert counter.read_text() == "x"
            assert text_of(await registry.execute("raw.count", {})) == "2"


async def test_a_query_in_flight_is_repeated_once(tmp_path: Path) -> None:
    counter = tmp_path / "counter"
    registry = OperationRegistry()
    with anyio.fail_after(20), nothing_left_behind():
        config = raw(env={"COUNTER": str(counter)}, queries=["die"])
        async with connect_mcp("raw", config) as client:
            registry.register_all(client)
            with pytest.raises(CallError) as caught:
                await registry.execute("raw.die", {})

        assert caught.value.code == ErrorCode.UNAVAILABLE
        assert counter.read_text() == "xx"


async def test_an_http_server_that_was_restarted_is_used_again() -> None:
    registry, port = OperationRegistry(), free_port()
    with anyio.fail_after(30):
        async with serving_demo(port) as url:
            client = connect_mcp("demo", MCPClientConfig(url=url, version="2025-11-25"))
            service = await client.__aenter__()
            registry.register_all(service)
            await registry.execute("demo.add", {"a": 1, "b": 2})
        async with serving_demo(port):
            envelope = await registry.execute("demo.add", {"a": 1, "b": 2})
            await client.__aexit__(None, None, None)

    assert envelope.data == {"result": 3}
