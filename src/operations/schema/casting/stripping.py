"""The quick pass of a cast, compiled to closures: strips undeclared properties and fills defaults, without conversions.

Most values are valid except for undeclared properties and missing defaults. This pass copies the planned properties;
the validator checks scalars afterwards, in one call. If a value needs another change, the pass raises `NeedsRepair`,
and `thorough` casts the value instead.

Rule 1: every container in the result is new, and every scalar has an exact JSON type that the validator checks. Values
        that the validator does not visit are converted by `to_json`.
Rule 2: for speed, this pass builds no paths and no reports, and allocates only the result.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

from msgspec import ValidationError, json, msgpack

from operations._json import (
    JSON_TYPES,
    SCALARS,
    JSONValueError,
    as_json,
    lift,
    to_json,
)
from operations._objects import dumped_models, holds_objects, pack_objects, without_objects
from operations.schema.casting.changes import is_unchanged
from operations.schema.casting.structs import PlanType, Shaper
from operations.schema.casting.thorough import applied
from operations.schema.plans import (
    MISSING,
    Choice,
    Plan,
    Planner,
    known_scalars,
    scalar_types,
)
from operations.schema.references import Site

Strip: TypeAlias = Callable[[Any, int], Any]
"""Takes a value and its allowed depth; returns the stripped copy."""

pack = msgpack.Encoder().encode
REFUSALS = (LookupError, NotImplementedError, OverflowError, TypeError, ValueError)
"""The exceptions raised for a value that a type does not accept, when it is encoded, decoded or finished."""


class NeedsRepair(Exception):  # noqa: N818 - a signal between two passes, not an error
    """The value needs more than stripping and filling."""


class _Stage:
    """The closure of one plan, compiled when data first reaches it."""

    __slots__ = ("_plan", "_stripper", "strip")

    def __init__(self, stripper: "Stripper", plan: Plan) -> None:
        self._stripper = stripper
        self._plan = plan
        self.strip: Strip = self._compile_and_strip

    def _compile_and_strip(self, value: Any, levels: int) -> Any:
        self.strip = self._stripper.compile(self._plan)
        return self.strip(value, levels)


class Stripper:
    """Compiles the plans of one document, or of all documents that share definitions.

    Args:
        planner: Creates the plans.
        default: Returns the default of a property, given its plan and whether it is required; or `MISSING`.
    """

    def __init__(self, planner: Planner, default: Callable[[Plan, bool], Any]) -> None:
        self._default = default
        self._planner = planner
        self._stages: dict[Plan, _Stage] = {}
        most = planner.scope.max_plans // 25
        self._shaper = Shaper(default, most=most)
        self._closed = Shaper(default, closed=True, most=most)

    def stage(self, plan: Plan) -> _Stage:
        """Return the stage with the closure of `plan`, which may not be compiled yet."""
        found = self._stages.get(plan)
        if found is None:
            found = self._stages[plan] = _Stage(self, plan)
        return found

    def compile(self, plan: Plan) -> Strip:
        """Return the closure of `plan`."""
        leaf = plan.leaf_types
        if leaf is not None:
            return _leaf_strip(leaf)
        if plan.is_unknown:
            return to_json
        general = self._choosing(plan) if plan.choices else self._general(plan)
        typed = self.typed(plan)
        return general if typed is None else _typed_or(typed, general)

    def typed(self, plan: Plan, *, checks: bool = False) -> "TypedStrip | None":
        """Return the pass of a simple plan by a msgspec type; None for other plans.

        Args:
            plan: The plan.
            checks: Whether the pass also has the checks for values that need no change.
        """
        shape = self._shaper.shape(plan)
        if shape is None:
            return None
        try:
            return TypedStrip(shape, self._closed.shape(plan) if checks else None)
        except (TypeError, ValueError):
            # msgspec does not support the type.
            return None

    def _general(self, plan: Plan) -> Strip:
        on_object = self._object(plan) if plan.allows("object") else _give_up
        on_array = self._array(plan) if plan.allows("array") else _give_up
        scalars = scalar_types(plan.types or ())
        typed = plan.types is not None

        def strip(value: Any, levels: int) -> Any:
            kind = type(value)  # pyright: ignore[reportUnknownVariableType]
            if kind is dict:
                return on_object(value, levels)
            if kind is list:
                return on_array(value, levels)
            if kind in scalars:
                return value
            if kind in SCALARS:
                if typed:
                    raise NeedsRepair
                return to_json(value)
            return strip(lift(value), levels)

        return strip

    # Objects

    def _object(self, plan: Plan) -> Strip:
        """Strip an object, keeping the order of its properties; declared defaults come last."""
        known: dict[Any, tuple[str, frozenset[type], _Stage | None]] = {}
        """The name of each declared property, and the allowed types of scalars or the closure for other values."""
        filled: list[tuple[str, Any]] = []
        for name, field in plan.fields.items():
            if not field.kept:
                continue
            part = plan.part(field.sites)
            leaf = part.leaf_types
            known[name] = name, leaf or _NO_TYPES, self.stage(part) if leaf is None else None
            default = MISSING if field.barred else self._default(part, name in plan.required)
            if default is not MISSING:
                filled.append((name, default))
        others = self._others(plan) if plan.keeps_unnamed else None
        planner = self._planner

        def strip(value: dict[Any, Any], levels: int) -> Any:
            if levels <= 0:
                raise NeedsRepair
            levels -= 1
            result: dict[str, Any] = {}
            for key, item in value.items():
                if key in known:
                    name, leaf, stage = known[key]
                    if type(item) in leaf:
                        result[name] = item
                    elif stage is None:
                        result[name] = _lifted(item, leaf)
                    else:
                        result[name] = stage.strip(item, levels)
                    continue
                if type(key) is not str:
                    raise NeedsRepair
                stage = None if others is None else others(key)
                if stage is not None:
                    key.encode()  # raises an error for invalid Unicode
                    result[key] = stage.strip(item, levels)
            for name, default in filled:
                if name not in value:
                    if type(default) in SCALARS:
                        result[name] = default
                    else:
                        result[name] = to_json(default)
                        planner.undecided += 1
            return result

        return strip

    def _others(self, plan: Plan) -> "Callable[[str], _Stage | None]":
        """Return the function that gives the closure of an undeclared property, or None to strip the property."""
        known: dict[str, _Stage | None] = dict.fromkeys(plan.fields)

        def stage_of(name: str) -> _Stage | None:
            if name in known:
                return known[name]
            field = plan.field(name)
            stage = self.stage(plan.part(field.sites)) if field.kept else None
            if len(known) < _MAX_NAMES:
                known[name] = stage
            return stage

        return stage_of

    # Arrays

    def _array(self, plan: Plan) -> Strip:
        others = plan.part(plan.place(plan.places))
        if others.is_unknown and not plan.places:
            return to_json
        first = [self.stage(plan.part(plan.place(index))) for index in range(plan.places)]
        rest = self.stage(others)

        def strip(value: list[Any], levels: int) -> Any:
            if levels <= 0:
                raise NeedsRepair
            levels -= 1
            result = [stage.strip(item, levels) for stage, item in zip(first, value, strict=False)]
            result += [rest.strip(item, levels) for item in value[len(first) :]]
            return result

        return strip

    # Choices

    def _choosing(self, plan: Plan) -> Strip:
        """Select the member of a union by the type of the value if possible, else by the validator of each member."""
        objects = [self._candidates(plan, choice, "object") for choice in plan.choices]
        arrays = [self._candidates(plan, choice, "array") for choice in plan.choices]
        planner, undecided = self._planner, int(plan.is_unstable)
        recursive = planner.scope.recursive
        scalars = known_scalars(plan)
        plain = scalars or frozenset()
        picked: dict[tuple[str, ...], _Stage] = {}

        def strip(value: Any, levels: int) -> Any:
            kind = type(value)  # pyright: ignore[reportUnknownVariableType]
            if kind in plain:
                return value
            if kind is not dict and kind is not list:
                if kind not in SCALARS:
                    return strip(lift(value), levels)
                if scalars is None:
                    return to_json(value)
                raise NeedsRepair
            if recursive:
                _enforce_depth(value, levels)
            planner.undecided += undecided
            picks: list[Site] = []
            for choice, members in zip(
                plan.choices, objects if kind is dict else arrays, strict=True
            ):
                if not choice.members:
                    picks += applied(plan, choice, value)
                elif len(members) == 1:
                    picks.append(members[0][0])
                else:
                    fitting = [site for site, part in members if part.accepts(value)]
                    named = choice.named(value)
                    if not fitting or not (named is None or named in fitting):
                        raise NeedsRepair
                    picks += fitting
            key = tuple(site.pointer for site in picks)
            stage = picked.get(key)
            if stage is None:
                stage = picked[key] = self.stage(plan.pick(tuple(picks)))
            return stage.strip(value, levels)

        return strip

    def _candidates(self, plan: Plan, choice: Choice, kind: str) -> list[tuple[Site, Plan]]:
        parts = [(member, plan.member(member)) for member in choice.members]
        return [(member, part) for member, part in parts if part.allows(kind)]


_NO_TYPES: frozenset[type] = frozenset()
_MAX_NAMES = 1_000
"""How many undeclared property names are cached."""


def _give_up(_value: Any, _room: int) -> Any:
    raise NeedsRepair


def _enforce_depth(value: Any, levels: int) -> None:
    """Require that a value is JSON and not nested too deeply, before a recursive validator processes it."""
    try:
        as_json(value, levels)
    except JSONValueError:
        raise NeedsRepair from None


def _typed_or(typed: "TypedStrip", general: Strip) -> Strip:
    strip_typed, depth = typed.strip, typed.shape.depth

    def strip(value: Any, levels: int) -> Any:
        if levels >= depth and type(value) not in SCALARS:
            try:
                return strip_typed(value)[0]
            except NeedsRepair:
                # The types are not JSON, or the shape differs: try the thorough pass.
                pass
        return general(value, levels)

    return strip


class TypedStrip:
    """Strips, fills and checks values by a type, in C.

    A value is encoded as MessagePack and decoded again. The result therefore shares no object with the value and
    contains only JSON: invalid Unicode cannot be encoded, and a decimal is encoded as text.

    Args:
        shape: The type.
        closed: The type of values that need no change, which also checks models that converted themselves to JSON.

    Attributes:
        shape: The type.
        decode: Decodes a value that `pack` encoded.
        check: Raises `REFUSALS` unless a packed value is known to need no change; None if unavailable.
        check_text: As `check`, for JSON text, which is then also valid; None if unavailable.

    Raises:
        TypeError, ValueError: If msgspec does not support the type.
    """

    def __init__(self, shape: PlanType, closed: PlanType | None) -> None:
        self.shape = shape
        self.decode: Callable[[bytes], Any] = msgpack.Decoder(shape.type).decode
        self.check: Callable[[bytes], Any] | None = None
        self.check_text: Callable[[bytes], Any] | None = None
        if closed is not None:
            self.check = msgpack.Decoder(closed.type).decode
            self.check_text = json.Decoder(closed.type).decode if shape.exact else None
        self._packs = True

    def strip(self, value: Any) -> tuple[Any, bool]:
        """Return a value stripped and filled, and whether that changed it.

        Raises:
            NeedsRepair: If the type does not accept the value.
        """
        finish, fills = self.shape.finish, self.shape.fills
        try:
            if type(value) is not dict and holds_objects(value):
                dumped = dumped_models(value)
                if dumped is not None:
                    if self._is_clean(pack(dumped)):
                        return dumped, False
                elif self._packs:
                    packed = pack_objects(value)
                    try:
                        result = self.decode(packed)
                    except ValidationError:
                        # The value may have a special type in MessagePack, such as an aware datetime.
                        self._packs = False
                    else:
                        differs = pack(result) != packed
                        if fills and finish is not None:
                            differs = finish([result], [result]) or differs
                        return result, differs
                value = without_objects(value) if dumped is None else dumped
            result = self.decode(pack(value))
            if finish is None or (not fills and is_unchanged(value, result)):
                return result, False
            return result, finish([value], [result])
        except REFUSALS:
            raise NeedsRepair from None

    def _is_clean(self, packed: bytes) -> bool:
        """Return whether a value is known to need no change."""
        try:
            return self.check is not None and self.check(packed) is not None
        except ValidationError:
            return False


def _leaf_strip(allowed: frozenset[type]) -> Strip:
    def strip(value: Any, _room: int) -> Any:
        return value if type(value) in allowed else _lifted(value, allowed)

    return strip


def _lifted(value: Any, allowed: frozenset[type]) -> Any:
    """Convert a scalar to an allowed JSON type."""
    if type(value) not in JSON_TYPES:
        value = to_json(value)
        if type(value) in allowed:
            return value
    raise NeedsRepair
