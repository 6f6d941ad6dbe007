"""The calls of a client that have not ended, without I/O.

Rule 1: a call ends exactly once: whatever removes it first from the table decides how it ends.
"""

from collections.abc import Callable

from operations.base.deadline import DeadlineTable
from operations.base.errors import CallError
from operations.calls.protocol.states import PendingCall


class OpenCalls:
    """The calls and subscriptions of one client that have not ended, and their deadlines.

    Args:
        expire: Ends a call whose deadline has passed.

    Attributes:
        by_id: The calls by request id.
        on_removed: Called with each call that was removed, and whether it failed.
    """

    def __init__(self, expire: Callable[[PendingCall], None]) -> None:
        self.by_id: dict[str, PendingCall] = {}
        self.on_removed: Callable[[PendingCall, bool], None] = lambda _call, _has_failed: None
        self._deadlines: DeadlineTable[PendingCall] = DeadlineTable(self.by_id, expire)

    def __len__(self) -> int:
        return len(self.by_id)

    def add(self, call: PendingCall) -> None:
        """Add a call."""
        self.by_id[call.payload.request_id] = call
        if call.expires_at < self._deadlines.next:
            self._deadlines.schedule(call.expires_at)

    def get(self, request_id: str) -> PendingCall | None:
        """Return the call with this id; None if it has ended."""
        return self.by_id.get(request_id)

    def is_open(self, call: PendingCall) -> bool:
        """Return whether a call has not ended."""
        return call.payload.request_id in self.by_id

    def end(self, request_id: str, error: CallError) -> None:
        """End a call with `error`; does nothing if it has ended."""
        call = self.remove(request_id, has_failed=True)
        if call is not None:
            call.fail(error)

    def remove(self, request_id: str, *, has_failed: bool = False) -> PendingCall | None:
        """Remove a call that has ended; return None if it was already removed."""
        call = self.by_id.pop(request_id, None)
        if call is not None:
            self.on_removed(call, has_failed)
        return call

    def clear_deadlines(self) -> None:
        """Stop checking deadlines."""
        self._deadlines.clear()
