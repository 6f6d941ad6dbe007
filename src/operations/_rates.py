"""How often somebody may do something.

Rule 1: what is beyond a rate is refused at once, before the work that the rate protects from. Nothing queues.
Rule 2: memory is bounded: the longest silent one is forgotten first, which forgives it.
"""

from collections import OrderedDict
from collections.abc import Hashable
from functools import lru_cache
from ipaddress import IPv6Address, ip_address
from time import monotonic
from typing import Final

from operations.errors import CallError, ErrorCode

REMEMBERED: Final = 10_000

GUESSES: Final = 20
GUESSES_PER_SECOND: Final = 0.2

_UNJUDGED_PER_GUESS: Final = 10
"""Credentials that may be unjudged for each one that may be wrong: most callers have the right one."""

_TOO_MANY = "Too many wrong credentials from your address: try again later"
_TOO_MANY_UNJUDGED = "Too many credentials from your address are not judged yet: try again later"


class Rate:
    """A token bucket for each caller.

    Args:
        per_second: What a bucket gains; None for no limit.
        burst: What it holds.
        remembered: How many callers are told apart.
        refusal: What is said to those who spent it all.
    """

    def __init__(
        self,
        per_second: float | None,
        burst: int,
        *,
        remembered: int = REMEMBERED,
        refusal: str = "Too many requests: slow down",
    ) -> None:
        self._per_second = per_second
        self._burst = float(burst)
        self._remembered = remembered
        self._refusal = refusal
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def spend(self, caller: str, amount: int = 1, *, paid: int = 0) -> None:
        """Take what a request costs, less what was `paid` for it before.

        Raises:
            CallError: `RESOURCE_EXHAUSTED` if the caller has spent it all; not retryable if it can never have so much.
        """
        if self._per_second is None:
            return
        if amount > self._burst:
            raise CallError(
                ErrorCode.RESOURCE_EXHAUSTED,
                f"This counts as {amount} requests, and at once there are never more than "
                f"{self._burst:.0f}: ask for less at a time",
            )
        due = max(0, amount - paid)
        self.ask(caller, due)
        self._take(caller, due)

    def ask(self, caller: str, amount: int = 1) -> None:
        """Whether a caller has so much, which it keeps.

        Raises:
            CallError: `RESOURCE_EXHAUSTED` if it has less.
        """
        if self._per_second is not None and self._tokens(caller) < amount:
            self._take(caller, 0)
            raise CallError(ErrorCode.RESOURCE_EXHAUSTED, self._refusal, retryable=True)

    def charge(self, caller: str) -> None:
        """Take one even where there is none left: a debt, which time pays off."""
        if self._per_second is not None:
            self._take(caller, 1)

    def give_back(self, caller: str) -> None:
        """Return one that was taken."""
        held = self._buckets.get(caller)
        if held is not None:
            self._buckets[caller] = (held[0] + 1, held[1])

    def _tokens(self, caller: str) -> float:
        tokens, then = self._buckets.get(caller, (self._burst, 0.0))
        return min(self._burst, tokens + (monotonic() - then) * (self._per_second or 0))

    def _take(self, caller: str, amount: int) -> None:
        self._buckets[caller] = (self._tokens(caller) - amount, monotonic())
        self._buckets.move_to_end(caller)
        if len(self._buckets) > self._remembered:
            self._buckets.popitem(last=False)


class SignIns:
    """Keeps credentials from being guessed: an address may show so many different wrong ones.

    Further ones from there are refused without being looked at. What an address has shown before is no guess, right or
    wrong: who signed in there goes on, and who repeats a mistake harms nobody. Other addresses notice nothing.

    Only what was wrong counts as wrong. What is not judged yet, or could not be, is bounded on its own and more
    generously; where many at a time turn out wrong, the address owes them.

    Args:
        per_second: Wrong credentials from one address, on average; None for no limit.
        burst: How many at once.
        remembered: How many addresses and credentials are told apart.
    """

    def __init__(
        self,
        per_second: float | None = GUESSES_PER_SECOND,
        burst: int = GUESSES,
        *,
        remembered: int = REMEMBERED,
    ) -> None:
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
