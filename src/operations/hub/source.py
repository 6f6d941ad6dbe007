"""A source of operations: one entry of a config, its state, and its connection. Python modules are opened here.

`Supervisor` opens a source in the background, retries with jitter, replaces it and closes it.

Rule 1: a source that fails does not affect any other.
Rule 2: when a source disconnects, its operations stay registered, and calls fail with `UNAVAILABLE`. They are removed
        when the source is closed.
Rule 3: to replace a source, the new one is opened first. The old one is closed some seconds after its last call has
        finished, and at the latest after the time limit of a call.
"""

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable, Generator, Iterable
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

from anyio import move_on_after

from operations._resilience import Backoff
from operations.caller_tokens import CallerToken
from operations.calls.monitoring import GroupMonitor
from operations.config import ConfigError, ConfigFile, modified_at
from operations.errors import OperationsError, RegistrationError
from operations.front.limits import Limits, call_seconds
from operations.registry import OperationRegistry
from operations.scanner import Skipped, scan_operations
from operations.specs import Operation
from operations.types import JSONObject

logger = logging.getLogger("operations.hub")

Kind: TypeAlias = Literal["local", "openapi", "mcp", "broker"]

_TABLES = {"openapi": "openapi", "mcp": "mcp", "broker": "brokers"}


class SourceState(StrEnum):
    """Whether a source can be called."""

    CONNECTING = "connecting"
    CONNECTED = "connected"
    DISCONNECTED = "disconnected"
    DISABLED = "disabled"


@dataclass(frozen=True, slots=True)
class ListedServer:
    """A server of an `mcp.json`; without an `entry`, the file cannot be read."""

    path: str
    entry: JSONObject | None = None

    other: str | None = None
    """The earlier file that has a server with the same namespace, which then cannot be used twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """An open source."""

    operations: Iterable[Any]
    """Its operations: a list, or a service whose operations may change."""

    origin: str
    """Its document, server or module, without secrets."""

    skipped: list[Skipped] = field(default_factory=list[Skipped])
    """Parts of the source that cannot be used, with the reason."""

    warnings: list[Skipped] = field(default_factory=list[Skipped])
    """Settings and parts of a document that are unknown or missing."""

    title: str = ""
    """Its own title."""

    problem: Callable[[], str | None] = lambda: None
    """Returns the reason why the source is not available; None if it is."""

    next_attempt: Callable[[], float | None] = lambda: None
    """Returns the time of the next connection attempt, by the loop's clock; None if none is planned."""

    calls: Callable[[], int] = lambda: 0
    """Returns the number of running calls on the source."""

    limit_calls: Callable[[int], None] | None = None
    """Changes the number of concurrent calls; None if the entry sets it."""

    monitor: GroupMonitor | None = None
    """Monitors the workers of a broker."""

    close: Callable[[], Awaitable[object]] | None = None
    """Closes the source."""

    def configure(self, file: ConfigFile) -> None:
        """Apply the limits of a config."""
        if self.limit_calls is not None:
            self.limit_calls(per_source(file))

    def attach(self, registry: OperationRegistry) -> None:
        """Let a service whose operations change update `registry`."""
        getattr(self.operations, "attach", _ignore)(registry)

    def detach(self, registry: OperationRegistry) -> None:
        """Stop a service whose operations change from updating `registry`."""
        getattr(self.operations, "detach", _ignore)(registry)

    async def aclose(self) -> None:
        """Close the source, if it has a connection."""
        if self.close is not None:
            await self.close()


def _by_id(opened: Opened) -> dict[str, Operation]:
    return {operation.spec.id: operation for operation in opened.operations}


def _ignore(_registry: OperationRegistry) -> None:
    """Do nothing: operations in a list do not change."""


@dataclass(slots=True, kw_only=True, eq=False)
class Source:
    """One entry of a config, and its state."""

    kind: Kind
    name: str
    entry: Any = None

    opened: Opened | None = None
    """The open source; it stays set while the connection is lost."""

    failure: str | None = None
    """The reason why the source could not be opened."""

    warnings: tuple[Skipped, ...] = ()
    """Settings and parts of a document that are unknown or missing."""

    seconds: float = 0
    """Seconds that opening took."""

    is_enabled: bool = True

    opens_at: float | None = None
    """The time of the next attempt after a failure, by the loop's clock."""

    made_of: Any = None
    """The table, secrets and document that the source was opened with."""

    @property
    def state(self) -> SourceState:
        """The current state."""
        if not self.is_enabled:
            return SourceState.DISABLED
        if self.opened is None:
            return SourceState.CONNECTING if self.failure is None else SourceState.DISCONNECTED
        return SourceState.CONNECTED if self.problem is None else SourceState.DISCONNECTED

    @property
    def problem(self) -> str | None:
        """The reason why the source is not available; None if it is."""
        if not self.is_enabled:
            return "it is disabled"
        if self.opened is not None:
            return self.opened.problem()
        return self.failure or "it is still connecting"

    @property
    def next_attempt(self) -> float | None:
        """The time of the next connection attempt, by the loop's clock; None if none is planned."""
        if self.opens_at is not None or self.opened is None:
            return self.opens_at
        return self.opened.next_attempt()

    @property
    def label(self) -> str:
        """The kind of the source, with its name unless it is local."""
        return self.kind if self.kind == "local" else f"{self.kind}:{self.name}"

    @property
    def names(self) -> tuple[str, str]:
        """The names by which an operator controls the source: `name` and `kind:name`."""
        return self.name, f"{self.kind}:{self.name}"

    @property
    def operations(self) -> tuple[str, ...]:
        """The ids of its current operations."""
        return () if self.opened is None else tuple(each.spec.id for each in self.opened.operations)

    @property
    def origin(self) -> str:
        """Its document, server or module."""
        return "" if self.opened is None else self.opened.origin

    @property
    def title(self) -> str:
        """Its own title."""
        return "" if self.opened is None else self.opened.title

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """Parts of the source that cannot be used."""
        return () if self.opened is None else tuple(self.opened.skipped)

    @property
    def problems(self) -> tuple[Skipped, ...]:
        """All warnings and skipped parts of an open source."""
        return (*self.warnings, *self.skipped)

    def is_called(self, wanted: str) -> bool:
        """Return whether a name identifies this source: its kind, its name, both, or the file that lists it."""
        names = (
            [self.name, self.entry.path] if isinstance(self.entry, ListedServer) else [self.name]
        )
        return wanted == self.kind or any(wanted in (each, f"{self.kind}:{each}") for each in names)


def limits_of(file: ConfigFile) -> Limits:
    """Return the limits of a config, which are the same at every entry point.

    Raises:
        ConfigError: If a value is wrong.
    """
    return Limits(**file.options(Limits, file.config.limits))


def per_source(file: ConfigFile) -> int:
    """Return the concurrency limit of one source: below that of a caller, so that other sources stay usable."""
    return max(1, limits_of(file).calls_per_caller * 3 // 4)


def file_times(file: ConfigFile) -> dict[Path, int | None]:
    """Return the files that a hub is built from, with their modification times."""
    documents = [each.document for each in file.config.openapi.values()]
    local = [file.resolve(each) for each in documents if "://" not in each]
    listings = [file.resolve(each) for each in file.config.mcp_json]
    secrets = [file.resolve(secret.file) for _, secret in file.secrets() if secret.file]
    paths = (file.path, *local, *listings, *secrets)
    return {path: modified_at(path) for path in paths if path is not None}


def fingerprint(source: Source, file: ConfigFile) -> Any:
    """Return everything that a source is built from: its table, its secrets and its document."""
    paths = {(_TABLES.get(source.kind, ""), source.name)}
    if getattr(source.entry, "delegate", False):
        paths.add(("access", "grants"))
    secrets: list[str | None] = []
    for key, secret in file.secrets():
        if key[:2] in paths:
            with suppress(ConfigError):
                secrets.append(file.secret(secret))
    document = getattr(source.entry, "document", "://")
    changed = None if "://" in document else modified_at(file.resolve(document))
    return source.entry, secrets, changed


# ------------------------------------------------------------ Python modules of the operator


@contextmanager
def importing_beside(file: ConfigFile) -> Generator[None]:
    """Make modules in the folder of the config importable by name, as `python -m` does, and print to standard error.

    Prints to standard output would be mixed with results or MCP messages.
    """
    folder = str(file.folder)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    with redirect_stdout(sys.stderr):
        yield


def load_setup(file: ConfigFile) -> Any:
    """Import the function that `setup` names.

    Raises:
        ConfigError: If it cannot be imported.
    """
    module, _, name = str(file.config.setup).partition(":")
    with importing_beside(file):
        try:
            return getattr(import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise file.fault(f"cannot be imported: {error}.", "setup") from error


def load_tokens(file: ConfigFile, values: Iterable[Any]) -> None:
    """Import the functions that return the tokens of callers, so that a missing function is reported at once.

    Raises:
        ValueError: If one cannot be imported.
    """
    with importing_beside(file):
        for value in values:
            if isinstance(value, CallerToken):
                value.load()


def open_modules(module: str, file: ConfigFile) -> Opened:
    """Scan a package, a folder or a file.

    Raises:
        FileNotFoundError: If it does not exist.
    """
    path = file.resolve(module)
    with importing_beside(file):
        found = scan_operations(path if path.exists() else module)
    return Opened(operations=found, origin=module, skipped=list(found.skipped))


# ------------------------------------------------------------ staying connected

FIRST_PAUSE = 0.5
LONGEST_PAUSE = 30.0
"""Upper bounds of the first pause and of any pause between two attempts, in seconds."""

QUIET_SECONDS = 5.0
"""Seconds without a call after which a replaced source is closed."""

_LOOK_SECONDS = 0.2

Open = Callable[[Source], Awaitable[Opened]]
"""Opens a source. Raises `OperationsError`, `OSError` or `ValueError` if that fails."""


class Supervisor:
    """Keeps one source open until it is closed.

    Args:
        source: The source, whose state is updated.
        open: Opens the source.
        registry: The registry for its operations.
        owner: Returns the label of the source that an operation id belongs to.
        drain_seconds: Seconds that running calls have to finish when the source is replaced or disabled.
    """

    def __init__(
        self,
        source: Source,
        open: Open,
        registry: OperationRegistry,
        *,
        owner: Callable[[str], str],
        drain_seconds: float,
    ) -> None:
        self.source = source
        self._open = open
        self._registry = registry
        self._owner = owner
        self._drain_seconds = drain_seconds
        self._backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE)
        self._given_warnings = source.warnings
        self._attempts = 0
        self._is_attempting = self._is_outdated = False
        self._attempted = asyncio.Event()
        self._again = asyncio.Event()
        self._closing = asyncio.Event()
        self._retired: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start connecting in the background."""
        self.source.is_enabled = True
        if self._task is None and not self._closing.is_set():
            self._task = asyncio.Task(self._run(), name=f"source {self.source.label}")

    async def attempted(self) -> None:
        """Wait until the first attempt has succeeded or failed."""
        await self._attempted.wait()

    def request(self, *, is_changed: bool = False) -> None:
        """Connect at once if the source is disconnected; replace it if it is connected.

        Args:
            is_changed: Whether the settings have changed, so that a running attempt is abandoned.
        """
        if self._closing.is_set():
            return
        self._attempted.clear()
        self._again.set()
        if is_changed and self._is_attempting and not self._is_outdated and self._task is not None:
            self._is_outdated = True
            self._task.cancel()
        self.start()

    async def open_again(self) -> None:
        """As `request`, but wait for the result."""
        self.request()
        await self._attempted.wait()

    async def disable(self) -> None:
        """Close the source and remove its operations, after its running calls have finished."""
        await self._stop()
        source = self.source
        source.is_enabled = False
        source.failure = source.made_of = None
        self._let_go()

    async def aclose(self) -> None:
        """Close the source and everything that it replaced, without waiting for calls."""
        self._closing.set()
        # It closes while an attempt to replace it ends: both may take seconds.
        self._let_go()
        await self._stop()
        self._let_go()
        if self._retired:
            await asyncio.wait(self._retired)

    @property
    def is_closed(self) -> bool:
        """Whether the source and its predecessors are closed."""
        return self._task is None and self.source.opened is None and not self._retired

    async def _stop(self) -> None:
        # It may have been started again in the meantime; the last request is effective.
        while (task := self._task) is not None:
            task.cancel()
            await asyncio.wait({task})
            if self._task is task:
                self._task = None
        self.source.opens_at = None
        # No further attempt follows: wake the callers that wait for one.
        self._attempted.set()

    async def _run(self) -> None:
        """Open the source, then again after a failure or on request, until it is cancelled."""
        task = cast("asyncio.Task[None]", asyncio.current_task())
        while True:
            self._again.clear()
            self._is_attempting, self._is_outdated = True, False
            try:
                is_open = await self._attempt()
            except asyncio.CancelledError:
                # The task itself may have been cancelled as well.
                if not self._is_outdated or task.uncancel():
                    raise
                continue
            finally:
                self._is_attempting = False
            if self._is_outdated:
                # A library ignored that its attempt was cancelled.
                task.uncancel()
            self._attempted.set()
            pause = None if is_open else self._backoff.pause()
            if pause is not None:
                self.source.opens_at = asyncio.get_running_loop().time() + pause
            with move_on_after(pause):
                await self._again.wait()
            self.source.opens_at = None

    async def _attempt(self) -> bool:
        """Open the source once and register its operations; return whether that succeeded."""
        source, loop = self.source, asyncio.get_running_loop()
        began = loop.time()
        self._attempts += 1
        try:
            opened = await self._open(source)
            try:
                self._register(opened)
            except BaseException:
                await opened.aclose()
                raise
        except asyncio.CancelledError:
            if self._closing.is_set() or cast("Any", asyncio.current_task()).cancelling():
                raise
            # A library cancelled its own wait; this task was not cancelled.
            self._failed("connecting was interrupted")
            return False
        except (OperationsError, OSError, ValueError) as error:
            self._failed(str(error) or type(error).__name__)
            return False
        except Exception as error:
            logger.exception("%s could not be opened", source.label)
            self._failed(f"{type(error).__name__}: {error}")
            return False
        old, source.opened = source.opened, opened
        source.seconds = loop.time() - began
        if source.failure is not None:
            logger.info("%s is connected", source.label)
        source.failure = None
        self._backoff.reset()
        if old is not None:
            self._retire(old)
        return True

    def _failed(self, reason: str) -> None:
        source = self.source
        if reason != source.failure:
            # Commands report the failures of their first attempts themselves.
            level = logging.WARNING if self._attempts > 1 else logging.INFO
            logger.log(level, "%s cannot be opened and will be retried: %s", source.label, reason)
        source.failure = reason

    def _register(self, opened: Opened) -> None:
        """Replace the registered operations of a source by its current ones.

        Raises:
            RegistrationError: If another source has one of the ids; the registry is then unchanged.
        """
        registry, source = self._registry, self.source
        before = {} if source.opened is None else _by_id(source.opened)
        taken = [
            operation_id
            for operation_id in _by_id(opened)
            if registry.registered(operation_id) is not None
            and (operation_id not in before or registry.imported(before[operation_id]) is None)
        ]
        source.warnings = (*self._given_warnings, *opened.warnings)
        if taken and source.kind != "broker":
            raise RegistrationError(
                f"{taken[0]} is already registered by {self._owner(taken[0])}: rename one of them"
            )
        if taken:
            # The operator may not control the ids of workers: register the operations whose ids are free.
            source.warnings += tuple(self._conflicts(taken))
            cast("Any", opened.operations).leave_out(taken)
        operations = _by_id(opened)
        imported = [registry.restricted(new, before.get(key)) for key, new in operations.items()]
        registry.register_all(imported, replace=True)
        for operation_id in before.keys() - operations.keys():
            registry.remove_imported(before[operation_id])
        opened.attach(registry)

    def _conflicts(self, taken: list[str]) -> list[Skipped]:
        """Return warnings about ids that are not imported because another source has them, one per source."""
        by_owner: dict[str, list[str]] = {}
        for operation_id in taken:
            by_owner.setdefault(self._owner(operation_id), []).append(operation_id)
        name = self.source.name
        remedy = f'set namespace = "{name}" in [brokers.{name}] to have both'
        return [
            Skipped(
                ", ".join(ids[:3]) + (f" and {len(ids) - 3} more" if len(ids) > 3 else ""),
                f"not imported, because {owner} has the same: {remedy}",
            )
            for owner, ids in by_owner.items()
        ]

    def _let_go(self) -> None:
        """Remove the operations of the source, and close it later."""
        opened, self.source.opened = self.source.opened, None
        if opened is not None:
            opened.detach(self._registry)
            for operation in opened.operations:
                self._registry.remove_imported(operation)
            self._retire(opened)

    async def _quiet(self, opened: Opened) -> None:
        """Wait until an open source has had no call for some seconds, or is closed.

        Some seconds, because a call may be about to start or wait before a retry.
        """
        loop = asyncio.get_running_loop()
        since = loop.time()
        while not self._closing.is_set():
            # Asked before the time is compared: a blocked event loop is not a pause between calls.
            if opened.calls():
                since = loop.time()
            elif loop.time() - since >= QUIET_SECONDS:
                return
            with move_on_after(_LOOK_SECONDS):
                await self._closing.wait()

    def _retire(self, opened: Opened) -> None:
        """Close an open source after its running calls have finished; it no longer updates the registry."""
        opened.detach(self._registry)
        limits = (call_seconds(each, self._drain_seconds) for each in opened.operations)
        seconds = max(limits, default=self._drain_seconds)

        async def close() -> None:
            try:
                with move_on_after(seconds):
                    await self._quiet(opened)
            finally:
                try:
                    await asyncio.shield(asyncio.ensure_future(opened.aclose()))
                except Exception:
                    logger.exception("%s did not close cleanly", self.source.label)

        task = asyncio.Task(close(), name=f"closing {self.source.label}")
        self._retired.add(task)
        task.add_done_callback(self._retired.discard)
