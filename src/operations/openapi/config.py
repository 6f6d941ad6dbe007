"""The settings of a service: its address, credentials, selection of operations, and limits."""

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, cast, get_args

from msgspec import Meta

from operations._derive import WRITTEN, Builder, KeyFaultError
from operations._hosts import origin_of
from operations._json import MAX_RESPONSE_VALUES
from operations._text import enforce_lists, suggestion
from operations.access import AccessControl
from operations.caller_tokens import CallerToken
from operations.context import OperationContext
from operations.openapi.files import FilesRoot
from operations.openapi.paging import Paging
from operations.openapi.transport import HTTPTransport, TLSFiles, is_header
from operations.specs import OutputPolicy, enforce_policy
from operations.types import Count, Seconds

Secret: TypeAlias = str | Callable[[OperationContext], "str | Awaitable[str | None] | None"]
"""A secret, or what finds the caller's: it is given the call's context and may be a coroutine function."""


CallValue: TypeAlias = Literal["request_id", "parent_request_id", "identity_id"]
"""A value of the call that can be sent as a header."""

_METHODS = ("GET", "PUT", "POST", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "QUERY")

_AuthType: TypeAlias = Literal["bearer", "apiKey", "basic"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HTTPAuth:
    """One credential for every request, independent of the document's security schemes.

    `bearer` sends `Authorization: Bearer TOKEN`, `apiKey` sends the token in `header_name`, `basic` sends
    `Authorization: Basic` with user name and password, or with a token that is `user:password` or already encoded.
    """

    type: _AuthType
    """How the credential is sent."""

    token: Secret | CallerToken = field(default="", repr=False)
    """The token; for `basic` also `user:password`. A `CallerToken` finds the one of the call's caller."""

    username: str | None = None
    """The user name, for `basic`."""

    password: str | None = field(default=None, repr=False)
    """The password that goes with `username`."""

    header_name: str | None = None
    """`Authorization` by default, and `X-API-Key` for `apiKey`."""

    prefix: str | None = None
    """Written before the token: exactly as given for `apiKey` (by default nothing), with a space after it for the
    others (by default `Bearer` and `Basic`)."""

    def __post_init__(self) -> None:
        if self.type not in get_args(_AuthType):
            raise ValueError(
                f"auth: {self.type!r} is not a type: use {', '.join(get_args(_AuthType))}."
                f"{suggestion(str(self.type), get_args(_AuthType))}"
            )
        if not self.token and self.username is None:
            needed = "a token, or username and password" if self.type == "basic" else "a token"
            raise ValueError(f"auth: {self.type} needs {needed}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BasicCredential:
    """User name and password, for a scheme of HTTP basic authentication."""

    username: str
    """The user name."""

    password: str = field(repr=False)
    """The password that goes with `username`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OAuthClient:
    """The settings that all OAuth2 and OpenID grants share: the client, the token endpoint and the method.

    Tokens are fetched when needed, once for all callers, and renewed before they expire.
    """

    client_id: str = ""
    """The id of the client, for OAuth2."""

    client_secret: str = field(default="", repr=False)
    """The secret of the client."""

    token_url: str | None = None
    """Instead of the document's. A document's token URL is used only on a host that may have credentials."""

    scopes: tuple[str, ...] = ()
    """The scopes to request; by default those that the operation requires."""

    parameters: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    """Sent with every token request, such as `audience`."""

    send_in: Literal["header", "body"] = "header"
    """How id and secret are sent in a token request."""

    def __post_init__(self) -> None:
        enforce_lists(scopes=self.scopes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientCredentials(OAuthClient):
    """The credentials of a client itself: the grant `client_credentials`."""

    client_id: str = field()
    client_secret: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class PasswordCredentials(OAuthClient):
    """A user's name and password: the grant `password`, and the refresh tokens that come with it."""

    username: str
    password: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RefreshToken(OAuthClient):
    """A refresh token from a person's sign-in: the grant `refresh_token`.

    Where the provider gives a new refresh token with every token, the last one is used; it is kept in memory only.
    """

    refresh_token: str = field(repr=False)
    """The refresh token of the person for whom the client asks."""


Credential: TypeAlias = (
    str
    | tuple[str, str]
    | BasicCredential
    | ClientCredentials
    | PasswordCredentials
    | RefreshToken
    | CallerToken
    | Mapping[str, Any]
    | Callable[[OperationContext], Any]
)
"""The credential for a security scheme: a key or token, user name and password, OAuth2 client, or a function.

A mapping, as configuration files have it, names the fields of one of these, or has the key or token as `token`.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationOutline:
    """The properties of an operation that rules can use."""

    method: str
    path: str
    name: str
    tags: tuple[str, ...]
    deprecated: bool

    def __post_init__(self) -> None:
        enforce_lists(tags=self.tags)


@dataclass(frozen=True, slots=True, kw_only=True)
class Select:
    """Operations by tag, path or method. Each field that is not empty must match; a path may have wildcards."""

    tags: tuple[str, ...] = ()
    """One of these tags."""

    paths: tuple[str, ...] = ()
    """One of these paths; `*` stands for anything."""

    methods: tuple[str, ...] = ()
    """One of these methods."""

    def __post_init__(self) -> None:
        enforce_lists(tags=self.tags, paths=self.paths, methods=self.methods)
        if not (self.tags or self.paths or self.methods):
            raise ValueError("it selects nothing: give tags, paths or methods")
        for method in self.methods:
            if method.upper() not in _METHODS:
                near = suggestion(method.upper(), _METHODS)
                raise ValueError(f"methods must be names of HTTP methods.{near}")
        if not all(path.startswith(("/", "*")) for path in self.paths):
            raise ValueError("paths must begin with '/' or '*'")

    def __call__(self, outline: OperationOutline) -> bool:
        """Return whether this operation is one of those."""
        return (
            (not self.tags or not set(self.tags).isdisjoint(outline.tags))
            and (not self.paths or any(fnmatchcase(outline.path, p) for p in self.paths))
            and (not self.methods or outline.method in {m.upper() for m in self.methods})
        )


Rule: TypeAlias = Callable[[OperationOutline], bool]
Rename: TypeAlias = Mapping[str, str] | Callable[[OperationOutline], str]
Access: TypeAlias = AccessControl | Callable[[OperationOutline], AccessControl]
PagingRule: TypeAlias = (
    Literal["document"] | Callable[[OperationOutline], Paging | None] | Mapping[str, Paging]
)


@dataclass(frozen=True, slots=True)
class HTTPServiceConfig:
    """How to reach one HTTP API, and what of it to import.

    Nothing secret is in its repr.

    Raises:
        ValueError: If a field is not valid; the message names it.
    """

    namespace: str

    base_url: str | None = None
    """The address of the API, with its path, instead of the document's servers. May be any address."""

    headers: Mapping[str, Secret] = field(default_factory=dict[str, Any], repr=False)
    """Sent with every request to hosts that may receive credentials; no argument can override one.

    A value may be a function of the call's context, such as `lambda context: context.request_id`; it is called once for
    a call, also if the request is repeated, and None omits the header. Errors do not show the value of a header whose
    name marks it as secret (`X-Api-Key`, `Authorization`).
    """

    call_headers: Mapping[str, CallValue] = field(default_factory=dict[str, CallValue])
    """Headers with a value of the call, such as `{"Idempotency-Key": "request_id"}`. The id of a caller without an
    identity is omitted."""

    auth: HTTPAuth | Mapping[str, Any] | None = field(default=None, repr=False)
    """One credential for every request; a mapping becomes an `HTTPAuth`."""

    credentials: Mapping[str, Credential] = field(default_factory=dict[str, Any], repr=False)
    """By the name of the document's security scheme."""

    timeout: Seconds = 30
    """Seconds for a whole exchange; of a stream, for its head."""

    access: Access | None = None
    """Access to the imported operations: one rule for all, or a function of each. Open to all by default."""

    output: OutputPolicy | None = None
    """How the results of these operations are normalised; None leaves it to the registry."""

    allowed_hosts: tuple[str, ...] = ()
    """`host`, `host:port` or origins that may be reached, also in private networks, and may receive credentials."""

    transport: HTTPTransport | None = field(default=None, repr=False)
    """Used instead of aiohttp. Its owner closes it."""

    include: Select | Rule | None = None
    """Import only these; all by default."""

    exclude: Select | Rule | None = None
    """Leave these out."""

    rename: Rename | None = None
    """Other names: by name, or a function of each operation."""

    pagination: PagingRule | None = None
    """Which operations get a subscription to all their pages, and how: see `paging`."""

    flatten_body: bool = False
    """Make the properties of a JSON object body arguments of their own, beside the parameters."""

    server_variables: Mapping[str, str] = field(default_factory=dict[str, str])
    """Values for the variables in the document's server addresses."""

    follow_redirects: bool = False
    """Follow redirects within the same origin. They are never followed to another."""

    retries: Annotated[int, Meta(ge=0)] = 2
    """How often to repeat a request that is safe to repeat, after a lost connection, 429, 502, 503 or 504.

    A 429 with Retry-After is repeated for every method. A 401 is repeated once with a new token, if one can be fetched.
    """

    retry_refused: bool = False
    """Also repeat a request of any method after a 503: this API responds so only if it did nothing."""

    restore: bool = False
    """Believe the document's `x-operations`: names, types and errors of a registry that was exported."""

    max_response_bytes: Count = 16 << 20
    """The largest response."""

    max_response_values: Count = MAX_RESPONSE_VALUES
    """How many JSON values a response may hold; an event of a stream may hold 100,000."""

    max_request_bytes: Count = 64 << 20
    """The largest request."""

    max_event_bytes: Count = 1 << 20
    """The largest event of a stream."""

    max_error_bytes: Count = 64 << 10
    """How much of an error's body is kept in its details."""

    max_document_bytes: Count = 64 << 20
    """For reading documents, all files together."""

    max_document_files: Count = 5_000
    """How many files one document may span."""

    document_root: str | Path | None = None
    """The folder that references of a document in several files may reach; its own folder by default."""

    sign_documents: bool = False
    """Send `headers` and `auth` also when the document and its other files are fetched."""

    connections: Count = 100
    """How many connections may be open at once."""

    concurrency: Count | None = None
    """Calls that run at a time; by default as many as `connections`. Further calls wait while others finish, and fail
    with `RESOURCE_EXHAUSTED` if none has for five seconds."""

    files_root: str | Path | None = None
    """A folder below which any caller may name files by relative paths: files to send (`{"path": ...}`), and new files
    to save a response to (`save_to`). Without it, only code of this process can refer to files."""

    max_file_bytes: Count = 16 << 30
    """For one body that is sent from a file or saved to one."""

    proxy: str | None = field(default=None, repr=False, metadata={WRITTEN: True})
    """The URL of an HTTP proxy, `http://[user:password@]host:port`.

    Hosts that only the document names are called directly: a proxy would resolve their names, and so could reach
    private addresses. Name such a host in `base_url` or `allowed_hosts` to call it through the proxy.
    """

    trust_env: bool = False
    """Take proxies from the environment (`HTTP_PROXY`, `HTTPS_PROXY`, `ALL_PROXY`, `NO_PROXY`)."""

    ca_file: str | Path | None = None
    """A PEM file of the certificate authorities to trust instead of the system's."""

    client_certificate: str | Path | None = None
    """A PEM file with the certificate to present to hosts that may receive credentials, and its key."""

    client_key: str | Path | None = None
    """A PEM file with the key of `client_certificate`, if it is in a file of its own."""

    def __post_init__(self) -> None:
        enforce_lists(allowed_hosts=self.allowed_hosts)
        enforce_policy(self.output)
        if self.base_url is not None:
            try:
                origin_of(self.base_url)
            except ValueError as error:
                raise ValueError(
                    f"base_url is {error}: {self.base_url!r}. It looks like https://api.example.com/v1"
                ) from None
        for name, value in {**self.headers, **self.call_headers}.items():
            if not is_header(name, "" if callable(value) else value):
                raise ValueError(
                    f"headers: {name!r} is not a header name, or its value has line breaks"
                )
        if isinstance(self.auth, Mapping):
            auth = HTTPAuth(**Builder().fields(HTTPAuth, self.auth, ("auth",)))
            object.__setattr__(self, "auth", auth)
        if self.proxy is not None and not re.match(r"https?://[^/\s]", self.proxy):
            raise ValueError("proxy must be a URL such as http://proxy.example.com:3128")
        if self.client_key is not None and self.client_certificate is None:
            raise ValueError("client_key is set without client_certificate")
        self.tls.context(presents_certificate=True)
        if self.files_root is not None:
            FilesRoot(self.files_root)

    @property
    def tls(self) -> TLSFiles:
        """The certificates."""
        return TLSFiles(self.ca_file, self.client_certificate, self.client_key)

    @classmethod
    def from_entry(cls, entry: Mapping[str, Any]) -> "HTTPServiceConfig":
        """Return the configuration in a mapping; names may be written as here or in camelCase (`baseUrl`).

        Raises:
            ValueError: Names the field that is missing or unknown.
        """
        fields = Builder().fields(cls, entry)
        if not isinstance(fields.get("namespace"), str):
            raise ValueError("config: namespace is missing")  # noqa: TRY004 - as the others
        return cls(**fields)


def credential_of(given: Any) -> Any:
    """Return a credential that may be given as a pair or a mapping.

    Raises:
        ValueError: If it is none.
    """
    if isinstance(given, tuple):
        if len(given) != 2:  # pyright: ignore[reportUnknownArgumentType]
            raise ValueError("a login is a pair: user name and password")
        username, password = cast("tuple[str, str]", given)
        given = {"username": username, "password": password}
    try:
        return Builder().value(Credential, given)
    except KeyFaultError as error:
        raise ValueError(f"a credential or login {error}") from None
