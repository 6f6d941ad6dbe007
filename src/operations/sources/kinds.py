"""Which kinds of sources there are: those of the library, and those of installed packages that a file names.

Rule: a kind is imported when a file has its table, because most kinds are slow to import or need an extra.
"""

from collections.abc import Collection
from typing import cast

from operations.base.plugins import registered
from operations.sources.contract import SourceKind

GROUP = "operations.sources"
"""The group of the entry points by which packages register kinds."""

BUILT_IN = {
    "openapi": "operations.openapi.kind:KIND",
    "mcp": "operations.mcp.kind:KIND",
    "brokers": "operations.calls.kind:KIND",
}
"""Our own kinds, by table, in the order of the reference."""


def kind_of(table: str) -> SourceKind | None:
    """Return the kind with a table; None if there is none.

    Raises:
        ValueError: If the package of a kind cannot be imported.
    """
    return cast("SourceKind | None", registered(table, BUILT_IN, GROUP))


def kinds(tables: Collection[str] | None = None) -> list[SourceKind]:
    """Return our own kinds, and those of other packages for `tables`."""
    others = sorted({*(tables or ())} - BUILT_IN.keys())
    return [found for table in (*BUILT_IN, *others) if (found := kind_of(table)) is not None]
