"""One call on the waiting side."""

import asyncio
from typing import Any, Self, cast

import msgspec

from operations.calls.events import RequestPayload
from operations.calls.states import Expects
from operations.calls.streams import StreamEntry
from operations.envelopes import ResponseEnvelope
from operations.errors import CallError


class Sending:
    """While a request is handed over: a call that ends meanwhile takes its sender away from that.

    The sender then finds the call ended; what was under way may or may not have been delivered.
    """

    __slots__ = ("_before", "_is_interrupted", "_task")

    def __init__(self) -> None:
        task = cast("asyncio.Task[Any]", asyncio.current_task())
        self._task: asyncio.Task[Any] | None = task
        self._before = task.cancelling()
        self._is_interrupted = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        task, self._task = self._task, None
        if not self._is_interrupted or task is None:
            return False
        # Whoever else cancelled the task is heard.
        is_ours = task.uncancel() <= self._before
        return kind is not None and issubclass(kind, asyncio.CancelledError) and is_ours

    def interrupt(self) -> None:
        """The call has ended. In the next turn, for it may have been the sender itself who ended it."""
        asyncio.get_running_loop().call_soon(self._interrupt)

    def _interrupt(self) -> None:
        if self._task is not None and not self._is_interrupted:
            self._is_interrupted = True
            self._task.cancel()


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

    sending: Sending | None = None
    """While it is handed over."""

    sent_at: float = 0.0

    seen_at: float = 0.0
    """When it was last heard of, by the loop's clock."""

    def succeed(self, envelope: ResponseEnvelope[Any]) -> None:
        """End the call with its answer, unless it has ended."""
        if self.future is not None and not self.future.done():
            self.future.set_result(envelope)
        if self.sending is not None:
            self.sending.interrupt()

    def fail(self, error: CallError) -> None:
        """End the call with an error, unless it has ended."""
        if self.stream is not None:
            self.stream.end(error)
        elif self.future is not None and not self.future.done():
            self.future.set_exception(error)
        if self.sending is not None:
            self.sending.interrupt()
