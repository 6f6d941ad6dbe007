"""Which members of a union a value belongs to, and which it comes nearest to when it belongs to none.

100 points for a property that equals its constant, 10 for one that is valid, 1 for one that is there at all.
"""

from collections.abc import Callable, Iterable
from typing import Any

from operations.schema.assertions import same, type_of
from operations.schema.conversion import conversions
from operations.schema.kinds import is_object
from operations.schema.plans import Plan, Planner
from operations.schema.references import Site
from operations.schema.results import Repair

_LITERAL, _VALID, _PRESENT = 100, 10, 1

Attempt = Callable[[Plan], list[Repair] | None]
"""Casts the value into one member; gives the conversions that took, or None if conversions are not enough."""


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
            repairs = attempt(plan) if _is_plausible(plan, value) else None
            if repairs is not None:
                (converted if repairs else fitting).append(member)
    return fitting or converted[:1]


def nearest(planner: Planner, members: Iterable[Site], value: Any) -> Site:
    """The member with the most points; of several the first."""
    scores: dict[Plan, int] = {}
    return max(members, key=lambda member: _score(planner.plan((member,)), value, scores))


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
    if plan.constants is None or any(same(value, constant) for constant in plan.constants):
        return True
    converted = () if isinstance(value, (dict, list)) else conversions(value, plan.types or ())
    return any(same(other, constant) for other in converted for constant in plan.constants)


def _score(plan: Plan, value: Any, scores: dict[Plan, int]) -> int:
    """The points of one member. `scores` keeps those of nested unions from being counted twice."""
    if plan not in scores:
        scores[plan] = 0
        nested = [
            max(_score(plan.member(member), value, scores) for member in choice.members)
            for choice in plan.choices
            if choice.members
        ]
        own = _properties(plan, value) if is_object(value) and plan.allows("object") else 0
        scores[plan] = own + sum(nested) or int(plan.accepts(value))
    return scores[plan]


def _properties(plan: Plan, value: dict[str, Any]) -> int:
    points = 0
    for name, (sites, *_) in plan.fields.items():
        if name not in value or not sites:
            continue
        part = plan.part(sites)
        points += _PRESENT
        if part.constants is not None and len(part.constants) == 1:
            points += _LITERAL * same(value[name], part.constants[0])
        points += _VALID * part.accepts(value[name])
    return points
