"""One line of JSON per request, on the logger `operations.access`.

Rule 1: no query, no body, no header: what callers sent stays out of the log. A path is cut, and control
        characters are escaped.
"""

import logging
from collections.abc import Awaitable, Callable, MutableMapping
from time import perf_counter
from typing import Any, TypeAlias

import msgspec

logger = logging.getLogger("operations.access")

_Message: TypeAlias = MutableMapping[str, Any]
_Receive: TypeAlias = Callable[[], Awaitable[_Message]]
_Send: TypeAlias = Callable[[_Message], Awaitable[None]]
_App: TypeAlias = Callable[[_Message, _Receive, _Send], Awaitable[None]]

_MAX_PATH = 200


class AccessLog:
    """ASGI middleware that logs requests, where anybody listens to the logger."""

    def __init__(self, app: _App) -> None:
        self._app = app

    def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> Awaitable[None]:
        """Serve, and log how it went."""
        if scope["type"] == "http" and logger.isEnabledFor(logging.INFO):
            return self._logged(scope, receive, send)
        return self._app(scope, receive, send)

    async def _logged(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        began = perf_counter()
        status = size = 0

        async def counted(message: _Message) -> None:
            nonlocal status, size
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                size += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, counted)
        finally:
            identity = scope.get("operations.identity")
            client = scope.get("client")
            record = {
                "method": scope["method"],
                "path": scope["path"][:_MAX_PATH],
                # 499: the client left before there was anything to say.
                "status": status or 499,
                "bytes": size,
                "ms": round((perf_counter() - began) * 1000, 3),
                "caller": identity.id if identity is not None else None,
                "requestId": scope.get("operations.request_id"),
                "client": client[0] if client else None,
            }
            logger.info("%s", msgspec.json.encode(record).decode())
