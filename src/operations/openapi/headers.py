"""Which headers an argument may set, and what may stand in one."""

import re

from operations.errors import CallError, ErrorCode

_OWNED = frozenset(
    {
        "accept", "accept-encoding", "authorization", "connection", "content-encoding", "content-length",
        "content-type", "cookie", "cookie2", "expect", "forwarded", "host", "http2-settings", "keep-alive",
        "origin", "proxy-authenticate", "proxy-authorization", "proxy-connection", "referer", "set-cookie",
        "te", "trailer", "transfer-encoding", "upgrade", "via", "x-http-method", "x-http-method-override",
        "x-method-override", "x-original-url", "x-real-ip", "x-rewrite-url",
    }
)  # fmt: skip
"""Headers that belong to the client or to configuration, whatever a document declares."""

_OWNED_PREFIXES = ("mcp-", "x-forwarded-", "proxy-", "sec-")
_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_FORBIDDEN = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")


def is_owned(name: str) -> bool:
    """Whether no argument may set the header `name`."""
    lower = name.lower()
    return lower in _OWNED or lower.startswith(_OWNED_PREFIXES) or _NAME.fullmatch(name) is None


def is_header_value(text: str) -> bool:
    """Whether `text` can stand in a header."""
    return _FORBIDDEN.search(text) is None


def is_header(name: str, value: str) -> bool:
    """Whether name and value make one header."""
    return _NAME.fullmatch(name) is not None and is_header_value(value)


def enforce_header(name: str, value: str) -> None:
    """Let a header through that is one header.

    Raises:
        CallError: With code `VALIDATION_ERROR`, for a name or a value that could end it and start another.
    """
    if not is_header(name, value):
        raise CallError(
            ErrorCode.VALIDATION_ERROR,
            f"The header {name!r} may not contain control characters.",
        )
