"""Normalise a value under one policy, with a quick pass and, if necessary, a thorough pass.

Rule 1: the result of the quick pass is checked and used only if it is valid.
Rule 2: a cast never makes a valid value invalid. If stripping would do so, the value stays unchanged.
Rule 3: data that needs no change, which is most data, is recognised before any comparison.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeAlias

from operations.base.json.objects import without_objects
from operations.base.json.values import (
    MAX_DEPTH,
    JSONValueError,
    as_json,
    canonical,
    count_values,
    is_list,
    is_object,
    is_plain,
    to_json,
    to_json_within,
)
from operations.base.types import JSONObject
from operations.base.work import CONVERTED, SMALL, BudgetSpentError, FreeWork, InlineWork, Work
from operations.schema.casting.changes import Change, Changes, Uniform
from operations.schema.casting.stripping import StrippingPass
from operations.schema.casting.thorough import CreatingPass, Pass
from operations.schema.casting.typed import REFUSALS, NeedsRepair, is_unchanged, pack
from operations.schema.checking import Checker
from operations.schema.dividing import fits
from operations.schema.explain import Known, explain
from operations.schema.members import place_of
from operations.schema.plans import MISSING, Plan, Planner, Scope
from operations.schema.values import scalar_types

CastPolicy: TypeAlias = Literal["cast", "keep", "create"]
"""`cast` strips, fills and converts; `keep` does the same without stripping; `create` forces the value to match."""


class Normalise(Protocol):
    """Normalises values."""

    def __call__(self, value: Any, work: Work | None = None) -> tuple[Any, list[Change] | None]:
        """Return a value normalised, as fresh JSON builtins, with the changes, or None if it was already valid.

        Args:
            value: The value.
            work: The budget; by default that of the event loop.

        Raises:
            BudgetSpentError: If the budget does not suffice.
            JSONValueError: If a part that the schema does not strip is not JSON and cannot be converted to it.
        """
        ...


_Report: TypeAlias = Callable[[Any, Any, Work | None], list[Change]]
"""Returns the changes between a value and its result."""

_Quick: TypeAlias = Callable[[Any, Work | None], tuple[Any, _Report | None]]
"""Strips, fills and checks a value. Returns the result and a function that finds the changes; None if there are none.

Raises `NeedsRepair` or `ValueError` if the value needs the thorough pass."""

NOT_NORMALISED: Final = "not normalised: budget"
"""The message of the mismatch of a value that was returned unchanged because its budget was spent."""

_MANY = 500
"""The first value of a document with more schemas is not cast in the event loop."""

_WIDE = 100
"""Nor that of a document that tests more schemas along one path."""

_LONG = 50_000
"""Longer lists are not examined at once in the event loop."""

MAX_MISMATCHES = 1_000
"""How many mismatches of one value are counted."""

_ALWAYS_JSON: frozenset[type] = frozenset({int, bool, type(None)})
"""Types that have no value outside JSON."""

_MAX_ROUNDS = 8
"""The largest number of repeated casts, for unions whose members depend on each other's defaults."""


class Caches:
    """The plans and passes of one policy, for one document or for all that share definitions.

    Each entry is created once for each schema, when data first needs it.
    """

    def __init__(self, scope: Scope, policy: CastPolicy) -> None:
        self.creates = policy == "create"
        self.planner = Planner(scope, keep=policy == "keep")
        self._thorough = CreatingPass if self.creates else Pass
        self.quick = StrippingPass(self._thorough(self.planner, FreeWork()), FreeWork())

    def repairing(self, work: Work) -> Pass:
        """Return a thorough pass for one value."""
        return self._thorough(self.planner, work, types=self.quick.find)


def caches_of(scope: Scope, policy: CastPolicy) -> Caches:
    """Return the caches that belong to `scope`."""
    if policy not in scope.caches:
        scope.caches.setdefault(policy, Caches(scope, policy))
    found: Caches = scope.caches[policy]
    return found


class _StrippedInvalidError(NeedsRepair):
    """The value is not valid after stripping and filling.

    Args:
        is_same: Whether that changed nothing.
    """

    def __init__(self, is_same: bool) -> None:
        self.is_same = is_same


class _Repaired(NamedTuple):
    """The result of the thorough pass."""

    value: Any

    edited: bool
    """Whether another round may change it."""

    is_valid: bool
    known: Known


class Normaliser:
    """Normalises values for one document under one policy."""

    def __init__(self, checker: Checker, policy: CastPolicy) -> None:
        caches = self._caches = caches_of(checker.scope, policy)
        self._planner = caches.planner
        self._accepts = checker.accepts
        self._site = checker.document.root
        self._root = caches.planner.plan((self._site,))
        self._place = place_of(caches.planner, [self._root])
        self._quick: _Quick = self._choose
        self._is_used = False
        self._is_exact = False
        """Whether a type expresses the whole schema, so that its values need no validator."""
        self.check_text: Callable[[bytes], Any] | None = None
        """Raises `REFUSALS` unless a JSON text is valid and needs no change under any policy."""

    def normalise(self, value: Any, work: Work | None = None) -> tuple[Any, list[Change] | None]:
        """See `Normalise`."""
        undecided = self._planner.undecided
        report: _Report | None
        edited = False
        try:
            result, report = self._quick(value, work)
        except (NeedsRepair, ValueError) as refusal:
            work = work or InlineWork()
            repaired = self._repair(value, work, refusal)
            result, edited = repaired.value, repaired.edited
            report = partial(self._compared, repaired=repaired)
        unsettled = edited or self._planner.undecided != undecided
        if unsettled and (settled := self._settled(result, work)) is not result:
            changes = self._compared(value, settled, work)
            # A property that is stripped in one round and filled in the next was replaced.
            if self._caches.creates or all(change.kind != "replaced" for change in changes):
                return settled, changes or None
        return result, (report and report(value, result, work)) or None

    def _stripped(self, value: Any, result: Any, work: Work | None) -> list[Change]:
        """Return the changes of the quick pass."""
        return Changes(self._place, work or InlineWork()).compare_names(value, result).listed()

    def _compared(
        self, value: Any, result: Any, work: Work | None, repaired: "_Repaired | None" = None
    ) -> list[Change]:
        """Return all changes between `value` and `result`, and the mismatches of `result`."""
        work = work or InlineWork()
        known: Known = {} if repaired is None else repaired.known
        changes = Changes(self._place, work, creates=self._caches.creates, known=known)
        changes.compare(value, result)
        if not (self._is_accepted(result, work) if repaired is None else repaired.is_valid):
            issues = explain(self._planner, self._site, result, work, MAX_MISMATCHES, known)
            changes.add_mismatches(issues, result)
        return changes.listed()

    def _is_accepted(self, value: Any, work: Work) -> bool:
        """Return whether a JSON value is valid."""
        return fits(self._root, value, work)

    # The quick pass.

    def _choose(self, value: Any, work: Work | None) -> tuple[Any, "_Report | None"]:
        """Choose the fastest implementation when the first value arrives, because many schemas never cast a value."""
        if work is None and (
            len(self._planner.scope.graph.costs) > _MANY or self._root.width > _WIDE
        ):
            # The types and defaults of a large schema take long, once.
            raise BudgetSpentError
        if self._root.is_bare:
            self._quick = self._bare
        else:
            self._quick = self._find_types() or self._checked
        return self._quick(value, work)

    def _bare(self, value: Any, work: Work | None) -> tuple[Any, "_Report | None"]:
        """Only convert to JSON, if every container is valid."""
        if type(value) in self._root.open_containers:
            return to_json_within(value, work), None
        return self._checked(value, work)

    def _checked(self, value: Any, work: Work | None) -> tuple[Any, "_Report | None"]:
        value = without_objects(value, work)
        if work is None and not self._is_small(value):
            work = InlineWork()
        if work is None:
            stripped = self._caches.quick.cast(self._root, value)
            is_valid = self._accepts(stripped)
        else:
            stripped = self._caches.quick.within(work).cast(self._root, value)
            is_valid = self._is_accepted(stripped, work)
        is_same = is_unchanged(value, stripped)
        if not is_valid:
            raise _StrippedInvalidError(is_same)
        return stripped, None if is_same else self._stripped

    def _find_types(self) -> "_Quick | None":
        """Return the quick pass by msgspec types, if the document is simple enough."""
        typed = self._caches.quick.typed(self._root, is_root=True)
        if typed is None or typed.shape.depth == 0:
            return None
        shape = typed.shape
        self._is_exact = shape.exact
        self.check_text = self._caches.quick.check_text(self._root)

        def quick(value: Any, work: Work | None) -> tuple[Any, _Report | None]:
            report: _Report = self._stripped
            given: object = value
            kind = type(given)
            if work is None and kind is list and len(value) > _LONG:
                raise BudgetSpentError
            try:
                stripped, differs = typed.strip(value, work)
            except NeedsRepair:
                if _looks_plain(value):
                    raise
                plain = as_json_within(value, work or InlineWork())
                if plain is value:
                    raise
                stripped, differs = typed.strip(plain, work)
                report = lambda _value, result, work: self._stripped(plain, result, work)  # noqa: E731
            if not shape.exact and not (
                self._accepts(stripped) if work is None else self._is_accepted(stripped, work)
            ):
                raise _StrippedInvalidError(not differs)
            return stripped, report if differs else None

        items, finish, decode = self._place.items, shape.finish_items, typed.decode
        most = typed.most
        if items is None or finish is None:
            return quick
        known: dict[Any, Uniform] = items.reports

        def quick_list(value: Any, work: Work | None) -> tuple[Any, _Report | None]:
            """The quick pass for lists of flat objects, which usually have the same property names."""
            report: _Report | None = None
            try:
                names = tuple(value[0])
                if len(value) > _LONG:
                    return quick(value, work)
                packed = pack(value)
                if len(packed) > most:
                    return quick(value, work)
                stripped = decode(packed)
                uniform = known.get(names) if known else None
                if uniform and uniform.describes(value):
                    uniform.fill(stripped)
                    report = uniform.report
                elif finish(value, stripped):
                    report = self._stripped
            except REFUSALS:
                if value and type(value) is list and is_plain(value[0], MAX_DEPTH):
                    raise NeedsRepair from None
                return quick(value, work)
            if not shape.exact and not (
                self._accepts(stripped) if work is None else self._is_accepted(stripped, work)
            ):
                raise _StrippedInvalidError(report is None)
            return stripped, report

        return quick_list

    def _is_small(self, value: Any) -> bool:
        """Return whether the work of the quick pass need not be counted. Creates no plans the first time."""
        if not self._is_used:
            self._is_used = True
            return False
        try:
            return len(pack(value)) * self._root.weight <= SMALL
        except REFUSALS:
            return False

    # The thorough pass.

    def _settled(self, result: Any, work: Work | None) -> Any:
        """Repeat the cast until the result no longer changes.

        After undeclared properties are removed and defaults filled, other members of a union may match. A declared
        default may be invalid itself.
        """
        seen = {canonical(result): result}
        for _ in range(_MAX_ROUNDS):
            again = self._once(result, work)
            text = canonical(again)
            if work is not None:
                work.spend(len(text))
            if text in seen:
                # The result is stable, or the results repeat in a cycle; then any of them can be used.
                circle = list(seen)[list(seen).index(text) :]
                return seen[min(circle)]
            seen[text] = result = again
        return result

    def _once(self, value: Any, work: Work | None) -> Any:
        """Run both passes; return the result."""
        try:
            return self._checked(value, work)[0]
        except (NeedsRepair, ValueError) as refusal:
            return self._repair(value, work or InlineWork(), refusal).value

    def _repair(self, value: Any, work: Work, refusal: Exception) -> "_Repaired":
        """Run the thorough pass.

        Args:
            value: The value, which the quick pass refused.
            work: The budget.
            refusal: The reason.
        """
        is_invalid = False
        if isinstance(refusal, _StrippedInvalidError):
            if not refusal.is_same and (plain := self._valid(value, work)) is not None:
                return _Repaired(*plain, edited=False, is_valid=True, known={})
            is_invalid = True
        thorough, creates = self._caches.repairing(work), self._caches.creates
        result = thorough.repair(self._root, value)
        if self._is_exact and not creates:
            is_valid = thorough.misfits == 0
        else:
            is_valid = self._is_accepted(result, work)
            # Equal values differ in whole floats only, which are as valid as integers.
            is_unknown = not is_valid and not is_invalid and not is_unchanged(value, result)
            if is_unknown and (plain := self._valid(value, work)) is not None:
                return _Repaired(*plain, edited=False, is_valid=True, known={})
        # Conversions are final unless they may change the choice of a union, or a created value is not valid.
        edited = thorough.edits > 0 and (thorough.chose or creates)
        return _Repaired(result, edited=edited, is_valid=is_valid, known=thorough.known)

    def _valid(self, value: Any, work: Work) -> tuple[Any] | None:
        """Return the JSON of `value` if it is valid, including its undeclared properties."""
        try:
            plain = to_json(value, work=work)
        except JSONValueError:
            return None
        return (plain,) if self._is_accepted(plain, work) else None


class Casts:
    """The casts of one document: its plan, a normaliser for each policy, and the shortcuts for simple schemas.

    Each is created when it is first needed, because many schemas never cast a value.
    """

    __slots__ = ("_check", "_normalisers")

    def __init__(self, check: Checker) -> None:
        self._check = check
        self._normalisers: dict[CastPolicy, Normaliser] = {}

    @property
    def _caches(self) -> Caches:
        return caches_of(self._check.scope, "cast")

    @property
    def planner(self) -> Planner:
        """The plans of the document, or of all documents that share its definitions."""
        return self._caches.planner

    @property
    def plan(self) -> Plan:
        """The merged requirements of the whole document."""
        return self._caches.planner.plan((self._check.document.root,))

    def normaliser(self, policy: CastPolicy) -> Normaliser:
        """Return the normaliser of a policy, which is created once."""
        found = self._normalisers.get(policy)
        if found is None:
            found = self._normalisers[policy] = Normaliser(self._check, policy)
        return found

    @property
    def check_text(self) -> Callable[[bytes], Any] | None:
        """That of the normaliser of `cast`; None if there is none yet."""
        normaliser = self._normalisers.get("cast")
        return None if normaliser is None else normaliser.check_text

    @property
    def certain(self) -> frozenset[type]:
        """The types all of whose values are valid, so that they need neither a check nor a cast."""
        plan = self.plan
        return scalar_types(plan.types or ()) & _ALWAYS_JSON if plan.is_bare else frozenset()

    @property
    def flat(self) -> Callable[[bytes], JSONObject] | None:
        """Decodes a valid object of scalars from MessagePack; see `CompiledSchema.flat`."""
        plan = self.plan
        if plan.choices or plan.types != ("object",) or plan.keeps_unnamed:
            return None
        parts = {name: plan.part(field.sites) for name, field in plan.fields.items()}
        if any(part.leaf_types is None for part in parts.values()):
            return None
        # A cast fills a missing default, so its type does not require the property.
        if any(parts[name].default is not MISSING for name in plan.required):
            return None
        typed = self._caches.quick.typed(plan)
        return typed.decode if typed is not None and typed.shape.exact else None


def within_budget(normalise: Normalise, value: Any, work: Work) -> tuple[Any, list[Change] | None]:
    """Return a value normalised; if the budget is spent, unchanged, with one mismatch.

    Raises:
        BudgetSpentError: If the value cannot even be converted to JSON.
        JSONValueError: As `Normalise`.
    """
    try:
        return normalise(value, work)
    except BudgetSpentError:
        work.renew()
        plain = as_json_within(value, work)
        return plain, [Change("", "mismatch", 1, NOT_NORMALISED)]


def as_json_within(value: Any, work: Work) -> Any:
    """Return a value as JSON; itself if it is JSON already.

    Raises:
        BudgetSpentError: If the budget does not suffice.
        JSONValueError: If some part is not JSON and cannot be converted to it.
    """
    work.spend(count_values(value, work.left // CONVERTED) * CONVERTED)
    if is_plain(value, MAX_DEPTH):
        return as_json(value)
    return to_json(value, work=work)


def _looks_plain(value: Any) -> bool:
    """Return whether a sample of `value`, with the first item of each list, consists of the types of JSON."""
    if is_list(value):
        return not value or _looks_plain(value[0])
    if is_object(value):
        return all(map(_looks_plain, value.values()))
    return is_plain(value, 0)
