"""Finding out who asks, within bounds: every door does it here.

Rule 1: an address has so many places for it, and so many different wrong credentials. Beyond them it is refused, and
        nobody is asked.
Rule 2: only what was wrong counts as wrong. What is not judged yet, or could not be, is bounded on its own.
Rule 3: whatever goes wrong while finding out is a refusal.
"""

import inspect
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from functools import lru_cache
from ipaddress import IPv6Address, ip_address
from typing import Any, Final

from operations._rates import AT_A_TIME, AT_A_TIME_PER_CALLER, REMEMBERED, Gate, Rate
from operations.access import Identity

GUESSES: Final = 20
GUESSES_PER_SECOND: Final = 0.2

_UNJUDGED_PER_GUESS: Final = 10
"""Credentials that may be unjudged for each one that may be wrong: most callers have the right one."""

_TOO_MANY = "Too many wrong credentials from your address: try again later"
_TOO_MANY_UNJUDGED = "Too many credentials from your address are not judged yet: try again later"

_CREDENTIALS: Final = frozenset({b"authorization", b"x-api-key"})


class RefusedError(Exception):
    """A credential does not hold, or could not be judged.

    Attributes:
        reason: Why; for logs.
    """

    def __init__(self, reason: Exception) -> None:
        super().__init__(str(reason))
        self.reason = reason


class SignIns:
    """Keeps credentials from being guessed: an address may show so many different wrong ones.

    Further ones from there are refused without being looked at. What an address has shown before is no guess, right or
    wrong: who signed in there goes on, and who repeats a mistake harms nobody. Other addresses notice nothing.

    Only what was wrong counts as wrong. What is not judged yet, or could not be, is bounded on its own and more
    generously; where many at a time turn out wrong, the address owes them.

    Args:
        per_second: Wrong credentials from one address, on average; None for no limit.
        burst: How many at once.
        places: Of how many it may be found out at a time who they are.
        places_per_address: Of how many at one address.
        remembered: How many addresses and credentials are told apart.
    """

    def __init__(
        self,
        per_second: float | None = GUESSES_PER_SECOND,
        burst: int = GUESSES,
        *,
        places: int = AT_A_TIME,
        places_per_address: int = AT_A_TIME_PER_CALLER,
        remembered: int = REMEMBERED,
    ) -> None:
        self._asking = Gate(places, places_per_address)
        self._wrong = Rate(per_second, burst, remembered=remembered, refusal=_TOO_MANY)
        self._unjudged = Rate(
            None if per_second is None else per_second * _UNJUDGED_PER_GUESS,
            burst * _UNJUDGED_PER_GUESS,
            remembered=remembered,
            refusal=_TOO_MANY_UNJUDGED,
        )
        self._remembered = remembered
        # Hashes with this process's own key, 64 bits: no credential is kept.
        self._shown: OrderedDict[int, None] = OrderedDict()

    async def judge(
        self,
        address: str,
        shown: Hashable,
        resolve: Callable[[], Any],
        *,
        nobody_is_wrong: bool = False,
    ) -> Identity | None:
        """Who asks. Whoever waits for it sees to it that it does not take too long.

        Args:
            address: From where.
            shown: The credential; what is false in itself, such as an empty tuple, is none.
            resolve: Gives the identity, or something to await that does.
            nobody_is_wrong: Whether None says that the credential is wrong, not that it is of an unknown kind.

        Raises:
            CallError: `RESOURCE_EXHAUSTED` if nobody is asked, because too many are already or too many were wrong.
            RefusedError: From whatever `resolve` raised; also where it gave something else than an identity.
        """
        with self._asking.enter(address):
            is_guess = bool(shown) and self.begin(address, shown)
            was_wrong: bool | None = None
            try:
                identity = await resolved(resolve())
                was_wrong = nobody_is_wrong and identity is None
            except Exception as error:
                # A credential that could not be looked at was not wrong.
                was_wrong = None if isinstance(error, OSError) else True
                raise RefusedError(error) from error
            finally:
                if is_guess:
                    self.end(address, shown, was_wrong=was_wrong)
            return identity

    def begin(self, address: str, credential: Hashable) -> bool:
        """Before a credential is judged; whether it is a guess, whose outcome is to be told to `end`.

        Raises:
            CallError: `RESOURCE_EXHAUSTED` if no more guesses are taken from there.
        """
        mark = hash((address, credential))
        if mark in self._shown:
            self._shown.move_to_end(mark)
            return False
        self._wrong.ask(address)
        self._unjudged.spend(address)
        return True

    def end(self, address: str, credential: Hashable, *, was_wrong: bool | None) -> None:
        """After a guess was judged; None where it could not be."""
        if was_wrong is None:
            return
        self._unjudged.give_back(address)
        if was_wrong:
            self._wrong.charge(address)
        self._shown[hash((address, credential))] = None
        if len(self._shown) > self._remembered:
            self._shown.popitem(last=False)


async def resolved(found: Any) -> Identity | None:
    """What a resolver found, awaited where it has to be.

    Raises:
        Exception: Whatever the resolver raises; also where it gives something else than an identity.
    """
    identity = await found if inspect.isawaitable(found) else found
    if identity is not None and not isinstance(identity, Identity):
        raise TypeError(f"a resolver gave {type(identity).__name__}, which is no Identity")
    return identity


def shown_in(headers: Iterable[tuple[bytes, bytes]]) -> tuple[bytes, ...]:
    """The credentials of a request: all of them, since there is no telling which one is looked at."""
    return tuple(value for name, value in headers if name in _CREDENTIALS)


def address_of(client: tuple[str, int] | list[str | int] | None) -> str:
    """By which part of its address a client is told from others: of IPv6 the 64 bits that a household has."""
    host = str(client[0]) if client else ""
    return _household(host) if ":" in host else host


@lru_cache(maxsize=1024)
def _household(host: str) -> str:
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if not isinstance(address, IPv6Address):
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(IPv6Address(int(address) >> 64 << 64))
