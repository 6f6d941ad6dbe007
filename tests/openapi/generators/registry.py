"""An API with every form of input and output that clients are generated for."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import Any, Literal

from operations import AccessControl, OperationRegistry


class Color(Enum):
    """A color."""

    RED = "red"
    GREEN = "green"


@dataclass
class Node:
    """A node of a tree."""

    value: int
    children: "list[Node]" = field(default_factory=list)


@dataclass
class Cat:
    """An animal."""

    kind: Literal["cat"]
    lives: int


@dataclass
class Dog:
    """Another animal."""

    kind: Literal["dog"]
    name: str


@dataclass
class Found:
    """The arguments of a search, as they arrived."""

    colors: list[Color]
    near: Node | None
    matrix: list[list[int]] | None
    limit: int
    mixed: str


def build() -> OperationRegistry:
    """Return the operations."""
    registry = OperationRegistry()
    open_to_all = AccessControl()

    @registry.operation("tree.get", type="query", tags=["read"])
    async def get(id: int, deep: bool = False) -> Node:
        """Return a node. It may have children."""
        return Node(id, [Node(id + 1)] if deep else [])

    @registry.operation("tree.add", access=open_to_all, tags=["tree"])
    async def add(node: Node) -> Node:
        """Add a node."""
        return node

    @registry.operation("tree.pair", type="query")
    async def pair(point: tuple[int, str]) -> tuple[str, int]:
        """Return the pair the other way round."""
        return point[1], point[0]

    @registry.operation("tree.search", type="query")
    async def search(
        colors: list[Color] | None = None,
        near: Node | None = None,
        matrix: list[list[int]] | None = None,
        limit: int | None = 10,
        mixed: int | str = 5,
    ) -> Found:
        """Search."""
        return Found(colors or [], near, matrix, limit or 0, repr(mixed))

    @registry.operation("pets.describe")
    async def describe(pet: Cat | Dog, at: datetime | None = None) -> Cat | Dog:
        """Describe a pet."""
        return pet

    @registry.operation("pets.photo", type="query")
    async def photo(id: str) -> bytes:
        """Return a photo."""
        return id.encode()

    @registry.operation("pets.any")
    async def same(value: Any = None) -> Any:
        """Return the value."""
        return value

    @registry.operation("pets.drop")
    async def drop(id: int) -> None:
        """Remove a pet."""
        if id == 404:
            raise LookupError("there is no such pet")

    @registry.operation("pets.watch")
    async def watch(ids: list[int]) -> AsyncGenerator[Node]:
        """Follow pets."""
        for each in ids:
            yield Node(each)

    return registry
