"""`operations serve` and `operations work`: every entry point of a config, opened for real."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp_types import ToolListChangedNotification
from tests.cli.conftest import TOOL_SERVER, Ran
from tests.limits import scaled, time_limit
from tests.mcp_opening import INITIALIZE, MCP_HEADERS
from tests.servers import RedisServer
from tests.servers import running as broker_running

from operations import CallError
from operations.calls import PendingRequestMap, from_calls
from operations.mcp import MCPClientConfig, connect_mcp
from operations.pubsub.redis import connect_redis
from operations.pubsub.websocket import connect_websocket

KEYS = {"ALICE_KEY": "alice-" + "a" * 32, "BOB_KEY": "bob-" + "b" * 32}


@asynccontextmanager
async def started(
    environment: dict[str, str], *arguments: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, Any]]:
    """A command that keeps running, and its output when it was ready."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "operations", *arguments, "--json",
        env={**environment, **KEYS}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        with time_limit(150):
            line = await process.stdout.readline()
        assert line, (await process.communicate())[1].decode()
        yield process, msgspec.json.decode(line)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.communicate()


@pytest.mark.parametrize("arguments", [["serve", "--stdio"], ["work"]])
@pytest.mark.parametrize(
    ("log", "start"),
    [("", "WARNING "), ("json = true\n", '{"time":'), ("level = 'error'\n", None)],
)
def test_a_trace_that_cannot_be_written_is_reported_as_the_log_requires(
    folder: Path, environment: dict[str, str], arguments: list[str], log: str, start: str | None
) -> None:
    with (folder / "operations.toml").open("a") as config:
        config.write("[record.trace]\nfile = 'operations.toml/trace.jsonl'\n")
        config.write(f"[brokers.away]\nurl = 'redis://127.0.0.1:1'\n[log]\n{log}")

    ran = subprocess.run(
        [sys.executable, "-m", "operations", *arguments], env={**environment, **KEYS},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=scaled(150), check=False,
    )  # fmt: skip

    lines = [each for each in ran.stderr.splitlines() if "operations trace will not" in each]
    assert len(lines) == (start is not None)
    assert all(each.startswith(str(start)) for each in lines)


async def test_imported_operations_that_anyone_may_call_are_pointed_out(
    folder: Path, environment: dict[str, str]
) -> None:
    paths: dict[str, Any] = {
        f"/{name}": {"get": {"operationId": name, "responses": {}}} for name in ("a", "b")
    }
    (folder / "shop.json").write_text(
        json.dumps({"openapi": "3.1.0", "servers": [{"url": "https://x.example"}], "paths": paths})
    )
    with (folder / "operations.toml").open("a") as config:
        config.write("[openapi.shop]\ndocument = 'shop.json'\n")
        config.write("[openapi.till]\ndocument = 'shop.json'\nscopes = ['till:use']\n")
    async with started(environment, "serve") as (process, _):
        process.terminate()
        output = (await process.communicate())[1]
    assert process.returncode == 0, "ended in the moment it was ready, and not in order"

    words = b"anyone on this machine may call 2 imported operations (openapi:shop)"
    assert output.count(words) == output.count(b"anyone") == 1


async def test_sources_that_connect_late_are_pointed_out_as_well(
    folder: Path, environment: dict[str, str]
) -> None:
    paths = {"/a": {"get": {"operationId": "a", "responses": {}}}}
    document = {"openapi": "3.1.0", "servers": [{"url": "https://x.example"}], "paths": paths}
    (folder / "shop.json").write_text(json.dumps(document))
    is_reported = asyncio.Event()

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await is_reported.wait()
        body = json.dumps(document).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n")
        writer.write(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        writer.close()

    server = await asyncio.start_server(respond, "127.0.0.1")
    port = server.sockets[0].getsockname()[1]
    with (folder / "operations.toml").open("a") as config:
        config.write("[openapi.shop]\ndocument = 'shop.json'\n")
        config.write(f"[openapi.late]\ndocument = 'http://127.0.0.1:{port}/late.json'\n")
    async with server, started(environment, "serve") as (process, _):
        assert process.stderr is not None
        notes = list[str]()

        async def read_until(words: str) -> None:
            while not any(words in note for note in notes):
                line = msgspec.json.decode(await process.stderr.readline())  # type: ignore[union-attr]
                notes.extend([line["note"]["message"]] if "note" in line else [])

        with time_limit(60):
            await read_until("press Ctrl-C")
            is_reported.set()
            await read_until("openapi:late)")

    exposed = [note.partition(";")[0] for note in notes if note.startswith("anyone")]
    assert exposed == [
        f"anyone on this machine may call 1 imported operation (openapi:{name})"
        for name in ("shop", "late")
    ]


async def test_no_exposure_is_pointed_out_if_callers_without_credential_are_rejected(
    folder: Path, environment: dict[str, str]
) -> None:
    paths = {"/a": {"get": {"operationId": "a", "responses": {}}}}
    (folder / "shop.json").write_text(
        json.dumps({"openapi": "3.1.0", "servers": [{"url": "https://x.example"}], "paths": paths})
    )
    with (folder / "operations.toml").open("a") as config:
        config.write("[openapi.shop]\ndocument = 'shop.json'\n")
        config.write("[access.jwt]\nissuer = 'https://issuer.example'\naudience = 'x'\n")
        config.write("secret = { env = 'ALICE_KEY' }\n")
    async with started(environment, "serve") as (process, ready):
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{ready['url']}/shop/a") as answer,
        ):
            status = answer.status
        process.terminate()
        output = (await process.communicate())[1]

    assert status == 401
    assert b"anyone" not in output


async def test_every_source_is_printed_when_it_connects_and_then_the_total(
    folder: Path, environment: dict[str, str]
) -> None:
    (folder / "start.py").write_text(
        "def setup(hub):\n"
        "    @hub.registry.operation('clock.now', type='query')\n"
        "    async def now() -> int:\n"
        "        return 1\n"
    )
    config = folder / "operations.toml"
    config.write_text(
        "setup = 'start:setup'\n" + config.read_text() + "[openapi.shop]\ndocument = 'shop.json'\n"
    )
    paths = {"/a": {"get": {"operationId": "a", "responses": {}}}}
    (folder / "shop.json").write_text(
        json.dumps({"openapi": "3.1.0", "servers": [{"url": "https://x.example"}], "paths": paths})
    )
    async with started(environment, "serve") as (process, ready):
        assert process.stderr is not None
        notes = list[str]()
        with time_limit(60):
            while not notes or not notes[-1].startswith("all sources are connected"):
                line = msgspec.json.decode(await process.stderr.readline())
                notes += [line["note"]["message"]] if "note" in line else []

    total = 12 + 1 + 1
    assert ready["operations"] == total
    assert notes[-1] == f"all sources are connected: {total} operations"
    assert any(
        re.fullmatch(r"openapi:shop connected, 1 operation, \d+\.\d s", note) for note in notes
    )


async def test_a_program_serves_in_a_thread(folder: Path, environment: dict[str, str]) -> None:
    script = """
import sys, threading
from operations.__main__ import main
threading.Thread(target=main, args=(["serve", "--json"],), daemon=True).start()
sys.stdin.read()
"""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", script), env={**environment, **KEYS},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        with time_limit(60):
            line = await process.stdout.readline()
            url = msgspec.json.decode(line)["url"]
            async with aiohttp.ClientSession() as session, session.get(f"{url}/healthz") as answer:
                status = answer.status
    finally:
        process.kill()
        await process.communicate()

    assert status == 200


@pytest.mark.requirement("R07", "R21")
async def test_every_entry_point_serves_the_same_operations_with_the_same_rights(
    folder: Path, environment: dict[str, str]
) -> None:
    with time_limit(200):
        async with started(environment, "serve") as (process, ready):
            assert ready["operations"] == 12
            places, url = ready["entryPoints"], ready["url"]
            bearer = {"Authorization": f"Bearer {KEYS['ALICE_KEY']}"}
            async with aiohttp.ClientSession() as session:
                body = {"operation": "work.secret", "input": {}}
                async with session.post(f"{url}/call", json=body) as answer:
                    assert answer.status == 404
                async with session.post(f"{url}/call", json=body, headers=bearer) as answer:
                    assert (await answer.json())["data"] == "hidden"
                async with session.get(places["console"]) as answer:
                    assert "<html" in await answer.text()
                async with session.get(places["http"], headers={"Host": "evil.example"}) as answer:
                    assert answer.status == 421
            config = MCPClientConfig(url=places["mcp"], headers=bearer)
            async with connect_mcp("hub", config) as client:
                assert "hub.work__secret" in [each.spec.id for each in client]
            async with connect_mcp("hub", MCPClientConfig(url=places["mcp"])) as client:
                assert "hub.work__secret" not in [each.spec.id for each in client]
            async with (
                connect_websocket(places["websocket"], headers=bearer) as target,
                PendingRequestMap(target) as calls,
            ):
                assert (await calls.call("work.secret", {})).data == "hidden"
            async with (
                connect_websocket(places["websocket"]) as target,
                PendingRequestMap(target) as calls,
            ):
                with pytest.raises(CallError, match="no operation"):
                    await calls.call("work.secret", {})
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0


async def test_only_the_entry_points_that_were_asked_for_are_open(
    folder: Path, environment: dict[str, str]
) -> None:
    with time_limit(150):
        async with started(environment, "serve", "--entry-point", "http") as (_, ready):
            assert list(ready["entryPoints"]) == ["http"]
            async with aiohttp.ClientSession() as session:
                for path in ("/", "/mcp"):
                    async with session.get(ready["url"] + path) as answer:
                        assert answer.status == 404


async def test_how_mcp_is_served_can_be_set_in_the_file(
    folder: Path, environment: dict[str, str]
) -> None:
    config = folder / "operations.toml"
    config.write_text(
        f"{config.read_text()}\n[serve.mcp]\nnames = 'dotted'\ndisclosure = 'auto'\nmax_tools = 1000\n"
        "instructions = 'Be gentle.'\nstateless = true\n"
    )
    async with started(environment, "serve", "--entry-point", "mcp") as (_, announced):
        async with Client(announced["entryPoints"]["mcp"], mode="legacy") as client:
            tools = (await client.list_tools()).tools
            instructions = client.instructions
        async with (
            aiohttp.ClientSession() as session,
            session.post(
                announced["entryPoints"]["mcp"], json=INITIALIZE, headers=MCP_HEADERS
            ) as answer,
        ):
            assert answer.status == 200
            assert "mcp-session-id" not in answer.headers

    assert "work.add" in [tool.name for tool in tools]
    assert instructions == "Be gentle."


async def test_mcp_on_stdio_uses_the_settings_of_the_file(
    folder: Path, environment: dict[str, str]
) -> None:
    with (folder / "operations.toml").open("a") as config:
        config.write("[serve.mcp]\ndisclosure = 'auto'\nmax_tools = 1\n")
        config.write("[log]\njson = true\n[mcp.gone]\ncommand = 'no-such-program'\n")
    errors = (folder / "errors").open("w+")
    server = stdio_client(
        StdioServerParameters(
            command=sys.executable,
            args=["-m", "operations", "serve", "--stdio", "--as", "alice"],
            env={**environment, **KEYS},
            cwd=folder,
        ),
        errors,
    )
    with errors, time_limit(150):
        async with Client(server) as client:
            tools = {tool.name for tool in (await client.list_tools()).tools}
            called = await client.call_tool("call", {"operation": "work.secret", "input": {}})
        errors.seek(0)
        logged = [msgspec.json.decode(line) for line in errors]

    assert [each["level"] for each in logged] == ["warning"]
    assert "mcp:gone is not available" in logged[0]["message"]
    assert tools == {"search", "schema", "call", "batch"}
    assert "hidden" in str(called.content)


@pytest.mark.requirement("R57")
async def test_mcp_on_stdio_follows_the_file(folder: Path, environment: dict[str, str]) -> None:
    config = folder / "operations.toml"
    granted = config.read_text()
    revoked = granted.replace('"work:admin", ', "")
    renamed = granted.replace("keys.alice", "keys.alicia")
    server = StdioServerParameters(
        command=sys.executable,
        args=["-m", "operations", "serve", "--stdio", "--as", "alice"],
        env={**environment, **KEYS},
        cwd=folder,
    )
    changed = asyncio.Event()

    async def notice(message: Any) -> None:
        if isinstance(message, ToolListChangedNotification):
            changed.set()

    with time_limit(150):
        async with Client(stdio_client(server), mode="legacy", message_handler=notice) as client:

            async def is_listed() -> bool:
                return "work__secret" in [tool.name for tool in (await client.list_tools()).tools]

            assert await is_listed()
            for text in (revoked, granted, renamed):
                config.write_text(text)
                while await is_listed() is not (text is granted):
                    await asyncio.sleep(0.1)
            with config.open("a") as file:
                file.write(f"[mcp.more]\ncommand = {sys.executable!r}\nargs = {TOOL_SERVER!r}\n")
            await changed.wait()


def test_an_address_that_cannot_be_used_is_reported_by_serve(
    run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, key in KEYS.items():
        monkeypatch.setenv(name, key)

    ran = run("serve", "--host", "203.0.113.7", "--port", "1")

    assert ran.code == 1
    assert "cannot listen on 203.0.113.7:1: " in " ".join(ran.err.split())


def test_output_that_cannot_be_written_is_not_an_error_of_the_address(
    environment: dict[str, str],
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "operations", "serve", "--port", "0"]
    try:
        ran = subprocess.run(
            command,
            env=environment | KEYS,
            stdout=writer,
            stderr=subprocess.PIPE,
            check=False,
            timeout=scaled(60),
        )
    finally:
        os.close(writer)

    assert ran.returncode == 141
    assert b"cannot listen" not in ran.stderr


@pytest.mark.parametrize(
    ("name", "code", "reason"),
    [
        ("missing.pem", 3, "operations.toml:2: serve.certificate names no file"),
        ("ops.py", 1, "SSL"),
    ],
)
def test_a_certificate_that_cannot_be_used_is_reported(
    folder: Path, run: Callable[..., Ran], name: str, code: int, reason: str
) -> None:
    (folder / "operations.toml").write_text(f"[serve]\ncertificate = '{name}'\nport = 0\n")

    ran = run("serve")

    assert ran.code == code
    assert reason in ran.err


def test_a_folder_is_no_certificate(folder: Path, run: Callable[..., Ran]) -> None:
    (folder / "operations.toml").write_text("[serve]\ncertificate = '.'\nport = 0\n")

    ran = run("serve")

    assert ran.code == 3
    assert "operations.toml:2: serve.certificate names no file" in ran.err


@pytest.mark.requirement("R22")
def test_other_machines_are_rejected_without_sign_in(folder: Path, run: Callable[..., Ran]) -> None:
    (folder / "operations.toml").write_text("modules = ['ops.py']")

    ran = run("serve", "--host", "0.0.0.0", "--port", "0")

    assert ran.code == 1
    assert "public = true" in ran.err


def test_output_of_modules_is_not_a_result(folder: Path, run: Callable[..., Ran]) -> None:
    with (folder / "ops.py").open("a") as module:
        module.write("print('hello from the module')")

    ran = run("call", "work.add", "a=1")

    assert (ran.out, ran.code) == ("2\n", 0)


async def test_a_worker_serves_callers_on_redis_and_finishes_running_calls(
    folder: Path, environment: dict[str, str]
) -> None:
    with broker_running(RedisServer()) as broker, time_limit(200):
        with (folder / "operations.toml").open("a") as config:
            config.write(f"[brokers.main]\nurl = '{broker.url}'\nworkers = true\n")
            config.write("[work]\nport = 0\n[log]\nrequests = true\njson = true\n")
        async with (
            started(environment, "work", "--grace", "20", "--name", "w1") as (process, ready),
            aiohttp.ClientSession(ready.pop("url")) as http,
        ):
            assert ready == {"broker": "main", "group": "operations", "operations": 12}
            async with connect_redis(broker.url) as target, from_calls(target) as service:
                assert "work.add" in [each.spec.id for each in service]
                assert "work.secret" not in [each.spec.id for each in service]
            async with (
                connect_redis(broker.url) as target,
                PendingRequestMap(target, credential=KEYS["ALICE_KEY"]) as calls,
                asyncio.TaskGroup() as tasks,
            ):
                assert (await calls.call("work.secret", {})).data == "hidden"
                assert (await calls.call("approvals.list", {})).data["total"] == 0
                running = tasks.create_task(calls.call("work.slow", {"steps": 2, "pause": 0.3}))
                await calls.call("work.add", {"a": 1})
                assert await _get(http, "/readyz") == (200, '{"status":"ok"}')
                _, metrics = await _get(http, "/metrics")
                assert 'operations_worker_running{group="operations"} 1\n' in metrics
                assert 'operations_group_workers{group="operations"} 1\n' in metrics
                assert 'operations_calls_total{operation="work.add",code=""} 1\n' in metrics
                # A caller sees only its operations, and nothing but probes is served.
                assert "work.secret" not in metrics
                key = {"X-API-Key": KEYS["ALICE_KEY"]}
                assert "work.secret" in (await _get(http, "/metrics", headers=key))[1]
                assert (await _get(http, "/work/add?a=1"))[0] == 404
                process.send_signal(signal.SIGTERM)
                while (await _get(http, "/readyz"))[0] == 200:
                    await asyncio.sleep(0.01)
                assert await _get(http, "/healthz") == (200, '{"status":"ok"}')
                assert (await running).data == "done"
            assert process.stderr is not None
            lines = [msgspec.json.decode(line) async for line in process.stderr]
            assert await process.wait() == 0
    called = {line["operation"]: line for line in lines if "operation" in line}
    assert called.keys() >= {"work.secret", "work.slow", "work.add"}
    assert called["work.slow"]["ms"] > 500
    assert called["work.slow"]["caller"] == "alice"


async def _get(http: aiohttp.ClientSession, path: str, **options: Any) -> tuple[int, str]:
    async with http.get(path, **options) as response:
        return response.status, await response.text()
