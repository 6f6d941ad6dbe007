"""The reader of JSON lines."""

import codecs
import re

from operations.io.http.decoding import over_limit

_SEPARATOR = b"\x1e"

_QUOTED = re.compile(rb'"(?:[^"\\]|\\.)*+"?')
_OPENING = re.compile(rb"[{\[]")
_CLOSING = re.compile(rb"[}\]]")


class JSONLinesDecoder:
    """Splits the bytes of a response into lines of JSON (JSON Lines, NDJSON, `json-seq`).

    Rules 1 and 2 apply here as well. The last line needs no line end. A record of `json-seq`, which begins with a
    separator, may have several lines; it ends with the line that closes its last bracket, or before the next separator.
    """

    def __init__(self, *, max_event_bytes: int = 1 << 20) -> None:
        self._max = max_event_bytes
        self._at_start = True
        self._rest = bytearray()
        self._in_record = False
        self._line = self._depth = 0
        """Where the last line of a record begins, and the number of open brackets before it."""

    def feed(self, chunk: bytes) -> list[bytes]:
        """Process the next bytes; return the lines that they complete.

        Raises:
            CallError: With code `RESOURCE_EXHAUSTED`, if one line is larger than allowed.
        """
        lines: list[bytes] = []
        for index, part in enumerate(chunk.split(_SEPARATOR)):
            if index:
                self._end(lines)
                self._in_record = True
            for number, piece in enumerate(part.split(b"\n")):
                if number:
                    self._end_line(lines)
                self._rest += piece
                if len(self._rest) > self._max:
                    raise over_limit("One line", self._max)
        return [line for line in lines if line.strip()]

    def finish(self) -> list[bytes]:
        """Return the last line, if it has no line end."""
        return self.feed(_SEPARATOR)

    def _end_line(self, lines: list[bytes]) -> None:
        """Process a line feed: the end of a line, or white space within a record."""
        if self._in_record:
            # No text of JSON contains a line feed.
            line = _QUOTED.sub(b"", self._rest[self._line :])
            self._depth += len(_OPENING.findall(line)) - len(_CLOSING.findall(line))
            if self._depth > 0:
                self._rest += b"\n"
                self._line = len(self._rest)
                return
        self._end(lines)

    def _end(self, lines: list[bytes]) -> None:
        mark, self._at_start = codecs.BOM_UTF8 if self._at_start else b"", False
        lines.append(bytes(self._rest).removeprefix(mark))
        self._rest.clear()
        self._in_record, self._line, self._depth = False, 0, 0
