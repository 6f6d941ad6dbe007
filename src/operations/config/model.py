"""The tables of `operations.toml`, as frozen dataclasses.

Rule 1: a table that sets up something of the library is read into the library's own config class (`derived`): all its
        fields are keys of the table. What stands here are the keys that only a file has.
Rule 2: a secret is named, never written: the environment variable or the file that holds it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias

from msgspec import Meta

from operations._names import Disclosure, NameStyle
from operations.config.derive import Derived, Secret
from operations.config.places import Path
from operations.specs import OutputPolicy
from operations.types import Count, JSONObject, Names, Seconds

_IS_TABLE = {"namespace": "the name of the table"}


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAPIEntry:
    """An HTTP API. The name of its table is the namespace of its operations.

    Attributes:
        document: The OpenAPI or Swagger document: a path relative to this file, or an address.
        scopes: Scopes that a caller needs for anything imported here; short for `access`.
        pages: Add a subscription to all pages where the document declares paging; short for `pagination`.
        enabled: Set to false to leave it out.
        options: The fields of an `HTTPServiceConfig`.
    """

    derived: ClassVar = Derived("operations.openapi.config:HTTPServiceConfig", _IS_TABLE)

    document: str
    scopes: Names = ()
    pages: bool = False
    enabled: bool = True
    options: JSONObject = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class MCPEntry:
    """An MCP server: a command to start, or an address. The name of its table is its namespace.

    Attributes:
        token: Sent as a bearer token; short for `auth`.
        scopes: Scopes that a caller needs for anything imported here; short for `access`.
        enabled: Set to false to leave it out.
        options: The fields of an `MCPClientConfig`.
    """

    derived: ClassVar = Derived("operations._mcp_config:MCPClientConfig", _IS_TABLE)

    token: Secret | None = None
    scopes: Names = ()
    enabled: bool = True
    options: JSONObject = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerEntry:
    """A broker between callers and workers. Other keys are options of `serve_calls`, for `operations work`.

    Attributes:
        url: `redis://`, `rediss://` or `nats://`; the user may stand in it, the password may not.
        password: The password of the user in `url`.
        group: The workers that share one queue.
        prefix: Of every key or subject, so that several applications can share a broker.
        client: The name that the broker's permissions have for this client, or this worker.
        durable: Let requests wait for a worker, on NATS with JetStream. Everyone on the broker must agree.
        workers: Import what the workers of `group` offer.
        namespace: Put what is imported into this namespace, under its whole former id.
        output: How the results of what is imported are normalised; by default as the file's own `output` says.
        credential: Sent with every call to those workers, to say who calls.
        trusted: Believe the identity inside events. Only where everyone on the broker may be anyone.
        secret: Sign every message, and drop those that are not. Everyone on the broker needs the same one.
        private: Refuse to start unless the broker keeps clients from the mailboxes of others.
        concurrency: How many calls a worker runs at a time.
        enabled: Set to false to leave it out.
        options: The options of `serve_calls`.
    """

    derived: ClassVar = Derived(
        "operations.calls:serve_calls",
        {
            "registry": "an object",
            "target": "an object",
            "group": "a key of its own",
            "concurrency": "a key of its own",
        },
    )

    url: str
    password: Secret | None = None
    group: str = "operations"
    prefix: str | None = None
    client: str | None = None
    durable: bool = False
    workers: bool = False
    namespace: str | None = None
    output: OutputPolicy | None = None
    credential: Secret | None = None
    trusted: bool = False
    secret: Secret | None = None
    private: bool = False
    concurrency: Count = 100
    enabled: bool = True
    options: JSONObject = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyEntry:
    """Someone who calls with a key. The name of the table is who that is.

    Attributes:
        key: The key itself.
        sha256: The SHA-256 of the key in hexadecimal, instead of the key.
        scopes: What it may do.
        resources: What it may do to which resource: `"type:id" = ["action"]`.
    """

    key: Secret | None = None
    sha256: Annotated[str, Meta(pattern="^[0-9a-fA-F]{64}$")] | None = None
    scopes: Names = ()
    resources: dict[str, Names] = field(default_factory=dict[str, tuple[str, ...]])


@dataclass(frozen=True, slots=True, kw_only=True)
class JWTEntry:
    """Signed tokens of an identity provider.

    Attributes:
        issuer: The `iss` a token must have.
        audience: The `aud` a token must have: this hub.
        jwks_url: Where the provider publishes its public keys.
        public_key: The file with its public key in PEM, instead of `jwks_url`.
        secret: The secret of HMAC signatures, instead of a public key.
        algorithms: The signatures to accept.
        scope_claim: The claim that lists the scopes.
        leeway: Seconds a clock may be wrong.
    """

    issuer: str
    audience: str
    jwks_url: str | None = None
    public_key: str | None = None
    secret: Secret | None = None
    algorithms: Names = ("RS256", "ES256")
    scope_claim: str = "scope"
    leeway: Annotated[float, Meta(ge=0)] = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessEntry:
    """Who may call from outside. Without any of this, callers from outside have no identity.

    Attributes:
        keys: By who calls.
        jwt: Signed tokens.
    """

    keys: dict[str, KeyEntry] = field(default_factory=dict[str, KeyEntry])
    jwt: JWTEntry | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeMCPEntry:
    """How operations are served over MCP; the keys are fields of `MCPServerSettings`.

    Attributes:
        names: The names of tools and prompts: `portable` (`math__add`), which every model accepts; `dotted`, the ids.
        disclosure: List all operations as `tools`, the four tools of the `gateway` instead, or whichever fits (`auto`).
        max_tools: With `auto`: the most tools that are listed; a caller who may call more gets the gateway.
        max_tokens: With `auto`: about the most tokens that a listing may have.
        instructions: What a model should know before it uses the server.
        stateless: Serve clients of 2025 without sessions: no questions, log messages or announcements of changes.
    """

    names: NameStyle = "portable"
    disclosure: Disclosure = "auto"
    max_tools: Count = 100
    max_tokens: Count = 50_000
    instructions: str | None = None
    stateless: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeEntry:
    """What `operations serve` opens.

    Attributes:
        host: The address to listen on. Any other than this machine's own needs access keys.
        port: The port; 0 takes a free one.
        doors: What to serve: the HTTP API, MCP, the call protocol on a WebSocket, the page in the browser.
        allowed_hosts: Names under which browsers and clients may reach it, beside its own.
        allowed_origins: Other origins whose pages may call it.
        trusted_proxies: Addresses or networks of proxies whose `X-Forwarded-For` and `X-Forwarded-Proto` are used.
        root_path: The path prefix under which a proxy serves it, such as `/hub`.
        scopes_supported: Publicly known scopes: operations that require only these are denied, others are hidden.
        public: Let anyone call what is open to all, also from other machines.
        expose_errors: Show the text of unexpected exceptions to callers.
        mcp: How operations are served over MCP.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    doors: tuple[Literal["http", "mcp", "websocket", "console"], ...] = (
        "http",
        "mcp",
        "websocket",
        "console",
    )
    allowed_hosts: Names = ()
    allowed_origins: Names = ()
    trusted_proxies: Names = ()
    root_path: Annotated[str, Meta(pattern="^(/[^/?#%]+)*$")] = ""
    scopes_supported: Names = ()
    public: bool = False
    expose_errors: bool = False
    mcp: ServeMCPEntry = field(default_factory=ServeMCPEntry)


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsEntry:
    """How much is allowed.

    Attributes:
        timeout: Time for one call through any entry point, in seconds.
        concurrency: Concurrent calls from all callers.
        per_caller: Concurrent calls of one caller.
        threads: How many blocking handlers run at a time.
        request_bytes: Size of a request body or a WebSocket message.
        options: The fields of `Limits`.
    """

    derived: ClassVar = Derived(
        "operations.front.limits:Limits",
        {
            "calls": "called concurrency",
            "calls_per_caller": "called per_caller",
            "body_bytes": "called request_bytes",
        },
    )

    timeout: Seconds = 30
    concurrency: Count = 256
    per_caller: Count = 64
    threads: Count = 32
    request_bytes: Count = 8 << 20
    options: JSONObject = field(default_factory=dict[str, Any])

    @property
    def per_source(self) -> int:
        """Concurrent calls to one API or MCP server: fewer than one caller has, so that some are left for others."""
        return max(1, self.per_caller * 3 // 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEntry:
    """What `operations trace` shows: when calls began and ended, never what they carried.

    Attributes:
        enabled: Set to false to keep nothing.
        file: Where it is kept, relative to this file; by default in the user's state folder.
    """

    enabled: bool = True
    file: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The whole of `operations.toml`.

    Attributes:
        modules: Packages, folders or files of Python code to scan for operations.
        mcp_json: Existing files that list MCP servers under `mcpServers`.
        output: How results are normalised, unless a source or an operation says otherwise.
        openapi: HTTP APIs, by namespace.
        mcp: MCP servers, by namespace.
        brokers: Redis and NATS servers, by name.
        access: Who may call from outside.
        serve: What `operations serve` opens.
        limits: How much is allowed.
        trace: What `operations trace` can show.
    """

    modules: Names = ()
    mcp_json: Names = ()
    output: OutputPolicy = "cast"
    openapi: dict[str, OpenAPIEntry] = field(default_factory=dict[str, OpenAPIEntry])
    mcp: dict[str, MCPEntry] = field(default_factory=dict[str, MCPEntry])
    brokers: dict[str, BrokerEntry] = field(default_factory=dict[str, BrokerEntry])
    access: AccessEntry = field(default_factory=AccessEntry)
    serve: ServeEntry = field(default_factory=ServeEntry)
    limits: LimitsEntry = field(default_factory=LimitsEntry)
    trace: TraceEntry = field(default_factory=TraceEntry)


Entry: TypeAlias = OpenAPIEntry | MCPEntry | BrokerEntry | LimitsEntry
"""A table that is read into something of the library."""

TABLES: Final[dict[str, Any]] = {"openapi": OpenAPIEntry, "mcp": MCPEntry, "brokers": BrokerEntry}
"""The entries that have names, by the key of their tables."""


def entries_of(config: Config) -> Iterator[tuple[Path, Entry]]:
    """Yield every such table of a config, by its key."""
    for key in TABLES:
        for name, entry in getattr(config, key).items():
            yield (key, name), entry
    yield ("limits",), config.limits
