"""How often something may happen, in total and for each caller."""

from collections import OrderedDict
from math import ceil
from time import monotonic
from typing import Final

from operations.base.errors import CallError, ErrorCode
from operations.base.retry import RETRY_AFTER

REMEMBERED: Final = 10_000
"""The largest number of callers, addresses or credentials with stored state."""


class RateLimiter:
    """A token bucket for each caller.

    Args:
        per_second: Tokens that a bucket gains per second; None for no limit.
        burst: The capacity of a bucket.
        remembered: The largest number of buckets.
    """

    def __init__(
        self, per_second: float | None = None, burst: int = 0, *, remembered: int = REMEMBERED
    ) -> None:
        self._remembered = remembered
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self.rejected = 0
        """The number of rejected requests."""
        self.configure(per_second, burst)

    def configure(self, per_second: float | None, burst: int) -> None:
        """Change the rate."""
        self._per_second = per_second
        self._burst = float(burst)

    def spend(self, caller: str, amount: int = 1, *, paid: int = 0) -> None:
        """Take `amount` tokens, less the number that was already `paid`.

        Raises:
            CallError: `RESOURCE_EXHAUSTED` if the caller has too few tokens; not retryable if `amount` exceeds the
                capacity.
        """
        if self._per_second is None:
            return
        if amount > self._burst:
            self.rejected += 1
            raise CallError(
                ErrorCode.RESOURCE_EXHAUSTED,
                f"This counts as {amount} requests, but at most {self._burst:.0f} are allowed at once: send fewer",
            )
        due = max(0, amount - paid)
        missing = due - self._tokens(caller)
        if missing > 0:
            self._take(caller, 0)
            self.rejected += 1
            raise CallError(
                ErrorCode.RESOURCE_EXHAUSTED,
                "Too many requests: slow down",
                {RETRY_AFTER: ceil(missing / self._per_second * 1000)},
                retryable=True,
            )
        self._take(caller, due)

    def charge(self, caller: str) -> bool:
        """Take one token, even if none is left; return whether one was left.

        The debt is limited to one burst, so that a caller recovers within a bounded time.
        """
        if self._per_second is None:
            return True
        had = self._tokens(caller) >= 1
        if self._tokens(caller) > -self._burst:
            self._take(caller, 1)
        return had

    def _tokens(self, caller: str) -> float:
        tokens, then = self._buckets.get(caller, (self._burst, 0.0))
        return min(self._burst, tokens + (monotonic() - then) * (self._per_second or 0))

    def _take(self, caller: str, amount: int) -> None:
        self._buckets[caller] = (self._tokens(caller) - amount, monotonic())
        self._buckets.move_to_end(caller)
        if len(self._buckets) > self._remembered:
            self._buckets.popitem(last=False)
