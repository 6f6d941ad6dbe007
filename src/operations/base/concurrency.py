"""How many calls may run at the same time, in total and for each caller; who comes too late is rejected."""

from collections.abc import Generator
from contextlib import contextmanager

from operations.base.errors import CallError, ErrorCode
from operations.base.slots import held_slot


class ConcurrencyLimiter:
    """Limits the slots in use, per caller and in total.

    Args:
        what: The noun for messages, in the plural.
        limit: The number of slots for all callers together.
        limit_per_caller: The number of slots for one caller.
    """

    def __init__(
        self, what: str = "concurrent calls", limit: int = 0, limit_per_caller: int = 0
    ) -> None:
        self._what = what
        self._by_caller: dict[str, int] = {}
        self.total = 0
        self.rejected = 0
        """The number of rejected requests."""
        self.configure(limit, limit_per_caller)

    def configure(self, limit: int, limit_per_caller: int) -> None:
        """Change the limits; slots in use stay in use."""
        self.limit = limit
        self._limit_per_caller = limit_per_caller

    def free(self, caller: str) -> int:
        """Return the number of slots that a caller can take now."""
        mine = self._by_caller.get(caller, 0)
        return max(0, min(self.limit - self.total, self._limit_per_caller - mine))

    def enter(self, caller: str, amount: int = 1) -> "Slot":
        """Return a slot. Release it with a `with` block or `release`.

        Raises:
            CallError: `RESOURCE_EXHAUSTED` if none is free.
        """
        mine = self._by_caller.get(caller, 0)
        if self.total + amount > self.limit:
            message = f"Too many {self._what}: try again later"
        elif mine + amount > self._limit_per_caller:
            message = f"Too many {self._what}: you have {mine} of {self._limit_per_caller}"
        else:
            self.add(caller, amount)
            return Slot(self, caller, amount)
        self.rejected += 1
        raise CallError(ErrorCode.RESOURCE_EXHAUSTED, message, retryable=True)

    def hold(self, caller: str) -> "Slot":
        """Return a slot that the current call holds, and releases temporarily while it waits for a person.

        Raises:
            CallError: `RESOURCE_EXHAUSTED` if none is free.
        """
        slot = self.enter(caller)
        held_slot.set(slot.lent)
        return slot

    def add(self, caller: str, amount: int) -> None:
        """Add to the slots in use, even beyond the limit."""
        self._by_caller[caller] = self._by_caller.get(caller, 0) + amount
        self.total += amount

    def leave(self, caller: str, amount: int) -> None:
        """Release a slot."""
        self.total -= amount
        left = self._by_caller[caller] - amount
        if left:
            self._by_caller[caller] = left
        else:
            del self._by_caller[caller]


class Slot:
    """A slot of one caller."""

    __slots__ = ("_amount", "_caller", "_is_released", "_limiter")

    def __init__(self, limiter: ConcurrencyLimiter, caller: str, amount: int) -> None:
        self._limiter: ConcurrencyLimiter | None = limiter
        self._is_released = False
        self._caller = caller
        self._amount = amount

    def release(self) -> None:
        """Release the slot. Calling this again is harmless."""
        limiter, self._limiter = self._limiter, None
        self._is_released = True
        if limiter is not None:
            limiter.leave(self._caller, self._amount)

    @contextmanager
    def lent(self) -> Generator[None]:
        """Release the slot for the duration of a `with` block, then take it again, even beyond the limit."""
        limiter, self._limiter = self._limiter, None
        if limiter is None:
            yield
            return
        limiter.leave(self._caller, self._amount)
        try:
            yield
        finally:
            # It may have been released inside the block.
            if not self._is_released:
                limiter.add(self._caller, self._amount)
                self._limiter = limiter

    def __enter__(self) -> None:
        """Do nothing: the slot was taken when it was created."""

    def __exit__(self, *exc_info: object) -> None:
        self.release()
