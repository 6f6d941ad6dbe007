"""What a worker remembers of the requests it has seen, so that none of them runs twice.

Rule 1: an id is remembered until `max_ids` others have come after it, and never longer than twice that.
Rule 2: the last word on a call is kept as long as there is room, to be said again to whoever asked for the call.
"""

from operations.pubsub.generations import Generations

MAX_IDS = 20_000
MAX_BYTES = 8 * 1024 * 1024

WEIGHT = 320
"""Bytes that a last word takes besides its own: its id, whom it is for, and their places."""


class Recent:
    """Request ids, and the last event of those that ended.

    Args:
        max_ids: How many ids are remembered at least.
        max_bytes: What the last events may take; the elder half of them goes when the younger is full.
    """

    def __init__(self, max_ids: int = MAX_IDS, max_bytes: int = MAX_BYTES) -> None:
        self._ids = Generations(max_ids)
        self._younger: dict[str, tuple[bytes, str]] = {}
        self._elder: dict[str, tuple[bytes, str]] = {}
        self._half = max_bytes // 2
        self._left = self._half
        self.add = self._ids.add
        """Remember that this request has come; False if it had."""
        self.forget = self._ids.discard
        """Let the request come again: it was refused, not run."""

    def __len__(self) -> int:
        return len(self._ids)

    def finish(self, request_id: str, body: bytes, reply_to: str) -> None:
        """Keep the last event of a call, unless it alone would take a quarter of the room."""
        weight = len(body) + len(reply_to) + WEIGHT
        if weight > self._half // 2:
            return
        if weight > self._left:
            self._elder, self._younger = self._younger, {}
            self._left = self._half
        self._left -= weight
        self._younger[request_id] = (body, reply_to)

    def last_word(self, request_id: str, reply_to: str) -> bytes | None:
        """The last event of a call that ended, for the one it was sent to, while it is remembered."""
        word = self._younger.get(request_id) or self._elder.get(request_id)
        return word[0] if word is not None and word[1] == reply_to else None
