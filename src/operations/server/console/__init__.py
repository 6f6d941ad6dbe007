"""The web console: a page that shows and calls the operations of a registry.

    app = create_app(registry, console=True)

The page consists of plain files without a build step, and uses the same HTTP paths as other clients.

Rule 1: the Content-Security-Policy lets the page run only these files, connect only to this server, and not convert
        text to markup (Trusted Types without a policy).
Rule 2: the console's paths cannot collide with operations, because a namespace contains no `~`.
"""

from collections.abc import Iterator
from hashlib import sha256
from importlib.resources import files
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from operations.front.messages import matches_tag, rejection
from operations.front.public_errors import not_found

ASSETS: Final = "/~console"
"""The path of the files, below the root path of the app."""

CONTENT_SECURITY_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        # Images in results are shown from their own bytes.
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)

_HEADERS: Final = {
    "cache-control": "no-cache",
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_PAGE: Final = "index.html"


def is_page(path: str) -> bool:
    """Return whether a path is that of the page or of its files."""
    return path == "/" or path.startswith(ASSETS)


def console_app() -> ASGIApp:
    """Return the console as an ASGI application."""
    return Router(routes=console_routes(), redirect_slashes=False, default=_nothing)


def console_routes() -> list[BaseRoute]:
    """Return the routes of the page at `/` and of its files."""
    return [
        Route("/" if name == _PAGE else f"{ASSETS}/{name}", _Asset(name, content), methods=["GET"])
        for name, content in _read()
    ]


def _read() -> Iterator[tuple[str, bytes]]:
    for file in files(__name__).joinpath("static").iterdir():
        yield file.name, file.read_bytes()


class _Asset:
    """Serves one file from memory, with an ETag."""

    def __init__(self, name: str, content: bytes) -> None:
        self._content = content
        self._tag = f'"{sha256(content).hexdigest()[:32]}"'
        self._type = _TYPES[name[name.rindex(".") :]]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the file, or 304 if it has not changed."""
        headers = {**_HEADERS, "etag": self._tag}
        condition = Request(scope).headers.get("if-none-match", "")
        if matches_tag(condition.encode("latin-1"), self._tag.encode()):
            response = Response(status_code=304, headers=headers)
        else:
            response = Response(self._content, headers=headers, media_type=self._type)
        await response(scope, receive, send)


async def _nothing(scope: Scope, receive: Receive, send: Send) -> None:
    """Respond with 404 at all other paths, as the rest of the server does."""
    if scope["type"] == "http":
        await rejection(not_found(), scope).send(send)
