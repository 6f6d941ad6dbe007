"""All exceptions of this package, the error codes, and the table from code to HTTP status.

    OperationsError
    ├── CallError             an operation failed with an error that its caller may see
    ├── RegistrationError     an operation cannot be registered (also a ValueError)
    ├── SchemaError           a JSON Schema cannot be used (also a ValueError)
    ├── DocumentError         an API description cannot be read (also a ValueError)
    ├── TransportError        a broker or a socket cannot be reached
    │   └── NotSentError          ... and the message certainly was not delivered
    │       ├── NoReceiverError       because no worker or subscriber receives it
    │       ├── NotPermittedError     because the permissions of the broker do not allow it
    │       ├── QueueFullError        because its queue is full
    │       └── TooLargeError         because it exceeds a size limit
    └── MissingExtraError     a feature needs an extra that is not installed (also an ImportError)

Rule 1: callers see every exception of a handler as a `CallError` (`map_error`).
Rule 2: other processes get `CallError.to_wire()`: a code, a safe message and JSON details, never a traceback.
"""

import asyncio
from collections.abc import Iterable
from enum import StrEnum
from time import time
from typing import Any, Literal, Protocol, Self

from operations.base.json.values import JSONValueError, to_json
from operations.base.text import in_seconds
from operations.base.types import JSONObject


class ErrorCode(StrEnum):
    """The codes of this package. Any other string is a domain code, declared by an operation."""

    OPERATION_NOT_FOUND = "OPERATION_NOT_FOUND"
    ACCESS_DENIED = "ACCESS_DENIED"
    VALIDATION_ERROR = "VALIDATION_ERROR"
    TIMEOUT = "TIMEOUT"
    ABORTED = "ABORTED"
    EXECUTION_ERROR = "EXECUTION_ERROR"
    UNKNOWN_ERROR = "UNKNOWN_ERROR"
    UNAVAILABLE = "UNAVAILABLE"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    APPROVAL_REQUIRED = "APPROVAL_REQUIRED"
    RUN_NOT_FOUND = "RUN_NOT_FOUND"
    RUN_ENDED = "RUN_ENDED"
    OPERATION_CHANGED = "OPERATION_CHANGED"
    OUTCOME_UNKNOWN = "OUTCOME_UNKNOWN"
    RUN_DIVERGED = "RUN_DIVERGED"


HTTP_STATUS: dict[str, int] = {
    ErrorCode.OPERATION_NOT_FOUND: 404,
    ErrorCode.ACCESS_DENIED: 403,
    ErrorCode.VALIDATION_ERROR: 422,
    ErrorCode.TIMEOUT: 504,
    ErrorCode.UNAVAILABLE: 503,
    ErrorCode.RESOURCE_EXHAUSTED: 429,
    ErrorCode.APPROVAL_REQUIRED: 428,
    ErrorCode.RUN_NOT_FOUND: 404,
    ErrorCode.RUN_ENDED: 409,
    ErrorCode.OPERATION_CHANGED: 409,
}
"""The HTTP status of each code. `ACCESS_DENIED` is 401 without an identity; codes that are not listed are 500."""

_RETRYABLE = (ErrorCode.UNAVAILABLE, ErrorCode.APPROVAL_REQUIRED)


class OperationsError(Exception):
    """The base class of all exceptions of this package."""


class ExpiredError(OperationsError):
    """A credential has expired by the clock of this process."""


class CallError(OperationsError):
    """An operation failed with an error that its caller may see.

    Attributes:
        code: An `ErrorCode`, or a code that the operation declares.
        message: One sentence for people.
        details: JSON-compatible detail for the caller; never an exception object.
        retryable: Whether the same call may succeed later. True for `UNAVAILABLE` and `APPROVAL_REQUIRED` by default.
        begun: False if the operation was certainly not started, so that repeating the call is safe; else None.
        unexpected: Whether this error represents an undeclared exception, whose message entry points hide.
        operation_id: The operation whose call was rejected before its handler ran, ran out of time or raised an
            unexpected exception; else None.
        parent_request_id: The call whose nested call raised this error; else None.
    """

    operation_id: str | None = None
    parent_request_id: str | None = None

    def __init__(
        self,
        code: str,
        message: str,
        details: Any = None,
        *,
        retryable: bool | None = None,
        begun: Literal[False] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = str(code)
        self.message = message
        self.details = details
        self.retryable = code in _RETRYABLE if retryable is None else retryable
        self.begun = begun
        self.unexpected = False

    def __str__(self) -> str:
        # `str()` includes the code, for tracebacks and logs.
        return with_code(self.code, self.message)

    def __repr__(self) -> str:
        return f"CallError({self.code!r}, {self.message!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return CallError, (self.code, self.message), vars(self)

    def to_wire(self) -> JSONObject:
        """Return the form for other processes: `code`, `message` and, if there are any, JSON `details`."""
        wire: JSONObject = {"code": _readable(self.code), "message": _readable(self.message)}
        if self.details is not None:
            wire["details"] = json_details(self.details)
        if self.retryable:
            wire["retryable"] = True
        return wire

    @classmethod
    def from_wire(cls, wire: JSONObject) -> Self:
        """Return the error that `to_wire` wrote; a missing or invalid code becomes `UNKNOWN_ERROR`."""
        code, message = wire.get("code"), wire.get("message")
        return cls(
            code if isinstance(code, str) and code else ErrorCode.UNKNOWN_ERROR,
            message if isinstance(message, str) else "",
            wire.get("details"),
            retryable=wire.get("retryable") is True,
        )


def json_details(details: Any) -> Any:
    """Return the details of an error as JSON; if they are not JSON, the reason."""
    if details is None:
        return None
    try:
        return to_json(details)
    except JSONValueError as error:
        return {"omitted": f"details were not JSON: {error}"}


def with_code(code: str, message: str) -> str:
    """Return an error as one line of text; a message that is only the code is not repeated."""
    return f"{code}: {message}" if message != code else code


def _readable(text: object) -> str:
    """Return text that can be encoded: a message may quote invalid Unicode, such as the name of a file."""
    return str(text).encode("utf-8", "backslashreplace").decode()


class RegistrationError(OperationsError, ValueError):
    """An operation cannot be registered. The registry is unchanged."""


class SchemaError(OperationsError, ValueError):
    """A JSON Schema is invalid, exceeds a limit, or has a reference to another document."""


class DocumentError(OperationsError, ValueError):
    """An API description is not JSON or YAML, exceeds a limit, or refers to a file that may not be read."""


class TransportError(OperationsError):
    """A broker or a socket cannot be reached, or rejected a message."""


class NotSentError(TransportError):
    """A message was certainly not delivered: sending it again cannot make it arrive twice."""


class NoReceiverError(NotSentError):
    """A message was not delivered because no worker or subscriber receives it."""


class NotPermittedError(NotSentError):
    """A message was not delivered because the permissions of the broker do not allow it."""


class QueueFullError(NotSentError):
    """A message was not delivered because its queue is full. Sending it later may succeed."""


class TooLargeError(NotSentError):
    """A message was not sent because it is larger than the transport or its limits allow."""


class MissingExtraError(OperationsError, ImportError):
    """The third-party packages that a feature needs are not installed."""

    def __init__(self, feature: str, *, extra: str) -> None:
        super().__init__(
            f"{feature} needs the '{extra}' extra: pip install 'alkdev-operations[{extra}]'"
        )


class DeclaredError(Protocol):
    """A declared error, as `map_error` needs it."""

    @property
    def code(self) -> str:
        """The domain code."""
        ...


def map_error(exception: BaseException, error_schemas: Iterable[DeclaredError] = ()) -> CallError:
    """Return the `CallError` for `exception`.

    A `CallError` is returned unchanged. An exception whose message is a declared code, or starts with
    one and a colon, gets that code, and the rest of the text as its message. Every other exception becomes
    `EXECUTION_ERROR`, marked `unexpected`, with its type and text as the message.
    """
    if isinstance(exception, CallError):
        return exception
    try:
        text = str(exception)
    except Exception:  # noqa: BLE001 - a broken __str__ must not hide the failure itself
        text = ""
    for declared in error_schemas:
        if text == declared.code or text.startswith(declared.code + ":"):
            rest = text.removeprefix(declared.code + ":")
            is_message = rest == "" or rest.startswith(" ")
            return CallError(declared.code, (rest.strip() or declared.code) if is_message else text)
    kind = type(exception).__name__
    error = CallError(ErrorCode.EXECUTION_ERROR, f"{kind}: {text}" if text else kind)
    error.unexpected = True
    return error


def nested_error(operation_id: str, error: CallError) -> CallError | None:
    """Return the error for the caller of an operation whose nested call failed; None if `error` itself is right.

    The caller neither chose the nested operation nor sent its input, so a nested `VALIDATION_ERROR` or
    `OPERATION_NOT_FOUND` is an unexpected failure of the operation.
    """
    if error.code in (ErrorCode.VALIDATION_ERROR, ErrorCode.OPERATION_NOT_FOUND):
        outer = CallError(
            ErrorCode.EXECUTION_ERROR, f"{operation_id} made an invalid call: {error.message}"
        )
        outer.unexpected = True
    elif error.code == ErrorCode.ACCESS_DENIED:
        message = f"Access denied: {operation_id} calls an operation that its caller may not call"
        outer = CallError(error.code, message)
    elif error.code == ErrorCode.TIMEOUT:
        message = f"{operation_id} calls an operation that did not finish in time"
        outer = CallError(error.code, message, error.details)
    else:
        return None
    outer.operation_id = operation_id
    return outer


def forward_error(error: CallError) -> None:
    """Let the error of a nested call reach the caller unchanged, because the caller chose its operation and input."""
    error.parent_request_id = None
    if not error.unexpected:  # otherwise the log names the operation
        error.operation_id = None


def invalid_argument(path: str, message: str, keyword: str, *, subject: str = "") -> CallError:
    """Return the `VALIDATION_ERROR` for one place of an input, with the place in its details.

    Args:
        path: A JSON pointer to the place.
        message: A sentence that names the argument, or the rest of a sentence about `subject`.
        keyword: The rule that the value breaks.
        subject: The beginning of the error's message.
    """
    issue = {"path": path, "message": message, "keyword": keyword}
    text = f"{subject} {message}" if subject else message
    return CallError(ErrorCode.VALIDATION_ERROR, text, {"errors": [issue]})


def operation_not_found(operation_id: str, message: str | None = None) -> CallError:
    """Return an `OPERATION_NOT_FOUND` error for an id, with the id in its details."""
    message = message or f"There is no operation {operation_id!r}"
    return CallError(ErrorCode.OPERATION_NOT_FOUND, message, {"operationId": operation_id})


def timeout_error(
    message: str, deadline: float | None = None, *, operation_id: str | None = None
) -> CallError:
    """Return a `TIMEOUT` error with the deadline (by default now) in its details, in milliseconds since the epoch."""
    details = {"deadline": int(time() * 1000) if deadline is None else deadline}
    error = CallError(ErrorCode.TIMEOUT, message, details)
    error.operation_id = operation_id
    return error


def unusable_schema(operation_id: str, error: SchemaError, which: str = "a schema") -> CallError:
    """Return the error of a call whose operation has a schema that cannot be used."""
    message = f"{which} of {operation_id} cannot be used: {error}"
    return CallError(ErrorCode.EXECUTION_ERROR, message)


def timed_out(
    what: str,
    seconds: float | None,
    did_not: str = "finish",
    *,
    deadline: float | None = None,
    operation_id: str | None = None,
) -> CallError:
    """Return a `TIMEOUT` error for `what`, which had this many seconds; None if unknown."""
    limit = "in time" if seconds is None else f"within {in_seconds(max(0, seconds))}"
    message = f"{what} did not {did_not} {limit}"
    return timeout_error(message, deadline, operation_id=operation_id)


def retrieve_exception(task: asyncio.Future[Any]) -> None:
    """Retrieve the exception of a task that no caller awaits any more, or asyncio logs it."""
    if not task.cancelled():
        task.exception()


def cancelled_elsewhere(operation_id: str) -> CallError:
    """Return the error of a call that was cancelled, but not by its caller."""
    return CallError(ErrorCode.ABORTED, f"{operation_id} was cancelled, but not by its caller")
