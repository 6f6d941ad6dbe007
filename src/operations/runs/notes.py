"""What is told of runs: changes for the sinks of the registry, and events for observers and counters.

Rule 1: a change is recorded before the commit of the write that it belongs to, so that a strict sink can reject that
        write. If the transaction is made again, the change may be recorded twice.
Rule 2: an event is sent after the commit.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from operations.contract.context import OperationContext
from operations.contract.events import RunEnded, RunEvent, RunResumed, RunStarted
from operations.recorder.recorder import Recorder
from operations.runs.database import Connection

Send: TypeAlias = Callable[[Sequence[RunEvent]], None]


class Notes:
    """Records changes, and keeps events until their transaction ends. Each connection belongs to one thread.

    Args:
        send: Called in the thread of the connection with the events of a transaction after its commit.

    Attributes:
        recorder: Hands changes to the sinks of the registry.
        ended: The runs that have ended in this process, by status.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self.recorder: Recorder | None = None
        self._pending = defaultdict[int, list[RunEvent]](list)
        self.ended = Counter[str]()

    def line(
        self,
        event: str,
        run_id: str,
        operation: str,
        context: OperationContext | None = None,
        **facts: Any,
    ) -> None:
        """Record a change.

        Raises:
            CallError: `UNAVAILABLE` if a strict sink cannot record it.
        """
        if self.recorder is not None:
            self.recorder.run_changed(event, run_id, operation, context, facts)

    def started(
        self, db: Connection, run_id: str, operation: str, context: OperationContext
    ) -> None:
        """Note that a run was stored."""
        self.line("run.started", run_id, operation, context)
        event = RunStarted(run=run_id, operation_id=operation, timestamp=db.now())
        self._pending[id(db)].append(event)

    def resumed(
        self, db: Connection, run_id: str, operation: str, attempt: int, reason: str
    ) -> None:
        """Note that a run is continued."""
        self.line("run.resumed", run_id, operation, attempt=attempt, reason=reason)
        event = RunResumed(
            run=run_id, operation_id=operation, timestamp=db.now(), attempt=attempt, reason=reason
        )
        self._pending[id(db)].append(event)

    def is_over(
        self, db: Connection, run_id: str, operation: str, status: str, code: str | None
    ) -> None:
        """Note that a run has ended."""
        self.line("run.ended", run_id, operation, status=status, code=code)
        event = RunEnded(
            run=run_id, operation_id=operation, timestamp=db.now(), status=status, code=code
        )
        self._pending[id(db)].append(event)

    def begin(self, db: Connection) -> None:
        """Forget the events of a transaction that was undone."""
        self._pending.pop(id(db), None)

    def committed(self, db: Connection) -> None:
        """Send the events of a transaction."""
        events = self._pending.pop(id(db), None)
        if events:
            self.ended.update(each.status for each in events if isinstance(each, RunEnded))
            self._send(events)
