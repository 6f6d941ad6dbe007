"""A server with every entry point, which a test attacks. It prints its port."""

import asyncio
from time import process_time
from typing import Any

from operations import Identity, OperationRegistry
from operations.calls.socket import WebSocketHub
from operations.server import APIKeys, create_app, hash_key
from operations.server.http11.running import running


async def main() -> None:
    registry = OperationRegistry()
    longest = 0.0

    @registry.operation("test.echo")
    async def echo(value: Any = None, size: int = 0) -> str:
        return "x" * size

    @registry.operation("test.typed")
    async def typed(items: list[dict[str, int]]) -> int:
        return len(items)

    @registry.operation("test.closed", scopes=["never"])
    async def closed(items: list[dict[str, int]]) -> int:
        return len(items)

    @registry.operation("test.lag")
    async def lag() -> float:
        """Return the most processor time between two ticks, in seconds."""
        nonlocal longest
        # The tick that measures the last request may still be due.
        await asyncio.sleep(0.02)
        found, longest = longest, 0.0
        return found

    async def tick() -> None:
        nonlocal longest
        while True:
            before = process_time()
            await asyncio.sleep(0.005)
            longest = max(longest, process_time() - before)

    app = create_app(
        registry,
        identity=APIKeys({hash_key("key"): Identity("ann")}),
        mcp=True,
        websocket=True,
    )
    ticking = asyncio.create_task(tick())
    async with running(app) as url, WebSocketHub(registry).serve(path="/ws") as hub:
        print(url.rpartition(":")[2], hub.sockets[0].getsockname()[1], flush=True)
        await asyncio.to_thread(input)
    ticking.cancel()


if __name__ == "__main__":
    asyncio.run(main())
