"""Reloads, retries, enabling, disabling and closing, in any order and at the same time."""

import asyncio
import json
import logging
import time
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import pytest
from tests.mcp_import.support import eventually, raw

from operations import Operation, OperationContext, OperationRegistry, OperationSpec, OperationType
from operations.config import ConfigError
from operations.hub import Hub, Source, open_hub
from operations.hub.hub import following, reload
from operations.hub.source import Opened, Supervisor
from operations.mcp import MCPClient
from operations.server.running import running

OPERATOR = OperationContext(trusted=True)

SHOP = {
    "openapi": "3.1.0",
    "info": {"title": "shop", "version": "1"},
    "paths": {
        f"/{name}": {"get": {"operationId": name, "responses": {"200": {"description": "ok"}}}}
        for name in ("items", "orders")
    },
}
ENTRY = '[openapi.shop]\ndocument = "shop.json"\nbase_url = "http://127.0.0.1:9"\n'


def written(folder: Path, text: str) -> Path:
    (folder / "shop.json").write_text(json.dumps(SHOP))
    path = folder / "operations.toml"
    path.write_text(f"{text}\n[trace]\nenabled = false\n")
    return path


def states(hub: Hub) -> dict[str, str]:
    return {source.name: str(source.state) for source in hub.sources}


def ids(hub: Hub) -> set[str]:
    return {spec.id for spec in hub.registry.specs() if spec.namespace != "hub"}


class Service:
    """A source that offers one operation, and counts how often it was opened and closed."""

    def __init__(self) -> None:
        self.opened = self.closed = self.calls = 0
        self.may_open = asyncio.Event()
        self.may_open.set()
        self.opening = asyncio.Event()

    async def open(self, source: Source) -> Opened:
        self.opening.set()
        await self.may_open.wait()
        for _ in range(10):  # connecting takes a while
            await asyncio.sleep(0)
        self.opened += 1

        async def handle(input: Any, context: OperationContext) -> None:
            return None

        async def close() -> None:
            self.closed += 1

        operation = Operation(
            OperationSpec(namespace="tools", name="one", type=OperationType.QUERY), handle
        )
        return Opened(operations=[operation], origin="here", close=close, calls=lambda: self.calls)

    def supervised(self, registry: OperationRegistry, drain_seconds: float = 60) -> Supervisor:
        return Supervisor(
            Source(kind="mcp", name="tools"),
            self.open,
            registry,
            owner=lambda _: "this process",
            drain_seconds=drain_seconds,
        )


async def test_closing_right_after_disabling_closes_the_source_once() -> None:
    service = Service()
    supervisor = service.supervised(OperationRegistry())
    await supervisor.open_again()
    await supervisor.disable()
    await supervisor.aclose()
    await supervisor.aclose()
    assert (service.opened, service.closed) == (1, 1)
    assert supervisor.is_closed


async def test_a_retry_does_not_wait_for_a_source_that_is_disabled_meanwhile() -> None:
    service, registry = Service(), OperationRegistry()
    supervisor = service.supervised(registry)
    service.may_open.clear()
    with anyio.fail_after(20):
        retry = asyncio.create_task(supervisor.open_again())
        await service.opening.wait()
        await supervisor.disable()
        await retry
    assert supervisor.source.state == "disabled"
    await supervisor.aclose()


async def test_a_source_is_either_disabled_or_has_operations() -> None:
    service, registry = Service(), OperationRegistry()
    supervisor = service.supervised(registry, 0)
    for _ in range(5):
        await supervisor.open_again()
        await asyncio.gather(supervisor.disable(), supervisor.open_again())
        is_disabled = supervisor.source.state == "disabled"
        assert is_disabled == ("tools.one" not in registry)
    await supervisor.aclose()
    assert service.opened == service.closed
    assert len(registry) == 0


async def test_a_replaced_source_is_closed_soon_after_its_last_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("operations.hub.source.QUIET_SECONDS", 0.3)
    service = Service()
    with anyio.fail_after(30):
        for drain_seconds, is_busy in ((60, False), (0.5, True)):
            supervisor = service.supervised(OperationRegistry(), drain_seconds)
            service.calls, service.closed = 1, 0
            await supervisor.open_again()
            await supervisor.open_again()
            if not is_busy:
                await anyio.sleep(0.05)
                time.sleep(0.5)  # noqa: ASYNC251 - a blocked event loop is not a pause between calls
                await anyio.sleep(0.3)
                assert service.closed == 0
                service.calls = 0
            while service.closed == 0:
                await anyio.sleep(0.05)
            await supervisor.aclose()
            assert service.closed == 2


async def test_a_library_that_cancels_itself_does_not_end_the_retries() -> None:
    service, registry = Service(), OperationRegistry()
    attempts = 0

    async def connect(source: Source) -> Opened:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            raise asyncio.CancelledError
        return await service.open(source)

    supervisor = Supervisor(
        Source(kind="mcp", name="tools"), connect, registry, owner=str, drain_seconds=60
    )
    with anyio.fail_after(20):
        await supervisor.open_again()
        await supervisor.open_again()
    assert "tools.one" in registry
    await supervisor.aclose()


async def test_two_reloads_at_once_leave_every_source_once(tmp_path: Path) -> None:
    path = written(tmp_path, ENTRY)
    async with open_hub(path) as hub:
        written(tmp_path, ENTRY.replace("shop]", "copy]"))
        await asyncio.gather(reload(hub), reload(hub), reload(hub))
        await hub.settled(5)
        assert states(hub) == {"copy": "connected"}
        assert ids(hub) == {"copy.items", "copy.orders"}


async def test_a_reload_whose_caller_leaves_is_finished_by_the_next(tmp_path: Path) -> None:
    copy = ENTRY.replace("shop]", "copy]")
    path = written(tmp_path, ENTRY + copy)
    async with open_hub(path) as hub, following(hub):
        written(tmp_path, ENTRY + "enabled = false\n")
        leaving = asyncio.create_task(reload(hub))
        # It waits for the first source to stop.
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.wait({leaving})
        assert leaving.cancelled()
        await eventually(lambda: states(hub) == {"shop": "disabled"}, 10)
        assert ids(hub) == set()


async def test_the_length_of_queries_changes_with_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, ENTRY)
    async with open_hub(path) as hub, running(hub.app) as url, aiohttp.ClientSession(url) as http:
        written(tmp_path, ENTRY + "[limits]\nquery_characters = 3\n")
        await reload(hub)
        async with http.get("/search?query=items") as response:
            assert response.status == 422


async def test_a_disabled_source_stays_disabled_after_a_reload(
    tmp_path: Path,
) -> None:
    path = written(tmp_path, ENTRY)
    async with open_hub(path) as hub:
        await hub.supervisor("shop").disable()
        written(tmp_path, ENTRY + "[limits]\nqueue = 10\n")
        await reload(hub)
        await hub.settled(5)
        assert states(hub) == {"shop": "disabled"}
        for text, state in ((ENTRY + "enabled = false\n", "disabled"), (ENTRY, "connected")):
            written(tmp_path, text)
            await reload(hub)
            await hub.settled(5)
            assert states(hub) == {"shop": state}
        await hub.supervisor("shop").disable()
        await hub.supervisor("shop").open_again()
        assert states(hub) == {"shop": "connected"}


async def test_tool_settings_that_cannot_be_used_change_nothing(tmp_path: Path) -> None:
    path = written(tmp_path, ENTRY)
    async with open_hub(path) as hub:
        file = hub.file
        written(tmp_path, ENTRY + '[tools."shop.items"]\nrename = "shop.orders"\n')
        with pytest.raises(ConfigError, match=r"shop\.orders"):
            await reload(hub)
        assert ids(hub) == {"shop.items", "shop.orders"}
        assert (hub.file, hub.tools.tools) == (file, {})
        # They may change places.
        swapped = (
            '[tools."shop.items"]\nrename = "shop.orders"\n'
            '[tools."shop.orders"]\nrename = "shop.items"\n'
        )
        written(tmp_path, ENTRY + swapped)
        await reload(hub)
        assert ids(hub) == {"shop.items", "shop.orders"}


async def test_patterns_that_match_nothing_are_found_anew_after_each_reload(tmp_path: Path) -> None:
    tools = '[tools."shop.items"]\nrename = "my.items"\n[tools."shop.x*"]\nmax_bytes = 1000\n'
    path = written(tmp_path, ENTRY + tools)
    async with open_hub(path) as hub:
        assert hub.tools.unmatched == {"shop.x*"}
        assert ids(hub) == {"my.items", "shop.orders", "results.next"}
        written(tmp_path, tools)
        await reload(hub)
        assert hub.tools.unmatched == {"shop.items", "shop.x*"}
        written(tmp_path, ENTRY)
        await reload(hub)
        assert hub.tools.unmatched == set()
        await hub.settled(10)
        assert ids(hub) == {"shop.items", "shop.orders"}


async def test_a_reload_can_close_the_server_to_anonymous_callers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "key").write_text("first")
    key = '[access.keys.ann]\nkey = { file = "key" }\n'
    path = written(tmp_path, ENTRY + key)
    async with open_hub(path) as hub, running(hub.app) as url, aiohttp.ClientSession(url) as http:

        async def status(headers: dict[str, str]) -> int:
            async with http.get("/operations", headers=headers) as response:
                return response.status

        assert await status({}) == 200
        written(tmp_path, f"{ENTRY}[access]\nanonymous = false\n{key}")
        await reload(hub)
        assert (await status({}), await status({"x-api-key": "first"})) == (401, 200)
        secret = (
            '[access.jwt]\nissuer = "https://id"\naudience = "hub"\nsecret = { file = "key" }\n'
        )
        written(tmp_path, ENTRY + key + secret)
        await reload(hub)
        assert (await status({}), await status({"x-api-key": "first"})) == (401, 200)
    assert "restart" not in caplog.text


async def test_the_first_callers_of_a_file_need_a_restart_with_a_message(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "key").write_text("first")
    path = written(tmp_path, ENTRY)
    async with open_hub(path) as hub, running(hub.app) as url, aiohttp.ClientSession(url) as http:
        written(
            tmp_path,
            f'{ENTRY}[access]\nanonymous = false\n[access.keys.ann]\nkey = {{ file = "key" }}\n',
        )
        with caplog.at_level(logging.WARNING):
            await reload(hub)
        assert "restart to apply the changes of access" in caplog.text
        async with http.get("/operations") as response:
            assert response.status == 401
        async with http.get("/healthz") as response:
            assert response.status == 200


async def test_a_server_that_is_disabled_or_replaced_no_longer_changes_the_registry() -> None:
    registry = OperationRegistry()
    clients: list[MCPClient] = []

    async def connect(source: Source) -> Opened:
        client = MCPClient("raw", raw())
        await client.open()
        clients.append(client)
        return Opened(operations=client, origin="here", close=client.aclose)

    supervisor = Supervisor(
        Source(kind="mcp", name="raw"), connect, registry, owner=lambda _: "it", drain_seconds=60
    )

    async def change(client: MCPClient, tool: str) -> None:
        [operation] = [each for each in client if each.spec.id == "raw.change"]
        await OperationRegistry([operation]).execute("raw.change", {"tool": tool}, OPERATOR)
        await eventually(lambda: f"raw.{tool}" in {each.spec.id for each in client})

    with anyio.fail_after(30):
        await supervisor.open_again()
        await supervisor.open_again()
        old, new = clients
        # Calls that run on it may still be there, and so is its connection.
        await change(old, "ghost")
        assert "raw.ghost" not in registry
        await change(new, "extra")
        assert "raw.extra" in registry
        await supervisor.disable()
        await change(new, "late")
        assert len(registry) == 0
        await supervisor.aclose()
