"""Delegated access: grants, approvals, and the store behind both.

Rule 1: everything fails closed: a call is rejected if the store, the ledger or the clock does not work.
Rule 2: every change in the store is one compare-and-set, so several hubs can share it.
"""

from operations._grants import Block, Grant, GrantError, derived_key, narrow, new_block, read_token
from operations.access import ApprovalRule
from operations.authority.approvals import Approval, Approvals, approval_operations
from operations.authority.grants import Grants
from operations.authority.guard import Authority
from operations.authority.ledger import Ledger
from operations.authority.store import MemoryStore, SQLiteStore, Store, StoreError

__all__ = [
    "Approval",
    "ApprovalRule",
    "Approvals",
    "Authority",
    "Block",
    "Grant",
    "GrantError",
    "Grants",
    "Ledger",
    "MemoryStore",
    "SQLiteStore",
    "Store",
    "StoreError",
    "approval_operations",
    "derived_key",
    "narrow",
    "new_block",
    "read_token",
]
