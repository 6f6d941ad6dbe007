"""Which member of a union a value comes nearest to, when it matches none.

100 points for a property that equals its constant, 10 for one that is valid, 1 for one that is there at all.
"""

from typing import Any

from operations.schema.assertions import same
from operations.schema.kinds import is_object
from operations.schema.plans import Plan
from operations.schema.references import Site

_LITERAL, _VALID, _PRESENT = 100, 10, 1


def nearest(plan: Plan, members: tuple[Site, ...], value: Any) -> Site:
    """The member with the most points; of several the first."""
    scores: dict[Plan, int] = {}
    return max(members, key=lambda member: _score(plan.member(member), value, scores))


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
