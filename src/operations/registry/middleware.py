"""What a middleware receives and calls."""

from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
)
from dataclasses import dataclass
from typing import Any, TypeAlias

from operations.contract.context import OperationContext
from operations.contract.envelopes import ResponseEnvelope
from operations.contract.specs import OperationSpec

Envelope: TypeAlias = ResponseEnvelope[Any]


@dataclass(frozen=True, slots=True)
class Call:
    """A call as middleware sees it. To change it, use `dataclasses.replace(call, input=...)`."""

    spec: OperationSpec
    input: Any
    context: OperationContext


Next: TypeAlias = Callable[[Call], Awaitable[Envelope]]
"""Runs the rest of a query or mutation."""

NextStream: TypeAlias = Callable[[Call], AsyncIterator[Envelope]]
"""Runs the rest of a subscription."""

Middleware: TypeAlias = Callable[[Call, Next], Awaitable[Envelope]]
"""Wraps a query or mutation: `async def m(call, next): return await next(call)`."""

StreamMiddleware: TypeAlias = Callable[[Call, NextStream], AsyncIterator[Envelope]]
"""Wraps a subscription: an async generator over `next(call)`."""
