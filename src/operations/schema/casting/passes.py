"""Casting a value so that it fits its schema: a quick pass, and a thorough one where that is not enough.

Rule 1: what the quick pass gives is checked; only what is valid is taken.
Rule 2: a cast never makes a valid value invalid. Where stripping would, the value stays whole.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

from operations._json import (
    MAX_DEPTH,
    JSONValueError,
    canonical,
    is_list,
    is_object,
    pointer,
    to_json,
    unescape,
)
from operations.schema.casting.repairing import Repairer
from operations.schema.casting.stripping import GaveUpError, Stripper, exact_strip
from operations.schema.planning.assertions import same, shown, type_of
from operations.schema.planning.leaves import scalar_types
from operations.schema.planning.plans import Planner
from operations.schema.results import Repair

Normalise: TypeAlias = Callable[[Any], tuple[Any, list[Repair] | None]]
"""Takes a value; gives the one that fits, and its repairs. None instead means: valid, without any.

Raises `JSONValueError` if some part that the schema does not strip is not JSON and cannot become it.
"""


_JSON = frozenset({dict, list, str, int, float, bool, type(None)})

_MAX_ROUNDS = 8
"""How often a cast is repeated for unions whose members depend on each other's defaults."""

_CONTAINERS: dict[type, str] = {dict: "object", list: "array"}

_VALID_AS_THEY_ARE: frozenset[type] = frozenset({int, bool, type(None)})
"""Types that have no value outside JSON."""


def build_normalise(planner: Planner) -> Normalise:
    """The cast of one document."""
    cast = _Cast(planner)

    def normalise(value: Any) -> tuple[Any, list[Repair] | None]:
        try:
            stripped = cast.quick(value)
        except (GaveUpError, ValueError):
            pass
        else:
            # Most values end here.
            return cast.settle(value, stripped, None) if planner.unstable else (stripped, None)
        result, repairs = cast.once(value)
        if repairs or planner.unstable:
            return cast.settle(value, result, repairs)
        return result, repairs

    return normalise


def certain_types(planner: Planner) -> frozenset[type]:
    """The types whose every value is valid as it is."""
    root = planner.root()
    if not root.is_bare:
        return frozenset()
    return scalar_types(root.types or ()) & _VALID_AS_THEY_ARE


class _Cast:
    """The parts of a cast.

    Attributes:
        quick: Takes a value and gives the one that fits; raises `GaveUpError` or `ValueError` where more than
            stripping is needed.
    """

    def __init__(self, planner: Planner) -> None:
        self._accepts = planner.checker.accepts
        self._repairer = Repairer(planner)
        self._stripper = Stripper(planner, self._repairer)
        self._root = planner.root()
        self._stage = self._stripper.stage(self._root)
        self.quick: Callable[[Any], Any] = self._choose

    def _choose(self, value: Any) -> Any:
        """The first value decides that a cast is needed at all, and pays for finding the quickest way."""
        shape = self._stripper.shaper.shape(self._root)
        typed = shape is not None and shape.exact and shape.depth > 0
        if self._root.is_bare:
            self.quick = self._bare
        else:
            self.quick = exact_strip(shape.type) if shape and typed else self._checked
        return self.quick(value)

    def _bare(self, value: Any) -> Any:
        """Where a container of any kind will do, being JSON is all that is asked of it."""
        name = _CONTAINERS.get(type(value))  # pyright: ignore[reportUnknownArgumentType]
        return to_json(value) if name and self._root.allows(name) else self._checked(value)

    def _checked(self, value: Any) -> Any:
        stripped = self._stage.strip(value, MAX_DEPTH)
        if not self._accepts(stripped):
            raise GaveUpError
        return stripped

    def settle(
        self, value: Any, result: Any, repairs: list[Repair] | None
    ) -> tuple[Any, list[Repair] | None]:
        """Cast again what `value` was cast to, until it stays.

        Other members of a union may match once excess is gone and defaults are there, and a declared
        default need not be valid itself.
        """
        seen = {canonical(result): (result, repairs)}
        for _ in range(_MAX_ROUNDS):
            again, more = self.once(result)
            text = canonical(again)
            if text in seen:
                # It stays, or goes round in a circle, of which one value stands for all.
                circle = list(seen)[list(seen).index(text) :]
                return seen[min(circle)]
            # What was repaired and has gone since is no repair of the result.
            said = [r for r in (*(repairs or ()), *(more or ())) if _has_place(again, r.path)]
            said += _unsaid(value, again, {repair.path for repair in said})
            result, repairs = again, said or more
            seen[text] = (result, repairs)
        return result, repairs

    def once(self, value: Any) -> tuple[Any, list[Repair] | None]:
        """Both passes, one after the other."""
        try:
            stripped = self._stage.strip(value, MAX_DEPTH)
            if self._accepts(stripped):
                return stripped, None
            if self._is_valid(value):
                return to_json(value), None
        except (GaveUpError, ValueError):
            pass
        result, repairs = self._repairer.repair(value)
        if self._accepts(result):
            return result, repairs or None
        if self._is_valid(value):
            return to_json(value), None
        return result, repairs

    def _is_valid(self, value: Any) -> bool:
        """Whether `value` is valid as it stands, excess and all."""
        try:
            return self._accepts(to_json(value))
        except JSONValueError:
            return False


def _has_place(value: Any, path: str) -> bool:
    """Whether a JSON pointer leads somewhere."""
    for token in path.split("/")[1:]:
        name = unescape(token)
        if is_object(value) and name in value:
            value = value[name]
        elif is_list(value) and int(name) < len(value):
            value = value[int(name)]
        else:
            return False
    return True


def _unsaid(value: Any, result: Any, said: set[str], path: str = "") -> list[Repair]:
    """Repairs for what differs without a word: stripped as excess, then filled by a default."""
    if path in said:
        return []
    both: list[tuple[str | int, Any, Any]]
    if is_object(value) and is_object(result):
        both = [(name, value[name], result[name]) for name in value if name in result]
    elif is_list(value) and is_list(result) and len(value) == len(result):
        both = [(index, *pair) for index, pair in enumerate(zip(value, result, strict=True))]
    elif type(value) not in _JSON or same(value, result):
        return []
    else:
        return [Repair(path, "replaced", f"was {type_of(value)} and is now {shown(result)}")]
    return [
        repair
        for token, before, after in both
        for repair in _unsaid(before, after, said, path + pointer(token))
    ]
