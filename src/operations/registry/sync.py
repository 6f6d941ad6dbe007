"""The calls of a registry without `await`: in scripts, notebooks, threads, Django and other WSGI applications.

Rule 1: there is no second path. A call runs on an event loop in another thread, and this thread waits for it.
Rule 2: a registry that was opened on a running event loop (`async with registry`) is called there, because its
        connections belong to that loop. All others are called on one loop of the process.
"""

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, Self, TypeVar, cast

from operations.base.loops import (
    BlockingIterator,
    Held,
    run_on,
    running_loop,
    shared_loop,
    waits_for,
)
from operations.contract.context import OperationContext
from operations.contract.envelopes import ResponseEnvelope
from operations.contract.specs import OperationSpec
from operations.registry.remotes import Remote
from operations.registry.streams import Subscription

T = TypeVar("T")


class Opened(Protocol):
    """The parts of a registry that calls without `await` need."""

    loop: asyncio.AbstractEventLoop | None
    held: list[Held[Any]]

    @property
    def remote(self) -> Remote | None:
        """Runs operations without a local handler."""
        ...

    def execute(
        self,
        operation_id: str,
        input: Any = None,
        context: OperationContext | None = None,
        *,
        timeout: float | None = None,
    ) -> Coroutine[Any, Any, ResponseEnvelope[Any]]:
        """Run a query or mutation."""
        ...

    def subscribe(
        self, operation_id: str, input: Any = None, context: OperationContext | None = None
    ) -> Subscription:
        """Open a subscription."""
        ...

    def specs(self) -> list[OperationSpec]:
        """Return all specs."""
        ...

    async def aclose(self) -> None:
        """Close the registry."""
        ...


class SyncRegistry:
    """The calls of a registry, each of which blocks until its result is there.

        registry.sync.execute("task.create", {"title": "Ship it"}).data
        registry.sync.task.create(title="Ship it")

    A namespace is an attribute, or an item (`registry.sync["execute"]`) if the name is taken. Calling its operations
    returns the data. `with registry.sync:` closes the registry at its end.
    """

    def __init__(self, registry: Opened) -> None:
        self._registry = registry

    def execute(
        self,
        operation_id: str,
        input: Any = None,
        context: OperationContext | None = None,
        *,
        timeout: float | None = None,
    ) -> ResponseEnvelope[Any]:
        """Run a query or mutation, and return its envelope; see `OperationRegistry.execute`.

        Raises:
            CallError: As `OperationRegistry.execute`.
            RuntimeError: On the event loop that the call would need: use `await registry.execute(...)`.
        """
        return self.run(self._registry.execute(operation_id, input, context, timeout=timeout))

    def subscribe(
        self, operation_id: str, input: Any = None, context: OperationContext | None = None
    ) -> BlockingIterator[ResponseEnvelope[Any]]:
        """Open a subscription: an iterator of envelopes. Close it, or use it in a `with` block, to end it early.

        Raises:
            CallError: When iterated, as `OperationRegistry.subscribe`.
        """
        registry = self._registry
        return BlockingIterator(self.run, lambda: registry.subscribe(operation_id, input, context))

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run any coroutine where this registry is called, such as `from_openapi_url(...)`; return its result.

        Raises:
            RuntimeError: On the event loop that would have to run it: use `await`.
        """
        wait = waits_for()
        if wait is not None:
            # In a `def` handler, on the loop that runs the handler.
            found: T = wait(coroutine)
            return found
        home = self._registry.loop
        if home is None or home.is_closed() or not home.is_running():
            shared_loop.guests.add(self._registry)
            return shared_loop.run(coroutine)
        if running_loop() is home:
            coroutine.close()
            raise RuntimeError("this registry is open on this event loop: use await")
        return run_on(home, coroutine)

    def enter(self, opened: AbstractAsyncContextManager[T]) -> T:
        """Open an asynchronous context manager, such as `connect_mcp(...)` or `open_hub(...)`, until `close`."""
        held = Held(shared_loop, opened)
        self._registry.held.append(held)
        return held.value

    def close(self) -> None:
        """Close what `enter` has opened, and the registry with its services."""
        held = self._registry.held
        while held:
            held.pop().close()
        self.run(self._registry.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __getattr__(self, namespace: str) -> "SyncPath":
        if namespace.startswith("_"):
            raise AttributeError(namespace)
        return SyncPath(self, namespace)

    def __getitem__(self, namespace: str) -> "SyncPath":
        return SyncPath(self, namespace)

    def __dir__(self) -> list[str]:
        return [
            *object.__dir__(self),
            *dict.fromkeys(each.split(".")[0] for each in self.operation_ids()),
        ]

    def operation_ids(self) -> Iterator[str]:
        """Yield the ids of the registry, and those that a remote shows to this caller."""
        yield from (spec.id for spec in self._registry.specs())
        listing = getattr(self._registry.remote, "ids", None)
        if listing is not None:
            yield from cast("list[str]", self.run(listing()))


class SyncPath:
    """A namespace, or an operation in it."""

    def __init__(self, calls: SyncRegistry, path: str) -> None:
        self._calls = calls
        self._path = path

    def __getattr__(self, name: str) -> "SyncPath":
        if name.startswith("_"):
            raise AttributeError(name)
        return self[name]

    def __getitem__(self, name: str) -> "SyncPath":
        return SyncPath(self._calls, f"{self._path}.{name}")

    def __call__(self, input: Any = None, /, **properties: Any) -> Any:
        """Run the operation, and return its data.

        Args:
            input: The whole input.
            properties: The properties of the input, instead of `input`.
        """
        if input is not None and properties:
            raise TypeError(f"{self._path}: give either one input, or its properties by name")
        return self._calls.execute(self._path, properties or input).data

    def __dir__(self) -> list[str]:
        start = self._path + "."
        ids = self._calls.operation_ids()
        below = (each.removeprefix(start) for each in ids if each.startswith(start))
        return [*object.__dir__(self), *dict.fromkeys(each.split(".")[0] for each in below)]

    def __repr__(self) -> str:
        return f"<operation {self._path}>"
