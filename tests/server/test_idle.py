"""Ten thousand connections that send nothing, or half of a request."""

import asyncio
import re
import resource
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.limits import scaled, time_limit

COUNT = 10_000
SPARE = 200
"""Other open files of each process."""

IDLERS = Path(__file__).with_name("idlers.py")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")


@asynccontextmanager
async def started(*arguments: str) -> AsyncGenerator[Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(IDLERS), *arguments, stdout=PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def line(process: Process) -> str:
    assert process.stdout is not None
    return (await process.stdout.readline()).decode().strip()


def resident(process: Process) -> int:
    """Bytes of memory."""
    status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
    found = re.search(r"VmRSS:\s+(\d+)", status)
    assert found is not None
    return int(found[1]) * 1024


async def answer(port: str) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(port))
    writer.write(b"POST /test/run HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    try:
        return await asyncio.wait_for(reader.read(), scaled(60))
    finally:
        writer.close()


@pytest.mark.slow
@pytest.mark.requirement("R18", "R39")
async def test_ten_thousand_idle_connections_block_no_client_and_are_closed() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < COUNT + SPARE:
        pytest.skip(f"a process may open {most} files here, fewer than {COUNT + SPARE}")

    with time_limit(200):
        async with started("serve") as server:
            port = await line(server)
            assert b"200 OK" in await answer(port)
            before = resident(server)
            async with started("connect", port, str(COUNT)) as idle:
                assert await line(idle) == "open"
                for _ in range(10):
                    assert (await answer(port)).endswith(b'"fine"')
                assert resident(server) - before < 100e6
                assert await line(idle) == "closed"
            assert (await answer(port)).endswith(b'"fine"')
            assert server.returncode is None
