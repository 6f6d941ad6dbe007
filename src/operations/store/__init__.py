"""What a hub remembers: grants that were revoked, budgets that were used, approvals; bytes under keys."""

from operations.store.contract import StoreError, Values
from operations.store.kinds import open_store
from operations.store.memory import MemoryValues
from operations.store.sqlite import SQLiteValues
from operations.store.state import Store

__all__ = ["MemoryValues", "SQLiteValues", "Store", "StoreError", "Values", "open_store"]
