"""The application of `operations serve`."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from starlette.applications import Starlette

from operations._hosts import LOOPBACK
from operations.access import Identity
from operations.calls import CallServer
from operations.calls.monitoring import GroupMonitor
from operations.config import ConfigFile
from operations.errors import TransportError
from operations.front.config import JWTConfig, ListenConfig, MCPServerSettings, ServerConfig
from operations.hub.access import can_sign_in, limits_of, serves_anonymous
from operations.hub.controls import (
    WORKERS,
    collect_group_metrics,
    control_operations,
    readiness,
    worker_operations,
)
from operations.hub.hub import Hub
from operations.server import APIKeys, IdentityResolver, create_app, credential_resolver
from operations.server.app import create_probe_app
from operations.telemetry.metrics import group_metrics, worker_metrics
from operations.types import JSONObject


def listen_config(file: ConfigFile) -> ListenConfig:
    """Return where a config wants to be served."""
    return ListenConfig(**file.options(ListenConfig, file.config.serve))


def entry_points_of(file: ConfigFile) -> tuple[str, ...]:
    """Return the application of a config: the HTTP API, and the entry points that are not switched off."""
    options = file.options(ServerConfig, file.config.serve)
    # No console: its sign-in session would be known to one process only.
    kinds = ("mcp", "websocket") if is_shared(file) else ("mcp", "websocket", "console")
    return ("http", *(name for name in kinds if options[name]))


def is_shared(file: ConfigFile) -> bool:
    """Return whether several processes serve a config, so that the next request may reach another one."""
    return file.config.serve.processes > 1


def build_app(
    hub: Hub, *, entry_points: Collection[str] | None = None, host: str | None = None
) -> Starlette:
    """Return one application with everything that a config serves, or with these entry points alone.

    Raises:
        ConfigError: If a key cannot be read.
    """
    file, config = hub.file, hub.file.config
    options = file.options(ServerConfig, config.serve)
    if entry_points is not None:
        for name in ("mcp", "websocket", "console"):
            options[name] = name in entry_points and (options[name] or True)
    if is_shared(file) and options["mcp"]:
        given = options["mcp"]
        settings = given if isinstance(given, MCPServerSettings) else MCPServerSettings()
        options["mcp"] = replace(settings, stateless=True)
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
    hub.serve_authority(lambda: app.state.readiness.is_up)
    controls = control_operations(hub, is_up=lambda: app.state.readiness.is_up)
    workers = worker_operations(hub, is_up=lambda: app.state.readiness.is_up)
    for each in (*controls, *workers):
        hub.registry.register(each, replace=True)
    if workers:
        app.state.metrics.sources.append((WORKERS, lambda: collect_group_metrics(hub)))
    return app


def build_worker_app(hub: Hub, worker: CallServer, monitor: GroupMonitor, host: str) -> Starlette:
    """Return the application that shows the health and the metrics of a worker.

    Raises:
        ConfigError: If a key cannot be read.
    """

    def ready() -> bool | JSONObject:
        return worker.is_serving and worker.target.is_connected and readiness(hub)

    async def group() -> bytes:
        try:
            return group_metrics([await monitor.look()])
        except TransportError:
            # The broker cannot be reached, which `/readyz` reports.
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


def mcp_server(hub: Hub, identity: Identity | None) -> Any:
    """Return the MCP server of a hub for standard input and output, with the settings of its file."""
    from operations.mcp import RegistryServer  # noqa: PLC0415 - needs an extra, and a worker does not use it

    hub.serve_authority()
    options = hub.file.options(ServerConfig, hub.file.config.serve)
    given = options["mcp"]
    settings = replace(
        given if isinstance(given, MCPServerSettings) else MCPServerSettings(),
        identity=identity,
        timeout=hub.file.config.limits.timeout,
        expose_errors=options.get("expose_errors", False),
        limits=limits_of(hub.file),
        scopes_supported=options.get("scopes_supported", ()),
    )
    return RegistryServer(hub.registry, settings)


def resolvers(hub: Hub) -> list[IdentityResolver]:
    """Return what resolves the identities of callers: those of the config, and of its `setup`.

    Raises:
        ConfigError: If a key cannot be read.
    """
    if not can_sign_in(hub.file):
        return list(hub.resolvers)
    # Both: the file may change from one to the other while the hub runs.
    return [
        APIKeys(hub.access.find),
        hub.access.identify_token,
        credential_resolver(hub.access.grant),
        *hub.resolvers,
    ]
