"""A worker in a separate process, which tests can really kill.

python -m tests.calls.worker '{"world": "redis", "url": "...", "prefix": "...", "options": {}}'
"""

import asyncio
import json
import os
import sys
from importlib import import_module
from typing import Any

from tests.calls.operations_under_test import build_registry

from operations.calls import serve_calls


async def main(settings: dict[str, Any], transport: Any) -> None:
    registry = build_registry()
    options = settings.get("options", {})
    # In one write, because several workers may share the pipe.
    ready = f"ready {os.getpid()}\n" if "workers" in settings else "ready\n"
    if settings["world"] == "websocket":

        async def attach(target: Any) -> None:
            async with serve_calls(registry, target, **options):
                await target.wait_closed()

        async with transport.serve_websocket(attach, port=settings["port"]):
            print(ready, end="", flush=True)
            await asyncio.Event().wait()
    connect = getattr(transport, f"connect_{settings['world']}")
    prefix = settings["prefix"] + (":" if settings["world"] == "redis" else "")
    async with (
        connect(settings["url"], prefix=prefix, **settings.get("target", {})) as target,
        serve_calls(registry, target, **options) as server,
    ):
        print(ready, end="", flush=True)
        await server.run()


def keep_alive(workers: int) -> None:
    """Fork workers, and another one for each that dies; return in each worker."""
    while True:
        if os.fork() == 0:
            return
        workers -= 1
        if workers <= 0:
            os.wait()


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    # No other transport: importing all of them would take half as long again.
    used = import_module(f"operations.pubsub.{given['world']}")
    # Forked after the imports, so that many workers start as fast as one.
    if given.get("kept"):
        keep_alive(given["workers"])
    else:
        for _ in range(given.get("workers", 1) - 1):
            if os.fork() == 0:
                break
    asyncio.run(main(given, used))
