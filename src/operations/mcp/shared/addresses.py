"""Addresses of resources, and templates of them.

Addresses of views (`ui://`) and skills (`skill://`) must keep their scheme, so the namespace of their server is their
first segment: `ui://clock/app.html` of the server `home` is `ui://home/clock/app.html`.

Rule 1: a server is asked with exactly its own spelling. Clients require the scheme in small letters, so an address with
        another spelling of it is the rest of the address as a whole: `UI://clock/App` is `ui://home/UI://clock/App`.
Rule 2: only a text that is an address as a whole is one.
"""

import re
from typing import Any, Final

from mcp.shared.uri_template import UriTemplate
from pydantic import AnyUrl, TypeAdapter, ValidationError

from operations.base.json.values import is_list, is_object

LISTED: Final = (
    "annotations", "arguments", "description", "icons", "mimeType", "name", "size", "title", "uri", "uriTemplate",
    "_meta",
)  # fmt: skip

SCOPED: Final = ("ui://", "skill://")
"""Schemes whose addresses keep their scheme."""

_WHOLE: Final = re.compile(r"""(?:ui|skill)://[^\s\x00-\x1f\x7f<>"\\^`|]+""", re.IGNORECASE)
_WILDCARD: Final = re.compile(r"\{(\w+)\*\}")
_ADDRESS: Final[TypeAdapter[AnyUrl]] = TypeAdapter(AnyUrl)


def is_url(uri: str) -> bool:
    """Return whether clients accept a URL in a listing; some reject the whole list because of an invalid one."""
    try:
        _ADDRESS.validate_python(uri)
    except ValidationError:
        return False
    return True


def parse_template(text: str) -> UriTemplate:
    """Return a URI template. `{path*}` stands for several segments of a path (`{+path}`), as in FastMCP.

    Raises:
        ValueError: If it is not a valid template.
    """
    try:
        return UriTemplate.parse(text)
    except ValueError:
        # RFC 6570 would join a list with commas, which the SDK cannot match.
        return UriTemplate.parse(_WILDCARD.sub(r"{+\1}", text))


def is_scoped(text: str) -> bool:
    """Return whether a text as a whole is the address of a view or skill."""
    return _WHOLE.fullmatch(text) is not None


def scoped(namespace: str, uri: str) -> str | None:
    """Return the address that clients use for a view or skill of a server; None for other addresses."""
    for scheme in SCOPED:
        if _begins_with(uri, scheme):
            rest = uri.removeprefix(scheme)
            is_usual = rest != uri and not _begins_with(rest, scheme)
            return f"{scheme}{namespace}/{rest if is_usual else uri}"
    return None


def unscoped(uri: str) -> tuple[str, str] | None:
    """Return the namespace and the address at its server of a view or skill; None for other addresses."""
    for scheme in SCOPED:
        if uri.startswith(scheme):
            namespace, slash, rest = uri.removeprefix(scheme).partition("/")
            at_server = rest if _begins_with(rest, scheme) else f"{scheme}{rest}"
            return (namespace, at_server) if slash and rest else None
    return None


def _begins_with(text: str, scheme: str) -> bool:
    return text[: len(scheme)].lower() == scheme


def rescoped(value: Any, namespace: str) -> Any:
    """Return JSON in which the addresses of views and skills of a server are those that clients use."""
    if isinstance(value, str):
        return (is_scoped(value) and scoped(namespace, value)) or value
    if is_object(value):
        return {key: rescoped(each, namespace) for key, each in value.items()}
    if is_list(value):
        return [rescoped(each, namespace) for each in value]
    return value
