"""The quick pass of a cast: strip undeclared properties and fill declared defaults.

Rule 1: only containers and the types of scalars are examined, because the validator checks the result. Values that the
        validator does not visit are converted by `to_json`.
Rule 2: an object that a msgspec type describes is processed in C.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from msgspec import ValidationError, json, msgpack

from operations._json import MAX_DEPTH, SCALARS, Path, as_json, to_json
from operations._objects import holds_models, holds_objects, pack_objects, without_objects
from operations.schema.casting.changes import is_unchanged
from operations.schema.casting.structs import PlanType, Shaper
from operations.schema.casting.thorough import NeedsRepair, Pass, applied, placed
from operations.schema.members import union_of
from operations.schema.plans import Plan
from operations.schema.references import Site

pack = msgpack.Encoder().encode
REFUSALS = (LookupError, NotImplementedError, OverflowError, TypeError, ValueError)
"""The exceptions raised for a value that a type does not accept, when it is encoded, decoded or finished."""


class StrippingPass(Pass):
    """A pass that raises `NeedsRepair` for a value that needs more than stripping and filling.

    It has no state, so that one object serves all values of one document, or of all documents that share definitions.

    Args:
        thorough: Provides the declared defaults.
    """

    trusts = True

    def __init__(self, thorough: Pass) -> None:
        super().__init__(thorough.planner)
        self._thorough = thorough
        most = self.planner.scope.max_plans // 25
        self._shaper = Shaper(self.default, most=most)
        self._closed = Shaper(self.default, closed=True, most=most)
        self._typed: dict[Plan, TypedStrip | None] = {}

    def typed(self, plan: Plan, *, is_root: bool = False) -> "TypedStrip | None":
        """Return the pass of a simple plan by a msgspec type; None for other plans.

        Args:
            plan: The plan.
            is_root: Whether it casts whole values, which may be objects.
        """
        shape = self._shaper.shape(plan)
        with suppress(TypeError, ValueError):  # msgspec does not support the type.
            closed = self._closed.shape(plan) if is_root else None
            return None if shape is None else TypedStrip(shape, closed)
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

    def cast(self, plan: Plan, value: Any, path: Path = (), levels: int = MAX_DEPTH) -> Any:
        """Strip and fill a value."""
        if type(value) not in SCALARS:
            if plan not in self._typed:
                self._typed[plan] = self.typed(plan) if plan.leaf_types is None else None
            typed = self._typed[plan]
            if typed is not None and levels >= typed.shape.depth:
                # Otherwise the types are not JSON, or the shape differs.
                with suppress(NeedsRepair):
                    return typed.strip(value)[0]
        return super().cast(plan, value, path, levels)

    def whole(self, plan: Plan, value: Any, path: Path, levels: int) -> Any:
        """Return a scalar of an allowed type, or a container among constants."""
        is_scalar = type(value) in SCALARS
        if is_scalar and plan.scalars is not None and type(value) not in plan.scalars:
            raise NeedsRepair
        if not is_scalar and plan.constants is None:
            raise NeedsRepair
        return placed(to_json, value, path, levels)

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
                picks += applied(plan, choice, value)
                continue
            union = union_of(self.planner, choice.members)
            members = union.candidates(value)
            if len(members) == 1:
                fitting = [members[0][0]]
            else:
                fitting = [site for site, part in members if part.accepts(value)]
            named = choice.named(value)
            if not fitting or not (named is None or named in fitting):
                raise NeedsRepair
            picks += fitting
        return self.cast(plan.pick(tuple(picks)), value, path, levels)

    def default(self, plan: Plan, required: bool) -> Any:
        """Return the declared default, which may be converted."""
        return self._thorough.default(plan, required)


class TypedStrip:
    """Strips, fills and checks values by a type, in C.

    A value is encoded as MessagePack and decoded again. The result therefore shares no object with the value and
    contains only JSON: invalid Unicode cannot be encoded, and a decimal is encoded as text.

    Args:
        shape: The type.
        closed: The type of values that need no change, if it is known.

    Attributes:
        shape: The type.
        decode: Decodes a value that `pack` encoded.

    Raises:
        TypeError, ValueError: If msgspec does not support the type.
    """

    def __init__(self, shape: PlanType, closed: PlanType | None = None) -> None:
        self.shape = shape
        self.decode: Callable[[bytes], Any] = msgpack.Decoder(shape.type).decode
        self._check = None if closed is None else msgpack.Decoder(closed.type).decode
        self._packs = True
        """Whether objects are packed directly; False after one with a special type, such as an aware datetime."""

    def strip(self, value: Any) -> tuple[Any, bool]:
        """Return a value stripped and filled, and whether that changed it.

        Raises:
            NeedsRepair: If the type does not accept the value.
        """
        finish, must_finish = self.shape.finish, self.shape.must_finish
        try:
            if type(value) is not dict and holds_objects(value):
                if self._packs and not holds_models(value):
                    packed = pack_objects(value)
                    try:
                        result = self.decode(packed)
                    except ValidationError:
                        self._packs = False
                    else:
                        differs = pack(result) != packed
                        if must_finish and finish is not None:
                            differs = finish([result], [result]) or differs
                        return result, differs
                value = without_objects(value)
                if self._is_clean(value):
                    return value, False
            result = self.decode(pack(value))
            if finish is None or (not must_finish and is_unchanged(value, result)):
                return result, False
            return result, finish([value], [result])
        except REFUSALS:
            raise NeedsRepair from None

    def _is_clean(self, value: Any) -> bool:
        """Return whether a value is known to need no change."""
        if self._check is None:
            return False
        try:
            self._check(pack(value))
        except ValidationError:
            return False
        return True
