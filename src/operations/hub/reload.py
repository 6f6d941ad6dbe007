"""Read the config again while a hub runs: when its file changes, on SIGHUP, and on request.

Rule 1: a file that cannot be used is reported and changes nothing.
Rule 2: sources, keys, secrets and limits change without a lost call. What a restart needs is reported.
"""

import asyncio
import logging
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import fields

from operations.config import ConfigError, load_config
from operations.hub.callers import limits_of
from operations.hub.hub import Hub, tools_of
from operations.hub.source import Source, file_times, fingerprint
from operations.hub.sources import sources_of

logger = logging.getLogger("operations.hub")

_POLL_SECONDS = 1.0
_LIVE = frozenset({"openapi", "mcp", "mcp_json", "brokers", "access", "limits", "tools"})
"""The tables that take effect at once; the others need a restart."""


async def reload(hub: Hub) -> None:
    """Read the config of a hub again, and make the hub what it says now.

    Raises:
        ConfigError: If the file cannot be used; then nothing has changed.
    """
    if hub.file.path is None:
        return
    hub.file_times = file_times(hub.file)
    old, new = hub.file, hub.adjust(load_config(hub.file.path))
    before = {_key(each.source): each for each in hub.supervisors}
    limits, tools = limits_of(new), tools_of(new)
    if "access" in vars(hub):
        hub.access.update(new)
    for front in hub.fronts:
        front.configure(limits, timeout=new.config.limits.timeout)
    hub.file, hub.file_times = new, file_times(new)
    if tools != hub.tools:
        hub.tools.clear()
        hub.tools.update(tools)
        hub.unmatched.clear()
        hub.registry.adapt_all()
    wanted = {_key(each): each for each in sources_of(new) if each.kind != "local"}
    for key, supervisor in before.items():
        source = wanted.pop(key, None)
        if supervisor.source.kind == "local":
            continue
        if source is None:
            await hub.remove(supervisor)
        elif not source.is_enabled:
            await supervisor.disable()
        elif fingerprint(source, new) != supervisor.source.made_of:
            supervisor.source.entry = source.entry
            supervisor.request()
    await hub.open(wanted.values(), 0)
    names = [each.name for each in fields(new.config) if each.name not in _LIVE]
    stale = [each for each in names if getattr(old.config, each) != getattr(new.config, each)]
    if stale:
        logger.warning("restart to apply the changes of %s", ", ".join(stale))
    logger.warning("%s was read again", new.path)


def _key(source: Source) -> tuple[str, str]:
    return source.kind, source.name


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
