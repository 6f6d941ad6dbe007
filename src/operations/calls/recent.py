"""What a worker remembers of the requests it has seen, so that none of them runs twice.

Rule 1: an id is remembered until `MAX_IDS` others have come after it.
Rule 2: the last word on a call is kept as long as there is room, to be said again when somebody asks.
"""

from collections import deque

MAX_IDS = 50_000
MAX_BYTES = 8 * 1024 * 1024


class Recent:
    """Request ids, and the last event of those that ended."""

    def __init__(self, max_ids: int = MAX_IDS, max_bytes: int = MAX_BYTES) -> None:
        # A dict keeps the order in which ids came.
        self._ids: dict[str, bytes | None] = {}
        self._spoken: deque[str] = deque()
        self._bytes = 0
        self._max_ids = max_ids
        self._max_bytes = max_bytes

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._ids

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, request_id: str) -> None:
        """Remember that this request has come."""
        self._ids[request_id] = None
        if len(self._ids) > self._max_ids:
            word = self._ids.pop(next(iter(self._ids)))
            if word is not None:
                self._bytes -= len(word)

    def forget(self, request_id: str) -> None:
        """Let the request come again: it was refused, not run."""
        self._ids.pop(request_id, None)

    def finish(self, request_id: str, word: bytes) -> None:
        """Keep the last event of a call."""
        size = len(word)
        if request_id not in self._ids or size > self._max_bytes // 8:
            return
        self._ids[request_id] = word
        self._spoken.append(request_id)
        self._bytes += size
        while self._bytes > self._max_bytes or len(self._spoken) > self._max_ids:
            oldest = self._spoken.popleft()
            word_of_oldest = self._ids.get(oldest)
            if word_of_oldest is not None:
                self._bytes -= len(word_of_oldest)
                self._ids[oldest] = None

    def last_word(self, request_id: str) -> bytes | None:
        """The last event of a call that ended and is still remembered."""
        return self._ids.get(request_id)
