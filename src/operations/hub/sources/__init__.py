"""Where operations come from: one file per kind of source.

Each opens what one entry of the config describes and gives an `Opened`. The kinds whose packages take long to import,
or may not be installed, are named here and imported when the config has such an entry.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from operations.config import ConfigFile
from operations.front.limits import Limits
from operations.scanner import Skipped

Kind: TypeAlias = Literal["local", "openapi", "mcp", "broker"]


@dataclass(frozen=True, slots=True)
class MCPFile:
    """An `mcp.json`, or the servers in it that have one namespace."""

    path: str
    only: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A source that is there."""

    operations: Iterable[Any]
    """What `registry.register_all` takes; a service is closed with the registry."""

    origin: str
    """What it was made from, in words that hold no secret."""

    skipped: list[Skipped] = field(default_factory=list[Skipped])
    """What it offered that cannot be used, with the reason."""

    failed: list[Skipped] = field(default_factory=list[Skipped])
    """Parts of it that could be there and are not, by their namespaces: servers of an `mcp.json`."""

    doubts: list[Skipped] = field(default_factory=list[Skipped])
    """What is written about it that nobody understands, or is missing there."""

    title: str = ""
    """What it calls itself."""


def per_source(file: ConfigFile) -> int:
    """Return the concurrent calls to one API or MCP server: fewer than one caller has, to leave some for others."""
    return max(1, Limits(**file.options(Limits, file.config.limits)).calls_per_caller * 3 // 4)
