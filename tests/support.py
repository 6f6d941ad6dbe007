"""Small things many tests need."""

import time
from collections.abc import Callable
from typing import Any

from operations import Operation, OperationContext, OperationRegistry, OperationSpec, OperationType


def soon(milliseconds: float = 50) -> OperationContext:
    """A context whose deadline is `milliseconds` away."""
    return OperationContext(deadline=time.time() * 1000 + milliseconds)


def single(handler: Callable[..., Any], **fields: Any) -> OperationRegistry:
    """A registry with one operation, `test.run`, that runs `handler(input, context)`."""
    kind = fields.pop("type", OperationType.MUTATION)
    output = fields.pop("output", None)
    calls = fields.pop("calls", None)
    spec = OperationSpec(name="run", namespace="test", type=kind, **fields)
    return OperationRegistry([Operation(spec, handler, output, calls=calls)])
