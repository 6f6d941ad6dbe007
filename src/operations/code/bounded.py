"""Subscriptions in scripts: lists of items, as many as arrive within bounds.

Rule 1: the seconds count from the first request for an item, without the time for which a person is asked.
"""

import asyncio
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from math import isnan
from typing import Any, cast

from operations.base.errors import CallError, ErrorCode
from operations.base.json.values import as_json
from operations.base.time_limit import TimeLimit
from operations.base.types import JSONObject
from operations.code.names import BOUNDS
from operations.contract.context import OperationContext, Stream
from operations.registry.registry import OperationRegistry


class Bounds:
    """The bounds of one subscription.

    Args:
        given: Those that the script gives; the largest values stand for the others.

    Raises:
        CallError: `VALIDATION_ERROR` if they are not numbers.
    """

    def __init__(self, given: JSONObject) -> None:
        self.items = int(_bounded(given.get("max_items", BOUNDS["max_items"]), BOUNDS["max_items"]))
        self.seconds = float(_bounded(given.get("seconds", BOUNDS["seconds"]), BOUNDS["seconds"]))


async def items_of(
    registry: OperationRegistry,
    operation_id: str,
    value: Any,
    bounds: Bounds,
    context: OperationContext,
    child: OperationContext,
) -> list[Any]:
    """Return the items of a subscription; in a run, they are a recorded step.

    Args:
        registry: The operations.
        operation_id: The subscription.
        value: Its input.
        bounds: Where the list ends.
        context: The context of the script, which aborts the subscription when it ends.
        child: The context of the nested call.
    """
    patience = _Patience(bounds.seconds, child)
    child = child.changed(limit=patience)

    async def read(stream: Stream) -> list[Any]:
        items: list[Any] = []
        context.hold(stream)
        with suppress(TimeoutError, StopAsyncIteration):
            async with patience.timeout():
                while len(items) < bounds.items:
                    envelope = await anext(cast("Any", stream))
                    data = envelope.raise_for_error().data
                    items.append(data if isinstance(data, bytes) else as_json(data))
        stream.abort()
        return items

    scope = context.scope
    if scope is None:
        return await read(registry.subscribe(operation_id, value, child))
    named: JSONObject = {"max_items": bounds.items, "seconds": bounds.seconds}
    return await context.nest(scope.read(registry, operation_id, value, child, read, named))


class _Patience(TimeLimit):
    """The time limit of a nested call. While a person is asked, the time for items stops as well."""

    def __init__(self, seconds: float, context: OperationContext) -> None:
        super().__init__(None, deadline=context.deadline, outer=context.limit)
        self.is_kept = context.limit is not None and context.limit.is_kept
        self._item_seconds = seconds
        self._asked = 0
        self._timer: asyncio.Timeout | None = None

    @asynccontextmanager
    async def timeout(self) -> AsyncGenerator[None]:
        """Limit the time for items."""
        async with asyncio.timeout(self._item_seconds) as timer:
            self._timer = timer
            try:
                yield
            finally:
                self._timer = None

    @contextmanager
    def paused(self) -> Generator[None]:
        """Stop the timers."""
        self._asked += 1
        left = self._stop() if self._asked == 1 else None
        try:
            with super().paused():
                yield
        finally:
            self._asked -= 1
            if left is not None and self._timer is not None:
                self._timer.reschedule(asyncio.get_running_loop().time() + left)

    def _stop(self) -> float | None:
        timer, loop = self._timer, asyncio.get_running_loop()
        ends = None if timer is None else timer.when()
        if timer is None or ends is None:
            return None
        timer.reschedule(None)
        return max(0.0, ends - loop.time())


def _bounded(value: Any, most: float) -> float:
    """Return a bound of a subscription, at most the largest.

    Raises:
        CallError: `VALIDATION_ERROR` if it is not a number.
    """
    with suppress(TypeError, ValueError, OverflowError):
        number = value if isinstance(value, int) else float(value)
        # A NaN would disorder the timers of the event loop.
        if not isnan(min(number, most)):
            return min(number, most)
    message = "max_items and seconds must be numbers"
    raise CallError(ErrorCode.VALIDATION_ERROR, message, begun=False)
