"""A changed file takes effect without a restart."""

import asyncio
import logging
import signal
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import fields
from pathlib import Path

from anyio import move_on_after

from operations.base.errors import OperationsError
from operations.base.files import modified_at
from operations.base.tasks import cancel_tasks, receives_signals
from operations.config import Config, ConfigError, ConfigFile, load_config
from operations.hub import Hub, load_code, tools_of
from operations.hub.opening import Access, can_sign_in, serves_anonymous, sources_of
from operations.hub.source import (
    Source,
    configure,
    file_times,
    fingerprint,
    limits_of,
    times_read,
)
from operations.mcp.config import read_servers
from operations.mcp.kind import ListedServer

logger = logging.getLogger("operations.hub")

_POLL_SECONDS = 1.0
_SETTLE_SECONDS = 0.3

_CODE_POLL_SECONDS = 0.2
_CODE_SETTLE_SECONDS = 0.05
"""The same for a hub whose code changes: a person waits for the result."""

_MAX_SETTLE_SECONDS = 10.0
"""Seconds after which a file that changes again and again is read all the same."""

_LIVE = frozenset({"mcp_json", "access", "limits", "tools"})
"""Keys whose changes take effect without a restart, besides the tables of sources."""


async def reload(hub: Hub) -> None:
    """Read the config of a hub again, and apply it.

    Raises:
        ConfigError: If the file cannot be used; the hub is then unchanged.
    """
    async with hub.changing:
        if hub.file.origin is not None:
            await _written(hub)
            await _apply(hub, hub.file.origin)


async def _apply(hub: Hub, path: Path) -> None:
    hub.file_times = file_times(hub.file)
    # The code is read even if the file cannot be used, so that it is not read again until it changes.
    if hub.code is not None and hub.code.has_changed:
        load_code(hub, hub.file)
    old, new = hub.file, load_config(path)
    if hub.code is not None and old.config.modules != new.config.modules:
        load_code(hub, new)
    times = times_read(new)
    _enforce_listings(hub, new)
    limits, tools = limits_of(new), tools_of(new)
    access = Access(new, hub.registry.authority.store) if "access" in vars(hub) else None
    try:
        hub.tools.change(tools)
    except (OperationsError, ValueError) as error:
        raise new.error(str(error), "tools") from error
    # No step fails from here on.
    if access is not None:
        hub.access.become(access)
    for front in (*hub.fronts, *hub.guest_fronts):
        front.configure(limits, timeout=new.config.limits.timeout)
    for front in hub.fronts:
        front.credentials.admit_anonymous(serves_anonymous(new))
    hub.file, hub.file_times = new, times
    # Before the sources, which may take seconds: a caller may have been removed.
    for apply in hub.on_reload:
        try:
            apply()
        except OperationsError as error:
            logger.warning("a part of the config could not be applied: %s", error)
    for source in hub.sources:
        if source.opened is not None:
            configure(source.opened, new)
    try:
        await _apply_sources(hub, old, new)
    except asyncio.CancelledError:
        # The caller was cancelled; the next reload, which follows soon, completes the work.
        hub.file, hub.file_times = old, dict.fromkeys(hub.file_times)
        raise
    _warn_of_ineffective(hub, old)
    # A person who develops sees the outcome instead.
    level = logging.INFO if hub.code is None else logging.DEBUG
    logger.log(level, "%s was read again", new.origin)


def _warn_of_ineffective(hub: Hub, old: ConfigFile) -> None:
    """Log the changes that match no operation or need a restart."""
    new = hub.file
    added = new.config.tools.keys() - old.config.tools.keys()
    for pattern in sorted(added & hub.tools.unmatched) if not hub.absent() else ():
        logger.warning('[tools."%s"] matches no operation', pattern)
    stale = _stale(hub, old.config, new.config)
    if can_sign_in(new) > can_sign_in(old):
        stale.append("access")
    if stale:
        logger.warning("restart to apply the changes of %s", ", ".join(stale))


def _enforce_listings(hub: Hub, file: ConfigFile) -> None:
    """Raise an error if an `mcp.json` whose servers are in use cannot be read."""
    entries = (each.entry for each in hub.sources if not each.is_unreadable)
    used = {each.path for each in entries if isinstance(each, ListedServer)}
    for path in used & set(file.config.mcp_json):
        try:
            read_servers(file.existing(path, "mcp_json"))
        except ConfigError:
            raise
        except (OSError, ValueError) as error:
            raise file.error(
                f"contains {path}, which cannot be used: {error}", "mcp_json"
            ) from error


def _stale(hub: Hub, old: Config, new: Config) -> list[str]:
    """Return the tables and keys whose changes need a restart."""
    live = {
        *_LIVE,
        *(kind.table for kind in new.kinds),
        *(() if hub.code is None else ("modules",)),
    }
    names = [each.name for each in fields(new) if each.name not in live]
    pairs = {name: (getattr(old, name, None), getattr(new, name)) for name in names}
    servers = "access.authorization_servers"
    pairs[servers] = old.access.authorization_servers, new.access.authorization_servers
    pairs["limits.threads"] = old.limits.threads, new.limits.threads
    if (store := new.state.broker) is not None and old.state.broker == store:
        pairs[f"brokers.{store}"] = old.tables("brokers")[store], new.tables("brokers")[store]
    return [name for name, (before, now) in pairs.items() if before != now]


async def _apply_sources(hub: Hub, old: ConfigFile, new: ConfigFile) -> None:
    """Open, replace and close sources: modules only if a new version of their code was imported."""
    is_new_code = hub.code is not None and hub.code.is_new
    was_enabled = {_key(each): each.is_enabled for each in sources_of(old)}
    found = filter(hub.wanted.includes, sources_of(new))
    wanted = {_key(each): each for each in found if each.of.table or is_new_code}
    for supervisor in list(hub.supervisors):
        known = supervisor.source
        if not known.of.table and not is_new_code:
            continue
        source = wanted.pop(_key(known), None)
        if source is None:
            await hub.remove(supervisor)
            continue
        is_new = was_enabled.get(_key(known)) != source.is_enabled
        # The operator's choice stays in effect until `enabled` changes in the file.
        is_wanted = source.is_enabled if is_new else known.is_enabled
        known.entry = source.entry
        if not is_wanted:
            await supervisor.disable()
        elif (
            not known.is_enabled or not known.of.table or fingerprint(source, new) != known.made_of
        ):
            supervisor.request(is_changed=True)
    await hub.open(wanted.values(), 0)
    if hub.code is not None and is_new_code:
        local = [each for each in hub.supervisors if not each.source.of.table]
        await asyncio.gather(*(each.attempted() for each in local))
        hub.code.is_new = False


def _key(source: Source) -> tuple[str, str, str]:
    path = source.entry.path if isinstance(source.entry, ListedServer) else ""
    return source.kind, source.name, path


@asynccontextmanager
async def following(
    hub: Hub, connections: Mapping[str, Callable[[], bool]] | None = None
) -> AsyncGenerator[None]:
    """Reload a hub when its file changes and on SIGHUP, and log lost sources, within an `async with` block.

    Args:
        hub: The hub.
        connections: Other connections whose loss is logged, by label: each returns whether it is connected.
    """
    again, loop = asyncio.Event(), asyncio.get_running_loop()
    task = asyncio.Task(_follow(hub, again, connections or {}), name="config changes")
    has_signals = receives_signals()
    if has_signals:
        with suppress(NotImplementedError):
            loop.add_signal_handler(signal.SIGHUP, again.set)
    try:
        yield
    finally:
        if has_signals:
            with suppress(NotImplementedError):
                loop.remove_signal_handler(signal.SIGHUP)
        await cancel_tasks(task)


def _log_changes(problems: Mapping[str, str | None], lost: frozenset[str]) -> frozenset[str]:
    """Log which sources were lost or came back since the last check; return those that are lost now."""
    for label, problem in problems.items():
        if problem is not None and label not in lost:
            logger.warning("%s is not available: %s", label, problem)
        elif problem is None and label in lost:
            logger.info("%s is connected again", label)
    return frozenset(label for label, problem in problems.items() if problem is not None)


def _times(hub: Hub) -> dict[Path, int | None]:
    return {path: modified_at(path) for path in hub.file_times}


def _code_problem(hub: Hub) -> str | None:
    """Return why the current version of the code is not in use."""
    if hub.code is None or hub.code.problem is not None:
        return None if hub.code is None else hub.code.problem
    local = (each for each in hub.sources if not each.of.table)
    return "\n".join(each.failure for each in local if each.failure is not None) or None


async def _written(hub: Hub) -> None:
    """Wait until changed files are completely written, but not forever.

    An empty file, as many programs leave it for a moment, is a valid config.
    """
    before, code, now = hub.file_times, hub.code, dict[Path, int | None]()
    pause = _SETTLE_SECONDS if code is None else _CODE_SETTLE_SECONDS
    with move_on_after(_MAX_SETTLE_SECONDS):
        while (times := _times(hub)) != before or (code is not None and code.times() != now):
            before, now = times, {} if code is None else code.times()
            await asyncio.sleep(pause)


async def _follow(
    hub: Hub, again: asyncio.Event, connections: Mapping[str, Callable[[], bool]]
) -> None:
    lost = frozenset[str]()
    while True:
        with move_on_after(_POLL_SECONDS if hub.code is None else _CODE_POLL_SECONDS):
            await again.wait()
        # A supervisor logs why it could not open a source.
        problems = {each.label: each.problem for each in hub.sources if each.opened is not None}
        for label, is_connected in connections.items():
            problems[label] = None if is_connected() else "the connection was lost"
        lost = _log_changes(problems, lost)
        has_new_code = hub.code is not None and hub.code.has_changed
        if not again.is_set() and not has_new_code and _times(hub) == hub.file_times:
            continue
        again.clear()
        try:
            await reload(hub)
            hub.problem = _code_problem(hub)
        except ConfigError as error:
            hub.problem = str(error)
            level = logging.WARNING if hub.code is None else logging.DEBUG
            words = "the changed config cannot be used, so the previous one stays in effect: %s"
            logger.log(level, words, error)
        except Exception:
            logger.exception("the config could not be read again")
        hub.on_outcome()
