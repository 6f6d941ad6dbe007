"""Background tasks: keep references to them, end them, and let the code that closes an object finish."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, TypeVar

import anyio


def start_task(
    tasks: set[asyncio.Task[Any]], work: Coroutine[Any, Any, Any]
) -> "asyncio.Task[Any]":
    """Run a coroutine in the background, with a reference to its task in `tasks` until it ends."""
    task = asyncio.Task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


async def cancel_tasks(*tasks: "asyncio.Task[Any] | None") -> None:
    """Cancel tasks, and wait until they have ended."""
    running = {task for task in tasks if task is not None}
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running)


OwnerT = TypeVar("OwnerT")


def shielded(
    close: Callable[[OwnerT], Coroutine[Any, Any, None]],
) -> Callable[[OwnerT], Coroutine[Any, Any, None]]:
    """Let a method that closes an object finish in a cancelled scope of anyio, in which every `await` is cancelled."""

    @wraps(close)
    async def finish(owner: OwnerT) -> None:
        with anyio.CancelScope(shield=True):
            await close(owner)

    return finish
