"""Several servers at once."""

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.limits import time_limit
from tests.mcp_import.support import RAW, eventually, nothing_left_behind, raw

from operations import ErrorCode, OperationRegistry, RegistrationError
from operations.mcp import MCPClient, MCPClientLoader, connect_mcp


async def test_a_failing_and_a_hanging_source_do_not_affect_others() -> None:
    with time_limit(60), nothing_left_behind():
        async with MCPClientLoader(wait=5) as loader:
            clients = await loader.load(
                {
                    "good": raw(),
                    "broken": raw("exit"),
                    "hanging": raw("silent", connect_timeout=3600),
                    "also_good": raw(),
                }
            )

            assert [client.name for client in clients] == ["good", "also_good"]
            assert loader.failures["broken"].code == ErrorCode.UNAVAILABLE
            assert loader.pending == ["hanging"]
            assert loader.get_client("good") is clients[0]
            assert loader.get_client("broken") is None
            registry = OperationRegistry()
            loader.register_all(registry)
            assert (await registry.execute("also_good.pid", {})).data


async def test_a_slow_server_is_registered_when_it_is_ready() -> None:
    with time_limit(20), nothing_left_behind():
        async with OperationRegistry() as registry:
            loader = MCPClientLoader(wait=0.01)
            await loader.load({"slow": raw("slow", "1")})
            loader.register_all(registry)
            assert len(registry) == 0

            await eventually(lambda: "slow.pid" in registry)
            assert (await registry.execute("slow.pid", {})).data


async def test_an_mcp_json_is_loaded_and_one_bad_entry_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "mcp.json"
    entry = {"command": sys.executable, "args": ["-I", "-S", RAW, "${MODE:-normal}"]}
    file.write_text(
        json.dumps({"mcpServers": {"fine": entry, "unset": {"command": "${NOT_SET_ANYWHERE}"}}})
    )
    with time_limit(20), nothing_left_behind():
        async with MCPClientLoader() as loader:
            clients = await loader.load(file)

            assert [client.name for client in clients] == ["fine"]
            assert "NOT_SET_ANYWHERE" in loader.failures["unset"].message


@pytest.mark.requirement("R25")
async def test_equal_names_live_in_their_own_namespaces_and_equal_ids_are_an_error() -> None:
    async with MCPClientLoader() as loader:
        await loader.load({"a": raw(allow=["pid"]), "b": raw(allow=["pid"])})
        registry = OperationRegistry()
        loader.register_all(registry)
        assert {operation.spec.id for operation in registry} == {"a.pid", "b.pid"}

        await loader.load({"c": raw(allow=["pid"], namespace="a")})
        assert "c" in loader.failures or len(registry) == 2
        with pytest.raises(RegistrationError):
            OperationRegistry(loader)


async def test_twenty_servers_start_side_by_side(tmp_path: Path) -> None:
    """None of them answers before all have been started."""
    with time_limit(60), nothing_left_behind():
        async with MCPClientLoader(wait=3600) as loader:
            together = ("together", str(tmp_path), "20")
            clients = await loader.load(
                {f"s{n}": raw(*together, connect_timeout=3600) for n in range(20)}
            )

            assert len(clients) == 20


async def test_servers_close_in_any_order_and_from_any_task() -> None:
    with time_limit(20), nothing_left_behind():
        first, second = connect_mcp("a", raw()), connect_mcp("b", raw())
        one = await first.__aenter__()
        other = await second.__aenter__()

        await asyncio.create_task(one.aclose())
        await asyncio.gather(one.aclose(), one.aclose())
        assert not one.is_connected
        await first.__aexit__(None, None, None)
        await asyncio.create_task(second.__aexit__(None, None, None))
        assert not other.is_connected


async def test_closing_continues_after_it_is_cancelled() -> None:
    with time_limit(20), nothing_left_behind():
        loader = MCPClientLoader(wait=1)
        await loader.load({"good": raw("stubborn", shutdown_timeout=0.2), "mute": raw("silent")})
        closing = asyncio.create_task(loader.aclose())
        asyncio.get_running_loop().call_soon(closing.cancel)
        await asyncio.wait({closing})
        await loader.aclose()


async def test_an_entry_that_cannot_be_used_at_all_is_reported() -> None:
    with time_limit(20), nothing_left_behind():
        async with MCPClientLoader() as loader:
            await loader.load({"a\nb": raw(), "odd": {"command": "a", "env": {"A": "b\0c"}}})

    assert loader.failures.keys() == {"a\nb", "odd"}


@pytest.mark.requirement("R44")
async def test_an_exception_in_the_body_is_raised_unchanged() -> None:
    with nothing_left_behind(), pytest.raises(ZeroDivisionError):
        async with connect_mcp("raw", raw()):
            raise ZeroDivisionError


@pytest.mark.requirement("R44")
async def test_a_caller_cancelled_while_connecting_leaves_nothing_open() -> None:
    with nothing_left_behind():
        with anyio.move_on_after(0.3) as scope:
            async with connect_mcp("raw", raw("silent")):
                pass
        assert scope.cancelled_caught


@pytest.mark.requirement("R44")
async def test_a_server_that_dies_at_close_is_not_an_error() -> None:
    with nothing_left_behind():
        async with connect_mcp("raw", raw()) as client:
            await OperationRegistry(client).execute("raw.exit_after", {})


async def test_opening_twice_starts_one_server() -> None:
    with time_limit(20), nothing_left_behind():
        client = MCPClient("raw", raw())
        await client.open()
        first = await pid(OperationRegistry(client))
        await client.open()
        assert await pid(OperationRegistry(client)) == first
        await client.aclose()


async def test_a_closed_server_raises() -> None:
    async with connect_mcp("raw", raw()) as client:
        registry = OperationRegistry(client)
    with pytest.raises(Exception, match="closed") as caught:
        await registry.execute("raw.pid", {})

    assert caught.value.code == ErrorCode.UNAVAILABLE  # type: ignore[attr-defined]


async def test_the_registry_closes_its_services() -> None:
    with nothing_left_behind():
        async with OperationRegistry() as registry:
            connecting = connect_mcp("raw", raw())
            registry.register_all(await connecting.__aenter__())
        await connecting.__aexit__(None, None, None)


async def test_a_lazy_server_is_started_to_read_its_listings_again() -> None:
    with time_limit(20), nothing_left_behind():
        async with connect_mcp("raw", raw(lazy=True)) as client:
            await eventually(lambda: not client.is_connected)

            await client.refresh()

            assert client.problem is None


async def test_a_lazy_server_runs_only_from_its_first_call_on() -> None:
    with time_limit(20), nothing_left_behind():
        async with connect_mcp("raw", raw(lazy=True)) as client:
            registry = OperationRegistry(client)
            await eventually(lambda: not client.is_connected)

            assert (await registry.execute("raw.pid", {})).data
            assert client.is_connected


async def test_an_idle_server_is_stopped_and_started_again() -> None:
    with time_limit(20), nothing_left_behind():
        async with connect_mcp("raw", raw(idle_timeout=0.2)) as client:
            registry = OperationRegistry(client)
            first = await pid(registry)
            await eventually(lambda: not client.is_connected)

            assert await pid(registry) != first


async def test_each_call_restarts_the_idle_time() -> None:
    with time_limit(20):
        async with connect_mcp("raw", raw(idle_timeout=0.5)) as client:
            registry = OperationRegistry(client)
            await asyncio.sleep(0.3)
            await pid(registry)
            await asyncio.sleep(0.4)
            began = time.monotonic()
            await pid(registry)
            await eventually(lambda: not client.is_connected)

    assert time.monotonic() - began >= 0.5


async def test_a_busy_server_is_not_stopped() -> None:
    with time_limit(20):
        async with connect_mcp("raw", raw(idle_timeout=1, timeout=2)) as client:
            registry = OperationRegistry(client)
            first = await pid(registry)
            with pytest.raises(Exception, match="did not answer"):
                await registry.execute("raw.never", {})

            assert await pid(registry) == first


async def pid(registry: OperationRegistry) -> Any:
    return (await registry.execute("raw.pid", {})).data[0]["text"]
