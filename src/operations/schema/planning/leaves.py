"""Plans of scalars alone, by the exact Python types they take."""

from functools import lru_cache

from operations.schema.planning.plans import Plan

_PYTHON: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "object": (),
    "array": (),
}


@lru_cache
def scalar_types(names: tuple[str, ...]) -> frozenset[type]:
    """The Python types of the scalars among the JSON types `names`."""
    return frozenset(kind for name in names for kind in _PYTHON[name])


def leaf_types(plan: Plan) -> frozenset[type] | None:
    """The exact types of the scalars `plan` takes, if it takes nothing else and says which; else None.

    The validator looks at all such scalars, so nothing else has to.
    """
    if not plan.leaves_known:
        plan.leaves = known_scalars(plan) if _takes_no_container(plan) else None
        plan.leaves_known = True
    return plan.leaves


def known_scalars(plan: Plan) -> frozenset[type] | None:
    """The exact types of the scalars `plan` takes beside containers; None where it does not say."""
    said = [] if plan.types is None else [scalar_types(plan.types)]
    for choice in plan.choices:
        members = [known_scalars(plan.member(member)) for member in choice.members]
        known = [member for member in members if member is not None]
        if known and len(known) == len(members):
            said.append(frozenset[type]().union(*known))
    if len(said) < 2:
        # Not an intersection with nothing, which would be a copy for every plan.
        return said[0] if said else None
    return said[0].intersection(*said[1:])


def _takes_no_container(plan: Plan) -> bool:
    if plan.opaque:
        return False
    if plan.types is not None and not plan.allows("object") and not plan.allows("array"):
        return True
    return any(
        choice.members
        and all(leaf_types(plan.member(member)) is not None for member in choice.members)
        for choice in plan.choices
    )
