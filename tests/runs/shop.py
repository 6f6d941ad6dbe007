"""A shop whose handlers write each effect to a ledger, and processes of it that are killed.

The processes come from the fork server, which has imported everything, so that a process starts in milliseconds.
"""

import asyncio
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import get_ident
from typing import Any, cast

from tests.limits import scaled

from operations import CallError, Identity, OperationContext, OperationRegistry, operation
from operations.postgres import PostgresDatabase
from operations.runs import Run, Runs
from operations.runs.database import Database
from operations.runs.sqlite import SQLiteDatabase

LEASE = max(0.5, scaled(0.5))
"""Seconds; short, so that another process takes over soon. On a busy machine, threads renew it late."""

CUSTOMER = OperationContext(identity=Identity("ada", ["shop"]))


class Ledger:
    """The effects of all processes, one line each."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, line: str) -> None:
        """Add a line in one system call."""
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(file, f"{line}\n".encode())
        finally:
            os.close(file)

    def effects(self) -> Counter[str]:
        """Return how often each effect has happened."""
        return Counter(self._path.read_text().splitlines() if self._path.exists() else [])


class Shop:
    """The operations, with a ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    @operation("shop.charge", scopes=["shop"])
    async def charge(self, order: str, amount: int) -> int:
        """Charge a card: never twice."""
        self._ledger.write(f"charge {order} {amount}")
        await asyncio.sleep(0)
        return amount

    @operation("shop.reserve", scopes=["shop"], idempotent=True)
    async def reserve(self, order: str, item: int) -> int:
        """Reserve an item: any number of times."""
        self._ledger.write(f"reserve {order} {item}")
        return item

    @operation("shop.price", type="query", scopes=["shop"])
    async def price(self, item: int) -> int:
        """Return a price."""
        return 10 * item

    @operation("shop.order", scopes=["shop"], durable=True)
    async def order(self, id: str, context: OperationContext) -> int:
        """Make ten steps, most of them at the same time."""
        first = await context.call(self.charge, id, 1)
        prices = await asyncio.gather(*(context.call(self.price, item) for item in (1, 2)))
        several = await asyncio.gather(
            context.call(self.charge, id, 2),
            context.call(self.reserve, id, 1),
            context.call(self.charge, id, 3),
            context.call(self.reserve, id, 2),
        )
        packed = await context.step("pack", partial(self._pack, id), once=True)
        noted = await context.step("note", lambda: 0)
        last = await context.call(self.charge, id, 4)
        return int(first + sum(prices) + sum(several) + packed + noted + last)

    def _pack(self, id: str) -> int:
        self._ledger.write(f"charge {id} pack")
        return 100

    @operation("shop.refund", scopes=["shop"])
    async def refund(self, order: str) -> str:
        """Run only once, and is not durable: the run is one step."""
        self._ledger.write(f"charge {order} refund")
        return "refunded"


ORDER_RESULT = 1 + 30 + 8 + 100 + 0 + 4


def registry_of(
    folder: Path, url: str, database: Database | None = None, **options: Any
) -> OperationRegistry:
    """Return the registry of a shop with a journal, whose ledger is in a folder."""
    runs = Runs(database or url, **{"lease": LEASE, **options})
    registry = OperationRegistry(runs=runs)
    registry.register_object(Shop(Ledger(folder / "ledger")))
    return registry


def killed_at_commit(url: str, number: int, moment: str) -> Database:
    """Return a journal whose process is killed at a commit, before or after it reaches the disk."""
    database = database_of(url)
    thread, left = 0, number

    def kill(now: str) -> None:
        if now == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    def committing() -> None:
        nonlocal left, thread
        left -= 1
        if left == 0:
            thread = get_ident()
            kill("before")

    def committed() -> None:
        if thread == get_ident():
            kill("after")

    database.committing, database.committed = committing, committed
    return cast("Database", database)


def database_of(url: str) -> Any:
    """Return the database of a URL."""
    kind, _, place = url.partition(":")
    return SQLiteDatabase(place) if kind == "sqlite" else PostgresDatabase(url)


# ------------------------------------------------------------ processes

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.runs.shop"])


@dataclass
class Process:
    """A process of the shop."""

    process: Any
    folder: Path
    name: str = field(default="")

    def wait(self) -> int:
        """Wait for its end, and return its exit code."""
        self.process.join(scaled(60))
        assert self.process.exitcode is not None, "the process does not end"
        return int(self.process.exitcode)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal."""
        os.kill(self.process.pid, number)


def start_process(
    target: Callable[..., Coroutine[Any, Any, None]], folder: Path, *args: Any
) -> Process:
    """Run a coroutine function in a process of its own."""
    process = _context.Process(target=_run, args=(target, folder, *args), daemon=True)
    process.start()
    return Process(process, folder)


def _run(target: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
    asyncio.run(target(*args))


async def buy(folder: Path, url: str, operation_id: str, kill_at: int, moment: str) -> None:
    """Order with a key, and be killed at a commit; 0 for never."""
    database = killed_at_commit(url, kill_at, moment)
    async with registry_of(folder, url, database) as registry:
        run = await start_order(registry, operation_id)
        (folder / "outcome").write_text(await outcome(run))


async def start_order(registry: OperationRegistry, operation_id: str) -> Run:
    """Start an order with a key, as a client that repeats its request."""
    given = {"id": "A"} if operation_id == "shop.order" else {"order": "A"}
    return await registry.start(operation_id, given, CUSTOMER, key="order A")


async def outcome(run: Run) -> str:
    """Return the status of a run that has ended, and its result or code."""
    try:
        envelope = await run.result(30)
    except CallError as error:
        return f"{run.status} {error.code}"
    return f"{run.status} {envelope.data}"


async def work(folder: Path, url: str) -> None:
    """Work on runs until the process is killed."""
    async with registry_of(folder, url):
        (folder / "up").touch()
        await asyncio.sleep(3600)


def wait_until(happened: Callable[[], bool]) -> None:
    """Wait for something that another process does."""
    ends = time.monotonic() + scaled(30)
    while not happened():
        assert time.monotonic() < ends
        time.sleep(0.005)
