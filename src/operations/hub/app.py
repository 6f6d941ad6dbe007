"""The application of a hub: its registry behind HTTP, MCP and brokers."""

import errno
import logging
import socket
import ssl
from collections.abc import AsyncGenerator, Collection, Generator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from msgspec import structs

from operations.base.errors import OperationsError, TransportError
from operations.base.types import JSONObject
from operations.calls import CallServer
from operations.calls.source.monitoring import GroupMonitor
from operations.config import ConfigFile
from operations.contract.access import Identity, with_check
from operations.contract.functions import validate_operation
from operations.contract.grant import Block, Grant
from operations.front.config import JWTConfig, ListenConfig, MCPServerSettings, ServerConfig
from operations.front.credentials import has_access_of
from operations.front.runs import run_operations
from operations.hub import Hub
from operations.hub.opening import can_sign_in, serves_anonymous
from operations.hub.operations import (
    SOURCES,
    WORKERS,
    collect_group_metrics,
    collect_source_metrics,
    control_operations,
    readiness,
    worker_operations,
)
from operations.hub.source import limits_of
from operations.io.guard import LOOPBACK
from operations.server import APIKeys, IdentityResolver, create_app, credential_resolver
from operations.server.app import create_probe_app
from operations.server.http11.running import InsecureBindError, running_on
from operations.sources.contract import Entry
from operations.telemetry.metrics import group_metrics, worker_metrics

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from operations.mcp import RegistryServer


logger = logging.getLogger("operations.hub")


def listen_config(
    file: ConfigFile, host: str | None = None, port: int | None = None, table: Entry | None = None
) -> ListenConfig:
    """Return the address of a table of a config, by default `[serve]`, unless `host` and `port` replace it."""
    options = file.options(ListenConfig, file.config.serve if table is None else table)
    for name in ("certificate", "certificate_key"):
        if options.get(name) is not None and table is None:
            file.existing(str(options[name]), f"serve.{name}")
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


def _with_skills(file: ConfigFile, settings: MCPServerSettings) -> MCPServerSettings:
    """Return the settings of MCP with the folders of skills, which are relative to the file.

    Raises:
        ConfigError: If they cannot be read.
    """
    if not settings.skills:
        return settings
    from operations.mcp.serving.skills import read_skills  # noqa: PLC0415 - needs an extra

    folders = [str(file.resolve(folder)) for folder in settings.skills]
    try:
        read_skills(folders)
    except (ValueError, OSError) as error:
        raise file.error(f"cannot be used: {error}", "serve.mcp.skills") from error
    return replace(settings, skills=folders)


def build_app(
    hub: Hub,
    *,
    entry_points: Collection[str] | None = None,
    host: str | None = None,
    guests: IdentityResolver | None = None,
) -> "Starlette":
    """Return the application of a config, with all of its entry points or with the given ones.

    Args:
        hub: The hub.
        entry_points: Their names.
        host: The address that the application is served at.
        guests: Makes a second application, which admits only callers with a credential of the config or of this.

    Raises:
        ConfigError: If a key cannot be read.
    """
    file, config = hub.file, hub.file.config
    options = file.options(ServerConfig, config.serve)
    has_several_processes = is_shared(file) and hub.code is None
    if hub.code is not None:
        # The caller is the person who writes the code.
        options["expose_errors"] = True
    if entry_points is not None:
        for name in ("mcp", "websocket", "console"):
            options[name] = name in entry_points and (options[name] or True)
    if has_several_processes and options["mcp"]:
        options["mcp"] = replace(ServerConfig(**options).mcp_settings, stateless=True)
    if options["mcp"]:
        options["mcp"] = _with_skills(file, ServerConfig(**options).mcp_settings)
    access = config.access
    issuers = access.authorization_servers
    if access.jwt is not None and options.get("public_url") and not issuers:
        issuers = (JWTConfig(**file.options(JWTConfig, access.jwt)).issuer,)
    hosts = (*LOOPBACK, host or listen_config(file).host, *options.pop("allowed_hosts", ()))
    app = create_app(
        hub.registry,
        **options,
        # The last resolver explains why a credential is wrong.
        identity=[*([] if guests is None else [guests]), *resolvers(hub)] or None,
        resolve=hub.access.resolve,
        ready=lambda: readiness(hub),
        anonymous=guests is None and serves_anonymous(file),
        authorization_servers=issuers,
        allowed_hosts=hosts,
        limits=limits_of(file),
        timeout=config.limits.timeout,
    )
    front = app.state.pipeline.front
    streams = front.open_streams
    # Calls that wait for approval end when the server shuts down.
    streams.on_close = hub.registry.authority.store.wake
    if guests is not None:
        hub.guest_fronts.append(front)
        return app
    hub.fronts.append(front)
    app.state.sessions.is_offered = not has_several_processes
    hub.serve_authority(lambda: not streams.is_closing)
    hub.registry.register_all(control_operations(hub), replace=True)
    if hub.registry.run_store is not None:
        hub.registry.register_all(run_operations(hub.registry), replace=True)
    workers = [*map(validate_operation, worker_operations(hub))]

    def offer_workers() -> None:
        """Offer the operations about workers while the file imports workers."""
        is_offered = hub.registry.registered(WORKERS) in workers
        if is_offered == any(each.workers for each in hub.file.config.tables("brokers").values()):
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
