"""A shop for scripts: its operations, and a registry that serves them with code mode."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Literal, NotRequired, TypedDict

from operations import (
    CallError,
    ErrorDefinition,
    Identity,
    Operation,
    OperationContext,
    OperationRegistry,
    operation,
)
from operations.code import Code
from operations.contract.functions import operation_of

OPERATOR = OperationContext(trusted=True)
BUYER = OperationContext(identity=Identity("ada", ["buy"]))
GUEST = OperationContext(identity=Identity("eve", []))


class Item(TypedDict):
    id: int
    name: str
    price: NotRequired[float]


@operation("shop.items", type="query")
async def items(limit: int = 3, kind: Literal["book", "pen"] = "book") -> list[Item]:
    """List the items of the shop."""
    return [{"id": number, "name": f"{kind} {number}"} for number in range(limit)]


@operation(
    "shop.order", scopes=["buy"], errors=[ErrorDefinition("OUT_OF_STOCK", "No item is left.")]
)
async def order(item: int) -> dict[str, int]:
    """Order one item."""
    if item == 13:
        raise CallError("OUT_OF_STOCK", "none is left\ndetails: [1]", {"left": 0})
    return {"ordered": item}


@operation("shop.refund", scopes=["admin"])
async def refund(order: int) -> None:
    """Pay an order back."""


@operation("shop.ticks")
async def ticks(count: int) -> AsyncIterator[int]:
    """Count."""
    for number in range(count):
        yield number


@operation("shop.echo", type="query")
async def echo(value: Any = None) -> Any:
    """Return the value."""
    return value


class Meeting:
    """An operation that returns only when enough calls of it run at the same time."""

    def __init__(self, count: int) -> None:
        self._count, self._enough = count, asyncio.Event()
        self.most = self.running = 0

    @property
    def operation(self) -> Operation:
        @operation("meeting.join", type="query")
        async def join(number: int) -> int:
            self.running += 1
            self.most = max(self.most, self.running)
            if self.running == self._count:
                self._enough.set()
            await self._enough.wait()
            self.running -= 1
            return number

        found = operation_of(join)
        assert isinstance(found, Operation)
        return found


def shop(*more: Any, **options: Any) -> OperationRegistry:
    limits, saved = options.pop("limits", None), options.pop("saved", ())
    registry = OperationRegistry([items, order, refund, ticks, echo, *more], **options)
    registry.register_all(Code(registry, limits=limits, saved=saved))
    return registry


async def run(
    registry: OperationRegistry, script: str, context: OperationContext = OPERATOR
) -> Any:
    """Run a script and return its result."""
    return (await registry.execute("code.run", {"script": script}, context)).data["result"]
