"""The frame in which the console shows the view of an app: an empty page with the policy of the view.

    ~console/frame?connect=https://api.example.com&resource=https://cdn.example.com

Rule 1: the page has an opaque origin, also if it is opened in a window of its own: it reads neither the console nor
        cookies, and sends no credentials.
Rule 2: the policy allows only the addresses of the query, and nothing by default. The query has no other effect.
Rule 3: the page runs only what its parent sends, and only this server may be its parent.
"""

import re
from typing import Final
from urllib.parse import parse_qs

from starlette.responses import Response

from operations.front.request import RequestState

_SCRIPT: Final = """
addEventListener("message", function start({ source, data }) {
  if (source !== parent || parent === window || typeof data.html !== "string") return;
  removeEventListener("message", start);
  document.open();
  document.write(data.html);
  document.close();
});
if (parent !== window) parent.postMessage({ method: "alkdev.operations/frame-ready" }, "*");
"""
_PAGE: Final = f"<!doctype html><meta charset=utf-8><script>{_SCRIPT}</script>"

_ADDRESS: Final = re.compile(
    r"(?:https?|wss?)://(?:\*\.)?[A-Za-z0-9](?:[A-Za-z0-9.-]{0,252}[A-Za-z0-9])?(?::(?:\*|\d{1,5}))?/?"
)
_MAX_ADDRESSES: Final = 64
"""The largest number of addresses of one kind."""

_NOTHING: Final = "'none'"
_KINDS: Final = ("connect", "resource", "frame", "base")


def content_security_policy(query: str) -> str:
    """Return the policy for the addresses of a query; others than those of hosts are dropped."""
    try:
        given = parse_qs(query, max_num_fields=len(_KINDS) * _MAX_ADDRESSES)
    except ValueError:
        given = {}
    connect, resource, framed, base = (
        " ".join(each for each in given.get(kind, ()) if _ADDRESS.fullmatch(each))
        for kind in _KINDS
    )
    return "; ".join(
        (
            "sandbox allow-scripts",
            "default-src 'none'",
            f"script-src 'unsafe-inline' {resource}",
            f"style-src 'unsafe-inline' {resource}",
            f"img-src data: {resource}",
            f"font-src data: {resource}",
            f"media-src data: {resource}",
            f"connect-src {connect or _NOTHING}",
            f"frame-src {framed or _NOTHING}",
            f"base-uri {base or _NOTHING}",
            "form-action 'none'",
            "frame-ancestors 'self'",
        )
    )


async def frame(state: RequestState) -> None:
    """Send the page."""
    query = state.scope["query_string"].decode("ascii", "replace")
    headers = {
        "cache-control": "no-cache",
        "content-security-policy": content_security_policy(query),
        "cross-origin-resource-policy": "same-origin",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
    response = Response(_PAGE, headers=headers, media_type="text/html")
    await response(state.scope, state.receive, state.send)
