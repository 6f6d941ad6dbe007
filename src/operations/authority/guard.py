"""Enforce authority across calls for a registry: budgets, approvals and the ledger."""

import asyncio
from typing import Any

import msgspec

from operations._grants import Grant, Rules
from operations.access import ApprovalRule
from operations.authority.approvals import Approvals
from operations.authority.grants import enforce_valid
from operations.authority.ledger import Ledger
from operations.authority.store import MemoryStore, Store, change
from operations.context import OperationContext
from operations.errors import CallError, ErrorCode
from operations.specs import Operation

_MAX_COUNTERS = 1_000
"""Counters of all grants that were narrowed from one."""

_DEFAULT_RULE = ApprovalRule()


class Authority:
    """The store and the ledger that the calls of a registry share.

    Args:
        store: Where budgets and approvals are kept; by default in this process.
        ledger: Records every call.
    """

    def __init__(self, store: Store | None = None, *, ledger: Ledger | None = None) -> None:
        self.store: Store = store or MemoryStore()
        self.approvals = Approvals(self.store)
        self.ledger = ledger
        self._spending: dict[str, asyncio.Lock] = {}

    async def admit(
        self, operation: Operation, digest: str, value: Any, context: OperationContext
    ) -> Any:
        """Let a call begin whose access and input were checked: approval, budget, ledger, in this order.

        Args:
            operation: The operation.
            digest: The digest of its contract.
            value: The input.
            context: Who calls.

        Returns:
            The input; after an approval, exactly the approved input, even if `value` changed since.

        Raises:
            CallError: If it may not begin.
        """
        operation_id, identity, approval = operation.spec.id, context.identity, None
        grant = None if identity is None else identity.grant
        rules = None if grant is None else grant.rules(operation_id)
        rule, by_grant = operation.approve, rules is not None and rules.approve
        if by_grant or (rule is not None and rule.applies(value)):
            approval = await self.approvals.obtain(
                operation.spec, digest, value, context, rule or _DEFAULT_RULE, by_grant=by_grant
            )
            value = approval.input
            if identity is not None:
                await enforce_valid(identity, self.store)
        if grant is not None and rules is not None and rules.budgets:
            await self._spend(grant, rules)
        if self.ledger is not None:
            used = None if approval is None else approval.id
            self.ledger.begin(operation_id, value, context, used)
        return value

    async def _spend(self, grant: Grant, rules: Rules) -> None:
        """Count a call against all budgets of a grant, or against none."""
        # All blocks of a chain count in one value, so that one compare-and-set changes all counters.
        root = (grant.presented or grant.keys)[0]
        # One at a time: callers in this process do not compete for the value.
        lock = self._spending.setdefault(root, asyncio.Lock())
        try:
            async with lock:
                await change(self.store, f"budget/{root}", lambda held: (_spent(held, rules), None))
        finally:
            if not lock.locked():
                self._spending.pop(root, None)


def _spent(held: bytes | None, rules: Rules) -> bytes:
    counts = {} if held is None else msgspec.json.decode(held, type=dict[str, int])
    for name, most in rules.budgets:
        counts[name] = counts.get(name, 0) + 1
        if counts[name] > most:
            raise CallError(ErrorCode.RESOURCE_EXHAUSTED, "The budget of the grant is exhausted")
    if len(counts) > _MAX_COUNTERS:
        raise CallError(ErrorCode.RESOURCE_EXHAUSTED, "The grant was narrowed too often")
    return msgspec.json.encode(counts)
