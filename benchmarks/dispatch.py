"""Calls that block the event loop, spread over eight workers: the time of all of them beside the ideal.

    python benchmarks/dispatch.py [--calls 64] [--seconds 0.5] [--workers 8]

Promised: all calls end within 1.3 times the ideal time, and 99 of 100 within twice their ideal.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _harness import show
from tests.calls.processes import worker_processes
from tests.calls.waiting import started
from tests.calls.worlds import nats_world, redis_world
from tests.servers import NatsServer, RedisServer, running

from operations.calls import PendingRequestMap


async def measure(
    world: Any, options: dict[str, Any], given: argparse.Namespace
) -> dict[str, float]:
    path = Path(tempfile.mkdtemp(), "ledger")
    async with (
        worker_processes(world, given.workers, target=options) as _,
        world.connect(**options) as target,
        PendingRequestMap(target) as calls,
    ):
        for _ in range(5):
            await calls.call("slow.sleep", {"seconds": 0.02})
        latencies: list[float] = []
        began = time.perf_counter()

        async def call() -> None:
            value = {"seconds": given.seconds, "path": str(path)}
            await calls.call("slow.block_loop", value, timeout=120)
            latencies.append(time.perf_counter() - began)

        await asyncio.gather(*(call() for _ in range(given.calls)))
    ideal = given.seconds * -(-given.calls // given.workers)
    latencies.sort()
    p99 = latencies[int(len(latencies) * 0.99)]
    shares = sorted(Counter(started(path)).values())
    return {
        "s": latencies[-1],
        "x ideal": latencies[-1] / ideal,
        "p99, x ideal": p99 / ideal,
        "least calls of a worker": shares[0],
        "most": shares[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--workers", type=int, default=8)
    given = parser.parse_args()
    with running(RedisServer()) as redis, running(NatsServer("-js")) as nats:
        places = {
            "redis": (redis_world(redis.url), {}),
            "nats": (nats_world(nats.url), {}),
            "nats, jetstream": (nats_world(nats.url), {"queue": "jetstream"}),
        }
        rows = {name: asyncio.run(measure(*place, given)) for name, place in places.items()}
    show(f"{given.calls} calls of {given.seconds:g} s, {given.workers} workers", rows)


if __name__ == "__main__":
    main()
