"""The policy `create`: makes values where the schema requires some, and replaces those that do not fit.

Nothing outside this module invents a value, and no other policy runs it.

Rule 1: a declared default comes first, as it stands. Then a constant, then the smallest value of the first type
that the schema accepts. Nothing is made up that it does not accept.
Rule 2: a value that requires itself cannot be created.
"""

from collections.abc import Callable, Iterator
from math import ceil, floor
from typing import Any

from operations._json import MAX_DEPTH, JSONValueError, to_json
from operations.schema.casting.thorough import Caster, Pass, RefusedError
from operations.schema.planning.members import nearest
from operations.schema.planning.plans import MISSING, Choice, Plan
from operations.schema.planning.values import distinct, same
from operations.schema.reading.references import Site

_MAX_MADE = 1_000
"""How many values, items or characters are made up at most."""

_MAX_PADDING = 1_000
"""How many items are created at most to reach `minItems`."""


class CreatingPass(Pass):
    """A pass that forces its value to fit, as TypeBox's `Value.Cast` does."""

    def __init__(self, caster: Caster, fitting: tuple[Plan, ...] = ()) -> None:
        super().__init__(caster, fitting)
        self._created: dict[Plan, Any] = {}

    def misfit(self, plan: Plan, value: Any) -> Any:
        """Return the declared default or a created value, if there is one that fits."""
        if plan.types is None and plan.default is MISSING and not plan.choices:
            # No schema describes it.
            return value
        made = self._make(plan)
        if made is MISSING or same(made, value):
            return value
        self.edits += 1
        return made

    def absent(self, plan: Plan) -> Any:
        """Return a created value, or `MISSING`."""
        made = self._make(plan)
        if made is not MISSING:
            self.edits += 1
        return made

    def cut(self, plan: Plan, items: list[Any]) -> list[Any]:
        """Return at most as many items as the schema allows."""
        most = plan.most_items
        if most is None or len(items) <= most:
            return items
        self._edit()
        return items[:most]

    def resized(self, plan: Plan, items: list[Any]) -> list[Any]:
        """Return the items, each once if they have to be unique, with others created to reach `minItems`."""
        unique = True in plan.keyword("uniqueItems")
        if unique and len(kept := distinct(items)) < len(items):
            self._edit()
            items = kept
        for index in range(len(items), min(plan.least_items, _MAX_PADDING)):
            made = self._make(plan.part(plan.place(index)))
            if made is MISSING or (unique and any(same(made, item) for item in items)):
                break
            self._edit()
            items.append(made)
        return items

    def unmatched(self, plan: Plan, choice: Choice, value: Any) -> Site | None:
        """Return the nearest member, unless the union declares a default, which then replaces the value."""
        if plan.default is not MISSING:
            return None
        return nearest(self._planner, choice.members, value)

    def _make(self, plan: Plan) -> Any:
        """Return a fresh value for `plan`, or `MISSING`."""
        if self.on_trial:
            raise RefusedError
        if plan not in self._created:
            self._created[plan] = Creator(self.default).create(plan)
        made = self._created[plan]
        return made if made is MISSING else to_json(made)

    def _edit(self) -> None:
        if self.on_trial:
            raise RefusedError
        self.edits += 1


class Creator:
    """Makes one value, with all that it needs.

    Args:
        default: The declared default of a plan, or `MISSING`; one that is refused by its own schema only
            where the second argument says that there has to be something.
    """

    def __init__(self, default: Callable[[Plan, bool], Any]) -> None:
        self._default = default
        self._underway: set[Plan] = set()
        self._declared = False
        self._left = _MAX_MADE

    def create(self, plan: Plan) -> Any:
        """Return a fresh value for `plan`, or `MISSING` if none can be made."""
        self._left -= 1
        if plan in self._underway or len(self._underway) >= MAX_DEPTH or self._left < 0:
            return MISSING
        self._underway.add(plan)
        try:
            made = self._default(plan, True)
            if made is not MISSING:
                self._declared = self._declared or not plan.accepts(made)
                return made
            return next(filter(self._fits(plan), self._candidates(plan)), MISSING)
        except JSONValueError:
            return MISSING
        finally:
            self._underway.discard(plan)

    def _fits(self, plan: Plan) -> Callable[[Any], bool]:
        # A declared default that its own schema refuses is used all the same, and refused with all around it.
        return lambda made: self._declared or plan.accepts(made)

    def _candidates(self, plan: Plan) -> Iterator[Any]:
        if plan.choices:
            for chosen in _picked(plan):
                made = self.create(chosen)
                if made is not MISSING:
                    yield made
            return
        if plan.constants is not None:
            yield from map(to_json, plan.constants)
            return
        for name in plan.likely_types:
            if name == "object":
                yield from self._object(plan)
            elif name == "array":
                yield from self._array(plan)
            else:
                yield from _scalars(plan, name)

    def _object(self, plan: Plan) -> Iterator[Any]:
        made: dict[str, Any] = {}
        for name, field in plan.fields.items():
            part = plan.part(field.sites)
            value = self.create(part) if name in plan.required else self._default(part, False)
            if value is not MISSING:
                made[name] = value
            elif name in plan.required:
                return
        yield made

    def _array(self, plan: Plan) -> Iterator[Any]:
        most = plan.most_items
        count = max(plan.places, plan.least_items)
        count = count if most is None else min(count, most)
        if count <= _MAX_MADE:
            made: list[Any] = []
            for index in range(count):
                made.append(self.create(plan.part(plan.place(index))))
                if made[-1] is MISSING:
                    return
            yield made


def _picked(plan: Plan) -> Iterator[Plan]:
    """Yield `plan` with its choices made: each member of the first union, with the first of every other."""
    unions = [choice.members for choice in plan.choices if choice.members]
    conditions = tuple(choice.otherwise for choice in plan.choices if choice.otherwise)
    if not unions:
        yield plan.pick(conditions)
        return
    for index in range(max(map(len, unions))):
        yield plan.pick(tuple(members[min(index, len(members) - 1)] for members in unions))


def _scalars(plan: Plan, name: str) -> Iterator[Any]:
    if name == "string":
        length = max((int(least) for least in plan.keyword("minLength")), default=0)
        if length <= _MAX_MADE:
            yield " " * length
    elif name == "boolean":
        yield from (False, True)
    elif name == "null":
        yield None
    else:
        yield from _numbers(plan, whole=name == "integer")


def _numbers(plan: Plan, *, whole: bool) -> Iterator[Any]:
    """Yield the lower bound if there is one, else 0, else what lies just inside the other bounds."""
    lows = [low for low in plan.keyword("minimum") if not isinstance(low, bool)]
    above = [low for low in plan.keyword("exclusiveMinimum") if not isinstance(low, bool)]
    highs = [high for high in plan.keyword("maximum") if not isinstance(high, bool)]
    below = [high for high in plan.keyword("exclusiveMaximum") if not isinstance(high, bool)]
    for low in lows:
        yield ceil(low) if whole else low
    yield 0
    for low in (*lows, *above):
        yield floor(low) + 1
    for high in (*highs, *below):
        yield floor(high)
        yield ceil(high) - 1
    for low, high in zip(above or lows, below or highs, strict=False):
        if not whole:
            yield (low + high) / 2
    for step in plan.keyword("multipleOf"):
        for low in (*lows, *above):
            yield step * ceil(low / step)
            yield step * (floor(low / step) + 1)
        for high in (*highs, *below):
            yield step * floor(high / step)
