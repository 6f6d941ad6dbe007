"""`[serve] processes`: several processes behind one port."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import msgspec
import pytest
from mcp import Client
from tests.calls.waiting import until
from tests.limits import time_limit

from operations.cli.options import ExitCode
from operations.config import ConfigError, load_config
from operations.front.config import ListenConfig
from operations.hub.processes import VARIABLE, Process, supervise
from operations.server.http11.running import listen

pytestmark = pytest.mark.anyio

OPERATIONS = """
import asyncio, os
from operations import operation

@operation("work.pid", type="query")
async def pid(seconds: float = 0, file: str = "") -> int:
    if file:
        with open(file, "a") as started:
            started.write("x")
    await asyncio.sleep(seconds)
    return os.getpid()

@operation("work.end")
async def end() -> None:
    os._exit(3)
"""
CONFIG = """
modules = ["ops.py"]
[record.trace]
enabled = false
[serve]
port = 0
processes = 2
[access.keys.ann]
key = { env = "ANN_KEY" }
scopes = ["hub:operate"]
"""
HIDDEN = '[tools."work.end"]\nhide = true\n'
KEY = {"X-API-Key": "key-of-ann"}


def write(folder: Path, more: str = "") -> None:
    (folder / "ops.py").write_text(OPERATIONS)
    (folder / "operations.toml").write_text(CONFIG + more)


@asynccontextmanager
async def started(folder: Path) -> AsyncGenerator[tuple[asyncio.subprocess.Process, Any]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "operations", "serve", "--json", "--config", str(folder / "operations.toml"),
        env={**os.environ, "ANN_KEY": "key-of-ann"}, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        announced = asyncio.create_task(process.stdout.readline())
        # A reload while the processes start does not end them.
        while not announced.done():
            if handles_sighup(process.pid):
                process.send_signal(signal.SIGHUP)
            await anyio.sleep(0.02)
        yield process, msgspec.json.decode(await announced)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def handles_sighup(pid: int) -> bool:
    caught = Path(f"/proc/{pid}/status").read_text().partition("SigCgt:")[2].split()
    return bool(caught) and bool(int(caught[0], 16) & 1 << signal.SIGHUP - 1)


async def call(url: str, path: str, **headers: str) -> tuple[int, Any]:
    """Call on a connection of its own."""
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}{path}", json={}, headers=headers) as reply,
    ):
        return reply.status, await reply.json()


async def serving(url: str) -> set[int]:
    """Return which processes serve."""
    found = await asyncio.gather(*(call(url, "/work/pid") for _ in range(20)))
    return {pid for status, pid in found if status == 200}


async def until_serving(url: str, but_not: set[int]) -> set[int]:
    found = set[int]()
    while len(found) < 2:
        with suppress(aiohttp.ClientError):
            found |= await serving(url) - but_not
    return found


async def until_all(url: str, status: int) -> None:
    """Wait until `work.end`, called with an input that it rejects, has this status in all processes."""
    wanted = 422 if status == 200 else status
    while True:
        found = await asyncio.gather(*(attempt(url) for _ in range(20)))
        if set(found) == {wanted}:
            return


async def attempt(url: str) -> int:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/work/end", json={"unknown": 1}) as reply,
    ):
        return reply.status


async def slow(url: str, folder: Path) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            f"{url}/work/pid", json={"seconds": 1, "file": str(folder / "running")}
        ) as reply,
    ):
        return reply.status, await reply.json()


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


async def test_processes_share_a_port_reload_restart_and_drain(tmp_path: Path) -> None:
    write(tmp_path)
    with time_limit(100):
        async with started(tmp_path) as (process, announced):
            url = announced["url"]
            assert set(announced["entryPoints"]) == {"http", "mcp", "websocket"}
            first = await until_serving(url, set())
            assert process.pid not in first

            # A process that ends is started again, and the others continue.
            with suppress(aiohttp.ClientError):
                await call(url, "/work/end")
            # Its sockets are closed before it has ended.
            while all(map(is_running, first)):
                await anyio.sleep(0.02)
            (lost,) = {pid for pid in first if not is_running(pid)}
            second = await until_serving(url, {lost})
            assert len(second & first) == 1

            # MCP has no sessions, for clients of all protocol revisions.
            for mode in ("auto", "legacy"):
                async with Client(f"{url}/mcp", mode=mode) as agent:
                    for _ in range(10):
                        result = await agent.call_tool("work__pid", {})
                        assert not result.is_error, result
            # Sessions of browsers are not offered.
            status, error = await call(url, "/session", **KEY)
            assert (status, error["code"]) == (503, "UNAVAILABLE")

            # A reload reaches all, by the operation and by SIGHUP.
            write(tmp_path, HIDDEN)
            status, _ = await call(url, "/hub/reload", **KEY)
            assert status == 200
            assert (await call(url, "/hub/disable", **KEY))[0] == 404
            await until_all(url, 404)
            write(tmp_path)
            process.send_signal(signal.SIGHUP)
            await until_all(url, 200)

            # Running calls are finished.
            (running := tmp_path / "running").touch()
            waiting = [asyncio.create_task(slow(url, tmp_path)) for _ in range(6)]
            while running.stat().st_size < len(waiting):
                await anyio.sleep(0.02)
            # As a service manager does: the signal reaches all processes at once.
            for pid in (process.pid, *second):
                os.kill(pid, signal.SIGTERM)
            results = await asyncio.gather(*waiting)
            assert {status for status, _ in results} == {200}
            assert await process.wait() == 0
            assert not any(map(is_running, second))


async def test_a_process_ends_when_the_first_one_has_ended() -> None:
    (mine, theirs), ended = socket.socketpair(), asyncio.Event()
    with mine, theirs, socket.socket() as listener, time_limit(20):
        process = Process(listener, theirs, announces=False)
        process.is_ready(end=ended.set)
        process.reload_all()
        assert mine.recv(2) == b"rh"
        mine.close()
        await ended.wait()


async def test_processes_that_cannot_start_are_not_started_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["serve", "--config", str(tmp_path / "missing.toml")]
    with time_limit(60), listen(ListenConfig()) as listener:
        assert await supervise(arguments, 1, listener, grace=30) == ExitCode.CONFIG
    assert "missing.toml" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("more", "fault"),
    [
        ('[tools."a.*"]\nmax_bytes = 5000\n', "max_bytes can be used only with"),
        ("console = true\n", "console can be used only with"),
    ],
)
def test_settings_that_need_one_process_are_mistakes(tmp_path: Path, more: str, fault: str) -> None:
    path = tmp_path / "operations.toml"
    path.write_text(f"[serve]\nprocesses = 2\n{more}")
    with pytest.raises(ConfigError, match=fault):
        load_config(path)


async def test_a_process_that_cannot_be_started_is_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    program, pids = tmp_path / "program", tmp_path / "pids"
    program.write_text(
        f"#!{sys.executable}\n"
        "import os, pathlib, socket\n"
        f"channel = socket.socket(fileno=int(os.environ[{VARIABLE!r}].split()[1]))\n"
        "channel.send(b'r')\n"
        f"pathlib.Path({str(pids)!r}).open('a').write(f'{{os.getpid()}}\\n')\n"
        "channel.recv(1)\n"
    )
    program.chmod(0o700)
    pids.touch()
    monkeypatch.setattr(sys, "executable", str(program))
    with listen(ListenConfig()) as listener, time_limit(60):
        supervising = asyncio.create_task(supervise([], 1, listener, 5))
        await until(lambda: len(pids.read_text().splitlines()) == 1)
        hidden = program.rename(tmp_path / "hidden")
        os.kill(int(pids.read_text()), signal.SIGKILL)
        await until(lambda: "process 0 cannot be started" in caplog.text)
        hidden.rename(program)
        await until(lambda: len(pids.read_text().splitlines()) == 2)
        supervising.cancel()
        await asyncio.wait({supervising})
