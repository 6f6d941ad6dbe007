"""Bound the memory that an import takes by the size of its document.

Some documents are small and still expand: by aliases of YAML, by references to a large path item, or by many operations
of a few bytes each. The parts of an import that can expand spend from one budget, before they allocate where possible.

Rule 1: weights are upper bounds in bytes, measured with CPython; a real document spends a tenth of its budget.
"""

from threading import Lock

from operations.base.errors import DocumentError

_FREE = 40_000_000
_FACTOR = 36
"""An import may take at most 40 times its document plus 50 MB; the rest is for the document itself."""

OPERATION = 1_700
"""The weight of an operation: its spec, schemas, handler and name."""

RESPONSE = 900
"""The weight of a declared response that is different from others."""

PROBLEM = 400
"""The weight of a problem that is reported."""

ENTRY = 110
"""The weight of one entry of an object that is copied."""


class MemoryBudget:
    """The memory in bytes that the import of one document, all files together, may take.

    Args:
        size: The size of the document in bytes, as far as it is known.
    """

    def __init__(self, size: int = 0) -> None:
        self._left = _FREE + _FACTOR * size
        self._lock = Lock()

    def add(self, size: int) -> None:
        """Add another file of `size` bytes to the document."""
        with self._lock:
            self._left += _FACTOR * size

    def has(self, weight: int) -> bool:
        """Return whether `weight` can be spent."""
        return weight <= self._left

    def spend(self, weight: int) -> None:
        """Reserve `weight` bytes.

        Raises:
            ExpandsError: If the document has used up its budget.
        """
        with self._lock:
            if weight > self._left:
                raise ExpandsError("expands to too much memory for its size")
            self._left -= weight


class ExpandsError(DocumentError):
    """Raised when an import would take too much memory; unlike other problems, it rejects the document."""
