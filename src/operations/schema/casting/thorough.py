"""The thorough pass of a cast: convert values that do not match the schema.

It follows a plan and a value in parallel. The rules, in order of precedence:

    valid               stays, without undeclared properties and with declared defaults
    convertible         is converted to the type of the schema, if no information is lost
    other               stays unchanged; the check afterwards reports it

Rule 1: the input is never modified. The result is fresh JSON.
Rule 2: only `CreatingPass`, for the policy `create`, creates values: it overrides the six hooks at the end of `Pass`.
        The quick pass (`stripping`) overrides the handling of scalars and unions.
        It uses a declared default if there is one, else a constant, else the smallest value of the first type that the
        schema accepts. A value that must contain itself cannot be created.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain, repeat
from math import ceil, floor, isfinite
from operator import itemgetter
from typing import Any

from operations.base.json.values import (
    JSON_TYPES,
    MAX_DEPTH,
    SCALARS,
    TOO_LONG,
    TOO_LOW,
    JSONValueError,
    Path,
    canonical,
    is_list,
    is_object,
    kind_of,
    lift,
    pointer_to,
    to_json,
)
from operations.base.work import MADE, PIECE, STEP, BudgetSpentError, InlineWork, Work
from operations.schema.casting.typed import NeedsRepair, TypedStrip, names_of
from operations.schema.dividing import fits, size_of
from operations.schema.explain import Valid
from operations.schema.members import Place, matching, nearest, place_of, union_of
from operations.schema.plans import MISSING, PLAN, Choice, Plan, Planner
from operations.schema.references import Site
from operations.schema.values import conversions, convert_all, distinct, is_whole, same

_MAX_TRIALS = 1_000
"""The largest number of trial casts for one union, including those of nested unions."""

_LEAST_ROWS = 8
"""The number of objects in a list from which they are cast property by property."""

_ENTRY = 4
"""The units of work for one property or item, beside those of its value."""

_MAX_DEFAULT = 100_000
"""The largest default in bytes, with its own defaults filled."""

_CONTAINERS = frozenset({dict, list})
_TEXT = frozenset({str})
_PLAIN = frozenset({bool, type(None)})
_PLAIN_TEXT = _PLAIN | {str}


class Pass:
    """One pass over one value.

    Args:
        planner: Creates the plans.
        work: The budget.
        fitting: The plans whose defaults are being cast, outermost first.
        types: Returns the type of a plan, which casts its valid values in C.

    Attributes:
        work: The budget.
        trusts: Whether scalars of an allowed type are not checked one by one.
        edits: The number of values that were converted, created or replaced.
        made: The number of plans that existed at the last step.
        misfits: The number of values that do not match, except in unions.
        chose: Whether a member of a union was chosen.
        known: The parts of the result that are known to be valid.
        on_trial: Whether the pass only tests if conversions are enough.
    """

    trusts = False

    def __init__(
        self,
        planner: Planner,
        work: Work,
        fitting: tuple[Plan, ...] = (),
        types: Callable[[Plan], TypedStrip | None] = lambda _plan: None,
    ) -> None:
        self.planner = planner
        self.work = work
        self._fitting = fitting
        self.made = planner.made
        self._trials_left = _MAX_TRIALS
        self._refused: set[tuple[Plan, Path]] = set()
        self._chosen: dict[tuple[Plan, Path], tuple[Any, int]] = {}
        self._types = types
        self.on_trial = False
        self.edits = 0
        self.misfits = 0
        self.chose = False
        self.known: dict[int, Valid] = {}
        self._held: list[Any] = []
        """The results in `known`: the id of an object that is deleted may be used again."""

    def default(self, plan: Plan, required: bool) -> Any:
        """Return the declared default of an absent property, cast; or `MISSING`.

        A default that does not match its own schema is used only for a required property.
        """
        if plan.default is MISSING:
            return MISSING
        defaults = self.planner.defaults
        if plan in self._fitting:
            # The default would contain itself without end: such a default is never filled.
            defaults[plan] = MISSING
            return MISSING
        if plan not in defaults:
            # Work on the schema, once: a default that takes more is never filled.
            own = InlineWork()
            defaults.setdefault(plan, self._fitted(plan, own))
            self.work.spend(InlineWork.left - max(own.left, 0))
        value = defaults[plan]
        if value is MISSING or not (required or self.fits(plan, value)):
            return MISSING
        return self.copied(value)

    def fits(self, plan: Plan, value: Any) -> bool:
        """Return whether a JSON value is valid for `plan`."""
        return fits(plan, value, self.work)

    def copied(self, value: Any) -> Any:
        """Return a copy of a JSON value that is added to the result."""
        self.work.spend(MADE)
        return to_json(value, work=self.work, units=MADE)

    def _placed(self, value: Any, path: Path, levels: int) -> Any:
        """Return `value` as fresh JSON; an error names its place."""
        return placed(to_json, value, path, levels, self.work)

    def _fitted(self, plan: Plan, work: Work) -> Any:
        """Return a declared default, cast like any value; a scalar that cannot be converted is returned unchanged."""
        try:
            default = to_json(plan.default, work=work)
            if isinstance(default, (dict, list)):
                inner = type(self)(self.planner, work, (*self._fitting, plan))
                default = inner.cast(plan, default)
            elif not plan.accepts(default):
                # Also if there is a choice of types.
                types = plan.types or ("string", "integer", "number", "boolean")
                default = next(filter(plan.accepts, conversions(default, types)), default)
        except (BudgetSpentError, JSONValueError):
            return MISSING
        return default if len(canonical(default)) <= _MAX_DEFAULT else MISSING

    def cast(self, plan: Plan, value: Any, path: Path = (), levels: int = MAX_DEPTH) -> Any:
        """Cast `value` at `path`; it may nest `levels` deep.

        Raises:
            JSONValueError: If a part that the schema does not strip is not JSON and cannot be converted to it.
        """
        if type(value) not in SCALARS:
            typed = self._types(plan)
            if typed is not None and levels >= typed.shape.depth:
                with suppress(NeedsRepair):
                    result, differs = typed.strip(value, self.work)
                    if typed.shape.exact or self.fits(plan, result):
                        self.known[id(result)] = Valid(plan, differs)
                        self._held.append(result)
                        return result
        return self.repair(plan, value, path, levels)

    def repair(self, plan: Plan, value: Any, path: Path = (), levels: int = MAX_DEPTH) -> Any:
        """Cast `value` as `cast` does; a type is known to refuse it, but may accept its parts."""
        made, work = self.planner.made, self.work
        # As `Work.spend`, without the call.
        work.left -= STEP
        if made != self.made:
            work.left -= (made - self.made) * PLAN
            self.made = made
        if work.left < 0 or work.is_stopped:
            raise BudgetSpentError
        if self.on_trial:
            self._trials_left -= 1
            if self._trials_left < 0:
                raise NeedsRepair
        while type(value) not in JSON_TYPES:
            value = placed(lift, value, path)
        kind = type(value)  # pyright: ignore[reportUnknownVariableType]
        if plan.is_unknown or kind in plan.open_containers:
            return self._placed(value, path, levels)
        if plan.choices and plan.allows(kind_of(value)):
            return self.choose(plan, value, path, levels)
        if kind is dict and plan.allows("object") and plan.constants is None:
            return self._object(plan, value, path, levels)
        if kind is list and plan.allows("array") and plan.constants is None:
            return self._array(plan, value, path, levels)
        return self.whole(plan, value, path, levels)

    def whole(self, plan: Plan, value: Any, path: Path, levels: int) -> Any:
        """Cast a value that is not a container with its own plan."""
        value = self._placed(value, path, levels)
        if self.fits(plan, value):
            whole = type(value) is float and is_whole(value)
            if whole and not plan.allows("number") and plan.constants is None:
                self.edits += 1
                return int(value)
            return value
        if type(value) is not dict and type(value) is not list:
            for converted in conversions(value, plan.types or ()):
                if self.fits(plan, converted):
                    self.edits += 1
                    return converted
        return self.replace_mismatch(plan, value)

    def _object(self, plan: Plan, value: dict[Any, Any], path: Path, levels: int) -> Any:
        if levels <= 0:
            raise JSONValueError("nested too deeply", pointer_to(path))
        is_plain = _TEXT.issuperset(map(type, value))
        children, trusts = plan.children, self.trusts
        # Enforced at the next step.
        self.work.left -= len(value) * _ENTRY
        if trusts and not is_plain:
            raise NeedsRepair
        members = value if is_plain else _with_plain_keys(value, path)
        result: dict[str, Any] = {}
        # Keep the order of the value; added properties come last.
        for name, item in members.items():
            part = children[name]
            if part is None:
                continue
            if not name.isascii():
                placed(to_json, name, path)
            given: object = item
            kind = type(given)
            if trusts:
                is_valid = part.scalars is not None and kind in part.scalars
            elif kind is str:
                # Other texts may contain lone surrogates.
                is_valid = item.isascii() and (kind in part.certain or item in part.texts)
            elif kind is float:
                is_valid = kind in part.certain and item - item == 0
            else:
                is_valid = kind in _PLAIN and kind in part.certain
            if is_valid:
                result[name] = item
            elif (
                kind is list
                and part.holds_texts
                and _TEXT.issuperset(map(type, item))
                and "".join(item).isascii()
            ):
                result[name] = [*item]
            else:
                result[name] = self.cast(part, item, (name, path), levels - 1)
        for name, part in plan.fillable:
            if name not in members:
                made = self._absent(part, name in plan.required)
                if made is not MISSING:
                    result[name] = made
        return result

    def _array(self, plan: Plan, value: list[Any], path: Path, levels: int) -> Any:
        if levels <= 0:
            raise JSONValueError("nested too deeply", pointer_to(path))
        first, rest = plan.items
        value = self.cut(plan, value)
        self.work.spend(len(value) * _ENTRY)
        typed = None if first or self.trusts else self._types(rest)
        if typed is not None and levels > typed.shape.depth:
            return self.resized(plan, self._typed_items(typed, rest, value, path, levels - 1))
        parts = zip(chain(first, repeat(rest)), value, strict=False)
        items = [
            self.cast(part, item, (index, path), levels - 1)
            for index, (part, item) in enumerate(parts)
        ]
        return self.resized(plan, items)

    def _typed_items(
        self, typed: TypedStrip, plan: Plan, values: list[Any], path: Path, levels: int
    ) -> list[Any]:
        """Return the items of an array, cast by a type; only those that the type refuses are repaired."""
        items, differs = typed.strip_items(values, self.work)
        if not typed.shape.exact:
            items = self._valid_items(plan, items)
        missing = [index for index, each in enumerate(items) if each is MISSING]
        self.known |= dict.fromkeys(map(id, items), Valid(plan, differs))
        self.known.pop(id(MISSING), None)
        self._held.append([*items])
        if len(missing) > _LEAST_ROWS and self._table(plan, values, items, missing, path, levels):
            return items
        for index in missing:
            value = values[index]
            # An object of Python may be cast by its own type.
            cast = self.repair if type(value) in JSON_TYPES else self.cast
            items[index] = cast(plan, value, (index, path), levels)
        return items

    def _valid_items(self, plan: Plan, items: list[Any]) -> list[Any]:
        """Return the items of an array with `MISSING` instead of those that are not valid."""
        size = size_of([each for each in items if each is not MISSING])
        if size * plan.weight > PIECE:
            return [each if each is MISSING or self.fits(plan, each) else MISSING for each in items]
        self.work.spend(size * plan.weight)
        accepts = plan.accepts
        return [each if each is MISSING or accepts(each) else MISSING for each in items]

    def _table(
        self,
        plan: Plan,
        values: list[Any],
        items: list[Any],
        indices: list[int],
        path: Path,
        levels: int,
    ) -> bool:
        """Cast the objects at `indices` property by property, if all of them have the same names; add them to `items`.

        Most values of a property need the same decision, which is made once.
        """
        rows = [values[index] for index in indices]
        names = names_of(rows)
        if names is None or plan.choices or levels <= 0 or not "".join(names).isascii():
            return False
        kept: list[str] = []
        columns: list[list[Any]] = []
        self.work.spend(len(names) * len(rows) * _ENTRY)
        for name in names:
            part = plan.children[name]
            if part is None:
                continue
            column = list(map(itemgetter(name), rows))
            if not _is_certain(part, column):
                column = self._converted(part, column) or [
                    self.cast(part, item, (name, (index, path)), levels - 1)
                    for index, item in zip(indices, column, strict=True)
                ]
            elif type(column[0]) is list:
                column = list(map(list, column))
            kept.append(name)
            columns.append(column)
        for name, part in plan.fillable:
            if name not in names:
                made = [self._absent(part, name in plan.required) for _ in indices]
                if made[0] is not MISSING:
                    kept.append(name)
                    columns.append(made)
        if not columns:
            return False
        for index, row in zip(indices, zip(*columns, strict=True), strict=True):
            items[index] = dict(zip(kept, row, strict=True))
        return True

    def _converted(self, plan: Plan, column: list[Any]) -> list[Any] | None:
        """Return scalars of one type converted to the only other type that the plan accepts; None for other values."""
        kinds = set(map(type, column))
        # An integer is also a number, and text becomes an integer if possible.
        wanted = plan.certain - {int} if float in plan.certain else plan.certain
        if len(kinds) != 1 or len(wanted) != 1 or not kinds.isdisjoint(plan.certain):
            return None
        made = convert_all(column, *wanted)
        if made is not None:
            self.edits += len(made)
        return made

    def _absent(self, part: Plan, required: bool) -> Any:
        """Return the value for an absent property, or `MISSING`."""
        made = self.default(part, required)
        if made is MISSING and required:
            made = self.absent(part)
        if made is not MISSING:
            self.planner.undecided += type(made) in _CONTAINERS
        return made

    def choose(self, plan: Plan, value: Any, path: Path, levels: int) -> Any:
        """Choose the members of the unions in `plan` for `value`, then cast the value to them.

        Several unions may contain the same union for the same place; the result is computed once.
        """
        key = plan, path
        if key not in self._chosen:
            if self.on_trial and key in self._refused:
                raise NeedsRepair
            before = self.edits
            try:
                result = self._cast_chosen(plan, value, path, levels)
                self._chosen[key] = result, self.edits - before
            except NeedsRepair:
                self._refused.add(key)
                raise
            finally:
                self.edits = before
        result, edits = self._chosen[key]
        self.edits += edits
        return result

    def _cast_chosen(self, plan: Plan, value: Any, path: Path, levels: int) -> Any:
        value = self._placed(value, path, levels)
        if type(value) in _CONTAINERS:
            self.chose = True
            self.planner.undecided += plan.is_unstable
        picks: list[Site] = []
        # Where the value matches other members than the one it names, only the named one.
        own: list[Site] = []
        if not self.on_trial:
            self._trials_left = _MAX_TRIALS

        def attempt(member: Plan) -> int | None:
            return self._attempt(member, value, path, levels)

        for choice in plan.choices:
            if not choice.members:
                chosen = applied(plan, choice, value, self.work)
                picks.extend(chosen)
                own.extend(chosen)
                continue
            chosen = matching(self.planner, choice.members, value, attempt, self.work)
            if not chosen:
                if self.on_trial:
                    raise NeedsRepair
                nearest = self.unmatched(plan, choice, value)
                if nearest is None:
                    return self.replace_mismatch(plan, value)
                chosen = [nearest]
            named = self.named(choice, value)
            picks.extend(chosen)
            own.extend(chosen if named is None or named in chosen else [named])
        result = self.cast(plan.pick(tuple(picks)), value, path, levels)
        if own == picks:
            return result
        # Cast separately, because a closed member forbids the properties of the others.
        return _joined(result, self.cast(plan.pick(tuple(own)), value, path, levels))

    def _attempt(self, plan: Plan, value: Any, path: Path, levels: int) -> int | None:
        """Return the number of conversions to cast `value` to `plan`; None if conversions are not enough."""
        outer = self.edits, self.on_trial
        self.edits, self.on_trial = 0, True
        try:
            result = self.cast(plan, value, path, levels)
            return self.edits if self.fits(plan, result) else None
        except NeedsRepair:
            return None
        finally:
            self.edits, self.on_trial = outer

    # The hooks for a value that does not match, and for an absent value.

    def named(self, choice: Choice, value: Any) -> Site | None:
        """Return the member that the value names and may not match, although it matches another member.

        For example, one property has a new value, and the value then matches only the base type.
        """
        return None if self.on_trial else choice.named(value)

    def replace_mismatch(self, plan: Plan, value: Any) -> Any:
        """Return the replacement of a mismatched value: without properties that are unknown to all union members."""
        if self.on_trial:
            raise NeedsRepair
        self.misfits += 1
        return _known(place_of(self.planner, [plan]), value) if plan.choices else value

    def absent(self, plan: Plan) -> Any:
        """Return the value for an absent required property without a default, or `MISSING`."""
        if self.on_trial:
            raise NeedsRepair
        self.misfits += 1
        return MISSING

    def cut(self, plan: Plan, items: list[Any]) -> list[Any]:
        """Return the allowed items of an array, before they are cast."""
        return items

    def resized(self, plan: Plan, items: list[Any]) -> list[Any]:
        """Return the allowed items of an array, after they were cast."""
        return items

    def unmatched(self, plan: Plan, choice: Choice, value: Any) -> Site | None:
        """Return the member to use for a value that matches no member of a union; None to leave it unchanged."""
        return None


def _is_certain(plan: Plan, column: list[Any]) -> bool:
    """Return whether every value of a list is known to be valid JSON; False if that takes a closer look."""
    kinds = set(map(type, column))
    if len(kinds - _PLAIN) > 1:
        return False
    is_listed = False
    if list in kinds:
        if len(kinds) > 1 or not plan.holds_texts:
            return False
        column = list(chain.from_iterable(column))
        if not _TEXT.issuperset(map(type, column)):
            return False
    elif str in kinds and str not in plan.certain:
        is_listed = len(kinds) == 1 and plan.texts.issuperset(column)
        if not is_listed:
            return False
    elif not kinds <= plan.certain:
        return False
    if list in kinds or str in kinds:
        # Other texts may contain lone surrogates.
        return is_listed or "".join(filter(None, column)).isascii()
    if float in kinds:
        return all(map(isfinite, column))
    numbers = [each for each in column if type(each) is int]
    return not numbers or (min(numbers) > TOO_LOW and max(numbers) < TOO_LONG)


def _joined(result: Any, other: Any) -> Any:
    """Return `result` with the properties that only `other` has."""
    if is_object(result) and is_object(other):
        both = {name: _joined(item, other[name]) for name, item in result.items() if name in other}
        return {**other, **result, **both}
    if is_list(result) and is_list(other) and len(result) == len(other):
        return list(map(_joined, result, other))
    return result


def _known(place: Place, value: Any) -> Any:
    """Return a JSON value without the properties that no schema at `place` declares."""
    if is_object(value) and place.objects:
        children = {name: place.child(name) for name in value}
        return {name: _known(child, value[name]) for name, child in children.items() if child}
    if is_list(value) and place.arrays:
        return [_known(place.item(index), item) for index, item in enumerate(value)]
    return value


def applied(plan: Plan, choice: Choice, value: Any, work: Work) -> list[Site]:
    """Return the schemas that `if` and `dependentSchemas` apply to `value`."""
    if choice.condition is None:
        holds = type(value) is dict and choice.name in value
        return [choice.then] if holds and choice.then else []
    holds = fits(plan.member(choice.condition), value, work)
    branch = choice.then if holds else choice.otherwise
    return [branch] if branch else []


def placed(function: Any, value: Any, path: Path, *more: Any) -> Any:
    """Return `function(value)`; prepend `path` to the location of an error."""
    try:
        return function(value, *more)
    except JSONValueError as error:
        raise JSONValueError(error.reason, pointer_to(path) + error.path) from None


def _with_plain_keys(value: dict[Any, Any], path: Path) -> dict[str, Any]:
    """Return `value` with its keys written as JSON writes them."""
    names = placed(to_json, dict.fromkeys(value), path)
    return dict(zip(names, value.values(), strict=True))


_MAX_MADE = 1_000
"""The largest number of values, items or characters that are created."""


class CreatingPass(Pass):
    """A pass that forces its value to match, as TypeBox's `Value.Cast` does."""

    def __init__(
        self,
        planner: Planner,
        work: Work,
        fitting: tuple[Plan, ...] = (),
        types: Callable[[Plan], TypedStrip | None] = lambda _plan: None,
    ) -> None:
        super().__init__(planner, work, fitting, types)
        self._created: dict[Plan, Any] = {}

    def _cast_chosen(self, plan: Plan, value: Any, path: Path, levels: int) -> Any:
        result = super()._cast_chosen(plan, value, path, levels)
        is_one = len(plan.choices) == 1 and plan.choices[0].is_exclusive
        if not is_one or self.on_trial or self.fits(plan, result):
            return result
        # Several members accept the result: use the one that leaves most of the value and excludes the others.
        members = (plan.pick((site,)) for site in plan.choices[0].members)
        made = [self.cast(member, value, path, levels) for member in members]
        fitting = [each for each in made if self.fits(plan, each)]
        if not fitting:
            return result
        self.edits += 1
        return max(fitting, key=size_of)

    def named(self, choice: Choice, value: Any) -> Site | None:
        """Return None: a member that the value matches wins."""
        return None

    def replace_mismatch(self, plan: Plan, value: Any) -> Any:
        """Return the declared default or a created value, if one matches."""
        if plan.types is None and plan.default is MISSING and not plan.choices:
            # There is no schema for the value.
            return value
        made = self._make(plan)
        if made is MISSING or same(made, value):
            return value
        self.edits += 1
        return made

    def absent(self, plan: Plan) -> Any:
        """Return a created value, or `MISSING`."""
        made = self._make(plan)
        if made is not MISSING:
            self.edits += 1
        return made

    def cut(self, plan: Plan, items: list[Any]) -> list[Any]:
        """Return at most as many items as the schema allows."""
        most = plan.most_items
        if most is None or len(items) <= most:
            return items
        self._edit()
        return items[:most]

    def resized(self, plan: Plan, items: list[Any]) -> list[Any]:
        """Return the items, without duplicates if they must be unique, and with items created to reach `minItems`."""
        unique = True in plan.keyword("uniqueItems")
        if unique:
            # Compared in Python.
            self.work.spend(size_of(items) * STEP)
        if unique and len(kept := distinct(items)) < len(items):
            self._edit()
            items = kept
        for index in range(len(items), min(plan.least_items, _MAX_MADE)):
            made = self._make(plan.item(index))
            self.work.spend(len(items) * STEP if unique else STEP)
            if made is MISSING or (unique and any(same(made, item) for item in items)):
                break
            self._edit()
            items.append(made)
        return items

    def unmatched(self, plan: Plan, choice: Choice, value: Any) -> Site | None:
        """Return the nearest member; None if the union declares a default, which then replaces the value."""
        if plan.default is not MISSING:
            return None
        union = union_of(self.planner, choice.members)
        return nearest(union.named(value) or union.members, value, self.work)

    def _make(self, plan: Plan) -> Any:
        """Return a fresh value for `plan`, or `MISSING`."""
        if self.on_trial:
            raise NeedsRepair
        if plan not in self._created:
            self._created[plan] = Creator(self.default, self.work).create(plan)
        made = self._created[plan]
        return made if made is MISSING else self.copied(made)

    def _edit(self) -> None:
        if self.on_trial:
            raise NeedsRepair
        self.edits += 1


class Creator:
    """Creates one value with all required parts.

    Args:
        default: Returns the declared default of a plan, or `MISSING`. It returns a default that does not match its own
            schema only if the second argument requires a value.
        work: The budget.
    """

    def __init__(self, default: Callable[[Plan, bool], Any], work: Work) -> None:
        self._default = default
        self._work = work
        self._underway: set[Plan] = set()
        self._declared = False
        self._left = _MAX_MADE

    def create(self, plan: Plan) -> Any:
        """Return a fresh value for `plan`, or `MISSING` if none can be created."""
        self._left -= 1
        self._work.spend(PLAN)
        if plan in self._underway or len(self._underway) >= MAX_DEPTH or self._left < 0:
            return MISSING
        self._underway.add(plan)
        try:
            made = self._default(plan, True)
            if made is not MISSING:
                self._declared = self._declared or not fits(plan, made, self._work)
                return made
            return next(filter(self._fits(plan), self._candidates(plan)), MISSING)
        except JSONValueError:
            return MISSING
        finally:
            self._underway.discard(plan)

    def _fits(self, plan: Plan) -> Callable[[Any], bool]:
        # A declared default that does not match its own schema is used; the check then rejects the whole value.
        return lambda made: self._declared or fits(plan, made, self._work)

    def _candidates(self, plan: Plan) -> Iterator[Any]:
        if plan.choices:
            for chosen in _picked(plan):
                made = self.create(chosen)
                if made is not MISSING:
                    yield made
            return
        if plan.constants is not None:
            yield from map(to_json, plan.constants)
            return
        for name in plan.likely_types:
            if name == "object":
                yield from self._object(plan)
            elif name == "array":
                yield from self._array(plan)
            else:
                yield from _smallest(plan, name)

    def _object(self, plan: Plan) -> Iterator[Any]:
        made: dict[str, Any] = {}
        for name, field in plan.fields.items():
            part = plan.part(field.sites)
            value = self.create(part) if name in plan.required else self._default(part, False)
            if value is not MISSING:
                made[name] = value
            elif name in plan.required:
                return
        yield made

    def _array(self, plan: Plan) -> Iterator[Any]:
        most = plan.most_items
        count = max(len(plan.items[0]), plan.least_items)
        count = count if most is None else min(count, most)
        if count <= _MAX_MADE:
            made: list[Any] = []
            for index in range(count):
                made.append(self.create(plan.item(index)))
                if made[-1] is MISSING:
                    return
            yield made


def _picked(plan: Plan) -> Iterator[Plan]:
    """Yield `plan` for each member of its first union, with the first member of every other union."""
    unions = [choice.members for choice in plan.choices if choice.members]
    conditions = tuple(choice.otherwise for choice in plan.choices if choice.otherwise)
    if not unions:
        yield plan.pick(conditions)
        return
    for index in range(max(map(len, unions))):
        yield plan.pick(tuple(members[min(index, len(members) - 1)] for members in unions))


def _smallest(plan: Plan, name: str) -> Iterator[Any]:
    if name == "string":
        length = max((int(least) for least in plan.keyword("minLength")), default=0)
        if length <= _MAX_MADE:
            yield " " * length
    elif name == "boolean":
        yield from (False, True)
    elif name == "null":
        yield None
    else:
        yield from _numbers(plan, whole=name == "integer")


def _numbers(plan: Plan, *, whole: bool) -> Iterator[Any]:
    """Yield candidate numbers: the lower bound or 0, then numbers just inside the other bounds."""
    lows, above, highs, below = (
        [bound for bound in plan.keyword(name) if not isinstance(bound, bool)]
        for name in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
    )
    for low in lows:
        yield ceil(low) if whole else low
    yield 0
    for low in (*lows, *above):
        yield floor(low) + 1
    for high in (*highs, *below):
        yield floor(high)
        yield ceil(high) - 1
    for low, high in zip(above or lows, below or highs, strict=False):
        if not whole:
            yield (low + high) / 2
    for step in plan.keyword("multipleOf"):
        for low in (*lows, *above):
            yield step * ceil(low / step)
            yield step * (floor(low / step) + 1)
        for high in (*highs, *below):
            yield step * floor(high / step)
