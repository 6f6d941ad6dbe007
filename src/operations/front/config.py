"""The options of a server, for `create_app`, `running`, `JWTs` and the config file.

Rule 1: this module imports no web framework, so that a config file can be read without one.
"""

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeAlias, get_args
from urllib.parse import urlsplit

from msgspec import Meta

from operations.base.text import Disclosure, NameStyle, enforce_lists, suggestion
from operations.base.types import Count, JSONObject, Seconds
from operations.contract.access import Identity
from operations.contract.options import ELSEWHERE
from operations.front.credentials import CredentialResolver
from operations.front.limits import Limits
from operations.io.guard import LOOPBACK

ASGIApp: TypeAlias = Callable[[Any, Any, Any], Awaitable[None]]
Resolver: TypeAlias = Callable[[Any], Identity | Awaitable[Identity | None] | None]
"""An `IdentityResolver`, typed without a web framework."""

Ready: TypeAlias = Callable[[], bool | JSONObject | Awaitable[bool | JSONObject]]
"""Returns whether the process is ready; an exception means that it is not. A returned object becomes the response; its
`status` `unavailable` means not ready."""

_OF_SERVER = {ELSEWHERE: "an option of the server around it"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenConfig:
    """The address of a server."""

    host: str = "127.0.0.1"
    """The address to listen on. An address that other machines can reach requires authentication, or `public`."""

    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """The port; 0 selects a free port."""

    public: bool = False
    """Listen on a network without authentication: anyone may call operations without access requirements."""

    trusted_proxies: Collection[str] = ()
    """Addresses or networks of proxies whose `X-Forwarded-For` and `X-Forwarded-Proto` are used."""

    keep_alive: Annotated[int, Meta(ge=1)] = 5
    """Seconds that an unused connection stays open. Behind a proxy, set more than the proxy keeps its connections."""

    certificate: str | Path | None = None
    """A PEM file with the certificate chain, to serve HTTPS."""

    certificate_key: str | Path | None = None
    """A PEM file with the private key, if it is not in the file of `certificate`."""

    def __post_init__(self) -> None:
        enforce_lists(trusted_proxies=self.trusted_proxies)
        if self.certificate_key is not None and self.certificate is None:
            raise ValueError("certificate_key is set without certificate")


@dataclass(frozen=True, slots=True, kw_only=True)
class MCPServerSettings:
    """Settings of `to_mcp`.

    Raises:
        ValueError: If a field is not valid; the message names it.
    """

    advanced: ClassVar = frozenset(
        [
            "name",
            "version",
            "title",
            "max_tokens",
            "page_size",
            "schema_budget",
            "max_items",
            "max_items_bytes",
            "task_after",
            "session_idle_timeout",
        ]
    )

    name: str = "operations"
    """The name that the server reports to clients."""

    version: str = "1.0.0"
    """The version that the server reports to clients."""

    title: str | None = None
    """The title that clients show to people."""

    instructions: str | None = None
    """Instructions for models that use the server."""

    names: NameStyle = "portable"
    """The names of tools and prompts: `portable` (`math__add`), which every model accepts, or `dotted` (`math.add`),
    the ids."""

    disclosure: Disclosure = "auto"
    """`tools` lists each operation as a tool, `gateway` lists four tools that find and call operations, `code` lists
    only `code.search` and `code.run` of a registry with `operations.code.Code`, `auto` decides between the first two
    by size."""

    max_tools: Count = 100
    """With `auto`: the largest number of listed tools; a caller that may call more operations gets the gateway."""

    max_tokens: Count = 50_000
    """With `auto`: the largest listing in tokens, estimated at four bytes each."""

    page_size: Count = 250
    """Items in one page of a listing."""

    schema_budget: Count = 16 * 1024
    """The largest size of the shared definitions in one listed schema, in bytes of JSON; further definitions become
    `{}`."""

    lenient_input: bool = True
    """Convert arguments of the wrong type if no information is lost: `"5"` for 5, JSON text for an object. Conversions
    are reported in `changes`."""

    timeout: Seconds = field(default=30, metadata=_OF_SERVER)
    """Seconds a call may take."""

    heartbeat: Seconds = field(default=15, metadata=_OF_SERVER)
    """Seconds after which a quiet response over HTTP sends a comment."""

    max_items: Count = 1_000
    """The largest number of items of a subscription in the result; the call ends when it is reached."""

    max_items_bytes: Count = 1024 * 1024
    """The largest size of these items, in bytes of JSON."""

    identity: Identity | None = field(default=None, metadata=_OF_SERVER)
    """The caller on stdio and in memory, where no HTTP request identifies it."""

    identify: Resolver | None = None
    """Resolves the identity of an HTTP request."""

    expose_errors: bool = field(default=False, metadata=_OF_SERVER)
    """Show the text of unexpected errors to callers."""

    limits: Limits = field(default_factory=Limits, metadata=_OF_SERVER)
    """Limits on sizes, times and rates. Inside an application of `create_app`, the limits of that application apply."""

    scopes_supported: Collection[str] = field(default=(), metadata=_OF_SERVER)
    """Publicly known scopes. A call of a tool that requires only these is denied; any other tool without access appears
    not to exist."""

    task_after: Seconds = 1
    """Seconds that a call of a durable operation waits for its run. Then a client with the extension for tasks receives
    a task."""

    extensions: Collection[str] | None = None
    """Extensions of the protocol that are offered, such as `io.modelcontextprotocol/tasks`. None: tasks, apps and
    skills, as far as there are any."""

    skills: Collection[str] = ()
    """Folders of skills, each a folder with a `SKILL.md`."""

    stateless: bool = False
    """Serve clients of the 2025 protocol revisions without sessions: no questions, log messages or change
    notifications."""

    session_idle_timeout: Seconds = 30 * 60
    """Seconds after which an idle session ends."""

    def __post_init__(self) -> None:
        choices: tuple[tuple[str, Any], ...] = (("names", NameStyle), ("disclosure", Disclosure))
        for name, choice in choices:
            known, value = get_args(choice), getattr(self, name)
            if value not in known:
                hint = suggestion(str(value), known)
                raise ValueError(f"{name} must be {' or '.join(known)}, not {value!r}.{hint}")
        enforce_lists(
            scopes_supported=self.scopes_supported,
            skills=self.skills,
            extensions=self.extensions,
        )
        numbers = (
            "max_tools", "max_tokens", "page_size", "schema_budget", "timeout", "heartbeat", "max_items",
            "max_items_bytes", "session_idle_timeout", "task_after",
        )  # fmt: skip
        _enforce_positive(self, *numbers)


def _enforce_positive(settings: object, *names: str) -> None:
    """Raise `ValueError` if one of these settings is not a positive number."""
    for name in names:
        value = getattr(settings, name)
        # Comparisons with NaN are false.
        if not value > 0:
            raise ValueError(f"{name} is a positive number, not {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of `create_app`."""

    identity: Resolver | Sequence[Resolver] | None = None
    """Resolves the identity of a request; several resolvers are tried in turn. Without a resolver, only operations
    without access requirements can be called."""

    title: str = "operations"
    """The title of the API, in its document."""

    version: str = "1.0.0"
    """The version of the API, in its document."""

    allowed_hosts: Collection[str] = LOOPBACK
    """Host names that clients may use for this server; `*` for any. By default only names of this machine."""

    allowed_origins: Collection[str] = ()
    """`scheme://host[:port]` of other pages that may use this server (CORS)."""

    root_path: Annotated[str, Meta(pattern="^(/[^/?#%]+)*$")] = ""
    """The prefix under which a proxy serves this app, such as `/hub`; the proxy may strip it or not."""

    scopes_supported: Collection[str] = ()
    """Publicly known scopes. A caller without access to an operation receives 401 or 403 if the operation requires only
    these scopes; otherwise the operation appears not to exist (404)."""

    anonymous: bool | None = None
    """Serve requests without a credential. If false, they receive 401 at every path except health checks. By default
    true unless `authorization_servers` is set."""

    public_url: str = ""
    """The address under which clients reach this server, such as `https://hub.example.com`."""

    authorization_servers: Collection[str] = ()
    """Addresses of the servers that issue tokens for `public_url`; OAuth clients discover them through this server."""

    limits: Limits = field(default_factory=Limits)
    """Limits on sizes, times and rates."""

    timeout: Seconds = 30
    """Seconds a call may take."""

    heartbeat: Seconds = 15
    """Seconds after which a quiet stream sends a comment, and a WebSocket a ping. Set less than the time after which
    proxies close a connection without data."""

    expose_errors: bool = False
    """Show callers the text of unexpected exceptions. For development."""

    mcp: bool | MCPServerSettings = False
    """Serve MCP at `/mcp`, with these settings."""

    websocket: bool = False
    """Serve the call protocol on WebSockets at `/ws`."""

    console: bool = False
    """Serve the web console at `/`."""

    resolve: CredentialResolver | None = None
    """Returns the identity for a `credential` inside a WebSocket message."""

    graph: Any = None
    """A `CallGraph` that records calls; each caller sees its own calls at `/calls`. The console creates one by
    default."""

    ready: Ready | None = None
    """Returns whether all required resources are available, for `/readyz`."""

    resources: Iterable[AbstractAsyncContextManager[Any]] = ()
    """Context managers that are entered when the server starts and left when it stops."""

    def __post_init__(self) -> None:
        enforce_lists(
            allowed_hosts=self.allowed_hosts,
            allowed_origins=self.allowed_origins,
            scopes_supported=self.scopes_supported,
            authorization_servers=self.authorization_servers,
        )
        _enforce_positive(self, "timeout", "heartbeat")
        if self.authorization_servers and not self.public_url:
            raise ValueError("authorization_servers need public_url: tokens are issued for it")
        if self.public_url and not self.public_url.startswith(("https://", "http://")):
            raise ValueError("public_url must begin with https:// or http://")
        entries = {"mcp": (bool, MCPServerSettings), "websocket": (bool,), "console": (bool,)}
        for name, kinds in entries.items():
            given = getattr(self, name)
            # The settings of an application, such as `to_mcp(registry, ...)`, would be ignored.
            if not isinstance(given, kinds):
                known = " or ".join(kind.__name__ for kind in kinds)
                raise TypeError(f"{name} must be {known}, not {type(given).__name__}")

    @property
    def mcp_settings(self) -> MCPServerSettings:
        """The settings of the MCP server."""
        given = self.mcp
        return given if isinstance(given, MCPServerSettings) else MCPServerSettings(name=self.title)

    @property
    def serves_anonymous(self) -> bool:
        """Whether requests without a credential are served."""
        return not self.authorization_servers if self.anonymous is None else self.anonymous

    @property
    def accepted_hosts(self) -> list[str]:
        """The host names that clients may use for this server."""
        public = urlsplit(self.public_url).hostname
        return [*self.allowed_hosts, *([public] if public else [])]


@dataclass(frozen=True, kw_only=True, eq=False)
class JWTConfig:
    """Defines the accepted JSON Web Tokens of an identity provider, and their conversion to identities.

    Raises:
        ValueError: If there is no key, or more than one source of keys, or the algorithms do not match the key.
    """

    issuer: str
    """The `iss` that a token must have."""

    audience: str | Collection[str]
    """The `aud` that a token must have: the name of this server at the issuer."""

    jwks_url: str | None = None
    """The address at which the issuer publishes its public keys."""

    jwks: Mapping[str, Any] | None = None
    """The issuer's public keys, as a JSON Web Key Set."""

    public_key: str | Path | None = None
    """The issuer's public key: a PEM text, or the path of a PEM file."""

    secret: str | None = field(default=None, repr=False)
    """The secret of HMAC signatures."""

    algorithms: Collection[str] = ()
    """The accepted signature algorithms; by default HS256 with `secret`, else all algorithms with public keys."""

    scope_claim: str | None = None
    """The claim that lists the scopes; by default `scope`, `scp` and `permissions`."""

    identity: Callable[[JSONObject], Identity] | None = None
    """Returns the identity for the claims of a token; an exception rejects the token."""

    leeway: Annotated[float, Meta(ge=0)] = 30
    """Tolerated clock difference in seconds."""

    def __post_init__(self) -> None:
        enforce_lists(algorithms=self.algorithms)
        sources = (self.jwks_url, self.jwks, self.public_key, self.secret)
        if sum(source is not None for source in sources) != 1:
            raise ValueError("a JWT needs exactly one of jwks_url, public_key and secret")
        if self.jwks_url is not None and not self.jwks_url.startswith(("https://", "http://")):
            raise ValueError("jwks_url must begin with http:// or https://")
        is_hmac = [name.upper().startswith("HS") for name in self.algorithms]
        if any(name.lower() == "none" for name in self.algorithms):
            raise ValueError('algorithms must not contain "none": anyone can make such a token')
        if is_hmac and not (all(is_hmac) if self.secret is not None else not any(is_hmac)):
            raise ValueError(
                "algorithms do not fit the key: HS256, HS384 and HS512 require secret, all others a public key"
            )
