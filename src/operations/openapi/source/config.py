"""The settings of a service: its address, credentials, selection of operations, and limits."""

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, cast, get_args

from msgspec import Meta

from operations.base.json.values import MAX_DEPTH, MAX_DOCUMENT_DEPTH
from operations.base.text import enforce_durations, enforce_lists, suggestion
from operations.base.types import Count, Seconds
from operations.contract.access import AccessControl
from operations.contract.context import OperationContext
from operations.contract.options import Builder, ConfigKeyError, field_of
from operations.contract.specs import (
    Descriptions,
    InputPolicy,
    OutputPolicy,
    enforce_descriptions,
    enforce_policy,
)
from operations.io.files import FilesRoot
from operations.io.hosts import origin_of
from operations.io.http.client import HTTPTransport, is_header
from operations.io.proxies import ConnectionConfig
from operations.openapi.reading.model import METHODS
from operations.openapi.source.paging import Paging
from operations.sources.credentials import CallerToken

Secret: TypeAlias = str | Callable[[OperationContext], "str | Awaitable[str | None] | None"]
"""A secret, or a function that returns it for the context of a call; may be a coroutine function."""


CallValue: TypeAlias = Literal["request_id", "parent_request_id", "identity_id"]
"""A value of the call that can be sent as a header."""

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
    """The token; for `basic` also `user:password`. A `CallerToken` provides a token that depends on the caller."""

    username: str | None = None
    """The user name, for `basic`."""

    password: str | None = field(default=None, repr=False)
    """The password of `username`."""

    header_name: str | None = None
    """`Authorization` by default, and `X-API-Key` for `apiKey`."""

    prefix: str | None = None
    """The text before the token: unchanged for `apiKey` (by default empty), followed by a space for the others (by
    default `Bearer` and `Basic`)."""

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
    """The password of `username`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OAuthClient:
    """The settings that all OAuth2 and OpenID grants share: the client and the token endpoint.

    Tokens are fetched when needed, once for all callers, and renewed before they expire.
    """

    client_id: str = ""
    """The id of the client, for OAuth2."""

    client_secret: str = field(default="", repr=False)
    """The secret of the client."""

    token_url: str | None = None
    """The token endpoint, instead of the document's. The document's is used only on a host that may receive
    credentials."""

    scopes: tuple[str, ...] = ()
    """The scopes to request; by default those that the operation requires."""

    parameters: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    """Sent with every token request, such as `audience`."""

    send_in: Literal["header", "body"] = "header"
    """Whether a token request has id and secret in a header or in its body."""

    def __post_init__(self) -> None:
        enforce_lists(scopes=self.scopes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientCredentials(OAuthClient):
    """The credentials of a client itself: the grant `client_credentials`."""

    client_id: str = field()
    client_secret: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class PasswordCredentials(OAuthClient):
    """The name and password of a user: the grant `password`, and its refresh tokens."""

    username: str
    password: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RefreshToken(OAuthClient):
    """A refresh token from a person's sign-in: the grant `refresh_token`.

    If the provider issues a new refresh token with every token, the last one is used; it is stored in memory only.
    """

    refresh_token: str = field(repr=False)
    """The refresh token of the person."""


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
    """Selects operations by tag, path or method. Each non-empty field must match; a path may have wildcards."""

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
            # A document may have other methods, so only similar ones of about the same length are misspelled.
            alike = [name.upper() for name in METHODS if abs(len(name) - len(method)) < 2]
            near = "" if method.upper() in alike else suggestion(method.upper(), alike)
            if near or not is_header(method, ""):
                raise ValueError(f"methods must be names of HTTP methods.{near}")
        if not all(path.startswith(("/", "*")) for path in self.paths):
            raise ValueError("paths must begin with '/' or '*'")

    def __call__(self, outline: OperationOutline) -> bool:
        """Return whether an operation is selected."""
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


_BYTES_PER_VALUE = 8
"""The average size of a JSON value in a response; responses of real APIs have 15 to 50 bytes for each."""


@dataclass(frozen=True, slots=True)
class HTTPServiceConfig(ConnectionConfig):
    """The settings of one HTTP API: address, credentials, selection of operations, and limits.

    Its `repr` shows no secret.

    Raises:
        ValueError: If a field is not valid; the message names it.
    """

    namespace: str

    base_url: str | None = None
    """The address of the API, with its path, instead of the document's servers. It may be private."""

    headers: Mapping[str, Secret] = field(default_factory=dict[str, Any], repr=False)
    """Sent with every request to hosts that may receive credentials; arguments cannot override these headers.

    A value may be a function of the call's context, such as `lambda context: context.request_id`. It is called once per
    call, also if the request is retried; None omits the header. Errors do not show the value of a header whose name
    indicates a secret (`X-Api-Key`, `Authorization`).
    """

    call_headers: Mapping[str, CallValue] = field(default_factory=dict[str, CallValue])
    """Headers with a value of the call, such as `{"Idempotency-Key": "request_id"}`. The id of a caller without an
    identity is omitted."""

    auth: HTTPAuth | Mapping[str, Any] | None = field(default=None, repr=False)
    """One credential for every request; a mapping becomes an `HTTPAuth`."""

    credentials: Mapping[str, Credential] = field(default_factory=dict[str, Any], repr=False)
    """Credentials by the name of the document's security scheme."""

    timeout: Seconds = 30
    """The time limit in seconds for a request and its response; for a stream, until its head arrives."""

    access: Access | None = None
    """The access rule of the imported operations, or a function that returns a rule for each; by default no
    restriction."""

    output: OutputPolicy | None = None
    """The output policy of these operations; None for the policy of the registry."""

    input: InputPolicy | None = None
    """The input policy of these operations; None: `convert` for callers that are models, `strict` for all others."""

    exact_schemas: bool = False
    """List exact output schemas to MCP clients; a response that does not match is then an error there. If not, they
    also accept any other result, and larger schemas are omitted (above 2 kB, or a share of 64 kB for all)."""

    descriptions: Descriptions = "full"
    """The descriptions of operations and arguments in lists of MCP tools: `full`, or `short` for the first
    sentences."""

    token_budget: Count | None = None
    """The tokens that the tools of this source should take in a list, estimated at four bytes each; `operations doctor`
    warns if they take more."""

    allowed_hosts: tuple[str, ...] = ()
    """Hosts (`host`, `host:port` or an origin) that may be private and may receive credentials."""

    transport: HTTPTransport | None = field(default=None, repr=False)
    """A transport to use instead of aiohttp. You close it."""

    include: Select | Rule | None = None
    """The operations to import; by default all."""

    exclude: Select | Rule | None = None
    """The operations to exclude."""

    rename: Rename | None = None
    """New names: a mapping from names, or a function of each operation."""

    operation_ids: Literal["document", "short"] = "document"
    """`short` removes the path and the method at the end of operation ids, which FastAPI adds by default
    (`delete_customer_customers__id__delete`), from every id that then is still unique."""

    pagination: PagingRule | None = None
    """The operations that get a subscription to all their pages, and their kind of paging: see `paging`."""

    long_running: Collection[str] | None = None
    """Names or patterns of operations that the API goes on with after its response, if the registry keeps runs. A call
    is a run, which waits for the result. None: those that the document marks (`x-ms-long-running-operation`), unless a
    credential depends on the caller."""

    flatten_body: bool = False
    """Turn the properties of a JSON object body into separate arguments."""

    server_variables: Mapping[str, str] = field(default_factory=dict[str, str])
    """Values for the variables in the document's server addresses."""

    follow_redirects: bool = False
    """Follow redirects within the same origin; redirects to other origins are never followed."""

    retries: Annotated[int, Meta(ge=0)] = 2
    """How often to retry a request that is safe to repeat, after a lost connection, 429, 502, 503 or 504.

    After a 429 with Retry-After, every method is retried. After a 401, the request is retried once with a new token, if
    one can be fetched.
    """

    retry_refused: bool = False
    """Also retry requests of any method after a 503. Set this if the API returns 503 only for requests that it did not
    process."""

    idempotency: bool = False
    """Send an `Idempotency-Key` with every request: the same for all attempts of a step of a run, and a new one for any
    other call. Set this if the API runs requests with the same key once: a run then sends a call again whose outcome is
    unknown."""

    restore: bool = False
    """Trust the document's `x-operations`: names, types and errors of an exported registry."""

    max_response_bytes: Count = 16 << 20
    """The largest response in bytes."""

    max_response_values: Count | None = None
    """The largest number of JSON values in a response; by default one for every 8 bytes of `max_response_bytes`. An
    event of a stream may have 100,000."""

    max_response_depth: Count = MAX_DEPTH
    """The largest number of levels in a response or an event, at most 500. Data with more than 64 is not normalised."""

    max_request_bytes: Count = 64 << 20
    """The largest request in bytes."""

    max_event_bytes: Count = 1 << 20
    """The largest event of a stream in bytes."""

    max_error_bytes: Count = 64 << 10
    """The largest part of an error body, in bytes, in the details of an error."""

    max_document_bytes: Count = 64 << 20
    """The largest document in bytes, all files together."""

    max_document_files: Count = 5_000
    """The largest number of files of one document."""

    document_root: str | Path | None = None
    """The folder that contains all files which the document may refer to; by default its own folder."""

    sign_documents: bool = False
    """Send `headers` and `auth` also when the document and its other files are fetched."""

    connections: Count = 100
    """The largest number of open connections."""

    concurrency: Count | None = None
    """The number of concurrent calls; by default `connections`. Further calls wait for a free slot, and fail with
    `RESOURCE_EXHAUSTED` if no call finishes for five seconds."""

    files_root: str | Path | None = None
    """A folder in which any caller may name files by relative paths: files to send (`{"path": ...}`), and new files for
    responses (`save_to`). Without it, only code in this process can refer to files."""

    max_file_bytes: Count = 16 << 30
    """The largest body in bytes that is sent from a file or saved to a file."""

    def __post_init__(self) -> None:
        enforce_lists(allowed_hosts=self.allowed_hosts, long_running=self.long_running)
        enforce_durations(timeout=self.timeout)
        enforce_policy(self.output, self.input)
        enforce_descriptions(self.descriptions)
        if self.operation_ids not in ("document", "short"):
            raise ValueError(f"operation_ids must be document or short, not {self.operation_ids!r}")
        if self.base_url is not None:
            try:
                origin_of(self.base_url)
            except ValueError as error:
                # The address is not shown, because it may contain a password.
                raise ValueError(
                    f"base_url is {error}. It looks like https://api.example.com/v1"
                ) from None
        for name, value in {**self.headers, **self.call_headers}.items():
            if not is_header(name, "" if callable(value) else value):
                raise ValueError(
                    f"headers: {name!r} is not a header name, or its value has line breaks"
                )
        if isinstance(self.auth, Mapping):
            auth = HTTPAuth(**Builder().fields(HTTPAuth, self.auth, ("auth",)))
            object.__setattr__(self, "auth", auth)
        if not 1 <= self.max_response_depth <= MAX_DOCUMENT_DEPTH:
            raise ValueError(f"max_response_depth must be from 1 to {MAX_DOCUMENT_DEPTH}")
        self.enforce_connection()
        if self.files_root is not None:
            FilesRoot(self.files_root)

    @property
    def exchanges_tokens(self) -> bool:
        """Whether requests need the token that the caller sent."""
        given = [
            getattr(self.auth, "token", None),
            *self.credentials.values(),
            *self.headers.values(),
        ]
        return any(isinstance(each, CallerToken) and each.exchange is not None for each in given)

    @property
    def response_values(self) -> int:
        """The largest number of JSON values in a response."""
        given = self.max_response_values
        return max(1, self.max_response_bytes // _BYTES_PER_VALUE) if given is None else given

    @classmethod
    def from_entry(cls, entry: Mapping[str, Any]) -> "HTTPServiceConfig":
        """Return the configuration in a mapping; names may be in snake_case or camelCase (`baseUrl`).

        Raises:
            ValueError: Names the field that is missing or unknown.
        """
        try:
            fields = Builder().fields(cls, entry)
        except ConfigKeyError as error:
            place = ".".join(map(str, error.path))
            if str(error).startswith((f"{field_of(error)}:", place)):
                raise
            raise ValueError(f"{place} {error}") from None
        if not isinstance(fields.get("namespace"), str):
            raise ValueError("config: namespace is missing")  # noqa: TRY004 - as the others
        return cls(**fields)


def credential_of(given: Any) -> Any:
    """Return the credential for a pair or a mapping; other credentials unchanged.

    Raises:
        ValueError: If it is not a credential, or is empty.
    """
    if isinstance(given, tuple):
        if len(given) != 2:  # pyright: ignore[reportUnknownArgumentType]
            raise ValueError("a login is a pair: user name and password")
        username, password = cast("tuple[str, str]", given)
        given = {"username": username, "password": password}
    try:
        found = Builder().value(Credential, given)
    except ConfigKeyError as error:
        raise ValueError(f"a credential or login {error}") from None
    if not found or not (isinstance(found, (str, BasicCredential, OAuthClient)) or callable(found)):
        raise ValueError("a credential is text, a pair, a mapping or a function, and is not empty")
    return found
