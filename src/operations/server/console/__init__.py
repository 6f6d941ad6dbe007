"""The web console: a page that shows and calls the operations of a registry.

    app = create_app(registry, console=True)

The page consists of plain files without a build step, and uses the same HTTP paths as other clients.

Rule 1: the Content-Security-Policy lets the page run only these files, connect only to this server, and not convert
        text to markup (Trusted Types without a policy).
Rule 2: the console's paths cannot collide with operations, because a namespace contains no `~`.
"""

from hashlib import sha256
from importlib.resources import files
from typing import Final

from starlette.responses import Response

from operations.front.messages import matches_tag
from operations.front.request import RequestState
from operations.server.console.frame import frame
from operations.server.entries import FixedPath, Page

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
        # The views of apps, which cannot leave this server either.
        "frame-src 'self'",
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
_SCRIPT: Final = "theme.js"
"""The only file of JavaScript that is not a module."""


def console_paths() -> dict[str, FixedPath]:
    """Return the page at `/` and its files, which every client may read."""
    found = {file.name: file.read_bytes() for file in files(__name__).joinpath("static").iterdir()}
    modules = sorted(name for name in found if name.endswith(".js") and name != _SCRIPT)
    found[_PAGE] = _preloading(found[_PAGE], modules)
    paths: dict[str, FixedPath] = {
        "/" if name == _PAGE else f"{ASSETS}/{name}": Page(_Asset(name, content), is_probe=True)
        for name, content in found.items()
    }
    return {**paths, f"{ASSETS}/frame": Page(frame, is_probe=True)}


def _preloading(page: bytes, modules: list[str]) -> bytes:
    """Return the page with links to all modules: a browser would find the imports of each only when it has read it."""
    links = "".join(
        f'    <link rel="modulepreload" href="{ASSETS[1:]}/{name}">\n' for name in modules
    )
    return page.replace(b"  </head>", links.encode() + b"  </head>")


class _Asset:
    """Serves one file from memory, with an ETag."""

    def __init__(self, name: str, content: bytes) -> None:
        self._content = content
        self._tag = f'"{sha256(content).hexdigest()[:32]}"'
        self._type = _TYPES[name[name.rindex(".") :]]

    async def __call__(self, state: RequestState) -> None:
        """Send the file, or 304 if it has not changed."""
        headers = {**_HEADERS, "etag": self._tag}
        if matches_tag(state.headers.get(b"if-none-match", b""), self._tag.encode()):
            response = Response(status_code=304, headers=headers)
        else:
            response = Response(self._content, headers=headers, media_type=self._type)
        await response(state.scope, state.receive, state.send)
