"""Reloads, retries, enabling, disabling and closing, in any order and at the same time."""

import asyncio
import itertools
import json
import logging
import sys
import time
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import pytest
from mcp import Client
from msgspec.structs import replace
from tests.authorization_server import AuthorizationServer
from tests.limits import time_limit
from tests.mcp_import.support import eventually, raw

from operations import (
    AccessControl,
    CallError,
    Operation,
    OperationContext,
    OperationRegistry,
    OperationSpec,
    OperationType,
)
from operations.authority import Grants
from operations.config import ConfigError, ConfigFile, load_config
from operations.contract.events import CallEvent, RegistryChanged
from operations.hub import Hub, Source, open_hub
from operations.hub.app import mcp_server
from operations.hub.opening import sources_of
from operations.hub.operations import reports
from operations.hub.reloading import following, reload
from operations.hub.source import fingerprint
from operations.hub.supervisor import Supervisor
from operations.mcp import MCPClient, to_mcp
from operations.mcp.kind import KIND as MCP_KIND
from operations.server.http11.running import running
from operations.sources.contract import Opened

OPERATOR = OperationContext(trusted=True)
SERVER = Path(__file__).with_name("tool_server.py")

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
    document = folder / "shop.json"
    if not document.exists():
        # A document that is written again is read again.
        document.write_text(json.dumps(SHOP))
    path = folder / "operations.toml"
    path.write_text(f"{text}\n[record.trace]\nenabled = false\n")
    return path


def states(hub: Hub) -> dict[str, str]:
    return {source.name: str(source.state) for source in hub.sources}


def ids(hub: Hub) -> set[str]:
    return {spec.id for spec in hub.registry.specs() if spec.namespace != "hub"}


async def test_a_file_that_is_written_in_steps_is_read_when_it_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("operations.hub.reloading._POLL_SECONDS", 0.02)
    monkeypatch.setattr("operations.hub.reloading._SETTLE_SECONDS", 2)
    path, removed = written(tmp_path, ENTRY), list[str]()
    async with open_hub(path) as hub, following(hub):

        def observe(event: CallEvent) -> None:
            if isinstance(event, RegistryChanged) and event.change == "removed":
                removed.append(event.operation_id)

        hub.registry.observe(observe)
        path.write_text("")
        await anyio.sleep(0.2)
        written(tmp_path, f"{ENTRY}[limits]\ntimeout = 7\n")
        await eventually(lambda: hub.file.config.limits.timeout == 7, 30)
        assert removed == []


async def test_a_file_that_is_being_written_is_not_read_on_request_either(tmp_path: Path) -> None:
    path, removed = written(tmp_path, ENTRY), list[str]()
    async with open_hub(path) as hub:

        def observe(event: CallEvent) -> None:
            if isinstance(event, RegistryChanged) and event.change == "removed":
                removed.append(event.operation_id)

        hub.registry.observe(observe)
        path.write_text("")
        reading = asyncio.create_task(reload(hub))
        await asyncio.sleep(0)
        written(tmp_path, f"{ENTRY}[limits]\ntimeout = 7\n")
        await reading
        assert hub.file.config.limits.timeout == 7
        assert removed == []


async def test_a_file_that_changes_all_the_time_is_read_nevertheless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("operations.hub.reloading._MAX_SETTLE_SECONDS", 0.5)
    changes = itertools.count()

    def change(path: Path) -> int:
        return next(changes)

    path = written(tmp_path, ENTRY)
    async with open_hub(path) as hub:
        written(tmp_path, f"{ENTRY}[limits]\ntimeout = 7\n")
        monkeypatch.setattr("operations.hub.reloading.modified_at", change)
        with time_limit(10):
            await reload(hub)
        assert hub.file.config.limits.timeout == 7


async def test_a_change_while_the_file_is_read_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, ENTRY)

    def load_and_change(path: Path) -> ConfigFile:
        monkeypatch.setattr("operations.hub.reloading.load_config", load_config)
        found = load_config(path)
        written(tmp_path, f"{ENTRY}[limits]\ntimeout = 8\n")
        return found

    async with open_hub(path) as hub, following(hub):
        monkeypatch.setattr("operations.hub.reloading.load_config", load_and_change)
        written(tmp_path, f"{ENTRY}[limits]\ntimeout = 7\n")
        await reload(hub)
        assert hub.file.config.limits.timeout == 7
        await eventually(lambda: hub.file.config.limits.timeout == 8, 10)


async def test_a_change_between_reading_the_file_and_opening_the_hub_is_noticed(
    tmp_path: Path,
) -> None:
    file = load_config(written(tmp_path, ENTRY))
    written(tmp_path, f"{ENTRY}[limits]\ntimeout = 7\n")
    async with open_hub(file) as hub, following(hub):
        await eventually(lambda: hub.file.config.limits.timeout == 7, 10)


class Service:
    """A source that offers one operation, and counts how often it was opened and closed."""

    def __init__(self, timeout: float | None = None) -> None:
        self.timeout = timeout
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
            OperationSpec(namespace="tools", name="one", type=OperationType.QUERY),
            handle,
            source_timeout=self.timeout,
        )
        return Opened(operations=[operation], origin="here", close=close, calls=lambda: self.calls)

    def supervised(self, registry: OperationRegistry, drain_seconds: float = 60) -> Supervisor:
        return Supervisor(
            Source(of=MCP_KIND, name="tools"),
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


async def test_a_source_closes_while_an_attempt_to_replace_it_ends() -> None:
    closed, opening = asyncio.Event(), asyncio.Event()

    async def close() -> None:
        closed.set()

    async def connect(source: Source) -> Opened:
        if source.opened is None:
            return Opened(operations=[], origin="here", close=close)
        opening.set()
        try:
            await asyncio.Event().wait()
        finally:
            # A process that does not respond takes seconds to end.
            await closed.wait()
        raise AssertionError

    registry = OperationRegistry()
    source = Source(of=MCP_KIND, name="tools")
    supervisor = Supervisor(source, connect, registry, owner=lambda _: "", drain_seconds=60)
    with time_limit(20):
        await supervisor.open_again()
        supervisor.request()
        await opening.wait()
        await supervisor.aclose()
    assert supervisor.is_closed


async def test_a_retry_does_not_wait_for_a_source_that_is_disabled_meanwhile() -> None:
    service, registry = Service(), OperationRegistry()
    supervisor = service.supervised(registry)
    service.may_open.clear()
    with time_limit(20):
        retry = asyncio.create_task(supervisor.open_again())
        await service.opening.wait()
        await supervisor.disable()
        await retry
    assert supervisor.source.state == "disabled"
    await supervisor.aclose()


async def test_changed_settings_do_not_wait_for_an_attempt_with_the_old_ones() -> None:
    service, registry = Service(), OperationRegistry()
    supervisor = service.supervised(registry)
    service.may_open.clear()
    with time_limit(20):
        for _ in range(3):
            # An address that does not answer is corrected.
            service.opening.clear()
            supervisor.request(is_changed=True)
            supervisor.request(is_changed=True)
            await service.opening.wait()
        service.may_open.set()
        await supervisor.attempted()
        assert service.opened == 1
        service.may_open.clear()
        supervisor.request(is_changed=True)
        service.opening.clear()
        await service.opening.wait()
        supervisor.request(is_changed=True)
        await supervisor.aclose()
    assert supervisor.is_closed
    assert service.opened == service.closed


async def test_an_operation_that_the_application_restricts_stays_restricted() -> None:
    service, registry = Service(), OperationRegistry()
    supervisor = service.supervised(registry, 0)
    await supervisor.open_again()
    imported = registry.registered("tools.one")
    assert imported is not None
    spec = replace(imported.spec, access_control=AccessControl(["admin"]))
    registry.register(replace(imported, spec=spec), replace=True)

    for _ in range(2):
        await supervisor.open_again()
        assert supervisor.source.failure is None
        assert registry.specs()[0].access_control == spec.access_control
    for _ in range(2):
        await supervisor.disable()
        assert len(registry) == 0
        await supervisor.open_again()
        assert registry.specs()[0].access_control == spec.access_control
    await supervisor.aclose()
    assert len(registry) == 0


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
    monkeypatch.setattr("operations.hub.supervisor.QUIET_SECONDS", 0.3)
    service = Service()
    with time_limit(30):
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


async def test_a_replaced_source_waits_for_calls_that_may_take_longer_than_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("operations.hub.supervisor.QUIET_SECONDS", 0)
    service = Service(timeout=60)
    supervisor = service.supervised(OperationRegistry(), drain_seconds=0.1)
    service.calls = 1
    with time_limit(30):
        await supervisor.open_again()
        await supervisor.open_again()
        await anyio.sleep(0.5)
        assert service.closed == 0
        service.calls = 0
        await eventually(lambda: service.closed == 1)
        await supervisor.aclose()


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
        Source(of=MCP_KIND, name="tools"), connect, registry, owner=str, drain_seconds=60
    )
    with time_limit(20):
        await supervisor.open_again()
        await supervisor.open_again()
    assert "tools.one" in registry
    await supervisor.aclose()


async def test_operators_see_that_changed_settings_cannot_be_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = written(tmp_path, ENTRY)
    async with open_hub(path) as hub:
        written(tmp_path, ENTRY.replace("shop.json", "gone.json"))
        await reload(hub)
        await hub.settled(10)
        (found,) = reports(hub)
        # The previous connection stays in use.
        assert (found.state, found.operations) == ("connected", 2)
        assert "gone.json" in str(found.problem)
        assert found.next_attempt is not None
        assert "gone.json" in caplog.text
        written(tmp_path, ENTRY)
        await reload(hub)
        await hub.settled(10)
        (found,) = reports(hub)
        assert (found.problem, found.next_attempt) == (None, None)


async def test_a_mistake_in_an_mcp_json_changes_nothing(tmp_path: Path) -> None:
    server = [sys.executable, "-I", "-S", str(SERVER), "0", "double", "2", "0"]
    servers = {"mcpServers": {"tools": {"command": server[0], "args": server[1:]}}}
    listing = tmp_path / "mcp.json"
    listing.write_text(json.dumps(servers))
    path = written(tmp_path, 'mcp_json = ["mcp.json"]\n')
    async with open_hub(path) as hub:
        for text in ('{"mcpServers": {', "[]", None):
            if text is None:
                listing.unlink()
            else:
                listing.write_text(text)
            with pytest.raises(ConfigError, match=r"mcp_json .*mcp\.json"):
                await reload(hub)
            assert (states(hub), ids(hub)) == ({"tools": "connected"}, {"tools.double"})
        listing.write_text('{"mcpServers": {}}')
        await reload(hub)
        assert (states(hub), ids(hub)) == ({}, set())


def test_a_broker_that_delegates_depends_on_the_key_of_the_grants(tmp_path: Path) -> None:
    text = '[brokers.bus]\nurl = "redis://127.0.0.1:9"\nworkers = true\ndelegate = true\n'
    file = load_config(written(tmp_path, f'{text}[access.grants]\nkey = {{ file = "key" }}\n'))
    found: list[Any] = []
    for key in ("a", "b"):
        (tmp_path / "key").write_text(key * 32)
        found.append(fingerprint(next(sources_of(file)), file))
    assert found[0] != found[1]


@pytest.mark.requirement("R62")
async def test_tokens_are_accepted_after_a_reload_while_their_issuer_is_down(
    tmp_path: Path,
) -> None:
    issuer = AuthorizationServer()
    async with AsyncExitStack() as stack:
        issuer.url = await stack.enter_async_context(running(issuer.app))
        access = f'[access.jwt]\nissuer = "{issuer.url}"\naudience = "hub"\njwks_url = "{issuer.url}/jwks"\n'
        path = written(tmp_path, ENTRY + access)
        async with open_hub(path) as hub, running(hub.app) as url, aiohttp.ClientSession() as http:

            async def status() -> int:
                headers = {"authorization": f"Bearer {issuer.access_token('hub')}"}
                async with http.get(f"{url}/operations", headers=headers) as response:
                    return response.status

            assert await status() == 200
            await stack.aclose()
            written(tmp_path, ENTRY + access + "advanced.leeway = 20\n")
            await reload(hub)
            assert await status() == 200
            # A key that cannot be read changes nothing, and is reported like other mistakes.
            gone = '[access.jwt]\nissuer = "i"\naudience = "hub"\npublic_key = "gone.pem"\n'
            written(tmp_path, ENTRY + gone)
            with pytest.raises(ConfigError, match=r"access\.jwt\.public_key cannot be read"):
                await reload(hub)
            assert await status() == 200


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
        written(tmp_path, ENTRY + "[limits]\nadvanced.query_characters = 3\n")
        await reload(hub)
        async with http.get("/search?query=items") as response:
            assert response.status == 422


@pytest.mark.timeout(60)
async def test_open_sources_follow_the_limit_of_a_caller(tmp_path: Path) -> None:
    running_calls, release = 0, asyncio.Event()

    async def upstream(scope: Any, _receive: Any, send: Any) -> None:
        nonlocal running_calls
        if scope["type"] != "http":
            return
        running_calls += 1
        await release.wait()
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"1"})

    async with running(upstream) as url:
        entry = ENTRY.replace("http://127.0.0.1:9", url)
        path = written(tmp_path, entry + "[limits]\ncalls_per_caller = 4\n")
        async with open_hub(path) as hub, asyncio.TaskGroup() as calls:
            opened = hub.sources[0].opened
            for _ in range(7):
                calls.create_task(hub.registry.execute("shop.items", {}, OPERATOR))
            await eventually(lambda: running_calls == 3)
            written(tmp_path, entry + "[limits]\ncalls_per_caller = 8\n")
            await reload(hub)
            await eventually(lambda: running_calls == 6)
            # The connection and its calls are not replaced.
            assert hub.sources[0].opened is opened
            release.set()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("own", "counts"), [(None, (3, 6)), (2, (2, 2))])
async def test_servers_of_an_mcp_json_follow_the_limit_of_a_caller_unless_they_have_their_own(
    tmp_path: Path, own: int | None, counts: tuple[int, int]
) -> None:
    running_calls, release = 0, asyncio.Event()
    upstream = OperationRegistry()

    @upstream.operation("work.wait")
    async def wait() -> None:
        nonlocal running_calls
        running_calls += 1
        await release.wait()

    async with running(to_mcp(upstream, names="dotted").asgi_app()) as url:
        server = {"url": f"{url}/mcp", "concurrency": own}
        (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": {"up": server}}))
        listing = 'mcp_json = ["mcp.json"]\n[limits]\ncalls_per_caller = '
        path = written(tmp_path, f"{listing}4\n")
        async with open_hub(path) as hub, asyncio.TaskGroup() as calls:
            for _ in range(7):
                calls.create_task(hub.registry.execute("up.work.wait", {}, OPERATOR))
            await eventually(lambda: running_calls >= counts[0])
            assert running_calls == counts[0]
            written(tmp_path, f"{listing}8\n")
            await reload(hub)
            await eventually(lambda: running_calls >= counts[1])
            assert running_calls == counts[1]
            release.set()


async def test_a_disabled_source_stays_disabled_after_a_reload(
    tmp_path: Path,
) -> None:
    path = written(tmp_path, ENTRY)
    async with open_hub(path) as hub:
        await hub.supervisor("shop").disable()
        written(tmp_path, ENTRY + "[limits]\nadvanced.sessions = 10\n")
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


async def test_a_new_pattern_that_matches_nothing_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = written(tmp_path, ENTRY)
    async with open_hub(path) as hub:
        tools = '[tools."shop.items"]\ncache = 5\n[tools."shop.itms"]\nhide = true\n'
        for _ in range(2):
            written(tmp_path, ENTRY + tools)
            await reload(hub)
    assert [each for each in caplog.messages if "matches no" in each] == [
        '[tools."shop.itms"] matches no operation'
    ]


@pytest.mark.requirement("R57")
async def test_a_caller_on_stdio_is_removed_before_sources_are_closed(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("a-key-of-ann-123")
    key = '[access.keys.ann]\nkey = { file = "key" }\n'
    silent = raw("silent")
    source = f"[mcp.silent]\ncommand = {silent.command!r}\nargs = {list(silent.args)!r}\n"
    path = written(tmp_path, key + source)
    with time_limit(20):
        async with open_hub(path, wait=0) as hub:
            server = await mcp_server(hub, "ann")
            written(tmp_path, "")
            reloading = asyncio.create_task(reload(hub))
            while server.identity is not None and server.identity.grant is None:
                await asyncio.sleep(0)

            assert not reloading.done()
            await reloading


async def test_a_grant_on_stdio_has_the_access_of_its_subject_now(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "key").write_text("a-key-of-ann-123")
    (tmp_path / "grants").write_text("k" * 32)
    (tmp_path / "other").write_text("o" * 32)
    (tmp_path / "work.py").write_text(
        "from operations import operation\n"
        '@operation("task.add", scopes=["task"])\nasync def add() -> str:\n    return "added"\n'
        '@operation("task.ping")\nasync def ping() -> str:\n    return "pong"\n'
    )

    def config(scopes: str, key: str = "grants", name: str = "ann") -> str:
        caller = f'[access.keys.{name}]\nkey = {{ file = "key" }}\nscopes = {scopes}\n'
        return f'modules = ["work.py"]\n{caller}[access.grants]\nkey = {{ file = "{key}" }}\n'

    async with open_hub(written(tmp_path, config('["task"]'))) as hub:
        token = Grants("k" * 32).create("ann", "bot", operations=["task.*"])
        server = await mcp_server(hub, token)

        async def allowed(text: str) -> list[str]:
            written(tmp_path, text)
            await reload(hub)
            context = OperationContext(identity=server.identity)
            found = list[str]()
            for operation_id in ("task.add", "task.ping"):
                with suppress(CallError):
                    found.append((await hub.registry.execute(operation_id, {}, context)).data)
            return found

        assert await allowed(config('["task"]')) == ["added", "pong"]
        assert await allowed(config("[]")) == ["pong"]
        assert await allowed(config('["task"]')) == ["added", "pong"]
        assert await allowed(config('["task"]', name="bob")) == []
        assert await allowed(config('["task"]', key="other")) == []
        assert await allowed('modules = ["work.py"]\n') == []
        assert "grants are not accepted" in caplog.text
        assert token not in caplog.text
        assert await allowed(config('["task"]')) == ["added", "pong"]


@pytest.mark.parametrize("as_grant", [True, False], ids=["grant", "key"])
@pytest.mark.parametrize("end", ["nothing", "scope", "caller"])
async def test_a_call_on_stdio_that_waits_for_approval_needs_the_access_of_its_caller(
    tmp_path: Path, end: str, as_grant: bool
) -> None:
    (tmp_path / "key").write_text("k" * 32)
    (tmp_path / "work.py").write_text(
        "from operations import operation\n"
        '@operation("task.add", scopes=["task"])\nasync def add() -> str:\n    return "added"\n'
    )

    def config(scopes: str = '["task"]', name: str = "ann") -> str:
        caller = f'[access.keys.{name}]\nkey = {{ file = "key" }}\nscopes = {scopes}\n'
        rule = '[tools."task.add"]\napprove = { hold = 20 }\n[limits]\ntimeout = 40\n'
        grants = '[access.grants]\nkey = { file = "key" }\n'
        return f'modules = ["work.py"]\n{caller}{grants}{rule}'

    changed = {"nothing": config(), "scope": config("[]"), "caller": config(name="bob")}[end]
    with time_limit(30):
        async with open_hub(written(tmp_path, config())) as hub:
            token = Grants("k" * 32).create("ann", "bot", operations=["task.*"])
            server = await mcp_server(hub, token if as_grant else "ann")
            queue = hub.registry.subscribe("approvals.watch", {}, OperationContext(trusted=True))
            async with Client(server) as client:
                call = asyncio.create_task(client.call_tool("task__add", {}))
                found: Any = []
                while not found:
                    found = (await anext(queue)).data["approvals"]
                written(tmp_path, changed)
                await reload(hub)
                answer = {"id": found[0]["id"], "approve": True}
                context = OperationContext(trusted=True)
                await hub.registry.execute("approvals.answer", answer, context)
                result = await call
            await queue.aclose()

    assert ("added" in str(result.content)) == (end == "nothing")


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


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[limits]\nthreads = 3\n", "limits.threads"),
        ('[access]\nauthorization_servers = ["https://id"]\n', "access.authorization_servers"),
        ("serve.port = 1\n", "serve"),
        ("[limits]\ncalls = 3\n", None),
    ],
)
async def test_changes_that_need_a_restart_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str, named: str | None
) -> None:
    address = 'serve.public_url = "https://hub"\n'
    async with open_hub(written(tmp_path, address)) as hub:
        written(tmp_path, address + text)
        await reload(hub)
    said = [each.getMessage() for each in caplog.records if each.name == "operations.hub"]
    assert said == ([] if named is None else [f"restart to apply the changes of {named}"])


async def test_a_server_that_is_disabled_or_replaced_no_longer_changes_the_registry() -> None:
    registry = OperationRegistry()
    clients: list[MCPClient] = []

    async def connect(source: Source) -> Opened:
        client = MCPClient("raw", raw())
        await client.open()
        clients.append(client)
        return Opened(operations=client, origin="here", close=client.aclose)

    supervisor = Supervisor(
        Source(of=MCP_KIND, name="raw"), connect, registry, owner=lambda _: "it", drain_seconds=60
    )

    async def change(client: MCPClient, tool: str) -> None:
        [operation] = [each for each in client if each.spec.id == "raw.change"]
        await OperationRegistry([operation]).execute("raw.change", {"tool": tool}, OPERATOR)
        await eventually(lambda: f"raw.{tool}" in {each.spec.id for each in client})

    with time_limit(30):
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
