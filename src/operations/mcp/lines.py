"""A stream of bytes as lines of bounded length. Does no I/O.

Rule: memory held is at most one line. A longer one is passed over as it arrives; what is kept is its beginning and
its end, where the id of the request it answers may stand.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

_ID_FIRST = re.compile(rb'^\{\s*"jsonrpc"\s*:\s*"2\.0"\s*,\s*"id"\s*:\s*(\d+)\s*,')
_ID_LAST = re.compile(rb'"id"\s*:\s*(\d+)\s*(?:,\s*"jsonrpc"\s*:\s*"2\.0"\s*)?\}\s*$')
_EDGE = 256


@dataclass(frozen=True, slots=True)
class Oversized:
    """A line that was too long to keep."""

    size: int
    head: bytes
    tail: bytes

    @property
    def request_id(self) -> int | None:
        """The request this answers, where servers usually write it: first thing or last thing."""
        match = _ID_FIRST.search(self.head) or _ID_LAST.search(self.tail)
        return int(match[1]) if match and len(match[1]) < 16 else None


class LineBuffer:
    """Takes chunks, gives lines without their ends."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._parts: list[bytes] = []
        self._size = 0
        self._head: bytes | None = None
        self._tail = b""

    def feed(self, chunk: bytes) -> Iterator[bytes | Oversized]:
        """The lines that `chunk` completes."""
        *ends, rest = chunk.split(b"\n")
        for part in ends:
            self._add(part)
            yield self._take()
        if rest:
            self._add(rest)

    def rest(self) -> Iterator[bytes | Oversized]:
        """The line that was begun and has no end, where there is one."""
        if self._size:
            yield self._take()

    def _add(self, part: bytes) -> None:
        self._size += len(part)
        if self._head is None:
            self._parts.append(part)
            if self._size <= self._limit:
                return
            whole = b"".join(self._parts)
            self._parts.clear()
            self._head, self._tail = whole[:_EDGE], whole[-_EDGE:]
        else:
            self._tail = (self._tail + part[-_EDGE:])[-_EDGE:]

    def _take(self) -> bytes | Oversized:
        if self._head is None:
            line: bytes | Oversized = b"".join(self._parts).rstrip(b"\r")
        else:
            line = Oversized(self._size, self._head, self._tail)
        self._parts.clear()
        self._size, self._head, self._tail = 0, None, b""
        return line
