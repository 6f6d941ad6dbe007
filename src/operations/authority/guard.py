"""What a registry knows of authority beyond one call: budgets, approvals and the ledger."""

import asyncio
from typing import Any, Protocol

import msgspec

from operations._grants import Grant, Rules
from operations.access import ApprovalRule
from operations.authority.approvals import Approvals, unavailable
from operations.authority.store import MemoryStore, Store, StoreError, change
from operations.context import OperationContext
from operations.errors import CallError, ErrorCode
from operations.specs import Operation

_MAX_COUNTERS = 1_000
"""Counters of all grants that were narrowed from one."""

_DEFAULT_RULE = ApprovalRule()


class Recorder(Protocol):
    """A ledger, see `operations.authority.ledger`."""

    def open(self) -> None:
        """Find problems before the first call."""
        ...

    def begin(
        self, operation_id: str, value: Any, context: OperationContext, approval: str | None
    ) -> None:
        """Record that a call begins; an exception rejects it."""
        ...

    def end(
        self, operation_id: str, context: OperationContext, outcome: str, *, rejected: bool = False
    ) -> None:
        """Record how a call ended, or that it was rejected before it began."""
        ...


class Authority:
    """The store and the ledger that the calls of a registry share.

    Args:
        store: Where budgets and approvals are kept; by default in this process.
        ledger: Records every call.
    """

    def __init__(self, store: Store | None = None, *, ledger: Recorder | None = None) -> None:
        self.store: Store = store or MemoryStore()
        self.approvals = Approvals(self.store)
        self.ledger = ledger
        self._spending: dict[str, asyncio.Lock] = {}

    async def admit(
        self, operation: Operation, digest: str, value: Any, context: OperationContext
    ) -> None:
        """Let a call begin whose access and input were checked: approval, budget, ledger, in this order.

        Args:
            operation: The operation.
            digest: The digest of its contract.
            value: The input, which is final.
            context: Who calls.

        Raises:
            CallError: If it may not begin.
        """
        identity = context.identity
        grant = None if identity is None else identity.grant
        approval: str | None = None
        try:
            limits = None if grant is None else grant.limits(operation.spec.id)
            by_grant = limits is not None and limits.approve
            rule = operation.approve
            if by_grant or (rule is not None and rule.applies(value)):
                rule = rule or _DEFAULT_RULE
                used = await self.approvals.obtain(
                    operation.spec, digest, value, context, rule, by_grant=by_grant
                )
                approval = used.id
            if grant is not None and limits is not None and limits.budgets:
                await self._spend(grant, limits)
            if self.ledger is not None:
                self.ledger.begin(operation.spec.id, value, context, approval)
        except StoreError as error:
            raise unavailable() from error

    async def _spend(self, grant: Grant, limits: Rules) -> None:
        """Count a call against all budgets of a grant, or against none."""
        # All blocks of a chain count in one value, so that one compare-and-set changes all counters.
        root = grant.keys[0]
        lock = self._spending.setdefault(root, asyncio.Lock())
        try:
            async with lock:
                await change(
                    self.store, f"budget/{root}", lambda held: (_spent(held, limits), None)
                )
        finally:
            if not lock.locked():
                self._spending.pop(root, None)


def _spent(held: bytes | None, limits: Rules) -> bytes:
    counts = {} if held is None else msgspec.json.decode(held, type=dict[str, int])
    for name, most in limits.budgets:
        counts[name] = counts.get(name, 0) + 1
        if counts[name] > most:
            raise CallError(ErrorCode.RESOURCE_EXHAUSTED, "The grant allows no more of these calls")
    if len(counts) > _MAX_COUNTERS:
        raise CallError(ErrorCode.RESOURCE_EXHAUSTED, "The grant was narrowed too often")
    return msgspec.json.encode(counts)
