"""The hub of the client matrix: `python -m tests.mcp_clients.hub` prints its address and serves until it is ended."""

import asyncio
from typing import TypedDict, cast

from operations import CallError, ErrorDefinition, OperationContext, OperationRegistry
from operations.server import create_app
from operations.server.http11.running import running


class Number(TypedDict):
    n: int


class Task(TypedDict):
    id: str
    done: bool


def build_registry() -> OperationRegistry:
    """Return a registry with one operation for each column of the matrix."""
    registry = OperationRegistry()

    @registry.operation("matrix.add", type="query")
    async def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    @registry.operation("matrix.tasks", type="query")
    async def tasks() -> list[Task]:
        """Return a list of objects."""
        return [{"id": "t1", "done": True}]

    @registry.operation("matrix.task", type="query")
    async def task(id: str) -> Task:
        """Return an object."""
        return {"id": id, "done": False}

    @registry.operation("matrix.fail", errors=[ErrorDefinition("LOCKED", "The task is in use")])
    async def fail() -> Task:
        """Fail, although there is an output schema."""
        raise CallError("LOCKED", "in use", {"by": "ann"})

    @registry.operation("matrix.mismatch", type="query")
    async def mismatch() -> Number:
        """Return a result that does not match its schema."""
        return cast("Number", {"n": "many"})

    @registry.operation("matrix.steps")
    async def steps(context: OperationContext) -> str:
        """Report progress."""
        for number in (1, 2, 3):
            await context.progress(number, 3, f"step {number}")
        return "done"

    @registry.operation("matrix.greet", type="query", meta={"mcp": {"prompt": True}})
    async def greet(name: str) -> str:
        """Write a greeting."""
        return f"Greet {name}."

    @registry.operation(
        "matrix.motd", type="query", meta={"mcp": {"resource": {"uri": "matrix://motd"}}}
    )
    async def motd() -> str:
        """Return the message of the day."""
        return "Be kind."

    return registry


async def main() -> None:
    """Serve until the process is ended."""
    registry = build_registry()
    async with running(create_app(registry, mcp=True)) as url:
        print(f"{url}/mcp", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
