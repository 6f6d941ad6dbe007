"""Addresses of resources, and templates of them.

Addresses of views (`ui://`) and skills (`skill://`) must keep their scheme, so the namespace of their server is their
first segment: `ui://clock/app.html` of the server `home` is `ui://home/clock/app.html`.
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


def scoped(namespace: str, uri: str) -> str | None:
    """Return the address that clients use for a view or skill of a server; None for other addresses."""
    for scheme in SCOPED:
        if uri[: len(scheme)].lower() == scheme:
            return f"{scheme}{namespace}/{uri[len(scheme) :]}"
    return None


def unscoped(uri: str) -> tuple[str, str] | None:
    """Return the namespace and the address at its server of a view or skill; None for other addresses."""
    for scheme in SCOPED:
        if uri.startswith(scheme):
            namespace, slash, rest = uri.removeprefix(scheme).partition("/")
            return (namespace, f"{scheme}{rest}") if slash and rest else None
    return None


def rescoped(value: Any, namespace: str) -> Any:
    """Return JSON in which the addresses of views and skills of a server are those that clients use."""
    if isinstance(value, str):
        return scoped(namespace, value) or value
    if is_object(value):
        return {key: rescoped(each, namespace) for key, each in value.items()}
    if is_list(value):
        return [rescoped(each, namespace) for each in value]
    return value
