"""The tables of `operations.toml`, as frozen dataclasses.

Rule 1: a table that configures a part of the library is converted to the library's own config classes, whose fields are
        the keys of the table. This module defines only keys without such a class.
Rule 2: a file never contains a secret, but names the environment variable or the file that holds it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, make_dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Final, cast

import msgspec
from msgspec import Meta

from operations.authority.ledger import LedgerEntry
from operations.base.types import TABLE, Count, FunctionName, JSONObject, Names, Seconds
from operations.code.config import CodeLimits
from operations.contract.access import Identity
from operations.contract.options import Derived, KeyPath, Secret, file_class
from operations.contract.specs import OutputPolicy
from operations.front.config import JWTConfig, ListenConfig, ServerConfig
from operations.front.limits import Limits
from operations.recorder.audit import AuditConfig
from operations.recorder.graph import TraceEntry
from operations.recorder.kinds import kinds as sink_kinds
from operations.recorder.logs import LogConfig
from operations.schema import Schema, schema_for
from operations.sources.contract import Entry, SourceKind
from operations.sources.kinds import kinds
from operations.telemetry.config import TelemetryConfig
from operations.tools.config import ToolConfig


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
        named="id",
    )

    key: Secret | None = None
    sha256: Annotated[str, Meta(pattern="^[0-9a-fA-F]{64}$")] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JWTEntry(Entry):
    """Signed tokens of an identity provider."""

    advanced: ClassVar = frozenset(["algorithms", "scope_claim", "leeway"])
    derived: ClassVar = Derived(lambda: (JWTConfig,), {})


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantsEntry:
    """Grants: identities narrowed for agents. `operations grant` creates them.

    Attributes:
        key: At least 32 random bytes. The key can create any grant.
    """

    key: Secret


@dataclass(frozen=True, slots=True, kw_only=True)
class StateEntry:
    """The store of budgets, revocations and approvals; in memory by default.

    Attributes:
        url: `sqlite:` with a path relative to this file, which survives restarts and which the processes of one machine
            may share; `postgresql://...`, `redis://...` or `nats://...` for several hubs; or an address whose scheme an
            installed package registers.
        password: The password, if the address has none.
        broker: The name of a broker in `brokers`, whose connection is used instead of `url`.
        key: At least 32 random bytes, with which all values are encrypted, and runs if they have no key of their own;
            or a list of which the first one encrypts, and all decrypt.
    """

    url: str | None = None
    password: Secret | None = None
    broker: str | None = None
    key: Secret | tuple[Secret, ...] | None = None

    @property
    def is_shared(self) -> bool:
        """Whether several processes can use the store."""
        return self.url is not None or self.broker is not None


class ScheduleEntry(msgspec.Struct, frozen=True, kw_only=True, rename={"as_": "as"}):
    """A run that is started again and again. The name of the table is the name of the schedule.

    Attributes:
        operation: The id of the operation.
        input: Its input.
        every: Seconds between two runs, counted from 1970 on; or use `cron`.
        cron: Five fields in UTC: minute, hour, day of the month, month, day of the week.
        as_: A caller of `access.keys`, as whom it runs; by default the operator.
    """

    operation: str
    input: Annotated[JSONObject, TABLE] = msgspec.field(default_factory=dict[str, Any])
    every: Seconds | None = None
    cron: str | None = None
    as_: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsEntry:
    """The store of runs: calls that survive crashes, restarts and deploys.

    Attributes:
        url: `sqlite:` with a path relative to this file, or `postgresql://USER@HOST/DATABASE` without a password; by
            default that of `state`, with its password.
        password: The password of the PostgreSQL user.
        key: At least 32 random bytes, with which inputs, results, steps and callers are encrypted, or a list of which
            the first one encrypts, and all decrypt; by default that of `state`.
        working: The number of runs that each process works on at a time.
        live_per_caller: The number of live runs of one caller.
        live: The number of live runs of all callers.
        steps: The number of steps of one run.
        lease: Seconds after which other processes take over the runs of a process that has stopped.
        grace: Seconds that runs have to end when the process ends; the others are continued elsewhere.
        park: Seconds for which a run that only waits stays in memory.
        keep_steps: Keep the steps of completed runs.
        keep_completed: Seconds for which completed and cancelled runs are kept.
        keep_failed: Seconds for which failed and unknown runs are kept.
        keep_unanswered: Seconds after which a run fails whose question has no answer.
        schedules: Runs that are started at certain times, by name.
    """

    advanced: ClassVar = frozenset(["live_per_caller", "live", "steps", "lease", "grace", "park"])

    url: str | None = None
    password: Secret | None = None
    key: Secret | tuple[Secret, ...] | None = None
    working: Count = 50
    live_per_caller: Count = 1_000
    live: Count = 100_000
    steps: Count = 10_000
    lease: Seconds = 10
    grace: Seconds = 5
    park: Seconds = 60
    keep_steps: bool = False
    keep_completed: Seconds = 24 * 3600
    keep_failed: Seconds = 7 * 24 * 3600
    keep_unanswered: Seconds = 30 * 24 * 3600
    schedules: dict[str, ScheduleEntry] = field(default_factory=dict[str, ScheduleEntry])


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

    advanced: ClassVar = frozenset(
        ["keep_alive", "scopes_supported", "heartbeat", "expose_errors", "version"]
    )
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

    advanced: ClassVar = frozenset(["keep_alive"])
    derived: ClassVar = Derived(lambda: (ListenConfig,), {}, {"port": 9464})


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsEntry(Entry):
    """Limits of requests and calls.

    Attributes:
        timeout: The time limit of one call through any entry point, in seconds.
        threads: The number of blocking handlers that run concurrently.
    """

    advanced: ClassVar = frozenset(
        [
            "body_seconds",
            "values",
            "depth",
            "answer_seconds",
            "query_characters",
            "failed_attempts_per_second",
            "failed_attempts",
            "output_bytes",
            "output_bytes_per_caller",
            "sessions",
            "sessions_per_caller",
            "sessions_per_address",
        ]
    )
    derived: ClassVar = Derived(lambda: (Limits,), {})

    timeout: Seconds = 30
    threads: Count = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedScriptEntry:
    """A reviewed script as an operation. The name of the table is its id; `operations code save` writes it.

    Attributes:
        file: The script, relative to this file.
        digest: The digest of the version that was reviewed; a changed file is rejected.
        scopes: Scopes that a caller needs; each call of the script is checked in any case.
        description: What it does.
    """

    file: str
    digest: str
    scopes: Names = ()
    description: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeEntry(Entry):
    """Code mode: agents search for operations and run scripts that call them, with `code.search` and `code.run`.

    Attributes:
        scopes: Scopes that a caller needs to run scripts; each call of a script is checked in any case.
        checks: Check the types of scripts before they run.
        saved: Reviewed scripts that are operations, by id.
    """

    advanced: ClassVar = frozenset(
        [
            "calls",
            "concurrent",
            "cpu",
            "wall",
            "memory",
            "output",
            "script",
            "per_caller",
            "processes",
        ]
    )
    derived: ClassVar = Derived(lambda: (CodeLimits,), {})

    scopes: Names = ()
    checks: bool = True
    saved: dict[str, SavedScriptEntry] = field(default_factory=dict[str, SavedScriptEntry])


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEntry(Entry):
    """The log of `operations serve` and `operations work` on standard error."""

    derived: ClassVar = Derived(lambda: (LogConfig,), {})


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryEntry(Entry):
    """Traces and metrics that are sent to an OpenTelemetry collector."""

    advanced: ClassVar = frozenset(["interval", "timeout"])
    derived: ClassVar = Derived(lambda: (TelemetryConfig,), {})


@dataclass(frozen=True, kw_only=True)
class RecordEntry:
    """Where calls are recorded. The name of each table is a kind of sink, of the library or of an installed package.

    Attributes:
        ledger: A tamper-evident record of calls.
        audit: Records of every call.
        trace: The data for `operations trace`.
    """

    ledger: LedgerEntry | None = None
    audit: AuditConfig | None = None
    trace: TraceEntry = field(default_factory=TraceEntry)

    @property
    def tables(self) -> dict[str, Any]:
        """The tables of the file, and those of kinds that need none, by kind."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: entry for name, entry in found.items() if entry is not None}


@dataclass(frozen=True, kw_only=True)
class Config:
    """The content of `operations.toml`. Each kind of source adds its table; see `config_class`.

    Attributes:
        modules: Packages, folders or files of Python code to scan for operations.
        setup: Your own function, `module:function`, which is called with the hub before its sources are opened.
        mcp_json: Existing files that list MCP servers under `mcpServers`.
        output: The output policy (how results are normalised), unless a source or an operation sets its own.
        tools: Settings for operations of any source, by id or pattern.
        access: The external callers and their keys.
        state: The store of budgets, revocations and approvals.
        record: Where calls are recorded.
        runs: The store of runs.
        code: Code mode for agents.
        serve: The address and the entry points of `operations serve`.
        work: The address for health and metrics of `operations work`.
        limits: Limits of requests and calls.
        log: The log on standard error.
        telemetry: Traces and metrics for a collector.
    """

    modules: Names = ()
    setup: FunctionName | None = None
    mcp_json: Names = ()
    output: OutputPolicy = "cast"
    tools: dict[str, ToolEntry] = field(default_factory=dict[str, ToolEntry])
    access: AccessEntry = field(default_factory=AccessEntry)
    state: StateEntry = field(default_factory=StateEntry)
    record: RecordEntry = field(default_factory=RecordEntry)
    runs: RunsEntry | None = None
    code: CodeEntry | None = None
    serve: ServeEntry = field(default_factory=ServeEntry)
    work: WorkEntry | None = None
    limits: LimitsEntry = field(default_factory=LimitsEntry)
    log: LogEntry = field(default_factory=LogEntry)
    telemetry: TelemetryEntry = field(default_factory=TelemetryEntry)

    def tables(self, table: str) -> dict[str, Any]:
        """Return the entries of a kind of source, by name; empty if the file has none."""
        found: dict[str, Any] = getattr(self, table, {})
        return found

    @property
    def kinds(self) -> list[SourceKind]:
        """The kinds of sources that a file like this may have."""
        return kinds([each.name for each in fields(self) if TABLE_OF_SOURCES in each.metadata])


TABLE_OF_SOURCES: Final = "table of sources"
"""Metadata key of the fields that hold sources."""


def config_class(tables: Iterable[str] | None = None, sinks: Iterable[str] = ()) -> type[Config]:
    """Return `Config` with a field for each kind of source and of sink.

    Args:
        tables: The tables of a file, for kinds of sources in other packages.
        sinks: Its tables below `record`, for kinds of sinks in other packages.

    Raises:
        ValueError: If the package of a kind cannot be imported.
    """
    others = set(tables or ()) - {each.name for each in fields(Config)}
    known = {each.name for each in fields(RecordEntry)}
    return _config_class(tuple(kinds(others)), tuple(sorted({*sinks} - known)))


@cache
def _config_class(some: tuple[SourceKind, ...], sinks: tuple[str, ...]) -> type[Config]:
    tables: list[Any] = [
        (
            kind.table,
            dict.__class_getitem__((str, kind.entry)),
            field(default_factory=dict[str, Any], metadata={TABLE_OF_SOURCES: True}),
        )
        for kind in some
    ]
    if sinks:
        record = _record_class(sinks)
        tables.append(("record", record, field(default_factory=record)))
    keys = {kind.table: kind.about for kind in some}
    return cast("type[Config]", _with_fields(Config, tables, keys))


def _record_class(names: tuple[str, ...]) -> type[RecordEntry]:
    """Return `RecordEntry` with a field for each of these kinds of other packages that is installed."""
    others = {name: kind for name, kind in sink_kinds(names).items() if name in names}
    tables = [
        (
            name,
            kind.entry if kind.is_default else kind.entry | None,
            field(default_factory=kind.entry) if kind.is_default else field(default=None),
        )
        for name, kind in others.items()
    ]
    abouts = {name: kind.about for name, kind in others.items()}
    return cast("type[RecordEntry]", _with_fields(RecordEntry, tables, abouts))


def _with_fields(cls: Any, tables: Sequence[Any], keys: Mapping[str, str]) -> Any:
    """Return a class with more fields, and their descriptions."""
    made = make_dataclass(cls.__name__, tables, bases=(cls,), frozen=True, kw_only=True)
    words = "".join(f"        {name}: {about}\n" for name, about in keys.items())
    made.__doc__ = f"{(cls.__doc__ or '').rstrip()}\n{words}"
    return made


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


def config_schema(tables: Iterable[str] | None = None, sinks: Iterable[str] = ()) -> Schema:
    """Return the schema of a file; with `tables`, of a file that has only these tables, and `sinks` below `record`.

    This imports the config classes of the given tables only, because some imports are slow.
    """
    return _schema(None if tables is None else frozenset(tables), frozenset(sinks))


@cache
def _schema(tables: frozenset[str] | None, sinks: frozenset[str]) -> Schema:
    document = _without_null(
        schema_for(file_class(cast("Any", config_class(tables, sinks)), tables)).document
    )
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
