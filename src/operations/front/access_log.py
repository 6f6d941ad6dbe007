"""One line for each request."""

import logging
from time import perf_counter
from typing import Final

import msgspec

from operations.front.messages import REQUEST_ID
from operations.front.timing import App, Message, Receive, Scope, Send

_access_logger = logging.getLogger("operations.access")

_MAX_PATH: Final = 200


class AccessLog:
    """ASGI middleware that logs requests if the logger is enabled."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request and log the outcome."""
        # Middleware such as OpenTelemetry's recognizes an application by its coroutine function.
        if scope["type"] == "http" and _access_logger.isEnabledFor(logging.INFO):
            await self._logged(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _logged(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = perf_counter()
        status = size = 0

        async def counted(message: Message) -> None:
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
                # 499: the client disconnected before the response.
                "status": status or 499,
                "bytes": size,
                "ms": round((perf_counter() - began) * 1000, 3),
                "caller": identity.id if identity is not None else None,
                "requestId": scope.get(REQUEST_ID),
                "client": client[0] if client else None,
            }
            _access_logger.info("%s", msgspec.json.encode(record).decode())
