"""Sign requests: the document's security schemes, the operator's credentials for them, and OAuth2 tokens.

Rule 1: credentials come from configuration or from the context, never from arguments.
Rule 2: if a credential is not available, the call fails; the request is never sent without it.
Rule 3: only OAuth2 grants that need no person are supported. For the others, the operator provides a token or a
        function that returns one. A token is fetched once for many callers, and renewed before it expires.
Rule 4: a failure of the token provider is never reported as `ACCESS_DENIED`, because callers would think that their own
        credential was rejected.
"""

import base64
import inspect
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from hashlib import sha256
from typing import Any, TypeAlias, cast
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from operations.base.errors import CallError, ErrorCode
from operations.base.json.values import canonical, list_of, object_of, text_of
from operations.base.text import names_a_secret
from operations.base.types import JSONObject
from operations.contract.context import OperationContext, new_request_id
from operations.io.hosts import Origin, joined_url
from operations.io.http.client import (
    enforce_header,
    header_key,
    merged_headers,
    name_key,
    written_names,
)
from operations.openapi.source.config import (
    BasicCredential,
    CallValue,
    ClientCredentials,
    HTTPAuth,
    HTTPServiceConfig,
    OAuthClient,
    PasswordCredentials,
    RefreshToken,
    credential_of,
)
from operations.sources.credentials import CallerToken, TokenCache, add_client, lifetime_of

_LOGGER = logging.getLogger("operations")

MAX_SOURCES = 1000
"""The largest number of clients and users with cached tokens."""

_FLOWS: dict[type[OAuthClient], str] = {
    ClientCredentials: "clientCredentials",
    PasswordCredentials: "password",
}
_MAX_WARNED = 1_000
"""The number of hosts that are reported as not receiving credentials; a document and its API may name any number."""

_UNUSABLE = "The credential is not text, or is empty."


class TokenRefusedError(CallError):
    """The provider rejected the credentials in a token request."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.EXECUTION_ERROR, message)


Fetch: TypeAlias = Callable[[str, str, dict[str, str], bytes | None, bool], Awaitable[Any]]
"""`(method, url, headers, body)` -> the decoded JSON of the response. Raises `CallError` if there is none."""


@dataclass(slots=True)
class TokenSource:
    """Provides the token of one client, from the endpoint that the operator, the document or OpenID discovery names."""

    security: "Security"
    """Knows the token provider."""

    credentials: OAuthClient
    scheme: JSONObject
    """The security scheme of the document."""

    scopes: tuple[str, ...]
    """The scopes to request."""

    _found: str = ""
    """The token endpoint, once it is known."""

    _refresh_token: str = field(default="", repr=False)
    """The last one that the provider issued."""

    _tokens: TokenCache = field(default_factory=TokenCache)

    async def token(self) -> str:
        """Return a token that is valid for at least some seconds.

        Raises:
            CallError: If the provider does not issue a token.
        """
        return await self._tokens.get(b"", self._renew)

    def refuse(self, token_header: str) -> None:
        """Remove the cached token if it is the one that was rejected."""
        self._tokens.forget(token_header)

    async def _renew(self) -> tuple[str, float]:
        response = await self._ask()
        token = text_of(response.get("access_token"))
        if not token:
            raise CallError(
                ErrorCode.EXECUTION_ERROR, "The token endpoint returned no access token."
            )
        if not isinstance(self.credentials, ClientCredentials):
            self._refresh_token = text_of(response.get("refresh_token")) or self._refresh_token
        return token, lifetime_of(response)

    async def _ask(self) -> JSONObject:
        """Return the provider's response to the best available grant."""
        user, refresh = self.credentials, self._refresh_token
        if not refresh and isinstance(user, RefreshToken):
            refresh = user.refresh_token
        if refresh:
            try:
                return await self._post({"grant_type": "refresh_token", "refresh_token": refresh})
            except TokenRefusedError:
                if isinstance(user, RefreshToken):
                    raise
                # The refresh token has expired, but the password is still valid.
                self._refresh_token = ""
        if isinstance(user, PasswordCredentials):
            login = {"username": user.username, "password": user.password}
            return await self._post({"grant_type": "password", **login})
        return await self._post({"grant_type": "client_credentials"})

    async def _post(self, fields: dict[str, str]) -> JSONObject:
        client = self.credentials
        fields = {**fields, **client.parameters}
        if self.scopes:
            fields["scope"] = " ".join(self.scopes)
        headers = {
            "Content-Type": "application/x-www-form-urlencoded",
            "Accept": "application/json",
        }
        add_client(headers, fields, client.client_id, client.client_secret, client.send_in)
        url, body = await self._url(), urlencode(fields).encode()
        is_named = client.token_url is not None
        return object_of(await self.security.fetch("POST", url, headers, body, is_named))

    async def _url(self) -> str:
        """Return the token endpoint.

        Raises:
            CallError: `EXECUTION_ERROR` if there is none, or if only the document names it and its host may not receive
                credentials.
        """
        if self.credentials.token_url is not None:
            return self.credentials.token_url
        if not self._found:
            declared = await self._declared()
            if not declared:
                raise CallError(
                    ErrorCode.EXECUTION_ERROR,
                    "The document names no token endpoint: set token_url, or a token in credentials.",
                )
            url = joined_url(self.security.base, declared)
            if not self.security.is_trusted(url):
                raise CallError(
                    ErrorCode.EXECUTION_ERROR,
                    f"The document's token endpoint {url.partition('?')[0]!r} is on a host that may not"
                    " receive credentials: set token_url, or add the host to allowed_hosts.",
                )
            self._found = url
        return self._found

    async def _declared(self) -> str:
        flows = object_of(self.scheme.get("flows"))
        is_refresh = isinstance(self.credentials, RefreshToken)
        for key in ("refreshUrl", "tokenUrl") if is_refresh else ("tokenUrl",):
            for flow in (_FLOWS.get(type(self.credentials), ""), *flows):
                url = text_of(object_of(flows.get(flow)).get(key))
                if url:
                    return url
        return await self._discovered()

    async def _discovered(self) -> str:
        """Return the token endpoint in the metadata of the provider: of OpenID or, from 3.2 on, of OAuth2."""
        address = self.scheme.get("openIdConnectUrl") or self.scheme.get("oauth2MetadataUrl")
        if not isinstance(address, str):
            return ""
        discovery = joined_url(self.security.base, address)
        headers = {"Accept": "application/json"}
        found = object_of(await self.security.fetch("GET", discovery, headers, None, False))
        declared = text_of(found.get("token_endpoint"))
        return joined_url(discovery, declared) if declared else ""


@dataclass(slots=True)
class RequestCredentials:
    """The credentials of one request."""

    headers: dict[str, str] = field(default_factory=dict[str, str])
    query: list[str] = field(default_factory=list[str])
    cookies: list[str] = field(default_factory=list[str])

    secrets: list[str] = field(default_factory=list[str])
    """Secrets that errors must not contain."""

    tokens: list[TokenSource | CallerToken] = field(default_factory=list[TokenSource | CallerToken])
    """The sources of the tokens, which remove a rejected token from their cache."""

    configured: Mapping[str, str] | None = None
    """The configured headers of the call."""

    header_keys: frozenset[str] = frozenset()
    """The names of the headers, as `header_key` returns them."""


_COOKIE_NAME = "!#$%&'*+-.^_`|~[]()/:<>?@{}"
"""The characters allowed in a cookie's name without encoding."""

NOTHING = RequestCredentials()
"""The signature of a request without credentials."""


@dataclass(slots=True)
class SecurityPlan:
    """How the requests of one operation are signed."""

    schemes: JSONObject
    """The security schemes whose credentials are used, and their scopes."""

    is_fixed: bool
    """Whether the credentials are the same for every request."""

    credentials: RequestCredentials | None = None
    """The fixed credentials, once they are known."""


class Security:
    """Signs the requests of one service.

    Args:
        config: The operator's credentials.
        schemes: The document's security schemes, in the form of 3.x.
        default: The document's own security requirement.
        base: The base of relative token URLs.
        is_trusted: Whether a URL's host may be sent secrets.
        fetch: Sends a request to a token provider, whose URL the operator configured or not.
    """

    def __init__(
        self,
        config: HTTPServiceConfig,
        schemes: JSONObject,
        default: Any,
        *,
        base: str,
        is_trusted: Callable[[str], bool],
        fetch: Fetch,
    ) -> None:
        self.base = base
        self.is_trusted = is_trusted
        self.fetch = fetch
        self._schemes = schemes
        self._default = default
        # A mapping has been converted to a credential.
        self._auth = config.auth if isinstance(config.auth, HTTPAuth) else None
        self._namespace = config.namespace
        self._credentials: dict[str, Any] = {}
        for name, given in config.credentials.items():
            try:
                self._credentials[name] = credential_of(given)
            except ValueError as error:
                raise ValueError(f"credentials: {name!r}: {error}") from None
        self._headers = {
            **config.headers,
            **{name: partial(_of_call, value) for name, value in config.call_headers.items()},
        }
        if config.idempotency:
            self._headers["Idempotency-Key"] = _idempotency_key
        self._base_query = urlsplit(config.base_url or "").query
        self._sources: dict[bytes, TokenSource] = {}
        self._warned: set[Origin] = set()
        self.is_empty = self._auth is None and not self._credentials and not self._headers

    @cached_property
    def owned(self) -> frozenset[tuple[str, str]]:
        """The keys (see `name_key`) of all names that configuration sets and arguments must not set."""
        names = {name_key("header", name) for name in self._headers}
        names.update(written_names("query", [self._base_query] if self._base_query else []))
        for name, value in self._headers.items():
            if header_key(name) == "cookie" and not callable(value):
                names.update(written_names("cookie", [value]))
        if self._auth is not None:
            names.add(name_key("header", _auth_header(self._auth)))
        return self.keys | names

    @cached_property
    def keys(self) -> frozenset[tuple[str, str]]:
        """The part of `owned` that belongs to API keys, which are added to each request."""
        return frozenset(filter(None, map(self._key_of, self._credentials)))

    def _key_of(self, name: str) -> tuple[str, str] | None:
        """Return the key of the parameter that an API key is sent as; None for other security schemes."""
        scheme = object_of(self._schemes.get(name))
        if scheme.get("type") != "apiKey":
            return None
        return name_key(text_of(scheme.get("in")), text_of(scheme.get("name")))

    def plan(self, requirement: Any, parameters: Collection[tuple[str, str]] = ()) -> SecurityPlan:
        """Return how the requests of an operation are signed.

        Args:
            requirement: The operation's own security requirement; None for the document's.
            parameters: The keys (see `name_key`) of the parameters that the operation requires. API keys among
                them are sent even if the requirement does not name them.
        """
        if self.is_empty:
            return SecurityPlan({}, is_fixed=True, credentials=NOTHING)
        alternatives = list_of(self._default if requirement is None else requirement)
        known = self._credentials
        # The first alternative whose schemes all have credentials.
        usable = (
            each for each in map(object_of, alternatives) if each and each.keys() <= known.keys()
        )
        schemes = {**next(usable, JSONObject())}
        for name in known:
            if self._key_of(name) in parameters:
                schemes.setdefault(name, [])
        given = [*self._headers.values(), *(known[name] for name in schemes)]
        if self._auth is not None:
            given.append(_auth_secret(self._auth))
        # A user name and password may have to be exchanged for a token.
        return SecurityPlan(schemes, is_fixed=all(isinstance(each, str) for each in given))

    async def _headers_of(self, context: OperationContext) -> Mapping[str, str]:
        """Return the configured headers of one call."""
        found = {name: await _secret(value, context) for name, value in self._headers.items()}
        return {name: str(value) for name, value in found.items() if value is not None}

    def warn(self, origin: Origin) -> None:
        """Log once that the host of a request does not receive the credentials, for a limited number of hosts."""
        if self.is_empty or origin in self._warned:
            return
        if len(self._warned) < _MAX_WARNED:
            self._warned.add(origin)
            _LOGGER.warning(
                "%s: credentials are not sent to %s, which only the document names;"
                " set base_url or allowed_hosts if they should be",
                self._namespace,
                origin,
            )

    async def sign(
        self,
        plan: SecurityPlan,
        context: OperationContext,
        headers: Mapping[str, str] | None = None,
    ) -> RequestCredentials:
        """Return the credentials to add to a request.

        Args:
            plan: The plan of the operation.
            context: The context of the call.
            headers: The configured headers of the call, if they are already known.

        Raises:
            CallError: `ACCESS_DENIED` if a credential cannot be obtained, and the errors of a token provider.
        """
        if headers is None:
            headers = await self._headers_of(context)
        signature = RequestCredentials(headers=dict(headers), configured=headers)
        for name, value in headers.items():
            if names_a_secret(name):
                signature.secrets += (value, value.partition(" ")[2])
        for name, scopes in plan.schemes.items():
            await self._apply(signature, name, [text_of(s) for s in list_of(scopes)], context)
        if self._auth is not None:
            token = await _credential(signature, _auth_secret(self._auth), context)
            if token is not None:
                _apply_auth(signature, self._auth, token)
        signature.headers = merged_headers(signature.headers)
        for name, value in signature.headers.items():
            enforce_header(name, value)
        signature.header_keys = frozenset(map(header_key, signature.headers))
        if plan.is_fixed:
            plan.credentials = signature
        return signature

    async def _apply(
        self, signature: RequestCredentials, name: str, scopes: list[str], context: OperationContext
    ) -> None:
        """Add the credential of the security scheme `name`."""
        scheme = object_of(self._schemes.get(name))
        credential = await _credential(signature, self._credentials[name], context)
        if credential is None:
            return
        kind = text_of(scheme.get("type"))
        if isinstance(credential, BasicCredential) and kind in {"oauth2", "openIdConnect"}:
            # For OAuth2, user name and password are used to obtain a token.
            credential = PasswordCredentials(
                username=credential.username, password=credential.password
            )
        if isinstance(credential, OAuthClient):
            source = self._source(name, credential, scheme, scopes)
            token = await source.token()
            signature.tokens.append(source)
            _authorize(signature, "Bearer", token)
        elif kind == "apiKey" and not isinstance(credential, BasicCredential):
            _apply_key(signature, scheme, str(credential))
        else:
            _apply_http(signature, text_of(scheme.get("scheme")), credential)

    def _source(
        self, name: str, credentials: OAuthClient, scheme: JSONObject, scopes: list[str]
    ) -> TokenSource:
        """Return the source of tokens for these scopes; the same one for the same client or user."""
        wanted = credentials.scopes or tuple(sorted(scopes))
        key = msgspec.json.encode([name, type(credentials).__name__, credentials, wanted])
        source = self._sources.get(key)
        if source is None:
            if len(self._sources) >= MAX_SOURCES:
                del self._sources[next(iter(self._sources))]
            source = self._sources[key] = TokenSource(self, credentials, scheme, wanted)
        return source


def _of_call(value: CallValue, context: OperationContext) -> str | None:
    if value == "identity_id":
        return None if context.identity is None else context.identity.id
    return context.request_id if value == "request_id" else context.parent_request_id


def _idempotency_key(context: OperationContext) -> str:
    """Return the key of a request: that of its step, which another caller cannot use, or a new one."""
    if context.key is None:
        return new_request_id()
    identity = context.identity
    whose = [None, None] if identity is None else [identity.id, identity.issuer]
    return sha256(canonical([*whose, context.key])).hexdigest()


def _apply_http(signature: RequestCredentials, word: str, credential: Any) -> None:
    """Add an Authorization header of the HTTP scheme `word`."""
    is_login = isinstance(credential, BasicCredential)
    if is_login and word.lower() not in {"", "basic", "bearer"}:
        # Basic would reveal the password, which this scheme protects.
        raise CallError(
            ErrorCode.ACCESS_DENIED,
            f"HTTP {word} with user name and password is not supported:"
            " set the credential itself, or a transport that signs in.",
        )
    if is_login or word.lower() == "basic":
        _hide_password(signature, credential)
        _authorize(signature, "Basic", _basic(credential))
    else:
        # Scheme names are case-insensitive, but some servers expect `Bearer` to be capitalised.
        _authorize(signature, "Bearer" if word.lower() in {"", "bearer"} else word, str(credential))


def _authorize(signature: RequestCredentials, word: str, token: str) -> None:
    signature.headers["Authorization"] = f"{word} {token}"
    signature.secrets.append(token)


def _apply_key(signature: RequestCredentials, scheme: JSONObject, key: str) -> None:
    name = text_of(scheme.get("name"))
    signature.secrets += {key, quote(key, safe="")}
    match scheme.get("in"):
        case "query":
            _add_pair(signature.query, quote(name, safe=""), key)
        case "cookie":
            _add_pair(signature.cookies, quote(name, safe=_COOKIE_NAME), key)
        case _:
            signature.headers[name] = key


def _add_pair(pairs: list[str], name: str, key: str) -> None:
    """Add a pair, unless another scheme of the same name has added one: servers read two pairs as a list."""
    if not any(pair.startswith(f"{name}=") for pair in pairs):
        pairs.append(f"{name}={quote(key, safe='')}")


def _apply_auth(signature: RequestCredentials, auth: HTTPAuth, token: Any) -> None:
    is_login = auth.type == "basic" and isinstance(token, BasicCredential)
    if not is_login and not isinstance(token, str):
        raise CallError(ErrorCode.ACCESS_DENIED, _UNUSABLE)
    secret = _basic(token) if auth.type == "basic" else cast("str", token)
    if auth.type == "basic":
        _hide_password(signature, token)
    if auth.type == "apiKey":
        value = f"{auth.prefix or ''}{secret}"
    else:
        word = auth.type.capitalize() if auth.prefix is None else auth.prefix
        value = f"{word} {secret}" if word else secret
    signature.headers[_auth_header(auth)] = value
    signature.secrets.append(secret)


def _auth_secret(auth: HTTPAuth) -> Any:
    return auth.token if auth.username is None else f"{auth.username}:{auth.password or ''}"


def _auth_header(auth: HTTPAuth) -> str:
    return auth.header_name or ("X-API-Key" if auth.type == "apiKey" else "Authorization")


def _hide_password(signature: RequestCredentials, credential: Any) -> None:
    """Note the password of a login, which the encoded login does not contain as text."""
    if isinstance(credential, BasicCredential):
        signature.secrets.append(credential.password)
    else:
        signature.secrets.append(str(credential).partition(":")[2])


def _basic(credential: Any) -> str:
    """Return `user:password` encoded; a value without a colon is already encoded."""
    if isinstance(credential, BasicCredential):
        text = f"{credential.username}:{credential.password}"
    else:
        text = str(credential)
    return base64.b64encode(text.encode()).decode() if ":" in text else text


async def _credential(signature: RequestCredentials, source: Any, context: OperationContext) -> Any:
    """Return a credential, or the result of its function for this caller; None if the caller has none.

    Raises:
        CallError: `ACCESS_DENIED` if the function fails, or returns another object, whose repr would be sent.
    """
    if not callable(source):
        return source
    if isinstance(source, CallerToken) and source.exchange is not None:
        signature.tokens.append(source)
    given = await _secret(source, context)
    try:
        found = None if given is None else credential_of(given)
    except ValueError as error:
        raise CallError(ErrorCode.ACCESS_DENIED, _UNUSABLE) from error
    if callable(found):
        raise CallError(ErrorCode.ACCESS_DENIED, _UNUSABLE)
    return found


async def _secret(source: Any, context: OperationContext) -> Any:
    """Return a configured secret, or the result of its function for this caller.

    Raises:
        CallError: `ACCESS_DENIED` if the function fails. The reason is in the cause, not in the message.
    """
    if not callable(source):
        return source
    try:
        found: Any = source(context)
        return await found if inspect.isawaitable(found) else found
    except CallError:
        raise
    except Exception as error:
        raise CallError(ErrorCode.ACCESS_DENIED, "The credential could not be obtained.") from error
