"""The event-stream decoder of the WHATWG HTML standard, without I/O: bytes in, events out.

Rule 1: how the bytes were cut into chunks never changes the events.
Rule 2: memory is bounded by `max_event_bytes`, whatever the peer sends.
"""

import codecs
import re

import msgspec

from operations.errors import CallError, ErrorCode

_LINE_END = re.compile("\r\n|\n|\r")
_DIGITS = re.compile("[0-9]+")


class ServerSentEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One dispatched event."""

    event: str = "message"

    data: str = ""

    last_event_id: str = ""
    """The id a reconnecting client sends as `Last-Event-ID`; it outlives the event that set it."""


class EventStreamDecoder:
    """Turns the bytes of one `text/event-stream` response into events.

    An event that was not finished by a blank line when the stream ended is dropped, as the standard wants.

    Attributes:
        last_event_id: The id of the last finished block; what to send on reconnecting.
        retry: The reconnection time the server asked for, in milliseconds; None until it did.
    """

    def __init__(self, *, last_event_id: str = "", max_event_bytes: int = 1 << 20) -> None:
        self.last_event_id = last_event_id
        self.retry: int | None = None
        self._max = max_event_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = True
        self._after_cr = False
        self._partial: list[str] = []
        self._partial_size = 0
        self._data_size = 0
        self._event = ""
        self._data: list[str] = []
        self._id = last_event_id

    def feed(self, chunk: bytes) -> list[ServerSentEvent]:
        """Take the next bytes; give the events they complete.

        Raises:
            CallError: With code `RESOURCE_EXHAUSTED`, if one event is larger than allowed.
        """
        text = self._utf8.decode(chunk)
        if not text:
            return []
        if self._at_start:
            self._at_start = False
            text = text.removeprefix("\ufeff")
        # A line feed right after a carriage return that ended a chunk belongs to it.
        if self._after_cr and text:
            self._after_cr = False
            text = text.removeprefix("\n")
        if text.endswith("\r"):
            self._after_cr = True
        events: list[ServerSentEvent] = []
        start = 0
        for end in _LINE_END.finditer(text):
            line = text[start : end.start()]
            start = end.end()
            if self._partial:
                line = "".join((*self._partial, line))
                self._partial.clear()
                self._partial_size = 0
            self._take(line, events)
        if start < len(text):
            rest = text[start:]
            self._partial.append(rest)
            self._partial_size += len(rest)
            self._enforce_size()
        return events

    def _take(self, line: str, events: list[ServerSentEvent]) -> None:
        """Interpret one whole line."""
        if not line:
            self._dispatch(events)
            return
        name, _, value = line.partition(":")
        if not name:
            return
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
            self._data_size += len(value) + 1
            self._enforce_size()
        elif name == "event":
            self._event = value
        elif name == "id":
            if "\0" not in value:
                self._id = value
        elif name == "retry" and _DIGITS.fullmatch(value):
            # A number nobody could wait for is capped before it is converted.
            self.retry = int(value) if len(value) < 10 else 10**9

    def _dispatch(self, events: list[ServerSentEvent]) -> None:
        """A blank line: the block is over, and an event if it carried data."""
        self.last_event_id = self._id
        if self._data:
            events.append(
                ServerSentEvent(
                    event=self._event or "message",
                    data="\n".join(self._data),
                    last_event_id=self._id,
                )
            )
            self._data.clear()
        self._event = ""
        self._data_size = 0

    def _enforce_size(self) -> None:
        if self._partial_size + self._data_size > self._max:
            raise CallError(
                ErrorCode.RESOURCE_EXHAUSTED, f"One event is larger than {self._max} bytes."
            )


class JSONLinesDecoder:
    """Splits the bytes of a response into lines of JSON (JSON Lines, NDJSON, `json-seq`).

    Rules 1 and 2 hold here as well. The last line needs no line end.
    """

    def __init__(self, *, max_event_bytes: int = 1 << 20) -> None:
        self._max = max_event_bytes
        self._rest = bytearray()

    def feed(self, chunk: bytes) -> list[bytes]:
        """Take the next bytes; return the lines they complete.

        Raises:
            CallError: With code `RESOURCE_EXHAUSTED`, if one line is larger than allowed.
        """
        # A record of `json-seq` begins with a separator and ends with a line feed.
        self._rest += chunk.replace(b"\x1e", b"\n")
        *lines, rest = self._rest.split(b"\n")
        self._rest = bytearray(rest)
        if len(rest) > self._max or any(len(line) > self._max for line in lines):
            raise CallError(
                ErrorCode.RESOURCE_EXHAUSTED, f"One line is larger than {self._max} bytes."
            )
        return [bytes(line) for line in lines if line.strip()]

    def finish(self) -> list[bytes]:
        """Return the last line, if it has no line end."""
        return self.feed(b"\n")
