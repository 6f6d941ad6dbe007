"""How often somebody may do something.

Rule 1: what is beyond a rate is refused at once, before the work that the rate protects from. Nothing queues.
Rule 2: memory is bounded: the longest silent one is forgotten first, which forgives it.
"""

from collections import OrderedDict
from collections.abc import Hashable
from ipaddress import IPv6Address, ip_address
from time import monotonic
from typing import Final

from operations.errors import CallError, ErrorCode

REMEMBERED: Final = 10_000

GUESSES: Final = 20
GUESSES_PER_SECOND: Final = 0.2

_TOO_MANY = "Too many wrong credentials from your address: try again later"


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

    def spend(self, caller: str, amount: int = 1) -> None:
        """Take what a request costs.

        Raises:
            CallError: `RESOURCE_EXHAUSTED` if the caller has spent it all.
        """
        if self._per_second is None:
            return
        now = monotonic()
        tokens, then = self._buckets.pop(caller, (self._burst, now))
        tokens = min(self._burst, tokens + (now - then) * self._per_second)
        enough = tokens >= amount
        self._buckets[caller] = (tokens - amount if enough else tokens, now)
        if len(self._buckets) > self._remembered:
            self._buckets.popitem(last=False)
        if not enough:
            raise CallError(ErrorCode.RESOURCE_EXHAUSTED, self._refusal, retryable=True)

    def give_back(self, caller: str, amount: int = 1) -> None:
        """Return what was taken."""
        held = self._buckets.get(caller)
        if held is not None:
            self._buckets[caller] = (held[0] + amount, held[1])


class SignIns:
    """Keeps credentials from being guessed: an address may show so many different wrong ones.

    Further ones from there are refused without being looked at. What an address has shown before is no guess, right or
    wrong: who signed in there goes on, and who repeats a mistake harms nobody. Other addresses notice nothing.

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
        self._rate = Rate(per_second, burst, remembered=remembered, refusal=_TOO_MANY)
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
        # Taken now, so that many at a time are no way around it.
        self._rate.spend(address)
        return True

    def end(self, address: str, credential: Hashable, *, was_wrong: bool) -> None:
        """After a guess was judged."""
        if not was_wrong:
            self._rate.give_back(address)
        self._shown[hash((address, credential))] = None
        if len(self._shown) > self._remembered:
            self._shown.popitem(last=False)


def address_of(client: tuple[str, int] | list[str | int] | None) -> str:
    """By which part of its address a client is told from others: of IPv6 the 64 bits that a household has."""
    host = str(client[0]) if client else ""
    if ":" not in host:
        return host
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if not isinstance(address, IPv6Address):
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(IPv6Address(int(address) >> 64 << 64))
