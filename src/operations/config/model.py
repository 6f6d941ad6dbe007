"""The tables of `operations.toml`, as frozen dataclasses.

Rule 1: a table that configures a part of the library is converted to the library's own config classes, whose fields are
        the keys of the table. This module defines only keys without such a class.
Rule 2: a file never contains a secret, but names the environment variable or the file that holds it.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Annotated, Any, ClassVar, cast

from msgspec import Meta

from operations.base.types import Count, FunctionName, JSONObject, Names, Seconds
from operations.calls.serving.jobs import WorkerConfig
from operations.calls.source.remote import RemoteConfig
from operations.contract.access import Identity
from operations.contract.options import Derived, KeyPath, Secret, file_class, keys_of
from operations.contract.specs import OutputPolicy
from operations.front.config import JWTConfig, ListenConfig, ServerConfig
from operations.front.limits import Limits
from operations.mcp.config import MCPClientConfig
from operations.pubsub.config import NatsConfig, RedisConfig
from operations.recorder.audit import AuditConfig
from operations.recorder.logs import LogConfig
from operations.schema import Schema, schema_for
from operations.telemetry.config import TelemetryConfig
from operations.tools.config import ToolConfig

NATS_SCHEMES = ("nats", "tls", "ws", "wss")
REDIS_SCHEMES = (
    *("redis", "redis+sentinel", "redis+cluster"),
    *("rediss", "rediss+sentinel", "rediss+cluster"),
)

_IS_TABLE = {"namespace": "the name of the table"}


def _http_service() -> tuple[type, ...]:
    from operations.openapi.source.config import HTTPServiceConfig  # noqa: PLC0415 - takes long to import

    return (HTTPServiceConfig,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A table that is converted to config classes of the library, whose fields are in `options`."""

    derived: ClassVar[Derived]

    options: JSONObject = field(default_factory=dict[str, Any])

    def classes(self) -> tuple[Any, ...]:
        """Return the classes that this table is converted to."""
        return self.derived.load()

    def of(self, cls: Any) -> JSONObject:
        """Return the fields of one of these classes that the file sets, or whose default in a file differs."""
        given, known = {**self.derived.defaults, **self.options}, keys_of(cls)
        return {key: value for key, value in given.items() if key in known}


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAPIEntry(Entry):
    """An HTTP API. The name of its table is the namespace of its operations.

    Attributes:
        document: The OpenAPI or Swagger document: a path relative to this file, or an address.
        scopes: Scopes that a caller needs for every operation of this source; short for `access`.
        pages: Add a subscription that reads all pages of an operation if the document declares paging; short for
            `pagination`.
        enabled: Set to false to skip this source.
    """

    derived: ClassVar = Derived(_http_service, _IS_TABLE)

    document: str
    scopes: Names = ()
    pages: bool = False
    enabled: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class MCPEntry(Entry):
    """An MCP server: a command to start, or an address. The name of its table is its namespace.

    Attributes:
        token: Sent as a bearer token; short for `auth`.
        scopes: Scopes that a caller needs for every operation of this source; short for `access`.
        enabled: Set to false to skip this source.
    """

    derived: ClassVar = Derived(lambda: (MCPClientConfig,), _IS_TABLE)

    token: Secret | None = None
    scopes: Names = ()
    enabled: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerEntry(Entry):
    """A broker between callers and workers: its connection, the import of workers' operations, and worker settings.

    Attributes:
        url: `redis://`, `nats://` or one of their variants; it may contain the user, but not the password.
        workers: Import the operations of the workers of `group`.
        delegate: Call the workers on behalf of the caller, with a grant for each call; needs `access.grants`. The
            command `operations grant key GROUP` prints the key for the workers.
        enabled: Set to false to skip this source.
    """

    derived: ClassVar = Derived(
        lambda: (RedisConfig, NatsConfig, RemoteConfig, WorkerConfig),
        {
            "url": "a key of its own",
            "address": "of each connection",
            "limits": "the table [limits]",
            "delegate": "a key of its own",
        },
    )

    url: str
    workers: bool = False
    delegate: bool = False
    enabled: bool = True

    @property
    def is_nats(self) -> bool:
        """Whether the address is that of a NATS server."""
        return self.url.partition("://")[0].lower() in NATS_SCHEMES

    def classes(self) -> tuple[Any, ...]:
        """Return the classes that this table is converted to, which depend on the kind of broker."""
        redis, nats, *others = self.derived.load()
        return (nats if self.is_nats else redis, *others)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolEntry(Entry):
    """Settings for operations. The name of the table is an id, or a pattern such as `github.delete_*`."""

    derived: ClassVar = Derived(lambda: (ToolConfig,), {})


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyEntry(Entry):
    """A caller with a key. The name of the table is the id of the caller.

    Attributes:
        key: The key itself.
        sha256: The SHA-256 of the key in hexadecimal, instead of the key.
    """

    derived: ClassVar = Derived(
        lambda: (Identity,),
        {
            "id": "the name of the table",
            "expires_at": "of a token",
            "acting": "of a token",
            "grant": "of a token",
            "issuer": "of a token",
        },
    )

    key: Secret | None = None
    sha256: Annotated[str, Meta(pattern="^[0-9a-fA-F]{64}$")] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JWTEntry(Entry):
    """Signed tokens of an identity provider."""

    derived: ClassVar = Derived(lambda: (JWTConfig,), {})


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantsEntry:
    """Grants: identities narrowed for agents. `operations grant` creates them.

    Attributes:
        key: At least 32 random bytes. The key can create any grant.
    """

    key: Secret


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthorityEntry:
    """The store of budgets, revocations and approvals; in memory by default.

    Attributes:
        file: A file, relative to this one, which survives restarts; the processes of one machine may share it.
        broker: The name of a broker in `brokers`, whose Redis or NATS server stores them for several hubs.
    """

    file: str | None = None
    broker: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """A tamper-evident record of calls: `operations ledger verify` checks it.

    Attributes:
        file: The record, relative to this file. Each process needs its own file: `{pid}` is replaced by the process id.
        key: At least 32 random bytes, which sign the lines.
        head: A file in another place for the last number and signature, so that missing lines at the end are detected.
        strict: Reject calls whose lines cannot be written.
        sync: Wait until each line is on the disk, so that a power failure loses no line. Calls take longer.
    """

    file: str
    key: Secret
    head: str | None = None
    strict: bool = False
    sync: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessEntry:
    """External callers. Without this table, they have no identity.

    Attributes:
        anonymous: Serve requests without a credential; by default true unless `jwt` is set.
        authorization_servers: Addresses of the servers that issue tokens for `serve.public_url`; by default the issuer
            of `jwt`. OAuth clients, such as MCP clients, discover them.
        keys: Callers with a key, by caller id.
        jwt: Signed tokens.
        grants: Identities narrowed for agents.
    """

    anonymous: bool | None = None
    authorization_servers: Names = ()
    keys: dict[str, KeyEntry] = field(default_factory=dict[str, KeyEntry])
    jwt: JWTEntry | None = None
    grants: GrantsEntry | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeEntry(Entry):
    """The address and the entry points of `operations serve`.

    Attributes:
        processes: The number of server processes. Limits, rates and caches apply to each process. With several
            processes, MCP has no sessions, and there is no console.
    """

    derived: ClassVar = Derived(
        lambda: (ListenConfig, ServerConfig),
        {
            "limits": "the table [limits]",
            "timeout": "limits.timeout",
            "anonymous": "access.anonymous",
            "authorization_servers": "access.authorization_servers",
        },
        {"port": 8000, "mcp": True, "websocket": True, "console": True},
    )

    processes: Count = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkEntry(Entry):
    """The address for health (`/healthz`, `/readyz`) and metrics (`/metrics`) of `operations work`; none by default."""

    derived: ClassVar = Derived(lambda: (ListenConfig,), {}, {"port": 9464})


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsEntry(Entry):
    """Limits of requests and calls.

    Attributes:
        timeout: The time limit of one call through any entry point, in seconds.
        threads: The number of blocking handlers that run concurrently.
    """

    derived: ClassVar = Derived(lambda: (Limits,), {})

    timeout: Seconds = 30
    threads: Count = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEntry(Entry):
    """The log of `operations serve` and `operations work` on standard error."""

    derived: ClassVar = Derived(lambda: (LogConfig,), {})


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry(Entry):
    """Records of every call: caller, operation, outcome, duration and id, never arguments or results."""

    derived: ClassVar = Derived(lambda: (AuditConfig,), {})


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryEntry(Entry):
    """Traces and metrics that are sent to an OpenTelemetry collector."""

    derived: ClassVar = Derived(lambda: (TelemetryConfig,), {})


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEntry:
    """The data for `operations trace`: start and end of calls, never their input or results.

    Attributes:
        enabled: Set to false to record no data.
        file: The path of the data, relative to this file; by default in the user's state folder.
    """

    enabled: bool = True
    file: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The content of `operations.toml`.

    Attributes:
        modules: Packages, folders or files of Python code to scan for operations.
        setup: Your own function, `module:function`, which is called with the hub before its sources are opened.
        mcp_json: Existing files that list MCP servers under `mcpServers`.
        output: The output policy (how results are normalised), unless a source or an operation sets its own.
        openapi: HTTP APIs, by namespace.
        mcp: MCP servers, by namespace.
        brokers: Redis and NATS servers, by name.
        tools: Settings for operations of any source, by id or pattern.
        access: The external callers and their keys.
        authority: The store of budgets, revocations and approvals.
        ledger: A tamper-evident record of calls.
        serve: The address and the entry points of `operations serve`.
        work: The address for health and metrics of `operations work`.
        limits: Limits of requests and calls.
        trace: The data for `operations trace`.
        log: The log on standard error.
        audit: Records of every call.
        telemetry: Traces and metrics for a collector.
    """

    modules: Names = ()
    setup: FunctionName | None = None
    mcp_json: Names = ()
    output: OutputPolicy = "cast"
    openapi: dict[str, OpenAPIEntry] = field(default_factory=dict[str, OpenAPIEntry])
    mcp: dict[str, MCPEntry] = field(default_factory=dict[str, MCPEntry])
    brokers: dict[str, BrokerEntry] = field(default_factory=dict[str, BrokerEntry])
    tools: dict[str, ToolEntry] = field(default_factory=dict[str, ToolEntry])
    access: AccessEntry = field(default_factory=AccessEntry)
    authority: AuthorityEntry = field(default_factory=AuthorityEntry)
    ledger: LedgerEntry | None = None
    serve: ServeEntry = field(default_factory=ServeEntry)
    work: WorkEntry | None = None
    limits: LimitsEntry = field(default_factory=LimitsEntry)
    trace: TraceEntry = field(default_factory=TraceEntry)
    log: LogEntry = field(default_factory=LogEntry)
    audit: AuditEntry = field(default_factory=AuditEntry)
    telemetry: TelemetryEntry = field(default_factory=TelemetryEntry)


def entries_of(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Entry]]:
    """Yield every table of a config that is converted to config classes of the library, with its key."""
    if isinstance(value, Entry):
        yield path, value
    elif isinstance(value, Mapping):
        for name, each in cast("Mapping[str, Any]", value).items():
            yield from entries_of(each, (*path, name))
    elif isinstance(value, Config | AccessEntry):
        for each in fields(value):
            yield from entries_of(getattr(value, each.name), (*path, each.name))


_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def config_schema(tables: Iterable[str] | None = None) -> Schema:
    """Return the schema of a file; with `tables`, of a file that has only these tables.

    This imports the config classes of the given tables only, because some imports are slow.
    """
    return _schema(None if tables is None else frozenset(tables))


@cache
def _schema(tables: frozenset[str] | None) -> Schema:
    document = _without_null(schema_for(file_class(Config, tables)).document)
    return Schema({"$schema": _DIALECT, **document, "title": "operations.toml"})


def _without_null(schema: Any) -> Any:
    """Return `schema` without null, which TOML cannot express; the key can be omitted instead."""
    if isinstance(schema, list):
        items: list[Any] = schema  # pyright: ignore[reportUnknownVariableType]
        return [_without_null(item) for item in items]
    if not isinstance(schema, dict):
        return schema
    node: JSONObject = {
        key: _without_null(value)
        for key, value in cast("JSONObject", schema).items()
        if not (key == "default" and value is None)
    }
    options: list[Any] = [item for item in node.get("anyOf", ()) if item != {"type": "null"}]
    if len(options) == 1:
        del node["anyOf"]
        return options[0] | node
    if options:
        node["anyOf"] = options
    return node
