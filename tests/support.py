"""Helpers for many tests."""

import importlib.util
import time
from collections.abc import Callable
from typing import Any

from tests.conftest import PROJECT

from operations import Operation, OperationContext, OperationRegistry, OperationSpec, OperationType


def script(name: str) -> Any:
    """Return a module of scripts/."""
    spec = importlib.util.spec_from_file_location(name, PROJECT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def soon(milliseconds: float = 50) -> OperationContext:
    """Return a context whose deadline is `milliseconds` away."""
    return OperationContext(deadline=time.time() * 1000 + milliseconds)


def single(handler: Callable[..., Any], **fields: Any) -> OperationRegistry:
    """Return a registry with one operation, `test.run`, that runs `handler(input, context)`."""
    kind = fields.pop("type", OperationType.MUTATION)
    output = fields.pop("output", None)
    calls = fields.pop("calls", None)
    spec = OperationSpec(name="run", namespace="test", type=kind, **fields)
    return OperationRegistry([Operation(spec, handler, output, calls=calls)])
