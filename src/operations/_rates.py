"""How often somebody may do something, and how much of it at a time.

Rule 1: what is beyond a bound is refused at once, before the work that the bound protects from. Nothing queues.
Rule 2: memory is bounded: the longest silent one is forgotten first, which forgives it.
"""

from collections import OrderedDict
from time import monotonic
from typing import Final

from operations.errors import CallError, ErrorCode

REMEMBERED: Final = 10_000

AT_A_TIME: Final = 1000
AT_A_TIME_PER_CALLER: Final = 250


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


class Gate:
    """Counts what is under way, and keeps it within a bound for each caller and for all."""

    def __init__(self, most: int, most_per_caller: int) -> None:
        self._most = most
        self._most_per_caller = most_per_caller
        self._by_caller: dict[str, int] = {}
        self.total = 0

    def enter(self, caller: str) -> "_Place":
        """Take a place, which a `with` block gives back.

        Raises:
            CallError: `RESOURCE_EXHAUSTED` if there is none left.
        """
        mine = self._by_caller.get(caller, 0)
        if mine >= self._most_per_caller:
            raise _exhausted(f"Too many at a time: you have {mine}")
        if self.total >= self._most:
            raise _exhausted("Too many at a time")
        self._by_caller[caller] = mine + 1
        self.total += 1
        return _Place(self, caller)

    def leave(self, caller: str) -> None:
        """Note that a caller has one less under way."""
        self.total -= 1
        left = self._by_caller[caller] - 1
        if left:
            self._by_caller[caller] = left
        else:
            del self._by_caller[caller]


class _Place:
    """Room for one thing at a gate."""

    __slots__ = ("_caller", "_gate")

    def __init__(self, gate: Gate, caller: str) -> None:
        self._gate = gate
        self._caller = caller

    def __enter__(self) -> None:
        """Nothing to do: it was taken at the gate."""

    def __exit__(self, *exc_info: object) -> None:
        self._gate.leave(self._caller)


def _exhausted(message: str) -> CallError:
    return CallError(ErrorCode.RESOURCE_EXHAUSTED, message, retryable=True)
