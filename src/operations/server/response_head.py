"""Write the head of an HTTP/1.1 response.

Rule 1: control characters in headers are rejected, so that a value cannot inject another header.
"""

from http import HTTPStatus
from typing import Final, NamedTuple

from operations.front.limits import Message, Scope

STATUS_LINES: Final = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}

NO_BODY: Final = b"connection: close\r\ncontent-length: 0\r\n\r\n"
"""The headers of an empty response that closes the connection."""

_CONTROLS: Final = bytes({*range(32), 127} - {9})
"""Characters that must not be in a header: a line break would start another header."""

_NAME_CHARACTERS: Final = (
    b"!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
)
_MAX_NAMES: Final = 500
_field_starts: dict[bytes, bytes] = {}
"""The encoded beginning of a header line, by header name."""


class Head(NamedTuple):
    """The encoded head of a response, and its properties."""

    data: bytes

    length: int | None
    """Bytes of the body; None if the length is not known."""

    keep_alive: bool
    """Whether the connection may stay open."""

    is_chunked: bool

    has_body: bool
    """Whether the response may have a body."""


def render_head(
    message: Message, scope: Scope, default_headers: bytes, *, keep_alive: bool
) -> Head:
    """Return the head of a response as bytes.

    Args:
        message: The ASGI message that starts the response.
        scope: The ASGI scope of the request.
        default_headers: The headers of every response, such as its date.
        keep_alive: Whether the connection may stay open, unless the response closes it.

    Raises:
        RuntimeError: If a header contains a control character, or the content length is not one number.
    """
    status: int = message["status"]
    length: int | None = None
    count = 0
    fields: list[bytes] = []
    for name, value in message.get("headers", ()):
        start = _field_starts.get(name) or _field_start(name)
        if start == b"content-length: ":
            if length is not None or not value.isdigit():
                raise RuntimeError("the content-length of the response is not one number")
            length = int(value)
        elif start == b"transfer-encoding: ":
            # Chosen below.
            continue
        elif start == b"connection: ":
            keep_alive = keep_alive and b"close" not in value.lower()
            continue
        fields += (start, value, b"\r\n")
        count += 1
    rendered = b"".join(fields)
    if len(rendered) - len(rendered.translate(None, _CONTROLS)) != 2 * count:
        raise RuntimeError("a header of the response contains a control character")
    end = b"\r\n" if keep_alive else b"connection: close\r\n\r\n"
    has_body = scope["method"] != "HEAD" and status not in (204, 304)
    is_chunked = length is None and has_body and scope["http_version"] != "1.0"
    if is_chunked:
        end = b"transfer-encoding: chunked\r\n" + end
    line = STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status
    data = b"".join((line, default_headers, rendered, end))
    return Head(data, length, keep_alive, is_chunked, has_body)


def _field_start(name: bytes) -> bytes:
    """Return the encoded beginning of a header line.

    Raises:
        RuntimeError: If the name is not valid.
    """
    if not name or name.translate(None, _NAME_CHARACTERS):
        raise RuntimeError("the response has a header with an invalid name")
    start = name.lower() + b": "
    if len(_field_starts) < _MAX_NAMES:
        _field_starts[name] = start
    return start
