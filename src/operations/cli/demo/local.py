"""Python functions as operations, for the demo: a café that buys from a shop and calculates in any currency."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from operations.base.errors import CallError
from operations.contract.context import OperationContext
from operations.contract.functions import operation
from operations.contract.specs import ErrorDefinition

_NO_SUCH_ITEM = ErrorDefinition("NO_SUCH_ITEM", "It is not on the menu.", http_status=404)
_SOLD_OUT = ErrorDefinition("SOLD_OUT", "There is none left.", http_status=409)


@dataclass(frozen=True)
class Quote:
    """The price of an order."""

    item: str
    amount: float
    currency: str


@dataclass(frozen=True)
class Cup:
    """A cup of coffee."""

    number: int
    ready: bool


@operation("cafe.quote", type="query", tags=["order"], errors=[_NO_SUCH_ITEM])
async def quote(
    item: int,
    context: OperationContext,
    currency: Literal["EUR", "USD", "JPY"] = "EUR",
    cups: Annotated[int, msgspec.Meta(ge=1, le=100)] = 1,
) -> Quote:
    """Return the price of an order: the price of the shop's API, converted by a tool of the MCP server.

    Args:
        item: The number on the menu.
        context: Calls the shop and the MCP server.
        currency: The currency of the price.
        cups: The number of cups.
    """
    try:
        found = await context.env.shop.get_item({"id": item})
    except CallError as error:
        if error.message.startswith("HTTP 404"):
            raise CallError("NO_SUCH_ITEM", f"there is no item {item}", {"item": item}) from error
        raise
    total = found.data["price"] * cups
    money = (await context.env.money.convert({"amount": total, "to": currency})).raise_for_error()
    return Quote(found.data["name"], money.data["amount"], money.data["currency"])


@operation("cafe.brew", tags=["order"])
async def brew(context: OperationContext, cups: int = 3) -> AsyncIterator[Cup]:
    """Brew cup after cup.

    Args:
        context: Receives the progress.
        cups: The number of cups.
    """
    for number in range(1, cups + 1):
        await asyncio.sleep(0.05)
        await context.progress(number, cups, "brewing")
        yield Cup(number, ready=True)


@operation("cafe.order", tags=["order"], errors=[_SOLD_OUT])
async def order(item: int) -> Quote:
    """Order an item, as long as it is in stock.

    Args:
        item: The number on the menu.
    """
    raise CallError("SOLD_OUT", f"item {item} is sold out", {"item": item})


@operation("cafe.close", scopes=["cafe:manage"])
async def close(reason: str = "it is late") -> str:
    """Close for today. Needs the scope cafe:manage.

    Args:
        reason: Why it is closed, for visitors.
    """
    return f"closed: {reason}"
