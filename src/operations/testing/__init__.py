"""Test operations: replace some of them during a test, and inspect their calls.

With pytest, the fixture `under_test` of `operations.testing.plugin` does the same. `operations.testing.upstream` has an
HTTP API that responds with the examples of its OpenAPI document.
"""

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self

from operations.access import Identity
from operations.context import OperationContext
from operations.errors import OperationsError
from operations.observe import CallEvent, CallStarted
from operations.registry import OperationRegistry
from operations.specs import Operation, OperationType

__all__ = ["Fake", "RegistryUnderTest"]


class Fake:
    """A replacement for an operation.

    Attributes:
        inputs: The inputs of its calls, in order.
    """

    def __init__(self, result: Any) -> None:
        self.inputs: list[Any] = []
        self._result = result

    async def __call__(self, input: Any, context: OperationContext) -> Any:
        """Record a call and return the result; raise it if it is an exception."""
        self.inputs.append(input)
        result = self._result(input) if callable(self._result) else self._result
        if isinstance(result, BaseException):
            raise result
        return result


class RegistryUnderTest:
    """A registry whose operations can be replaced for the length of a `with` block.

    Attributes:
        called: The ids of all operations that were called, nested calls included, in order.
    """

    def __init__(self, registry: OperationRegistry) -> None:
        self.registry = registry
        self.called: list[str] = []
        self._originals: dict[str, Operation] = {}
        self._stop: Callable[[], None] = lambda: None

    def __enter__(self) -> Self:
        self._stop = self.registry.observe(self._see)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop()
        for original in self._originals.values():
            self.registry.register(original, replace=True)
        self._originals.clear()

    def _see(self, event: CallEvent) -> None:
        if isinstance(event, CallStarted):
            self.called.append(event.operation_id)

    def fake(self, operation_id: str, result: Any = None) -> Fake:
        """Replace an operation until the block ends. Access, input and output are still checked.

        Args:
            operation_id: A query or mutation that is registered.
            result: What it returns, an exception that it raises, or a function of the input that returns either.

        Raises:
            OperationsError: If there is no such operation, or if it is a subscription.
        """
        original = self.registry.get(operation_id)
        if original is None or original.spec.type is OperationType.SUBSCRIPTION:
            raise OperationsError(f"{operation_id} is not a registered query or mutation")
        self._originals.setdefault(operation_id, original)
        fake = Fake(result)
        self.registry.register(Operation(original.spec, fake), replace=True)
        return fake

    async def call(
        self,
        operation_id: str,
        input: Any = None,
        *,
        caller: str | None = None,
        scopes: Iterable[str] = (),
    ) -> Any:
        """Call an operation and return its data.

        Args:
            operation_id: The operation.
            input: Its input.
            caller: Who calls; without one, and without scopes, the call has no identity.
            scopes: The scopes of the caller.

        Raises:
            CallError: As the call.
        """
        granted = list(scopes)
        is_known = caller is not None or bool(granted)
        identity = Identity(caller or "tester", granted) if is_known else None
        context = OperationContext(identity=identity)
        return (await self.registry.execute(operation_id, input, context)).raise_for_error().data
