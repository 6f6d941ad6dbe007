"""Check values within a budget: in one native call if it is short enough, else part by part.

Rule 1: the cost of a check is estimated as the number of values times the number of schemas along one path into the
        data, plus the length of texts times the length of patterns.
Rule 2: a value is divided only if its validity is that of its parts, apart from keywords that are tested here. If a
        keyword reads the whole value (`contains`, `not`, `enum` and others), the check cannot be divided.
"""

from typing import Any

import msgspec

from operations.base.json.values import count_values, is_object
from operations.base.work import PIECE, STEP, BudgetSpentError, Work
from operations.schema.plans import Plan
from operations.schema.values import flat_failures, type_of

_pack = msgspec.msgpack.Encoder().encode
_encode = msgspec.json.Encoder().encode

_CALL = 16
"""The units of a native call, beside those of its value."""

_TESTED = frozenset({
    "maxItems", "maxProperties", "minItems", "minProperties", "required", "type", "uniqueItems",
})  # fmt: skip
"""Keywords that are tested without the parts of a value."""

_OF_PARTS = frozenset({
    "additionalItems", "additionalProperties", "items", "patternProperties", "prefixItems", "properties",
    "propertyNames",
})  # fmt: skip
_OF_SCALARS = frozenset({
    "exclusiveMaximum", "exclusiveMinimum", "maxLength", "maximum", "minLength", "minimum", "multipleOf", "pattern",
})  # fmt: skip
_DIVISIBLE = _TESTED | _OF_PARTS | _OF_SCALARS | {"anyOf", "oneOf"}


def size_of(value: Any) -> int:
    """Return an upper bound of the number of JSON values, and of characters, in `value`."""
    try:
        return len(_pack(value))
    except (OverflowError, TypeError, UnicodeEncodeError, ValueError):
        # For integers of more than 64 bits and lone surrogates. These are rare, so that the time does not matter.
        return count_values(value, PIECE)


def most_values(value: Any) -> int:
    """Return an upper bound of the number of JSON values in `value`, in C: it includes commas in texts."""
    try:
        text = _encode(value)
    except (OverflowError, TypeError, UnicodeEncodeError, ValueError):
        return count_values(value, PIECE)
    return text.count(b",") + text.count(b"[") + text.count(b"{") + 1


def fits(plan: Plan, value: Any, work: Work) -> bool:
    """Return whether a JSON value is valid for `plan`.

    Raises:
        BudgetSpentError: If the budget does not suffice, or a large check cannot be divided.
    """
    kind = type(value)  # pyright: ignore[reportUnknownVariableType]
    if kind is dict or kind is list:
        return fits_sized(plan, value, size_of(value), work)
    cost = plan.width
    if kind is str and plan.pattern_length:
        cost += plan.pattern_length * len(value) * 2 // 5
        if cost > PIECE:
            raise BudgetSpentError
    work.spend(cost + _CALL)
    return plan.accepts(value)


def fits_sized(plan: Plan, value: Any, size: int, work: Work) -> bool:
    """Return whether a container is valid, as `fits`, if `size_of(value)` is known."""
    cost = size * plan.weight
    if cost > PIECE:
        # Encoded twice, and again at each level at which the check is divided.
        work.spend(size // 2)
        cost = most_values(value) * plan.width + size * (plan.weight - plan.width)
        if cost > PIECE:
            return _divided(plan, value, work)
    # As `Work.spend`, without the call.
    work.left -= cost + _CALL
    if work.left < 0 or work.is_stopped:
        raise BudgetSpentError
    return plan.accepts(value)


def _divided(plan: Plan, value: Any, work: Work) -> bool:
    work.spend(STEP)
    if plan.opaque or not plan.assertions <= _DIVISIBLE:
        raise BudgetSpentError
    chosen = _chosen(plan, value)
    return (
        chosen is not None
        and _fits_apart_from_parts(plan, value, work)
        and all(fits(member, value, work) for member in chosen)
        and (_object_fits if is_object(value) else _array_fits)(plan, value, work)
    )


def _fits_apart_from_parts(plan: Plan, value: Any, work: Work) -> bool:
    for facet in plan.facets:
        tested = {key: held for key, held in facet.keywords.items() if key in _TESTED}
        if "uniqueItems" in tested:
            # Compared in Python.
            work.spend(size_of(value) * STEP)
        if any(True for _ in flat_failures(tested, value)):
            return False
    return not is_object(value) or all(name in value for name in plan.required)


def _chosen(plan: Plan, value: Any) -> list[Plan] | None:
    """Return the only member of each union that the type of a value permits; None if there is none."""
    found: list[Plan] = []
    for choice in plan.choices:
        kind = type_of(value)
        members = [member for member in map(plan.member, choice.members) if member.allows(kind)]
        if not members:
            return None
        if len(members) > 1:
            raise BudgetSpentError
        found += members
    return found


def _object_fits(plan: Plan, value: Any, work: Work) -> bool:
    for name, item in value.items():
        work.spend(STEP + len(name) * (plan.weight - plan.width))
        if not all(fits(names, name, work) for names in plan.names):
            return False
        field = plan.field(name)
        if field.barred or (field.sites and not fits(plan.part(field.sites), item, work)):
            return False
    return True


def _array_fits(plan: Plan, value: Any, work: Work) -> bool:
    most = plan.most_items
    if most is not None and len(value) > most:
        return False
    first, rest = plan.items
    return all(fits(part, item, work) for part, item in zip(first, value, strict=False)) and all(
        fits(rest, item, work) for item in value[len(first) :]
    )
