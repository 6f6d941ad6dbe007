"""Find the members of a union that a value matches, and the locations that any member describes.

Most unions of objects have a property with a constant in each member, such as `type`. Members that this property rules
out are not examined, so that the work for a value does not depend on the number of members.

If a value matches no member, the member with the most points is the nearest: 100 points for each property that equals
its constant, 10 for each other valid property, 1 for each property that is only present.

A plan describes a value after a member of each union is chosen. A `Place` covers all members: a property is known there
if any member of a union declares it.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, TypeAlias

from operations.base.json.values import MAX_NAME, SCALARS, is_object
from operations.base.types import JSONObject
from operations.base.work import PIECE, STEP, Work
from operations.schema.dividing import fits, fits_sized, size_of
from operations.schema.plans import MISSING, Plan, Planner
from operations.schema.references import Site
from operations.schema.values import conversions, same, type_of

_LITERAL, _VALID, _PRESENT = 100, 10, 1

Member: TypeAlias = tuple[Site, Plan]

_MAX_TAGS = 4
"""The number of properties that are tried as the index of a union."""

_LEAST_MEMBERS = 3
"""The number of members from which a union has an index."""


class Tags:
    """The members of a union of objects by the value of a property that has constants.

    Attributes:
        name: The property.
        choices: The constants of all members; None if a member does not restrict the property.
    """

    def __init__(self, name: str, members: Sequence[Member]) -> None:
        own: dict[Any, list[int]] = {}
        free: list[int] = []
        choices: dict[Any, Any] = {}
        self.name = name
        self._optional: list[int] = []
        self._fillable: list[int] = []
        for index, (_, plan) in enumerate(members):
            constants = _constants_at(plan, name)
            if constants is None:
                free.append(index)
            else:
                for each in constants:
                    choices.setdefault(_key_of(each), each)
                    indices = own.setdefault(_key_of(each), [])
                    if not indices or indices[-1] != index:
                        indices.append(index)
            if name not in plan.required:
                self._optional.append(index)
            part = plan.children[name]
            if name not in plan.required or part is None or part.default is not MISSING:
                self._fillable.append(index)
        self.choices = None if free else list(choices.values())
        self._free = free
        self._named = own
        self._fitting = {
            key: sorted({*indices, *free}) if free else indices for key, indices in own.items()
        }

    @property
    def separates(self) -> bool:
        """Whether the property rules out members."""
        return len(set(map(tuple, self._named.values()))) > 1

    def fitting(self, value: JSONObject) -> list[int]:
        """Return the members that the property does not rule out."""
        tag = value.get(self.name, MISSING)
        if tag is MISSING:
            return self._optional
        return self._fitting.get(_key_of(tag), self._free)

    def named(self, value: JSONObject) -> list[int]:
        """Return the members one of whose constants the property has."""
        return self._named.get(_key_of(value.get(self.name, MISSING)), [])

    def convertible(self, value: JSONObject) -> list[int]:
        """Return the members that the property does not rule out, also after it is converted or filled."""
        tag = value.get(self.name, MISSING)
        if tag is MISSING:
            return self._fillable
        found = {*self.fitting(value)}
        if type(tag) in SCALARS:
            for converted in conversions(tag, _SCALAR_TYPES):
                found.update(self._fitting.get(_key_of(converted), ()))
        return sorted(found)


_SCALAR_TYPES = ("string", "integer", "number", "boolean")


def _key_of(tag: Any) -> tuple[bool, Any] | None:
    """Return the key of a scalar that is equal only for equal JSON values; None for a container."""
    return (type(tag) is bool, tag) if type(tag) in SCALARS else None


class Union:
    """The members of an `anyOf` or `oneOf`, in order."""

    def __init__(self, planner: Planner, sites: Sequence[Site]) -> None:
        self.members: list[Member] = [(site, planner.plan((site,))) for site in sites]
        self._kinds: dict[str, list[Member]] = {}

    def of_kind(self, kind: str) -> list[Member]:
        """Return the members that allow values of the JSON type `kind`."""
        found = self._kinds.get(kind)
        if found is None:
            found = self._kinds[kind] = [each for each in self.members if each[1].allows(kind)]
        return found

    @cached_property
    def tags(self) -> Tags | None:
        """The index of the members that allow objects; None without a property that tells them apart."""
        members = self.of_kind("object")
        if len(members) < _LEAST_MEMBERS:
            return None
        counts = Counter(
            name
            for _, plan in members
            for name in plan.fields
            if len(name) <= MAX_NAME and _constants_at(plan, name) is not None
        )
        found = (Tags(name, members) for name, _ in counts.most_common(_MAX_TAGS))
        return next((tags for tags in found if tags.separates), None)

    def candidates(self, value: Any, *, convert: bool = False) -> list[Member]:
        """Return the members that `value` may match; with `convert`, also after conversions."""
        if not is_object(value):
            return self.members if convert else self.of_kind(type_of(value))
        members = self.of_kind("object")
        if self.tags is None:
            return members
        found = self.tags.convertible(value) if convert else self.tags.fitting(value)
        return [members[index] for index in found]

    def named(self, value: Any) -> list[Member]:
        """Return the members that `value` names by the property that tells them apart."""
        if not is_object(value) or self.tags is None:
            return []
        members = self.of_kind("object")
        return [members[index] for index in self.tags.named(value)]


def union_of(planner: Planner, members: Sequence[Site]) -> Union:
    """Return the union with these members; it is created once for the members of a schema."""
    key = members[0].pointer
    found: Union | None = planner.unions.get(key)
    if found is None:
        found = planner.unions[key] = Union(planner, members)
    return found


def union_at(planner: Planner, site: Site, keyword: str) -> Union:
    """Return the union at `keyword` of the schema at `site`."""
    at = planner.document.at
    found: Union | None = planner.unions.get(at(site, keyword, 0).pointer)
    if found is None:
        count = len(planner.document.keywords(site)[keyword])
        found = union_of(planner, [at(site, keyword, index) for index in range(count)])
    return found


def _constants_at(plan: Plan, name: str) -> list[Any] | None:
    """Return the scalars that a property may be, if its schema lists them."""
    field = plan.fields.get(name)
    constants = None if field is None else plan.listed(field)
    is_scalar = constants is not None and SCALARS.issuperset(map(type, constants))
    return constants if is_scalar else None


_TRIAL = 20 * STEP
"""The units of work to try a member."""

Attempt = Callable[[Plan], int | None]
"""Casts the value to one member; returns the number of conversions, or None if conversions are not enough."""


def matching(
    planner: Planner, members: Sequence[Site], value: Any, attempt: Attempt, work: Work
) -> list[Site]:
    """Return the members that match `value` unchanged, else without undeclared properties, else after conversions.

    If conversions are needed, only the first such member is returned; otherwise all matching members.
    """
    union = union_of(planner, members)
    plans = union.candidates(value)
    fitting = fitting_of(plans, value, work)
    if isinstance(value, float):
        # 3.0 is also an integer, but stays a float if numbers are allowed.
        numbers = [member for member, plan in plans if member in fitting and plan.allows("number")]
        fitting = numbers or fitting
    converted: list[Site] = []
    if not fitting:
        plans = union.candidates(value, convert=True)
        for member, plan in plans:
            work.spend(_TRIAL)
            count = attempt(plan) if _is_plausible(plan, value) else None
            if count is not None:
                (converted if count else fitting).append(member)
        if len(fitting) > 1 and is_object(value):
            fitting = _keeping(
                fitting, [plan for member, plan in plans if member in fitting], value
            )
    return fitting or converted[:1]


def _keeping(members: list[Site], plans: list[Plan], value: JSONObject) -> list[Site]:
    """Return the members without those that are closed and remove a property that another one declares.

    If all of them do, only the first member that keeps the most properties is returned.
    """
    names = {name for plan in plans for name in plan.fields if name in value}
    barred = [sum(plan.field(name).barred for name in names) for plan in plans]
    fewest = min(barred)
    fitting = [member for member, count in zip(members, barred, strict=True) if count == fewest]
    return fitting[:1] if fewest else fitting


def fitting_of(members: Sequence[Member], value: Any, work: Work) -> list[Site]:
    """Return the members that a JSON value matches."""
    if type(value) in SCALARS or len(members) < 2:
        return [site for site, plan in members if fits(plan, value, work)]
    size = size_of(value)
    cost = size * sum([plan.weight for _, plan in members])
    if cost > PIECE:
        return [site for site, plan in members if fits_sized(plan, value, size, work)]
    work.spend(cost)
    return [site for site, plan in members if plan.accepts(value)]


def nearest(members: Sequence[Member], value: Any, work: Work) -> Site:
    """Return the first member with the most points."""
    if len(members) == 1:
        return members[0][0]
    scoring = _Scoring(value, work)
    return max(members, key=lambda member: scoring.points(member[1]))[0]


def _is_plausible(plan: Plan, value: Any) -> bool:
    """Return whether a value could match without replacements, by its type and its constants."""
    kind = type_of(value)
    if not is_object(value):
        return kind != "array" or plan.allows(kind)
    return plan.allows(kind) and all(
        _could_be(value[name], plan.part(field.sites))
        for name, field in plan.fields.items()
        if name in value
    )


def _could_be(value: Any, plan: Plan) -> bool:
    if plan.constants is None or plan.is_constant(value):
        return True
    converted = () if isinstance(value, (dict, list)) else conversions(value, plan.types or ())
    return any(map(plan.is_constant, converted))


class _Scoring:
    """The points of the members of one union. Checks that members share are made once."""

    def __init__(self, value: Any, work: Work) -> None:
        self._value = value
        self._work = work
        self._points: dict[Plan, int] = {}
        self._valid: dict[tuple[Plan, str], bool] = {}

    def points(self, plan: Plan) -> int:
        """Return the points of one member; a nested union counts with its best member."""
        if plan not in self._points:
            nested = sum(
                max(self.points(plan.member(member)) for member in choice.members)
                for choice in plan.choices
                if choice.members
            )
            self._points[plan] = self._own(plan) + nested or int(
                fits(plan, self._value, self._work)
            )
        return self._points[plan]

    def _own(self, plan: Plan) -> int:
        value = self._value
        if not is_object(value) or not plan.allows("object"):
            return 0
        points = 0
        self._work.spend((len(plan.fields) + 1) * STEP)
        for name, field in plan.fields.items():
            if name in value and field.sites:
                part = plan.part(field.sites)
                points += _PRESENT
                if part.constants is not None and len(part.constants) == 1:
                    points += _LITERAL * same(value[name], part.constants[0])
                if (part, name) not in self._valid:
                    self._valid[part, name] = fits(part, value[name], self._work)
                points += _VALID * self._valid[part, name]
        return points


_MAX_NAMES = 1_000
"""How many property names are cached for one place."""


def place_of(planner: Planner, plans: list[Plan]) -> "Place":
    """Return the place for values that any of `plans` describes; it is created once."""
    key = plans[0] if len(plans) == 1 else frozenset(plans)
    found: Place | None = planner.places.get(key)
    if found is None:
        found = planner.places[key] = Place(planner, plans)
    return found


class Place:
    """One location in a schema.

    Attributes:
        objects: The plans of this place that describe objects, one for each member of a union.
        arrays: The plans that describe arrays.
        is_open: Whether the values are not described.
        has_default: Whether a default is declared.
        is_unique: Whether the items of an array must be unique.
        reports: A cache of the module `changes`.
    """

    def __init__(self, planner: Planner, plans: list[Plan]) -> None:
        chosen = list(dict.fromkeys(each for plan in plans for each in _chosen(plan, set())))
        self._planner = planner
        self._children: dict[str, Place | None] = {}
        self.reports: dict[Any, Any] = {}
        self.has_default = any(plan.default is not MISSING for plan in (*plans, *chosen))
        self.is_open = all(plan.is_unknown for plan in chosen)
        self.objects = tuple(plan for plan in chosen if plan.allows("object"))
        self.arrays = tuple(plan for plan in chosen if plan.allows("array"))
        self.is_unique = any(True in plan.keyword("uniqueItems") for plan in self.arrays)

    def declares(self, name: str) -> bool:
        """Return whether a schema declares the property by name."""
        return name in self._declared

    @cached_property
    def _declared(self) -> frozenset[str]:
        return frozenset[str]().union(*(plan.fields for plan in self.objects))

    def child(self, name: str) -> "Place | None":
        """Return the place of a property, or None if no schema describes it."""
        if name in self._children:
            return self._children[name]
        parts = [part for plan in self.objects if (part := plan.children[name]) is not None]
        found = place_of(self._planner, parts) if parts else None
        if len(self._children) < _MAX_NAMES and len(name) <= MAX_NAME:
            self._children[name] = found
        return found

    def item(self, index: int) -> "Place":
        """Return the place of an array's item."""
        return self.items or self._item(index)

    def _item(self, index: int) -> "Place":
        return place_of(self._planner, [plan.item(index) for plan in self.arrays])

    @cached_property
    def items(self) -> "Place | None":
        """The place of all items of an array, if they share one place."""
        return None if any(plan.items[0] for plan in self.arrays) else self._item(0)

    @cached_property
    def nested(self) -> "Nested | None":
        """The declared properties that may contain objects; None if undeclared properties may contain objects too."""
        if self.is_open or any(plan.keeps_unnamed for plan in self.objects):
            return None
        names = dict.fromkeys(name for plan in self.objects for name in plan.fields)
        children = [(name, self.child(name)) for name in names]
        return [(name, child) for name, child in children if child and child.holds_objects]

    @cached_property
    def is_flat(self) -> bool:
        """Whether the values are objects of one kind without nested objects."""
        return len(self.objects) == 1 and self.nested == []

    @cached_property
    def holds_objects(self) -> bool:
        """Whether stripping and filling may change a value at this place."""
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
    """Yield the plans for all combinations of union members."""
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
