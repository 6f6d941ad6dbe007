"""Read request bodies and decode JSON within limits on bytes, values, depth and time.

Rule 1: a limit is checked before the work it protects: bytes while they arrive, values before they are decoded.
"""

import asyncio
import gc
from collections.abc import Mapping
from typing import Any

from operations import _json
from operations._json import WRAPPING_DEPTH, JSONLimitError, JSONValueError, enforce_bounds
from operations.front.http_errors import (
    CLOSE,
    ClientDisconnectedError,
    RequestError,
    malformed,
    too_large,
    unsupported,
)
from operations.front.limits import Limits
from operations.front.timing import Receive


async def read_body(receive: Receive, headers: Mapping[bytes, bytes], limits: Limits) -> bytes:
    """Return the body of a request. The caller sets a timeout.

    Raises:
        RequestError: 413 as soon as it is known to be too large, 400 for a malformed length.
        ClientDisconnectedError: If the client did not finish it.
    """
    length = headers.get(b"content-length")
    if length is not None:
        if not length.isdigit():
            raise malformed("Content-Length is not a number")
        if len(length) > 18 or int(length) > limits.body_bytes:
            raise too_large(f"The body is larger than {limits.body_bytes} bytes", headers=[CLOSE])
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnectedError
        chunk: bytes = message.get("body", b"")
        size += len(chunk)
        if size > limits.body_bytes:
            raise too_large(f"The body is larger than {limits.body_bytes} bytes", headers=[CLOSE])
        if not message.get("more_body", False):
            return b"".join((*chunks, chunk)) if chunks else chunk
        chunks.append(chunk)


def check_json_body(headers: Mapping[bytes, bytes]) -> None:
    """Reject a body that is not declared as plain JSON.

    Raises:
        RequestError: 415.
    """
    if headers.get(b"content-encoding", b"identity") != b"identity":
        raise unsupported("Send the body without Content-Encoding")
    kind = headers.get(b"content-type", b"")
    if kind != b"application/json" and not _is_json(kind):
        # A page of another site can send what a form can send, but not this type without asking.
        raise unsupported("Send the body as application/json")


def enforce_size(body: bytes, limits: Limits) -> None:
    """Reject JSON with too many values or too deep nesting, without decoding it.

    Raises:
        RequestError: 413 for too many values, 400 for too deep nesting.
    """
    try:
        enforce_bounds(body, max_values=limits.values, max_depth=limits.depth + WRAPPING_DEPTH)
    except JSONLimitError as error:
        raise _request_error(error) from None


def decode_json(body: bytes | str, limits: Limits) -> Any:
    """Return the value of a JSON text.

    Raises:
        RequestError: 400 if it is not JSON or nested too deeply, 413 if it has too many values.
    """
    try:
        return _json.decode_json(
            body, max_values=limits.values, max_depth=limits.depth + WRAPPING_DEPTH
        )
    except JSONValueError as error:
        raise _request_error(error) from None


def pause_collector() -> None:
    """Let the garbage collector wait until the next turn of the event loop, while another library decodes a large body.

    As `build_from` does for our own decoders.
    """
    if gc.isenabled():
        gc.disable()
        asyncio.get_running_loop().call_soon(gc.enable)


def _request_error(error: JSONValueError) -> RequestError:
    if isinstance(error, JSONLimitError) and error.limit == "values":
        return too_large(f"The body {error.reason}")
    return malformed(f"The body {error.reason}")


def _is_json(content_type: bytes) -> bool:
    essence = content_type.partition(b";")[0].strip().lower()
    return essence == b"application/json" or (
        essence.startswith(b"application/") and essence.endswith(b"+json")
    )
