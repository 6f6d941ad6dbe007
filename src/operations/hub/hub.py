"""Open the sources that a config names, and put their operations into one registry.

Rule 1: sources are opened concurrently and kept open. A source that fails is reported and retried; the others work.
Rule 2: a kind of source is imported when the config has one of it.
Rule 3: a command may need only some of them (`SourceFilter`); the others stay closed. An operation that a handler calls
        is opened when it is called.
"""

import asyncio
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

from operations._grants import PREFIX
from operations._text import suggestion
from operations.access import Identity
from operations.authority import Authority
from operations.config import ConfigError, ConfigFault, ConfigFile, load_config
from operations.config.reading import FILE_NAME
from operations.context import OperationContext
from operations.envelopes import ResponseEnvelope
from operations.errors import CallError, ErrorCode, operation_not_found
from operations.front.front import Front
from operations.hub.authority import opened_authority
from operations.hub.callers import Access
from operations.hub.journal import recording
from operations.hub.known_ids import recall_ids
from operations.hub.source import ListedServer, Opened, Source, file_times, fingerprint
from operations.hub.sources import open_source, sources_of
from operations.hub.sources.local import load_setup
from operations.hub.supervisor import Supervisor
from operations.registry import OperationRegistry
from operations.specs import OperationSpec
from operations.telemetry.audit import Audit, AuditFile
from operations.telemetry.config import AuditConfig, TelemetryConfig
from operations.tools import ToolConfig, configure_tools


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFilter:
    """What a command wants of the sources; one that says nothing wants them all.

    Attributes:
        operation: One operation, by its id, and what it calls.
        namespace: The operations of a namespace.
        source: The operations of a source: its kind, its name, or both.
    """

    operation: str | None = None
    namespace: str | None = None
    source: str | None = None

    def includes(self, source: Source) -> bool:
        """Return whether a source is wanted; workers and local modules may have operations in any namespace."""
        if self.source is not None:
            return source.is_called(self.source)
        return (
            self.namespace is None
            or source.kind in ("local", "broker")
            or source.name == self.namespace
            or _is_unreadable(source)
        )

    @property
    def is_all(self) -> bool:
        """Whether every source is to be opened."""
        return self == ALL


ALL = SourceFilter()


class Hub:
    """A registry, the sources of its operations, and the application that serves them.

    Attributes:
        registry: Everything that is open.
        file: The config.
        resolvers: Further `IdentityResolver`s of the application, which `setup` may add.
    """

    def __init__(self, registry: OperationRegistry, file: ConfigFile) -> None:
        self.registry = registry
        self.file = file
        self.tools = configure_tools(registry, tools_of(file))
        """The settings of `[tools]`."""
        self.file_times = file_times(file)
        """When the files were changed that this hub was made of."""

        self.resolvers: list[Any] = []
        self.fronts: list[Front] = []
        """What limits the callers of this hub."""
        self.reload_others: Callable[[], None] = lambda: None
        """Lets the other processes that serve the same config read it again."""

        self.adjust: Callable[[ConfigFile], ConfigFile] = lambda file: file
        """Changes a config that is read again, as the one this hub was opened with was changed."""

        self.supervisors: list[Supervisor] = []
        self.changing = asyncio.Lock()
        """Held while the config is applied: one change at a time."""

        self._removed: list[Supervisor] = []
        self._by_id: dict[str, Source] = {}
        self._indexed = -1

    @property
    def sources(self) -> list[Source]:
        """The sources that were wanted, in the order of the config."""
        return [supervisor.source for supervisor in self.supervisors]

    @cached_property
    def app(self) -> Any:
        """The ASGI application that `operations serve` runs, with the HTTP API, MCP, WebSocket and console.

        Raises:
            ConfigError: If a key is not where the config says.
        """
        return import_module("operations.hub.serving").build_app(self)

    @cached_property
    def access(self) -> Access:
        """The callers of `[access]`.

        Raises:
            ConfigError: If a key is not where the config says.
        """
        return Access(self.file, self.registry.authority.store)

    # ------------------------------------------------------------ opening

    async def open(self, sources: Iterable[Source], wait: float | None) -> None:
        """Open sources concurrently, and keep them open.

        Brokers come last, one by one: operations of workers are used if no other source has their ids.

        Args:
            sources: Those that are opened; the others of the config stay closed.
            wait: Seconds to wait until each has connected or failed; None for as long as it takes.
        """
        for source in sources:
            self.supervisors.append(self._supervise(source))
        started = [each for each in self.supervisors if each.source.is_enabled]
        brokers = [each for each in started if each.source.kind == "broker"]
        others = [each for each in started if each.source.kind != "broker"]
        with suppress(TimeoutError):
            async with asyncio.timeout(wait):
                for some in (others, *([each] for each in brokers)):
                    _start(some)
                    await asyncio.gather(*(each.attempted() for each in some))
        _start(started)

    async def settled(self, seconds: float) -> None:
        """Wait until each source has connected or failed, but not longer than this."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.gather(
                    *(each.attempted() for each in self.supervisors if each.source.is_enabled)
                )

    async def remove(self, supervisor: Supervisor) -> None:
        """Close a source for good; calls that run on it are finished first."""
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
        return await open_source(source, self.file)

    def _owner(self, operation_id: str) -> str:
        source = self.source_of(operation_id)
        return "this process" if source is None else source.label

    async def aclose(self) -> None:
        """Close all sources."""
        await asyncio.gather(*(each.aclose() for each in (*self.supervisors, *self._removed)))

    def supervisor(self, name: str) -> Supervisor:
        """Return what keeps a source open, by its name or `kind:name`.

        Raises:
            KeyError: If there is no such source.
        """
        for supervisor in self.supervisors:
            if supervisor.source.is_called(name):
                return supervisor
        raise KeyError(name)

    # ------------------------------------------------------------ finding

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
        """How many operations the sources offer."""
        return sum(len(source.operations) for source in self.sources)

    def has_namespace(self, namespace: str) -> bool:
        """Return whether a source is called `namespace`, or offers operations in it."""
        return any(
            source.name == namespace
            or any(each.partition(".")[0] == namespace for each in source.operations)
            for source in self.sources
        )

    def absent(self, namespace: str | None = None) -> list[Source]:
        """Return the sources that cannot be called now; of one namespace, or all."""
        return [
            source
            for source in self.sources
            if source.is_enabled and source.problem is not None and namespace in (None, source.name)
        ]

    def spec(self, operation_id: str) -> OperationSpec:
        """Return the contract of one operation.

        Raises:
            CallError: `OPERATION_NOT_FOUND` with what was probably meant, or `UNAVAILABLE` if its source failed.
        """
        spec = self.registry.get_spec(operation_id)
        if spec is not None:
            return spec
        self.enforce_open(operation_id)
        known = [spec.id for spec in self.registry.specs()]
        recalled = recall_ids(self.file)
        absent = self.absent()
        if operation_id in recalled and absent:
            missing = ", ".join(source.label for source in absent)
            raise CallError(
                ErrorCode.UNAVAILABLE,
                f"{operation_id} was available before, and is not now; these are not: {missing}",
            )
        near = suggestion(operation_id, {*known, *recalled} - {operation_id})
        unasked = self._unasked(operation_id.partition(".")[0])
        if unasked:
            message = (
                f"no connected source has {operation_id}, and {unasked} cannot be asked.{near}"
            )
            raise CallError(ErrorCode.UNAVAILABLE, message)
        raise operation_not_found(operation_id, f"there is no operation {operation_id}.{near}")

    def _unasked(self, namespace: str) -> str:
        """Return the brokers that are not connected and whose workers may have a namespace that no source has."""
        if any(
            each.partition(".")[0] == namespace
            for source in self.sources
            for each in source.operations
        ):
            return ""
        return ", ".join(
            source.label
            for source in self.absent()
            if source.kind == "broker"
            and source.entry.options.get("namespace") in (None, namespace)
        )

    def enforce_open(self, operation_id: str) -> None:
        """Fail if the source that would have an operation is not connected.

        Raises:
            CallError: `UNAVAILABLE`, with the sources and reasons.
        """
        absent = self.absent(operation_id.partition(".")[0])
        if absent:
            reasons = "\n".join(f"{each.label} is not: {each.problem}" for each in absent)
            message = f"{operation_id} is not available, because {reasons}"
            raise CallError(ErrorCode.UNAVAILABLE, message)

    async def identity(self, name: str) -> Identity | None:
        """Return the identity of a caller in `[access.keys]`, or behind a grant; `anonymous` is nobody.

        Raises:
            ConfigError: If nobody is called that.
            GrantError: If the grant is not valid.
        """
        if self.file.config.access.grants is not None and name.startswith(PREFIX):
            return await self.access.grant(name)
        keys = self.file.config.access.keys
        if name in keys:
            return Identity(name, **self.file.options(Identity, keys[name]))
        if name == "anonymous":
            return None
        near = suggestion(name, keys)
        message = f"nobody in [access.keys] is called {name}.{near}"
        raise ConfigError(
            [ConfigFault(str(self.file.path or "operations.toml"), None, "", message)]
        )


@asynccontextmanager
async def open_hub(
    config: ConfigFile | Path | str = FILE_NAME,
    wanted: SourceFilter = ALL,
    *,
    wait: float | None = 30,
) -> AsyncGenerator[Hub]:
    """Open the sources of a config for the length of an `async with` block, and keep them open.

    A source that cannot be reached is retried in the background until it can.

    Args:
        config: The path of an `operations.toml` or `mcp.json`, or one that is loaded.
        wanted: The sources that are wanted; all by default.
        wait: Seconds to wait at first until each source has connected or failed.

    Raises:
        ConfigError: If the file cannot be used.
    """
    file = config if isinstance(config, ConfigFile) else load_config(Path(config))
    async with (
        opened_authority(file) as authority,
        _opened(file, wanted, wait, authority) as hub,
    ):
        yield hub


@asynccontextmanager
async def _opened(
    file: ConfigFile, wanted: SourceFilter, wait: float | None, authority: Authority
) -> AsyncGenerator[Hub]:
    settings = file.config
    lazy = _LazySources()
    registry = OperationRegistry(
        output=settings.output,
        max_threads=settings.limits.threads,
        remote=None if wanted.operation is None else lazy,
        authority=authority,
    )
    hub = lazy.hub = Hub(registry, file)
    # Sources are closed in any case: also if opening is interrupted.
    async with aclosing(hub), registry, _set_up(hub):
        if wanted.operation is None:
            await hub.open(filter(wanted.includes, sources_of(file)), wait)
        else:
            await lazy.open(wanted.operation)
        with recording(registry, file):
            yield hub


def tools_of(file: ConfigFile) -> dict[str, ToolConfig]:
    """Return the settings of `[tools]`, by pattern."""
    return {
        pattern: ToolConfig(**file.options(ToolConfig, entry))
        for pattern, entry in file.config.tools.items()
    }


@asynccontextmanager
async def _set_up(hub: Hub) -> AsyncGenerator[None]:
    """Start what the config wants around all calls: audit records, telemetry, and the function `setup`."""
    file, config = hub.file, hub.file.config
    async with AsyncExitStack() as stack:
        audit = AuditConfig(**file.options(AuditConfig, config.audit))
        if audit.enabled:
            sink = None if audit.file is None else AuditFile(audit.file)
            if sink is not None:
                stack.callback(sink.close)
            stack.callback(hub.registry.observe(Audit(sink)))
        telemetry = file.options(TelemetryConfig, config.telemetry)
        if telemetry.get("endpoint") is not None:
            exporting = import_module("operations.telemetry.otel").exporting
            sending = exporting(hub.registry, **telemetry)
            sending.__enter__()
            # Sending the rest may take seconds, during which calls go on.
            stack.push_async_callback(asyncio.to_thread, sending.__exit__, None, None, None)
        if config.setup is not None:
            function = load_setup(file)
            if inspect.isasyncgenfunction(function):
                function = asynccontextmanager(function)
            started: Any = function(hub)
            if inspect.isawaitable(started):
                await started
            elif started is not None:
                await stack.enter_async_context(started)
        yield


class _LazySources:
    """Opens sources when an operation is called that they may have: the remote of the hub's registry."""

    hub: Hub

    def __init__(self) -> None:
        self._opened: set[str] = set()
        self._lock = asyncio.Lock()

    async def open(self, operation_id: str) -> None:
        """Open what may have an operation: local modules, then what has its namespace, then the workers of brokers."""
        hub = self.hub
        renamed = {each.options.get("rename"): old for old, each in hub.file.config.tools.items()}
        namespace = renamed.get(operation_id, operation_id).partition(".")[0]
        async with self._lock:
            if not self._opened:
                await self._open("local", lambda source: source.kind == "local")
            if operation_id not in hub.registry:
                await self._open(
                    f"namespace {namespace}",
                    lambda source: (
                        source.kind in ("openapi", "mcp")
                        and (source.name == namespace or _is_unreadable(source))
                    ),
                )
            if operation_id not in hub.registry and not hub.has_namespace(namespace):
                await self._open("broker", lambda source: source.kind == "broker")

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
        """Call what is not registered yet.

        Raises:
            CallError: As the call, or if no source has it.
        """
        await self._find(operation_id)
        return await self.hub.registry.execute(operation_id, input, context)

    async def subscribe(
        self, operation_id: str, input: Any, context: OperationContext
    ) -> AsyncIterator[ResponseEnvelope[Any]]:
        """Subscribe to what is not registered yet; raises as `call`."""
        await self._find(operation_id)
        async with aclosing(self.hub.registry.subscribe(operation_id, input, context)) as items:
            async for item in items:
                yield item

    async def _find(self, operation_id: str) -> None:
        await self.open(operation_id)
        self.hub.spec(operation_id)


def _start(supervisors: Iterable[Supervisor]) -> None:
    for supervisor in supervisors:
        # It may have been disabled since.
        if supervisor.source.is_enabled:
            supervisor.start()


def _is_unreadable(source: Source) -> bool:
    """Return whether a source is an `mcp.json` that cannot be read: it may have any server."""
    return isinstance(source.entry, ListedServer) and source.entry.entry is None
