"""What people outside may see of an error.

Rule 1: an exception nobody declared leaves as its code, a neutral sentence and the request's id; its text and
        traceback go to our log, unless the operator chose to expose them.
Rule 2: what an upstream said passes, without the headers that hold credentials, and up to a length.
"""

import logging
from typing import Any, Final, cast

import msgspec

from operations._json import JSONValueError, to_json
from operations.errors import CallError
from operations.types import JSONObject

logger = logging.getLogger("operations")

MAX_DETAILS: Final = 64 * 1024
"""Bytes of JSON."""

_WITHHELD = frozenset({
    "authorization", "cookie", "proxy-authenticate", "proxy-authorization", "set-cookie", "www-authenticate",
})  # fmt: skip


def shown_error(error: CallError, request_id: str, *, expose: bool = False) -> CallError:
    """`error` as an outsider may see it; what was not meant for it is logged instead."""
    if error.unexpected:
        logger.error("request %s failed", request_id, exc_info=error.__cause__ or error)
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
        error.code, error.message, _shown_details(error.details), retryable=error.retryable
    )


def _shown_details(details: Any) -> Any:
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
