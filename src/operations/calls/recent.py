"""What a worker remembers of the requests it has seen, so that none of them runs twice.

Rule 1: an id is remembered at least until its call's time is over, unless there are too many of them.
Rule 2: the last word on a call is kept as long as there is room, to be said again when somebody asks.
"""

from collections import OrderedDict

MAX_IDS = 50_000
MAX_BYTES = 8 * 1024 * 1024


class Recent:
    """Request ids, and the last event of those that ended."""

    def __init__(self, max_ids: int = MAX_IDS, max_bytes: int = MAX_BYTES) -> None:
        self._ids: OrderedDict[str, bytes | None] = OrderedDict()
        self._words: OrderedDict[str, int] = OrderedDict()
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
            oldest, word = self._ids.popitem(last=False)
            if word is not None:
                self._bytes -= self._words.pop(oldest)

    def forget(self, request_id: str) -> None:
        """Let the request come again: it was refused, not run."""
        self._ids.pop(request_id, None)

    def finish(self, request_id: str, word: bytes) -> None:
        """Keep the last event of a call."""
        if request_id not in self._ids or len(word) > self._max_bytes // 8:
            return
        self._ids[request_id] = word
        self._words[request_id] = len(word)
        self._bytes += len(word)
        while self._bytes > self._max_bytes:
            oldest, size = self._words.popitem(last=False)
            self._bytes -= size
            self._ids[oldest] = None

    def last_word(self, request_id: str) -> bytes | None:
        """The last event of a call that ended and is still remembered."""
        return self._ids.get(request_id)
