"""Check the credentials of requests, and end what a credential has opened when it expires or loses access."""

import asyncio
import inspect
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Generator, Hashable, Iterable, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from time import monotonic
from typing import Any, Final, TypeAlias, cast

from operations.authority.grants import has_expired
from operations.base.concurrency import ConcurrencyLimiter
from operations.base.errors import CallError, ErrorCode, ExpiredError, OperationsError
from operations.base.logs import LogThrottle
from operations.base.rates import REMEMBERED, RateLimiter
from operations.base.text import printable
from operations.contract.access import Identity, with_check
from operations.front.limits import Limits, site_prefix

logger = logging.getLogger("operations")

RECHECK_SECONDS: Final = 3.0
"""Seconds between two checks of the credential of an open session, stream or socket. Revocation takes effect within 5
s."""

_CHECK_SECONDS = 5.0
"""Seconds after which a check of such a credential counts as failed."""

DELAY_SECONDS: Final = 1.0
"""Seconds by which the response to a wrong credential is delayed after too many failed attempts from its address."""

_NETWORKS: Final = 4
"""The networks of an IPv6 site (/48) that may send as many wrong credentials as the limit for one address allows."""

_MAX_DELAYED: Final = 1000
"""The largest number of delayed responses; further responses are sent at once."""

_CREDENTIAL_HEADERS: Final = frozenset({b"authorization", b"x-api-key"})


EXPIRED: Final = "It has expired. Get a new one; if it is new, the clock of its issuer differs."
"""Advice for a client with an expired credential."""


class CredentialError(OperationsError):
    """A credential is not valid. The text is for logs and never contains the credential.

    Attributes:
        headers: Headers of the response.
        advice: Advice for the client, sent with the response.
    """

    def __init__(
        self, message: str, headers: Iterable[tuple[bytes, bytes]] = (), *, advice: str = ""
    ) -> None:
        super().__init__(message)
        self.headers = tuple(headers)
        self.advice = advice


class InvalidCredentialError(Exception):
    """A credential is wrong.

    Attributes:
        reason: The exception of the resolver, for logs.
        headers: Headers of the response.
        advice: Advice for the client.
    """

    def __init__(self, reason: Exception) -> None:
        super().__init__(str(reason))
        self.reason = reason
        known = reason if isinstance(reason, CredentialError) else CredentialError("")
        self.headers = known.headers
        self.advice = EXPIRED if isinstance(reason, ExpiredError) else known.advice


class AuthThrottle:
    """Checks credentials, and slows down addresses that guess them.

    Repeating the same wrong credential is not counted again, so that a client with an old key does not affect others.

    Args:
        limits: The limits on wrong credentials per address and on concurrent checks.
    """

    def __init__(self, limits: Limits) -> None:
        self._checking = ConcurrencyLimiter("credentials being checked")
        self._failures, self._of_sites = RateLimiter(), RateLimiter()
        self.configure(limits)
        self._delayed = 0
        self.rejected = 0
        """The number of requests with a wrong credential."""
        self.unchecked = LogThrottle()
        """For warnings that credentials cannot be checked."""
        # Keyed hashes with a key of this process: no credential is stored.
        self._valid: OrderedDict[int, None] = OrderedDict()
        self._wrong: OrderedDict[int, None] = OrderedDict()

    def configure(self, limits: Limits) -> None:
        """Change the limits."""
        self._checking.configure(limits.calls, limits.calls_per_caller)
        rate, burst = limits.failed_attempts_per_second, limits.failed_attempts
        self._failures.configure(rate, burst)
        self._of_sites.configure(None if rate is None else rate * _NETWORKS, burst * _NETWORKS)

    async def authenticate(
        self, address: str, credential: tuple[Hashable, ...], resolve: Callable[[], Any]
    ) -> Identity | None:
        """Return the identity for a credential. The caller sets a timeout.

        Args:
            address: The address of the client.
            credential: The credential; an empty tuple for no credential.
            resolve: Returns the identity, or an awaitable of it; raises an error if the credential is wrong.

        Raises:
            InvalidCredentialError: If the credential is wrong.
            CallError: The error of the resolver, if it is one; `UNAVAILABLE` if the credential could not be checked;
                `RESOURCE_EXHAUSTED` if it is wrong and the address has sent too many wrong ones, or if too many are
                being checked.
        """
        mark = hash((address, credential)) if credential else None
        # A credential that was valid before is not slowed down by an attacker at the same address.
        place = f"valid:{mark}" if mark in self._valid else address
        problem: Exception | None = None
        identity: Identity | None = None
        with self._checking.enter(place):
            try:
                identity = await resolved(resolve())
            except Exception as error:
                if _is_outage(error):
                    logger.log(self.unchecked.level(), "a credential was not checked: %s", error)
                    if isinstance(error, CallError):
                        raise
                    message = "The credential could not be checked. Try again later."
                    raise CallError(ErrorCode.UNAVAILABLE, message) from error
                problem = error
        if problem is None:
            if mark is not None:
                _remember(self._valid, mark)
            return identity
        self.rejected += 1
        if mark is not None:
            self._valid.pop(mark, None)
            await self._punish(address, mark)
        if isinstance(problem, CallError):
            raise problem
        raise InvalidCredentialError(problem) from problem

    async def _punish(self, address: str, mark: int) -> None:
        """Count a wrong credential.

        Raises:
            CallError: `RESOURCE_EXHAUSTED`, after a delay, if the address has sent too many.
        """
        if mark in self._wrong:
            self._wrong.move_to_end(mark)
            return
        # Both are charged. One customer may have 65,536 networks, each with its own address here.
        site = site_prefix(address)
        is_of_site = site is None or self._of_sites.charge(site)
        if self._failures.charge(address) and is_of_site:
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
"""Returns the identity for a token, or None."""


async def identify_credential(
    credential: str, resolve: CredentialResolver | None, throttle: AuthThrottle, address: str
) -> Identity:
    """Return the identity for a credential inside a message.

    Raises:
        CallError: `ACCESS_DENIED` if the credential is wrong; `UNAVAILABLE` if it could not be checked;
            `RESOURCE_EXHAUSTED` if a limit is exceeded.
    """
    if resolve is None:
        message = "rejected a credential: pass serve_calls(resolve=...) to check it"
        logger.log(throttle.unchecked.level(), message)
        raise CallError(ErrorCode.ACCESS_DENIED, "The credential is not valid")

    async def find() -> Identity:
        identity = await resolved(resolve(credential))
        if identity is None:
            raise CredentialError("an unknown credential")
        return identity

    try:
        identity = cast("Identity", await throttle.authenticate(address, (credential,), find))
    except InvalidCredentialError as error:
        if isinstance(error.reason, OperationsError):
            logger.info("rejected a credential: %s", error)
        else:
            logger.exception("the check of a credential failed", exc_info=error.reason)
        advice = f". {error.advice}" if error.advice else ""
        message = f"The credential is not valid{advice}"
        raise CallError(ErrorCode.ACCESS_DENIED, message) from None
    if identity.grant is None:
        checked = Credential(identity, lambda: resolve(credential), (credential,))
        return with_check(identity, checked.is_valid)
    return identity


def _remember(marks: "OrderedDict[int, None]", mark: int) -> None:
    marks[mark] = None
    marks.move_to_end(mark)
    if len(marks) > REMEMBERED:
        marks.popitem(last=False)


async def resolved(found: Any) -> Identity | None:
    """Return the identity from a resolver, awaited if necessary.

    Raises:
        Exception: Any error of the resolver, or if it returns another type or an expired identity.
    """
    identity = await found if inspect.isawaitable(found) else found
    if identity is None:
        return None
    if not isinstance(identity, Identity):
        raise TypeError(f"a resolver returned {type(identity).__name__} instead of an Identity")
    if not identity.id:
        raise CredentialError("a caller with an empty id")
    if has_expired(identity):
        raise CredentialError("a credential that has expired", advice=EXPIRED)
    return identity


def _is_outage(error: BaseException) -> bool:
    """Return whether an error means that a credential could not be checked, so that it is neither valid nor wrong.

    A resolver may raise `PermissionError` to reject a credential. If a key file was removed, all keys are rejected.
    """
    if isinstance(error, CallError):
        return error.code == ErrorCode.UNAVAILABLE
    is_rejection = isinstance(error, (PermissionError, FileNotFoundError))
    return isinstance(error, OSError) and not is_rejection


class Credential:
    """A valid credential of an open session, stream or socket, with a function to check it again.

    Args:
        identity: The identity.
        check: Returns the current identity for the credential, or an awaitable of it; raises if there is none.
        key: Equal for equal credentials.
    """

    __slots__ = ("_check", "_checked_at", "identity", "key")

    def __init__(self, identity: Identity, check: Callable[[], Any], key: Hashable) -> None:
        self.identity = identity
        self.key = key
        self._check = check
        self._checked_at = monotonic()

    async def is_valid(self) -> bool:
        """Return whether the credential still has the same access; check it if the last check was some seconds ago."""
        if has_expired(self.identity):
            return False
        if monotonic() - self._checked_at < RECHECK_SECONDS:
            return True
        try:
            async with asyncio.timeout(_CHECK_SECONDS):
                identity = await resolved(self._check())
            is_same = has_access_of(self.identity, identity)
        except (Exception, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # The store of grants may contain a revocation.
            has_store = self.identity.grant is not None or isinstance(error, CallError)
            if _is_outage(error) and not has_store:
                return True
            logger.info(
                "a credential of %s is no longer valid: %s", printable(self.identity.id), error
            )
            return False
        if is_same:
            self._checked_at = monotonic()
        return is_same


def has_access_of(before: Identity, now: Identity | None) -> bool:
    """Return whether an identity is the same caller, and has lost none of its access."""
    if now is None:
        return False
    held = now.resources or {}
    return (
        before.key == now.key
        and frozenset(before.scopes) <= frozenset(now.scopes)
        and all(
            set(actions) <= set(held.get(resource, ()))
            for resource, actions in (before.resources or {}).items()
        )
    )


def credential_ended() -> CallError:
    """Return the error for a stream whose credential expired or was revoked."""
    return CallError(ErrorCode.ACCESS_DENIED, "The credential is no longer valid")


@contextmanager
def ended_by(
    watch: Callable[[Callable[[], None]], AbstractContextManager[None]],
) -> Generator[asyncio.Event]:
    """End the block by cancellation when the function that `watch` receives is called; the event is set then."""
    task: asyncio.Task[Any] = asyncio.current_task()  # type: ignore[assignment]
    ended = asyncio.Event()

    def end() -> None:
        ended.set()
        task.cancel()

    try:
        with watch(end):
            yield ended
    except asyncio.CancelledError:
        if not ended.is_set() or task.uncancel():
            raise


_Ends: TypeAlias = dict[object, Callable[[], None]]
"""The functions that end what a credential has opened."""


class CredentialMonitor:
    """Ends sessions, streams and sockets when their credentials expire or are revoked.

    One task checks each distinct credential and identity, so that a check that takes long does not delay the others.

    Attributes:
        admits_anonymous: Whether sessions, streams and sockets may be opened without a credential.
    """

    def __init__(self, *, admits_anonymous: bool = True) -> None:
        self.admits_anonymous = admits_anonymous
        self._open: dict[Hashable, tuple[_Ends, asyncio.Task[None]]] = {}
        self._anonymous: _Ends = {}

    @contextmanager
    def watching(self, credential: Credential | None, end: Callable[[], None]) -> Generator[None]:
        """Call `end` if the credential becomes invalid before the block ends."""
        stop = self.watch(credential, end)
        try:
            yield
        finally:
            stop()

    def ending(self, credential: Credential | None) -> AbstractContextManager[asyncio.Event]:
        """End the block by cancellation if the credential becomes invalid; the yielded event is set then."""
        return ended_by(lambda end: self.watching(credential, end))

    def watch(self, credential: Credential | None, end: Callable[[], None]) -> Callable[[], object]:
        """Call `end` when the credential becomes invalid; return a function that stops the checks.

        Without a credential, `end` is called when every caller needs one.
        """
        token = object()
        if credential is None:
            self._anonymous[token] = end
            if not self.admits_anonymous:
                # Its request arrived before every caller needed one.
                asyncio.get_running_loop().call_soon(self._end_anonymous, token)
            return partial(self._anonymous.pop, token, None)
        # With the identity, because the same credential may have had more access later.
        key = (credential.key, credential.identity)
        entry = self._open.get(key)
        if entry is None:
            ends = _Ends()
            entry = self._open[key] = (ends, asyncio.Task(self._run(key, credential, ends)))
        ends, task = entry
        ends[token] = end

        def stop() -> None:
            ends.pop(token, None)
            if not ends and self._open.get(key) is entry:
                del self._open[key]
                task.cancel()

        return stop

    def watch_message(
        self,
        credential: str | None,
        identity: Identity | None,
        resolve: CredentialResolver | None,
        end: Callable[[], None],
    ) -> Callable[[], object]:
        """Watch the credential inside a message, as `watch` does."""
        if identity is None:
            return self.watch(None, end)
        if credential is None or resolve is None:
            return _do_nothing
        if identity.grant is not None and identity.grant.origin is not None:
            # A hub minted it to start this call, watches the caller's own credential, and ends the call.
            return _do_nothing
        return self.watch(Credential(identity, lambda: resolve(credential), (credential,)), end)

    async def _run(self, key: Hashable, credential: Credential, ends: _Ends) -> None:
        while await credential.is_valid():  # noqa: ASYNC110 - no event announces its end
            await asyncio.sleep(RECHECK_SECONDS / 3)
        del self._open[key]
        for end in list(ends.values()):
            end()

    def admit_anonymous(self, is_admitted: bool) -> None:
        """Admit callers without a credential, or reject them and end what they have opened."""
        self.admits_anonymous = is_admitted
        for token in () if is_admitted else tuple(self._anonymous):
            self._end_anonymous(token)

    def _end_anonymous(self, token: object) -> None:
        self._anonymous.pop(token, _do_nothing)()


def _do_nothing() -> None:
    """Do nothing: no credential is watched."""


def credentials_in(headers: Iterable[tuple[bytes, bytes]]) -> tuple[bytes, ...]:
    """Return all credentials of a request, because it is unknown which one a resolver uses."""
    return tuple(value for name, value in headers if name in _CREDENTIAL_HEADERS)


Resolve = Callable[[MutableMapping[str, Any]], "Identity | Awaitable[Identity | None] | None"]
"""Returns the identity of an ASGI scope, or None if it has no known credential; an exception rejects the request."""
