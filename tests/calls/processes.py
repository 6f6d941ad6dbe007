"""Workers in processes of their own."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from tests.limits import time_limit

PROJECT = Path(__file__).resolve().parents[2]


class WorkerProcess:
    """A running `tests.calls.worker`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    async def wait(self) -> int:
        with time_limit(100):
            return await self.process.wait()


# The clock must be changed before modules that read it are imported.
_WITH_A_WRONG_CLOCK = """
import runpy, sys, time
real = time.time, time.time_ns
time.time = lambda: real[0]() + {skew}
time.time_ns = lambda: real[1]() + {skew} * 10**9
runpy.run_module("tests.calls.worker", run_name="__main__", alter_sys=True)
"""


@asynccontextmanager
async def worker_process(
    world: Any, *, skew: int = 0, **settings: Any
) -> AsyncGenerator[WorkerProcess]:
    """A worker in `world`, ready to be called, for the length of the block; its clock is wrong by `skew` seconds."""
    process = await _start(world, skew, settings)
    worker = WorkerProcess(process)
    try:
        assert process.stdout is not None
        with time_limit(100):
            line = await process.stdout.readline()
        assert line == b"ready\n"
        yield worker
    finally:
        if process.returncode is None:
            worker.kill()
        await worker.wait()


@asynccontextmanager
async def worker_processes(world: Any, workers: int, **settings: Any) -> AsyncGenerator[list[int]]:
    """Several workers in `world`, ready to be called, for the length of the block; gives their process ids."""
    process = await _start(world, 0, {"workers": workers, **settings})
    assert process.stdout is not None
    pids: list[int] = []
    try:
        with time_limit(100):
            while len(pids) < workers:
                pids.append(int((await process.stdout.readline()).removeprefix(b"ready ")))
        yield pids
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # Wait for the last worker: they share the pipe, and the first one may have ended earlier.
        await process.stdout.read()
        await process.wait()


async def _start(world: Any, skew: int, settings: dict[str, Any]) -> asyncio.subprocess.Process:
    given = {
        "world": world.name,
        "url": getattr(world, "url", ""),
        "prefix": getattr(world, "prefix", ""),
        "port": getattr(world, "port", 0),
        "target": getattr(world, "options", {}),
        **settings,
    }
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *(("-c", _WITH_A_WRONG_CLOCK.format(skew=skew)) if skew else ("-m", "tests.calls.worker")),
        json.dumps(given),
        cwd=PROJECT,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
