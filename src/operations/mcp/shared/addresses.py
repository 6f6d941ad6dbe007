"""Addresses of resources, and templates of them."""

import re
from typing import Final

from mcp.shared.uri_template import UriTemplate
from pydantic import AnyUrl, TypeAdapter, ValidationError

LISTED: Final = (
    "annotations", "arguments", "description", "icons", "mimeType", "name", "size", "title", "uri", "uriTemplate",
    "_meta",
)  # fmt: skip

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
