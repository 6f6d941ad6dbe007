"""Identify callers by JSON Web Tokens of an identity provider.

Rule 1: signature, issuer, audience and expiry are all checked.
Rule 2: keys are fetched only from the configured address, in a thread, by one fetch at a time, with a minimum pause
        between fetches even if many unknown key ids arrive.
Rule 3: only tokens with an unknown key wait for a fetch. Known keys stay in use, up to a maximum age.
"""

import asyncio
import logging
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from time import monotonic, time
from typing import Any, TypeAlias

from msgspec import structs
from starlette.requests import HTTPConnection

from operations.base.errors import MissingExtraError
from operations.base.files import read_small
from operations.base.json.values import is_list
from operations.base.logs import LogThrottle
from operations.base.text import printable, shortened, without_secrets
from operations.base.types import JSONObject
from operations.contract.access import Identity
from operations.front.config import JWTConfig
from operations.front.credentials import EXPIRED, CredentialError
from operations.front.request import RESOURCE
from operations.io.http.plain import ProxyFailureError, read_object
from operations.server.signin.identity import bearer_token
from operations.sources.credentials import hold_token

try:
    import jwt
except ModuleNotFoundError as error:
    raise MissingExtraError("operations.server.signin.tokens", extra="jwt") from error

logger = logging.getLogger("operations.server")

ASYMMETRIC = (
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA",
)  # fmt: skip
"""Algorithms with public keys. Algorithms with a shared secret must be configured."""

_PAUSE = 30.0
"""Seconds between two fetches of the keys."""

_MAX_AGE = 3600.0
"""Seconds after which the keys are fetched again, so that revoked keys are dropped."""

_STALE_AGE = 24 * 3600.0
"""Seconds for which known keys are used if fetching them again fails."""

_MAX_TOKEN = 16 * 1024

_SHOWN = 200
"""The largest number of characters of a received value in the log."""

_FETCH_SECONDS = 5.0

Part: TypeAlias = tuple[str, bool, str]
"""A part of a token: its name, whether it is accepted, and the reason."""

_ADVICE = {
    "ExpiredSignatureError": EXPIRED,
    "ImmatureSignatureError": "It is not valid yet: the clock of its issuer differs.",
}
"""Advice for clients, by the class of an error of PyJWT."""

_ORIGIN = re.compile(r"https?://[^/?#]+")


def default_identity(claims: JSONObject, *claim: str) -> Identity:
    """Return the identity `sub` with the scopes of a claim; by default of `scope`, `scp` or `permissions`."""
    scopes: set[str] = set()
    for name in claim or ("scope", "scp", "permissions"):
        held = claims.get(name, ())
        words: Any = held.split() if isinstance(held, str) else held
        scopes.update(str(word) for word in words)
    acting: list[str] = []
    actor: Any = claims.get("act")
    while actor is not None:
        # RFC 8693: the outermost actor is the current one, and acts for the actor nested in it.
        acting.insert(0, str(actor["sub"]))
        actor = actor.get("act")
    if not claims["sub"] or not all(acting):
        raise CredentialError("a token with an empty subject or actor")
    return Identity(str(claims["sub"]), scopes, acting=tuple(acting))


def _explained_time(name: str, claims: JSONObject, leeway: float) -> Part:
    """Return whether a time of a token permits its use now."""
    value: Any = claims.get(name)
    if type(value) not in {int, float} or not isfinite(value):
        return name, False, f"is not a time: {shortened(printable(repr(value)), _SHOWN)}"
    left: float = value - time()
    if name == "exp":
        return (
            name,
            left > -leeway,
            f"ends in {left:.0f} s" if left > 0 else f"ended {-left:.0f} s ago",
        )
    return (
        name,
        left <= leeway,
        f"begins in {left:.0f} s" if left > 0 else f"began {-left:.0f} s ago",
    )


def _accepted_audiences(configured: str | Collection[str]) -> Iterator[str]:
    """Yield the configured audiences, and each address without a path both with and without a final `/`.

    Both forms name the same resource, and clients differ in the form that they request a token for.
    """
    for name in (configured,) if isinstance(configured, str) else configured:
        yield name
        origin = name.removesuffix("/")
        if _ORIGIN.fullmatch(origin):
            yield origin if name != origin else f"{origin}/"


@dataclass(frozen=True, kw_only=True, eq=False)
class JWTs(JWTConfig):
    """Resolves `Authorization: Bearer TOKEN` with a JSON Web Token. Takes the fields of `JWTConfig`.

    Raises:
        ValueError: As `JWTConfig`.
        OSError: If `public_key` is a path that cannot be read.
    """

    _keys: "_Published | None" = field(init=False, repr=False)
    _key: Any = field(init=False, repr=False)
    _audiences: list[str] = field(init=False, repr=False)
    _mismatches: dict[str, LogThrottle] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Prepare the keys."""
        super().__post_init__()
        source, key = self.jwks_url or self.jwks, self.public_key or self.secret
        object.__setattr__(self, "_keys", None if source is None else _Published(source))
        object.__setattr__(self, "_audiences", list(_accepted_audiences(self.audience)))
        object.__setattr__(self, "_mismatches", {"iss": LogThrottle(), "aud": LogThrottle()})
        object.__setattr__(self, "_key", read_small(key).decode() if isinstance(key, Path) else key)

    async def __call__(self, connection: HTTPConnection) -> Identity | None:
        """Return the identity for the token of a request; None if it has no token.

        Raises:
            CredentialError: If the token is not valid.
        """
        token = bearer_token(connection)
        return await self.verify(token, connection.scope.get(RESOURCE, "")) if token else None

    async def verify(self, token: str, resource: str = "") -> Identity:
        """Return the identity for a token.

        Args:
            token: The token.
            resource: The address that was asked, which is an accepted audience if it is below a configured one: MCP
                clients request tokens for the address of the endpoint, `.../mcp`.

        Raises:
            CredentialError: If the token is not valid.
        """
        if len(token) > _MAX_TOKEN:
            raise CredentialError("a token that is too long")
        try:
            return await self._verified(token, self._audiences_at(resource))
        except CredentialError:
            for name, words in self.mismatches(token, resource).items():
                # The token may be forged, so callers control how often this happens.
                logger.log(self._mismatches[name].level(), "a token was rejected: %s", words)
            raise

    def mismatches(self, token: str, resource: str = "") -> dict[str, str]:
        """Return which of `iss` and `aud` of a token, which is not verified, differ from the expected values."""
        try:
            claims = jwt.decode(token, options={"verify_signature": False})
        except jwt.PyJWTError:
            return {}
        found: dict[str, str] = {}
        for name, accepted in (("iss", [self.issuer]), ("aud", self._audiences_at(resource))):
            received: Any = claims.get(name)
            values: list[Any] = received if is_list(received) else [received]
            if not any(value in accepted for value in values):
                shown = shortened(printable(repr(received)), _SHOWN)
                found[name] = f"its {name} is {shown}, expected {' or '.join(map(repr, accepted))}"
        return found

    async def explain(self, token: str, resource: str = "") -> list[Part]:
        """Return the parts of a token and the verdict on the whole, for people."""
        try:
            header = jwt.get_unverified_header(token)
            claims = jwt.decode(token, options={"verify_signature": False})
        except jwt.PyJWTError:
            return [("token", False, "is neither a known key nor a JSON Web Token")]
        wrong = self.mismatches(token, resource)
        algorithm = header.get("alg")
        parts = [
            (
                "alg",
                algorithm in self._algorithms,
                f"{algorithm}, key {header.get('kid', 'without id')}",
            ),
            *(
                (name, name not in wrong, wrong.get(name, str(claims.get(name))))
                for name in ("iss", "aud")
            ),
            ("sub", bool(claims.get("sub")), str(claims.get("sub", "is missing"))),
            _explained_time("exp", claims, self.leeway),
        ]
        if "nbf" in claims:
            parts.append(_explained_time("nbf", claims, self.leeway))
        try:
            identity = await self._verified(token, self._audiences_at(resource))
        except (CredentialError, OSError) as error:
            advice = error.advice if isinstance(error, CredentialError) else ""
            return [*parts, ("token", False, f"is rejected: {error}. {advice}".strip())]
        scopes = ", ".join(sorted(identity.scopes)) or "none"
        return [*parts, ("token", True, f"is accepted: {identity.id}, scopes {scopes}")]

    @property
    def _algorithms(self) -> list[str]:
        return list(self.algorithms or (("HS256",) if self.secret else ASYMMETRIC))

    def _audiences_at(self, resource: str) -> list[str]:
        above = (name.removesuffix("/") + "/" for name in self._audiences)
        is_ours = resource and any(resource.startswith(name) for name in above)
        return [*self._audiences, resource] if is_ours else self._audiences

    async def _verified(self, token: str, audiences: list[str]) -> Identity:
        try:
            key = self._key
            if self._keys is not None:
                key = await self._keys.key(jwt.get_unverified_header(token).get("kid"))
            claims = jwt.decode(
                token,
                key,
                algorithms=self._algorithms,
                issuer=self.issuer,
                audience=audiences,
                leeway=self.leeway,
                options={"require": ["exp", "iss", "aud", "sub"]},
            )
        except jwt.PyJWTError as problem:
            # Name only the class, because the text could contain parts of the token.
            name = type(problem).__name__
            # Times are checked after the signature.
            raise CredentialError(
                f"an invalid token: {name}", advice=_ADVICE.get(name, "")
            ) from None
        names = (self.scope_claim,) if self.scope_claim else ()
        identity = self.identity(claims) if self.identity else default_identity(claims, *names)
        if identity.issuer is None:
            identity = structs.replace(identity, issuer=self.issuer)
        if identity.expires_at is None:
            identity = structs.replace(identity, expires_at=(claims["exp"] + self.leeway) * 1000)
        return hold_token(identity, token)

    def share_keys(self, new: "JWTs") -> None:
        """Let `new` use the keys fetched from the same address, so that a reload needs no fetch."""
        keys, own = new.published, self._keys
        if keys and own and self.jwks_url is not None and self.jwks_url == new.jwks_url:
            keys.fetched = own.fetched

    @property
    def published(self) -> "_Published | None":
        """The keys of `jwks_url` or `jwks`."""
        return self._keys


class _Fetched:
    """The keys that were fetched last, and the state of fetching them."""

    def __init__(self) -> None:
        self.keys: dict[str | None, Any] = {}
        self.at = self.tried_at = float("-inf")
        self.task: asyncio.Task[None] | None = None
        self.is_unreachable = False


class _Published:
    """The keys of a JWKS, configured or fetched.

    Attributes:
        fetched: The present keys, which several objects for one address may share.
    """

    def __init__(self, source: str | Mapping[str, Any]) -> None:
        self._address = source if isinstance(source, str) else None
        self.fetched = _Fetched()
        if not isinstance(source, str):
            self._take(dict(source))

    async def key(self, key_id: str | None) -> Any:
        """Return the key with an id.

        Raises:
            CredentialError: If the issuer does not publish it.
            OSError: If the key is unknown or too old, and the keys could not be fetched.
        """
        found = self._find(key_id)
        if self._address is not None:
            age = monotonic() - self.fetched.at
            if found is None or age > _MAX_AGE:
                fetching = self._refresh(self._address)
                if (found is None or age > _STALE_AGE) and fetching is not None:
                    # Shielded: a cancelled request must not cancel the fetch that other requests wait for.
                    await asyncio.shield(fetching)
                    found = self._find(key_id)
        is_stale = monotonic() - self.fetched.at > _STALE_AGE
        if self.fetched.is_unreachable and (found is None or is_stale):
            raise ConnectionError("the keys of the issuer could not be fetched")
        if found is None:
            raise CredentialError("a token signed with a key that its issuer does not publish")
        return found

    def _find(self, key_id: str | None) -> Any:
        found = self.fetched.keys.get(key_id)
        if found is None and key_id is None and len(self.fetched.keys) == 1:
            (found,) = self.fetched.keys.values()
        return found

    def _refresh(self, address: str) -> "asyncio.Task[None] | None":
        """Return the running fetch; start one if the last one was long enough ago."""
        if self.fetched.task is None and monotonic() - self.fetched.tried_at > _PAUSE:
            self.fetched.tried_at = monotonic()
            self.fetched.task = asyncio.Task(self._fetch(address))
        return self.fetched.task

    async def _fetch(self, address: str) -> None:
        try:
            headers = {"Accept": "application/json"}
            self._take(await asyncio.to_thread(read_object, address, _FETCH_SECONDS, headers))
        except Exception as error:  # noqa: BLE001 - whatever the issuer sent is not an error of the token
            shown = without_secrets(address)
            reason = error if isinstance(error, ProxyFailureError) else repr(error)
            logger.warning("cannot fetch the keys of an issuer at %s: %s", shown, reason)
            self.fetched.is_unreachable = True
        else:
            self.fetched.is_unreachable = False
            self.fetched.at = monotonic()
        finally:
            self.fetched.task = None

    def _take(self, jwks: JSONObject) -> None:
        self.fetched.keys = {
            key.key_id: key
            for key in jwt.PyJWKSet.from_dict(jwks).keys
            if key.public_key_use in (None, "sig")
        }
