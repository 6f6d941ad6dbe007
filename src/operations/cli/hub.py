"""Everything a config names, open and in one registry.

Rule 1: sources are opened side by side, and one that fails costs no other anything: it is told, not raised.
Rule 2: a kind of source is imported when the config has one of it.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, cast

from operations._words import suggestion
from operations.access import Identity
from operations.cli.journal import recording
from operations.cli.sources import Kind, Opened
from operations.cli.sources.local import open_modules
from operations.config import ConfigError, ConfigFault, ConfigFile
from operations.errors import CallError, ErrorCode, OperationsError
from operations.registry import OperationRegistry
from operations.scanner import Skipped
from operations.specs import OperationSpec

_OPENERS: dict[Kind, str] = {
    "openapi": "operations.cli.sources.openapi:open_service",
    "mcp": "operations.cli.sources.mcp:open_server",
    "broker": "operations.cli.sources.broker:open_workers",
}

Opener = Callable[[str, Any, ConfigFile], Awaitable[Opened]]


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
    ignored: tuple[Skipped, ...] = ()

    failure: str | None = None
    """Why it is not there."""

    seconds: float = 0
    """How long it took to open."""

    @property
    def problems(self) -> tuple[Skipped, ...]:
        """Everything about it that is not as somebody wanted, though it is there."""
        return (*self.failed, *self.ignored, *self.skipped)

    @property
    def label(self) -> str:
        """The source in a word: its kind, and its name where that says more."""
        return self.kind if self.kind == "local" else f"{self.kind}:{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hub:
    """A registry, and where each of its operations comes from."""

    registry: OperationRegistry
    file: ConfigFile
    sources: list[Source] = field(default_factory=list[Source])
    _by_id: dict[str, Source] = field(default_factory=dict[str, Source])

    def add(self, source: Source) -> None:
        """Note a source."""
        self.sources.append(source)
        for operation_id in source.operations:
            self._by_id[operation_id] = source

    def source_of(self, operation_id: str) -> Source | None:
        """Where an operation comes from."""
        return self._by_id.get(operation_id)

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
        namespace = operation_id.partition(".")[0]
        for name, label, reason in self._absent():
            if name == namespace:
                raise CallError(
                    ErrorCode.UNAVAILABLE,
                    f"{operation_id} is not there, because {label} is not: {reason}",
                )
        near = suggestion(operation_id, (spec.id for spec in self.registry.specs()))
        raise CallError(
            ErrorCode.OPERATION_NOT_FOUND, f"there is no operation {operation_id}.{near}"
        )

    def _absent(self) -> Iterator[tuple[str, str, str]]:
        """What is not there: its namespace, what it is called, and why."""
        for source in self.sources:
            if source.failure is not None:
                yield source.name, source.label, source.failure
            for part in source.failed:
                yield part.where, f"{source.label}: {part.where}", part.reason

    def identity(self, name: str) -> Identity | None:
        """Who somebody in `[access.keys]` is; `anonymous` is nobody.

        Raises:
            ConfigError: If nobody is called that.
        """
        keys = self.file.config.access.keys
        if name in keys:
            entry = keys[name]
            return Identity(name, entry.scopes, entry.resources or None)
        if name == "anonymous":
            return None
        near = suggestion(name, keys)
        message = f"nobody in [access.keys] is called {name}.{near}"
        raise ConfigError(
            [ConfigFault(str(self.file.path or "operations.toml"), None, "", message)]
        )


@asynccontextmanager
async def open_hub(file: ConfigFile) -> AsyncGenerator[Hub]:
    """Open every source of a config, for the length of an `async with` block."""
    config = file.config
    registry = OperationRegistry(output=config.output, max_threads=config.limits.threads)
    hub = Hub(registry=registry, file=file)
    # What is open is closed in any case: also where opening is interrupted, or an id is taken.
    async with AsyncExitStack() as services, registry:
        opened = await asyncio.gather(*(_open(*entry, file, services) for entry in _entries(file)))
        for source, found in opened:
            hub.add(_register(source, found, registry))
        with recording(registry, file):
            yield hub


def _entries(file: ConfigFile) -> list[tuple[Kind, str, Any]]:
    """What to open, in the order in which ids are given away."""
    config = file.config
    named: list[tuple[Kind, dict[str, Any]]] = [
        ("local", {module: module for module in config.modules}),
        ("openapi", {name: entry for name, entry in config.openapi.items() if entry.enabled}),
        ("mcp", {name: entry for name, entry in config.mcp.items() if entry.enabled}),
        ("mcp", {path: path for path in config.mcp_json}),
        (
            "broker",
            {n: each for n, each in config.brokers.items() if each.enabled and each.workers},
        ),
    ]
    return [(kind, name, entry) for kind, entries in named for name, entry in entries.items()]


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
            ignored=tuple(found.ignored),
            seconds=loop.time() - started,
        ),
        found,
    )


def _register(source: Source, found: Opened | None, registry: OperationRegistry) -> Source:
    if found is None:
        return source
    try:
        added = registry.register_all(found.operations)
    except OperationsError as error:
        return replace(source, failure=str(error))
    return replace(source, operations=tuple(each.spec.id for each in added))
