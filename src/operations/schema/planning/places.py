"""Locations of a schema, whichever members of its unions apply to a value there.

A plan describes a value once its choices are made. A `Place` covers every way to make them: a property is known there
if any member of a union knows it.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import Any, TypeAlias

from operations.schema.planning.plans import MISSING, Plan
from operations.schema.reading.references import Site

_MAX_NAMES = 1_000
"""How many property names are remembered for one place."""


class Places:
    """The places of one document, or of all that share definitions, made when data first reaches them."""

    def __init__(self) -> None:
        self._places: dict[Plan | frozenset[Plan], Place] = {}

    def place(self, plans: list[Plan]) -> "Place":
        """Return the place of values that any of `plans` may describe."""
        key = plans[0] if len(plans) == 1 else frozenset(plans)
        found = self._places.get(key)
        if found is None:
            found = self._places[key] = Place(self, plans)
        return found


class Place:
    """One location.

    Attributes:
        objects: The plans there that describe objects, with their choices made.
        arrays: Those that describe arrays.
        is_open: Whether nothing is known about values there.
        has_default: Whether a default is declared there.
        is_unique: Whether an array there must not hold an item twice.
        reports: Kept here for `changes`.
    """

    def __init__(self, places: Places, plans: list[Plan]) -> None:
        chosen = list(dict.fromkeys(each for plan in plans for each in _chosen(plan, set())))
        self._places = places
        self._children: dict[str, Place | None] = {}
        self.reports: dict[Any, Any] = {}
        self.has_default = any(plan.default is not MISSING for plan in (*plans, *chosen))
        self.is_open = all(plan.is_unknown for plan in chosen)
        self.objects = tuple(plan for plan in chosen if plan.allows("object"))
        self.arrays = tuple(plan for plan in chosen if plan.allows("array"))
        self.is_unique = any(True in plan.keyword("uniqueItems") for plan in self.arrays)

    def declares(self, name: str) -> bool:
        """Return whether a schema names the property, rather than allowing any name."""
        return any(name in plan.fields for plan in self.objects)

    def child(self, name: str) -> "Place | None":
        """Return the place of a property, or None if no schema knows it."""
        if name in self._children:
            return self._children[name]
        fields = [(plan, plan.field(name)) for plan in self.objects]
        parts = [plan.part(field.sites) for plan, field in fields if field.kept]
        found = self._places.place(parts) if parts else None
        if len(self._children) < _MAX_NAMES:
            self._children[name] = found
        return found

    def item(self, index: int) -> "Place":
        """Return the place of an array's item."""
        return self.items or self._item(index)

    def _item(self, index: int) -> "Place":
        return self._places.place([plan.part(plan.place(index)) for plan in self.arrays])

    @cached_property
    def items(self) -> "Place | None":
        """The place of all items of an array, if they share one."""
        return None if any(plan.places for plan in self.arrays) else self._item(0)

    @cached_property
    def nested(self) -> "Nested | None":
        """The declared properties that may hold objects; None if any other property may."""
        if self.is_open or any(plan.keeps_unnamed for plan in self.objects):
            return None
        names = dict.fromkeys(name for plan in self.objects for name in plan.fields)
        children = [(name, self.child(name)) for name in names]
        return [(name, child) for name, child in children if child and child.holds_objects]

    @cached_property
    def is_flat(self) -> bool:
        """Whether values here are objects of one kind that hold no others."""
        return len(self.objects) == 1 and self.nested == []

    @cached_property
    def holds_objects(self) -> bool:
        """Whether stripping and filling may change a value here."""
        place: Place | None = self
        seen: set[Place] = set()
        while place is not None and not place.is_open and place not in seen:
            seen.add(place)
            if not place.objects and place.arrays:
                place = place.items
            elif place.objects and not place.arrays and all(map(_is_mere_map, place.objects)):
                place = place.child("")
            else:
                break
        return place is None or (bool(place.objects) and not place.is_open)


def _is_mere_map(plan: Plan) -> bool:
    """Return whether all properties of an object have the same schema and are kept."""
    return (
        plan.is_map and not plan.fields and not plan.asked and not plan.keyword("patternProperties")
    )


Nested: TypeAlias = list[tuple[str, Place | None]]


def _chosen(plan: Plan, seen: set[Plan]) -> Iterator[Plan]:
    """Yield `plan` with each of its choices made, one at a time."""
    if plan in seen:
        return
    seen.add(plan)
    if not plan.choices:
        yield plan
    for choice in plan.choices:
        if not choice.members:
            yield from _chosen(plan.pick(()), seen)
        options: list[Site | None] = [*choice.members, choice.then, choice.otherwise]
        for option in options:
            if option is not None:
                yield from _chosen(plan.pick((option,)), seen)
