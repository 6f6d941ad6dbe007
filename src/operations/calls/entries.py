"""One call on the waiting side."""

import asyncio
from typing import Any

from operations.calls.events import RequestPayload
from operations.calls.states import Expects
from operations.calls.streams import StreamEntry
from operations.envelopes import ResponseEnvelope
from operations.errors import CallError


class PendingCall:
    """One call that waits for its end."""

    __slots__ = (
        "attempt",
        "expects",
        "future",
        "misses",
        "payload",
        "replayable",
        "seen_at",
        "sent_at",
        "stream",
        "worker",
    )

    def __init__(self, payload: RequestPayload, replayable: bool | None) -> None:
        self.payload = payload
        self.replayable = replayable
        self.expects = Expects.ONE
        self.future: asyncio.Future[ResponseEnvelope[Any]] | None = None
        self.stream: StreamEntry | None = None
        self.attempt = 1
        self.misses = 0
        self.worker: str | None = None
        self.sent_at = 0.0
        self.seen_at = 0.0

    def fail(self, error: CallError) -> None:
        """End the call with an error, unless it has ended."""
        if self.stream is not None:
            self.stream.end(error)
        elif self.future is not None and not self.future.done():
            self.future.set_exception(error)
