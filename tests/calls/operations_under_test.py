"""The operations that the tests of calls serve, in this process and in others."""

import asyncio
import os
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from operations.base.errors import CallError
from operations.contract.context import OperationContext
from operations.contract.envelopes import TextContent, http_envelope, mcp_envelope
from operations.contract.specs import ErrorDefinition
from operations.registry import OperationRegistry
from operations.schema import from_schema


def note(path: str, text: str) -> None:
    """Append a line to a file, which another process can read."""
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(f"{text}\n")


def build_registry() -> OperationRegistry:
    """A registry with operations of every kind."""
    registry = OperationRegistry()

    @registry.operation("math.add", type="query")
    async def add(a: int, b: int) -> int:
        return a + b

    @registry.operation("echo.any", type="query")
    async def echo(value: Any = None) -> Any:
        return value

    @registry.operation("echo.bytes", type="query")
    async def echo_bytes(size: int) -> Any:
        return bytes(range(256)) * (size // 256)

    @registry.operation("echo.http", type="query")
    async def echo_http() -> Any:
        return http_envelope(
            {"ok": True}, status_code=201, headers={"X-One": "1"}, content_type="application/json"
        )

    @registry.operation("echo.mcp", type="query")
    async def echo_mcp() -> Any:
        return mcp_envelope(
            [{"type": "text", "text": "no"}], is_error=True, content=[TextContent(text="no")]
        )

    @registry.operation("echo.whoami", type="query")
    async def whoami(context: OperationContext) -> Any:
        return {
            "id": context.identity.id if context.identity else None,
            "parent": context.parent_request_id,
            "metadata": dict(context.metadata),
            "deadline": context.deadline,
        }

    @registry.operation("secret.read", type="query", scopes=["secret:read"])
    async def secret() -> str:
        return "42"

    @registry.operation(
        "fail.domain",
        errors=[ErrorDefinition("NO_FUNDS", "Not enough money", from_schema({"type": "object"}))],
    )
    async def fail_domain() -> None:
        raise CallError("NO_FUNDS", "the account is empty", {"missing": 3})

    @registry.operation("fail.unexpected")
    async def fail_unexpected() -> None:
        raise RuntimeError("password=hunter2")

    @registry.operation("fail.system")
    async def fail_strange(kind: str) -> Any:
        if kind == "group":
            raise ExceptionGroup("two", [ValueError("a"), KeyError("b")])
        if kind == "recursion":
            return await fail_strange(kind)
        if kind == "memory":
            raise MemoryError
        if kind == "exit":
            raise GeneratorExit
        if kind == "base":
            raise BaseException("odd")  # noqa: TRY002
        return object()

    @registry.operation("count.up")
    async def count_up(n: int, size: int = 0) -> AsyncGenerator[Any]:
        for index in range(n):
            yield {"index": index, "fill": "x" * size} if size else index

    @registry.operation("count.exit")
    async def count_exit() -> AsyncGenerator[int]:
        yield 0
        raise GeneratorExit

    @registry.operation("count.forever")
    async def count_forever(path: str = "", pause: float = 0) -> AsyncGenerator[int]:
        index = 0
        try:
            while True:
                yield index
                index += 1
                if pause:
                    await asyncio.sleep(pause)
        finally:
            if path:
                note(path, f"stopped after {index}")

    @registry.operation("count.broken")
    async def count_broken(n: int) -> AsyncGenerator[int]:
        for index in range(n):
            yield index
        raise CallError("BROKEN", "no more")

    @registry.operation("slow.sleep", type="query")
    async def sleep(seconds: float, path: str = "") -> str:
        if path:
            note(path, f"started {os.getpid()}")
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            if path:
                note(path, "cancelled")
            raise
        if path:
            note(path, "finished")
        return "slept"

    @registry.operation("slow.write")
    async def write(seconds: float, path: str) -> str:
        note(path, f"started {os.getpid()}")
        await asyncio.sleep(seconds)
        note(path, "finished")
        return "written"

    @registry.operation("slow.save", idempotent=True)
    async def save(seconds: float, path: str) -> str:
        note(path, f"started {os.getpid()}")
        await asyncio.sleep(seconds)
        note(path, "finished")
        return "saved"

    @registry.operation("slow.stubborn")
    async def stubborn(seconds: float) -> str:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                await asyncio.sleep(end - time.monotonic())
            except asyncio.CancelledError:
                continue
        return "at last"

    @registry.operation("slow.block_loop", type="query")
    async def block_loop(seconds: float, path: str) -> str:
        note(path, f"started {os.getpid()}")
        time.sleep(seconds)  # noqa: ASYNC251 - blocking the loop is the point
        return "blocked"

    @registry.operation("slow.thread", type="query")
    def thread(seconds: float) -> str:
        time.sleep(seconds)
        return "slept"

    @registry.operation("slow.crash", idempotent=True)
    async def crash(path: str) -> None:
        note(path, f"started {os.getpid()}")
        os._exit(1)

    @registry.operation("slow.die")
    async def die(path: str) -> None:
        note(path, f"started {os.getpid()}")
        os._exit(1)

    @registry.operation("nest.outer", type="query")
    async def outer(path: str, context: OperationContext) -> Any:
        envelope = await context.env.slow.sleep({"seconds": 60, "path": path})
        return envelope.data

    return registry
