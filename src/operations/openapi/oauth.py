"""OAuth2 client credentials: one token per client and scopes, fetched once for many callers, renewed in time."""

import asyncio
import base64
from collections.abc import Callable
from math import isfinite
from time import monotonic
from typing import Any, Protocol
from urllib.parse import quote, urlencode, urljoin

import msgspec

from operations.errors import CallError, ErrorCode
from operations.openapi.config import ClientCredentials
from operations.openapi.nodes import object_of, text_of
from operations.types import JSONObject

RENEW_BEFORE = 30.0
"""Seconds before a token expires at which it is renewed; at most a tenth of its life."""

DEFAULT_LIFETIME = 300.0
"""Seconds a token is used for whose life the provider does not tell."""


class Fetch(Protocol):
    """One small HTTP exchange with a JSON answer."""

    async def __call__(
        self, method: str, url: str, headers: dict[str, str], body: bytes | None
    ) -> Any:
        """The decoded answer.

        Raises:
            CallError: If there is none, or it is an error.
        """
        ...


class TokenSource:
    """Gives one client's token."""

    def __init__(
        self,
        credentials: ClientCredentials,
        scopes: tuple[str, ...],
        endpoint: "Endpoint",
        fetch: Fetch,
    ) -> None:
        self._credentials = credentials
        self._scopes = scopes
        self._endpoint = endpoint
        self._fetch = fetch
        self._token = ""
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
        client = self._credentials
        fields = {"grant_type": "client_credentials", **client.parameters}
        if self._scopes:
            fields["scope"] = " ".join(self._scopes)
        headers = {
            "Content-Type": "application/x-www-form-urlencoded",
            "Accept": "application/json",
        }
        if client.send_in == "body":
            fields |= {"client_id": client.client_id, "client_secret": client.client_secret}
        else:
            pair = f"{quote(client.client_id, safe='')}:{quote(client.client_secret, safe='')}"
            headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
        started = monotonic()
        answer = object_of(
            await self._fetch(
                "POST", await self._endpoint.url(), headers, urlencode(fields).encode()
            )
        )
        token = text_of(answer.get("access_token"))
        if not token:
            raise CallError(ErrorCode.ACCESS_DENIED, "The token endpoint gave no access token.")
        lifetime = _seconds(answer.get("expires_in"))
        self._token = token
        self._renew_at = started + lifetime - min(RENEW_BEFORE, lifetime / 10)
        return token


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
        credentials: ClientCredentials,
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
            CallError: `ACCESS_DENIED` if there is none, or only a document says so for a host that
                credentials may not go to.
        """
        if self._credentials.token_url is not None:
            return self._credentials.token_url
        if not self._found:
            url = urljoin(self._base, await self._declared())
            if not url or not self._is_trusted(url):
                raise CallError(
                    ErrorCode.ACCESS_DENIED,
                    "The document's token endpoint is on a host that credentials may not go to:"
                    " set token_url, or name the host in allowed_hosts.",
                )
            self._found = url
        return self._found

    async def _declared(self) -> str:
        if self._scheme.get("type") == "openIdConnect":
            discovery = urljoin(self._base, text_of(self._scheme.get("openIdConnectUrl")))
            found = await self._fetch("GET", discovery, {"Accept": "application/json"}, None)
            return text_of(object_of(found).get("token_endpoint"))
        flows = object_of(self._scheme.get("flows"))
        for flow in ("clientCredentials", *flows):
            url = text_of(object_of(flows.get(flow)).get("tokenUrl"))
            if url:
                return url
        return ""


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
        self, name: str, credentials: ClientCredentials, scheme: JSONObject, scopes: list[str]
    ) -> TokenSource:
        """The source of tokens for these scopes; the same one for the same client."""
        wanted = credentials.scopes or tuple(sorted(scopes))
        key = msgspec.json.encode([name, credentials.client_id, wanted])
        source = self._sources.get(key)
        if source is None:
            endpoint = Endpoint(credentials, scheme, self._base, self._is_trusted, self._fetch)
            source = self._sources[key] = TokenSource(credentials, wanted, endpoint, self._fetch)
        return source
