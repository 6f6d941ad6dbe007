"""Read the config again while a hub runs: when its file changes, on SIGHUP, and on request.

Rule 1: a file that cannot be used is reported and changes nothing.
Rule 2: sources, keys, secrets and limits change without a lost call. Changes that need a restart are reported.
"""

import asyncio
import logging
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import fields
from pathlib import Path

from operations.config import ConfigError, ConfigFault, ConfigFile, load_config
from operations.errors import OperationsError
from operations.hub.access import Access, can_sign_in, limits_of, serves_anonymous
from operations.hub.hub import Hub, tools_of
from operations.hub.source import ListedServer, Source, file_times, fingerprint
from operations.hub.sources import sources_of

logger = logging.getLogger("operations.hub")

_POLL_SECONDS = 1.0
_LIVE = frozenset({"openapi", "mcp", "mcp_json", "brokers", "access", "limits", "tools"})
"""The tables that take effect at once; the others need a restart."""


async def reload(hub: Hub) -> None:
    """Read the config of a hub again, and apply it.

    Raises:
        ConfigError: If the file cannot be used; then nothing has changed.
    """
    async with hub.changing:
        if hub.file.path is not None:
            await _apply(hub, hub.file.path)


async def _apply(hub: Hub, path: Path) -> None:
    hub.file_times = file_times(hub.file)
    old, new = hub.file, hub.adjust(load_config(path))
    limits, tools = limits_of(new), tools_of(new)
    access = Access(new, hub.registry.authority.store) if "access" in vars(hub) else None
    try:
        hub.tools.change(tools)
    except (OperationsError, ValueError) as error:
        raise ConfigError([ConfigFault(str(path), None, "tools", str(error))]) from error
    # Nothing fails from here on.
    if access is not None:
        hub.access.become(access)
    for front in hub.fronts:
        front.configure(limits, timeout=new.config.limits.timeout)
        front.anonymous = serves_anonymous(new)
    hub.file, hub.file_times = new, file_times(new)
    try:
        await _apply_sources(hub, old, new)
    except asyncio.CancelledError:
        # The caller has left; the next reload, which follows soon, finishes the work.
        hub.file, hub.file_times = old, {}
        raise
    stale = [
        each.name
        for each in fields(new.config)
        if each.name not in _LIVE
        and getattr(old.config, each.name) != getattr(new.config, each.name)
    ]
    servers = old.config.access.authorization_servers, new.config.access.authorization_servers
    if servers[0] != servers[1] or can_sign_in(new) > can_sign_in(old):
        stale.append("access")
    if stale:
        logger.warning("restart to apply the changes of %s", ", ".join(stale))
    logger.info("%s was read again", new.path)


async def _apply_sources(hub: Hub, old: ConfigFile, new: ConfigFile) -> None:
    was_enabled = {_key(each): each.is_enabled for each in sources_of(old)}
    wanted = {_key(each): each for each in sources_of(new) if each.kind != "local"}
    for supervisor in list(hub.supervisors):
        known = supervisor.source
        if known.kind == "local":
            continue
        source = wanted.pop(_key(known), None)
        if source is None:
            await hub.remove(supervisor)
            continue
        is_new = was_enabled.get(_key(known)) != source.is_enabled
        # An operator's choice stays in effect until the file changes `enabled`.
        is_wanted = source.is_enabled if is_new else known.is_enabled
        known.entry = source.entry
        if not is_wanted:
            await supervisor.disable()
        elif not known.is_enabled or fingerprint(source, new) != known.made_of:
            supervisor.request()
    await hub.open(wanted.values(), 0)


def _key(source: Source) -> tuple[str, str, str]:
    path = source.entry.path if isinstance(source.entry, ListedServer) else ""
    return source.kind, source.name, path


@asynccontextmanager
async def following(hub: Hub) -> AsyncGenerator[None]:
    """Reload a hub when its file changes and on SIGHUP, for the length of an `async with` block."""
    again, loop = asyncio.Event(), asyncio.get_running_loop()
    task = asyncio.create_task(_follow(hub, again), name="config changes")
    with suppress(NotImplementedError, RuntimeError):
        loop.add_signal_handler(signal.SIGHUP, again.set)
    try:
        yield
    finally:
        with suppress(NotImplementedError, RuntimeError):
            loop.remove_signal_handler(signal.SIGHUP)
        task.cancel()
        await asyncio.wait({task})


async def _follow(hub: Hub, again: asyncio.Event) -> None:
    while True:
        with suppress(TimeoutError):
            async with asyncio.timeout(_POLL_SECONDS):
                await again.wait()
        if not again.is_set() and file_times(hub.file) == hub.file_times:
            continue
        again.clear()
        try:
            await reload(hub)
        except ConfigError as error:
            logger.warning("the config is not used, and nothing changes: %s", error)
        except Exception:
            logger.exception("the config could not be read again")
