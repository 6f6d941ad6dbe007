"""As whom a request is made: the document's security schemes, and the operator's credentials for them.

Rule 1: credentials come from configuration or from the context, never from arguments.
Rule 2: a credential that cannot be had is a refusal, not a request without it.
"""

import base64
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast
from urllib.parse import quote, urlsplit

from operations._json import list_of, object_of, text_of
from operations._text import names_a_secret
from operations.caller_tokens import CallerToken
from operations.context import OperationContext
from operations.errors import CallError, ErrorCode
from operations.openapi.config import (
    BasicCredential,
    CallValue,
    HTTPAuth,
    HTTPServiceConfig,
    OAuthClient,
    PasswordCredentials,
    credential_of,
)
from operations.openapi.exchange.oauth import TokenSource, TokenSources
from operations.openapi.headers import enforce_header, header_key, name_key, written_names
from operations.types import JSONObject


@dataclass(slots=True)
class Signature:
    """What makes a request the operator's or the caller's."""

    headers: dict[str, str] = field(default_factory=dict[str, str])
    query: list[str] = field(default_factory=list[str])
    cookies: list[str] = field(default_factory=list[str])

    secrets: list[str] = field(default_factory=list[str])
    """To be kept out of errors."""

    tokens: list[TokenSource | CallerToken] = field(default_factory=list[TokenSource | CallerToken])
    """Where the tokens come from: they forget one that is refused."""


_COOKIE_NAME = "!#$%&'*+-.^_`|~[]()/:<>?@{}"
"""What may stand in a cookie's name as it is."""

NOTHING = Signature()
"""Of a request that nobody signs."""


class Security:
    """Signs the requests of one service.

    Args:
        schemes: The document's security schemes, as 3.x spells them.
        default: The document's own security requirement.
        config: The operator's credentials.
        sources: Where OAuth2 tokens come from.
    """

    def __init__(
        self, schemes: JSONObject, default: Any, config: HTTPServiceConfig, sources: TokenSources
    ) -> None:
        self._schemes = schemes
        self._default = default
        # A mapping has become one by now.
        self._auth = config.auth if isinstance(config.auth, HTTPAuth) else None
        self._credentials = {
            name: credential_of(given) for name, given in config.credentials.items()
        }
        self._headers = {
            **config.headers,
            **{name: partial(_of_call, value) for name, value in config.call_headers.items()},
        }
        self._base_query = urlsplit(config.base_url or "").query
        self._has_functions = any(callable(value) for value in self._headers.values())
        self._sources = sources
        self.is_empty = self._auth is None and not self._credentials and not self._headers

    def owned(self) -> frozenset[tuple[str, str]]:
        """Return the keys (see `name_key`) of everything that configuration sets and no argument may."""
        names = {name_key("header", name) for name in self._headers}
        names.update(written_names("query", [self._base_query] if self._base_query else []))
        for name, value in self._headers.items():
            if header_key(name) == "cookie" and not callable(value):
                names.update(written_names("cookie", [value]))
        if self._auth is not None:
            names.add(name_key("header", _auth_header(self._auth)))
        for scheme_name in self._credentials:
            scheme = object_of(self._schemes.get(scheme_name))
            if scheme.get("type") == "apiKey":
                names.add(name_key(text_of(scheme.get("in")), text_of(scheme.get("name"))))
        return frozenset(names)

    async def headers_of(self, context: OperationContext) -> Mapping[str, str]:
        """Return the configured headers of one call.

        Raises:
            CallError: `ACCESS_DENIED` if a function fails.
        """
        if not self._has_functions:
            return cast("Mapping[str, str]", self._headers)
        found = {name: await _secret(value, context) for name, value in self._headers.items()}
        return {name: str(value) for name, value in found.items() if value is not None}

    async def sign(
        self,
        requirement: Any,
        context: OperationContext,
        headers: Mapping[str, str] | None = None,
    ) -> Signature:
        """Return what to add to a request.

        Args:
            requirement: The operation's own security requirement; None for the document's.
            context: Of the call.
            headers: The configured headers of the call, if they are known already.

        Raises:
            CallError: `ACCESS_DENIED` if a credential cannot be obtained, and what a provider of tokens raises.
        """
        if headers is None:
            headers = await self.headers_of(context)
        signature = Signature()
        signature.headers.update(headers)
        for name, value in headers.items():
            if names_a_secret(name):
                signature.secrets += (value, value.partition(" ")[2])
        for name, scopes in self._chosen(requirement).items():
            scheme = object_of(self._schemes.get(name))
            await self._apply(
                signature, name, scheme, [text_of(s) for s in list_of(scopes)], context
            )
        if self._auth is not None:
            secret = _auth_secret(self._auth)
            token = await _secret(secret, context)
            if isinstance(secret, CallerToken) and secret.exchange is not None:
                signature.tokens.append(secret)
            if token is not None:
                _apply_auth(signature, self._auth, token)
        for name, value in signature.headers.items():
            enforce_header(name, value)
        return signature

    def _chosen(self, requirement: Any) -> JSONObject:
        """The first alternative whose schemes all have credentials; empty where none has."""
        alternatives = list_of(self._default if requirement is None else requirement)
        for alternative in alternatives:
            schemes = object_of(alternative)
            if schemes and all(name in self._credentials for name in schemes):
                return schemes
        return {}

    async def _apply(
        self,
        signature: Signature,
        name: str,
        scheme: JSONObject,
        scopes: list[str],
        context: OperationContext,
    ) -> None:
        credential: Any = self._credentials[name]
        if isinstance(credential, CallerToken) and credential.exchange is not None:
            signature.tokens.append(credential)
        if callable(credential):
            credential = credential_of(await _secret(credential, context))
            if credential is None:
                return
        kind = text_of(scheme.get("type"))
        if isinstance(credential, BasicCredential) and kind in {"oauth2", "openIdConnect"}:
            # There a login is a way to a token.
            credential = PasswordCredentials(
                username=credential.username, password=credential.password
            )
        if isinstance(credential, OAuthClient):
            source = self._sources.get(name, credential, scheme, scopes)
            token = await source.token()
            signature.tokens.append(source)
            _authorize(signature, "Bearer", token)
        elif kind == "apiKey" and not isinstance(credential, BasicCredential):
            _apply_key(signature, scheme, str(credential))
        else:
            _apply_http(signature, text_of(scheme.get("scheme")), credential)


def _of_call(value: CallValue, context: OperationContext) -> str | None:
    if value == "identity_id":
        return None if context.identity is None else context.identity.id
    return context.request_id if value == "request_id" else context.parent_request_id


def _apply_http(signature: Signature, word: str, credential: Any) -> None:
    """An Authorization header of the HTTP scheme `word`."""
    is_login = isinstance(credential, BasicCredential)
    if is_login and word.lower() not in {"", "basic", "bearer"}:
        # Basic would show the password that this scheme is there to hide.
        raise CallError(
            ErrorCode.ACCESS_DENIED,
            f"HTTP {word} cannot be made of a user name and a password here:"
            " give the credential itself, or a transport that signs in.",
        )
    if is_login or word.lower() == "basic":
        _authorize(signature, "Basic", _basic(credential))
    else:
        # Scheme names are the same in any case; bearer is the one servers expect capitalised.
        _authorize(signature, "Bearer" if word.lower() in {"", "bearer"} else word, str(credential))


def _authorize(signature: Signature, word: str, token: str) -> None:
    signature.headers["Authorization"] = f"{word} {token}"
    signature.secrets.append(token)


def _apply_key(signature: Signature, scheme: JSONObject, key: str) -> None:
    name = text_of(scheme.get("name"))
    signature.secrets += {key, quote(key, safe="")}
    match scheme.get("in"):
        case "query":
            signature.query.append(f"{quote(name, safe='')}={quote(key, safe='')}")
        case "cookie":
            signature.cookies.append(f"{quote(name, safe=_COOKIE_NAME)}={quote(key, safe='')}")
        case _:
            signature.headers[name] = key


def _apply_auth(signature: Signature, auth: HTTPAuth, token: str) -> None:
    if auth.type == "basic":
        token = _basic(token)
    if auth.type == "apiKey":
        value = f"{auth.prefix or ''}{token}"
    else:
        word = auth.type.capitalize() if auth.prefix is None else auth.prefix
        value = f"{word} {token}" if word else token
    signature.headers[_auth_header(auth)] = value
    signature.secrets.append(token)


def _auth_secret(auth: HTTPAuth) -> Any:
    if auth.username is not None:
        return f"{auth.username}:{auth.password or ''}"
    return auth.token


def _auth_header(auth: HTTPAuth) -> str:
    return auth.header_name or ("X-API-Key" if auth.type == "apiKey" else "Authorization")


def _basic(credential: Any) -> str:
    """`user:password` encoded; what has no colon is taken to be encoded already."""
    if isinstance(credential, BasicCredential):
        text = f"{credential.username}:{credential.password}"
    else:
        text = str(credential)
    return base64.b64encode(text.encode()).decode() if ":" in text else text


async def _secret(source: Any, context: OperationContext) -> Any:
    """A secret that is there, or that `source` finds for this caller.

    Raises:
        CallError: `ACCESS_DENIED` if finding it fails. Why is in the cause, not in the message.
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
