"""Sources that disconnect and return leak nothing: for some seconds here, for ten minutes by `scripts/soak hub`."""

import asyncio
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import pytest
from tests.hub.test_recovery import HELLO, OPERATOR, SERVER, SHOP, states, tools, until, written
from tests.leftovers import MAX_GROWTH, Memory, resident_kilobytes
from tests.limits import time_limit
from tests.servers import free_port

from operations.hub import Hub, open_hub
from operations.hub.reloading import reload
from operations.server.http11.running import running

SECONDS = float(os.environ.get("OPERATIONS_SOAK_SECONDS", "3"))
REPORT = os.environ.get("OPERATIONS_SOAK_REPORT", os.devnull)
ALWAYS = 'modules = ["hello.py"]\n[limits]\ntimeout = 0.5\n'
EXPECTED = {200, 404, 503, 504}
"""Statuses of calls to a source that may be unavailable or removed."""

Counts = tuple[int, int, int, int]


def children() -> list[int]:
    """Return the processes that this one started."""
    tasks = Path("/proc/self/task").iterdir()
    return [int(pid) for each in tasks for pid in (each / "children").read_text().split()]


def command_of(pid: int) -> bytes:
    """Return the command of a process; nothing if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def say(text: str) -> None:
    """Write a line of the report."""
    with Path(REPORT).open("a") as lines:
        lines.write(f"{text}\n")


def counts() -> Counts:
    """Return the tasks, file descriptors, child processes and threads of this process."""
    descriptors = sum(1 for _ in Path("/proc/self/fd").iterdir())
    return len(asyncio.all_tasks()), descriptors, len(children()), threading.active_count()


class Sources:
    """A hub with an MCP server over HTTP, one that it starts, and an API, all of which disconnect and return."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = free_port()
        self._random = random.Random(1)
        self._far = AsyncExitStack()
        self.entries = {
            "far": f'[mcp.far]\nurl = "http://127.0.0.1:{self._port}/mcp"\nadvanced.reconnect_timeout = 0.2\n',
            "child": "[mcp.child]\n"
            f"command = {json.dumps(sys.executable)}\n"
            f"args = {json.dumps(['-I', '-S', str(SERVER), '0', 'double', '2', '0'])}\n",
            "shop": '[openapi.shop]\ndocument = "shop.json"\nbase_url = "http://127.0.0.1:9"\n',
        }

    def write(self, *names: str) -> Path:
        return written(self._folder, ALWAYS + "".join(self.entries[name] for name in names))

    async def start(self) -> None:
        await self._far.enter_async_context(tools(self._port))

    async def stop(self) -> None:
        await self._far.aclose()

    async def change(self, hub: Hub, url: str) -> None:
        """Run each action once, in random order."""
        changes = [self._restart, self._kill_child, self._edit, self._control, self._stream]
        for change in self._random.sample(changes, len(changes)):
            await change(hub, url)

    async def settle(self, hub: Hub, url: str) -> None:
        """Restore all sources, and wait until they are connected."""
        self.write(*self.entries)
        await reload(hub)
        for name in self.entries:
            await hub.supervisor(name).open_again()
        await until(lambda: set(states(hub).values()) == {"connected"})

    async def _restart(self, hub: Hub, url: str) -> None:
        await self.stop()
        await asyncio.sleep(self._random.uniform(0, 0.2))
        await self.start()
        if "far" in states(hub):
            await hub.supervisor("far").open_again()

    async def _kill_child(self, hub: Hub, url: str) -> None:
        far, mine = f"\0{self._port}\0".encode(), str(SERVER).encode()
        for pid in children():
            if mine in command_of(pid) and far not in command_of(pid):
                os.kill(pid, signal.SIGKILL)

    async def _edit(self, hub: Hub, url: str) -> None:
        self.write(*self._random.sample(sorted(self.entries), self._random.randrange(3)))
        await reload(hub)
        self.write(*self.entries)
        await reload(hub)

    async def _control(self, hub: Hub, url: str) -> None:
        source = self._random.choice(sorted(self.entries))
        for action in ("disable", "enable", "retry"):
            await hub.registry.execute(f"hub.{action}", {"source": source}, OPERATOR)

    async def _stream(self, hub: Hub, url: str) -> None:
        """Follow the sources, and leave."""
        stream = hub.registry.subscribe("hub.watch", {}, OPERATOR)
        await anext(stream)
        await stream.aclose()


@asynccontextmanager
async def load(url: str, statuses: Counter[int]) -> AsyncGenerator[None]:
    """Repeatedly call an operation that is always available and operations that may not be."""
    done = asyncio.Event()

    async def call(session: aiohttp.ClientSession, operation: str) -> None:
        while not done.is_set():
            is_local = operation == "hello.greet"
            body = {"operation": operation, "input": {} if is_local else {"number": 2}}
            async with session.post(f"{url}/call", json=body) as response:
                answer = await response.json()
            if is_local or response.status == 200:
                assert answer["data"] == ("hi" if is_local else {"result": 4}), answer
            assert response.status in EXPECTED, answer
            statuses[response.status] += 1
            await asyncio.sleep(0.005)

    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as tasks:
        for operation in ("hello.greet", "far.double", "child.double"):
            tasks.create_task(call(session, operation))
        yield
        done.set()


@pytest.mark.slow
@pytest.mark.requirement("R62")
async def test_sources_that_come_and_go_leak_nothing(tmp_path: Path) -> None:
    (tmp_path / "hello.py").write_text(HELLO)
    (tmp_path / "shop.json").write_text(json.dumps(SHOP))
    sources, statuses, cycles = Sources(tmp_path), Counter[int](), 0
    with time_limit(SECONDS + 90):
        await sources.start()
        async with open_hub(sources.write(*sources.entries)) as hub, running(hub.app) as url:
            async with load(url, statuses):
                await sources.change(hub, url)
            await sources.settle(hub, url)
            # A replaced source is closed half a second later.
            await asyncio.sleep(1)
            before, memory, ends = counts(), Memory(), time.monotonic() + SECONDS
            resident = resident_kilobytes()
            reported_at = time.monotonic()
            while time.monotonic() < ends:
                async with load(url, statuses):
                    await sources.change(hub, url)
                cycles += 1
                if time.monotonic() > reported_at + 10:
                    reported_at = time.monotonic()
                    say(
                        f"{cycles} cycles, {dict(statuses)}, (tasks, descriptors, children, threads) ="
                        f" {counts()}, {resident_kilobytes()} KB"
                    )
            await sources.settle(hub, url)
            now: Counts = counts()

            def is_back() -> bool:
                nonlocal now
                now = counts()
                return all(have <= had for have, had in zip(now[:3], before[:3], strict=True))

            with suppress(TimeoutError):
                await until(is_back, 10)
            # Measured before an explicit garbage collection, because the process must collect garbage itself.
            resident = resident_kilobytes() - resident
            growth = memory.growth()
            # The pool of threads that the standard library starts is bounded, and may not be full yet.
            assert is_back(), f"{before} became {now}"
            assert now[3] <= before[3] + 8, f"{before} became {now}"
            assert growth < MAX_GROWTH, f"{growth} KB"
            assert resident < 3 * MAX_GROWTH, f"{resident} KB, with garbage"
        await sources.stop()
    say(
        f"{cycles} cycles, {dict(statuses)}, {before} -> {now}, {resident} KB more, {growth} without garbage"
    )
    assert statuses[200] > 0
    assert cycles > 0
