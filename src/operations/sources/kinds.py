"""Which kinds of sources there are: those of the library, and those of installed packages that a file names.

Rule: a kind is imported when a file has its table, because most kinds are slow to import or need an extra.
"""

from collections.abc import Collection
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import cast

from operations.sources.contract import SourceKind

GROUP = "operations.sources"
"""The group of the entry points by which packages register kinds."""

BUILT_IN = {
    "openapi": "operations.openapi.kind",
    "mcp": "operations.mcp.kind",
    "brokers": "operations.calls.kind",
}
"""The modules of our own kinds, by table, in the order of the reference."""


@cache
def kind_of(table: str) -> SourceKind | None:
    """Return the kind with a table; None if there is none.

    Raises:
        ValueError: If the package of a kind cannot be imported.
    """
    if module := BUILT_IN.get(table):
        return cast("SourceKind", import_module(module).KIND)
    for each in entry_points(group=GROUP, name=table):
        try:
            return cast("SourceKind", each.load())
        except Exception as error:
            package = each.dist.name if each.dist is not None else each.value
            raise ValueError(
                f"the kind of [{table}] is in {package}, which fails: {error}"
            ) from error
    return None


def kinds(tables: Collection[str] | None = None) -> list[SourceKind]:
    """Return our own kinds, and those of other packages for `tables`."""
    others = sorted({*(tables or ())} - BUILT_IN.keys())
    return [found for table in (*BUILT_IN, *others) if (found := kind_of(table)) is not None]
