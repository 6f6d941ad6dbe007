"""The quick pass of a cast, compiled to closures: strips excess and fills defaults, and converts nothing.

Most values are right but for a property too many or a default left out. This pass copies what the plan knows and
leaves the judgement on scalars to one call of the validator afterwards; at the first sign of anything
else it gives up, and `thorough` takes over.

Rule 1: every container in the result is fresh, and every scalar of an exact JSON type that the validator looks at.
What it does not look at goes through `to_json`.
Rule 2: no paths, no reports, no allocation that the result does not need.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from msgspec import ValidationError, convert, msgpack, to_builtins

from operations._json import JSONValueError, as_json, is_list, is_object, lift, to_json
from operations._json_objects import dumped_models, holds_objects, pack_objects, without_objects
from operations.schema.casting.changes import is_unchanged
from operations.schema.casting.structs import Shape, Shaper
from operations.schema.casting.thorough import Caster, applied
from operations.schema.planning.leaves import known_scalars, leaf_types, scalar_types
from operations.schema.planning.plans import MISSING, Choice, Plan, Planner
from operations.schema.reading.references import Site

Strip: TypeAlias = Callable[[Any, int], Any]
"""Takes a value and how deep it may nest; gives the stripped copy."""

_SCALARS = frozenset({str, int, float, bool, type(None)})
_JSON = _SCALARS | {dict, list}

_CONTAINERS = frozenset({dict, list})
_WRITE = msgpack.Encoder().encode_into
_WRITTEN = bytearray()
"""What can be written there is Unicode, and made of types that mean the same to a reader."""

_PACK = msgpack.Encoder().encode
_PACK_DECIMALS_AS_NUMBERS = msgpack.Encoder(decimal_format="number").encode
_UNPACK = msgpack.Decoder().decode

_REFUSALS = (ValidationError, TypeError, ValueError, OverflowError, NotImplementedError)


class NeedsRepair(Exception):  # noqa: N818 - a signal between two passes, not an error
    """The value needs more than stripping and filling."""


class _Stage:
    """One plan's closure, compiled when data first reaches it."""

    __slots__ = ("_plan", "_stripper", "strip")

    def __init__(self, stripper: "Stripper", plan: Plan) -> None:
        self._stripper = stripper
        self._plan = plan
        self.strip: Strip = self._compile_and_strip

    def _compile_and_strip(self, value: Any, room: int) -> Any:
        self.strip = self._stripper.compile(self._plan)
        return self.strip(value, room)


class Stripper:
    """Compiles the plans of one document, or of all that share definitions.

    Attributes:
        shaper: Those of them that are plain, as types.
    """

    def __init__(self, planner: Planner, caster: Caster) -> None:
        self._default = caster.default
        self._planner = planner
        self._stages: dict[Plan, _Stage] = {}
        self.shaper = Shaper(caster.default, most=planner.scope.max_plans // 25)

    def stage(self, plan: Plan) -> _Stage:
        """Where the closure of `plan` is, or will be."""
        found = self._stages.get(plan)
        if found is None:
            found = self._stages[plan] = _Stage(self, plan)
        return found

    def compile(self, plan: Plan) -> Strip:
        """The closure of `plan`."""
        leaf = leaf_types(plan)
        if leaf is not None:
            return _leaf_strip(leaf)
        if plan.is_unknown:
            return to_json
        general = self._choosing(plan) if plan.choices else self._general(plan)
        shape = self.shaper.shape(plan)
        return general if shape is None else _shaped(shape, general, self.shaper.has_numbers)

    def _general(self, plan: Plan) -> Strip:
        on_object = self._object(plan) if plan.allows("object") else _give_up
        on_array = self._array(plan) if plan.allows("array") else _give_up
        scalars = scalar_types(plan.types or ())
        typed = plan.types is not None

        def strip(value: Any, room: int) -> Any:
            kind = type(value)  # pyright: ignore[reportUnknownVariableType]
            if kind is dict:
                return on_object(value, room)
            if kind is list:
                return on_array(value, room)
            if kind in scalars:
                return value
            if kind in _SCALARS:
                if typed:
                    raise NeedsRepair
                return to_json(value)
            return strip(lift(value), room)

        return strip

    # Objects

    def _object(self, plan: Plan) -> Strip:
        fields: list[_Property] = []
        for name, field in plan.fields.items():
            if not field.kept:
                continue
            part = plan.part(field.sites)
            default = MISSING
            if not field.barred:
                default = self._default(part, name in plan.required)
            leaf = leaf_types(part)
            stage = self.stage(part) if leaf is None else None
            fields.append(_Property(name, leaf or _NO_TYPES, stage, default))
        others = self._others(plan) if plan.keeps_unnamed else None
        return _object_strip(tuple(fields), others, self._planner)

    def _others(self, plan: Plan) -> "Callable[[str], _Stage | None]":
        """What to do with a property nobody named: its closure, or None to strip it."""
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
        if plan.places or True in plan.keyword("uniqueItems"):
            return self._tuple(plan)
        part = plan.part(plan.place(0))
        if part.is_unknown:
            return to_json
        leaf = leaf_types(part)
        if leaf is not None:
            return _scalar_list(leaf)
        stage = self.stage(part)

        def strip(value: list[Any], room: int) -> Any:
            if room <= 0:
                raise NeedsRepair
            strip_item, room = stage.strip, room - 1
            return [strip_item(item, room) for item in value]

        return strip

    def _tuple(self, plan: Plan) -> Strip:
        first = [self.stage(plan.part(plan.place(index))) for index in range(plan.places)]
        rest = self.stage(plan.part(plan.place(plan.places)))

        def strip(value: list[Any], room: int) -> Any:
            if room <= 0:
                raise NeedsRepair
            room -= 1
            result = [stage.strip(item, room) for stage, item in zip(first, value, strict=False)]
            result += [rest.strip(item, room) for item in value[len(first) :]]
            return result

        return strip

    # Choices

    def _choosing(self, plan: Plan) -> Strip:
        """Decides by the type of the value where that is enough, else asks the validator of each member."""
        objects = [self._candidates(plan, choice, "object") for choice in plan.choices]
        arrays = [self._candidates(plan, choice, "array") for choice in plan.choices]
        planner, doubts = self._planner, int(plan.is_unstable)
        settle = _settled if planner.scope.recursive else _as_it_is
        scalars = known_scalars(plan)
        plain = scalars or frozenset()
        picked: dict[tuple[str, ...], _Stage] = {}

        def strip(value: Any, room: int) -> Any:
            kind = type(value)  # pyright: ignore[reportUnknownVariableType]
            if kind in plain:
                return value
            if kind is not dict and kind is not list:
                if kind not in _SCALARS:
                    return strip(lift(value), room)
                if scalars is None:
                    return to_json(value)
                raise NeedsRepair
            settle(value, room)
            planner.doubts += doubts
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
                    if not fitting:
                        raise NeedsRepair
                    picks += fitting
            key = tuple(site.pointer for site in picks)
            stage = picked.get(key)
            if stage is None:
                stage = picked[key] = self.stage(plan.pick(tuple(picks)))
            return stage.strip(value, room)

        return strip

    def _candidates(self, plan: Plan, choice: Choice, kind: str) -> list[tuple[Site, Plan]]:
        parts = [(member, plan.member(member)) for member in choice.members]
        return [(member, part) for member, part in parts if part.allows(kind)]


_NO_TYPES: frozenset[type] = frozenset()
_MAX_NAMES = 1_000
"""How many property names nobody declared are remembered."""


def _give_up(_value: Any, _room: int) -> Any:
    raise NeedsRepair


def _as_it_is(_value: Any, _room: int) -> None:
    pass


def _settled(value: Any, room: int) -> None:
    """Before a recursive validator sees it: is it JSON, and not too deep?"""
    try:
        as_json(value, room)
    except JSONValueError:
        raise NeedsRepair from None


def _enforce_plain(value: Any, has_numbers: bool) -> None:
    """Raise an error for what types misread: text that is not Unicode, and decimals, which become floats."""
    if not has_numbers:
        _WRITE(value, _WRITTEN)
    elif _PACK(value) != _PACK_DECIMALS_AS_NUMBERS(value):
        raise ValueError("contains a decimal")


def _shaped(shape: Shape, general: Strip, has_numbers: bool) -> Strip:
    target, depth = shape.type, shape.depth

    def strip(value: Any, room: int) -> Any:
        kind = type(value)  # pyright: ignore[reportUnknownVariableType]
        if room < depth or kind in _SCALARS:
            return general(value, room)
        try:
            plain = value if kind is dict else without_objects(value)
            _enforce_plain(plain, has_numbers)
            return _in_order(plain, to_builtins(convert(plain, target)))
        except _REFUSALS:
            # Not JSON builtins, or not of this shape: there may still be a way.
            return general(value, room)

    return strip


class TypedStrip:
    """Strips, fills and checks containers in one, by types that are exact.

    Args:
        closed: Accepts values that need no change.
        target: Accepts values that only need to be stripped and filled.
        has_numbers: Whether they accept floats.

    Attributes:
        expects_changes: Whether the last value needed a change. The next one is then not tried as `closed`.
    """

    __slots__ = ("_closed", "_decode", "_has_numbers", "_packs", "_target", "expects_changes")

    def __init__(self, closed: Any, target: Any, has_numbers: bool) -> None:
        self._closed = closed
        self._has_numbers = has_numbers
        self._target = target
        self._decode: Callable[[bytes], Any] | None = None
        self._packs = True
        self.expects_changes = False

    def strip(self, value: Any) -> tuple[Any, bool]:
        """Return the result, and whether it is known to be unchanged.

        Raises:
            NeedsRepair: If the types do not accept the value.
        """
        kind = type(value)  # pyright: ignore[reportUnknownVariableType]
        if kind in _SCALARS:
            raise NeedsRepair
        try:
            if kind is not dict and holds_objects(value):
                dumped = dumped_models(value)
                if dumped is not None:
                    if self._is_clean(_PACK(dumped)):
                        return dumped, True
                elif self._packs:
                    packed = pack_objects(value)
                    if self._is_clean(packed):
                        return _UNPACK(packed), True
                    # Perhaps only for a type of its own in MessagePack, such as an aware datetime.
                    self._packs = False
                value = without_objects(value)
            if not self.expects_changes:
                packed = _PACK(value)
                if self._is_clean(packed):
                    copy = _UNPACK(packed)
                    if is_unchanged(value, copy):
                        return copy, True
                # Perhaps it holds other types than JSON's.
                plain = as_json(value)
                if plain is not value:
                    if self._is_clean(_PACK(plain)):
                        return plain, True
                    raise NeedsRepair
                self.expects_changes = True
            _enforce_plain(value, self._has_numbers)
            return _in_order(value, to_builtins(convert(value, self._target))), False
        except _REFUSALS:
            raise NeedsRepair from None

    def _is_clean(self, packed: bytes) -> bool:
        if self._decode is None:
            self._decode = msgpack.Decoder(self._closed).decode
        try:
            self._decode(packed)
        except ValidationError:
            return False
        return True


def _in_order(before: Any, after: Any) -> Any:
    """Return `after` with its properties in the order that they have in `before`; those that were filled come last."""
    if is_list(after) and is_list(before):
        if not _CONTAINERS.isdisjoint(map(type, after)):
            return list(map(_in_order, before, after))
    elif is_object(after) and is_object(before):
        result = {name: after[name] for name in before if name in after}
        if len(result) < len(after):
            result |= after
        for name, item in result.items():
            if type(item) in _CONTAINERS and name in before:
                result[name] = _in_order(before[name], item)
        return result
    return after


def _leaf_strip(allowed: frozenset[type]) -> Strip:
    def strip(value: Any, _room: int) -> Any:
        return value if type(value) in allowed else _lifted(value, allowed)

    return strip


def _lifted(value: Any, allowed: frozenset[type]) -> Any:
    """A scalar that is not of an allowed type itself, as one that is."""
    if type(value) not in _JSON:
        value = to_json(value)
        if type(value) in allowed:
            return value
    raise NeedsRepair


def _scalar_list(allowed: frozenset[type]) -> Strip:
    def strip(value: list[Any], room: int) -> Any:
        if room <= 0:
            raise NeedsRepair
        if allowed.issuperset(map(type, value)):
            return value.copy()
        return [item if type(item) in allowed else _lifted(item, allowed) for item in value]

    return strip


class _Property(NamedTuple):
    """A property known by name."""

    name: str

    leaf: frozenset[type]
    """The scalars it may be; none where it has a closure."""

    stage: _Stage | None
    default: Any


def _object_strip(
    fields: tuple[_Property, ...],
    others: Callable[[str], _Stage | None] | None,
    planner: Planner,
) -> Strip:
    """Keep an object's properties in their order; declared defaults come last."""
    known = {field.name: field for field in fields}
    filled = [(field.name, field.default) for field in fields if field.default is not MISSING]

    def strip(value: dict[Any, Any], room: int) -> Any:
        if room <= 0:
            raise NeedsRepair
        room -= 1
        result: dict[str, Any] = {}
        for key, item in value.items():
            if key in known:
                name, leaf, stage, _ = known[key]
                if type(item) in leaf:
                    result[name] = item
                elif stage is None:
                    result[name] = _lifted(item, leaf)
                else:
                    result[name] = stage.strip(item, room)
                continue
            if type(key) is not str:
                raise NeedsRepair
            stage = None if others is None else others(key)
            if stage is not None:
                key.encode()  # refused here if it is no Unicode
                result[key] = stage.strip(item, room)
        for name, default in filled:
            if name not in value:
                if type(default) in _SCALARS:
                    result[name] = default
                else:
                    result[name] = to_json(default)
                    planner.doubts += 1
        return result

    return strip
