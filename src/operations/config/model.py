"""What `operations.toml` can say, as frozen dataclasses.

Rule 1: these classes are the only description of the file. Its JSON Schema, the checks and the errors come from them.
Rule 2: a secret is named, never written: the environment variable or the file that holds it.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

Seconds: TypeAlias = Annotated[float, Meta(gt=0)]
Count: TypeAlias = Annotated[int, Meta(ge=1)]
Names: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Secret:
    """A secret, by where it is kept: one of the two.

    Attributes:
        env: The environment variable that holds it.
        file: The file that holds it, relative to this one; white space around it is dropped.
    """

    env: str | None = None
    file: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Credential:
    """What a security scheme of an OpenAPI document needs: a secret, a login, or an OAuth client.

    Attributes:
        env: The environment variable that holds a key or token.
        file: The file that holds a key or token.
        username: For HTTP basic authentication.
        password: With `username`.
        client_id: For OAuth2.
        client_secret: With `client_id`: the client asks for itself.
        refresh_token: With `client_id`: the client asks for the person whose sign-in left it behind.
        token_url: Where tokens are fetched, instead of the document's address.
        scopes: What to ask for; by default what each operation requires.
    """

    env: str | None = None
    file: str | None = None
    username: str | None = None
    password: Secret | None = None
    client_id: str | None = None
    client_secret: Secret | None = None
    refresh_token: Secret | None = None
    token_url: str | None = None
    scopes: Names = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HTTPAuthEntry:
    """One credential for every request, whatever the document says.

    Attributes:
        type: `bearer` sends an Authorization header, `apiKey` a header of its own, `basic` a login.
        token: The token; for `basic` it is `user:password`.
        header_name: The header, where it is not the usual one.
        prefix: What stands before the token in the header.
    """

    type: Literal["bearer", "apiKey", "basic"]
    token: Secret
    header_name: str | None = None
    prefix: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Operations of an OpenAPI document. Each list that is not empty must match.

    Attributes:
        tags: One of these tags.
        paths: One of these paths; `*` stands for anything.
        methods: One of these methods.
    """

    tags: Names = ()
    paths: Names = ()
    methods: Names = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAPIEntry:
    """An HTTP API. The name of its table is the namespace of its operations.

    Attributes:
        document: The OpenAPI or Swagger document: a path relative to this file, or an address.
        base_url: Where the API lives, instead of what the document says.
        auth: One credential for every request.
        credentials: By the name of the document's security scheme.
        headers: Sent with every request; a value may be a secret.
        include: Import only these.
        exclude: Leave these out.
        rename: Other names for operations, by the name they would have.
        scopes: What a caller needs to call anything imported here.
        timeout: Seconds for one exchange.
        retries: How often to repeat what is safe to repeat.
        allowed_hosts: Other hosts that may be reached and may have the credentials.
        server_variables: Values for the variables in the document's addresses.
        follow_redirects: Follow redirects within the same origin.
        flatten_body: Make the properties of a JSON body arguments of their own.
        pages: Add a subscription to all pages where the document declares paging.
        restore: Believe the document's `x-operations`: names, types and errors of an exported registry.
        enabled: Set to false to leave it out.
    """

    document: str
    base_url: str | None = None
    auth: HTTPAuthEntry | None = None
    credentials: dict[str, Credential] = field(default_factory=dict[str, Credential])
    headers: dict[str, str | Secret] = field(default_factory=dict[str, str | Secret])
    include: Selection | None = None
    exclude: Selection | None = None
    rename: dict[str, str] = field(default_factory=dict[str, str])
    scopes: Names = ()
    timeout: Seconds = 30
    retries: Annotated[int, Meta(ge=0)] = 2
    allowed_hosts: Names = ()
    server_variables: dict[str, str] = field(default_factory=dict[str, str])
    follow_redirects: bool = False
    flatten_body: bool = False
    pages: bool = False
    restore: bool = False
    enabled: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class MCPEntry:
    """An MCP server: a command to start, or an address. The name of its table is its namespace.

    Attributes:
        command: The program to start; it speaks MCP on its standard input and output.
        args: Its arguments.
        env: Added to the few variables it inherits; a value may be a secret.
        cwd: The folder to start it in, relative to this file.
        url: The address of a running server.
        headers: Sent with every request; a value may be a secret.
        token: Sent as a bearer token.
        transport: `http` is streamable HTTP, `sse` the transport of 2024.
        allow: Names or patterns of the tools to import; all by default.
        deny: Names or patterns of tools to leave out.
        queries: Names or patterns of tools that only read.
        trust_annotations: Believe what the server says of its tools.
        scopes: What a caller needs to call anything imported here.
        pin: What happens when a tool's definition changes.
        lazy: Stop the server once it is listed, and start it at the first call.
        timeout: Seconds for one call.
        connect_timeout: Seconds for starting and listing.
        enabled: Set to false to leave it out.
    """

    command: str | None = None
    args: Names = ()
    env: dict[str, str | Secret] = field(default_factory=dict[str, str | Secret])
    cwd: str | None = None
    url: str | None = None
    headers: dict[str, str | Secret] = field(default_factory=dict[str, str | Secret])
    token: Secret | None = None
    transport: Literal["stdio", "http", "sse"] | None = None
    allow: Names | None = None
    deny: Names = ()
    queries: Names = ()
    trust_annotations: bool = False
    scopes: Names = ()
    pin: Literal["off", "warn", "strict"] = "warn"
    lazy: bool = False
    timeout: Seconds = 60
    connect_timeout: Seconds = 30
    enabled: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerEntry:
    """A broker between callers and workers.

    Attributes:
        url: `redis://`, `rediss://` or `nats://`; the user may stand in it, the password may not.
        password: The password of the user in `url`.
        group: The workers that share one queue.
        prefix: Of every key or subject, so that several applications can share a broker.
        client: The name that the broker's permissions have for this client, or this worker.
        durable: Let requests wait for a worker, on NATS with JetStream. Everyone on the broker must agree.
        workers: Import what the workers of `group` offer.
        namespace: Put what is imported into this namespace, under its whole former id.
        credential: Sent with every call to those workers, to say who calls.
        trusted: Believe the identity inside events. Only where everyone on the broker may be anyone.
        secret: Sign every message, and drop those that are not. Everyone on the broker needs the same one.
        private: Refuse to start unless the broker keeps clients from the mailboxes of others.
        concurrency: How many calls a worker runs at a time.
        enabled: Set to false to leave it out.
    """

    url: str
    password: Secret | None = None
    group: str = "operations"
    prefix: str | None = None
    client: str | None = None
    durable: bool = False
    workers: bool = False
    namespace: str | None = None
    credential: Secret | None = None
    trusted: bool = False
    secret: Secret | None = None
    private: bool = False
    concurrency: Count = 100
    enabled: bool = True


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
class ServeEntry:
    """What `operations serve` opens.

    Attributes:
        host: The address to listen on. Any other than this machine's own needs access keys.
        port: The port; 0 takes a free one.
        doors: What to serve: the HTTP API, MCP, the call protocol on a WebSocket, the page in the browser.
        allowed_hosts: Names under which browsers and clients may reach it, beside its own.
        allowed_origins: Other origins whose pages may call it.
        public: Let anyone call what is open to all, also from other machines.
        expose_errors: Show the text of unexpected exceptions to callers.
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
    public: bool = False
    expose_errors: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsEntry:
    """How much is allowed.

    Attributes:
        timeout: Seconds for one call through any door.
        concurrency: How many calls from outside run at a time.
        per_caller: How many of those one caller may have.
        threads: How many blocking handlers run at a time.
        request_bytes: The largest request.
    """

    timeout: Seconds = 30
    concurrency: Count = 256
    per_caller: Count = 64
    threads: Count = 32
    request_bytes: Count = 8 << 20


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
        output: What happens to results that do not fit their schema.
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
    output: Literal["cast", "keep", "create", "warn", "strict", "off"] = "cast"
    openapi: dict[str, OpenAPIEntry] = field(default_factory=dict[str, OpenAPIEntry])
    mcp: dict[str, MCPEntry] = field(default_factory=dict[str, MCPEntry])
    brokers: dict[str, BrokerEntry] = field(default_factory=dict[str, BrokerEntry])
    access: AccessEntry = field(default_factory=AccessEntry)
    serve: ServeEntry = field(default_factory=ServeEntry)
    limits: LimitsEntry = field(default_factory=LimitsEntry)
    trace: TraceEntry = field(default_factory=TraceEntry)
