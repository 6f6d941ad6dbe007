"""The codec of server-sent events: the decoder of a stream, and the text of an event."""

import codecs
import re
from typing import Final

import msgspec

from operations.io.http.decoding import over_limit

_LINE_END = re.compile(b"\r\n|\n|\r")
_DIGITS = re.compile(b"[0-9]+")

_META = b"operations-meta "


ALIVE: Final = b": alive\n\n"
"""A comment of a stream without events, because proxies close idle connections."""


def encoded_event(
    data: bytes, *, name: bytes = b"", event_id: bytes | None = None, retry: int | None = None
) -> bytes:
    """Return the text of an event.

    Args:
        data: Its data without line breaks, as encoded JSON has none.
        name: Its type; empty for `message`, which clients assume.
        event_id: The id from which a client that reconnects continues, without line breaks.
        retry: Milliseconds after which a client should reconnect.
    """
    text = b"data: %b\n\n" % data
    if name:
        text = b"event: %b\n%b" % (name, text)
    if retry is not None:
        text = b"retry: %d\n%b" % (retry, text)
    return b"id: %b\n%b" % (event_id, text) if event_id is not None else text


def comment(text: bytes) -> bytes:
    """Return a comment before an event, which clients ignore unless they know it."""
    return b": %b\n" % text


class ServerSentEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One dispatched event."""

    event: str = "message"

    data: str = ""

    last_event_id: str = ""
    """The id that a reconnecting client sends as `Last-Event-ID`; it stays valid until another event sets it."""

    meta: str = ""
    """The meta of an item as JSON, which an exported registry sends in a comment."""


class EventStreamDecoder:
    """Decodes the bytes of one `text/event-stream` response to events.

    An event without a final blank line at the end of the stream is dropped, as the standard requires.

    Attributes:
        last_event_id: The id of the last finished block, to send when reconnecting.
        retry: The reconnection time that the server requested, in milliseconds; None if it has not.
    """

    def __init__(self, *, last_event_id: str = "", max_event_bytes: int = 1 << 20) -> None:
        self.last_event_id = last_event_id
        self.retry: int | None = None
        self._max = max_event_bytes
        self._at_start = True
        self._after_cr = False
        self._partial = bytearray()
        self._data = bytearray()
        """The data of the current block; every line ends with a line feed."""
        self._event = ""
        self._meta = ""
        self._id = last_event_id

    def feed(self, chunk: bytes) -> list[ServerSentEvent]:
        """Process the next bytes; return the events that they complete.

        Raises:
            CallError: With code `RESOURCE_EXHAUSTED`, if one event is larger than allowed.
        """
        # A line feed at the start of a chunk belongs to the carriage return at the end of the previous chunk.
        if self._after_cr and chunk:
            self._after_cr = False
            chunk = chunk.removeprefix(b"\n")
        if chunk.endswith(b"\r"):
            self._after_cr = True
        events: list[ServerSentEvent] = []
        start = 0
        for end in _LINE_END.finditer(chunk):
            line = chunk[start : end.start()]
            start = end.end()
            if self._partial:
                line = bytes(self._partial + line)
                self._partial.clear()
            self._enforce_size(line)
            self._take(line, events)
        self._partial += chunk[start:]
        self._enforce_size(self._partial)
        return events

    def _enforce_size(self, line: bytes | bytearray) -> None:
        if len(line) + len(self._data) > self._max:
            raise over_limit("One event", self._max)

    def _take(self, line: bytes, events: list[ServerSentEvent]) -> None:
        """Process one complete line."""
        if self._at_start:
            self._at_start = False
            line = line.removeprefix(codecs.BOM_UTF8)
        if not line:
            self._dispatch(events)
            return
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data += value
            self._data += b"\n"
        elif not name:
            if value.startswith(_META):
                self._meta = _utf8(value.removeprefix(_META))
        elif name == b"event":
            self._event = _utf8(value)
        elif name == b"id":
            if b"\0" not in value:
                self._id = _utf8(value)
        elif name == b"retry" and _DIGITS.fullmatch(value):
            # Limit the digits before the conversion: such a number would be too long to wait for.
            self.retry = int(value) if len(value) < 10 else 10**9

    def _dispatch(self, events: list[ServerSentEvent]) -> None:
        """End a block at a blank line; it is an event if it has data."""
        self.last_event_id = self._id
        if self._data:
            events.append(
                ServerSentEvent(
                    event=self._event or "message",
                    data=_utf8(self._data[:-1]),
                    last_event_id=self._id,
                    meta=self._meta,
                )
            )
            self._data.clear()
        self._event = self._meta = ""


def _utf8(value: bytes | bytearray) -> str:
    return value.decode(errors="replace")
