"""A hub: all sources of an `operations.toml` in one registry (`hub.registry`) and one application (`hub.app`).

Rule 1: sources are opened concurrently and kept open. A failed source is reported and retried; it does not affect the
        others.
Rule 2: the code for a kind of source is imported only if the config has such a source.
Rule 3: a command may need only some sources (`SourceFilter`); the others stay closed until a handler calls one of their
        operations.
"""

import asyncio
import inspect
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from functools import cached_property
from pathlib import Path
from time import monotonic
from typing import Any

from anyio import move_on_after

from operations.authority import Authority
from operations.authority.grants import PREFIX, GrantError
from operations.base.errors import CallError, ErrorCode, OperationsError, operation_not_found
from operations.base.files import expanded
from operations.base.tasks import cancel_tasks
from operations.base.text import suggestion
from operations.config import FILE_NAME, ConfigFile, load_config
from operations.contract.access import Identity
from operations.contract.context import OperationContext
from operations.contract.envelopes import ResponseEnvelope
from operations.contract.specs import OperationSpec
from operations.front.config import ASGIApp
from operations.front.front import Front
from operations.hub.journal import recall_ids
from operations.hub.opening import (
    Access,
    code_of,
    grants_of,
    load_setup,
    open_source,
    opened_authority,
    runs_of,
    sources_of,
)
from operations.hub.place import HubPlace
from operations.hub.recording import opened_sinks
from operations.hub.source import (
    ALL,
    Source,
    SourceFilter,
    SourceState,
    configure,
    fingerprint,
    times_read,
)
from operations.hub.supervisor import Supervisor
from operations.recorder.recorder import Sink
from operations.registry.registry import OperationRegistry
from operations.runs import Runs
from operations.sources.code import Code
from operations.sources.contract import Opened
from operations.telemetry.config import TelemetryConfig
from operations.tools.config import ToolConfig
from operations.tools.settings import configure_tools

__all__ = ["ALL", "Hub", "Source", "SourceFilter", "SourceState", "open_hub"]

_OWN = ("approvals", "code", "hub", "results")
"""The namespaces of operations that the hub itself adds."""

_FAILED = frozenset({ErrorCode.UNAVAILABLE, ErrorCode.TIMEOUT, ErrorCode.EXECUTION_ERROR})
_ALL_FAILED = 5
"""Calls that must fail, with one of these codes and without a success, before a source counts as failing."""

_START_SECONDS = 30.0
"""Seconds that a hub is not ready because its sources are connecting for the first time."""


class Hub:
    """A registry, the sources of its operations, and the application that serves them.

    Attributes:
        registry: The operations of all open sources.
        file: The config.
        wanted: The sources that this hub opens.
        resolvers: Further `IdentityResolver`s of the application, which `setup` may add.
    """

    def __init__(
        self,
        registry: OperationRegistry,
        file: ConfigFile,
        wanted: SourceFilter,
        build_app: Callable[["Hub"], ASGIApp],
    ) -> None:
        self.registry = registry
        registry.follow_sources(
            is_absent=self._may_be_absent, awaits_any=lambda: bool(self.absent())
        )
        self.file = file
        self.wanted = wanted
        self._build_app = build_app
        self.sinks: dict[str, Sink] = {}
        """What records calls, by the name of its table below `record`."""
        self.tools = configure_tools(registry, tools_of(file))
        """The settings of `[tools]`."""
        self.file_times = times_read(file)
        """The modification times of the files that this hub was built from."""

        self.code: Code | None = None
        """The code of the modules, if it is imported again when it changes."""
        self.code_mode: Any = None
        """`operations.code.Code`, if the file has the table [code]."""
        self.problem: str | None = None
        """Why the current version of the files cannot be used, so that the previous one stays in effect."""
        self.on_outcome: Callable[[], object] = lambda: None
        """Called after each attempt to apply changed files."""

        self.resolvers: list[Any] = []
        self.fronts: list[Front] = []
        """The fronts of this hub's servers, which limit and admit their callers."""
        self.guest_fronts: list[Front] = []
        """Those that never admit a caller without a credential."""
        self.reload_others: Callable[[], None] = lambda: None
        """Makes the other processes that serve the same config read it again."""

        self.on_reload: list[Callable[[], None]] = []
        """Called after each reload, to apply the parts of the file that the application uses."""

        self.supervisors: list[Supervisor] = []
        self.changing = asyncio.Lock()
        """Held while a config is applied, so that changes do not overlap."""

        self._removed: list[Supervisor] = []
        self._started_at = monotonic()
        self._judged: dict[str, tuple[int, int]] = {}
        """The answered calls of each source, and the failed ones at that time, by full name."""
        # Removed with the registry.
        registry.count_calls(time_all=False)
        self._by_id: dict[str, Source] = {}
        self._indexed = -1

    @property
    def sources(self) -> list[Source]:
        """The selected sources, in the order of the config."""
        return [supervisor.source for supervisor in self.supervisors]

    @cached_property
    def app(self) -> ASGIApp:
        """The ASGI application that `operations serve` runs, with the HTTP API, MCP, WebSocket and console.

        Raises:
            ConfigError: If a key cannot be read.
        """
        return self._build_app(self)

    @cached_property
    def access(self) -> Access:
        """The callers of `[access]`.

        Raises:
            ConfigError: If a key cannot be read.
        """
        return Access(self.file, self.registry.authority.store)

    @property
    def is_up(self) -> bool:
        """Whether the server of this hub accepts calls; False while it shuts down."""
        return self.registry.authority.approvals.is_up()

    def serve_authority(self, is_up: Callable[[], bool] = lambda: True) -> None:
        """Register the operations that answer approvals, and open what sinks write to; every entry point needs both.

        Args:
            is_up: Returns False while the server shuts down.

        Raises:
            OperationsError: If a sink cannot be used.
        """
        authority = self.registry.authority
        for sink in self.sinks.values():
            sink.open()
        authority.approvals.is_up = is_up
        self.registry.register_object(authority.approvals, replace=True)

    # ------------------------------------------------------------ opening

    async def open(self, sources: Iterable[Source], wait: float | None) -> None:
        """Open sources concurrently, and keep them open.

        Late kinds are opened last, one by one: their operations are registered only if no other source has the id.

        Args:
            sources: The sources to open.
            wait: Seconds to wait for each source to connect or fail; None for no limit.
        """
        for source in sources:
            self.supervisors.append(self._supervise(source))
        started = [each for each in self.supervisors if each.source.is_enabled]
        late = [each for each in started if each.source.of.is_late]
        others = [each for each in started if not each.source.of.is_late]
        with move_on_after(wait):
            for some in (others, *([each] for each in late)):
                _start(some)
                await asyncio.gather(*(each.attempted() for each in some))
        _start(started)

    async def connected(self) -> AsyncGenerator[Source]:
        """Yield each enabled source when it has connected for the first time; end when all have."""
        ready = asyncio.Queue[Source]()
        waiting = [each for each in self.supervisors if each.source.is_enabled]

        async def wait(supervisor: Supervisor) -> None:
            await supervisor.connected.wait()
            ready.put_nowait(supervisor.source)

        tasks = [asyncio.Task(wait(each)) for each in waiting]
        try:
            for _ in tasks:
                yield await ready.get()
        finally:
            await cancel_tasks(*tasks)

    async def settled(self, seconds: float) -> None:
        """Wait until each source has connected or failed, for at most this many seconds."""
        enabled = [each for each in self.supervisors if each.source.is_enabled]
        with move_on_after(seconds):
            await asyncio.gather(*(each.attempted() for each in enabled))

    async def remove(self, supervisor: Supervisor) -> None:
        """Close a source permanently, after its running calls have finished."""
        await supervisor.disable()
        self.supervisors.remove(supervisor)
        self._removed = [each for each in self._removed if not each.is_closed]
        self._removed.append(supervisor)

    def _supervise(self, source: Source) -> Supervisor:
        return Supervisor(
            source,
            self._open,
            self.registry,
            owner=self._owner,
            drain_seconds=self.file.config.limits.timeout,
        )

    async def _open(self, source: Source) -> Opened:
        source.made_of = fingerprint(source, self.file)
        opened = await open_source(source, self.file)
        # The file may have changed meanwhile.
        configure(opened, self.file)
        return opened

    def _owner(self, operation_id: str) -> str:
        source = self.source_of(operation_id)
        return "this process" if source is None else source.label

    async def aclose(self) -> None:
        """Close all sources."""
        await asyncio.gather(*(each.aclose() for each in (*self.supervisors, *self._removed)))

    def supervisor(self, name: str) -> Supervisor:
        """Return the supervisor of a source, by name or `kind:name`.

        Raises:
            KeyError: If there is no such source, or more than one.
        """
        found = [
            each for each in self.supervisors if name in (each.source.name, each.source.full_name)
        ]
        if len(found) != 1:
            raise KeyError(name)
        return found[0]

    # ------------------------------------------------------------ lookup

    def source_of(self, operation_id: str) -> Source | None:
        """Return the source that an operation comes from."""
        revision = self.registry.revision
        if self._indexed != revision:
            self._indexed = revision
            self._by_id = {
                self.registry.current_id(each): source
                for source in self.sources
                for each in source.operations
            }
        return self._by_id.get(operation_id)

    @property
    def offered(self) -> int:
        """The number of operations of all sources and of the function `setup`."""
        return self.set_up + sum(
            self.source_of(spec.id) is not None for spec in self.registry.specs()
        )

    @property
    def set_up(self) -> int:
        """The number of operations that the function `setup` has registered."""
        return sum(
            self.source_of(spec.id) is None and spec.namespace not in _OWN
            for spec in self.registry.specs()
        )

    def has_namespace(self, namespace: str) -> bool:
        """Return whether a source is called `namespace` or has operations in it."""
        return any(
            source.name == namespace
            or any(each.partition(".")[0] == namespace for each in source.operations)
            for source in self.sources
        )

    def absent(self, namespace: str | None = None) -> list[Source]:
        """Return the sources that are not available, in one namespace or in all."""
        return [
            source
            for source in self.sources
            if source.is_enabled and source.problem is not None and namespace in (None, source.name)
        ]

    def _may_be_absent(self, namespace: str) -> bool:
        """Return whether a source that is not available may have operations of a namespace."""
        return any(
            namespace == source.name or (source.of.is_late and source.opened is None)
            for source in self.absent()
        )

    def failing(self) -> dict[str, str]:
        """Return the connected sources whose calls all fail, by full name, with the last reason.

        All calls since the last success that an earlier look has seen: a description that can be read says nothing
        about whether the API behind it works, or accepts our credential.
        """
        outcomes: dict[str, list[int]] = {}
        codes: dict[str, str] = {}
        for operation_id, series in self.registry.counters or ():
            source = self.source_of(operation_id)
            if source is None or source.kind == "local":
                continue
            found = outcomes.setdefault(source.full_name, [0, 0])
            found[0] += series.untimed
            for code, count in series.codes.items():
                found[code in _FAILED] += count
                if code in _FAILED:
                    codes[source.full_name] = code
        failing: dict[str, str] = {}
        for name, (answered, failed) in outcomes.items():
            before, base = self._judged.get(name, (0, 0))
            if answered > before:
                base = failed
            self._judged[name] = answered, base
            if failed - base >= _ALL_FAILED:
                failing[name] = f"all of its last {failed - base} calls failed, with {codes[name]}"
        return failing

    @property
    def is_starting(self) -> bool:
        """Whether a source is still connecting for the first time, and the hub started a short time ago."""
        return monotonic() < self._started_at + _START_SECONDS and any(
            source.state is SourceState.CONNECTING for source in self.sources
        )

    def spec(self, operation_id: str) -> OperationSpec:
        """Return the contract of one operation.

        Raises:
            CallError: `OPERATION_NOT_FOUND` with a suggestion; `UNAVAILABLE` if a missing source may have it.
        """
        spec = self.registry.get_spec(operation_id)
        if spec is not None:
            return spec
        self.enforce_open(operation_id)
        raise self._not_found(operation_id)

    def _not_found(self, operation_id: str) -> CallError:
        known, recalled = (spec.id for spec in self.registry.specs()), recall_ids(self.file)
        near = suggestion(operation_id, {*known, *recalled} - {operation_id})
        namespace = operation_id.partition(".")[0]
        is_unknown = operation_id not in recalled and self.has_namespace(namespace)
        missing = ", ".join(
            source.label
            for source in (() if is_unknown else self.absent())
            if operation_id in recalled
            or (source.of.is_late and source.entry.options.get("namespace") in (None, namespace))
        )
        if missing:
            message = f"no connected source has {operation_id}, and these are not available: {missing}.{near}"
            return CallError(ErrorCode.UNAVAILABLE, message)
        message = f"There is no operation {operation_id!r}.{near}".removesuffix(".")
        return operation_not_found(operation_id, message)

    def enforce_open(self, operation_id: str) -> None:
        """Raise an error if the source of an operation is not connected.

        Raises:
            CallError: `UNAVAILABLE`, with the sources and reasons.
        """
        absent = self.absent(operation_id.partition(".")[0])
        if absent:
            reasons = "\n".join(f"{each.label} is not: {each.problem}" for each in absent)
            message = f"{operation_id} is not available, because {reasons}"
            raise CallError(ErrorCode.UNAVAILABLE, message)

    async def identity(self, name: str) -> Identity | None:
        """Return the identity of a caller in `[access.keys]` or of a grant; None for `anonymous`.

        Raises:
            ConfigError: If there is no such caller.
            CallError: `ACCESS_DENIED` if the grant is not valid.
        """
        if not self.is_grant(name):
            return self.named_identity(name)
        try:
            return await self.access.grant(name)
        except GrantError as error:
            raise CallError(ErrorCode.ACCESS_DENIED, f"Access denied: {error}") from None

    def is_grant(self, name: str) -> bool:
        """Return whether the name of a caller is a grant."""
        return self.file.config.access.grants is not None and name.startswith(PREFIX)

    def named_identity(self, name: str) -> Identity | None:
        """As `identity`, without reading revocations.

        Raises:
            ConfigError: If there is no such caller.
            GrantError: If the grant is not valid.
        """
        if self.is_grant(name) and self.access.grants is not None:
            return self.access.grants.identify(name)
        keys = self.file.config.access.keys
        if name in keys:
            return Identity(name, **self.file.options(Identity, keys[name]))
        if name == "anonymous":
            return None
        if name.startswith(PREFIX):
            # A grant is a secret.
            raise self.file.error("grants are not accepted without [access.grants].")
        known = ", ".join([*keys, "anonymous"])
        hint = suggestion(name, keys) or f" Known: {known}."
        raise self.file.error(f"there is no caller {name!r} in [access.keys].{hint}")


def load_code(hub: Hub, file: ConfigFile) -> bool:
    """Import the current version of the modules of a config; return whether it can be used."""
    place = HubPlace(file)
    with place.importing():
        paths = [place.folder / expanded(each) for each in file.config.modules]
        sources = zip(paths, file.config.modules, strict=True)
        is_usable = hub.code is not None and hub.code.load(
            path if path.exists() else name for path, name in sources
        )
    hub.problem = None if hub.code is None else hub.code.problem
    return is_usable


def tools_of(file: ConfigFile) -> dict[str, ToolConfig]:
    """Return the settings of `[tools]`, by pattern."""
    return {
        pattern: ToolConfig(**file.options(ToolConfig, entry))
        for pattern, entry in file.config.tools.items()
    }


def _start(supervisors: Iterable[Supervisor]) -> None:
    for supervisor in supervisors:
        # It may have been disabled in the meantime.
        if supervisor.source.is_enabled:
            supervisor.start()


# ------------------------------------------------------------ opening a hub


@asynccontextmanager
async def open_hub(
    config: ConfigFile | Path | str = FILE_NAME,
    wanted: SourceFilter = ALL,
    *,
    wait: float | None = 30,
    works: bool = False,
    develops: bool = False,
) -> AsyncGenerator[Hub]:
    """Open the sources of a config and keep them connected for the duration of an `async with` block.

    A source that cannot be reached is retried in the background.

    Args:
        config: The path of an `operations.toml` or `mcp.json`, or a loaded config.
        wanted: The sources to open; by default all.
        wait: Seconds to wait for each source to connect or fail before the block begins.
        works: Whether to work on the runs of `[runs]`, as a server does; otherwise they are only started and read.
        develops: Whether `operations.hub.reloading.following` imports changed modules again.

    Raises:
        ConfigError: If the file cannot be used.
    """
    # Before anything of the operator is imported.
    code = Code() if develops else None
    file = config if isinstance(config, ConfigFile) else load_config(Path(config))
    settings, lazy = file.config, _LazySources()
    # A single call does not repeat the warning of the hub.
    level = logging.WARNING if wanted.operation is None else logging.INFO
    async with opened_authority(file) as authority, AsyncExitStack() as outer:
        registry = OperationRegistry(
            output=settings.output,
            max_threads=settings.limits.threads,
            remote=None if wanted.operation is None else lazy,
            authority=authority,
            runs=_runs(file, authority, works=works),
        )
        # Sources are connected on this loop, so that `registry.sync` must call them here.
        registry.loop = asyncio.get_running_loop()
        hub = lazy.hub = Hub(registry, file, wanted, _build_app)
        # Closed last, because calls end while the registry is closed.
        hub.sinks = outer.enter_context(opened_sinks(file, level))
        for sink in hub.sinks.values():
            registry.record(sink)
        # Close the sources also if opening is interrupted.
        async with aclosing(hub), aclosing(registry), AsyncExitStack() as stack:
            if code is not None:
                hub.code = code
                load_code(hub, file)
            _start_telemetry(hub, stack)
            if settings.setup is not None:
                await _run_setup(hub, stack)
            runs_code = wanted.operation is not None and wanted.operation.startswith("code.")
            is_saved = settings.code is not None and wanted.operation in settings.code.saved
            if settings.code is not None or runs_code:
                hub.code_mode = code_of(file, registry)
                registry.register_all(hub.code_mode)
            # A script may call any operation.
            if wanted.operation is None or runs_code or is_saved:
                await hub.open(filter(wanted.includes, sources_of(file)), wait)
            else:
                await lazy.open(wanted.operation)
            if registry.run_store is not None:
                # Now that the operations are there.
                await registry.run_store.open_when_up()
            yield hub


def _runs(file: ConfigFile, authority: Authority, *, works: bool) -> Runs | None:
    if file.config.runs is None:
        return None
    return runs_of(file, executes=works, grants=grants_of(file, store=authority.store))


def _build_app(hub: Hub) -> ASGIApp:
    from operations.hub.app import build_app  # noqa: PLC0415 - needs extras

    return build_app(hub)


def _start_telemetry(hub: Hub, stack: AsyncExitStack) -> None:
    telemetry = hub.file.options(TelemetryConfig, hub.file.config.telemetry)
    if telemetry.get("endpoint") is None:
        return
    from operations.telemetry.otlp import exporting  # noqa: PLC0415 - needs an extra

    sending = exporting(hub.registry, **telemetry)
    sending.__enter__()
    # Sending the remaining data may take seconds: let calls continue meanwhile.
    stack.push_async_callback(asyncio.to_thread, sending.__exit__, None, None, None)


async def _run_setup(hub: Hub, stack: AsyncExitStack) -> None:
    """Call the function `setup`: a plain or coroutine function, a generator, or one that returns a context manager."""
    function = load_setup(hub.file)
    if inspect.isasyncgenfunction(function):
        function = asynccontextmanager(function)
    try:
        started: Any = function(hub)
        if inspect.isawaitable(started):
            await started
        elif started is not None:
            await stack.enter_async_context(started)
    except OperationsError:
        raise
    except Exception as error:
        raise hub.file.error(f"failed with {type(error).__name__}: {error}.", "setup") from error


class _LazySources:
    """The remote of the hub's registry: opens a source when an operation that it may have is called."""

    hub: Hub

    def __init__(self) -> None:
        self._opened: set[str] = set()
        self._lock = asyncio.Lock()

    async def open(self, operation_id: str) -> None:
        """Open the sources that may have an operation: local modules, then sources with its namespace, then workers."""
        hub = self.hub
        renamed = {each.options.get("rename"): old for old, each in hub.file.config.tools.items()}
        namespace = renamed.get(operation_id, operation_id).partition(".")[0]
        async with self._lock:
            if not self._opened:
                await self._open("local", lambda source: not source.of.table)
            if operation_id not in hub.registry:
                await self._open(
                    f"namespace {namespace}",
                    lambda source: (
                        source.of.owns_namespace
                        and (source.name == namespace or source.is_unreadable)
                    ),
                )
            if operation_id not in hub.registry and not hub.has_namespace(namespace):
                await self._open(
                    "late", lambda source: bool(source.of.table) and not source.of.owns_namespace
                )

    async def _open(self, what: str, wanted: Callable[[Source], bool]) -> None:
        if what not in self._opened:
            self._opened.add(what)
            already = {(each.kind, each.name) for each in self.hub.sources}
            sources = [
                each
                for each in sources_of(self.hub.file)
                if wanted(each) and (each.kind, each.name) not in already
            ]
            await self.hub.open(sources, None)

    async def call(
        self, operation_id: str, input: Any, context: OperationContext
    ) -> ResponseEnvelope[Any]:
        """Call an operation that is not registered yet.

        Raises:
            CallError: As the call would, or if no source has the operation.
        """
        await self._find(operation_id)
        return await self.hub.registry.execute(operation_id, input, context)

    async def subscribe(
        self, operation_id: str, input: Any, context: OperationContext
    ) -> AsyncIterator[ResponseEnvelope[Any]]:
        """Subscribe to an operation that is not registered yet. Raises the errors of `call`."""
        await self._find(operation_id)
        async with aclosing(self.hub.registry.subscribe(operation_id, input, context)) as items:
            async for item in items:
                yield item

    async def _find(self, operation_id: str) -> None:
        await self.open(operation_id)
        self.hub.spec(operation_id)
