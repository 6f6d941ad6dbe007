"""A hub: all sources of an `operations.toml` in one registry (`hub.registry`) and one application (`hub.app`)."""

import asyncio
import inspect
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

from operations.config import FILE_NAME, ConfigFile, load_config
from operations.context import OperationContext
from operations.envelopes import ResponseEnvelope
from operations.front.config import ASGIApp
from operations.hub.hub import ALL, Hub, SourceFilter, is_unreadable
from operations.hub.journal import recording
from operations.hub.source import Source, SourceState, load_setup
from operations.hub.sources import opened_authority, sources_of
from operations.registry import OperationRegistry
from operations.telemetry import Audit, AuditConfig, AuditFile, TelemetryConfig

__all__ = ["ALL", "Hub", "Source", "SourceFilter", "SourceState", "open_hub"]


@asynccontextmanager
async def open_hub(
    config: ConfigFile | Path | str = FILE_NAME,
    wanted: SourceFilter = ALL,
    *,
    wait: float | None = 30,
) -> AsyncGenerator[Hub]:
    """Open the sources of a config and keep them connected for the duration of an `async with` block.

    A source that cannot be reached is retried in the background.

    Args:
        config: The path of an `operations.toml` or `mcp.json`, or a loaded config.
        wanted: The sources to open; by default all.
        wait: Seconds to wait for each source to connect or fail before the block begins.

    Raises:
        ConfigError: If the file cannot be used.
    """
    file = config if isinstance(config, ConfigFile) else load_config(Path(config))
    settings, lazy = file.config, _LazySources()
    async with opened_authority(file) as authority:
        registry = OperationRegistry(
            output=settings.output,
            max_threads=settings.limits.threads,
            remote=None if wanted.operation is None else lazy,
            authority=authority,
        )
        hub = lazy.hub = Hub(registry, file, wanted, _build_app)
        # Close the sources also if opening is interrupted.
        async with aclosing(hub), registry, AsyncExitStack() as stack:
            _start_audit(hub, stack)
            _start_telemetry(hub, stack)
            if settings.setup is not None:
                await _run_setup(hub, stack)
            if wanted.operation is None:
                await hub.open(filter(wanted.includes, sources_of(file)), wait)
            else:
                await lazy.open(wanted.operation)
            # A single call does not repeat the warning of the hub.
            level = logging.WARNING if wanted.operation is None else logging.INFO
            with recording(registry, file, level):
                yield hub


def _build_app(hub: Hub) -> ASGIApp:
    from operations.hub.serving import build_app  # noqa: PLC0415 - needs extras

    return build_app(hub)


def _start_audit(hub: Hub, stack: AsyncExitStack) -> None:
    file = hub.file
    audit = AuditConfig(**file.options(AuditConfig, file.config.audit))
    has_file = audit.file is not None
    if not (has_file if audit.enabled is None else audit.enabled):
        return
    try:
        sink = None if audit.file is None else AuditFile(audit.file)
    except OSError as error:
        raise file.fault(f"cannot be used: {error}", "audit.file") from error
    if sink is not None:
        stack.callback(sink.close)
    stack.callback(hub.registry.observe(Audit(sink)))


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
    started: Any = function(hub)
    if inspect.isawaitable(started):
        await started
    elif started is not None:
        await stack.enter_async_context(started)


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
                await self._open("local", lambda source: source.kind == "local")
            if operation_id not in hub.registry:
                await self._open(
                    f"namespace {namespace}",
                    lambda source: (
                        source.kind in ("openapi", "mcp")
                        and (source.name == namespace or is_unreadable(source))
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
