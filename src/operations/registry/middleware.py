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

NextStream: TypeAlias = Callable[[Call], AsyncIterator[Envelope]]

Middleware: TypeAlias = Callable[[Call, Next], Awaitable[Envelope]]

StreamMiddleware: TypeAlias = Callable[[Call, NextStream], AsyncIterator[Envelope]]
