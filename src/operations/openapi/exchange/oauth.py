"""OAuth2 tokens: one per client and scopes, fetched once for many callers, renewed in time.

Rule 1: only grants that need no person are made here. For the others the operator gives a token, or what finds one.
Rule 2: what goes wrong here is between us and the provider. It is never told as `ACCESS_DENIED`: whoever calls would
        take it for a refusal of their own credential.
"""

import asyncio
import base64
from collections.abc import Callable
from math import isfinite
from time import monotonic
from typing import Any, Protocol
from urllib.parse import quote, urlencode, urljoin

import msgspec

from operations._json import object_of, text_of
from operations.errors import CallError, ErrorCode
from operations.openapi.config import (
    ClientCredentials,
    OAuthClient,
    PasswordCredentials,
    RefreshToken,
)
from operations.types import JSONObject

RENEW_BEFORE = 30.0
"""Seconds before a token expires at which it is renewed; at most a tenth of its life."""

DEFAULT_LIFETIME = 300.0
"""Seconds a token is used for whose life the provider does not tell."""

MAX_SOURCES = 1000
"""How many clients and users have their tokens kept at once."""

_FLOWS: dict[type[OAuthClient], str] = {
    ClientCredentials: "clientCredentials",
    PasswordCredentials: "password",
}
_INSTEAD = "Give a token in credentials, or a callable that finds the caller's."


class TokenRefusedError(CallError):
    """The provider gives no token for what it was shown."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.EXECUTION_ERROR, message)


class Fetch(Protocol):
    """One small HTTP exchange with a JSON response."""

    async def __call__(
        self, method: str, url: str, headers: dict[str, str], body: bytes | None
    ) -> Any:
        """The decoded response.

        Raises:
            CallError: If there is none, or it is an error.
        """
        ...


class TokenSource:
    """Gives one client's token."""

    def __init__(
        self,
        credentials: OAuthClient,
        scopes: tuple[str, ...],
        endpoint: "Endpoint",
        fetch: Fetch,
    ) -> None:
        self._credentials = credentials
        self._scopes = scopes
        self._endpoint = endpoint
        self._fetch = fetch
        self._token = ""
        self._refresh_token = ""
        if isinstance(credentials, RefreshToken):
            self._refresh_token = credentials.refresh_token
        self._renew_at = 0.0
        self._renewal: asyncio.Task[str] | None = None

    async def token(self) -> str:
        """A token that is good for a while.

        Raises:
            CallError: If the provider gives none.
        """
        if monotonic() < self._renew_at:
            return self._token
        renewal = self._renewal
        if (
            renewal is None
            or renewal.done()
            or renewal.get_loop() is not asyncio.get_running_loop()
        ):
            renewal = self._renewal = asyncio.create_task(self._renew())
            renewal.add_done_callback(_seen)
        # Shielded: one caller that leaves must not take the token from the others.
        return await asyncio.shield(renewal)

    def refuse(self, token_header: str) -> None:
        """Forget the token if it is still the one that was just refused."""
        if self._token and token_header.endswith(self._token):
            self._renew_at = 0.0

    async def _renew(self) -> str:
        started = monotonic()
        response = await self._ask()
        token = text_of(response.get("access_token"))
        if not token:
            raise CallError(ErrorCode.EXECUTION_ERROR, "The token endpoint gave no access token.")
        lifetime = _seconds(response.get("expires_in"))
        if not isinstance(self._credentials, ClientCredentials):
            self._refresh_token = text_of(response.get("refresh_token")) or self._refresh_token
        self._token = token
        self._renew_at = started + lifetime - min(RENEW_BEFORE, lifetime / 10)
        return token

    async def _ask(self) -> JSONObject:
        """The provider's response to the best grant there is."""
        user = self._credentials
        if self._refresh_token:
            try:
                return await self._post(
                    {"grant_type": "refresh_token", "refresh_token": self._refresh_token}
                )
            except TokenRefusedError:
                if isinstance(user, RefreshToken):
                    raise
                # It has expired; the password has not.
                self._refresh_token = ""
        if isinstance(user, PasswordCredentials):
            login = {"username": user.username, "password": user.password}
            return await self._post({"grant_type": "password", **login})
        return await self._post({"grant_type": "client_credentials"})

    async def _post(self, fields: dict[str, str]) -> JSONObject:
        client = self._credentials
        fields = {**fields, **client.parameters}
        if self._scopes:
            fields["scope"] = " ".join(self._scopes)
        headers = {
            "Content-Type": "application/x-www-form-urlencoded",
            "Accept": "application/json",
        }
        if client.client_secret and client.send_in == "header":
            pair = f"{quote(client.client_id, safe='')}:{quote(client.client_secret, safe='')}"
            headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
        else:
            secrets = {"client_id": client.client_id, "client_secret": client.client_secret}
            fields |= {name: secret for name, secret in secrets.items() if secret}
        url = await self._endpoint.url()
        try:
            return object_of(await self._fetch("POST", url, headers, urlencode(fields).encode()))
        except TokenRefusedError as error:
            hint = self._endpoint.hint()
            if not hint:
                raise
            raise TokenRefusedError(f"{error.message} {hint}") from error


def _seen(task: "asyncio.Task[str]") -> None:
    """Reading the exception marks it as seen, also where every caller has left."""
    if not task.cancelled():
        task.exception()


def _seconds(value: Any) -> float:
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        return DEFAULT_LIFETIME
    return min(max(seconds, 0.0), 86400.0) if isfinite(seconds) else DEFAULT_LIFETIME


class Endpoint:
    """Where tokens are asked for: told by the operator, by the document, or by OpenID discovery."""

    def __init__(
        self,
        credentials: OAuthClient,
        scheme: JSONObject,
        base: str,
        may_have_credentials: Callable[[str], bool],
        fetch: Fetch,
    ) -> None:
        self._credentials = credentials
        self._scheme = scheme
        self._base = base
        self._is_trusted = may_have_credentials
        self._fetch = fetch
        self._found = ""

    async def url(self) -> str:
        """The token endpoint.

        Raises:
            CallError: `EXECUTION_ERROR` if there is none, or only a document says so for a host that
                credentials may not go to.
        """
        if self._credentials.token_url is not None:
            return self._credentials.token_url
        if not self._found:
            declared = await self._declared()
            if not declared:
                raise CallError(
                    ErrorCode.EXECUTION_ERROR,
                    f"The document names no token endpoint: set token_url. {self.hint()}".rstrip(),
                )
            url = urljoin(self._base, declared)
            if not self._is_trusted(url):
                raise CallError(
                    ErrorCode.EXECUTION_ERROR,
                    f"The document's token endpoint {url.partition('?')[0]!r} is on a host that"
                    " credentials may not go to: set token_url, or name the host in allowed_hosts.",
                )
            self._found = url
        return self._found

    def hint(self) -> str:
        """What to do where the document declares no flow that can be taken without a person; else empty."""
        flows = object_of(self._scheme.get("flows"))
        wanted = _FLOWS.get(type(self._credentials), "")
        if not flows or not wanted or wanted in flows:
            return ""
        return f"It declares {' and '.join(flows)}, where a person signs in. {_INSTEAD}"

    async def _declared(self) -> str:
        flows = object_of(self._scheme.get("flows"))
        is_refresh = isinstance(self._credentials, RefreshToken)
        for key in ("refreshUrl", "tokenUrl") if is_refresh else ("tokenUrl",):
            for flow in (_FLOWS.get(type(self._credentials), ""), *flows):
                url = text_of(object_of(flows.get(flow)).get(key))
                if url:
                    return url
        return await self._discovered()

    async def _discovered(self) -> str:
        """What the provider itself says: OpenID discovery, or from 3.2 on OAuth2 metadata."""
        address = self._scheme.get("openIdConnectUrl") or self._scheme.get("oauth2MetadataUrl")
        if not isinstance(address, str):
            return ""
        discovery = urljoin(self._base, address)
        found = await self._fetch("GET", discovery, {"Accept": "application/json"}, None)
        return urljoin(discovery, text_of(object_of(found).get("token_endpoint")))


class TokenSources:
    """Every token source of one service.

    Args:
        base: What relative token URLs are relative to.
        may_have_credentials: Whether a URL's host may be sent secrets.
        fetch: Does the exchange.
    """

    def __init__(
        self, base: str, may_have_credentials: Callable[[str], bool], fetch: Fetch
    ) -> None:
        self._base = base
        self._is_trusted = may_have_credentials
        self._fetch = fetch
        self._sources: dict[bytes, TokenSource] = {}

    def get(
        self, name: str, credentials: OAuthClient, scheme: JSONObject, scopes: list[str]
    ) -> TokenSource:
        """The source of tokens for these scopes; the same one for the same client or user."""
        wanted = credentials.scopes or tuple(sorted(scopes))
        key = msgspec.json.encode([name, type(credentials).__name__, credentials, wanted])
        source = self._sources.get(key)
        if source is None:
            if len(self._sources) >= MAX_SOURCES:
                del self._sources[next(iter(self._sources))]
            endpoint = Endpoint(credentials, scheme, self._base, self._is_trusted, self._fetch)
            source = self._sources[key] = TokenSource(credentials, wanted, endpoint, self._fetch)
        return source
