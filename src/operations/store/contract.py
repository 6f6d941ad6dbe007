"""What a store does: values under keys, changed by compare-and-set."""

from typing import Protocol

from operations.base.errors import CallError, ErrorCode


class StoreError(CallError):
    """The store does not work, so the call that needs it is rejected."""

    def __init__(self, message: str = "The authority of this call cannot be checked now") -> None:
        super().__init__(ErrorCode.UNAVAILABLE, message)


class Values(Protocol):
    """The backend of a store: values by key, `table.name`. Its methods may raise any exception."""

    poll_seconds: float
    """Seconds after which to read a value again, because a change may not have been announced; infinite within one
    process."""

    async def get(self, key: str) -> bytes | None:
        """Return a value; None if there is none."""
        ...

    async def swap(self, key: str, old: bytes | None, new: bytes | None) -> bool:
        """Replace `old` by `new` if the current value is `old`; return whether it was. None means no value."""
        ...

    async def items(self, table: str) -> dict[str, bytes]:
        """Return all values of a table, by key."""
        ...
