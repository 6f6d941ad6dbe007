"""Plain shapes as msgspec types, so that stripping and filling them happens in C.

A plan of objects with known properties, arrays and scalars, with nothing left open and nothing to choose, is the
same thing as a msgspec type: reading a value into it drops what it does not name, fills its defaults and
insists on exact JSON types; writing it back gives fresh builtins. Anything else it refuses, and `stripping` does it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Union

import msgspec

from operations._json import MAX_DEPTH, to_json
from operations.schema.leaves import leaf_types, scalar_types
from operations.schema.plans import MISSING, Plan

_MAX_STRUCTS = 200
"""How many types are made for one document. Each takes about 30 µs and 2 KB."""


class Shape(NamedTuple):
    """The type of one plan."""

    type: Any

    depth: int
    """How many levels of containers it has."""


class Shaper:
    """Makes the types of one document.

    Args:
        default: The default of a property, by its plan and whether the property is required; or `MISSING`.
    """

    def __init__(self, default: Callable[[Plan, bool], Any]) -> None:
        self._default = default
        self._shapes: dict[Plan, Shape | None] = {}
        self._made = 0

    def shape(self, plan: Plan) -> Shape | None:
        """The type of `plan`, or None where it is not that plain."""
        if plan not in self._shapes:
            self._shapes[plan] = None  # while underway: what holds itself is not plain
            found = self._shape(plan)
            if found is not None and found.depth < MAX_DEPTH:
                self._shapes[plan] = found
        return self._shapes[plan]

    def _shape(self, plan: Plan) -> Shape | None:
        leaves = leaf_types(plan)
        if leaves is not None:
            return Shape(_union(leaves), 0)
        if plan.is_unknown:
            return None
        if plan.choices:
            return self._chosen(plan)
        if plan.types is None:
            return None
        shapes = [Shape(kind, 0) for kind in scalar_types(plan.types)]
        for name, make in (("object", self._object), ("array", self._array)):
            if plan.allows(name):
                made = make(plan)
                if made is None:
                    return None
                shapes.append(made)
        return Shape(_union(shape.type for shape in shapes), max(shape.depth for shape in shapes))

    def _object(self, plan: Plan) -> Shape | None:
        if plan.keeps_unnamed:
            plain = not (plan.fields or plan.asked or plan.keyword("patternProperties"))
            return self._map(plan) if plain else None
        fields: list[Any] = []
        names: dict[str, str] = {}
        depth = 0
        for index, (name, field) in enumerate(plan.fields.items()):
            if not field.kept or field.barred:
                return None
            part = plan.part(field.sites)
            shape = self.shape(part)
            if shape is None:
                return None
            names[f"f{index}"] = name
            fields.append(self._field(f"f{index}", shape, part, required=name in plan.required))
            depth = max(depth, shape.depth)
        self._made += 1
        if self._made > _MAX_STRUCTS:
            return None
        struct = msgspec.defstruct("Shape", fields, rename=names, kw_only=True, gc=False)
        return Shape(struct, depth + 1)

    def _field(self, name: str, shape: Shape, part: Plan, *, required: bool) -> tuple[Any, ...]:
        default = self._default(part, required)
        if isinstance(default, (dict, list)):
            return name, shape.type, msgspec.field(default_factory=lambda: to_json(default))
        if default is not MISSING:
            return name, shape.type, default
        if required:
            return name, shape.type
        return name, Union[shape.type, msgspec.UnsetType], msgspec.UNSET  # noqa: UP007 - made at run time

    def _map(self, plan: Plan) -> Shape | None:
        shape = self.shape(plan.part(plan.field("").sites))
        return None if shape is None else Shape(_generic(dict, str, shape.type), shape.depth + 1)

    def _array(self, plan: Plan) -> Shape | None:
        shape = None if plan.places else self.shape(plan.part(plan.place(0)))
        return None if shape is None else Shape(_generic(list, shape.type), shape.depth + 1)

    def _chosen(self, plan: Plan) -> Shape | None:
        """A union of scalars and one kind of container, as in `anyOf: [Pet, null]`."""
        if len(plan.choices) != 1:
            return None
        scalars: set[type] = set()
        container: Shape | None = None
        for member in plan.choices[0].members:
            leaves = leaf_types(plan.pick((member,)))
            if leaves is not None:
                scalars |= leaves
            elif container is None:
                container = self.shape(plan.pick((member,)))
                if container is None:
                    return None
            else:
                return None
        if container is None:
            return None
        return Shape(Union[container.type, *scalars], container.depth)


def _generic(kind: Any, *parts: Any) -> Any:
    return kind[parts]


def _union(types: Any) -> Any:
    found = tuple(types)
    # A type without a member accepts nothing; no value is of this one.
    return Union[found] if found else _Nothing  # noqa: UP007 - made at run time


class _Nothing(msgspec.Struct, forbid_unknown_fields=True):
    """What no JSON value is."""

    nothing: Any
