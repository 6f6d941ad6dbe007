"""Credentials that depend on the caller: one per user, a function of the call, or a token exchange (RFC 8693).

Rule 1: the token of a caller is sent only to the token endpoint that the operator configured, which exchanges it for
        another token. If the endpoint returns the caller's own token, the call fails.
Rule 2: the token of a caller is attached to its identity, and not a field: it is never encoded, printed or compared,
        and is freed with the identity. Only a `TokenExchange` reads it.
Rule 3: a credential that cannot be obtained fails the call; the request is never sent without it.
"""

import asyncio
import base64
import re
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from importlib import import_module
from inspect import isawaitable
from math import inf, isfinite
from time import monotonic, time
from typing import Annotated, Final, Literal, TypeAlias, cast
from urllib.parse import quote, urlencode, urlsplit

from operations.base.attached import Attached
from operations.base.errors import CallError, ErrorCode, retrieve_exception
from operations.base.json.decoding import decode_json
from operations.base.json.values import MAX_REQUEST_VALUES, JSONValueError, object_of, text_of
from operations.base.text import enforce_lists
from operations.base.types import FunctionName, JSONObject
from operations.contract.access import Identity, token_not_stored
from operations.contract.context import NO_CALL, OperationContext
from operations.contract.options import NAMED
from operations.io.http.plain import ProxyFailureError, StatusError, read_object

TokenFunction: TypeAlias = Callable[[OperationContext], "str | Awaitable[str | None] | None"]
"""Returns the bearer token of a call, or None to send no token; may be a coroutine function.

Requests outside of calls (connecting, listing) have the context `NO_CALL`, which has no identity.
"""

MAX_TOKENS: Final = 1_000
"""Tokens in one cache."""

_ACCESS_TOKEN = "urn:ietf:params:oauth:token-type:access_token"  # noqa: S105
_EXCHANGE = "urn:ietf:params:oauth:grant-type:token-exchange"
_SECONDS = 10.0
DEFAULT_LIFETIME: Final = 300.0
"""The lifetime of a token in seconds, if the endpoint does not give one."""

_RENEW_BEFORE = 30.0
"""A token is replaced this many seconds before it expires, or at 90% of its lifetime if that is later."""

_TOKEN: Attached[str] = Attached("_token")
_ERROR_CODE = re.compile("[a-z_]{1,64}")


def hold_token(identity: Identity, token: str) -> Identity:
    """Return a copy of an identity with the token that identified the caller, for token exchange."""
    return _TOKEN.to(identity, token)


_Fetch: TypeAlias = Callable[[], Awaitable[tuple[str, float]]]
"""Fetches a token; returns it with its lifetime in seconds."""


class TokenCache:
    """Caches tokens by key. A token is fetched once for many callers, and renewed before it expires."""

    def __init__(self) -> None:
        self._kept: dict[bytes, tuple[str, float]] = {}
        self._fetching: dict[bytes, asyncio.Task[str]] = {}

    async def get(self, key: bytes, fetch: _Fetch) -> str:
        """Return the token of a key; fetch it if none is cached.

        Raises:
            CallError: The errors of `fetch`.
        """
        token, until = self._kept.get(key, ("", 0.0))
        if until > monotonic():
            return token
        task = self._fetching.get(key)
        if task is None or task.get_loop() is not asyncio.get_running_loop():
            task = asyncio.Task(self._fetch(key, fetch))
            self._fetching[key] = task
            task.add_done_callback(lambda task: self._fetched(key, task))
        # Shielded: if one caller is cancelled, the others still receive the token.
        return await asyncio.shield(task)

    async def _fetch(self, key: bytes, fetch: _Fetch) -> str:
        started = monotonic()
        token, lifetime = await fetch()
        usable = lifetime - min(_RENEW_BEFORE, lifetime / 10)
        self._kept.pop(key, None)
        self._kept[key] = (token, started + usable)
        if len(self._kept) > MAX_TOKENS:
            self._kept.pop(next(iter(self._kept)), None)
        return token

    def _fetched(self, key: bytes, task: "asyncio.Task[str]") -> None:
        if self._fetching.get(key) is task:
            del self._fetching[key]
        retrieve_exception(task)

    def forget(self, token_header: str) -> None:
        """Remove the token that a header contains, because a service rejected it."""
        for key, (token, _) in list(self._kept.items()):
            if token_header.endswith(token):
                self._kept.pop(key, None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenExchange:
    """Exchanges the token of a caller for one that another service accepts (RFC 8693).

    Tokens are cached for each caller's token until they or the caller's token expire. Requests outside of calls, such
    as connecting to an MCP server, use a token of this client (`client_credentials`).

    Raises:
        ValueError: If a field is not valid; the message names it.
    """

    token_url: str
    """The token endpoint of the authorization server."""

    client_id: str
    """The id of this client at the authorization server."""

    client_secret: str = field(default="", repr=False)
    """The secret of this client."""

    audience: str | None = None
    """The name of the target service at the authorization server."""

    resource: str | None = None
    """The address of the target service."""

    scopes: tuple[str, ...] = ()
    """Scopes to request; by default the authorization server decides."""

    parameters: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    """Sent with every token request."""

    send_in: Literal["header", "body"] = "header"
    """Whether a token request has the id and secret of the client in a header or in its body."""

    _tokens: TokenCache = field(default_factory=TokenCache, init=False, repr=False)
    # Separate threads, so that an unresponsive endpoint does not block other work.
    _threads: ThreadPoolExecutor = field(
        default_factory=partial(ThreadPoolExecutor, 8, "token-exchange"), init=False, repr=False
    )

    def __post_init__(self) -> None:
        enforce_lists(scopes=self.scopes)
        if urlsplit(self.token_url).scheme not in ("http", "https"):
            raise ValueError("token_url must begin with https:// or http://")

    async def __call__(self, context: OperationContext) -> str:
        """Return the token for a call.

        Raises:
            CallError: `ACCESS_DENIED` if the caller did not send a token; `EXECUTION_ERROR` if the authorization server
                rejects the exchange; `UNAVAILABLE` if it does not respond, or the call belongs to a run.
        """
        if context.scope is not None:
            # Another attempt would not have it.
            raise token_not_stored("This operation")
        identity = context.identity
        subject = None if identity is None else _TOKEN.of(identity)
        if subject is None and context is not NO_CALL:
            raise CallError(
                ErrorCode.ACCESS_DENIED,
                "This operation acts for its caller at another service: call it with an access token."
                " An API key, a grant, or no credential cannot be exchanged.",
            )
        expires_at = None if identity is None else identity.expires_at
        fetch = partial(self._fetch, subject, expires_at)
        loop, key = asyncio.get_running_loop(), sha256((subject or "").encode()).digest()
        return await self._tokens.get(key, lambda: loop.run_in_executor(self._threads, fetch))

    def refuse(self, token_header: str) -> None:
        """Remove a token that a service rejected from the cache."""
        self._tokens.forget(token_header)

    def _fetch(self, subject: str | None, expires_at: float | None) -> tuple[str, float]:
        """Return a token, and the seconds until it or the caller's token expires. Blocks the thread."""
        fields = {"grant_type": "client_credentials"}
        if subject is not None:
            fields = {
                "grant_type": _EXCHANGE,
                "subject_token": subject,
                "subject_token_type": _ACCESS_TOKEN,
                "requested_token_type": _ACCESS_TOKEN,
            }
        named = {"audience": self.audience, "resource": self.resource}
        fields |= {name: value for name, value in named.items() if value is not None}
        if self.scopes:
            fields["scope"] = " ".join(self.scopes)
        fields |= self.parameters
        headers = {"Accept": "application/json"}
        add_client(headers, fields, self.client_id, self.client_secret, self.send_in)
        response = _post(self.token_url, headers, urlencode(fields).encode())
        token = text_of(response.get("access_token"))
        if not token or text_of(response.get("token_type", "Bearer")).lower() != "bearer":
            raise CallError(ErrorCode.EXECUTION_ERROR, "The token endpoint gave no bearer token.")
        if token == subject:
            message = "The token endpoint returned the caller's own token, which is not passed on."
            raise CallError(ErrorCode.EXECUTION_ERROR, message)
        left = inf if expires_at is None else expires_at / 1000 - time()
        return token, min(lifetime_of(response), left)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerToken:
    """A credential that depends on the caller. Set one of `users`, `function` and `exchange`.

    Raises:
        ValueError: If a field is not valid; the message names it.
    """

    users: Mapping[str, Annotated[str, NAMED]] = field(default_factory=dict[str, str], repr=False)
    """The token of each caller, by caller id; of a caller with a token, by `id@issuer`. Calls of other callers fail."""

    function: FunctionName | TokenFunction | None = None
    """A function that takes the context of a call and returns its token; in a file, `module:function`."""

    exchange: TokenExchange | None = None
    """Exchanges the token that the caller sent."""

    own: str | None = field(default=None, repr=False)
    """The token for requests outside of calls, such as connecting to an MCP server and listing its tools."""

    def __post_init__(self) -> None:
        given = [bool(self.users), self.function is not None, self.exchange is not None]
        if sum(given) != 1:
            raise ValueError("a credential of the caller needs one of users, function and exchange")

    def load(self) -> TokenFunction:
        """Return the function that provides the token; import it if it is given by name.

        Raises:
            ValueError: If it cannot be imported.
        """
        if self.exchange is not None:
            return self.exchange
        if isinstance(self.function, str):
            module, _, name = self.function.partition(":")
            try:
                return cast("TokenFunction", getattr(import_module(module), name))
            except (ImportError, AttributeError) as error:
                raise ValueError(f"function {self.function} cannot be imported: {error}") from error
        return self.function or self._of_user

    async def __call__(self, context: OperationContext) -> str | None:
        """Return the token for a call, or None to send none.

        Raises:
            CallError: If there is no token for this caller.
        """
        if context is NO_CALL and (self.own is not None or self.users):
            return self.own
        found = self.load()(context)
        return await found if isawaitable(found) else found

    def refuse(self, token_header: str) -> None:
        """Remove a token that a service rejected from the cache, so that the next call fetches a new one."""
        if self.exchange is not None:
            self.exchange.refuse(token_header)

    def _of_user(self, context: OperationContext) -> str:
        identity = context.identity
        token = None if identity is None else self.users.get(identity.account)
        if token is None:
            raise CallError(
                ErrorCode.ACCESS_DENIED,
                "This operation acts for its caller at another service, and the caller has no credential there.",
            )
        return token


def _post(url: str, headers: Mapping[str, str], body: bytes) -> JSONObject:
    try:
        return read_object(url, _SECONDS, headers, body)
    except StatusError as error:
        raise _refused(error) from None
    except OSError as error:
        is_proxy = isinstance(error, ProxyFailureError)
        reason = f" {error}" if is_proxy else f": {type(error).__name__}"
        message = f"The token endpoint cannot be reached{reason}"
        raise CallError(ErrorCode.UNAVAILABLE, message, retryable=True) from error
    except JSONValueError:
        message = "The token endpoint did not respond with JSON."
        raise CallError(ErrorCode.EXECUTION_ERROR, message) from None


def _refused(error: StatusError) -> CallError:
    """Return the error for a response without a token.

    It has the code of the response, but not its text, which could contain a token.
    """
    if error.status >= 500:
        message = f"The token endpoint responded with HTTP status {error.status}"
        return CallError(ErrorCode.UNAVAILABLE, message, retryable=True)
    reason = oauth_error(error.content) or f"status {error.status}"
    return CallError(ErrorCode.EXECUTION_ERROR, f"The token exchange was refused: {reason}.")


def oauth_error(content: bytes) -> str:
    """Return the error code in the response of a token endpoint (RFC 6749, 5.2); empty if it has none.

    Text of any other form is not returned, because it could contain a secret.
    """
    try:
        code = object_of(decode_json(content, max_values=MAX_REQUEST_VALUES)).get("error")
    except JSONValueError:
        return ""
    return code if isinstance(code, str) and _ERROR_CODE.fullmatch(code) else ""


def add_client(
    headers: dict[str, str], fields: dict[str, str], client_id: str, secret: str, send_in: str
) -> None:
    """Add the id and the secret of a client to a token request: as a header, or among its fields."""
    if secret and send_in == "header":
        pair = f"{quote(client_id, safe='')}:{quote(secret, safe='')}"
        headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
    else:
        named = {"client_id": client_id, "client_secret": secret}
        fields |= {name: value for name, value in named.items() if value}


def lifetime_of(response: JSONObject) -> float:
    """Return the seconds until the token in a response expires, at most a day."""
    try:
        seconds = float(response["expires_in"])
    except (KeyError, TypeError, ValueError):
        return DEFAULT_LIFETIME
    return min(max(seconds, 0.0), 86_400.0) if isfinite(seconds) else DEFAULT_LIFETIME
