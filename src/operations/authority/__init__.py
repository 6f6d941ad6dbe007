"""Delegated access: grants, approvals, and the store behind both.

Rule 1: everything fails closed: a call is rejected if the store, the ledger or the clock does not work.
Rule 2: every change in the store is one compare-and-set, so several hubs can share it.
"""

from operations.authority.approvals import Authority
from operations.authority.grants import GrantError, Grants, narrow, new_block, read_token
from operations.authority.ledger import Ledger
from operations.authority.queue import Approval, ApprovalPage
from operations.contract.grant import Block, Grant
from operations.contract.specs import ApprovalRule
from operations.store.contract import StoreError
from operations.store.sqlite import SQLiteValues
from operations.store.state import Store

__all__ = [
    "Approval",
    "ApprovalPage",
    "ApprovalRule",
    "Authority",
    "Block",
    "Grant",
    "GrantError",
    "Grants",
    "Ledger",
    "SQLiteValues",
    "Store",
    "StoreError",
    "narrow",
    "new_block",
    "read_token",
]
