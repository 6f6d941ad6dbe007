"""The sandbox: scripts in worker processes of `pydantic-monty`, which have no files, network, environment or clock.

Only this module drives the interpreter.

Rule 1: a script gets nothing of this process but JSON values, and names that lead back to `script.py`.
Rule 2: a worker that crashes, hangs or is killed costs its own script only.
Rule 3: the workers are driven from threads of our own: the interpreter's asyncio client may abort the process while
        Python ends.
"""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from threading import Lock
from typing import Any, Final, TypeAlias
from uuid import UUID

import msgspec

from operations.base.errors import CallError, MissingExtraError
from operations.base.types import JSONObject
from operations.code.config import CodeLimits

try:
    import pydantic_monty as monty
except ModuleNotFoundError as error:
    raise MissingExtraError("operations.code", extra="code") from error

VERSION: Final = monty.__version__

_GRACE: Final = 2.0
"""Seconds after which a worker is killed that has used up its time."""

_CHECK_SECONDS: Final = 10.0
"""The time for the type check of a script."""

_SUSPENSIONS: Final = 8
"""Suspensions of the interpreter for each call of a script: the call, its result, names, the clock."""

_SIGNALS: Final = getattr(signal, "SIGKILL", signal.SIGTERM)


class SandboxError(Exception):
    """A script ended with an error of its own.

    Attributes:
        kind: The class of the exception.
        message: Its message.
        line: The line of the script, if known.
        trace: The traceback.
        cause: The error of a call that the script has not caught.
    """

    def __init__(self, kind: str, message: str, line: int | None, trace: str) -> None:
        super().__init__(message)
        self.kind, self.message, self.line, self.trace = kind, message, line, trace
        self.cause: CallError | None = None


class RejectedError(Exception):
    """The type check has found errors.

    Attributes:
        findings: The diagnostics of the checker.
    """

    def __init__(self, findings: list[JSONObject]) -> None:
        super().__init__("rejected")
        self.findings = findings


_ACCEPTED: Final = "`return` statement outside of a function"
"""What the checker rejects and the interpreter accepts."""


class CrashedError(Exception):
    """The worker is gone.

    Attributes:
        timed_out: Whether it was killed because it did not stop in time.
    """

    def __init__(self, message: str, *, timed_out: bool) -> None:
        super().__init__(message)
        self.timed_out = timed_out


@dataclass(frozen=True, slots=True)
class Finished:
    """The script has ended."""

    value: Any


@dataclass(frozen=True, slots=True)
class Called:
    """The script calls a function of the host; the worker waits for `answer` or `defer`."""

    id: int
    target: UUID | None
    name: str
    arguments: tuple[Any, ...]
    named: Mapping[str, Any]
    offset: int
    """The place of the call in the script in bytes; -1 if it is not known."""

    is_host: bool
    """Whether it is a function of the operating system, such as the clock."""


@dataclass(frozen=True, slots=True)
class Looked:
    """The script reads a name, or an attribute of `target`, that it has not defined."""

    name: str
    target: UUID | None


@dataclass(frozen=True, slots=True)
class Waits:
    """The script waits for at least one of these calls."""

    ids: list[int]


Turn: TypeAlias = Finished | Called | Looked | Waits

_NO_VALUE: Final = object()


ClassProxy: Final = monty.MontyClassProxy
"""An object of a class that the script defines."""


class Namespace:
    """An object whose attributes are operations."""


class Function:
    """An operation as a value."""


class Sandbox:
    """The worker processes.

    Args:
        processes: The largest number of them.
    """

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._pool: Any = None
        self._threads: ThreadPoolExecutor | None = None
        self._opening = Lock()

    def _open(self) -> Any:
        with self._opening:
            if self._pool is None:
                pool = monty.Monty(
                    min_processes=1,
                    max_processes=self._processes,
                    feed_duration_limit_grace=_GRACE,
                    turn_duration_limit_grace=_GRACE,
                )
                self._pool = pool.__enter__()
            return self._pool

    def run(self, function: Callable[..., Any], *arguments: Any) -> "asyncio.Future[Any]":
        """Run a function of the interpreter in a thread."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._processes + 1, "operations-code")
        return asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    @asynccontextmanager
    async def session(self, limits: CodeLimits, stubs: str | None) -> AsyncGenerator["Session"]:
        """Yield a worker for one script, with stubs for the type check."""
        pool = await self.run(self._open)
        checkout = pool.checkout(
            script_name="script.py",
            limits={
                "max_memory": limits.memory,
                "max_feed_duration_secs": limits.cpu,
                "max_suspensions": limits.calls * _SUSPENSIONS + 1_000,
                "max_recursion_depth": 500,
            },
            type_check=stubs is not None,
            type_check_stubs=stubs,
            type_check_format="json",
            os_policy={
                "datetime": "call_host",
                "sleep": "call_host",
                "random_start": "call_host",
            },
        )
        session = Session(self, checkout, limits.cpu)
        entering = self.run(session.enter)
        try:
            await asyncio.shield(entering)
            yield session
        finally:
            if not entering.done():
                with suppress(Exception):
                    await entering
            await session.end()

    async def aclose(self) -> None:
        """End the workers."""
        pool, self._pool = self._pool, None
        if pool is not None:
            await self.run(pool.__exit__, None, None, None)
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False)


class Session:
    """One script in a worker."""

    def __init__(self, sandbox: Sandbox, checkout: Any, seconds: float) -> None:
        self._sandbox, self._session, self._seconds = sandbox, checkout, seconds
        self._pid: int | None = None
        self._snapshot: Any = None
        self._turn: asyncio.Future[Any] | None = None
        self._printed: list[str] = []
        self._room = 0

    def enter(self) -> None:
        """Take a worker."""
        self._session.__enter__()
        self._pid = self._session.worker_pid

    @property
    def pid(self) -> int | None:
        """The process of the worker."""
        return self._pid

    @property
    def printed(self) -> str:
        """What the script has printed."""
        return "".join(self._printed)

    async def prepare(self, source: str) -> None:
        """Run a part of our own before the script."""
        await self._drive(lambda: self._session.feed_start(source, skip_type_check=True))

    async def start(
        self, script: str, inputs: Mapping[str, Any], room: int, *, checks: bool
    ) -> Turn:
        """Begin a script; check its types first.

        Args:
            script: The script.
            inputs: Its names.
            room: The bytes that it may print.
            checks: Whether its types are checked.

        Raises:
            RejectedError: If it has errors; then nothing has run.
            SandboxError: If it raises an exception.
            CrashedError: If the worker ends.
        """
        self._room = room

        def feed(*, unchecked: bool) -> Any:
            return self._session.feed_start(
                script,
                inputs=dict(inputs),
                print_callback=self._print,
                skip_type_check=unchecked,
            )

        try:
            return await self._drive(lambda: feed(unchecked=not checks), checks=checks)
        except RejectedError as error:
            if any(each.get("message") != _ACCEPTED for each in error.findings):
                raise
        return await self._drive(lambda: feed(unchecked=True))

    async def answer(self, value: Any) -> Turn:
        """Return a value to the script."""
        snapshot = self._snapshot
        return await self._drive(lambda: snapshot.resume({"return_value": value}))

    async def raise_error(self, error: JSONObject) -> Turn:
        """Raise an exception in the script."""
        snapshot = self._snapshot
        return await self._drive(lambda: snapshot.resume(error))

    async def refuse(self) -> Turn:
        """Reject a function of the operating system."""
        return await self._drive(self._snapshot.resume_not_handled)

    async def defer(self) -> Turn:
        """Let the script go on until it needs the result of the call."""
        snapshot = self._snapshot
        return await self._drive(lambda: snapshot.resume({"future": ...}))

    async def name(self, value: Any = _NO_VALUE) -> Turn:
        """Give a value to a name; without one, the name is not defined."""
        snapshot = self._snapshot
        if value is _NO_VALUE:
            return await self._drive(snapshot.resume)
        return await self._drive(lambda: snapshot.resume(value=value))

    async def settle(self, results: Mapping[int, JSONObject]) -> Turn:
        """Give the results of calls."""
        snapshot = self._snapshot
        return await self._drive(lambda: snapshot.resume(dict(results)))

    async def _drive(self, work: Callable[[], Any], *, checks: bool = False) -> Turn:
        """Let the worker run until it needs something."""
        turn = self._turn = self._sandbox.run(work)
        try:
            # The limits of the interpreter do not include the time of the checker.
            async with asyncio.timeout(self._seconds + _CHECK_SECONDS if checks else None):
                snapshot = await asyncio.shield(turn)
        except monty.MontyTypingError as error:
            found = _findings(error.display())
            left = [each for each in found if each.get("message") != _ACCEPTED]
            raise RejectedError(left or found) from None
        except monty.MontyCrashedError as error:
            raise CrashedError(str(error), timed_out=error.timed_out) from None
        except TimeoutError:
            self.kill()
            raise CrashedError("the check took too long", timed_out=True) from None
        except monty.MontyError as error:
            raise _script_error(error) from None
        self._snapshot = snapshot
        return _turn_of(snapshot)

    def _print(self, _stream: str, text: str) -> None:
        self._room -= len(text.encode("utf-8", "replace"))
        if self._room < 0:
            raise MemoryError(PRINTS_TOO_MUCH)
        self._printed.append(text)

    def kill(self) -> None:
        """End the worker at once."""
        if self._pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self._pid, _SIGNALS)

    async def end(self) -> None:
        """Give the worker back; kill it if the script still runs."""
        turn = self._turn
        if turn is not None and not turn.done():
            self.kill()
            with suppress(Exception):
                await turn
        self._pid = None
        with suppress(monty.MontyError):
            await self._sandbox.run(self._session.__exit__, None, None, None)


PRINTS_TOO_MUCH: Final = "operations: the script prints too much"


def _turn_of(snapshot: Any) -> Turn:
    if isinstance(snapshot, monty.MontyComplete):
        return Finished(snapshot.output)
    if isinstance(snapshot, monty.FutureSnapshot):
        return Waits(list(snapshot.pending_call_ids))
    if isinstance(snapshot, monty.NameLookupSnapshot):
        return Looked(snapshot.variable_name, snapshot.object_id)
    position = snapshot.position
    is_known = position.filename.startswith("<python-input")
    return Called(
        snapshot.call_id,
        snapshot.object_id,
        str(snapshot.function_name),
        snapshot.args,
        snapshot.kwargs,
        position.start if is_known else -1,
        snapshot.is_os_function,
    )


def _script_error(error: Any) -> SandboxError:
    inner = error.exception()
    frames: list[Any] = error.traceback() if hasattr(error, "traceback") else []
    line = frames[-1].line if frames else None
    shown = error.display() if hasattr(error, "display") else str(error)
    head = error.display("type-msg") if hasattr(error, "traceback") else ""
    kind = head.partition(":")[0] if head else type(inner).__name__
    return SandboxError(kind, str(inner), line, shown)


def _findings(text: str) -> list[JSONObject]:
    try:
        found = msgspec.json.decode(text, type=list[dict[str, Any]])
    except msgspec.DecodeError:
        found = [{"message": text[:2_000]}]
    return found


def instance(value: Any) -> Any:
    """Return an object as a value for a script, which can only call it and read its attributes through the host."""
    return monty.ClassInstance(value)
