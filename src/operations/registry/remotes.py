"""Operations that another process runs: how a registry calls them, and reads the checked form of their input.

A rule of this process that reads the input must see what the handler receives, which only the other process can build.
It returns the checked form (`services.check`) before the call. The call then carries the digest of that form, and the
other process rejects the call if its handler would receive something else.

Rule 1: the other process is asked only if a rule of this process reads the input, and the operation converts its input.
Rule 2: fail closed: without a form, grants and resource rules reject the call, and approval rules require approval.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, Protocol, TypeAlias, cast

import msgspec

from operations.base.errors import CallError, ErrorCode, operation_not_found
from operations.base.json.values import object_of
from operations.contract.context import OperationContext
from operations.contract.envelopes import ResponseEnvelope
from operations.contract.specs import (
    Operation,
    OperationHandler,
    OperationSpec,
    OperationType,
    SubscriptionHandler,
)
from operations.schema import CheckedForm, CheckedInput

CHECK: Final = "services.check"
"""The operation of a worker that returns the checked form of an input. A credential for it names the operation whose
input is checked."""

RemoteCall: TypeAlias = Callable[[str, Any, OperationContext], Awaitable[ResponseEnvelope[Any]]]
"""Runs a query or mutation in another process."""


class Remote(Protocol):
    """Runs operations that have no local handler."""

    async def call(
        self, operation_id: str, input: Any, context: OperationContext
    ) -> ResponseEnvelope[Any]:
        """Run a query or mutation at the remote.

        Raises:
            CallError: The operation's error, or `UNAVAILABLE`.
        """
        ...

    def subscribe(
        self, operation_id: str, input: Any, context: OperationContext
    ) -> AsyncIterator[ResponseEnvelope[Any]]:
        """Open a subscription at the remote."""
        ...


class FormAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of `services.check`."""

    form: CheckedForm | None = None

    problem: str = ""
    """The reason why there is no form."""


class RemoteReader:
    """Reads the checked form of inputs in the process that runs an operation.

    Attributes:
        operation_id: The id of the operation in that process.
    """

    def __init__(self, operation_id: str, call: RemoteCall) -> None:
        self.operation_id = operation_id
        self._call = call

    @property
    def problems(self) -> list[str]:
        """None: the other process logs its own."""
        return []

    async def read(self, input: Any, context: OperationContext) -> CheckedInput:
        """Return an input with its checked form, or without one if the other process cannot return it.

        Raises:
            CallError: As a call of the operation.
        """
        question = {"operationId": self.operation_id, "input": input}
        is_foreign, answer = False, FormAnswer(problem="the other process does not return it")
        try:
            envelope = await self._call(CHECK, question, context)
            answer = msgspec.convert(envelope.data, FormAnswer)
        except msgspec.ValidationError:
            is_foreign = True
        except CallError as error:
            if error.code != ErrorCode.OPERATION_NOT_FOUND:
                raise
            is_foreign = True
        return CheckedInput(
            reader=self,
            input=input,
            form=answer.form,
            problem=answer.problem,
            is_foreign=is_foreign,
        )


def checked_operation(operation_id: str, input: Any) -> str:
    """Return the operation that a call is about: for `services.check`, the one whose input is checked."""
    named = object_of(input).get("operationId") if operation_id == CHECK else None
    return named if isinstance(named, str) else operation_id


def checked_digest(operation_id: str, input: Any, context: OperationContext) -> str | None:
    """Return the digest that a forwarded call carries: of the form that rules of this process have checked."""
    checked = context.checked
    if not isinstance(checked, CheckedInput) or checked.form is None:
        return None
    reader = checked.reader
    is_same = isinstance(reader, RemoteReader) and reader.operation_id == operation_id
    return checked.form.digest if is_same and checked.is_of(reader, input) else None


def forward(
    spec: OperationSpec, remote: Remote | None, *, converts_input: bool | None = None
) -> Operation:
    """Return an operation without a local handler, which calls the remote if there is one.

    Args:
        spec: Its spec.
        remote: Runs it.
        converts_input: Whether the remote may convert its input; None for what the spec says.
    """
    operation_id = spec.id

    async def nowhere(input: Any, context: OperationContext) -> Any:
        reason = f"{operation_id} has no handler here, and no remote"
        raise operation_not_found(operation_id, reason)

    async def call(input: Any, context: OperationContext) -> ResponseEnvelope[Any]:
        return await cast("Remote", remote).call(operation_id, input, context)

    def subscribe(input: Any, context: OperationContext) -> AsyncIterator[ResponseEnvelope[Any]]:
        return cast("Remote", remote).subscribe(operation_id, input, context)

    handler: OperationHandler | SubscriptionHandler = nowhere
    reader = None
    if remote is not None:
        handler = subscribe if spec.type is OperationType.SUBSCRIPTION else call
        if spec.converts_input if converts_input is None else converts_input:
            reader = RemoteReader(operation_id, remote.call)
    return Operation(spec, handler, reader=reader, forwards=True)
