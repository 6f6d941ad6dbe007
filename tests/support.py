"""Helpers for many tests."""

import asyncio
import importlib.util
import time
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, requires
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.conftest import PROJECT
from tests.limits import time_limit

from operations import Operation, OperationContext, OperationRegistry, OperationSpec, OperationType
from operations.recorder.recorder import Recorder, Sink


def script(name: str) -> Any:
    """Return a module of scripts/."""
    spec = importlib.util.spec_from_file_location(name, PROJECT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def installed_by(*texts: str) -> set[str]:
    """Return the distributions that requirements install, with those that they require themselves."""
    seen: set[tuple[str, str]] = set()
    waiting = [Requirement(text) for text in texts]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        for extra in {"", *requirement.extras} - {extra for each, extra in seen if each == name}:
            seen.add((name, extra))
            try:
                below = [Requirement(text) for text in requires(name) or ()]
            except PackageNotFoundError:
                # For another platform or version of Python.
                continue
            waiting += [
                each
                for each in below
                if each.marker is None or each.marker.evaluate({"extra": extra})
            ]
    return {name for name, _ in seen}


def soon(milliseconds: float = 50) -> OperationContext:
    """Return a context whose deadline is `milliseconds` away."""
    return OperationContext(deadline=time.time() * 1000 + milliseconds)


async def first_done(
    tasks: Iterable[asyncio.Task[Any]], count: int
) -> tuple[set[asyncio.Task[Any]], set[asyncio.Task[Any]]]:
    """Wait until at least `count` tasks are done; return those that are done, and the others."""
    done, pending = set[asyncio.Task[Any]](), set(tasks)
    with time_limit(30):
        while len(done) < count:
            ended, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            done |= ended
    return done, pending


def begin(
    sink: Sink, operation_id: str, value: Any, context: OperationContext | None = None
) -> None:
    """Record in a sink that the handler of a call begins."""
    recorder = Recorder()
    recorder.add(sink)
    recorder.admitted(operation_id, value, context or OperationContext(), None)


def single(handler: Callable[..., Any], **fields: Any) -> OperationRegistry:
    """Return a registry with one operation, `test.run`, that runs `handler(input, context)`."""
    kind = fields.pop("type", OperationType.MUTATION)
    output = fields.pop("output", None)
    calls = fields.pop("calls", None)
    spec = OperationSpec(name="run", namespace="test", type=kind, **fields)
    return OperationRegistry([Operation(spec, handler, output, calls=calls)])
