"""Decide which names of headers, query parameters and cookies an argument may set, and check header values."""

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from urllib.parse import unquote_plus

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


_MARK = re.compile(r"[^0-9a-z]")
_SEPARATOR = re.compile(r"[&;]")


@lru_cache(maxsize=1024)
def header_key(name: str) -> str:
    """Return a header's name as gateways compare it: many read `X_Api.Key` as `X-Api-Key`."""
    return _MARK.sub("-", name.lower())


def name_key(place: str, name: str) -> tuple[str, str]:
    """Return what two names of one place (`header`, `query`, `cookie`) share if a server may confuse them."""
    if place == "header":
        return place, header_key(name)
    # Some servers ignore case, read `key[a]` as a part of `key`, and `api.key` or `api[key` as `api_key`.
    plain, bracket, rest = name.strip().lower().partition("[")
    if bracket and "]" not in rest:
        plain = f"{plain}_{rest}"
    return place, plain.replace(".", "_").replace(" ", "_")


def is_owned(name: str) -> bool:
    """Return whether no argument may set the header `name`."""
    key = header_key(name)
    return key in _OWNED or key.startswith(_OWNED_PREFIXES) or _NAME.fullmatch(name) is None


def written_names(place: str, pieces: Iterable[str]) -> list[tuple[str, str]]:
    """Return the keys of all names in encoded `name=value` pieces of a query or a Cookie header."""
    # Some servers also separate the parameters of a query by `;`.
    pairs = (pair for piece in pieces for pair in _SEPARATOR.split(piece))
    return [name_key(place, unquote_plus(pair.partition("=")[0])) for pair in pairs]


def enforce_unowned(
    argument: str, place: str, pieces: Iterable[str], owned: frozenset[tuple[str, str]]
) -> None:
    """Raise an error if an argument writes a name that configuration sets.

    Args:
        argument: The argument's name.
        place: `query` or `cookie`.
        pieces: The encoded `name=value` pieces that it writes there.
        owned: The keys of all configured names; see `name_key`.

    Raises:
        CallError: With code `VALIDATION_ERROR`.
    """
    for key in written_names(place, pieces):
        if key in owned:
            message = (
                f"{argument!r} may not set the {place} parameter {key[1]!r}: configuration sets it."
            )
            raise CallError(
                ErrorCode.VALIDATION_ERROR,
                message,
                {"errors": [{"path": "/" + argument, "message": message, "keyword": place}]},
            )


def merged_headers(*groups: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of all groups, each once: names are the same in any case, and the last one wins."""
    merged: dict[str, tuple[str, str]] = {}
    for group in groups:
        for name, value in group.items():
            merged[name.lower()] = (name, value)
    return dict(merged.values())


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
