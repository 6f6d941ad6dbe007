"""A hub whose sources start late, die, return and change, and whose file changes: with real processes."""

import asyncio
import json
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.limits import scaled, time_limit
from tests.servers import RedisServer, free_port
from tests.servers import running as broker_running

from operations import CallError, ErrorCode, OperationContext, OperationRegistry
from operations.calls import serve_calls
from operations.hub import Hub, open_hub
from operations.hub.operations import readiness
from operations.hub.reloading import following, reload
from operations.mcp import MCPClientConfig, connect_mcp
from operations.pubsub.redis import connect_redis
from operations.server.http11.running import running

OPERATOR = OperationContext(trusted=True)

HELLO = """
from operations import operation

@operation("hello.greet")
async def greet() -> str:
    return "hi"
"""
SERVER = Path(__file__).with_name("tool_server.py")

SHOP = {
    "openapi": "3.1.0",
    "info": {"title": "shop", "version": "1"},
    "paths": {
        "/items": {"get": {"operationId": "items", "responses": {"200": {"description": "ok"}}}}
    },
}


async def until(condition: Callable[[], bool | Awaitable[bool]], seconds: float = 30) -> None:
    """Wait for a condition that no event announces."""
    with time_limit(seconds):
        while True:
            found = condition()
            if found if isinstance(found, bool) else await found:
                return
            await asyncio.sleep(0.05)


@asynccontextmanager
async def tools(
    port: int, name: str = "double", factor: int = 2, *, delay: float = 0
) -> AsyncGenerator[Any]:
    """Run an MCP server in a process of its own."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", str(SERVER), str(port), name, str(factor), str(delay)
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def written(folder: Path, text: str) -> Path:
    path = folder / "operations.toml"
    path.write_text(f"{text}\n[record.trace]\nenabled = false\n")
    return path


def states(hub: Hub) -> dict[str, str]:
    return {source.name: str(source.state) for source in hub.sources}


async def double(hub: Hub, number: int, name: str = "double") -> Any:
    return (await hub.registry.execute(f"tools.{name}", {"number": number}, OPERATOR)).data


@pytest.mark.requirement("R62")
async def test_late_and_lost_sources_are_connected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("operations.hub.reloading._POLL_SECONDS", 0.02)
    caplog.set_level(logging.INFO, "operations.hub")

    def logged() -> list[tuple[str, str]]:
        return [
            (each.levelname, each.getMessage())
            for each in caplog.records
            if each.name == "operations.hub"
        ]

    port = free_port()
    path = written(
        tmp_path,
        f'[mcp.tools]\nurl = "http://127.0.0.1:{port}/mcp"\n'
        "advanced.connect_timeout = 5\nadvanced.reconnect_timeout = 0.5",
    )
    with time_limit(100):
        async with (
            open_hub(path) as hub,
            following(hub),
            running(hub.app) as url,
            aiohttp.ClientSession(url) as http,
        ):

            async def ready() -> tuple[int, Any]:
                async with http.get("/readyz") as response:
                    return response.status, await response.json()

            assert states(hub) == {"tools": "disconnected"}
            # There is nothing to serve.
            assert await ready() == (503, {"status": "unavailable", "disconnected": ["tools"]})
            # Its operations are not known yet.
            with pytest.raises(CallError) as caught:
                await double(hub, 21)
            assert caught.value.code == ErrorCode.UNAVAILABLE
            for place in ("/tools/double", "/call"):
                body = {"operation": "tools.double"}
                async with http.post(place, json=body) as response:
                    found = (response.status, (await response.json())["code"])
                    assert found == (503, "UNAVAILABLE"), place
            async with http.post("/other/double", json={}) as response:
                assert response.status == 404
            async with tools(port):
                await until(lambda: states(hub) == {"tools": "connected"})
                assert await double(hub, 21) == {"result": 42}
                assert await ready() == (200, {"status": "ok"})

            async with http.post(
                "/call", json={"operation": "tools.double", "input": {"number": 1}}
            ) as response:
                assert (response.status, (await response.json())["code"]) == (503, "UNAVAILABLE")
            assert await ready() == (200, {"status": "degraded", "disconnected": ["tools"]})
            await until(lambda: logged()[-1][0] == "WARNING")
            assert logged()[-1][1].startswith("mcp:tools is not available: tools")

            async with tools(port):
                await until(lambda: states(hub) == {"tools": "connected"})
                assert await double(hub, 5) == {"result": 10}
                await until(lambda: logged()[-1] == ("INFO", "mcp:tools is connected again"))


async def test_a_hub_is_not_ready_before_its_sources_were_tried(tmp_path: Path) -> None:
    tried, closed = asyncio.Event(), asyncio.Event()

    async def hold(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tried.set()
        await closed.wait()
        writer.close()

    (tmp_path / "own.py").write_text(
        "from operations import operation\n\n@operation('own.run')\nasync def run() -> int:\n    return 1\n"
    )
    with time_limit(60):
        async with await asyncio.start_server(hold, "127.0.0.1") as server:
            port = server.sockets[0].getsockname()[1]
            text = f'modules = ["own.py"]\n[brokers.bus]\nurl = "redis://127.0.0.1:{port}"\nworkers = true'
            async with (
                open_hub(written(tmp_path, text), wait=0) as hub,
                running(hub.app) as url,
                aiohttp.ClientSession(url) as http,
            ):

                async def get(path: str) -> tuple[int, str]:
                    async with http.get(path) as response:
                        answer = await response.json()
                        return response.status, answer.get("status") or answer["code"]

                await tried.wait()
                assert await get("/readyz") == (503, "unavailable")
                closed.set()
                await until(lambda: states(hub)["bus"] == "disconnected")
                assert await get("/readyz") == (200, "degraded")
                # Its operations are not known, so this may be one of them.
                assert await get("/shop/pay") == (503, "UNAVAILABLE")
                assert await get("/.well-known/nothing") == (404, "OPERATION_NOT_FOUND")


@pytest.mark.requirement("R62", "R38")
async def test_a_hub_follows_the_workers_of_a_broker(tmp_path: Path) -> None:
    first, second = OperationRegistry(), OperationRegistry()
    for registry, names in ((first, ["pay"]), (second, ["pay", "refund"])):
        for name in names:
            registry.operation(f"shop.{name}")(_nothing)
    with broker_running(RedisServer()) as broker, time_limit(150):
        path = written(tmp_path, f'[brokers.main]\nurl = "{broker.url}"\nworkers = true')
        async with (
            open_hub(path) as hub,
            running(hub.app) as url,
            aiohttp.ClientSession(url) as http,
            connect_redis(broker.url) as target,
        ):

            async def ready() -> Any:
                async with http.get("/readyz") as response:
                    return await response.json()

            # It started before its workers.
            assert "shop.pay" not in hub.registry
            async with serve_calls(first, target):
                await until(lambda: states(hub) == {"main": "connected"})
                assert "shop.pay" in hub.registry
                assert await ready() == {"status": "ok"}
            await until(lambda: states(hub) == {"main": "disconnected"})
            assert (await ready())["disconnected"] == ["main"]
            async with serve_calls(second, target):
                await until(lambda: "shop.refund" in hub.registry)
                await until(lambda: states(hub) == {"main": "connected"})
                assert (await hub.registry.execute("shop.refund", {}, OPERATOR)).data is None


async def test_a_hub_that_may_see_no_operation_of_its_workers_reports_what_it_lacks(
    tmp_path: Path,
) -> None:
    registry = OperationRegistry()
    registry.operation("shop.pay", scopes=["pay"])(_nothing)
    with broker_running(RedisServer()) as broker, time_limit(30):
        path = written(tmp_path, f'[brokers.main]\nurl = "{broker.url}"\nworkers = true')
        async with (
            connect_redis(broker.url) as target,
            serve_calls(registry, target),
            open_hub(path, wait=10) as hub,
        ):
            (source,) = hub.sources
            assert [part.where for part in source.warnings] == ["credential"]


async def _nothing() -> None:
    """Do nothing."""


async def test_a_source_that_never_answers_delays_nothing(tmp_path: Path) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    (tmp_path / "hello.py").write_text(HELLO)
    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        path = written(
            tmp_path, f'modules = ["hello.py"]\n[mcp.silent]\nurl = "http://127.0.0.1:{port}/mcp"'
        )
        with time_limit(30):
            async with open_hub(path, wait=0) as hub:
                await until(lambda: "hello.greet" in hub.registry)
                assert states(hub)["silent"] == "connecting"
                assert (await hub.registry.execute("hello.greet", {}, OPERATOR)).data == "hi"


@pytest.mark.requirement("R62")
async def test_a_slow_source_delays_only_its_own_calls(tmp_path: Path) -> None:
    (tmp_path / "hello.py").write_text(HELLO)
    port = free_port()
    path = written(
        tmp_path, f'modules = ["hello.py"]\n[mcp.tools]\nurl = "http://127.0.0.1:{port}/mcp"'
    )
    with time_limit(150):
        async with tools(port, delay=1), open_hub(path, wait=0) as hub:
            await until(lambda: "hello.greet" in hub.registry)
            # Requests would fail that another hub can serve, for example during a rolling restart.
            assert await readiness(hub) == {"status": "unavailable", "disconnected": ["tools"]}
            assert (await hub.registry.execute("hello.greet", {}, OPERATOR)).data == "hi"
            await until(lambda: states(hub)["tools"] == "connected")
            assert await readiness(hub) is True
            slow = asyncio.create_task(double(hub, 21))
            for _ in range(10):
                assert (await hub.registry.execute("hello.greet", {}, OPERATOR)).data == "hi"
            assert not slow.done()
            assert await slow == {"result": 42}


@pytest.mark.requirement("R62")
async def test_a_hanging_source_times_out_and_is_used_again(
    tmp_path: Path,
) -> None:
    (tmp_path / "hello.py").write_text(HELLO)
    port = free_port()
    path = written(
        tmp_path, f'modules = ["hello.py"]\n[mcp.tools]\nurl = "http://127.0.0.1:{port}/mcp"'
    )
    with time_limit(150):
        async with tools(port) as process, open_hub(path, wait=0) as hub:
            await until(lambda: states(hub)["tools"] == "connected")
            process.send_signal(signal.SIGSTOP)
            soon = OperationContext(trusted=True, deadline=int(time.time() * 1000) + 300)
            with pytest.raises(CallError) as caught:
                await hub.registry.execute("tools.double", {"number": 1}, soon)
            assert caught.value.code == ErrorCode.TIMEOUT
            assert (await hub.registry.execute("hello.greet", {}, OPERATOR)).data == "hi"
            process.send_signal(signal.SIGCONT)
            assert await double(hub, 21) == {"result": 42}


@pytest.mark.requirement("R62")
async def test_clients_follow_a_source_that_returns_with_other_tools(tmp_path: Path) -> None:
    (tmp_path / "hello.py").write_text(HELLO)
    port = free_port()
    path = written(
        tmp_path,
        f'modules = ["hello.py"]\n[mcp.tools]\nurl = "http://127.0.0.1:{port}/mcp"\nadvanced.reconnect_timeout = 0.2',
    )

    async def offers(name: str) -> bool:
        # Only a call detects at once that the server is unavailable.
        with suppress(CallError):
            await double(hub, 1)
        return name in {each.spec.id for each in client}

    with time_limit(150):
        async with (
            open_hub(path, wait=0) as hub,
            running(hub.app) as url,
            connect_mcp("hub", MCPClientConfig(url=f"{url}/mcp")) as client,
        ):
            async with tools(port):
                await hub.supervisor("tools").open_again()
                await until(lambda: offers("hub.tools__double"))
            async with tools(port, "triple", 3):
                await until(lambda: offers("hub.tools__triple"))
                assert "hub.tools__double" not in {each.spec.id for each in client}
                assert await double(hub, 5, "triple") == {"result": 15}


async def test_a_document_that_is_served_late_is_imported(tmp_path: Path) -> None:
    port = free_port()
    path = written(tmp_path, f'[openapi.shop]\ndocument = "http://127.0.0.1:{port}/openapi.json"')

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = json.dumps(SHOP).encode()
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n"
            + f"content-length: {len(body)}\r\n\r\n".encode()
            + body
        )
        await writer.drain()
        writer.close()

    with time_limit(150):
        async with open_hub(path) as hub:
            assert states(hub) == {"shop": "disconnected"}
            async with await asyncio.start_server(serve, "127.0.0.1", port):
                await until(lambda: "shop.items" in hub.registry)
            assert states(hub) == {"shop": "connected"}


@pytest.mark.requirement("R62")
async def test_a_broker_and_workers_that_start_late_are_imported(tmp_path: Path) -> None:
    broker = RedisServer()
    path = written(tmp_path, f'[brokers.main]\nurl = "{broker.url}"\nworkers = true')
    registry = OperationRegistry()

    @registry.operation("far.double")
    async def double(number: int) -> int:
        return 2 * number

    with time_limit(90):
        async with open_hub(path) as hub:
            assert states(hub) == {"main": "disconnected"}
            with broker_running(broker):
                async with connect_redis(broker.url) as target, serve_calls(registry, target):
                    await until(lambda: "far.double" in hub.registry, 60)
                    found = await hub.registry.execute("far.double", {"number": 4}, OPERATOR)
                    assert found.data == 8
                await hub.aclose()


async def test_a_changed_file_changes_the_sources(tmp_path: Path) -> None:
    (tmp_path / "shop.json").write_text(json.dumps(SHOP))
    shop = '[openapi.shop]\ndocument = "shop.json"\nbase_url = "http://127.0.0.1:9"\n'
    path = written(tmp_path, shop)
    with time_limit(150):
        async with open_hub(path) as hub, following(hub):
            assert list(states(hub)) == ["shop"]
            written(tmp_path, shop + shop.replace("shop]", "copy]"))
            await until(lambda: "copy.items" in hub.registry)

            written(tmp_path, "this is no TOML")
            await asyncio.sleep(1.5)
            assert states(hub) == {"shop": "connected", "copy": "connected"}

            changed = json.loads(json.dumps(SHOP).replace("items", "newest"))
            written(tmp_path, shop)
            (tmp_path / "shop.json").write_text(json.dumps(changed))
            await until(lambda: "shop.newest" in hub.registry)
            assert "shop.items" not in hub.registry
            assert "copy.items" not in hub.registry
            assert list(states(hub)) == ["shop"]

            written(tmp_path, shop + "enabled = false\n")
            await until(lambda: states(hub) == {"shop": "disabled"})
            assert len(hub.registry) == 0


async def test_keys_and_limits_change_without_a_restart(tmp_path: Path) -> None:
    (tmp_path / "hello.py").write_text(
        "from operations import operation\n\n"
        '@operation("hello.greet", scopes=["read"])\nasync def greet() -> str:\n    return "hi"\n'
    )
    (tmp_path / "key").write_text("first")
    text = 'modules = ["hello.py"]\n[access.keys.ann]\nkey = { file = "key" }\nscopes = ["read"]\n'
    path = written(tmp_path, text)
    with time_limit(150):
        async with (
            open_hub(path) as hub,
            following(hub),
            running(hub.app) as url,
            aiohttp.ClientSession(url) as http,
        ):

            async def status(key: str) -> int:
                async with http.get("/operations", headers={"x-api-key": key}) as response:
                    return response.status

            assert (await status("first"), await status("second")) == (200, 401)
            (tmp_path / "key").write_text("second")
            written(tmp_path, text + "[limits]\nbody_bytes = 100\n")
            await reload(hub)
            assert (await status("first"), await status("second")) == (401, 200)
            async with http.post(
                "/hello/greet", headers={"x-api-key": "second"}, data=b" " * 200
            ) as response:
                assert response.status == 413

            # A changed secret is noticed as well, although `operations.toml` stays the same.
            (tmp_path / "key").write_text("third")
            while await status("third") != 200:
                await asyncio.sleep(0.05)
            assert await status("second") == 401


@pytest.mark.requirement("R15")
async def test_operators_control_sources_by_operations(tmp_path: Path) -> None:
    (tmp_path / "shop.json").write_text(json.dumps(SHOP))
    path = written(
        tmp_path, '[openapi.shop]\ndocument = "shop.json"\nbase_url = "http://127.0.0.1:9"'
    )

    async def run(operation_id: str, **input: str) -> Any:
        return (await hub.registry.execute(operation_id, input, OPERATOR)).data

    with time_limit(150):
        async with open_hub(path) as hub:
            assert hub.app is not None
            [shop] = await run("hub.sources")
            assert (shop["state"], shop["operations"]) == ("connected", 1)
            following = hub.registry.subscribe("hub.watch", {}, OPERATOR)
            assert (await anext(following)).data == [shop]
            assert (await run("hub.disable", source="shop"))["state"] == "disabled"
            assert "shop.items" not in hub.registry
            assert [each["state"] for each in (await anext(following)).data] == ["disabled"]
            await following.aclose()
            assert (await run("hub.enable", source="shop"))["state"] == "connected"
            assert (await run("hub.retry", source="openapi:shop"))["state"] == "connected"
            assert "shop.items" in hub.registry
            for name in ("openapi", "shop.json", "nothing"):
                with pytest.raises(CallError, match="the sources are: openapi:shop"):
                    await run("hub.disable", source=name)
            path.write_text("[serve\n")
            with pytest.raises(CallError, match=r"operations\.toml:1: this is not TOML"):
                await run("hub.reload")
            assert "shop.items" in hub.registry
            # Only the file adds a source.
            assert {spec.name for spec in hub.registry.specs() if spec.namespace == "hub"} == {
                "sources",
                "watch",
                "retry",
                "enable",
                "disable",
                "reload",
            }


async def test_sighup_under_load_loses_no_call(tmp_path: Path) -> None:
    first, second, port = free_port(), free_port(), free_port()
    config = f'[serve]\nport = {port}\n[mcp.tools]\nurl = "http://127.0.0.1:{{}}/mcp"\n'
    written(tmp_path, config.format(first))
    async with (
        tools(first),
        tools(second, factor=2),
    ):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "operations", "serve", "--config", str(tmp_path / "operations.toml"),
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            with time_limit(200):
                async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:

                    async def call(number: int) -> Any:
                        body = {"operation": "tools.double", "input": {"number": number}}
                        async with http.post("/call", json=body) as response:
                            return (await response.json()).get("data")

                    async def answers() -> bool:
                        try:
                            return bool(await call(1) == {"result": 2})
                        except aiohttp.ClientError:
                            return False

                    await until(answers, 150)
                    results: list[Any] = []
                    done = asyncio.Event()

                    async def load() -> None:
                        while not done.is_set():
                            results.append(await call(len(results)))

                    workers = [asyncio.create_task(load()) for _ in range(4)]
                    for turn in range(4):
                        written(tmp_path, config.format(second if turn % 2 == 0 else first))
                        os.kill(process.pid, signal.SIGHUP)
                        seen = len(results)
                        await until(lambda seen=seen: len(results) > seen + 100)  # type: ignore[misc]
                    done.set()
                    await asyncio.gather(*workers)
            assert all(result is not None for result in results), results[:10]
        finally:
            process.terminate()
            _, log = await asyncio.wait_for(process.communicate(), scaled(60))
            assert process.returncode == 0
    # A recovery is not logged as a warning.
    assert b"INFO" in log
    assert b"was read again" in log
    assert b"WARNING" not in log


async def test_tool_settings_change_without_a_restart(tmp_path: Path) -> None:
    (tmp_path / "shop.json").write_text(json.dumps(SHOP))
    text = '[openapi.shop]\ndocument = "shop.json"\nbase_url = "http://127.0.0.1:9"\n'
    path = written(tmp_path, text)
    async with open_hub(path) as hub:
        for tools, expected in (
            ('[tools."shop.items"]\nrename = "shop.list"\n', "shop.list"),
            ('[tools."shop.*"]\nscopes = ["shop"]\n', "shop.items"),
            ("", "shop.items"),
        ):
            written(tmp_path, text + tools)
            await reload(hub)
            [spec] = hub.registry.specs()
            assert (spec.id, spec.access_control.is_open) == (expected, "scopes" not in tools)
            source = hub.source_of(spec.id)
            assert source is not None
            assert source.name == "shop"
