"""Failures of requests to a server, and the errors that callers get.

Rule 1: a failure knows whether the request may have been carried out. Only what surely was not, or may be repeated,
        is sent again.
Rule 2: errors that our own transports detect pass through the SDK as JSON-RPC errors, sealed with a number no server
        knows: a server cannot make us believe that a request never reached it.
"""

import re
from contextlib import suppress
from secrets import token_hex
from typing import Any, Literal, TypeAlias, cast

import httpx2
import msgspec
from mcp import MCPError
from mcp_types import CONNECTION_CLOSED, REQUEST_TIMEOUT, JSONRPCError
from pydantic import ValidationError

from operations._decoding import decode_json
from operations._json import MAX_REQUEST_VALUES, JSONValueError, object_of
from operations.errors import CallError, ErrorCode, timeout_error
from operations.front.public_errors import Redactor
from operations.types import JSONObject

Kind: TypeAlias = Literal[
    "unreachable", "closed", "session", "lost", "too_large", "status", "malformed", "credential"
]

_SEAL = token_hex(16)

_BODY_BYTES = 4096
"""How much of an error's body is kept for the caller."""

_WHO_ASKS = frozenset({401, 403})

_TOO_LONG = re.compile(r"event exceeded the \d+ byte limit")
"""The SDK's message for an event that its own reader rejected."""


class ServerError(Exception):
    """A request that brought no result.

    Attributes:
        error: The error for the caller.
        unsent: The request was surely not carried out.
        broken: Whether the connection cannot be used any more.
    """

    def __init__(self, error: CallError, *, unsent: bool = False, broken: bool = False) -> None:
        super().__init__(error.message)
        self.error = error
        self.unsent = unsent
        self.broken = broken


def seal(kind: Kind, message: str, **details: Any) -> JSONObject:
    """Return a JSON-RPC error object for a failure that our transport found."""
    data = {"seal": _SEAL, "kind": kind, "details": details}
    return {"code": CONNECTION_CLOSED, "message": message, "data": data}


def sealed(kind: Kind, message: str, **details: Any) -> MCPError:
    """Return the same as an exception."""
    return MCPError(**seal(kind, message, **details))


def read_failure(error: Exception, server: str, redactor: Redactor) -> ServerError:
    """Return the failure behind an error of the SDK during a request to `server`, without the secrets of `redactor`."""
    failure = _read(error, server)
    found = failure.error
    failure.error = CallError(
        found.code,
        redactor.redact(found.message),
        redactor.redact_all(found.details),
        retryable=found.retryable,
    )
    return failure


def _read(error: Exception, server: str) -> ServerError:
    if isinstance(error, MCPError):
        return _of_protocol(error, server)
    if isinstance(error, ValidationError):
        message = f"{server} sent a response that the protocol does not allow"
        return ServerError(CallError(ErrorCode.EXECUTION_ERROR, message))
    if isinstance(error, httpx2.HTTPStatusError):
        status = error.response.status_code
        message = f"{server} answered with HTTP status {status}"
        found = CallError(ErrorCode.UNAVAILABLE, message, {"statusCode": status})
    else:
        message = f"{server} cannot be reached: {type(error).__name__}"
        found = CallError(ErrorCode.UNAVAILABLE, message)
    return ServerError(found, broken=True)


def _of_protocol(error: MCPError, server: str) -> ServerError:
    data: Any = error.data
    if object_of(data).get("seal") == _SEAL:
        return _of_transport(error.message, data, server)
    if error.code == CONNECTION_CLOSED and _TOO_LONG.search(error.message):
        message = f"{server} answered with too large an event"
        return ServerError(CallError(ErrorCode.RESOURCE_EXHAUSTED, message))
    if error.code == CONNECTION_CLOSED:
        message = f"the connection to {server} was lost during the call"
        return ServerError(CallError(ErrorCode.UNAVAILABLE, message))
    details: JSONObject = {"code": error.code, "message": error.message}
    if data is not None:
        details["data"] = data
    if error.code == REQUEST_TIMEOUT:
        late = timeout_error(f"{server} did not answer in time")
        late.details.update(details)
        return ServerError(late)
    return ServerError(CallError(ErrorCode.EXECUTION_ERROR, f"{server}: {error.message}", details))


def _of_transport(message: str, data: JSONObject, server: str) -> ServerError:
    kind: Kind = data["kind"]
    details: JSONObject | None = data["details"] or None
    if kind == "credential":
        found: Any = data["details"]
        return ServerError(CallError(found["code"], message, retryable=found["retryable"]))
    text = f"{server} {message}"
    if kind == "too_large":
        return ServerError(CallError(ErrorCode.RESOURCE_EXHAUSTED, text, details))
    if kind in ("status", "malformed"):
        return ServerError(CallError(ErrorCode.EXECUTION_ERROR, text, details))
    return ServerError(
        CallError(ErrorCode.UNAVAILABLE, text, details),
        unsent=kind in ("unreachable", "closed", "session"),
        # The next HTTP exchange may succeed after a failed one, but not after the session was lost.
        broken=kind in ("closed", "session"),
    )


def refusal(
    status: int, content_type: str, body: bytes, redactor: Redactor, *, had_session: bool
) -> JSONObject:
    """Return the JSON-RPC error that an HTTP error status means.

    A JSON-RPC error in the body is passed on, unless the status rejects the caller: then the status decides the advice
    alone. Otherwise the error has the status and the beginning of the body.
    """
    if had_session and (status == 404 or (status == 400 and b"session" in body.lower())):
        return seal("session", "has forgotten this session")
    if content_type.startswith("application/json") and status not in _WHO_ASKS:
        error = _rpc_error(body)
        if error is not None:
            return error
    # Redacted before it is cut: half a secret would not be found.
    text = redactor.redact(body.decode("utf-8", "replace"))[:_BODY_BYTES]
    message = f"answered with HTTP status {status}"
    if status in (502, 503, 504):
        return seal("lost", message, statusCode=status)
    return seal("status", message, statusCode=status, body=text)


def _rpc_error(body: bytes) -> JSONObject | None:
    """Return the error in a body that is a JSON-RPC error."""
    with suppress(JSONValueError, ValidationError):
        value: Any = decode_json(body, max_values=MAX_REQUEST_VALUES)
        error = JSONRPCError.model_validate(value).error
        return {"code": error.code, "message": error.message, "data": error.data}
    return None


class _Answer(msgspec.Struct):
    """The parts of a message that identify its request; the rest is not decoded."""

    id: msgspec.Raw = msgspec.Raw()
    method: msgspec.Raw | None = None


def answered_id(message: bytes) -> int | None:
    """Return the id of the request that a message answers, if that much of it can be read."""
    with suppress(msgspec.DecodeError, RecursionError):
        answer = msgspec.json.decode(message, type=_Answer)
        if answer.method is None:
            return msgspec.json.decode(answer.id, type=int)
    return None


def root_cause(error: BaseException) -> BaseException:
    """The first real exception inside groups of groups: users never see a group."""
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    return error
