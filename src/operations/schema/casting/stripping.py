"""The quick pass of a cast: strip undeclared properties and fill declared defaults.

Rule 1: only containers and the types of scalars are examined, because the validator checks the result. Values that the
        validator does not visit are converted by `to_json`.
Rule 2: an object that a msgspec type describes is processed in C.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from msgspec import json

from operations.base.json.values import MAX_DEPTH, SCALARS, Path, as_json, to_json
from operations.base.work import PIECE, Work
from operations.schema.casting.structs import Shaper
from operations.schema.casting.thorough import Pass, applied, placed
from operations.schema.casting.typed import NeedsRepair, TypedStrip
from operations.schema.members import fitting_of, union_of
from operations.schema.plans import Plan
from operations.schema.references import Site


class StrippingPass(Pass):
    """A pass that raises `NeedsRepair` for a value that needs more than stripping and filling.

    It has no state, so that one object serves all values of one document, or of all documents that share definitions.

    Args:
        thorough: Provides the declared defaults.
        work: The budget.
    """

    trusts = True
    is_free = True
    """Whether the value is known to be small, so that the work is not counted."""

    def __init__(self, thorough: Pass, work: Work) -> None:
        super().__init__(thorough.planner, work)
        self._thorough = thorough
        most = self.planner.scope.max_plans // 25
        self._shaper = Shaper(self.default, most=most)
        self._closed = Shaper(self.default, closed=True, most=most)
        self._typed: dict[Plan, TypedStrip | None] = {}

    def within(self, work: Work) -> "StrippingPass":
        """Return the pass with another budget."""
        found = object.__new__(StrippingPass)
        found.__dict__.update(self.__dict__)
        found.work = work
        found.is_free = False
        found.made = self.planner.made
        return found

    def typed(self, plan: Plan, *, is_root: bool = False) -> "TypedStrip | None":
        """Return the pass of a simple plan by a msgspec type; None for other plans.

        Args:
            plan: The plan.
            is_root: Whether it casts whole values, which may be objects.
        """
        shape = self._shaper.shape(plan)
        with suppress(TypeError, ValueError):  # msgspec does not support the type.
            closed = self._closed.shape(plan) if is_root else None
            if shape is None:
                return None
            # The result is checked as well, unless the type is exact. Most values have several bytes.
            most = PIECE if shape.exact else min(PIECE, 4 * PIECE // plan.weight)
            return TypedStrip(shape, closed, most)
        return None

    def check_text(self, plan: Plan) -> Callable[[bytes], Any] | None:
        """Return a function that raises `REFUSALS` unless a JSON text is valid and needs no change.

        None if no type expresses the whole plan.
        """
        shape, closed = self._shaper.shape(plan), self._closed.shape(plan)
        if shape is None or closed is None or not shape.exact:
            return None
        with suppress(TypeError, ValueError):  # msgspec does not support the type.
            return json.Decoder(closed.type).decode
        return None

    def find(self, plan: Plan) -> "TypedStrip | None":
        """Return the pass of a plan for containers by a msgspec type, which is created once."""
        if plan not in self._typed:
            self._typed[plan] = self.typed(plan) if plan.leaf_types is None else None
        return self._typed[plan]

    def cast(self, plan: Plan, value: Any, path: Path = (), levels: int = MAX_DEPTH) -> Any:
        """Strip and fill a value."""
        if type(value) not in SCALARS:
            typed = self.find(plan)
            if typed is not None and levels >= typed.shape.depth:
                # Otherwise the types are not JSON, or the shape differs.
                with suppress(NeedsRepair):
                    return typed.strip(value, None if self.is_free else self.work)[0]
        return self.repair(plan, value, path, levels)

    def whole(self, plan: Plan, value: Any, path: Path, levels: int) -> Any:
        """Return a scalar of an allowed type, or a container among constants."""
        is_scalar = type(value) in SCALARS
        if is_scalar and plan.scalars is not None and type(value) not in plan.scalars:
            raise NeedsRepair
        if not is_scalar and plan.constants is None:
            raise NeedsRepair
        return placed(to_json, value, path, levels, self.work)

    def choose(self, plan: Plan, value: Any, path: Path, levels: int) -> Any:
        """Select the member of a union by the type of the value if possible, else by the validator of each member."""
        if type(value) in SCALARS:
            return self.whole(plan, value, path, levels)
        if self.planner.scope.recursive:
            # A recursive validator must not process deeper data.
            as_json(value, levels)
        self.planner.undecided += plan.is_unstable
        picks: list[Site] = []
        for choice in plan.choices:
            if not choice.members:
                picks += applied(plan, choice, value, self.work)
                continue
            union = union_of(self.planner, choice.members)
            members = union.candidates(value)
            is_only = len(members) == 1
            if is_only:
                fitting = [members[0][0]]
            elif self.is_free:
                fitting = [site for site, part in members if part.accepts(value)]
            else:
                fitting = fitting_of(members, value, self.work)
            named = choice.named(value)
            if not fitting or not (named is None or named in fitting):
                raise NeedsRepair
            picks += fitting
        return self.cast(plan.pick(tuple(picks)), value, path, levels)

    def default(self, plan: Plan, required: bool) -> Any:
        """Return the declared default, which may be converted."""
        free = self._thorough.work
        before = free.left
        found = self._thorough.default(plan, required)
        self.work.spend(before - free.left)
        return found
