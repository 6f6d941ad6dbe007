"""Runs: calls with a life of their own, kept in a journal that survives crashes, restarts and deploys.

    registry = OperationRegistry(runs=Runs("sqlite:runs.db"))

Rule 1: a call that may run only once is never begun twice: if its outcome is not known, the run ends `unknown`.
Rule 2: no run is lost: whatever was committed is continued by any process with the same journal.
Rule 3: the authority of a run is that of the moment: its caller is resolved again when it continues.

`journal` has every statement, `writer` the thread that commits, `keeper` the lease; `executor` claims runs, `session`
is one attempt, `scopes` what its handlers may do, `steps` names and guards its steps, and `outcomes` stores errors.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from secrets import token_hex
from typing import Any, Final, TypeVar

import msgspec

from operations.base.errors import CallError, ErrorCode, invalid_argument
from operations.base.json.values import as_json, canonical, is_object, object_of
from operations.base.logs import LogThrottle
from operations.base.retry import Backoff
from operations.base.tasks import cancel_tasks, start_task
from operations.contract.access import Identity, access_denied
from operations.contract.context import OperationContext, new_request_id
from operations.contract.events import RunEvent
from operations.contract.grant import Issuer, secret_keys
from operations.contract.specs import Operation
from operations.registry.plan import CallPlan
from operations.registry.runs import (
    FINAL,
    Run,
    RunPage,
    RunState,
    RunStatus,
    RunStep,
    StartOptions,
    Waiting,
    run_not_found,
)
from operations.runs import callers
from operations.runs.callers import Subjects, may_see
from operations.runs.database import ALL, Connection, Database
from operations.runs.executor import Executor
from operations.runs.journal import Journal, Limits, Retention, unreadable
from operations.runs.keeper import Keeper
from operations.runs.notes import Notes
from operations.runs.records import Attempt, Caller, NewRun
from operations.runs.schedules import Cron, Schedule, ScheduleFollower
from operations.runs.secrecy import result_places
from operations.runs.sqlite import SQLiteDatabase
from operations.runs.tables import VERSION, create_tables
from operations.runs.texts import cleaned, enforce_integer, enforce_storable, is_storable
from operations.runs.watchers import Watchers
from operations.runs.writer import RunKeyError, RunStoreError, TransactionThread
from operations.schema import from_schema, validate_or_raise

__all__ = [
    "Cron",
    "Limits",
    "Retention",
    "Run",
    "RunPage",
    "RunState",
    "RunStatus",
    "RunStep",
    "RunStoreError",
    "Runs",
    "Schedule",
    "Waiting",
]

logger = logging.getLogger("operations")

T = TypeVar("T")

READ: Final = "runs:read"
"""The scope for seeing the runs of all callers."""

MANAGE: Final = "runs:manage"
"""The scope for cancelling, retrying and answering them as well."""

_MAX_PAGE: Final = 100

_CHECK_SECONDS: Final = 5.0
"""Seconds after which a journal that does not respond counts as not working."""

_MAX_TIME: Final = 1e15
"""The largest number of seconds or milliseconds that a start accepts."""

_MAX_DIGITS: Final = 16
"""More digits than this has no time in milliseconds."""

_APPROVAL_SECONDS: Final = 5.0
"""The longest time between two looks at the approvals that runs wait for."""


class Runs:
    """A store of runs.

    `async with registry` opens it: from then on, this process continues runs, also those of processes that are gone.
    The first `start` opens it as well.

    Args:
        url: `sqlite:PATH`, or `postgresql://USER@HOST/DATABASE`, which needs the `postgres` extra; or a database.
        password: The password of a PostgreSQL user, which the URL then does not contain.
        key: At least 32 random bytes, with which inputs, results, steps and callers are encrypted; needs the `jwt`
            extra. Of several keys, the first one encrypts, and all decrypt. All processes use the same keys.
        limits: The limits.
        retention: How long runs are kept after their end.
        lease: Seconds after which other processes take over the runs of a process that has stopped.
        grace: Seconds that attempts have to end when the store is closed.
        executes: Whether this process works on runs; False for clients that only start and read them.
        keep_steps: Whether the steps of completed runs are kept.
        park: Seconds for which a run that only waits stays in memory.
        schedules: Runs that are started at certain times, by name.
        subjects: Returns the present identity of the owner of a run that continues. By default it has the scopes that
            it had at the start.
        grants: Knows which grants were revoked, for runs that agents start. By default, the issuer of the grants that
            start runs in this process.

    Raises:
        ValueError: If the URL is not known, its file is on a network file system, or the key is too short.
    """

    def __init__(
        self,
        url: str | Database,
        *,
        password: str | None = None,
        key: str | bytes | Sequence[str | bytes] | None = None,
        limits: Limits | None = None,
        retention: Retention | None = None,
        lease: float = 10.0,
        grace: float = 5.0,
        executes: bool = True,
        keep_steps: bool = False,
        park: float = 60.0,
        schedules: Mapping[str, Schedule] | None = None,
        subjects: Subjects | None = None,
        grants: Issuer | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self.registry: Any = None
        self.park_seconds = park
        self.schedules = dict(schedules or {})
        self.following: list[ScheduleFollower] = []
        self._database = _database(url, password) if isinstance(url, str) else url
        self._key_ids: list[str] = []
        if key is not None:
            secrets = secret_keys(key, "the store of runs")
            self._key_ids = [sha256(b"which key" + secret).hexdigest() for secret in secrets]
            # Needs an extra.
            sealing = import_module("operations.runs.sealing")
            self._database = sealing.SealedDatabase(self._database, secrets)
        self._notes = Notes(partial(self._in_loop, self._send))
        self.journal = Journal(
            self._database,
            self.limits,
            retention or Retention(),
            keep_steps=keep_steps,
            notes=self._notes,
        )
        self._lease, self._grace, self._executes = lease, grace, executes
        self._subjects, self._grants = subjects, grants
        self._writer = TransactionThread(
            "operations runs", self._connect, writes=True, notes=self._notes
        )
        self._reader = TransactionThread(
            "operations runs reader", self._connect_reader, writes=False
        )
        self._keeper: Keeper | None = None
        self._executor: Executor | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opening: asyncio.Lock | None = None
        self._is_newer = self._is_closed = False
        self._watchers = Watchers(self._revisions)
        self._digests: dict[str, tuple[Operation, str]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._approvals: asyncio.Task[None] | None = None
        self._awaited: asyncio.Task[None] | None = None
        """Tries to open the journal."""
        self._has_approvals = False

    def _connect(self) -> Connection:
        connection = self._database.connect()
        try:
            self._is_newer = create_tables(self._database, connection) > VERSION
        except BaseException:
            connection.close()
            raise
        return connection

    def _connect_reader(self) -> Connection:
        return self._database.connect(writes=False)

    # ------------------------------------------------------------ lifetime

    def attach(self, registry: Any) -> None:
        """Run the operations of a registry.

        Raises:
            ValueError: If it belongs to another registry.
        """
        if self.registry is not None:
            raise ValueError(
                "a store of runs belongs to one registry: open another Runs with the same URL"
            )
        self.registry = registry
        self._notes.recorder = registry.recorder

    async def open(self) -> None:
        """Open the journal and begin to work on runs, unless this process is a client. Opening it twice is harmless.

        Raises:
            RunStoreError: If it cannot be opened; the message names it and the reason.
        """
        if self._executes:
            await self.connect()

    async def connect(self) -> None:
        """Open the journal, also as a client.

        Raises:
            RunStoreError: If it cannot be opened; the message names it and the reason.
        """
        try:
            await self._open()
        except RunKeyError:
            raise
        except RunStoreError as error:
            raise self._described(error) from error

    async def open_when_up(self) -> None:
        """Open the journal as `open` does. If it is on a server that cannot be used now, go on without, and try again.

        Until then, starts are `UNAVAILABLE`.

        Raises:
            RunStoreError: If it is a file that cannot be opened, or encrypted with another key.
        """
        try:
            await self.open()
        except RunStoreError as error:
            if not self._database.is_remote or isinstance(error, RunKeyError):
                raise
            message = "%s; no run is started or continued until it can be used"
            logger.error(message, error.message)  # noqa: TRY400 - no bug
            self._awaited = start_task(self._tasks, self._await_store())

    async def _await_store(self) -> None:
        """Try to open the journal until that succeeds."""
        backoff, failures = Backoff(), LogThrottle()
        failures.level()
        while True:
            await asyncio.sleep(backoff.pause())
            try:
                await self._open()
            except RunStoreError as error:
                logger.log(failures.level(), "%s", self._described(error).message)
            else:
                logger.warning("the store of runs %s can be used now", self._database.name)
                return

    def _described(self, error: RunStoreError) -> RunStoreError:
        """Return an error for the operator: with the name of the store, and the reason."""
        if isinstance(error, RunKeyError):
            return error
        reason = " ".join(f"{error.__cause__ or error}".split())
        return RunStoreError(f"The store of runs {self._database.name} cannot be opened: {reason}")

    @property
    def was_opened(self) -> bool:
        """Whether the journal could be opened since the start."""
        return self._keeper is not None or not self._executes

    async def _open(self) -> None:
        if self._keeper is not None:
            return
        if self._opening is None:
            self._opening = asyncio.Lock()
        async with self._opening:
            if self._keeper is not None:
                return
            self._is_closed = False
            self._loop = asyncio.get_running_loop()
            # The first connection makes the tables.
            if not await self.write(self._has_key):
                raise RunKeyError(
                    "The store of runs is encrypted with another key, or this process has no key for it"
                )
            executes = self._executes and not self._is_newer
            if self._is_newer and self._executes:
                logger.error(
                    "the journal of runs belongs to a newer version: this process works on no runs"
                )
            keeper = Keeper(
                self._database,
                self.journal,
                self._lease,
                on_news=partial(self._in_loop, self._on_news),
                on_ready=partial(self._in_loop, self._on_ready),
                on_lease=partial(self._in_loop, self._on_lease),
                executes=executes,
                notes=self._notes,
            )
            if executes:
                connection = await asyncio.to_thread(self._database.connect)
                try:
                    await asyncio.to_thread(keeper.open, connection)
                except Exception as error:
                    raise RunStoreError from error
                finally:
                    connection.close()
                self._executor = Executor(self, keeper, self._on_end)
                self._executor.start()
            self._keeper = keeper
            keeper.start()
            if executes:
                self.watch_approvals()
                self.following = [
                    ScheduleFollower(self, name, schedule)
                    for name, schedule in self.schedules.items()
                ]
                for follower in self.following:
                    start_task(self._tasks, follower.follow())

    def _has_key(self, db: Connection) -> bool:
        """Return whether this process has a key of the journal. Its first key is one of them from now on."""
        self._database.lock_all(db, "key")
        rows = db.rows("SELECT value FROM meta WHERE name = 'key'")
        known: list[str] = rows[0][0].split() if rows else []
        own = self._key_ids
        if known and set(known).isdisjoint(own):
            return False
        if own and own[0] not in known:
            db.count(
                "INSERT INTO meta (name, value) VALUES ('key', ?)"
                " ON CONFLICT (name) DO UPDATE SET value = excluded.value",
                " ".join([*known, own[0]]),
            )
        return True

    async def _opened(self) -> None:
        """Open the journal, unless it was closed.

        Raises:
            RunStoreError: If it cannot be opened, or was closed.
        """
        if self._is_closed:
            raise RunStoreError("The store of runs is closed")
        if self._awaited is not None and not self._awaited.done():
            raise RunStoreError
        await self._open()

    async def aclose(self) -> None:
        """Hand over the runs that do not end within the grace, and close the journal. Closing twice is harmless."""
        self._is_closed = True
        keeper, self._keeper = self._keeper, None
        executor, self._executor = self._executor, None
        if executor is not None:
            await executor.close(self._grace)
        await cancel_tasks(*self._tasks)
        if keeper is not None:
            await asyncio.to_thread(keeper.stop)
            holder = keeper.holder
            if holder is not None:
                try:
                    await self.write(lambda db: self.journal.leave(db, holder))
                except RunStoreError:
                    logger.warning("other processes continue the runs when the lease is over")
        self._watchers.wake_all()
        await asyncio.to_thread(self._writer.close)
        await asyncio.to_thread(self._reader.close)

    def _in_loop(self, function: Callable[..., None], *args: Any) -> None:
        """Call a function in the event loop of the executor."""
        loop = self._loop
        if loop is not None:
            try:
                loop.call_soon_threadsafe(function, *args)
            except RuntimeError:
                # The loop is closed.
                return

    def _send(self, events: Sequence[RunEvent]) -> None:
        """Send events to the observers of the registry."""
        for event in events:
            self.registry.notify(event)

    def _on_news(self, run_ids: Sequence[str]) -> None:
        """React to changes by other processes."""
        if self._executor is not None:
            self._executor.wake()
            self._executor.look()
            # A run may wait for an approval whose process is gone before there is an answer.
            self.watch_approvals()
        if ALL in run_ids:
            self._watchers.look()
        else:
            self._changed(*run_ids)

    def _on_ready(self) -> None:
        if self._executor is not None:
            self._executor.wake()

    def _on_lease(self, has_lease: bool) -> None:
        if self._executor is None:
            return
        if has_lease:
            self._executor.wake()
        else:
            self._executor.lose()

    def _on_end(self, run_id: str) -> None:
        self._changed(run_id)

    def _changed(self, *run_ids: str) -> None:
        """Wake those that wait for changes of runs."""
        self._watchers.wake(run_ids)

    # ------------------------------------------------------------ for attempts

    def write(self, job: Callable[[Connection], T]) -> "asyncio.Future[T]":
        """Run a job that writes, in a transaction with those of other callers."""
        return self._writer.run(job)

    def read(self, job: Callable[[Connection], T]) -> "asyncio.Future[T]":
        """Run a job that reads."""
        return self._reader.run(job)

    async def caller_of(self, attempt: Attempt) -> tuple[Caller, Identity | None]:
        """Return the caller of a run, and its identity of today.

        Raises:
            CallError: `ACCESS_DENIED`.
        """
        caller, identity = await callers.resolved(
            attempt.caller, attempt.operation, self._subjects, self._grants
        )
        if caller.authority is not None and not self._still_allows(*caller.authority):
            raise access_denied(attempt.operation)
        return caller, identity

    def _still_allows(self, operation_id: str, called: str) -> bool:
        """Return whether an operation may still call another one on its own authority."""
        return bool(self.registry.covers(operation_id, called))

    def handle(self, state: RunState, context: OperationContext) -> Run:
        """Return a handle for a run."""
        return Run(self, state, context)

    def digest_of(self, operation: Operation) -> str:
        """Return the digest of the contract of an operation."""
        found = self._digests.get(operation.spec.id)
        if found is None or found[0] is not operation:
            found = self._digests[operation.spec.id] = operation, operation.spec.digest
        return found[1]

    @property
    def holds_lease(self) -> bool:
        """Whether no other process may take over the attempts of this one."""
        return self._keeper is not None and self._keeper.is_valid

    def unreleased(self, run_id: str, fence: int) -> None:
        """Release an attempt as soon as the store works again."""
        if self._executor is not None:
            self._executor.unreleased(run_id, fence)

    def lend(self, slots: int) -> None:
        """Give up the slot of an attempt, or take it again."""
        if self._executor is not None:
            self._executor.lend(slots)

    async def slot(self) -> None:
        """Wait for a slot, which the caller takes at once."""
        if self._executor is not None:
            await self._executor.slot()

    def watch_approvals(self) -> None:
        """Continue runs when the approvals are answered that they wait for."""
        self._has_approvals = True
        if self._approvals is None or self._approvals.done():
            self._approvals = start_task(self._tasks, self._watch_approvals())

    async def _watch_approvals(self) -> None:
        """Look at all approvals that runs wait for, whenever the store of approvals has changed."""
        authority = self.registry.authority
        while self._keeper is not None:
            changed = authority.store.changed
            self._has_approvals = False
            try:
                waiting = await self.read(self.journal.approvals)
                answered = [
                    (run_id, approval, await authority.approvals.answered_by(approval))
                    for run_id, approval in waiting
                    if not await authority.approvals.is_pending(approval)
                ]
                if answered:
                    await self.write(partial(self.journal.end_approvals, answered=answered))
                    self._tell(*(run_id for run_id, _, _ in answered))
            except CallError:
                # One of the stores does not work now.
                waiting = [("", "")]
            if not waiting:
                if self._has_approvals:
                    # A run has asked meanwhile.
                    continue
                return
            seconds = min(authority.store.poll_seconds, _APPROVAL_SECONDS)
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await changed.wait()

    def _tell(self, *run_ids: str) -> None:
        """Tell the attempts of this process of answers, and the executor of runs that may be ready."""
        if self._executor is not None:
            for run_id in run_ids:
                if (session := self._executor.session(run_id)) is not None:
                    session.tell()
            self._executor.wake()

    # ------------------------------------------------------------ start

    async def start(
        self, plan: CallPlan, value: Any, context: OperationContext, options: StartOptions
    ) -> RunState:
        """Store a run, and begin it at once if there is a slot.

        Raises:
            CallError: `VALIDATION_ERROR`, `RESOURCE_EXHAUSTED`, or `UNAVAILABLE` if the store does not work.
        """
        await self._opened()
        new = self._new_run(plan, value, context, options)
        grant = None if context.identity is None else context.identity.grant
        if self._grants is None and grant is not None:
            self._grants = grant.issuer
        # An executor works in one event loop; other loops use the queue.
        is_here = self._loop is asyncio.get_running_loop()
        executor = self._executor if is_here else None
        holder = None if executor is None or new.delay or new.at else executor.reserve()
        work = self.write(lambda db: self.journal.start(db, new, holder, context))
        if executor is None or holder is None:
            state, _ = await asyncio.shield(work)
            self._in_loop(self._on_ready)
            return state
        # Also if the caller is cancelled: the run is stored.
        work.add_done_callback(lambda done: self._begin_now(executor, done, context))
        state, _ = await asyncio.shield(work)
        return state

    def _begin_now(
        self, executor: Executor, done: "asyncio.Future[Any]", context: OperationContext
    ) -> None:
        error = None if done.cancelled() else done.exception()
        attempt = None if done.cancelled() or error is not None else done.result()[1]
        executor.unreserve(attempt, context, failed=isinstance(error, RunStoreError))

    def _new_run(
        self, plan: CallPlan, value: Any, context: OperationContext, options: StartOptions
    ) -> NewRun:
        operation = plan.operation
        data = _encoded(value, "The input of a run", self.limits.input_bytes)
        for name in ("delay", "at", "retention"):
            given = getattr(options, name)
            if given is not None and not 0 <= given <= _MAX_TIME:
                message = "must be a number from 0 to 10^15"
                raise invalid_argument(f"/{name}", message, "minimum", subject=name)
        if options.delay and options.at is not None:
            raise invalid_argument("/at", "cannot be used together with delay", "not", subject="at")
        enforce_integer(options.priority, "priority")
        if options.lane is not None:
            enforce_storable(options.lane, "lane")
        owner, agent, account = callers.owner_of(context)
        return NewRun(
            id=new_request_id(),
            operation=plan.id,
            digest=plan.digest,
            input=data,
            caller=callers.stored(context),
            owner=owner,
            agent=agent,
            account=None if account is None else cleaned(account),
            key=None if options.key is None else callers.key_of(options.key, plan.id, context),
            delay=int(options.delay * 1000),
            at=None if options.at is None else int(options.at),
            priority=options.priority,
            lane=plan.id if options.lane is None else options.lane,
            lane_limit=operation.lane_limit,
            retention=None if options.retention is None else int(options.retention * 1000),
        )

    # ------------------------------------------------------------ callers

    async def works(self) -> bool:
        """Return whether the journal can be written, for `/readyz`."""
        try:
            async with asyncio.timeout(_CHECK_SECONDS):
                await self._opened()
                await self.write(_check)
        except (RunStoreError, TimeoutError):
            return False
        return True

    async def counts(self) -> dict[str, int]:
        """Return the number of live and `unknown` runs, and the age of the `oldest` ready one in milliseconds."""
        await self._opened()
        return await self.read(self.journal.counts)

    def totals(self) -> dict[str, int]:
        """Return the number of attempts that this process has begun, and of runs that ended in it by status."""
        attempts = 0 if self._executor is None else self._executor.attempts
        return {"attempts": attempts, **{str(each): self._notes.ended[each] for each in FINAL}}

    async def state(self, run_id: str, context: OperationContext) -> RunState:
        """Return the present state of a run.

        Raises:
            CallError: `RUN_NOT_FOUND` if it is unknown, has expired, or the caller may not see it.
        """
        return await self._visible(run_id, context, READ, MANAGE)

    async def steps(self, run_id: str, context: OperationContext) -> list[RunStep]:
        """Return the recorded steps of a run; those of a completed run only with `keep_steps`.

        Raises:
            CallError: `RUN_NOT_FOUND`.
        """
        await self._visible(run_id, context, READ, MANAGE)
        return await self.read(lambda db: self.journal.steps(db, run_id))

    async def result_page(
        self, run_id: str, number: int, context: OperationContext
    ) -> tuple[str, bytes] | None:
        """Return the operation of a run and a page of its result; None if the caller may not see it."""
        try:
            state = await self._visible(run_id, context, READ, MANAGE)
        except CallError as error:
            if error.code != ErrorCode.RUN_NOT_FOUND:
                raise
            return None
        page = await self.read(lambda db: self.journal.page_of_result(db, state.id, number))
        return None if page is None else (state.operation, page)

    async def _visible(
        self, run_id: str, context: OperationContext, *scopes: str, readable: bool = True
    ) -> RunState:
        """Return the state of a run, whose values this process can decrypt unless they do not matter.

        Raises:
            CallError: `RUN_NOT_FOUND`; `UNAVAILABLE` if this process does not have the key of the run.
        """
        await self._opened()
        given = str(run_id)
        known = given if is_storable(given) else ""
        found = await self.read(lambda db: self.journal.state(db, known))
        # The same error after the same work.
        if found is None or not may_see(found[1], found[2], context, *scopes):
            raise run_not_found(run_id)
        if readable and not found[3]:
            raise unreadable(run_id)
        return found[0]

    async def changed(self, run_id: str, revision: int, context: OperationContext) -> RunState:
        """Return the state of a run as soon as its revision is later than this one.

        Raises:
            CallError: `RUN_NOT_FOUND`.
        """
        await self._opened()
        while True:
            with self._watchers.watching(run_id, revision) as change:
                state = await self.state(run_id, context)
                if state.revision > revision:
                    return state
                await change.wait()
            if self._keeper is None:
                raise RunStoreError("This process ends: ask for the run again")

    async def _revisions(self, run_ids: Sequence[str]) -> dict[str, int]:
        return await self.read(lambda db: self.journal.revisions(db, run_ids))

    async def page(
        self,
        context: OperationContext,
        *,
        status: str | None,
        operation: str | None,
        limit: int,
        after: str | None,
    ) -> RunPage:
        """List the runs that a caller may see, the newest first."""
        if status is not None and status not in list(RunStatus):
            known = ", ".join(RunStatus)
            raise invalid_argument("/status", f"is not a status: {known}", "enum", subject="status")
        if operation is not None:
            enforce_storable(operation, "operation")
        await self._opened()
        limit = min(max(1, limit), _MAX_PAGE)
        start = _place(after)
        identity = context.identity
        if identity is None and not context.trusted:
            return RunPage(runs=[])
        owner: str | None
        owner, agent, _ = callers.owner_of(context)
        sees_all = identity is None or callers.has_scope(identity, READ, MANAGE)
        if sees_all:
            owner, agent = None, ""
        runs = await self.read(
            lambda db: self.journal.page(
                db, owner, agent or None, status, operation, start, limit + 1
            )
        )
        more = len(runs) > limit
        runs = runs[:limit]
        return RunPage(runs=runs, next=f"{runs[-1].created}-{runs[-1].id}" if more else None)

    async def cancel(self, run_id: str, context: OperationContext) -> RunState:
        """Cancel a run. No error and no change if it has ended.

        Raises:
            CallError: `RUN_NOT_FOUND`.
        """
        await self._visible(run_id, context, MANAGE, readable=False)
        by = self._name(context)
        await self.write(lambda db: self.journal.cancel(db, run_id, by))
        self._in_loop(self._cancel_here, run_id)
        self._changed(run_id)
        return await self._visible(run_id, context, READ, MANAGE, readable=False)

    def _cancel_here(self, run_id: str) -> None:
        session = None if self._executor is None else self._executor.session(run_id)
        if session is not None:
            session.cancel()

    async def answer(self, run_id: str, key: str, value: Any, context: OperationContext) -> bool:
        """Answer a question of a run; return False if it is not outstanding. The first answer wins.

        Raises:
            CallError: `RUN_NOT_FOUND`, or `VALIDATION_ERROR` if the answer does not match the question.
        """
        await self._visible(run_id, context, MANAGE)
        asked = None
        if is_storable(key):
            asked = await self.read(lambda db: self.journal.question(db, run_id, key))
        if asked is None:
            return False
        data = _answer_to(*asked, value)
        by = self._name(context)
        answered = await self.write(lambda db: self.journal.answer(db, run_id, key, data, by))
        self._in_loop(self._tell, run_id)
        self._changed(run_id)
        return answered

    async def signal(self, run_id: str, name: str, value: Any, context: OperationContext) -> None:
        """Send a signal to a run, which may not wait for it yet.

        Raises:
            CallError: `RUN_NOT_FOUND`, or `RUN_ENDED`.
        """
        await self._visible(run_id, context, MANAGE)
        enforce_storable(name, "name")
        data = _encoded(value, "The value of a signal", self.limits.input_bytes)
        by = self._name(context)
        if not await self.write(lambda db: self.journal.signal(db, run_id, name, data, by)):
            raise CallError(ErrorCode.RUN_ENDED, "The run has ended", {"run": run_id})
        self._in_loop(self._tell, run_id)
        self._changed(run_id)

    async def retry(
        self, run_id: str, context: OperationContext, *, ran: Any, not_run: bool
    ) -> RunState:
        """Run a failed, cancelled or unknown run again.

        Raises:
            CallError: `RUN_NOT_FOUND`, or `VALIDATION_ERROR` if it has another status, or the decision is missing.
        """
        state = await self._visible(run_id, context, MANAGE)
        data = None
        secrets: tuple[str, ...] = ()
        if ran is not msgspec.UNSET:
            data = _encoded(ran, "The result of the call", self.limits.result_bytes)
            operation = self.registry.get(state.operation)
            # A client may not know the operation.
            secrets = ("",) if operation is None else result_places(operation, ran)
        by = self._name(context)
        await self.write(
            lambda db: self.journal.retry(db, run_id, data, by, not_run=not_run, secrets=secrets)
        )
        self._in_loop(self._on_ready)
        self._changed(run_id)
        return await self.state(run_id, context)

    def _name(self, context: OperationContext) -> str:
        identity = context.identity
        return callers.OPERATOR if identity is None else cleaned(identity.account)


def _check(db: Connection) -> None:
    """Write something, which fails if the disk is full."""
    sql = (
        "INSERT INTO meta (name, value) VALUES ('checked', ?)"
        " ON CONFLICT (name) DO UPDATE SET value = excluded.value"
    )
    # Another value each time: SQLite does not write a page that stays as it is.
    db.count(sql, token_hex(8))


def _encoded(value: Any, what: str, most: int) -> bytes:
    """Return a value as JSON.

    Raises:
        CallError: `VALIDATION_ERROR` if it is not JSON, or too large.
    """
    try:
        data = canonical(as_json(value))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise invalid_argument("", "is not JSON", "type", subject=what) from error
    if len(data) > most:
        message = f"has {len(data)} bytes, more than the {most} that are stored"
        raise invalid_argument("", message, "maxLength", subject=what)
    return data


def _answer_to(kind: str, request: Any, value: Any) -> bytes:
    """Return the answer to a question as JSON.

    Raises:
        CallError: `VALIDATION_ERROR` if it does not match the question.
    """
    what = "The answer"
    if kind == "elicit":
        action = object_of(value).get("action")
        if action not in ("accept", "decline", "cancel"):
            message = (
                'needs an action: {"action": "accept", "content": {...}}, or "decline" or "cancel"'
            )
            raise invalid_argument("/action", message, "enum", subject=what)
        if action == "accept":
            validate_or_raise(
                from_schema(request["schema"]), value.get("content"), subject="answer"
            )
    elif not is_object(value):
        raise invalid_argument("", "must be an object", "type", subject=what)
    return _encoded(value, what, 256 * 1024)


def _place(after: str | None) -> tuple[int, str] | None:
    if after is None:
        return None
    created, _, run_id = after.partition("-")
    is_place = created.isdecimal() and len(created) < _MAX_DIGITS and is_storable(run_id)
    if not is_place or not run_id:
        raise invalid_argument("/after", "is not the next of a page", "format", subject="after")
    return int(created), run_id


def _database(url: str, password: str | None) -> Database:
    kind, colon, place = url.partition(":")
    if colon and kind == "sqlite" and place:
        return SQLiteDatabase(Path(place.removeprefix("//")))
    if colon and kind in ("postgresql", "postgres"):
        # Needs an extra.
        database: Database = import_module("operations.postgres").PostgresDatabase(url, password)
        return database
    # A URL may have a password.
    raise ValueError(
        f"{kind!r} is not the kind of a store of runs: use sqlite:PATH or postgresql://USER@HOST/DATABASE"
    )
