"""What callers outside this process see of an error, and its HTTP status.

Rule 1: an unexpected exception becomes its code, a neutral message and the request id; its text and traceback go to
        the log, unless the operator exposes them.
Rule 2: an upstream's error passes, without headers that contain credentials and up to a size.
Rule 3: the status comes from one table (`HTTP_STATUS`), from a declared error, or from the request error itself.
"""

import logging
from typing import Any, Final, cast

import msgspec

from operations._json import JSONValueError, to_json
from operations._text import printable
from operations.access import Identity
from operations.errors import HTTP_STATUS, CallError, ErrorCode
from operations.front.http_errors import RequestError
from operations.specs import OperationSpec
from operations.types import JSONObject

logger = logging.getLogger("operations")

MAX_DETAILS: Final = 64 * 1024
"""Bytes of JSON."""

_WITHHELD = frozenset({
    "authorization", "cookie", "proxy-authenticate", "proxy-authorization", "set-cookie", "www-authenticate",
})  # fmt: skip

_OUR_FAULT = frozenset({401, 407, 421})
"""Statuses by which an API rejects us, not our caller."""


def public_error(
    error: CallError, request_id: str, *, expose: bool = False, log: bool = True
) -> CallError:
    """Return `error` as an external caller may see it; the rest is logged."""
    if error.unexpected:
        if log:
            logger.error(
                "request %s failed", printable(request_id), exc_info=error.__cause__ or error
            )
        if not expose:
            return CallError(
                error.code,
                f"The operation failed (request {request_id})",
                {"requestId": request_id},
                retryable=error.retryable,
            )
    if error.details is None:
        return error
    return CallError(
        error.code, error.message, _public_details(error.details), retryable=error.retryable
    )


def public_wire(error: CallError, request_id: str, *, expose: bool = False) -> JSONObject:
    """Return the wire form of a public error: `{code, message, details?, retryable?, requestId}`."""
    wire = public_error(error, request_id, expose=expose).to_wire()
    wire["requestId"] = request_id
    return wire


def _public_details(details: Any) -> Any:
    try:
        shown = to_json(details)
    except JSONValueError as fault:
        return {"omitted": f"details were not JSON: {fault}"}
    if isinstance(shown, dict):
        fields = cast("JSONObject", shown)
        headers = fields.get("headers")
        if isinstance(headers, dict):
            fields["headers"] = {
                name: value
                for name, value in cast("JSONObject", headers).items()
                if name.lower() not in _WITHHELD
            }
    if len(msgspec.json.encode(shown)) > MAX_DETAILS:
        return {"omitted": f"details were larger than {MAX_DETAILS} bytes"}
    return cast("Any", shown)


def status_of(error: CallError, identity: Identity | None, spec: OperationSpec | None) -> int:
    """Return the HTTP status of an error."""
    if isinstance(error, RequestError):
        return error.status
    if error.code == ErrorCode.ACCESS_DENIED and identity is None:
        return 401
    relayed = _relayed_status(error)
    for declared in spec.error_schemas if spec is not None else ():
        if declared.code == error.code or (
            relayed is not None and declared.code == f"HTTP_{relayed}"
        ):
            return declared_status(declared.http_status)
    return HTTP_STATUS.get(error.code, 500)


def declared_status(status: int | None) -> int:
    """Return the status of a declared error: its own if it is an error status, otherwise 500."""
    return status if status is not None and 400 <= status <= 599 else 500


def _relayed_status(error: CallError) -> int | None:
    """Return the status of an imported HTTP API if it concerns our caller."""
    details: Any = error.details
    if error.code != ErrorCode.EXECUTION_ERROR or not isinstance(details, dict):
        return None
    status: Any = cast("JSONObject", details).get("statusCode")
    return status if type(status) is int and status not in _OUR_FAULT else None
