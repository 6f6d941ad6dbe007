"""The thorough pass of a cast: it repairs what does not fit, and says so.

It follows a plan and a value side by side. The rules, in the order they are tried:

    valid               stays, without what the schema does not know and with the defaults it declares
    convertible         is written as the type that is wanted, if nothing is lost
    anything else       is replaced by the declared default, or by the smallest value that is valid
    nothing to put      stays as it is; the check afterwards reports it

Rule 1: never touches its input. Everything it gives back is fresh, and JSON.
Rule 2: every conversion, replacement and creation is in the list of repairs, with its path.
"""

from itertools import chain, repeat
from typing import Any

from operations._json import MAX_DEPTH, JSONValueError, canonical, lift, pointer, to_json
from operations._words import counted
from operations.schema.casting.creation import Creator
from operations.schema.planning.assertions import distinct, same, shown, type_of
from operations.schema.planning.conversion import conversions, is_whole
from operations.schema.planning.members import matching, nearest
from operations.schema.planning.plans import MISSING, Choice, Plan, Planner
from operations.schema.reading.references import Site
from operations.schema.results import Kind, Repair

_MAX_TRIALS = 1_000
"""How many times plans may meet values on trial for one union, however alternatives multiply inside."""

_MAX_DEFAULT = 100_000
"""How many bytes a default may have, with its own defaults filled."""

_MAX_PADDING = 1_000
"""How many items are made up at most to reach `minItems`."""

_NAMES: dict[type, str] = {
    dict: "object",
    list: "array",
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
}
"""The JSON types, by the exact Python types that stand for them."""


class _RefusedError(Exception):
    """A trial would have to replace or create something."""


class Repairer:
    """Repairs values for one document."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._root = planner.root()
        self._defaults: dict[Plan, Any] = {}

    def repair(self, value: Any) -> tuple[Any, list[Repair]]:
        """`value` made to fit as far as possible, and what that took.

        Raises:
            JSONValueError: If some part that the schema does not strip is not JSON and cannot become it.
        """
        run = _Run(self._planner, self._defaults)
        return run.cast(self._root, value, "", MAX_DEPTH), run.repairs

    def default(self, plan: Plan, required: bool) -> Any:
        """The declared default of an absent property, made to fit; or `MISSING`.

        A default that its own schema refuses is used only where there has to be something.
        """
        return _Run(self._planner, self._defaults).default(plan, required)


class _Run:
    """One pass over one value.

    Args:
        planner: Makes the plans.
        defaults: Those that are known already; more are added.
        fitting: The plans whose default this run is made for, from the outermost inwards.
    """

    def __init__(
        self, planner: Planner, defaults: dict[Plan, Any], fitting: tuple[Plan, ...] = ()
    ) -> None:
        self._planner = planner
        self._defaults = defaults
        self._fitting = fitting
        self._on_trial = False
        self._trials_left = _MAX_TRIALS
        self._created: dict[Plan, Any] = {}
        self._refused: set[tuple[Plan, str]] = set()
        self._chosen: dict[tuple[Plan, str], tuple[Any, list[Repair]]] = {}
        self.repairs: list[Repair] = []

    def default(self, plan: Plan, required: bool) -> Any:
        """See `Repairer.default`."""
        if plan.default is MISSING:
            return MISSING
        if plan in self._fitting:
            # It would hold itself, and that one again: such a default is never filled.
            self._defaults[plan] = MISSING
            return MISSING
        if plan not in self._defaults:
            self._defaults.setdefault(plan, self._fitted(plan))
        value = self._defaults[plan]
        if value is MISSING or not (required or plan.accepts(value)):
            return MISSING
        return to_json(value)

    def _fitted(self, plan: Plan) -> Any:
        """A declared default, cast like any value; a scalar that cannot be converted as it stands."""
        try:
            default = to_json(plan.default)
            if isinstance(default, (dict, list)):
                run = _Run(self._planner, self._defaults, (*self._fitting, plan))
                default = run.cast(plan, default, "", MAX_DEPTH)
            elif not plan.accepts(default):
                default = next(filter(plan.accepts, conversions(default, _scalars(plan))), default)
        except JSONValueError:
            return MISSING
        return default if len(canonical(default)) <= _MAX_DEFAULT else MISSING

    def cast(self, plan: Plan, value: Any, path: str, room: int) -> Any:
        """`value`, which stands at `path`, made to fit; `room` is how deep it may nest."""
        if self._on_trial:
            self._trials_left -= 1
            if self._trials_left < 0:
                raise _RefusedError
        while type(value) not in _NAMES:
            value = _placed(lift, value, path)
        if plan.is_unknown:
            return _placed(to_json, value, path, room)
        kind = type(value)  # pyright: ignore[reportUnknownVariableType]
        if plan.choices and plan.allows(_NAMES[kind]):
            return self._choose(plan, value, path, room)
        if kind is dict and plan.allows("object") and plan.constants is None:
            return self._object(plan, value, path, room)
        if kind is list and plan.allows("array") and plan.constants is None:
            return self._array(plan, value, path, room)
        return self._whole(plan, value, path, room)

    def _whole(self, plan: Plan, value: Any, path: str, room: int) -> Any:
        """A value that is kept or exchanged, but has no parts to work on."""
        value = _placed(to_json, value, path, room)
        if plan.accepts(value):
            whole = type(value) is float and is_whole(value)
            if whole and not plan.allows("number") and plan.constants is None:
                self._note(path, "converted", "was written as a float")
                return int(value)
            return value
        if type(value) is not dict and type(value) is not list:
            for converted in conversions(value, plan.types or ()):
                if plan.accepts(converted):
                    words = f"was converted from {type_of(value)} to {type_of(converted)}"
                    self._note(path, "converted", words)
                    return converted
        return self._replaced(plan, value, path)

    def _replaced(self, plan: Plan, value: Any, path: str) -> Any:
        """Something else in the place of `value`, if there is anything that fits."""
        if plan.types is None and plan.default is MISSING and not plan.choices:
            # Nobody says what it should be.
            return value
        made = self._made(plan)
        if made is MISSING or same(made, value):
            return value
        self._note(path, "replaced", f"was {type_of(value)} and is now {shown(made)}")
        return made

    def _made(self, plan: Plan) -> Any:
        """A fresh value for `plan`, or `MISSING`."""
        if self._on_trial:
            raise _RefusedError
        if plan not in self._created:
            self._created[plan] = Creator(self.default).create(plan)
        made = self._created[plan]
        return made if made is MISSING else to_json(made)

    def _note(self, path: str, kind: Kind, message: str) -> None:
        if self._on_trial and kind != "converted":
            raise _RefusedError
        self.repairs.append(Repair(path, kind, message))

    def _object(self, plan: Plan, value: dict[Any, Any], path: str, room: int) -> Any:
        if room <= 0:
            raise JSONValueError("nested too deeply", path)
        members = value if _has_plain_keys(value) else _with_plain_keys(value, path)
        result: dict[str, Any] = {}
        for name, field in plan.fields.items():
            part, place = plan.part(field.sites), path + pointer(name)
            if name in members:
                if field.kept:
                    result[name] = self.cast(part, members[name], place, room - 1)
            elif not field.barred:
                self._absent(plan, part, name, place, result)
        if plan.keeps_unnamed:
            for name in [name for name in members if name not in plan.fields]:
                field = plan.field(name)
                if field.kept:
                    _placed(to_json, name, path)
                    part = plan.part(field.sites)
                    result[name] = self.cast(part, members[name], path + pointer(name), room - 1)
        return result

    def _absent(
        self, plan: Plan, part: Plan, name: str, place: str, result: dict[str, Any]
    ) -> None:
        required = name in plan.required
        made = self.default(part, required)
        if made is MISSING and required:
            made = self._made(part)
            if made is not MISSING:
                self._note(place, "created", f"was absent and is now {shown(made)}")
        if made is not MISSING:
            result[name] = made

    def _array(self, plan: Plan, value: list[Any], path: str, room: int) -> Any:
        if room <= 0:
            raise JSONValueError("nested too deeply", path)
        most = plan.most_items
        kept = value if most is None else value[:most]
        if len(kept) < len(value):
            self._note(
                path, "replaced", f"was cut from {len(value)} to {counted(len(kept), 'item')}"
            )
        before = len(self.repairs)
        first = [plan.part(plan.place(index)) for index in range(plan.places)]
        rest = plan.part(plan.place(plan.places))
        result = [
            self.cast(part, item, f"{path}/{index}", room - 1)
            for index, (part, item) in enumerate(
                zip(chain(first, repeat(rest)), kept, strict=False)
            )
        ]
        unique = True in plan.keyword("uniqueItems")
        if unique:
            different = distinct(result)
            if len(different) < len(result):
                # The items have moved, so what was said about their places is no longer true.
                del self.repairs[before:]
                self._note(path, "replaced", "had items twice and has each once")
                result = different
        self._pad(plan, result, path, unique=unique)
        return result

    def _pad(self, plan: Plan, items: list[Any], path: str, *, unique: bool) -> None:
        """Make up what is missing to `minItems`."""
        for index in range(len(items), min(plan.least_items, _MAX_PADDING)):
            made = self._made(plan.part(plan.place(index)))
            if made is MISSING or (unique and any(same(made, item) for item in items)):
                return
            self._note(f"{path}/{index}", "created", f"was absent and is now {shown(made)}")
            items.append(made)

    def _choose(self, plan: Plan, value: Any, path: str, room: int) -> Any:
        """Make the choices of `plan` for `value`, then cast it into what was chosen.

        The same union may be asked about the same place from within many others: it answers once.
        """
        key = plan, path
        if key not in self._chosen:
            if self._on_trial and key in self._refused:
                raise _RefusedError
            outer, self.repairs = self.repairs, []
            try:
                result = self._cast_chosen(plan, value, path, room)
                self._chosen[key] = result, self.repairs
            except _RefusedError:
                self._refused.add(key)
                raise
            finally:
                self.repairs = outer
        result, repairs = self._chosen[key]
        self.repairs.extend(repairs)
        return result

    def _cast_chosen(self, plan: Plan, value: Any, path: str, room: int) -> Any:
        value = _placed(to_json, value, path, room)
        picks: list[Site] = []
        if not self._on_trial:
            self._trials_left = _MAX_TRIALS

        def attempt(member: Plan) -> list[Repair] | None:
            return self._attempt(member, value, path, room)

        for choice in plan.choices:
            if not choice.members:
                picks.extend(applied(plan, choice, value))
                continue
            chosen = matching(self._planner, choice.members, value, attempt)
            if not chosen:
                if plan.default is not MISSING or self._on_trial:
                    return self._replaced(plan, value, path)
                chosen = [nearest(self._planner, choice.members, value)]
            picks.extend(chosen)
        return self.cast(plan.pick(tuple(picks)), value, path, room)

    def _attempt(self, plan: Plan, value: Any, path: str, room: int) -> list[Repair] | None:
        """The conversions it takes to cast `value` into `plan`; None if it takes more than that."""
        outer = self.repairs, self._on_trial
        self.repairs, self._on_trial = [], True
        try:
            result = self.cast(plan, value, path, room)
            return self.repairs if plan.accepts(result) else None
        except _RefusedError:
            return None
        finally:
            self.repairs, self._on_trial = outer


def _scalars(plan: Plan) -> tuple[str, ...]:
    """The types a scalar default may be converted to, also where there is a choice of them."""
    return plan.types or ("string", "integer", "number", "boolean")


def applied(plan: Plan, choice: Choice, value: Any) -> list[Site]:
    """What an `if` or a `dependentSchemas` brings in for `value`."""
    if choice.condition is None:
        holds = type(value) is dict and choice.name in value
        return [choice.then] if holds and choice.then else []
    branch = choice.then if plan.member(choice.condition).accepts(value) else choice.otherwise
    return [branch] if branch else []


def _placed(function: Any, value: Any, path: str, *more: Any) -> Any:
    """`function` of `value`, with `path` before the place an error names."""
    try:
        return function(value, *more)
    except JSONValueError as error:
        raise JSONValueError(error.reason, path + error.path) from None


def _has_plain_keys(value: dict[Any, Any]) -> bool:
    return all(type(key) is str for key in value)


def _with_plain_keys(value: dict[Any, Any], path: str) -> dict[str, Any]:
    """`value` with its keys written as JSON writes them."""
    names = _placed(to_json, dict.fromkeys(value), path)
    return dict(zip(names, value.values(), strict=True))
