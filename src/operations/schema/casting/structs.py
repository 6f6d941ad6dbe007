"""Convert simple plans to msgspec types, so that stripping and checking run in C.

A plan that consists of objects with known properties, arrays and scalars, without unions, corresponds to a msgspec
type. Decoding a value with the type drops unknown properties, keeps the order of the others, and requires exact JSON
types. `stripping` handles the values that a type rejects.

Rule 1: a type may reject a value that its plan accepts, because `stripping` then handles it. A value that an `exact`
        type accepts is valid.
Rule 2: a type decodes the form that msgspec writes, which for some objects is not their JSON form. `Finish` rejects
        those.
"""

import sys
from collections.abc import Callable, Iterable
from itertools import chain
from operator import itemgetter
from typing import Annotated, Any, Literal, NotRequired, TypeAlias, TypedDict, Union

import msgspec

from operations.base.json.values import count_values, is_plain, to_json
from operations.base.work import CONVERTED, PIECE
from operations.schema.plans import MISSING, Plan
from operations.schema.values import scalar_types

Finish: TypeAlias = Callable[[list[Any], list[Any]], bool]
"""Takes values and their decoded results, and fills declared defaults in the results; returns whether any value differs
from its result. It processes all values of one place at once, mostly in C. Raises `TypeError` or `KeyError` for objects
that are not dicts with these names."""

_MAX_LEVELS = 32
"""The largest depth of types, and of parts without a schema: half of `MAX_DEPTH`, enough for nearly all data."""

_EXPRESSED = frozenset({"type", "properties", "required", "additionalProperties", "items", "anyOf"})
"""Keywords that a type expresses completely."""

_OBJECT = frozenset({dict})
_CONSTANTS = frozenset({"const", "enum"})
_FINITE = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
_WORD = range(-(2**63), 2**63)
"""The integers that a msgspec literal can contain."""


class PlanType(msgspec.Struct, frozen=True, gc=False):
    """The type of one plan."""

    type: Any

    depth: int
    """The number of nested containers."""

    exact: bool
    """Whether the type expresses the whole plan."""

    finish: Finish | None = None
    """The remaining work after decoding; None if the type contains no objects."""

    must_finish: bool = False
    """Whether `finish` is needed even if decoding changes nothing: to fill defaults, or to check an unknown part."""

    complete: int | None = None
    """For an object without nested objects: the number of properties with which no default is missing."""

    finish_items: Finish | None = None
    """For a list of such objects: the remaining work for the items."""


class Shaper:
    """Builds the types of one document, or of all documents that share definitions.

    Args:
        default: Returns the default of a property, given its plan and whether it is required; or `MISSING`.
        closed: Whether the types accept only values that need no change. Their decoded results are not used.
        most: The largest number of types. Each takes about 30 µs and 2 KB.
    """

    def __init__(
        self, default: Callable[[Plan, bool], Any], *, closed: bool = False, most: int = 200
    ) -> None:
        self._default = default
        self._closed = closed
        self._shapes: dict[Plan, PlanType | None] = {}
        self._made = 0
        self._most = most
        self._level = 0

    def shape(self, plan: Plan) -> PlanType | None:
        """Return the type of `plan`, or None if the plan is not simple enough."""
        if plan not in self._shapes:
            self._shapes[plan] = None  # while it is being built: a recursive plan is not simple
            self._level += 1
            if self._level <= _MAX_LEVELS:
                self._shapes[plan] = self._shape(plan)
            self._level -= 1
        return self._shapes[plan]

    def _shape(self, plan: Plan) -> PlanType | None:
        leaves = plan.leaf_types
        if leaves is not None:
            return self._leaf(plan, leaves)
        if plan.is_unknown:
            # A closed type only checks, and no type rejects NaN in an unknown part.
            return None if self._closed else _unknown()
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
        return _union(shapes, exact=plan.assertions <= _EXPRESSED)

    def _leaf(self, plan: Plan, leaves: frozenset[type]) -> PlanType | None:
        if plan.choices:
            members = [m for c in plan.choices for m in map(plan.member, c.members)]
            is_expressed = (
                len(plan.choices) == 1 and plan.assertions <= _EXPRESSED and not plan.types
            )
            exact = is_expressed and all(
                not m.choices and m.assertions <= _EXPRESSED for m in members
            )
            return _union(map(_scalar, leaves), exact=exact)
        if plan.constants is not None:
            return _constants(
                plan.constants, leaves, exact=plan.assertions <= _EXPRESSED | _CONSTANTS
            )
        return _union(map(_scalar, leaves), exact=plan.assertions <= _EXPRESSED)

    def _object(self, plan: Plan) -> PlanType | None:
        if plan.keeps_unnamed:
            plain = not (plan.fields or plan.asked or plan.keyword("patternProperties"))
            return self._map(plan) if plain else None
        fields: dict[str, tuple[Any, bool]] = {}
        defaults: dict[str, Any] = {}
        nested: dict[str, Finish] = {}
        depth = 0
        exact, must_finish = True, False
        for name, field in plan.fields.items():
            if not field.kept or field.barred:
                return None
            part = plan.part(field.sites)
            shape = self.shape(part)
            if shape is None:
                return None
            default = self._default(part, name in plan.required)
            if default is not MISSING:
                defaults[name] = default
            must_finish = must_finish or shape.must_finish or default is not MISSING
            # A property with a default may be absent, except in a value that needs no change.
            needed = name in plan.required if default is MISSING else self._closed
            fields[name] = shape.type, needed
            if shape.finish is not None:
                nested[name] = shape.finish
            depth = max(depth, shape.depth)
            exact = exact and shape.exact and (default is MISSING or part.accepts(default))
        self._made += 1
        if self._made > self._most:
            return None
        try:
            kind = _closed(fields) if self._closed else _open(fields)
        except ValueError:
            # A struct cannot have a name with quotes or control characters.
            return None
        complete = len(fields) if defaults else 0
        finish = _object_finish(defaults, nested, complete)
        return PlanType(kind, depth + 1, exact, finish, must_finish, None if nested else complete)

    def _map(self, plan: Plan) -> PlanType | None:
        part = plan.children[""]
        shape = None if part is None else self.shape(part)
        if shape is None:
            return None
        kind = _generic(dict, str, shape.type)
        finish = _map_finish(shape.finish)
        return PlanType(kind, shape.depth + 1, shape.exact, finish, shape.must_finish)

    def _array(self, plan: Plan) -> PlanType | None:
        first, rest = plan.items
        shape = None if first else self.shape(rest)
        if shape is None:
            return None
        finish = shape.finish and _array_finish(shape.finish)
        flat = None if shape.complete is None else shape.finish
        kind = list_type(shape.type)
        return PlanType(
            kind, shape.depth + 1, shape.exact, finish, shape.must_finish, finish_items=flat
        )

    def _chosen(self, plan: Plan) -> PlanType | None:
        """Return a union of scalars and one kind of container, as in `anyOf: [Pet, null]`."""
        if len(plan.choices) != 1:
            return None
        members = [plan.pick((member,)) for member in plan.choices[0].members]
        shapes = [self._member(member) for member in members]
        known = [shape for shape in shapes if shape is not None]
        if len(known) < len(shapes) or sum(shape.depth > 0 for shape in known) != 1:
            return None
        return _union(known, exact=plan.assertions <= _EXPRESSED)

    def _member(self, plan: Plan) -> PlanType | None:
        leaves = plan.leaf_types
        if leaves is None or plan.constants is None:
            return self.shape(plan)
        # A union cannot contain both a type and literals of that type.
        return _union(map(_scalar, leaves), exact=False)


def _open(fields: dict[str, tuple[Any, bool]]) -> Any:
    """Return a type that decodes the given properties to a dict, with their types and whether they are required."""
    kinds = {name: kind if needed else NotRequired[kind] for name, (kind, needed) in fields.items()}
    shape: Any = TypedDict("PlanType", kinds)  # type: ignore[misc]
    return shape


def _closed(fields: dict[str, tuple[Any, bool]]) -> Any:
    """Return a type that rejects all other properties. Decoding is faster, because it builds no dict."""
    kinds: list[Any] = [
        (f"f{index}", kind, *(() if needed else (msgspec.UNSET,)))
        for index, (kind, needed) in enumerate(fields.values())
    ]
    names = {f"f{index}": name for index, name in enumerate(fields)}
    return msgspec.defstruct(
        "PlanType", kinds, rename=names, kw_only=True, gc=False, forbid_unknown_fields=True
    )


def _unknown() -> PlanType:
    """Return the type of a value without a schema, with at most half of the levels."""

    def finish(before: list[Any], _after: list[Any]) -> bool:
        if not is_plain(before, _MAX_LEVELS + 1):
            raise TypeError(before)
        return False

    return PlanType(Any, _MAX_LEVELS, exact=False, finish=finish, must_finish=True)


def _object_finish(defaults: dict[str, Any], nested: dict[str, Finish], complete: int) -> Finish:
    parts = [(name, itemgetter(name), finish) for name, finish in nested.items()]
    size = sum(count_values(default, PIECE) for default in defaults.values())

    def finish(before: list[Any], after: list[Any]) -> bool:
        if not _OBJECT.issuperset(map(type, before)):
            before, after = _of_type(dict, before, after)
        count = sum(map(len, after))
        differs = count != sum(map(len, before))
        for name, get, finish_part in parts:
            try:
                results = list(map(get, after))
                values = list(map(get, before))
            except KeyError:
                results = [item[name] for item in after if name in item]
                values = [b[name] for b, a in zip(before, after, strict=True) if name in a]
            # Absent parts are skipped: definitions with two references each have exponentially many parts.
            if results and finish_part(values, results):
                differs = True
        if count < complete * len(after):
            enforce_few(len(after) * size)
            for name, default in defaults.items():
                for item in after:
                    if name not in item:
                        item[name] = to_json(default)
                        differs = True
        return differs

    return finish


def enforce_few(values: int) -> None:
    """Raise an error if more defaults may be filled at once than a piece of work allows.

    Raises:
        TypeError: As for a value that the type does not accept.
    """
    if values * CONVERTED > PIECE:
        raise TypeError("too many defaults are filled at once")


def _map_finish(finish_item: Finish | None) -> Finish:
    def finish(before: list[Any], after: list[Any]) -> bool:
        before, after = _of_type(dict, before, after)
        if sum(map(len, before)) != sum(map(len, after)):
            raise TypeError(before)
        if finish_item is None:
            return False
        values = [b[name] for b, a in zip(before, after, strict=True) for name in a]
        return finish_item(values, [item for a in after for item in a.values()])

    return finish


def _array_finish(finish_item: Finish) -> Finish:
    def finish(before: list[Any], after: list[Any]) -> bool:
        before, after = _of_type(list, before, after)
        return finish_item(list(chain.from_iterable(before)), list(chain.from_iterable(after)))

    return finish


def _of_type(kind: type, before: list[Any], after: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return the values that were decoded as a `kind`, with their results.

    The others belong to other members of a union.
    """
    chosen = [index for index, item in enumerate(after) if type(item) is kind]
    values = [before[index] for index in chosen]
    if not {kind}.issuperset(map(type, values)):
        raise TypeError(values)
    return values, [after[index] for index in chosen]


def _scalar(kind: type) -> PlanType:
    return PlanType(_FINITE if kind is float else kind, 0, exact=True)


def _constants(constants: list[Any], leaves: frozenset[type], *, exact: bool) -> PlanType | None:
    """Return the literal type of the values, if msgspec supports them."""
    listed = tuple(value for value in constants if type(value) in leaves)
    if listed and all(
        value is None or type(value) is str or (type(value) is int and value in _WORD)
        for value in listed
    ):
        return PlanType(Literal[listed], 0, exact)
    return _union(map(_scalar, leaves), exact=False)


def list_type(item: Any) -> Any:
    """Return the type of a list of `item`."""
    return _generic(list, item)


def _generic(kind: Any, *parts: Any) -> Any:
    return kind[parts]


def _union(shapes: Iterable[PlanType], *, exact: bool) -> PlanType | None:
    """Return the union of `shapes`; None if there are none, or two of them are objects."""
    found = tuple(shapes)
    finishes = [shape.finish for shape in found if shape.finish is not None]
    if not found or len(finishes) > 1:
        return None
    exact = exact and all(shape.exact for shape in found)
    if len(found) == 1:
        return msgspec.structs.replace(found[0], exact=exact)
    return PlanType(
        Union[tuple(shape.type for shape in found)],  # noqa: UP007 - made at run time
        max(shape.depth for shape in found),
        exact,
        next(iter(finishes), None),
        any(shape.must_finish for shape in found),
    )
