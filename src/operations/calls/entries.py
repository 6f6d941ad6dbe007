"""One call on the waiting side."""

import asyncio
from typing import Any

import msgspec

from operations.calls.events import RequestPayload
from operations.calls.states import Expects
from operations.calls.streams import StreamEntry
from operations.envelopes import ResponseEnvelope
from operations.errors import CallError


class PendingCall(msgspec.Struct, eq=False):
    """One call that waits for its end."""

    payload: RequestPayload

    replayable: bool | None
    """Whether it may run again after a loss; None where the workers have to be asked."""

    expires_at: float
    """By the loop's clock."""

    limit: float
    """Seconds it has."""

    expects: Expects = Expects.ONE
    future: "asyncio.Future[ResponseEnvelope[Any]] | None" = None
    stream: StreamEntry | None = None

    attempt: int = 1
    """How often it was given to workers."""

    misses: int = 0
    """How often in a row nobody had it."""

    worker: str | None = None
    """The mailbox of the worker that has it, once known."""

    sent_at: float = 0.0

    seen_at: float = 0.0
    """When it was last heard of, by the loop's clock."""

    def fail(self, error: CallError) -> None:
        """End the call with an error, unless it has ended."""
        if self.stream is not None:
            self.stream.end(error)
        elif self.future is not None and not self.future.done():
            self.future.set_exception(error)
