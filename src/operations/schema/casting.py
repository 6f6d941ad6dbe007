"""Casting a value so that it fits its schema: a quick pass, and a thorough one where that is not enough.

Rule 1: what the quick pass gives is checked; only what is valid is taken.
Rule 2: a cast never makes a valid value invalid. Where stripping would, the value stays whole.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

from operations._json import MAX_DEPTH, JSONValueError, to_json
from operations.schema.leaves import leaf_types
from operations.schema.plans import MISSING, Planner
from operations.schema.repairing import Repairer
from operations.schema.results import Repair
from operations.schema.stripping import GaveUpError, Stripper

Normalise: TypeAlias = Callable[[Any], tuple[Any, list[Repair] | None]]
"""Takes a value; gives the one that fits, and its repairs. None instead means: valid, without any.

Raises `JSONValueError` if some part that the schema does not strip is not JSON and cannot become it.
"""


def build_normalise(planner: Planner) -> Normalise:
    """The cast of one document."""
    repairer = Repairer(planner)
    root, accepts = planner.root(), planner.checker.accepts
    stage = Stripper(planner, repairer).stage(root)
    scalars = leaf_types(root) or frozenset()

    def normalise(value: Any) -> tuple[Any, list[Repair] | None]:
        stripped = MISSING
        try:
            stripped = value if type(value) in scalars else stage.strip(value, MAX_DEPTH)
            if accepts(stripped):
                return stripped, None
        except (GaveUpError, ValueError):
            pass
        return repair(value, stripped is not MISSING)

    def repair(value: Any, stripped: bool) -> tuple[Any, list[Repair] | None]:
        if stripped and is_valid(value):
            return to_json(value), None
        result, repairs = repairer.repair(value)
        if accepts(result):
            return result, repairs or None
        if is_valid(value):
            return to_json(value), None
        return result, repairs

    def is_valid(value: Any) -> bool:
        """Whether `value` is valid as it stands, excess and all."""
        try:
            return accepts(to_json(value))
        except JSONValueError:
            return False

    return normalise
