"""Serve the operations that `scripts/conform-http` tests: the demo, and operations with every kind of schema."""

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Literal

from operations import CallError, ErrorDefinition, OperationRegistry
from operations.cli.demo import open_demo
from operations.hub.app import build_app
from operations.server.http11.running import build_server


@dataclass(frozen=True)
class Node:
    """A tree."""

    value: int
    children: "list[Node]"


def add_shapes(registry: OperationRegistry) -> None:
    """Operations with every kind of input, result, error and stream."""

    @registry.operation("shape.scalars", type="query")
    async def scalars(
        word: str,
        size: float = 1.5,
        on: bool = False,
        kind: Literal["a", "b"] = "a",
        either: int | str = 1,
        maybe: int | None = None,
    ) -> dict[str, Any]:
        """Every scalar there is."""
        return {
            "word": word,
            "size": size,
            "on": on,
            "kind": kind,
            "either": either,
            "maybe": maybe,
        }

    @registry.operation("shape.lists", type="query")
    async def lists(numbers: list[int], words: list[str] | None = None) -> list[int]:
        """Lists as repeated parameters."""
        return numbers

    @registry.operation("shape.tree", type="query")
    async def tree(node: Node) -> Node:
        """A recursive value."""
        return node

    @registry.operation("shape.bytes", type="query")
    async def binary(length: Literal[0, 1, 1000] = 1) -> bytes:
        """Bytes."""
        return b"x" * length

    @registry.operation(
        "shape.fail",
        errors=[
            ErrorDefinition("GONE", "It is gone.", http_status=404),
            ErrorDefinition("FULL", "It is full.", http_status=409),
        ],
    )
    async def fail(code: Literal["GONE", "FULL"]) -> None:
        """Raise the error that the input names."""
        raise CallError(code, "as you wished")

    @registry.operation("shape.items", meta={"resume": {"input": "after", "id": ""}})
    async def items(after: int = 0) -> AsyncIterator[int]:
        """A stream that can be resumed."""
        for number in range(3):
            yield after + number + 1


async def main(port: int, key: str) -> None:
    """Serve on a port; the key signs the demo's manager in."""
    async with open_demo(key) as hub:
        add_shapes(hub.registry)
        app = build_app(hub, entry_points=("http", "mcp", "websocket"), host="127.0.0.1")
        await build_server(app, port=port).serve()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2]))
