"""The start of most commands: load the config, open its sources, and report problems with them."""

import logging
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext

from operations._text import counted
from operations.cli.options import DEFAULTS, Common, Screen
from operations.config import ConfigFile
from operations.front.config import ServerConfig
from operations.front.front import Front
from operations.hub import ALL, Hub, SourceFilter, open_hub
from operations.hub.access import limits_of
from operations.hub.journal import recall_ids, remember_ids

_SETTLE_SECONDS = 3.0
"""How long `serve` and `work`, which accept calls already, wait for sources before they report them."""


@asynccontextmanager
async def open_session(
    common: Common, screen: Screen, wanted: SourceFilter = ALL, *, wait: bool = True
) -> AsyncGenerator[Hub]:
    """The hub a command works with, for the length of an `async with` block.

    Args:
        common: The config, and the verbosity.
        screen: For reports.
        wanted: Which of its sources are opened.
        wait: Whether to wait until they are, and report those that cannot be opened.

    Raises:
        ConfigError: If the config is missing or wrong.
    """
    async with open_file(common.load(), screen, wanted, common, wait=wait) as hub:
        yield hub


@asynccontextmanager
async def open_file(
    file: ConfigFile,
    screen: Screen,
    wanted: SourceFilter = ALL,
    common: Common = DEFAULTS,
    *,
    wait: bool = True,
) -> AsyncGenerator[Hub]:
    """`open_session` for a config that is loaded already."""
    busy = screen.err.is_terminal and not screen.json
    async with AsyncExitStack() as stack:
        with screen.err.status("opening sources ...") if busy else nullcontext():
            hub = await stack.enter_async_context(open_hub(file, wanted, wait=30 if wait else 0))
        if wait:
            report_sources(hub, screen, common, wanted)
        yield hub


async def settle(hub: Hub, screen: Screen, common: Common) -> None:
    """Wait a little for the sources of a hub that serves already, and report those that are not connected yet."""
    await hub.settled(_SETTLE_SECONDS)
    report_sources(hub, screen, common)
    if _is_quiet(hub, common):
        # Without `[log]`, also what ends a warning: a source that is connected again, a file that was read.
        logging.getLogger("operations.hub").setLevel(logging.INFO)


def report_sources(hub: Hub, screen: Screen, common: Common, wanted: SourceFilter = ALL) -> None:
    """Report the problems of a hub's sources, and remember the ids of its operations."""
    _tell(hub, wanted, screen, hints=common.hints, verbose=common.verbose)
    if wanted.is_all:
        # Keep the ids of disconnected sources, to distinguish them from unknown ids.
        before = recall_ids(hub.file) if hub.absent() else []
        ids = dict.fromkeys([*(spec.id for spec in hub.registry.specs()), *before])
        remember_ids(hub.file, ids)
    if _is_quiet(hub, common):
        # From here on warnings are about calls and changes of sources, and nothing else reports them.
        logging.getLogger("operations").setLevel(logging.WARNING)


def _is_quiet(hub: Hub, common: Common) -> bool:
    """Return whether neither the command line nor `[log]` configures logging."""
    return not common.verbose and not hub.file.config.log.options


def open_front(hub: Hub) -> Front:
    """Return the front for calls of the operator, with the limits and rules of `operations serve`."""
    options = hub.file.options(ServerConfig, hub.file.config.serve)
    return Front(
        hub.registry,
        limits_of(hub.file),
        timeout=hub.file.config.limits.timeout,
        expose_errors=options.get("expose_errors", False),
        scopes_supported=options.get("scopes_supported", ()),
    )


def _tell(hub: Hub, wanted: SourceFilter, screen: Screen, *, hints: str, verbose: bool) -> None:
    """Report missing sources on standard error; the command continues with the rest."""
    operation = wanted.operation
    # The error that follows reports why the wanted one is missing.
    told = None if operation is None or operation in hub.registry else operation.partition(".")[0]
    for absent in hub.absent():
        if absent.name != told:
            screen.warn(f"{absent.label} is not available: {absent.problem}")
    if wanted.is_all and not hub.absent():
        for pattern in sorted(hub.tools.unmatched):
            screen.warn(f'[tools."{pattern}"] matches no operation')
    for source in hub.sources:
        if not source.is_enabled:
            screen.note(f"{source.label} is disabled")
        for part in source.warnings:
            screen.warn(f"{source.label}: {part.where} {part.reason}")
        if source.kind == "local" or verbose:
            for skipped in source.skipped:
                screen.warn(f"{source.label}: skipped {skipped.where}: {skipped.reason}")
        elif source.skipped:
            screen.note(
                f"{source.label}: {counted(len(source.skipped), 'part')} of it cannot be used; "
                f"`operations import {source.name}{hints}` shows the reason"
            )
