"""Open the sources that a config names, and put their operations into one registry.

Rule 1: sources are opened concurrently. A source that fails is reported, and the others work.
Rule 2: a kind of source is imported when the config has one of it.
Rule 3: a command may want a part of them (`Wish`); the others stay closed. An operation that a handler calls is opened
        when it is called.
"""

import asyncio
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

from operations._text import suggestion
from operations.access import Identity
from operations.config import ConfigError, ConfigFault, ConfigFile, load_config
from operations.config.reading import FILE_NAME
from operations.context import OperationContext
from operations.envelopes import ResponseEnvelope
from operations.errors import CallError, ErrorCode, OperationsError, operation_not_found
from operations.hub.journal import recording
from operations.hub.known_ids import recall_ids
from operations.hub.sources import Kind, MCPFile, Opened
from operations.hub.sources.local import load_setup, open_modules
from operations.registry import OperationRegistry
from operations.scanner import Skipped
from operations.specs import OperationSpec
from operations.telemetry.audit import Audit, AuditFile
from operations.telemetry.config import AuditConfig, TelemetryConfig

_OPENERS: dict[Kind, str] = {
    "openapi": "operations.hub.sources.openapi:open_service",
    "mcp": "operations.hub.sources.mcp:open_server",
    "broker": "operations.hub.sources.broker:open_workers",
}

Opener = Callable[[str, Any, ConfigFile], Awaitable[Opened]]


Entry: TypeAlias = tuple[Kind, str, Any]
"""One entry of a config: its kind, its name, and what it says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a command wants of the sources; one that says nothing wants them all.

    Attributes:
        operation: One operation, by its id, and what it calls.
        namespace: The operations of a namespace.
        source: The operations of a source: its kind, its name, or both.
    """

    operation: str | None = None
    namespace: str | None = None
    source: str | None = None

    @property
    def is_all(self) -> bool:
        """Whether every source is to be opened."""
        return self == ALL


ALL = Wish()


class Absent(NamedTuple):
    """Something of a config that is not there."""

    namespace: str
    label: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One entry of a config, and what became of it."""

    kind: Kind
    name: str
    origin: str = ""
    title: str = ""

    operations: tuple[str, ...] = ()
    """The ids it gave."""

    skipped: tuple[Skipped, ...] = ()
    failed: tuple[Skipped, ...] = ()
    doubts: tuple[Skipped, ...] = ()

    failure: str | None = None
    """Why it is not there."""

    seconds: float = 0
    """How long it took to open."""

    def absent(self) -> Iterator[Absent]:
        """What of it is not there: all of it, or parts."""
        if self.failure is not None:
            yield Absent(self.name, self.label, self.failure)
        for part in self.failed:
            yield Absent(part.where, f"{self.label}: {part.where}", part.reason)

    @property
    def problems(self) -> tuple[Skipped, ...]:
        """Everything about it that is not as somebody wanted, though it is there."""
        return (*self.failed, *self.doubts, *self.skipped)

    @property
    def label(self) -> str:
        """The source in a word: its kind, and its name where that says more."""
        return self.kind if self.kind == "local" else f"{self.kind}:{self.name}"


@dataclass(frozen=True, kw_only=True)
class Hub:
    """A registry, the source of each of its operations, and the application that serves them.

    Attributes:
        registry: Everything that is open.
        file: The config.
        sources: What became of each entry of the config.
        resolvers: Further `IdentityResolver`s of the application, which `setup` may add.
    """

    registry: OperationRegistry
    file: ConfigFile
    sources: list[Source] = field(default_factory=list[Source])
    resolvers: list[Any] = field(default_factory=list[Any])
    _by_id: dict[str, Source] = field(default_factory=dict[str, Source])

    @cached_property
    def app(self) -> Any:
        """The ASGI application that `operations serve` runs, with the HTTP API, MCP, WebSocket and console.

        Raises:
            ConfigError: If a key is not where the config says.
        """
        return import_module("operations.hub.serving").build_app(self)

    def add(self, source: Source) -> None:
        """Note a source."""
        self.sources.append(source)
        for operation_id in source.operations:
            self._by_id[operation_id] = source

    def source_of(self, operation_id: str) -> Source | None:
        """Where an operation comes from."""
        return self._by_id.get(operation_id)

    def has_namespace(self, namespace: str) -> bool:
        """Whether a source is there, or should be, that is called `namespace` or gave operations in it."""
        return bool(self.absent(namespace)) or any(
            source.name == namespace
            or any(each.partition(".")[0] == namespace for each in source.operations)
            for source in self.sources
        )

    @property
    def failures(self) -> list[Source]:
        """The sources that are not there."""
        return [source for source in self.sources if source.failure is not None]

    def spec(self, operation_id: str) -> OperationSpec:
        """The contract of one operation.

        Raises:
            CallError: `OPERATION_NOT_FOUND` with what was probably meant, or `UNAVAILABLE` if its source failed.
        """
        spec = self.registry.get_spec(operation_id)
        if spec is not None:
            return spec
        self.enforce_there(operation_id)
        known = [spec.id for spec in self.registry.specs()]
        recalled = recall_ids(self.file)
        if operation_id in recalled and self.failures:
            missing = ", ".join(source.label for source in self.failures)
            raise CallError(
                ErrorCode.UNAVAILABLE,
                f"{operation_id} was there before, and is not now; these are not: {missing}",
            )
        near = suggestion(operation_id, {*known, *recalled} - {operation_id})
        unasked = self._unasked(operation_id.partition(".")[0])
        if unasked:
            message = (
                f"nobody who is there has {operation_id}, and {unasked} cannot be asked.{near}"
            )
            raise CallError(ErrorCode.UNAVAILABLE, message)
        raise operation_not_found(operation_id, f"there is no operation {operation_id}.{near}")

    def _unasked(self, namespace: str) -> str:
        """The brokers that are not there and whose workers may have a namespace that nobody else has."""
        brokers = self.file.config.brokers
        if any(
            each.partition(".")[0] == namespace
            for source in self.sources
            for each in source.operations
        ):
            return ""
        return ", ".join(
            source.label
            for source in self.failures
            if source.kind == "broker"
            and brokers[source.name].options.get("namespace") in (None, namespace)
        )

    def enforce_there(self, operation_id: str) -> None:
        """Fail where what would have an operation is not there.

        Raises:
            CallError: `UNAVAILABLE`, saying what is not there and why.
        """
        absent = self.absent(operation_id.partition(".")[0])
        if absent:
            reasons = "\n".join(f"{each.label} is not: {each.reason}" for each in absent)
            message = f"{operation_id} is not there, because {reasons}"
            raise CallError(ErrorCode.UNAVAILABLE, message)

    def absent(self, namespace: str | None = None) -> list[Absent]:
        """What is not there; of one namespace, or everything."""
        return [
            each
            for source in self.sources
            for each in source.absent()
            if namespace in (None, each.namespace)
        ]

    def identity(self, name: str) -> Identity | None:
        """Who somebody in `[access.keys]` is; `anonymous` is nobody.

        Raises:
            ConfigError: If nobody is called that.
        """
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
    config: ConfigFile | Path | str = FILE_NAME, wish: Wish = ALL
) -> AsyncGenerator[Hub]:
    """Open the sources of a config for the length of an `async with` block.

    Args:
        config: The path of an `operations.toml` or `mcp.json`, or one that is loaded.
        wish: The sources that are wanted; all by default.

    Raises:
        ConfigError: If the file cannot be used.
    """
    file = config if isinstance(config, ConfigFile) else load_config(Path(config))
    settings = file.config
    # What is open is closed in any case: also where opening is interrupted, or an id is taken.
    async with AsyncExitStack() as services:
        late = _Late()
        registry = OperationRegistry(
            output=settings.output,
            max_threads=settings.limits.threads,
            remote=None if wish.operation is None else late,
        )
        hub = Hub(registry=registry, file=file)
        late.hub, late.services = hub, services
        async with registry, _set_up(hub):
            await _open_wanted(hub, wish, late)
            with recording(registry, file):
                yield hub


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
            exporting = import_module("operations.telemetry.export").exporting
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


async def _open_wanted(hub: Hub, wish: Wish, late: "_Late") -> None:
    entries = _entries(hub.file)
    if wish.operation is not None:
        await late.open([entry for entry in entries if entry[0] == "local"])
        if wish.operation not in hub.registry:
            await late.open_namespace(wish.operation.partition(".")[0])
        return
    if wish.source is not None:
        entries = [entry for entry in entries if is_called(wish.source, entry[0], entry[1])]
    elif wish.namespace is not None:
        entries = [
            *(entry for entry in entries if entry[0] in ("local", "broker")),
            *_of_namespace(hub.file, wish.namespace),
        ]
    await late.open(entries)


class _Late:
    """Sources that are opened when somebody calls what they may have: the remote of the hub's registry."""

    hub: Hub
    services: AsyncExitStack

    def __init__(self) -> None:
        self._opened: set[str] = set()
        self._lock = asyncio.Lock()

    async def open(self, entries: list[Entry]) -> None:
        """Open sources side by side, and register what they have."""
        opened = await asyncio.gather(
            *(_open(*entry, self.hub.file, self.services) for entry in entries)
        )
        for source, found in opened:
            self.hub.add(_register(source, found, self.hub))

    async def open_namespace(self, namespace: str) -> None:
        """Open what may have operations in a namespace: what is called that, else the workers of brokers."""
        async with self._lock:
            if namespace in self._opened:
                return
            self._opened.add(namespace)
            await self.open(_of_namespace(self.hub.file, namespace))
            if "" not in self._opened and not self.hub.has_namespace(namespace):
                self._opened.add("")
                await self.open([each for each in _entries(self.hub.file) if each[0] == "broker"])

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
        await self.open_namespace(operation_id.partition(".")[0])
        self.hub.spec(operation_id)


def is_called(wanted: str, kind: Kind, name: str) -> bool:
    """Whether a source is meant by its kind, its name, or both."""
    return wanted in (kind, name, f"{kind}:{name}")


def _entries(file: ConfigFile) -> list[Entry]:
    """What to open, in the order in which ids are given away."""
    config = file.config
    named: list[tuple[Kind, dict[str, Any]]] = [
        ("local", {module: module for module in config.modules}),
        ("openapi", {name: entry for name, entry in config.openapi.items() if entry.enabled}),
        ("mcp", {name: entry for name, entry in config.mcp.items() if entry.enabled}),
        ("mcp", {path: MCPFile(path) for path in config.mcp_json}),
        (
            "broker",
            {n: each for n, each in config.brokers.items() if each.enabled and each.workers},
        ),
    ]
    return [(kind, name, entry) for kind, entries in named for name, entry in entries.items()]


def _of_namespace(file: ConfigFile, namespace: str) -> list[Entry]:
    """The entries that are called `namespace`; of a file of servers, the one that is."""
    return [
        (kind, name, MCPFile(name, namespace) if isinstance(entry, MCPFile) else entry)
        for kind, name, entry in _entries(file)
        if isinstance(entry, MCPFile) or (kind in ("openapi", "mcp") and name == namespace)
    ]


async def _open(
    kind: Kind, name: str, entry: Any, file: ConfigFile, services: AsyncExitStack
) -> tuple[Source, Opened | None]:
    loop = asyncio.get_running_loop()
    started = loop.time()
    source, found = Source(kind=kind, name=name), None
    try:
        if kind == "local":
            found = open_modules(entry, file)
        else:
            module, _, function = _OPENERS[kind].partition(":")
            opener = cast("Opener", getattr(import_module(module), function))
            found = await opener(name, entry, file)
            if hasattr(found.operations, "aclose"):
                services.push_async_callback(cast("Any", found.operations).aclose)
    except (OperationsError, OSError, ValueError) as error:
        source = Source(kind=kind, name=name, failure=str(error) or type(error).__name__)
    if found is None:
        return source, None
    return (
        Source(
            kind=kind,
            name=name,
            origin=found.origin,
            title=found.title,
            skipped=tuple(found.skipped),
            failed=tuple(found.failed),
            doubts=tuple(found.doubts),
            seconds=loop.time() - started,
        ),
        found,
    )


def _register(source: Source, found: Opened | None, hub: Hub) -> Source:
    if found is None:
        return source
    operations = found.operations
    if source.kind == "broker":
        # What workers offer is not ours to rename: what is free is taken.
        offered = list(operations)
        operations = [each for each in offered if each.spec.id not in hub.registry]
        source = replace(source, doubts=(*source.doubts, *_taken(source, offered, hub)))
    try:
        added = hub.registry.register_all(operations)
    except OperationsError as error:
        return replace(source, failure=str(error))
    return replace(source, operations=tuple(each.spec.id for each in added))


def _taken(source: Source, offered: list[Any], hub: Hub) -> Iterator[Skipped]:
    """What is not imported because another source has the id, by that source."""
    taken: dict[str, list[str]] = {}
    for each in offered:
        if each.spec.id in hub.registry:
            owner = hub.source_of(each.spec.id)
            taken.setdefault(owner.label if owner else "this process", []).append(each.spec.id)
    for label, ids in taken.items():
        shown = ", ".join(ids[:3]) + (f" and {len(ids) - 3} more" if len(ids) > 3 else "")
        remedy = f'set namespace = "{source.name}" in [brokers.{source.name}] to have both'
        yield Skipped(shown, f"not imported, for {label} has the same: {remedy}")
