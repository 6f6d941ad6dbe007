"""The journal: every statement about runs, steps and leases. All are the same for SQLite and PostgreSQL.

Rule 1: every write of an attempt is conditional on its fence. If no row changes, the attempt is lost and stops.
Rule 2: a final state changes only by `retry`.
Rule 3: times come from the database, so that the clock of a machine does not matter.
Rule 4: the methods are jobs of a transaction: they use only their connection.
"""

import logging
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from operations.base.errors import CallError, ErrorCode
from operations.contract.context import OperationContext
from operations.contract.envelopes import local_envelope
from operations.registry.runs import FINAL, RunState, RunStatus, RunStep, Waiting
from operations.runs.database import Connection, Database, Unreadable
from operations.runs.notes import Notes
from operations.runs.records import (
    ABANDONED,
    APPROVAL,
    DURABLE,
    MARKED,
    ONCE,
    PAGE,
    ROOT,
    Asked,
    Attempt,
    End,
    NewRun,
    Question,
    Step,
)
from operations.runs.secrecy import masked_error, taken_places, with_places

logger = logging.getLogger("operations")

_encode = msgspec.json.encode
_decode = msgspec.json.decode

_UNREADABLE_MILLISECONDS: Final = 60_000
"""The time until a run is tried again that is encrypted with a key which the process does not have."""

_FINAL: Final = "('completed', 'failed', 'cancelled', 'unknown')"

_STATE: Final = (
    "id, operation, status, created, updated, attempt, account, expires, progress, message, waiting, "
    "revision"
)
_CLAIMED: Final = (
    "id, operation, digest, input, caller, fence, attempt, crashes, cancelled_by, created, "
    "revision, cause"
)
_STEP: Final = "name, parent, operation, kind, fence, begun, ended, result, error"
_QUESTION: Final = "key, kind, request, until, answer, answered_by"

EXPIRED_BATCH: Final = 500
"""The largest number of expired runs that one transaction removes."""


_LOCKED_MILLISECONDS: Final = 50
"""The time until runs are claimed again that another process has locked."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a store of runs."""

    live_per_caller: int = 1_000
    live: int = 100_000
    working: int = 50
    steps: int = 10_000
    input_bytes: int = 256 * 1024
    result_bytes: int = 1024 * 1024
    max_attempts: int = 20


class Retention(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds for which runs are kept after their end, and questions without an answer."""

    completed: float = 24 * 3600
    cancelled: float = 24 * 3600
    failed: float = 7 * 24 * 3600
    unknown: float = 7 * 24 * 3600
    unanswered: float = 30 * 24 * 3600


class Journal:
    """The statements of a journal.

    Args:
        database: The database.
        limits: The limits.
        retention: How long runs are kept.
        keep_steps: Whether the steps of completed runs are kept.
        notes: Told of what happens to runs.
    """

    def __init__(
        self,
        database: Database,
        limits: Limits,
        retention: Retention,
        *,
        keep_steps: bool,
        notes: Notes,
    ) -> None:
        self._database, self._notes = database, notes
        self._limits, self._retention, self._keep_steps = limits, retention, keep_steps

    # ------------------------------------------------------------ start and claim

    def start(
        self, db: Connection, new: NewRun, holder: str | None, context: OperationContext
    ) -> tuple[RunState, Attempt | None]:
        """Store a run; return its state, and its first attempt if this executor may begin it at once.

        Raises:
            CallError: `VALIDATION_ERROR` if its key names a run with another input; `RESOURCE_EXHAUSTED`.
        """
        now = db.now()
        if new.key is not None and (known := self._of_key(db, new, now)) is not None:
            return known, None
        self._enforce_room(db, new.owner)
        wake = max(now + new.delay, new.at or 0)
        wake = 0 if wake <= now else wake
        claims = (
            holder is not None
            and wake == 0
            and new.lane_limit is None
            and not db.rows("SELECT 1 FROM runs WHERE wake = 0 LIMIT 1")
            and self._has_lease(db, holder)
        )
        status = RunStatus.WORKING if claims else RunStatus.QUEUED
        fence = int(claims)
        added = db.count(
            "INSERT INTO runs (id, operation, digest, input, caller, owner, agent, account, key, status, created,"
            " updated, retention, revision, wake, priority, lane, lane_limit, holder, fence, attempt, crashes)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 1, ?, ?, ?, ?, ?, ?, ?, 0)"
            " ON CONFLICT (key) WHERE key IS NOT NULL DO NOTHING",
            new.id, new.operation, new.digest, new.input, new.caller, new.owner, new.agent, new.account, new.key,
            str(status), now, now, new.retention, None if claims else wake, new.priority, new.lane, new.lane_limit,
            holder if claims else None, fence, fence,
        )  # fmt: skip
        if not added:
            # Another process has used the key since.
            known = self._of_key(db, new, now)
            if known is not None:
                return known, None
            raise CallError(ErrorCode.UNAVAILABLE, "The key is used at this moment: try again")
        db.changed(new.id)
        self._notes.started(db, new.id, new.operation, context)
        state = RunState(
            id=new.id, operation=new.operation, status=status, created=now, updated=now, attempt=fence,
            owner=new.account, revision=1,
        )  # fmt: skip
        if not claims:
            return state, None
        attempt = Attempt(
            new.id, new.operation, new.digest, new.input, new.caller, 1, 1, 0, None, now, 1, None
        )
        return state, attempt

    def _of_key(self, db: Connection, new: NewRun, now: int) -> RunState | None:
        """Return the run with the key of a new one; None if there is none, or it has expired."""
        found = db.rows(
            f"SELECT input, expires, result, error, {_STATE} FROM runs WHERE key = ?{self._database.lock}",
            new.key,
        )
        if not found:
            return None
        given, expires, result, error, *state = found[0]
        if expires is not None and expires <= now:
            self._remove(db, [state[0]])
            return None
        if isinstance(given, Unreadable):
            raise unreadable(state[0])
        if bytes(given) != new.input:
            issue = {"path": "/key", "message": "names a run with another input", "keyword": "key"}
            message = "The key names a run with another input: use another key"
            raise CallError(ErrorCode.VALIDATION_ERROR, message, {"errors": [issue]})
        return _state(state, result, error)

    def _enforce_room(self, db: Connection, owner: str) -> None:
        """Check that one more run may be live, of all processes.

        Raises:
            CallError: `RESOURCE_EXHAUSTED`.
        """
        own, most = self._limits.live_per_caller, self._limits.live
        ((owned, live),) = db.rows(
            "SELECT (SELECT COUNT(*) FROM (SELECT 1 FROM runs WHERE owner = ? AND expires IS NULL LIMIT ?) AS own),"
            " (SELECT COUNT(*) FROM (SELECT 1 FROM runs WHERE expires IS NULL LIMIT ?) AS every)",
            owner, own, most,
        )  # fmt: skip
        if owned >= own:
            message = f"The caller has {own} live runs: wait until some have ended, or cancel some"
            raise CallError(ErrorCode.RESOURCE_EXHAUSTED, message)
        if live >= most:
            message = f"There are {most} live runs: wait until some have ended"
            raise CallError(ErrorCode.RESOURCE_EXHAUSTED, message)

    def ready(self, db: Connection) -> tuple[bool, int | None]:
        """Return whether a run is ready, and the milliseconds until another one becomes ready; None if none does."""
        now = db.now()
        is_ready = bool(db.rows("SELECT 1 FROM runs WHERE wake = 0 LIMIT 1"))
        ((later,),) = db.rows("SELECT MIN(wake) FROM runs WHERE wake > 0")
        if later is not None and later <= now:
            return True, None
        return is_ready, None if later is None else later - now

    def counts(self, db: Connection) -> dict[str, int]:
        """Return the number of live and `unknown` runs, and the age of the `oldest` ready one in milliseconds."""
        rows = db.rows("SELECT status, COUNT(*) FROM runs WHERE expires IS NULL GROUP BY status")
        found = {"queued": 0, "working": 0, "input_required": 0} | dict(rows)
        ((oldest,),) = db.rows("SELECT MIN(updated) FROM runs WHERE wake = 0")
        ((unknown,),) = db.rows("SELECT COUNT(*) FROM runs WHERE status = 'unknown'")
        return found | {
            "oldest": 0 if oldest is None else max(0, db.now() - oldest),
            "unknown": unknown,
        }

    def _has_lease(self, db: Connection, holder: str) -> bool:
        """Return whether an executor has a lease, which nobody takes over before the commit."""
        return bool(db.rows(f"SELECT 1 FROM executors WHERE id = ?{self._database.share}", holder))

    def claim(
        self, db: Connection, holder: str, most: int
    ) -> tuple[list[tuple[Attempt, list[Step]]], int | None, bool]:
        """Begin the next attempts of runs that are ready, at most this many.

        Returns:
            The attempts, each with the recorded steps of the run; milliseconds until the next run becomes ready, None
            if none does; and whether others are ready.
        """
        now = db.now()
        if not self._has_lease(db, holder):
            return [], None, False
        skip = self._database.skip_locked
        db.count(
            "UPDATE runs SET wake = 0 WHERE id IN"
            f" (SELECT id FROM runs WHERE wake > 0 AND wake <= ?{skip})",
            now,
        )
        ready = db.rows(
            "SELECT priority, created, id FROM runs WHERE wake = 0 AND lane_limit IS NULL"
            f" ORDER BY priority, created LIMIT ?{skip}",
            most,
        )
        is_skipped = len(ready) < self._number_ready(db, "lane_limit IS NULL", most)
        if db.rows("SELECT 1 FROM runs WHERE wake = 0 AND lane_limit IS NOT NULL LIMIT 1"):
            self._database.lock_all(db, "lanes")
        # Full lanes are omitted here, because there may be many of them.
        lanes = db.rows(
            "SELECT lane FROM runs AS r WHERE wake = 0 AND lane_limit IS NOT NULL GROUP BY lane"
            " HAVING MAX(lane_limit) > (SELECT COUNT(*) FROM runs AS w"
            " WHERE w.lane = r.lane AND w.holder IS NOT NULL AND w.lane_limit IS NOT NULL)"
            " ORDER BY MIN(priority), MIN(created) LIMIT 100"
        )
        for (lane,) in lanes:
            ((working,),) = db.rows(
                "SELECT COUNT(*) FROM runs WHERE lane = ? AND holder IS NOT NULL AND lane_limit IS NOT NULL",
                lane,
            )
            rows = db.rows(
                "SELECT priority, created, id, lane_limit FROM runs WHERE wake = 0 AND lane = ?"
                f" AND lane_limit IS NOT NULL ORDER BY priority, created LIMIT ?{skip}",
                lane, most,
            )  # fmt: skip
            is_skipped |= len(rows) < self._number_ready(
                db, "lane_limit IS NOT NULL AND lane = ?", most, lane
            )
            # Versions of an operation may declare different limits.
            ready += [row[:3] for place, row in enumerate(rows, working) if place < row[3]]
        chosen = [row[2] for row in sorted(ready)[:most]]
        attempts: list[tuple[Attempt, list[Step]]] = []
        for run_id in chosen:
            rows = db.rows(
                "UPDATE runs SET holder = ?, fence = fence + 1, attempt = attempt + 1, status = 'working',"
                " wake = NULL, updated = ?, revision = revision + 1 WHERE id = ? AND wake = 0"
                f" RETURNING {_CLAIMED}",
                holder, now, run_id,
            )  # fmt: skip
            for row in rows:
                db.changed(run_id)
                steps = self._steps(db, run_id) if row[6] > 1 else []
                if not self._is_readable(db, run_id, row, steps):
                    self._leave_unreadable(db, run_id, now)
                    continue
                if row[6] > 1:
                    self._notes.resumed(db, run_id, row[1], row[6], row[11] or "store")
                attempts.append((_attempt(row), steps))
        ((later,),) = db.rows("SELECT MIN(wake) FROM runs WHERE wake > 0")
        waits = [] if later is None else [max(0, later - now)]
        if is_skipped:
            # What has locked them may not change them, so that nothing announces that they are free.
            waits.append(_LOCKED_MILLISECONDS)
        return attempts, min(waits, default=None), len(chosen) == most

    def _number_ready(self, db: Connection, which: str, most: int, *values: Any) -> int:
        """Return the number of ready runs, at most this many, also of those that another process has locked."""
        if not self._database.skip_locked:
            return 0
        sql = (
            f"SELECT COUNT(*) FROM (SELECT 1 FROM runs WHERE wake = 0 AND {which} LIMIT ?) AS found"
        )
        ((number,),) = db.rows(sql, *values, most)
        return int(number)

    def _is_readable(
        self, db: Connection, run_id: str, row: Sequence[Any], steps: Sequence[Step]
    ) -> bool:
        """Return whether this process has the keys of a run that it has claimed."""
        values = [*row, *(each.result for each in steps), *(each.error for each in steps)]
        if row[6] > 1:
            sql = (
                "SELECT answer FROM questions WHERE run = ? AND answer IS NOT NULL"
                " UNION ALL SELECT value FROM signals WHERE run = ?"
            )
            values += [value for (value,) in db.rows(sql, run_id, run_id)]
        return not any(isinstance(value, Unreadable) for value in values)

    def _leave_unreadable(self, db: Connection, run_id: str, now: int) -> None:
        """Leave a run to a process that has its keys."""
        logger.error("%s", unreadable(run_id).message)
        db.count(
            "UPDATE runs SET holder = NULL, wake = ?, attempt = attempt - 1, cause = 'store' WHERE id = ?",
            now + _UNREADABLE_MILLISECONDS, run_id,
        )  # fmt: skip

    def _steps(self, db: Connection, run_id: str) -> list[Step]:
        rows = db.rows(f"SELECT {_STEP} FROM steps WHERE run = ?", run_id)
        return [Step(*row) for row in rows]

    # ------------------------------------------------------------ steps

    def _holds(self, db: Connection, run_id: str, fence: int) -> bool:
        """Return whether an attempt still holds its run. Nothing can change that before the commit."""
        sql = "SELECT 1 FROM runs WHERE id = ? AND fence = ? AND holder IS NOT NULL"
        return bool(db.rows(sql + self._database.lock, run_id, fence))

    def begin_step(self, db: Connection, run_id: str, fence: int, step: Step) -> int:
        """Store the marker of a call that must not run twice; return when it began, 0 if the attempt is lost."""
        if not self._holds(db, run_id, fence):
            return 0
        self._add_step(db, run_id, fence, step)
        return step.begun or db.now()

    def _add_step(
        self, db: Connection, run_id: str, fence: int, step: Step, by: str | None = None
    ) -> bool:
        db.count(
            f"INSERT INTO steps (run, {_STEP}, answered_by) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
            " ON CONFLICT (run, name) DO UPDATE SET kind = excluded.kind, fence = excluded.fence,"
            " begun = excluded.begun, ended = excluded.ended, result = excluded.result, error = excluded.error,"
            " answered_by = excluded.answered_by",
            run_id, step.name, step.parent, step.operation, step.kind, fence, step.begun or db.now(), step.ended,
            step.result, step.error, by,
        )  # fmt: skip
        return True

    def end_step(
        self,
        db: Connection,
        run_id: str,
        fence: int,
        step: Step,
        result: bytes | None,
        error: bytes | None,
    ) -> bool:
        """Record the outcome of a step; return False if the attempt is lost."""
        if not self._holds(db, run_id, fence):
            return False
        now = db.now()
        if step.kind in MARKED:
            sql = "UPDATE steps SET kind = ?, ended = ?, result = ?, error = ? WHERE run = ? AND name = ?"
            if db.count(sql, step.kind, now, result, error, run_id, step.name):
                return True
            # It was rejected before it began, so it has no marker.
        whole = Step(
            step.name, step.parent, step.operation, step.kind, fence, step.begun or now, now, result, error
        )  # fmt: skip
        return self._add_step(db, run_id, fence, whole)

    def remove_step(self, db: Connection, run_id: str, fence: int, name: str) -> bool:
        """Remove the marker of a call that certainly did not begin; return False if the attempt is lost."""
        if not self._holds(db, run_id, fence):
            return False
        db.count("DELETE FROM steps WHERE run = ? AND name = ?", run_id, name)
        return True

    # ------------------------------------------------------------ waiting

    def sleep(
        self, db: Connection, run_id: str, fence: int, step: Step, milliseconds: int
    ) -> int | None:
        """Record when a sleep ends, unless it is recorded; return the milliseconds until then, None if it is lost."""
        if not self._holds(db, run_id, fence):
            return None
        now = db.now()
        known = db.rows("SELECT result FROM steps WHERE run = ? AND name = ?", run_id, step.name)
        if known:
            return max(0, int(_decode(known[0][0])) - now)
        ends = now + milliseconds
        whole = Step(
            step.name, step.parent, step.operation, step.kind, fence, now, now, _encode(ends), None
        )
        self._add_step(db, run_id, fence, whole)
        return milliseconds

    def ask(
        self,
        db: Connection,
        run_id: str,
        fence: int,
        question: Question,
        signal: str | None,
        timeout: int | None,
    ) -> Asked | None:
        """Store a question, unless it is stored; return its answer if there is one, None if the attempt is lost.

        Args:
            db: The connection.
            run_id: The run.
            fence: The attempt.
            question: The question.
            signal: The name of the signal that answers it; None if it is answered by its key.
            timeout: Milliseconds until it ends without an answer.
        """
        if not self._holds(db, run_id, fence):
            return None
        now = db.now()
        if question.kind == "approval":
            # An earlier one, which was answered, did not let the call run.
            db.count("DELETE FROM questions WHERE run = ? AND key = ?", run_id, question.key)
            since = self._unanswered_since(db, run_id, question.key)
            if since is not None and since + self._kept("unanswered") <= now:
                # Each request has expired.
                return Asked(None, 0)
        rows = db.rows(
            "SELECT until, answer FROM questions WHERE run = ? AND key = ?", run_id, question.key
        )
        answer = rows[0][1] if rows else None
        if signal is not None:
            taken = db.rows(
                "SELECT number, value FROM signals WHERE run = ? AND name = ?"
                " AND (taken IS NULL OR taken = ?) ORDER BY taken IS NULL, number LIMIT 1",
                run_id, signal, question.key,
            )  # fmt: skip
            if taken:
                db.count(
                    "UPDATE signals SET taken = ? WHERE run = ? AND name = ? AND number = ?",
                    question.key, run_id, signal, taken[0][0],
                )  # fmt: skip
                answer = taken[0][1]
        if answer is not None:
            return Asked(answer, 0)
        if not rows:
            until = None if timeout is None else now + timeout
            db.count(
                f"INSERT INTO questions (run, {_QUESTION}, created) VALUES (?, ?, ?, ?, ?, NULL, NULL, ?)",
                run_id, question.key, question.kind, question.request, until, now,
            )  # fmt: skip
            self._show_waiting(db, run_id, now)
        else:
            until = rows[0][0]
            if db.rows("SELECT 1 FROM runs WHERE id = ? AND status = 'working'", run_id):
                # Another attempt has asked it.
                self._show_waiting(db, run_id, now)
        return Asked(None, None if until is None else max(0, until - now))

    def _unanswered_since(self, db: Connection, run_id: str, key: str) -> int | None:
        """Return when an approval was asked for the first time; None if it was not, or has been answered since."""
        rows = db.rows(
            "SELECT begun FROM steps WHERE run = ? AND name = ? AND answered_by IS NULL",
            run_id,
            key,
        )
        return rows[0][0] if rows else None

    def close_question(
        self,
        db: Connection,
        run_id: str,
        fence: int,
        key: str,
        step: Step | None,
        result: bytes | None,
        error: bytes | None,
    ) -> bool:
        """Record what a question has brought, and remove it; return False if the attempt is lost."""
        if not self._holds(db, run_id, fence):
            return False
        if step is not None and self._is_recorded(db, run_id, step.name):
            # The reply of the first commit was lost.
            return True
        if step is not None:
            self.end_step(db, run_id, fence, step, result, error)
            db.count(
                "UPDATE steps SET answered_by = (SELECT answered_by FROM questions WHERE run = ? AND key = ?),"
                " begun = COALESCE((SELECT created FROM questions WHERE run = ? AND key = ?), begun)"
                " WHERE run = ? AND name = ?",
                run_id, key, run_id, key, run_id, step.name,
            )  # fmt: skip
        db.count("DELETE FROM questions WHERE run = ? AND key = ?", run_id, key)
        self._show_waiting(db, run_id, db.now())
        return True

    def _is_recorded(self, db: Connection, run_id: str, name: str) -> bool:
        sql = "SELECT 1 FROM steps WHERE run = ? AND name = ? AND ended IS NOT NULL"
        return bool(db.rows(sql, run_id, name))

    def _show_waiting(self, db: Connection, run_id: str, now: int) -> None:
        """Store in the state of a run what it waits for."""
        waiting = self._waiting(db, run_id)
        db.count(
            "UPDATE runs SET waiting = ?, status = ?, updated = ?, revision = revision + 1 WHERE id = ?",
            waiting, "working" if waiting is None else "input_required", now, run_id,
        )  # fmt: skip
        db.changed(run_id)

    def _waiting(self, db: Connection, run_id: str) -> bytes | None:
        """Return what a run waits for, as it is stored."""
        rows = db.rows(
            "SELECT key, kind, request FROM questions WHERE run = ? AND answer IS NULL ORDER BY created, key",
            run_id,
        )
        waiting = [Waiting(key=key, kind=kind, request=_decode(data)) for key, kind, data in rows]
        return _encode(waiting) if waiting else None

    def park(self, db: Connection, run_id: str, fence: int, wakes: Sequence[int]) -> bool:
        """End an attempt that only waits; an answer or the end of a sleep queues the run again.

        Args:
            db: The connection.
            run_id: The run.
            fence: The attempt.
            wakes: Milliseconds until each of its sleeps ends.
        """
        if not self._holds(db, run_id, fence):
            return False
        now = db.now()
        times = [now + wake for wake in wakes]
        if db.rows("SELECT 1 FROM runs WHERE id = ? AND cancelled_by IS NOT NULL", run_id):
            times.append(0)
        rows = db.rows(
            "SELECT key, kind, request, until, answer FROM questions WHERE run = ?", run_id
        )
        for key, kind, request, until, answer in rows:
            if answer is not None or (
                kind == "signal" and self._has_signal(db, run_id, _decode(request)["name"], key)
            ):
                # It came while the attempt was about to end.
                times.append(0)
            elif until is not None:
                times.append(until)
        if not times and not rows:
            # Nothing would continue it.
            times.append(0)
        return self.release(db, run_id, fence, min(times, default=None), cause="time")

    def _has_signal(self, db: Connection, run_id: str, name: str, key: str) -> bool:
        """Return whether there is a signal for a question, which its attempt may have taken already."""
        sql = "SELECT 1 FROM signals WHERE run = ? AND name = ? AND (taken IS NULL OR taken = ?) LIMIT 1"
        return bool(db.rows(sql, run_id, name, key))

    def answer(self, db: Connection, run_id: str, key: str, value: bytes, by: str | None) -> bool:
        """Store the first answer to a question; return False if it is not outstanding."""
        found = db.rows(
            f"SELECT status, operation FROM runs WHERE id = ?{self._database.lock}", run_id
        )
        if not found or found[0][0] in FINAL:
            return False
        answered = db.count(
            "UPDATE questions SET answer = ?, answered_by = ? WHERE run = ? AND key = ? AND answer IS NULL"
            " AND kind IN ('elicit', 'sample')",
            value, by, run_id, key,
        )  # fmt: skip
        if answered:
            # The status changes when an attempt takes the answer.
            waiting = self._waiting(db, run_id)
            db.count("UPDATE runs SET waiting = ? WHERE id = ?", waiting, run_id)
            self._wake_parked(db, run_id)
            self._notes.line("run.answered", run_id, found[0][1], key=key, by=by)
        return bool(answered)

    def question(self, db: Connection, run_id: str, key: str) -> tuple[str, Any] | None:
        """Return the kind and the request of an outstanding question."""
        rows = db.rows(
            "SELECT kind, request FROM questions WHERE run = ? AND key = ? AND answer IS NULL", run_id, key
        )  # fmt: skip
        return (rows[0][0], _decode(rows[0][1])) if rows else None

    def signal(self, db: Connection, run_id: str, name: str, value: bytes, by: str) -> bool:
        """Store a signal; return False if the run has ended."""
        found = db.rows(
            f"SELECT status, operation FROM runs WHERE id = ?{self._database.lock}", run_id
        )
        if not found or found[0][0] in FINAL:
            return False
        sql = "SELECT COALESCE(MAX(number), -1) + 1 FROM signals WHERE run = ? AND name = ?"
        ((number,),) = db.rows(sql, run_id, name)
        if number >= self._limits.steps:
            raise CallError(ErrorCode.RESOURCE_EXHAUSTED, "The run has too many signals")
        db.count(
            "INSERT INTO signals (run, name, number, value) VALUES (?, ?, ?, ?)",
            run_id, name, number, value,
        )  # fmt: skip
        self._notes.line("run.answered", run_id, found[0][1], key=f"signal:{name}", by=by)
        waits = db.rows("SELECT request FROM questions WHERE run = ? AND kind = 'signal'", run_id)
        if any(_decode(request)["name"] == name for (request,) in waits):
            self._wake_parked(db, run_id)
        return True

    def _wake_parked(self, db: Connection, run_id: str) -> None:
        """Queue a run again whose attempt has ended while it waited; an attempt in memory notices the new revision."""
        db.count(
            "UPDATE runs SET wake = CASE WHEN holder IS NULL THEN 0 ELSE wake END, cause = 'answer',"
            f" revision = revision + 1 WHERE id = ? AND status NOT IN {_FINAL}",
            run_id,
        )
        db.changed(run_id)

    def end_approvals(
        self, db: Connection, answered: Sequence[tuple[str, str, str | None]]
    ) -> None:
        """Queue runs again whose approvals have ended: run, approval, and who has answered it."""
        for run_id, approval, by in answered:
            rows = db.rows(
                "SELECT key, request, created FROM questions WHERE run = ? AND kind = 'approval' AND answer IS NULL",
                run_id,
            )
            for key, request, created in rows:
                if _decode(request).get("approval") != approval:
                    continue
                # An attempt that is being parked sees it as well.
                db.count(
                    "UPDATE questions SET answer = ? WHERE run = ? AND key = ?",
                    b"null",
                    run_id,
                    key,
                )
                parent = key.partition(":")[2]
                since = self._unanswered_since(db, run_id, key) or created
                step = Step(key, parent, "approval", APPROVAL, 0, since, db.now(), request, None)
                self._add_step(db, run_id, 0, step, by)
            self._wake_parked(db, run_id)

    def approvals(self, db: Connection) -> list[tuple[str, str]]:
        """Return the runs that wait for approvals, each with the id of the approval."""
        rows = db.rows(
            "SELECT q.run, q.request FROM questions AS q JOIN runs AS r ON r.id = q.run"
            " WHERE q.kind = 'approval' AND q.answer IS NULL AND r.expires IS NULL"
        )
        return [
            (run_id, _decode(request)["approval"])
            for run_id, request in rows
            if not isinstance(request, Unreadable)
        ]

    # ------------------------------------------------------------ decisions

    def retry(
        self,
        db: Connection,
        run_id: str,
        ran: bytes | None,
        by: str,
        *,
        not_run: bool,
        secrets: Sequence[str] = (),
    ) -> bool:
        """Queue a run again that has failed, was cancelled or is unknown.

        Args:
            db: The connection.
            run_id: The run.
            ran: The result of the call whose outcome is unknown, as JSON; None if it is not given.
            by: Who decides.
            not_run: Whether that call did not run.
            secrets: The places of secrets in the result, if it is that of the run itself.

        Raises:
            CallError: `VALIDATION_ERROR` if the run cannot be retried, or the decision is missing or not possible;
                `RESOURCE_EXHAUSTED` if too many runs are live.
        """
        rows = db.rows(
            f"SELECT status, operation, owner FROM runs WHERE id = ?{self._database.lock}", run_id
        )
        status, root, owner = rows[0] if rows else ("", "", "")
        if status not in (RunStatus.FAILED, RunStatus.CANCELLED, RunStatus.UNKNOWN):
            message = (
                f"Only failed, cancelled and unknown runs can be retried; this one is {status}"
            )
            raise CallError(ErrorCode.VALIDATION_ERROR, message)
        begun = db.rows(
            "SELECT name, operation FROM steps WHERE run = ? AND ((kind = ? AND ended IS NULL) OR kind = ?)"
            " ORDER BY begun, name LIMIT 1",
            run_id, ONCE, ABANDONED,
        )  # fmt: skip
        is_unclear = bool(begun) or status == RunStatus.UNKNOWN
        if is_unclear and (ran is not None) == not_run:
            message = "Find out whether the call ran: retry with its result, or decide that it did not run"
            raise CallError(ErrorCode.VALIDATION_ERROR, message)
        if ran is not None and not begun:
            message = "The run has no call whose outcome is unknown, so there is nothing whose result can be recorded"
            raise CallError(ErrorCode.VALIDATION_ERROR, message)
        if ran is None or begun[0][0] != ROOT:
            self._enforce_room(db, owner)
        now = db.now()
        if is_unclear:
            # Also after a divergence, which no step shows.
            step = begun[0][0] if begun else None
            decision: dict[str, Any] = {"as": "not run" if not_run else "ran"}
            self._notes.line("run.settled", run_id, root, step=step, by=by, **decision)
        else:
            self._notes.line("run.retried", run_id, root, by=by, status=status)
        if begun and not_run and begun[0][0] == ROOT:
            # It has spent its approval and budget.
            self._reopen_root(db, run_id)
        elif begun and not_run:
            db.count("DELETE FROM steps WHERE run = ? AND name = ?", run_id, begun[0][0])
        elif begun and ran is not None:
            name, operation = begun[0]
            is_function = operation.startswith("step:")
            envelope = local_envelope(_decode(ran), operation)
            data = ran if is_function else envelope.encode()
            if name == ROOT:
                data = with_places(data, secrets)
                db.count(
                    "UPDATE runs SET status = 'completed', result = ?, error = NULL, updated = ?,"
                    " expires = ? + COALESCE(retention, ?), revision = revision + 1 WHERE id = ?",
                    data, now, now, self._kept("completed"), run_id,
                )  # fmt: skip
                if self._keep_steps:
                    sql = "UPDATE steps SET ended = ?, result = ? WHERE run = ? AND name = ?"
                    db.count(sql, now, data, run_id, ROOT)
                else:
                    db.count("DELETE FROM steps WHERE run = ?", run_id)
                db.changed(run_id)
                self._notes.is_over(db, run_id, root, "completed", None)
                return True
            db.count(
                "UPDATE steps SET kind = ?, ended = ?, result = ?, error = NULL WHERE run = ? AND name = ?",
                ONCE, now, data, run_id, name,
            )  # fmt: skip
        if db.rows(
            "SELECT 1 FROM steps WHERE run = ? AND name = ? AND kind <> ? AND error IS NOT NULL",
            run_id, ROOT, ONCE,
        ):  # fmt: skip
            self._reopen_root(db, run_id)
        # Each call that a handler has abandoned needs a decision of its own.
        sql = "DELETE FROM steps WHERE run = ? AND error IS NOT NULL AND kind <> ?"
        db.count(sql, run_id, ABANDONED)
        sql = "DELETE FROM steps WHERE run = ? AND kind = ? AND answered_by IS NULL"
        db.count(sql, run_id, APPROVAL)
        # Asked again, with their whole time.
        db.count("DELETE FROM questions WHERE run = ? AND answer IS NULL", run_id)
        db.count(
            "UPDATE runs SET status = 'queued', result = NULL, error = NULL, waiting = NULL, wake = 0, holder = NULL,"
            " expires = NULL, cancelled_by = NULL, crashes = 0, cause = 'retry', fence = fence + 1, updated = ?,"
            " revision = revision + 1 WHERE id = ?",
            now, run_id,
        )  # fmt: skip
        db.changed(run_id)
        return True

    def _reopen_root(self, db: Connection, run_id: str) -> None:
        """Let the call of a run begin again without another approval or unit of a budget."""
        db.count(
            "UPDATE steps SET kind = ?, ended = NULL, result = NULL, error = NULL WHERE run = ? AND name = ?",
            DURABLE, run_id, ROOT,
        )  # fmt: skip

    # ------------------------------------------------------------ states of an attempt

    def end(self, db: Connection, run_id: str, fence: int, end: End) -> RunState | None:
        """End a run; return its state, or None if the attempt is lost."""
        now = db.now()
        rows = db.rows(
            "UPDATE runs SET status = ?, result = ?, error = ?, holder = NULL, wake = NULL, waiting = NULL,"
            " updated = ?, expires = ? + COALESCE(retention, ?), revision = revision + 1"
            f" WHERE id = ? AND fence = ? AND status NOT IN {_FINAL} AND holder IS NOT NULL RETURNING {_STATE}",
            end.status, end.result, None if end.error is None else _encode(end.error), now, now,
            self._kept(end.status), run_id, fence,
        )  # fmt: skip
        if not rows:
            return None
        if end.status == RunStatus.FAILED:
            # The call itself has ended, with this error.
            db.count(
                "UPDATE steps SET ended = ?, error = ? WHERE run = ? AND name = ? AND ended IS NULL",
                now, _encode(end.error), run_id, ROOT,
            )  # fmt: skip
        if end.status == RunStatus.COMPLETED and not self._keep_steps:
            db.count("DELETE FROM steps WHERE run = ?", run_id)
        for number, page in enumerate(end.pages[1:], 1):
            step = Step(f"{PAGE}:{number}", ROOT, rows[0][1], PAGE, fence, now, now, page, None)
            self._add_step(db, run_id, fence, step)
        db.changed(run_id)
        code = None if end.error is None else end.error.get("code")
        self._notes.is_over(db, run_id, rows[0][1], end.status, code)
        return _state(rows[0], end.result, None if end.error is None else _encode(end.error))

    def _kept(self, status: str) -> int:
        return int(getattr(self._retention, status) * 1000)

    def release(
        self, db: Connection, run_id: str, fence: int, wake: int | None, cause: str = "store"
    ) -> bool:
        """End an attempt without ending its run; return False if the attempt was lost.

        Args:
            db: The connection.
            run_id: The run.
            fence: The attempt.
            wake: When the run is to be continued; 0 for now, None if an answer continues it.
            cause: Why it will be continued.
        """
        found = db.count(
            "UPDATE runs SET holder = NULL, wake = ?, cause = ?, updated = ?, revision = revision + 1"
            f" WHERE id = ? AND fence = ? AND holder IS NOT NULL AND status NOT IN {_FINAL}",
            wake, cause, db.now(), run_id, fence,
        )  # fmt: skip
        if found:
            db.changed(run_id)
        return bool(found)

    def report(
        self, db: Connection, run_id: str, fence: int, progress: bytes | None, message: str | None
    ) -> bool:
        """Store the progress of a run."""
        found = db.count(
            "UPDATE runs SET progress = ?, message = ?, updated = ?, revision = revision + 1"
            " WHERE id = ? AND fence = ? AND holder IS NOT NULL",
            progress, message, db.now(), run_id, fence,
        )  # fmt: skip
        db.changed(run_id)
        return bool(found)

    # ------------------------------------------------------------ callers

    def state(self, db: Connection, run_id: str) -> tuple[RunState, str, str, bool] | None:
        """Return a run with its owner and agent, and whether it could be decrypted; None if there is none."""
        # Every run has a caller, by which it is known whether it can be decrypted.
        rows = db.rows(
            f"SELECT caller, owner, agent, result, error, {_STATE} FROM runs WHERE id = ?", run_id
        )
        if not rows:
            return None
        _, owner, agent, result, error, *fields = _readable(rows[0])
        state = _state(fields, result, error)
        if state.expires is not None and state.expires <= db.now():
            return None
        return state, owner, agent, not any(isinstance(value, Unreadable) for value in rows[0])

    def steps(self, db: Connection, run_id: str) -> list[RunStep]:
        """Return the recorded steps of a run, in the order in which they began."""
        rows = db.rows(
            "SELECT name, parent, operation, kind, begun, ended, error, answered_by FROM steps WHERE run = ?"
            " AND kind <> ? ORDER BY begun, ended IS NULL, ended, name LIMIT ?",
            run_id, PAGE, self._limits.steps,
        )  # fmt: skip
        return [
            RunStep(
                name=name,
                parent=parent,
                operation=operation,
                once=kind in (ONCE, ABANDONED),
                begun=begun,
                ended=None if kind == ABANDONED else ended,
                error=None if error is None else masked_error(_decode(error)),
                answered_by=by,
            )
            for name, parent, operation, kind, begun, ended, error, by in map(_readable, rows)
        ]

    def page_of_result(self, db: Connection, run_id: str, number: int) -> bytes | None:
        """Return a page of the result of a run after the first one; None if there is none."""
        rows = db.rows(
            "SELECT result FROM steps WHERE run = ? AND name = ? AND kind = ?",
            run_id, f"{PAGE}:{number}", PAGE,
        )  # fmt: skip
        if rows and isinstance(rows[0][0], Unreadable):
            raise unreadable(run_id)
        return bytes(rows[0][0]) if rows else None

    def revisions(self, db: Connection, run_ids: Sequence[str]) -> dict[str, int]:
        """Return the revisions of runs."""
        found: dict[str, int] = {}
        for start in range(0, len(run_ids), 500):
            part = run_ids[start : start + 500]
            places = ", ".join("?" * len(part))
            found |= dict(db.rows(f"SELECT id, revision FROM runs WHERE id IN ({places})", *part))
        return found

    def page(
        self,
        db: Connection,
        owner: str | None,
        agent: str | None,
        status: str | None,
        operation: str | None,
        after: tuple[int, str] | None,
        limit: int,
    ) -> list[RunState]:
        """Return runs, the newest first: of one owner, or of all."""
        where, values = ["(expires IS NULL OR expires > ?)"], list[Any]([db.now()])
        for column, value in (
            ("owner", owner),
            ("agent", agent),
            ("status", status),
            ("operation", operation),
        ):
            if value is not None:
                where.append(f"{column} = ?")
                values.append(value)
        if after is not None:
            where.append("(created < ? OR (created = ? AND id < ?))")
            values += [after[0], *after]
        rows = db.rows(
            f"SELECT {_STATE} FROM runs WHERE {' AND '.join(where)} ORDER BY created DESC, id DESC LIMIT ?",
            *values, limit,
        )  # fmt: skip
        return [_state(_readable(row)) for row in rows]

    def cancel(self, db: Connection, run_id: str, by: str) -> tuple[bool, str | None]:
        """Cancel a run that nobody works on; otherwise store that it is to be cancelled.

        Returns:
            Whether it has ended now, and its holder.
        """
        rows = db.rows(
            f"SELECT status, holder, operation FROM runs WHERE id = ?{self._database.lock}", run_id
        )
        if not rows or rows[0][0] in FINAL:
            return False, None
        _, holder, operation = rows[0]
        self._notes.line("run.cancelled", run_id, operation, by=by)
        if holder is not None:
            db.count(
                "UPDATE runs SET cancelled_by = ?, revision = revision + 1 WHERE id = ?", by, run_id
            )
            db.changed(run_id)
            return False, holder
        now = db.now()
        begun = db.rows(
            "SELECT operation, name, begun FROM steps WHERE run = ? AND kind = ? AND ended IS NULL",
            run_id, ONCE,
        )  # fmt: skip
        error = cancelled_error([*map(tuple, begun)])
        db.count(
            "UPDATE runs SET status = 'cancelled', error = ?, wake = NULL, waiting = NULL, cancelled_by = ?,"
            " updated = ?, expires = ? + COALESCE(retention, ?), fence = fence + 1, revision = revision + 1"
            " WHERE id = ?",
            _encode(error.to_wire()), by, now, now, self._kept("cancelled"), run_id,
        )  # fmt: skip
        db.changed(run_id)
        self._notes.is_over(db, run_id, operation, "cancelled", str(error.code))
        return True, None

    def news(self, db: Connection, holder: str) -> tuple[list[str], list[str]]:
        """Return the runs of an executor that are to be cancelled, and runs with answers that were not used yet."""
        cancelled = db.rows(
            "SELECT id FROM runs WHERE holder = ? AND cancelled_by IS NOT NULL", holder
        )
        answered = db.rows(
            "SELECT run FROM questions WHERE answer IS NOT NULL"
            " UNION SELECT s.run FROM signals AS s JOIN questions AS q ON q.run = s.run AND q.kind = 'signal'"
            " WHERE s.taken IS NULL"
        )
        return [row[0] for row in cancelled], [row[0] for row in answered]

    # ------------------------------------------------------------ leases

    def renew(self, db: Connection, holder: str, milliseconds: int, *, new: bool) -> bool:
        """Renew the lease of an executor; return False if another one has taken over its runs."""
        ends = db.ticks() + milliseconds
        if new:
            sql = "INSERT INTO executors (id, boot, expires) VALUES (?, ?, ?)"
            return bool(db.count(sql, holder, self._database.boot, ends))
        return bool(db.count("UPDATE executors SET expires = ? WHERE id = ?", ends, holder))

    def take_over(self, db: Connection) -> int:
        """Make the runs of executors ready whose lease is over; return their number."""
        dead = db.rows(
            "SELECT id FROM executors WHERE boot <> ? OR expires < ?" + self._database.skip_locked,
            self._database.boot, db.ticks(),
        )  # fmt: skip
        taken = 0
        for (holder,) in dead:
            taken += self._free(db, holder, crashed=True)
        return taken

    def has_dead(self, db: Connection) -> bool:
        """Return whether the lease of an executor is over."""
        sql = "SELECT 1 FROM executors WHERE boot <> ? OR expires < ? LIMIT 1"
        return bool(db.rows(sql, self._database.boot, db.ticks()))

    def leave(self, db: Connection, holder: str) -> int:
        """Delete the lease of an executor; others continue its runs at once."""
        return self._free(db, holder, crashed=False)

    def _free(self, db: Connection, holder: str, *, crashed: bool) -> int:
        # In this order, as a claim: first the lease, then its runs.
        db.rows(f"SELECT 1 FROM executors WHERE id = ?{self._database.lock}", holder)
        rows = db.rows(
            "UPDATE runs SET holder = NULL, wake = 0, crashes = crashes + ?, cause = ?, updated = ?,"
            " revision = revision + 1 WHERE holder = ? RETURNING id",
            int(crashed), "crash" if crashed else "shutdown", db.now(), holder,
        )  # fmt: skip
        for (run_id,) in rows:
            db.changed(run_id)
        db.count("DELETE FROM executors WHERE id = ?", holder)
        return len(rows)

    def held(self, db: Connection, holder: str) -> list[tuple[str, int]]:
        """Return the runs of an executor with their fences."""
        rows = db.rows("SELECT id, fence FROM runs WHERE holder = ?", holder)
        return [tuple(row) for row in rows]

    # ------------------------------------------------------------ cleaning

    def end_unanswered(self, db: Connection) -> int:
        """Fail runs whose questions had no answer for too long; return their number."""
        now = db.now()
        error = CallError(ErrorCode.TIMEOUT, "The run waited too long for an answer")
        rows = db.rows(
            "UPDATE runs SET status = 'failed', error = ?, wake = NULL, waiting = NULL, updated = ?,"
            " expires = ? + COALESCE(retention, ?), fence = fence + 1, revision = revision + 1"
            " WHERE status = 'input_required' AND holder IS NULL AND updated < ? AND (wake IS NULL OR wake > ?)"
            " RETURNING id, operation",
            _encode(error.to_wire()), now, now, self._kept("failed"), now - self._kept("unanswered"), now,
        )  # fmt: skip
        for run_id, operation in rows:
            db.changed(run_id)
            self._notes.is_over(db, run_id, operation, "failed", str(error.code))
        return len(rows)

    def remove_expired(self, db: Connection) -> int:
        """Remove some runs that have expired; return their number."""
        rows = db.rows(
            "SELECT id FROM runs WHERE expires IS NOT NULL AND expires <= ? LIMIT ?"
            + self._database.skip_locked,
            db.now(), EXPIRED_BATCH,
        )  # fmt: skip
        self._remove(db, [row[0] for row in rows])
        return len(rows)

    def _remove(self, db: Connection, run_ids: Sequence[str]) -> None:
        for run_id in run_ids:
            for table in ("steps", "questions", "signals"):
                db.count(f"DELETE FROM {table} WHERE run = ?", run_id)
            db.count("DELETE FROM runs WHERE id = ?", run_id)


def cancelled_error(begun: Sequence[tuple[str, str, int]]) -> CallError:
    """Return the error of a cancelled run, with the calls whose outcome is not known."""
    details = {"begun": [{"operation": o, "step": n, "begun": t} for o, n, t in begun]}
    return CallError(ErrorCode.ABORTED, "The run was cancelled", details if begun else None)


def unreadable(run_id: str) -> CallError:
    """Return the error of a run that is encrypted with a key which this process does not have."""
    message = f"The run {run_id} is encrypted with a key that this process does not have: add it to the keys of [runs]"
    return CallError(ErrorCode.UNAVAILABLE, message, {"run": run_id}, retryable=False)


def _readable(row: Sequence[Any]) -> list[Any]:
    """Return a row without the values that cannot be decrypted."""
    return [None if isinstance(value, Unreadable) else value for value in row]


def _attempt(row: Sequence[Any]) -> Attempt:
    return Attempt(*row)


_FIELDS: Final = tuple(_STATE.split(", "))


def _state(row: Sequence[Any], result: Any = None, error: Any = None) -> RunState:
    fields: dict[str, Any] = dict(zip(_FIELDS, row, strict=True))
    fields["owner"] = fields.pop("account")
    fields["status"] = RunStatus(fields["status"])
    for name, data in (("progress", fields["progress"]), ("result", result), ("error", error)):
        fields[name] = None if data is None else _decode(data)
    waiting = fields["waiting"]
    fields["secrets"] = taken_places(fields["result"]) + taken_places(fields["error"])
    fields["waiting"] = () if waiting is None else _decode(waiting, type=tuple[Waiting, ...])
    return RunState(**fields)
