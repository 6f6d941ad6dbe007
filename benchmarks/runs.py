"""Runs on SQLite and PostgreSQL, beside DBOS, docket and Celery.

    python benchmarks/runs.py [--runs 200] [--waiting 10000] [--repeats 3]

An empty operation from start to result, five steps that may run only once, and 200 runs at the same time; then runs
that wait, and the takeover of a run whose process was killed. A peer that is not installed is left out.
"""

import argparse
import asyncio
import gc
import multiprocessing
import os
import resource
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _harness import show
from tests.servers import PostgresServer, RedisServer, running

from operations import OperationContext, OperationRegistry, operation
from operations.runs import Limits, Runs

OPERATOR = OperationContext(trusted=True)
STEPS = 5
LEASE = 1.5

Call = Callable[[], Awaitable[Any]]


@operation("bench.empty", type="query")
async def empty() -> int:
    return 1


@operation("bench.effect")
async def effect(number: int) -> int:
    return number


@operation("bench.steps", durable=True)
async def steps(context: OperationContext) -> int:
    return sum([await context.call(effect, number) for number in range(STEPS)])


@operation("bench.one", durable=True)
async def one(context: OperationContext) -> int:
    return int(await context.call(effect, 1))


@operation("bench.wait", durable=True)
async def wait(context: OperationContext) -> Any:
    return await context.wait_for("go")


@operation("bench.slow", durable=True)
async def slow(context: OperationContext, path: str) -> int:
    Path(path).touch()  # noqa: ASYNC240
    await asyncio.sleep(0 if Path(f"{path}.again").exists() else 3600)  # noqa: ASYNC240
    return 1


class Commits:
    """Counts the commits that write."""

    def __init__(self, runs: Runs) -> None:
        self.count = 0
        database: Any = runs._database
        database.committing = self.add

    def add(self) -> None:
        """Count one."""
        self.count += 1


def registry_of(url: str, **options: Any) -> OperationRegistry:
    runs = Runs(url, limits=Limits(live_per_caller=20_000), lease=LEASE, **options)
    return OperationRegistry([empty, effect, steps, one, wait, slow], runs=runs)


@asynccontextmanager
async def ours(url: str) -> AsyncIterator[dict[str, Call]]:
    async with registry_of(url) as registry:
        store: Any = registry.run_store

        async def complete(operation_id: str) -> Any:
            return await (await registry.start(operation_id, {}, OPERATOR)).result()

        calls: Any = {
            name: partial(complete, f"bench.{name}") for name in ("empty", "steps", "one")
        }
        calls["commits"] = Commits(store)
        yield calls


@asynccontextmanager
async def dbos(url: str) -> AsyncIterator[dict[str, Call]]:
    from dbos import DBOS

    DBOS(config={"name": "bench", "system_database_url": url, "log_level": "ERROR"})

    @DBOS.step()
    async def dbos_effect(number: int) -> int:
        return number

    @DBOS.workflow()
    async def dbos_empty() -> int:
        return 1

    @DBOS.workflow()
    async def dbos_steps() -> int:
        return sum([await dbos_effect(number) for number in range(STEPS)])

    @DBOS.workflow()
    async def dbos_one() -> int:
        return await dbos_effect(1)

    DBOS.launch()

    async def complete(workflow: Any) -> Any:
        return await (await DBOS.start_workflow_async(workflow)).get_result()

    yield {
        "empty": partial(complete, dbos_empty),
        "steps": partial(complete, dbos_steps),
        "one": partial(complete, dbos_one),
    }
    DBOS.destroy()


@asynccontextmanager
async def docket(url: str) -> AsyncIterator[dict[str, Call]]:
    from docket import Docket, Worker

    async def docket_empty() -> int:
        return 1

    async with Docket(name="bench", url=url) as queue:
        queue.register(docket_empty)
        async with Worker(queue, concurrency=50) as worker:
            running_worker = asyncio.create_task(worker.run_forever())

            # Each wait takes a connection of its pool.
            room = asyncio.Semaphore(20)

            async def complete() -> Any:
                async with room:
                    return await (await queue.add(docket_empty)()).get_result()

            yield {"empty": complete, "one": complete}
            running_worker.cancel()
            await asyncio.gather(running_worker, return_exceptions=True)


def _celery_app(url: str) -> Any:
    from celery import Celery

    app = Celery("bench", broker=url, backend=url)
    app.conf.task_acks_late = True

    @app.task(name="bench.empty")
    def celery_empty() -> int:
        return 1

    return app, celery_empty


def _celery_work(url: str) -> None:
    app, _ = _celery_app(url)
    app.worker_main(["worker", "--loglevel=ERROR", "--concurrency=4", "--pool=threads"])


@asynccontextmanager
async def celery(url: str) -> AsyncIterator[dict[str, Call]]:
    worker = multiprocessing.get_context("spawn").Process(
        target=_celery_work, args=(url,), daemon=True
    )
    worker.start()
    _, task = _celery_app(url)

    async def complete() -> Any:
        return await asyncio.to_thread(lambda: task.delay().get(timeout=60, interval=0.005))

    await complete()
    yield {"empty": complete, "one": complete}
    worker.terminate()
    worker.join()


async def timed(call: Call, seconds: float) -> float:
    """Return the median time of a call in milliseconds."""
    await call()
    times: list[float] = []
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends or len(times) < 3:
        began = time.perf_counter()
        await call()
        times.append((time.perf_counter() - began) * 1000)
    return statistics.median(times)


async def measure(place: Any, given: argparse.Namespace) -> dict[str, float]:
    row: dict[str, float] = {}
    async with place as calls:
        row["start to result, ms"] = await timed(calls["empty"], given.budget)
        if "steps" in calls:
            row["each step, ms"] = (
                await timed(calls["steps"], given.budget) - row["start to result, ms"]
            ) / STEPS
        cpu, began = time.process_time(), time.perf_counter()
        await asyncio.gather(*(calls["one"]() for _ in range(given.runs)))
        row[f"{given.runs} at once, /s"] = given.runs / (time.perf_counter() - began)
        row["CPU here, ms each"] = (time.process_time() - cpu) / given.runs * 1000
        if "commits" in calls:
            commits: Any = calls["commits"]
            for name, title in (("empty", "commits, a query"), ("one", "commits, one step")):
                # The lease is renewed meanwhile.
                found: list[int] = []
                for _ in range(5):
                    before = commits.count
                    await calls[name]()
                    found.append(commits.count - before)
                row[title] = min(found)
    return row


def resident() -> float:
    """Return the resident memory of this process in kB."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / 1000


async def measure_waiting(url: str, number: int) -> dict[str, float]:
    """Start runs that wait and are parked; then another one."""
    async with registry_of(url, park=0) as registry:
        store: Any = registry.run_store
        gc.collect()
        memory = resident()
        began = time.perf_counter()
        for start in range(0, number, 500):
            size = min(500, number - start)
            await asyncio.gather(*(registry.start("bench.wait", {}, OPERATOR) for _ in range(size)))
        # Nothing announces the last one.
        while (await store.counts())["input_required"] < number or store._executor._sessions:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        row = {"parked, /s": number / (time.perf_counter() - began)}
        gc.collect()
        row["kB each"] = (resident() - memory) / number
        cpu = time.process_time()
        await asyncio.sleep(3)
        row["CPU idle, %"] = (time.process_time() - cpu) / 3 * 100
        call: Any = lambda: registry.start("bench.empty", {}, OPERATOR)  # noqa: E731
        row["another, ms"] = await timed(_completed(call), 0.5)
    return row


def _completed(start: Any) -> Call:
    async def complete() -> Any:
        return await (await start()).result()

    return complete


def _serve(url: str, path: str) -> None:
    async def serve() -> None:
        async with registry_of(url) as registry:
            await registry.start("bench.slow", {"path": path}, OPERATOR, key="slow")
            await asyncio.sleep(3600)

    asyncio.run(serve())


async def measure_takeover(url: str) -> float:
    """Kill a process in a run; return the seconds until another one has completed it."""
    path = str(Path(tempfile.mkdtemp(), "begun"))
    process = multiprocessing.get_context("spawn").Process(
        target=_serve, args=(url, path), daemon=True
    )
    process.start()
    while not Path(path).exists():  # noqa: ASYNC110, ASYNC240
        await asyncio.sleep(0.01)
    Path(f"{path}.again").touch()  # noqa: ASYNC240
    async with registry_of(url) as registry:
        run = await registry.start("bench.slow", {"path": path}, OPERATOR, key="slow")
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        began = time.perf_counter()
        await run.result()
        return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--waiting", type=int, default=10_000)
    parser.add_argument("--budget", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=os.environ.get("RUNS_FOLDER")))
    with running(PostgresServer()) as server, running(RedisServer()) as redis:
        assert isinstance(server, PostgresServer)
        server.run("CREATE DATABASE dbos")

        def places(number: int) -> dict[str, Any]:
            found: dict[str, Any] = {
                "SQLite": lambda: ours(f"sqlite:{folder}/runs{number}.db"),
                "PostgreSQL": lambda: ours(server.new_schema()),
            }
            if find_spec("dbos"):
                found["DBOS, SQLite"] = lambda: dbos(f"sqlite:///{folder}/dbos{number}.db")
                url = server.url.replace("postgresql:", "postgresql+psycopg:").removesuffix(
                    "postgres"
                )
                found["DBOS, PostgreSQL"] = lambda: dbos(f"{url}dbos")
            if find_spec("docket"):
                found["docket, Redis"] = lambda: docket(redis.url)
            if find_spec("celery"):
                found["Celery, Redis"] = lambda: celery(redis.url)
            return found

        rows: dict[str, list[dict[str, float]]] = {}
        for number in range(given.repeats):
            for name, place in places(number).items():
                try:
                    rows.setdefault(name, []).append(asyncio.run(measure(place(), given)))
                except Exception as error:  # noqa: BLE001 - a peer may not work here
                    print(f"{name}: {error!r}", file=sys.stderr)
        show(
            "runs",
            {
                name: {key: statistics.median(row[key] for row in found) for key in found[0]}
                for name, found in rows.items()
                if found
            },
        )
        waiting = {}
        for name, url in (
            ("SQLite", f"sqlite:{folder}/waiting.db"),
            ("PostgreSQL", server.new_schema()),
        ):
            waiting[name] = asyncio.run(measure_waiting(url, given.waiting))
            waiting[name][f"takeover, s (lease {LEASE} s)"] = asyncio.run(measure_takeover(url))
        show(f"{given.waiting} runs that wait", waiting)


if __name__ == "__main__":
    main()
