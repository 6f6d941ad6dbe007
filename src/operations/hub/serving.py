"""Serve a hub: its application, and several processes behind one listening socket.

Rule 1: the first process listens, starts the others, restarts those that end, and forwards signals. It serves no
        requests.
Rule 2: the others end when the first one does, however it ends.
Rule 3: connections, limits, rates and caches are in memory, so they belong to one process.
"""

import asyncio
import errno
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import AsyncGenerator, Callable, Collection, Generator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from anyio import move_on_after
from msgspec import structs

from operations._hosts import LOOPBACK
from operations._resilience import Backoff
from operations._tasks import receives_signals, shutdown_event
from operations.access import Block, Grant, Identity, with_check
from operations.calls import CallServer
from operations.calls.monitoring import GroupMonitor
from operations.config import ConfigFile
from operations.config.model import Entry
from operations.errors import OperationsError, TransportError
from operations.front.config import JWTConfig, ListenConfig, ServerConfig
from operations.front.credentials import has_access_of
from operations.functions import validate_operation
from operations.hub import Hub
from operations.hub.controls import (
    SOURCES,
    WORKERS,
    collect_group_metrics,
    collect_source_metrics,
    control_operations,
    readiness,
    worker_operations,
)
from operations.hub.opening import can_sign_in, serves_anonymous
from operations.hub.source import limits_of
from operations.hub.supervisor import FIRST_PAUSE, LONGEST_PAUSE
from operations.server import APIKeys, IdentityResolver, create_app, credential_resolver
from operations.server.app import create_probe_app
from operations.server.running import InsecureBindError, running_on
from operations.telemetry import group_metrics, worker_metrics
from operations.types import JSONObject

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from operations.mcp import RegistryServer

logger = logging.getLogger("operations.hub")


def listen_config(
    file: ConfigFile, host: str | None = None, port: int | None = None, table: Entry | None = None
) -> ListenConfig:
    """Return the address of a table of a config, by default `[serve]`, unless `host` and `port` replace it."""
    options = file.options(ListenConfig, file.config.serve if table is None else table)
    given = {"host": host, "port": port}
    options |= {key: value for key, value in given.items() if value not in (None, "")}
    return ListenConfig(**options)


@asynccontextmanager
async def listening(
    app: "Starlette", config: ListenConfig, table: str, listener: socket.socket | None = None
) -> AsyncGenerator[str]:
    """As `running_on`; explain why a server cannot listen at an address of a table of the file.

    Raises:
        OperationsError: If it cannot listen.
    """
    async with AsyncExitStack() as stack:
        with listening_errors(config, table):
            url = await stack.enter_async_context(running_on(app, config, listener))
        yield url


@contextmanager
def listening_errors(config: ListenConfig, table: str) -> Generator[None]:
    """Explain why a server cannot listen at an address of a table of the file."""
    try:
        yield
    except InsecureBindError:
        raise OperationsError(
            f"{config.host} accepts requests of other machines without authentication:"
            f" add [access.keys.NAME] to the config, or public = true to [{table}]"
        ) from None
    except OSError as error:
        if isinstance(error, ssl.SSLError | FileNotFoundError):
            message = f"the certificate of [{table}] cannot be used, or its key: {error}"
            raise OperationsError(message) from error
        reason = f"cannot listen on {config.host}:{config.port}: {error.strerror or error}"
        if error.errno == errno.EADDRINUSE:
            reason += "; stop the other program, or choose another port with --port"
        elif config.certificate is not None:
            reason += f"; check that the files of the certificate of [{table}] can be read"
        raise OperationsError(reason) from error


def entry_points_of(file: ConfigFile) -> tuple[str, ...]:
    """Return the entry points of a config: the HTTP API, and those that are not disabled."""
    options = file.options(ServerConfig, file.config.serve)
    # No console, because its session would exist in one process only.
    kinds = ("mcp", "websocket") if is_shared(file) else ("mcp", "websocket", "console")
    return ("http", *(name for name in kinds if options[name]))


def is_shared(file: ConfigFile) -> bool:
    """Return whether several processes serve a config, so that requests of one client may reach different processes."""
    return file.config.serve.processes > 1


def build_app(
    hub: Hub, *, entry_points: Collection[str] | None = None, host: str | None = None
) -> "Starlette":
    """Return the application of a config, with all of its entry points or with the given ones.

    Raises:
        ConfigError: If a key cannot be read.
    """
    file, config = hub.file, hub.file.config
    options = file.options(ServerConfig, config.serve)
    if entry_points is not None:
        for name in ("mcp", "websocket", "console"):
            options[name] = name in entry_points and (options[name] or True)
    if is_shared(file) and options["mcp"]:
        options["mcp"] = replace(ServerConfig(**options).mcp_settings, stateless=True)
    access = config.access
    issuers = access.authorization_servers
    if access.jwt is not None and options.get("public_url") and not issuers:
        issuers = (JWTConfig(**file.options(JWTConfig, access.jwt)).issuer,)
    hosts = (*LOOPBACK, host or listen_config(file).host, *options.pop("allowed_hosts", ()))
    app = create_app(
        hub.registry,
        **options,
        identity=resolvers(hub) or None,
        resolve=hub.access.resolve,
        ready=lambda: readiness(hub),
        anonymous=serves_anonymous(file),
        authorization_servers=issuers,
        allowed_hosts=hosts,
        limits=limits_of(file),
        timeout=config.limits.timeout,
    )
    hub.fronts.append(app.state.pipeline.front)
    app.state.sessions.is_offered = not is_shared(file)
    streams = app.state.pipeline.front.open_streams
    hub.serve_authority(lambda: not streams.is_closing)
    # Calls that wait for approval end when the server shuts down.
    streams.on_close = hub.registry.authority.store.wake
    hub.registry.register_all(control_operations(hub), replace=True)
    workers = [*map(validate_operation, worker_operations(hub))]

    def offer_workers() -> None:
        """Offer the operations about workers while the file imports workers."""
        is_offered = hub.registry.registered(WORKERS) in workers
        if is_offered == any(each.workers for each in hub.file.config.brokers.values()):
            return
        if is_offered:
            for each in workers:
                hub.registry.unregister(each.spec.id)
        else:
            hub.registry.register_all(workers, replace=True)

    offer_workers()
    hub.on_reload.append(offer_workers)
    app.state.metrics.sources += [
        (WORKERS, lambda: collect_group_metrics(hub)),
        (SOURCES, lambda: collect_source_metrics(hub)),
    ]
    return app


def build_worker_app(hub: Hub, worker: CallServer, monitor: GroupMonitor, host: str) -> "Starlette":
    """Return the application that shows the health and the metrics of a worker.

    Raises:
        ConfigError: If a key cannot be read.
    """

    async def ready() -> bool | JSONObject:
        return worker.is_serving and worker.target.is_connected and await readiness(hub)

    async def group() -> bytes:
        try:
            return group_metrics([await monitor.look()])
        except TransportError:
            # `/readyz` reports that the broker cannot be reached.
            return b""

    async def own() -> bytes:
        return worker_metrics(worker)

    options = hub.file.options(ServerConfig, hub.file.config.serve)
    app = create_probe_app(
        hub.registry,
        identity=resolvers(hub) or None,
        anonymous=serves_anonymous(hub.file),
        allowed_hosts=(*LOOPBACK, host, *options.get("allowed_hosts", ())),
        limits=limits_of(hub.file),
        ready=ready,
    )
    app.state.metrics.sources += [(None, own), (None, group)]
    return app


async def mcp_server(hub: Hub, caller: str | None) -> "RegistryServer":
    """Return the MCP server of a hub for standard input and output, with the settings of its file.

    Args:
        hub: The hub.
        caller: The name of the caller, as in `Hub.identity`; None for no identity.

    Raises:
        ConfigError: If there is no such caller.
        CallError: `ACCESS_DENIED` if the grant is not valid.
    """
    from operations.mcp import RegistryServer  # noqa: PLC0415 - needs an extra, and a worker does not use it

    identity = None if caller is None else await hub.identity(caller)
    hub.serve_authority()
    config = ServerConfig(**hub.file.options(ServerConfig, hub.file.config.serve))
    settings = replace(
        config.mcp_settings,
        identity=identity,
        timeout=hub.file.config.limits.timeout,
        expose_errors=config.expose_errors,
        limits=limits_of(hub.file),
        scopes_supported=config.scopes_supported,
    )
    server = RegistryServer(hub.registry, settings)

    def update_limits() -> None:
        limits = hub.file.config.limits
        server.front.configure(limits_of(hub.file), timeout=limits.timeout)

    def current(identity: Identity | None) -> Identity | None:
        """Return an identity whose calls that wait for approval are rejected if a reload removes its access."""

        async def is_valid() -> bool:
            return identity is not None and has_access_of(identity, server.identity)

        return None if identity is None else with_check(identity, is_valid)

    def update_caller() -> None:
        # A caller or grant that the file does not accept any more may call nothing.
        if caller is not None and identity is not None:
            server.identity = structs.replace(identity, grant=_NOTHING)
            server.identity = current(hub.named_identity(caller))

    server.identity = current(identity)
    hub.on_reload += [update_limits, update_caller]
    return server


_NOTHING = Grant(blocks=(Block(id="none", holder="none", operations=()),), keys=("",))
"""A grant that covers no operation."""


def resolvers(hub: Hub) -> list[IdentityResolver]:
    """Return the identity resolvers of the config and of its `setup` function.

    Raises:
        ConfigError: If a key cannot be read.
    """
    if not can_sign_in(hub.file):
        return list(hub.resolvers)
    # Both kinds, because the file may change from one to the other while the hub runs.
    return [
        APIKeys(hub.access.find),
        hub.access.identify_token,
        credential_resolver(hub.access.grant),
        *hub.resolvers,
    ]


# ------------------------------------------------------------ several processes

VARIABLE: Final = "OPERATIONS_PROCESS"
"""The environment variable with the inherited file descriptors: listening socket and channel to the first process."""

_READY, _RELOAD = b"r", b"h"
_ENDED = 1


@dataclass(frozen=True, slots=True)
class Process:
    """The socket and channel that a process inherits from the first one."""

    listener: socket.socket
    channel: socket.socket

    announces: bool
    """Whether this process reports readiness for all processes."""

    @classmethod
    def inherited(cls) -> "Process | None":
        """Return the inherited socket and channel; None if this process is the only one, or the first."""
        given = os.environ.pop(VARIABLE, "").split()
        if len(given) != 3:
            return None
        listener, channel = (socket.socket(fileno=int(each)) for each in given[:2])
        return cls(listener, channel, given[2] == "1")

    def is_ready(self, end: Callable[[], object]) -> None:
        """Report that this process is ready; call `end` when the first process has ended."""
        with suppress(OSError):
            self.channel.send(_READY)
        self.channel.setblocking(False)
        loop = asyncio.get_running_loop()

        def read() -> None:
            # The first process never sends data, so this is the end of the channel.
            with suppress(OSError):
                self.channel.recv(1)
            loop.remove_reader(self.channel)
            end()

        loop.add_reader(self.channel, read)

    def reload_all(self) -> None:
        """Make all processes read the config again."""
        with suppress(OSError):
            self.channel.send(_RELOAD)


async def supervise(
    arguments: Sequence[str], count: int, listener: socket.socket, grace: float
) -> int:
    """Run several processes of this program until SIGTERM or SIGINT; return the exit code.

    Args:
        arguments: The command-line arguments of each process.
        count: The number of processes.
        listener: The shared socket. It is closed first, so that no request waits for a process that is ending.
        grace: Seconds that the processes have to end before they are killed.
    """
    loop = asyncio.get_running_loop()
    processes = _Processes([sys.executable, "-m", "operations", *arguments], listener)
    with shutdown_event() as shutdown:
        if receives_signals():
            loop.add_signal_handler(signal.SIGHUP, processes.reload)
        tasks = [asyncio.Task(processes.keep(number)) for number in range(count)]
        stopping = asyncio.Task(shutdown.wait())
        try:
            ended, _ = await asyncio.wait({stopping, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if receives_signals():
                loop.remove_signal_handler(signal.SIGHUP)
            stopping.cancel()
            listener.close()
            processes.stop()
            _, late = await asyncio.wait(tasks, timeout=grace)
            if late:
                processes.kill()
                await asyncio.wait(late)
    # If a process could not be started, its exit code gives the reason.
    codes = [task.result() for task in tasks if stopping in ended or task in ended]
    return next((abs(code) for code in codes if code), 0)


class _Processes:
    """The processes that serve."""

    def __init__(self, command: Sequence[str], listener: socket.socket) -> None:
        self._command = command
        self._listener = listener
        self._running: dict[asyncio.subprocess.Process, socket.socket] = {}
        """The running processes, with the channel to each."""
        self._ready: set[asyncio.subprocess.Process] = set()
        self._stopping = asyncio.Event()
        self._was_ready = False

    def reload(self) -> None:
        """Make all processes read the config again. A process that is starting reads it anyway; SIGHUP would end it."""
        self._signal(self._ready, signal.SIGHUP)

    def stop(self) -> None:
        """Make all processes finish their calls and end.

        This does not use a signal, because a second signal ends a process at once, and a service manager may already
        have sent one to all processes.
        """
        self._stopping.set()
        for channel in self._running.values():
            with suppress(OSError):
                channel.shutdown(socket.SHUT_RDWR)

    def kill(self) -> None:
        """End all processes at once."""
        self._signal(self._running, signal.SIGKILL)

    def _signal(
        self, processes: Iterable[asyncio.subprocess.Process], number: signal.Signals
    ) -> None:
        for process in processes:
            with suppress(ProcessLookupError):
                process.send_signal(number)

    async def keep(self, number: int) -> int:
        """Run one process and restart it when it ends; return the last exit code.

        If all processes end before any is ready, they are not restarted.
        """
        backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE)
        while True:
            try:
                code = await self._run(number, backoff)
            except OSError as error:
                # The machine may be out of memory or processes for a while.
                logger.warning("process %d cannot be started: %s", number, error)
                code = _ENDED
            if self._stopping.is_set():
                return code
            if not self._was_ready:
                return code or _ENDED
            logger.warning("process %d exited with code %d and is restarted", number, code)
            with move_on_after(backoff.pause()):
                await self._stopping.wait()
            if self._stopping.is_set():
                return 0

    async def _run(self, number: int, backoff: Backoff) -> int:
        """Start one process and wait for its end; return its exit code."""
        mine, theirs = socket.socketpair()
        descriptors = self._listener.fileno(), theirs.fileno()
        announces = int(number == 0 and not self._was_ready)
        with mine, theirs:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                env={**os.environ, VARIABLE: f"{descriptors[0]} {descriptors[1]} {announces}"},
                pass_fds=descriptors,
                # Only the first process receives Ctrl-C; it then ends the others in order.
                start_new_session=True,
            )
            theirs.close()
            self._running[process] = mine
            if self._stopping.is_set():
                self.stop()
            listening = asyncio.Task(self._listen(process, mine, backoff))
            try:
                return await process.wait()
            finally:
                del self._running[process]
                self._ready.discard(process)
                listening.cancel()
                await asyncio.wait({listening})

    async def _listen(
        self, process: asyncio.subprocess.Process, channel: socket.socket, backoff: Backoff
    ) -> None:
        """Read the reports of a process."""
        channel.setblocking(False)
        loop = asyncio.get_running_loop()
        with suppress(OSError):
            while report := await loop.sock_recv(channel, 1):
                if report == _READY:
                    self._was_ready = True
                    self._ready.add(process)
                    backoff.reset()
                else:
                    self.reload()
