"""uvicorn's HTTP protocol with bounds on a request's head, which uvicorn takes at any speed and of any size.

Rule 1: a connection that does not bring the whole head of a request in time is closed: at its beginning, and again
        whenever another request begins on it.
Rule 2: a head beyond a size is refused (431) while it arrives.
"""

import asyncio
from typing import Any, Final, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_SECONDS: Final = 15.0
HEAD_BYTES: Final = 64 * 1024

_TOO_LARGE: Final = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class BoundedProtocol(HttpToolsProtocol):
    """One connection."""

    _alarm: asyncio.TimerHandle | None = None
    _in_head = True
    _received = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Expect a request."""
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Expect nothing more."""
        self._unwatch()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """A request begins: its head is to follow."""
        self._in_head = True
        self._received = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The head is there."""
        self._in_head = False
        self._unwatch()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        """Take bytes; count those of an unfinished head, and watch it."""
        super().data_received(data)
        # Most heads come in one piece, and need no watching.
        if self._in_head and not self.transport.is_closing():
            self._watch()
            self._received += len(data)
            if self._received > HEAD_BYTES:
                self.transport.write(_TOO_LARGE)
                self.transport.close()

    def _watch(self) -> None:
        if self._alarm is None:
            loop = cast("asyncio.AbstractEventLoop", cast("Any", self).loop)
            self._alarm = loop.call_later(HEAD_SECONDS, self._give_up)

    def _unwatch(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _give_up(self) -> None:
        self._alarm = None
        if not self.transport.is_closing():
            self.transport.close()
