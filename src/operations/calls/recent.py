"""What a worker remembers of the requests it has seen, so that none of them runs twice.

Rule 1: an id is remembered until `max_ids` others have come after it, and never longer than twice that.
Rule 2: the last word on a call is kept as long as there is room, to be said again to whoever asked for the call.
"""

from collections import deque

import msgspec

from operations.pubsub.generations import Generations

MAX_IDS = 40_000
MAX_BYTES = 8 * 1024 * 1024


class _Word(msgspec.Struct, frozen=True):
    """The event that ended a call, and the mailbox it was sent to."""

    body: bytes
    reply_to: str


class Recent:
    """Request ids, and the last event of those that ended."""

    def __init__(self, max_ids: int = MAX_IDS, max_bytes: int = MAX_BYTES) -> None:
        self._ids = Generations(max_ids)
        self._words: dict[str, _Word] = {}
        self._order: deque[str] = deque()
        self._bytes = 0
        self._max_ids = max_ids
        self._max_bytes = max_bytes
        self.add = self._ids.add
        """Remember that this request has come."""
        self.forget = self._ids.discard
        """Let the request come again: it was refused, not run."""

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._ids

    def __len__(self) -> int:
        return len(self._ids)

    def finish(self, request_id: str, body: bytes, reply_to: str) -> None:
        """Keep the last event of a call."""
        if len(body) > self._max_bytes // 8 or request_id in self._words:
            return
        self._words[request_id] = _Word(body, reply_to)
        self._order.append(request_id)
        self._bytes += len(body)
        while self._bytes > self._max_bytes or len(self._order) > self._max_ids:
            self._bytes -= len(self._words.pop(self._order.popleft()).body)

    def last_word(self, request_id: str, reply_to: str) -> bytes | None:
        """The last event of a call that ended, for the one it was sent to, while it is remembered."""
        word = self._words.get(request_id)
        return word.body if word is not None and word.reply_to == reply_to else None
