"""Find out who sends a request, and notice when a credential stops being valid: the same for all entry points.

Rule 1: every credential is checked. An address that showed too many wrong ones gets slower, later answers to further
        wrong ones; a valid credential is never rejected because of the failed attempts of others.
Rule 2: fail closed: an exception while checking a credential rejects the request.
Rule 3: sessions, streams and sockets that a credential opened end when it expires or is revoked.
"""

import asyncio
import inspect
import logging
from collections import OrderedDict
from collections.abc import (
    Awaitable,
    Callable,
    Generator,
    Hashable,
    Iterable,
    Mapping,
    MutableMapping,
)
from contextlib import contextmanager
from functools import lru_cache
from ipaddress import IPv6Address, ip_address
from time import monotonic, time
from typing import Any, Final, TypeAlias

from operations.access import Identity
from operations.errors import CallError, ErrorCode, OperationsError
from operations.front.limits import REMEMBERED, ConcurrencyLimiter, Limits, RateLimiter

logger = logging.getLogger("operations")

RECHECK_SECONDS: Final = 3.0
"""Time between two checks of a credential that holds something open. Revocation takes effect within 5 s."""

DELAY_SECONDS: Final = 1.0
"""Delay of the response to a wrong credential from an address with too many failed attempts."""

_MAX_DELAYED: Final = 1000
"""Responses that are delayed at a time; beyond that they are sent at once."""

_CREDENTIAL_HEADERS: Final = frozenset({b"authorization", b"x-api-key"})


class CredentialError(OperationsError):
    """A credential was shown and is not valid. The text is for logs and never contains the credential.

    Attributes:
        headers: Sent with the response.
        advice: Advice for the client, sent with the response.
    """

    def __init__(
        self, message: str, headers: Iterable[tuple[bytes, bytes]] = (), *, advice: str = ""
    ) -> None:
        super().__init__(message)
        self.headers = tuple(headers)
        self.advice = advice


class InvalidCredentialError(Exception):
    """A credential is wrong, or could not be checked.

    Attributes:
        reason: The exception of the resolver, for logs.
    """

    def __init__(self, reason: Exception) -> None:
        super().__init__(str(reason))
        self.reason = reason


class AuthThrottle:
    """Checks credentials, and slows down addresses that guess them.

    A wrong credential that an address showed before is not counted again: a client with an old key harms no other.

    Args:
        limits: How many wrong credentials an address may show, and how many checks run at a time.
    """

    def __init__(self, limits: Limits) -> None:
        self._checking = ConcurrencyLimiter(
            limits.calls, limits.calls_per_caller, "credentials being checked"
        )
        self._failures = RateLimiter(limits.failed_attempts_per_second, limits.failed_attempts)
        self._delayed = 0
        # Hashes with this process's own key: no credential is kept.
        self._valid: OrderedDict[int, None] = OrderedDict()
        self._wrong: OrderedDict[int, None] = OrderedDict()

    def configure(self, limits: Limits) -> None:
        """Change the limits."""
        self._checking.configure(limits.calls, limits.calls_per_caller)
        self._failures.configure(limits.failed_attempts_per_second, limits.failed_attempts)

    async def authenticate(
        self,
        address: str,
        credential: tuple[Hashable, ...],
        resolve: Callable[[], Any],
        *,
        none_is_wrong: bool = False,
    ) -> Identity | None:
        """Return the identity that a credential belongs to. The caller sets a timeout.

        Args:
            address: Of the client.
            credential: The credential; an empty tuple is none.
            resolve: Returns the identity, or an awaitable of it.
            none_is_wrong: Whether None means that the credential is wrong, not that it is of an unknown kind.

        Raises:
            InvalidCredentialError: If the credential is wrong or could not be checked.
            CallError: `RESOURCE_EXHAUSTED` if it is wrong and the address showed too many wrong ones, or if too many
                are being checked.
        """
        mark = hash((address, credential)) if credential else None
        # A credential that was valid before does not compete with an attacker at the same address.
        place = f"valid:{mark}" if mark in self._valid else address
        with self._checking.enter(place):
            try:
                identity = await resolved(resolve())
            except Exception as error:
                if _is_outage(error):
                    raise InvalidCredentialError(error) from error
                problem: Exception | None = error
                identity = None
            else:
                is_wrong = none_is_wrong and identity is None
                problem = CredentialError("an unknown credential") if is_wrong else None
        if problem is None:
            if mark is not None:
                _remember(self._valid, mark)
            return identity
        if mark is not None:
            self._valid.pop(mark, None)
            await self._punish(address, mark)
        raise InvalidCredentialError(problem) from problem

    async def _punish(self, address: str, mark: int) -> None:
        """Count a wrong credential.

        Raises:
            CallError: `RESOURCE_EXHAUSTED`, after a delay, if there were too many from there.
        """
        if mark in self._wrong:
            self._wrong.move_to_end(mark)
            return
        if self._failures.charge(address):
            _remember(self._wrong, mark)
            return
        if self._delayed < _MAX_DELAYED:
            self._delayed += 1
            try:
                await asyncio.sleep(DELAY_SECONDS)
            finally:
                self._delayed -= 1
        raise CallError(
            ErrorCode.RESOURCE_EXHAUSTED,
            "Too many wrong credentials from your address: try again later",
            retryable=True,
        )


CredentialResolver: TypeAlias = Callable[[str], Identity | Awaitable[Identity | None] | None]
"""Returns the identity that a token belongs to, or None."""


async def identify_credential(
    credential: str, resolve: CredentialResolver | None, throttle: AuthThrottle, address: str
) -> Identity:
    """Return the identity behind a credential inside a message.

    Raises:
        CallError: `ACCESS_DENIED` if it is wrong or could not be checked; `RESOURCE_EXHAUSTED` beyond a limit.
    """
    if resolve is None:
        logger.warning("rejected a credential: pass serve_calls(resolve=...) to check it")
    else:
        try:
            identity = await throttle.authenticate(
                address, (credential,), lambda: resolve(credential), none_is_wrong=True
            )
            if identity is not None:
                return identity
        except InvalidCredentialError as error:
            if isinstance(error.reason, CallError):
                raise error.reason from None
            reason = error.reason
            if isinstance(reason, OperationsError):
                logger.info("rejected a credential: %s", reason)
            else:
                logger.exception("a credential could not be checked", exc_info=reason)
    raise CallError(ErrorCode.ACCESS_DENIED, "The credential is not valid")


def _remember(marks: "OrderedDict[int, None]", mark: int) -> None:
    marks[mark] = None
    marks.move_to_end(mark)
    if len(marks) > REMEMBERED:
        marks.popitem(last=False)


async def resolved(found: Any) -> Identity | None:
    """Return the identity from a resolver, awaited if necessary.

    Raises:
        Exception: Any error of the resolver; also if it returned another type or an expired identity.
    """
    identity = await found if inspect.isawaitable(found) else found
    if identity is None:
        return None
    if not isinstance(identity, Identity):
        raise TypeError(f"a resolver returned {type(identity).__name__} instead of an Identity")
    if has_expired(identity):
        raise CredentialError("a credential that has expired")
    return identity


def _is_outage(error: Exception) -> bool:
    """Return whether a credential could not be checked, which neither confirms nor rejects it.

    A resolver may reject with `PermissionError`; a file of keys that was removed rejects all of them.
    """
    if isinstance(error, CallError):
        return error.code == ErrorCode.UNAVAILABLE
    is_rejection = isinstance(error, (PermissionError, FileNotFoundError))
    return isinstance(error, OSError) and not is_rejection


def has_expired(identity: Identity) -> bool:
    """Return whether an identity's credential has expired."""
    return identity.expires_at is not None and identity.expires_at <= time() * 1000


class Credential:
    """A valid credential that holds something open, and how to check it again.

    Args:
        identity: Its owner.
        check: Returns the identity that it belongs to now, or an awaitable of it; raises if there is none.
        key: Equal for equal credentials.
    """

    __slots__ = ("_check", "_checked_at", "identity", "key")

    def __init__(self, identity: Identity, check: Callable[[], Any], key: Hashable) -> None:
        self.identity = identity
        self.key = key
        self._check = check
        self._checked_at = monotonic()

    async def is_valid(self) -> bool:
        """Return whether the credential is still valid; it is checked again if the last check is some time ago."""
        if has_expired(self.identity):
            return False
        if monotonic() - self._checked_at < RECHECK_SECONDS:
            return True
        try:
            identity = await resolved(self._check())
        except Exception as error:  # noqa: BLE001 - fail closed
            # A revocation may be in a store of grants that does not work.
            if _is_outage(error) and not isinstance(error, CallError):
                return True
            logger.info("a credential of %s is no longer valid: %s", self.identity.id, error)
            return False
        if identity is None or identity.key != self.identity.key:
            return False
        self._checked_at = monotonic()
        return True


class CredentialMonitor:
    """Ends what credentials hold open when they expire or are revoked.

    One task checks all of them, each different credential once per interval, while anything is open.
    """

    def __init__(self) -> None:
        self._open: dict[Hashable, tuple[Credential, dict[object, Callable[[], None]]]] = {}
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def watching(self, credential: Credential | None, end: Callable[[], None]) -> Generator[None]:
        """Call `end` if the credential stops being valid before the block ends."""
        stop = self.watch(credential, end)
        try:
            yield
        finally:
            stop()

    def watch(self, credential: Credential | None, end: Callable[[], None]) -> Callable[[], None]:
        """Call `end` when the credential stops being valid; return a function that ends the watch."""
        if credential is None:
            return _do_nothing
        token, key = object(), credential.key
        _, ends = self._open.setdefault(key, (credential, {}))
        ends[token] = end
        if self._task is None:
            self._task = asyncio.create_task(self._run())

        def stop() -> None:
            ends.pop(token, None)
            if not ends and self._open.get(key, (None, None))[1] is ends:
                del self._open[key]
            if not self._open:
                self._stop()

        return stop

    def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(RECHECK_SECONDS / 3)
            for key, (credential, ends) in list(self._open.items()):
                if not await credential.is_valid():
                    self._open.pop(key, None)
                    for end in list(ends.values()):
                        end()


def _do_nothing() -> None:
    """Stop watching nothing."""


def credentials_in(headers: Iterable[tuple[bytes, bytes]]) -> tuple[bytes, ...]:
    """Return all credentials of a request: which one a resolver uses is not known."""
    return tuple(value for name, value in headers if name in _CREDENTIAL_HEADERS)


def caller_key(identity: Identity | None, address: str) -> str:
    """Return the key by which limits count a caller: its identity, or its address."""
    return f"id:{identity.key}" if identity is not None else f"at:{address}"


def client_address(scope: Mapping[str, Any]) -> str:
    """Return the client address of an ASGI scope as limits count it: an IPv6 network of 64 bits is one address."""
    client = scope.get("client")
    host = str(client[0]) if client else ""
    return address_prefix(host) if ":" in host else host


@lru_cache(maxsize=1024)
def address_prefix(host: str) -> str:
    """Return the /64 network of an IPv6 address, and anything else unchanged."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if not isinstance(address, IPv6Address):
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(IPv6Address(int(address) >> 64 << 64))


Resolve = Callable[[MutableMapping[str, Any]], "Identity | Awaitable[Identity | None] | None"]
"""Returns the identity behind an ASGI scope, or None if it carries no known credential; an exception rejects."""
