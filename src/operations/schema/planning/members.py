"""Which members of a union a value belongs to, and which it comes nearest to when it belongs to none.

100 points for a property that equals its constant, 10 for one that is valid, 1 for one that is there at all.
"""

from collections.abc import Callable, Iterable
from typing import Any

from operations._json import is_object
from operations.schema.planning.assertions import same, type_of
from operations.schema.planning.conversion import conversions
from operations.schema.planning.plans import Plan, Planner
from operations.schema.reading.references import Site

_LITERAL, _VALID, _PRESENT = 100, 10, 1

Attempt = Callable[[Plan], int | None]
"""Casts the value into one member; returns how many conversions it took, or None if those are not enough."""


def matching(planner: Planner, members: Iterable[Site], value: Any, attempt: Attempt) -> list[Site]:
    """The members that `value` is valid for: as it is, else without excess, else with one converted.

    Of those that take a conversion the first alone; of the others all.
    """
    plans = [(member, planner.plan((member,))) for member in members]
    fitting = [member for member, plan in plans if plan.accepts(value)]
    if isinstance(value, float):
        # 3.0 is an integer too, but where a number will do it may stay a float.
        numbers = [member for member, plan in plans if member in fitting and plan.allows("number")]
        fitting = numbers or fitting
    converted: list[Site] = []
    if not fitting:
        for member, plan in plans:
            count = attempt(plan) if _is_plausible(plan, value) else None
            if count is not None:
                (converted if count else fitting).append(member)
    return fitting or converted[:1]


def nearest(planner: Planner, members: Iterable[Site], value: Any) -> Site:
    """The member with the most points; of several the first."""
    scoring = _Scoring(value)
    return max(members, key=lambda member: scoring.points(planner.plan((member,))))


def _is_plausible(plan: Plan, value: Any) -> bool:
    """Whether a value could fit without anything being replaced: so far as its type and its tags say."""
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
    """The points of the members of one union. What several members ask is asked once."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._points: dict[Plan, int] = {}
        self._valid: dict[tuple[Plan, str], bool] = {}

    def points(self, plan: Plan) -> int:
        """The points of one member; a union inside it has those of its best."""
        if plan not in self._points:
            nested = sum(
                max(self.points(plan.member(member)) for member in choice.members)
                for choice in plan.choices
                if choice.members
            )
            self._points[plan] = self._own(plan) + nested or int(plan.accepts(self._value))
        return self._points[plan]

    def _own(self, plan: Plan) -> int:
        value = self._value
        if not is_object(value) or not plan.allows("object"):
            return 0
        points = 0
        for name, field in plan.fields.items():
            if name in value and field.sites:
                part = plan.part(field.sites)
                points += _PRESENT
                if part.constants is not None and len(part.constants) == 1:
                    points += _LITERAL * same(value[name], part.constants[0])
                if (part, name) not in self._valid:
                    self._valid[part, name] = part.accepts(value[name])
                points += _VALID * self._valid[part, name]
        return points
