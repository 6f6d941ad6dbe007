"""Plans of scalars alone, by the exact Python types they take."""

from collections.abc import Iterable

from operations.schema.plans import Plan

_PYTHON: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "object": (),
    "array": (),
}


def scalar_types(names: Iterable[str]) -> frozenset[type]:
    """The Python types of the scalars among the JSON types `names`."""
    return frozenset(kind for name in names for kind in _PYTHON[name])


def leaf_types(plan: Plan) -> frozenset[type] | None:
    """The exact types of the scalars `plan` takes, if it takes nothing else and says which; else None.

    The validator looks at all such scalars, so nothing else has to.
    """
    if not plan.leaves_known:
        plan.leaves, plan.leaves_known = _leaf_types(plan), True
    return plan.leaves


def _leaf_types(plan: Plan) -> frozenset[type] | None:
    allowed: frozenset[type] | None = None
    if plan.opaque:
        return None
    if plan.types is not None:
        if plan.allows("object") or plan.allows("array"):
            return None
        allowed = scalar_types(plan.types)
    for choice in plan.choices:
        if not choice.members:
            continue
        members = [leaf_types(plan.member(member)) for member in choice.members]
        known = [member for member in members if member is not None]
        if len(known) == len(members):
            either = frozenset[type]().union(*known)
            allowed = either if allowed is None else allowed & either
    return allowed
