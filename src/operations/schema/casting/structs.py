"""Plain shapes as msgspec types, so that stripping and filling them happens in C.

A plan of objects with known properties, arrays and scalars, with nothing left open and nothing to choose, is the
same thing as a msgspec type: reading a value into it drops what it does not name, fills its defaults and
insists on exact JSON types; writing it back gives fresh builtins. Anything else it refuses, and `stripping` does it.

Rule 1: a type may refuse what its plan accepts, as `stripping` has another way. What a type that is `exact` accepts
is valid, but for text that is not Unicode.
"""

import sys
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, Union

import msgspec

from operations._json import to_json
from operations.schema.planning.leaves import leaf_types, scalar_types
from operations.schema.planning.plans import MISSING, Plan

_MAX_LEVELS = 32
"""How deep types nest. No data nests deeper than `MAX_DEPTH`, and few do half as deep."""

_TOLD = frozenset({"type", "properties", "required", "additionalProperties", "items", "anyOf"})
"""Keywords that a type tells whole."""

_CONSTANTS = frozenset({"const", "enum"})
_FINITE = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
_WORD = range(-(2**63), 2**63)
"""The integers that a type can name."""


class Shape(msgspec.Struct, frozen=True, gc=False):
    """The type of one plan."""

    type: Any

    depth: int
    """How many levels of containers it has."""

    exact: bool
    """Whether the plan says nothing that the type does not."""


class Shaper:
    """Makes the types of one document, or of all that share definitions.

    Args:
        default: The default of a property, by its plan and whether the property is required; or `MISSING`.
        closed: Whether the types accept only values that need no change: nothing to strip, nothing to fill.
        most: How many types are made. Each takes about 30 µs and 2 KB.

    Attributes:
        has_numbers: Whether some type made so far accepts floats.
    """

    def __init__(
        self, default: Callable[[Plan, bool], Any], *, closed: bool = False, most: int = 200
    ) -> None:
        self._default = default
        self._closed = closed
        self._shapes: dict[Plan, Shape | None] = {}
        self._made = 0
        self.has_numbers = False
        self._most = most
        self._level = 0

    def shape(self, plan: Plan) -> Shape | None:
        """The type of `plan`, or None where it is not that plain."""
        if plan not in self._shapes:
            self._shapes[plan] = None  # while underway: what holds itself is not plain
            self._level += 1
            if self._level <= _MAX_LEVELS:
                self._shapes[plan] = self._shape(plan)
            self._level -= 1
        return self._shapes[plan]

    def _shape(self, plan: Plan) -> Shape | None:
        leaves = leaf_types(plan)
        self._note(scalar_types(plan.types or ()) if leaves is None else leaves)
        if leaves is not None:
            return self._leaf(plan, leaves)
        if plan.is_unknown:
            return None
        if plan.choices:
            return self._chosen(plan)
        if plan.types is None:
            return None
        shapes = [_scalar(kind) for kind in scalar_types(plan.types)]
        for name, make in (("object", self._object), ("array", self._array)):
            if plan.allows(name):
                made = make(plan)
                if made is None:
                    return None
                shapes.append(made)
        return _union(shapes, exact=plan.said <= _TOLD)

    def _note(self, scalars: frozenset[type]) -> None:
        self.has_numbers = self.has_numbers or float in scalars

    def _leaf(self, plan: Plan, leaves: frozenset[type]) -> Shape:
        if plan.choices:
            members = [m for c in plan.choices for m in map(plan.member, c.members)]
            told = len(plan.choices) == 1 and plan.said <= _TOLD and not plan.types
            exact = told and all(not m.choices and m.said <= _TOLD for m in members)
            return _union(map(_scalar, leaves), exact=exact)
        if plan.constants is not None:
            return _constants(plan.constants, leaves, exact=plan.said <= _TOLD | _CONSTANTS)
        return _union(map(_scalar, leaves), exact=plan.said <= _TOLD)

    def _object(self, plan: Plan) -> Shape | None:
        if plan.keeps_unnamed:
            plain = not (plan.fields or plan.asked or plan.keyword("patternProperties"))
            return self._map(plan) if plain else None
        fields: list[Any] = []
        names: dict[str, str] = {}
        depth = 0
        exact = True
        for index, (name, field) in enumerate(plan.fields.items()):
            if not field.kept or field.barred:
                return None
            part = plan.part(field.sites)
            shape = self.shape(part)
            if shape is None:
                return None
            names[f"f{index}"] = name
            default = self._default(part, name in plan.required)
            required = name in plan.required or (self._closed and default is not MISSING)
            filled = MISSING if self._closed else default
            fields.append(_field(f"f{index}", shape, filled, required=required))
            depth = max(depth, shape.depth)
            exact = exact and shape.exact and (default is MISSING or part.accepts(default))
        self._made += 1
        if self._made > self._most:
            return None
        struct = msgspec.defstruct(
            "Shape",
            fields,
            rename=names,
            kw_only=True,
            gc=False,
            forbid_unknown_fields=self._closed,
        )
        return Shape(struct, depth + 1, exact)

    def _map(self, plan: Plan) -> Shape | None:
        shape = self.shape(plan.part(plan.field("").sites))
        if shape is None:
            return None
        # Its keys may be other strings than mere ones.
        return Shape(_generic(dict, str, shape.type), shape.depth + 1, exact=False)

    def _array(self, plan: Plan) -> Shape | None:
        shape = None if plan.places else self.shape(plan.part(plan.place(0)))
        if shape is None:
            return None
        return Shape(_generic(list, shape.type), shape.depth + 1, shape.exact)

    def _chosen(self, plan: Plan) -> Shape | None:
        """A union of scalars and one kind of container, as in `anyOf: [Pet, null]`."""
        if len(plan.choices) != 1:
            return None
        members = [plan.pick((member,)) for member in plan.choices[0].members]
        shapes = [self._member(member) for member in members]
        known = [shape for shape in shapes if shape is not None]
        if len(known) < len(shapes) or sum(shape.depth > 0 for shape in known) != 1:
            return None
        return _union(known, exact=plan.said <= _TOLD)

    def _member(self, plan: Plan) -> Shape | None:
        leaves = leaf_types(plan)
        if leaves is None or plan.constants is None:
            return self.shape(plan)
        self._note(leaves)
        # A union cannot name both a type and some values of it.
        return _union(map(_scalar, leaves), exact=False)


def _field(name: str, shape: Shape, default: Any, *, required: bool) -> tuple[Any, ...]:
    if isinstance(default, (dict, list)):
        return name, shape.type, msgspec.field(default_factory=lambda: to_json(default))
    if default is not MISSING:
        return name, shape.type, default
    if required:
        return name, shape.type
    return name, Union[shape.type, msgspec.UnsetType], msgspec.UNSET  # noqa: UP007 - made at run time


def _scalar(kind: type) -> Shape:
    return Shape(_FINITE if kind is float else kind, 0, exact=True)


def _constants(constants: list[Any], leaves: frozenset[type], *, exact: bool) -> Shape:
    """The values themselves, where a type can name them."""
    listed = tuple(value for value in constants if type(value) in leaves)
    if listed and all(
        value is None or type(value) is str or (type(value) is int and value in _WORD)
        for value in listed
    ):
        return Shape(Literal[listed], 0, exact)
    return _union(map(_scalar, leaves), exact=False)


def _generic(kind: Any, *parts: Any) -> Any:
    return kind[parts]


def _union(shapes: Iterable[Shape], *, exact: bool) -> Shape:
    found = tuple(shapes)
    if not found:
        return Shape(_Nothing, 0, exact=False)
    return Shape(
        Union[tuple(shape.type for shape in found)],  # noqa: UP007 - made at run time
        max(shape.depth for shape in found),
        exact and all(shape.exact for shape in found),
    )


class _Nothing(msgspec.Struct, forbid_unknown_fields=True):
    """What no JSON value is."""

    nothing: Any
