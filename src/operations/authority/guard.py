"""What a registry knows of authority beyond one call: budgets, approvals and the ledger."""

import asyncio

import msgspec

from operations._grants import Grant, Rules
from operations.authority.store import MemoryStore, Store, StoreError, change
from operations.errors import CallError, ErrorCode

_MAX_COUNTERS = 1_000
"""Counters of all grants that were narrowed from one."""


class Authority:
    """The store that the calls of a registry share.

    Args:
        store: Where budgets and approvals are kept; by default in this process.
    """

    def __init__(self, store: Store | None = None) -> None:
        self.store: Store = store or MemoryStore()
        self._spending: dict[str, asyncio.Lock] = {}

    async def spend(self, grant: Grant, rules: Rules) -> None:
        """Count a call against all budgets of a grant, or against none.

        Raises:
            CallError: `RESOURCE_EXHAUSTED` if one is spent; `UNAVAILABLE` if the store does not work.
        """
        # All blocks of a chain count in one value, so that one compare-and-set changes all counters.
        root = grant.keys[0]
        lock = self._spending.setdefault(root, asyncio.Lock())
        try:
            async with lock:
                await change(self.store, f"budget/{root}", lambda held: (_spent(held, rules), None))
        except StoreError as error:
            raise unavailable() from error
        finally:
            if not lock.locked():
                self._spending.pop(root, None)


def _spent(held: bytes | None, rules: Rules) -> bytes:
    counts = {} if held is None else msgspec.json.decode(held, type=dict[str, int])
    for name, most in rules.budgets:
        counts[name] = counts.get(name, 0) + 1
        if counts[name] > most:
            raise CallError(ErrorCode.RESOURCE_EXHAUSTED, "The grant allows no more of these calls")
    if len(counts) > _MAX_COUNTERS:
        raise CallError(ErrorCode.RESOURCE_EXHAUSTED, "The grant was narrowed too often")
    return msgspec.json.encode(counts)


def unavailable() -> CallError:
    """Return the error of a call whose authority could not be checked."""
    return CallError(ErrorCode.UNAVAILABLE, "The authority of this call cannot be checked now")
