"""The operations of the toolbox tests, and the expected result of each kind of call."""

from dataclasses import dataclass
from typing import Any

from operations import CallError, ErrorDefinition, Identity, OperationContext, OperationRegistry

AGENT = Identity(id="agent", scopes=["shop:read"])


@dataclass
class Item:
    id: int
    name: str


def shop() -> OperationRegistry:
    """Return a small shop: an item, an order that fails, one that is denied, one that needs approval, a long log."""
    registry = OperationRegistry()

    @registry.operation("shop.item", type="query", scopes=["shop:read"])
    async def item(id: int) -> Item:
        """Return an item."""
        return Item(id, "cup")

    @registry.operation("shop.total", type="query", calls=["shop.*"])
    async def total(ids: list[int], context: OperationContext) -> int:
        """Add up the prices of items."""
        return sum([len((await context.env.shop.item({"id": each})).data["name"]) for each in ids])

    @registry.operation("shop.order", errors=[ErrorDefinition("SOLD_OUT")])
    async def order(id: int) -> None:
        """Order an item."""
        raise CallError("SOLD_OUT", f"item {id} is sold out")

    @registry.operation("shop.pay")
    async def pay(amount: float) -> None:
        """Pay, which a person has to approve."""
        raise CallError("APPROVAL_REQUIRED", f"paying {amount} needs approval", {"approval": "a1"})

    @registry.operation("shop.refund", scopes=["shop:admin"])
    async def refund(id: int) -> None:
        """Refund an order."""

    @registry.operation("shop.log", type="query")
    async def log() -> list[str]:
        """Return the log, which is long."""
        return [f"line {number}" for number in range(1000)]

    return registry


CALLS: dict[str, tuple[str, dict[str, Any], str]] = {
    "call": ("shop__item", {"id": 7}, '{"id":7,"name":"cup"}'),
    "lenient": ("shop__item", {"id": "7"}, '{"id":7,"name":"cup"}'),
    "nested": ("shop__total", {"ids": [1, 2]}, "6"),
    "error": ("shop__order", {"id": 7}, "SOLD_OUT"),
    "invalid": ("shop__item", {"id": "seven"}, "VALIDATION_ERROR"),
    "approval": ("shop__pay", {"amount": 3}, "A person has to approve"),
    "hidden": ("shop__refund", {"id": 7}, "There is no tool"),
    "unknown": ("shop__itme", {}, "Did you mean"),
    "large": ("shop__log", {}, '"cursor":'),
}
"""By kind of call: the tool, its arguments, and a part of the text that the model must read."""

FAILURES = {"error", "invalid", "approval", "hidden", "unknown"}

RAN = {
    "call": ("shop.item", "success", []),
    "lenient": ("shop.item", "success", []),
    "nested": ("shop.total", "success", ["shop.item", "shop.item"]),
    "error": ("shop.order", "SOLD_OUT", []),
    "invalid": ("shop.item", "VALIDATION_ERROR", []),
    "approval": ("shop.pay", "APPROVAL_REQUIRED", []),
    "hidden": ("shop__refund", "OPERATION_NOT_FOUND", []),
    "unknown": ("shop__itme", "OPERATION_NOT_FOUND", []),
    "large": ("shop.log", "success", []),
}
"""The expected transcript, by kind of call."""
