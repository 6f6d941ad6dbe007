"""A store in the memory of this process."""

from math import inf
from threading import Lock


class MemoryValues:
    """Values in the memory of this process."""

    poll_seconds = inf

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._swapping = Lock()

    async def get(self, key: str) -> bytes | None:
        """Return a value."""
        return self._values.get(key)

    async def swap(self, key: str, old: bytes | None, new: bytes | None) -> bool:
        """Replace a value."""
        with self._swapping:
            if self._values.get(key) != old:
                return False
            self._values.pop(key, None)
            if new is not None:
                self._values[key] = new
            return True

    async def items(self, table: str) -> dict[str, bytes]:
        """Return all values of a table."""
        values = self._values.copy()
        return {key: value for key, value in values.items() if key.startswith(f"{table}.")}
