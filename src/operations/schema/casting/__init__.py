"""Normalise a value under one policy, with a quick pass and, if necessary, a thorough pass.

Rule 1: the result of the quick pass is checked and used only if it is valid.
Rule 2: a cast never makes a valid value invalid. If stripping would do so, the value stays unchanged.
Rule 3: data that needs no change, which is most data, is recognised before any comparison.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

from operations.base.json.objects import without_objects
from operations.base.json.values import (
    MAX_DEPTH,
    JSONValueError,
    as_json,
    canonical,
    is_list,
    is_object,
    is_plain,
    to_json,
)
from operations.schema.casting.changes import Change, Changes, Uniform
from operations.schema.casting.stripping import StrippingPass
from operations.schema.casting.thorough import CreatingPass, Pass
from operations.schema.casting.typed import REFUSALS, NeedsRepair, is_unchanged, pack
from operations.schema.checking import Checker
from operations.schema.explain import Known, explain
from operations.schema.members import place_of
from operations.schema.plans import Planner, Scope

CastPolicy: TypeAlias = Literal["cast", "keep", "create"]
"""`cast` strips, fills and converts; `keep` does the same without stripping; `create` forces the value to match."""

Normalise: TypeAlias = Callable[[Any], tuple[Any, list[Change] | None]]
"""Takes a value; returns it normalised, as fresh JSON builtins, with the changes, or None if it was already valid.

Raises `JSONValueError` if a part that the schema does not strip is not JSON and cannot be converted to it.
"""

_Report: TypeAlias = Callable[[Any, Any], list[Change]]
"""Returns the changes between a value and its result."""

_Quick: TypeAlias = Callable[[Any], tuple[Any, _Report | None]]
"""Strips, fills and checks a value. Returns the result and a function that finds the changes; None if there are none.

Raises `NeedsRepair` or `ValueError` if the value needs the thorough pass."""

MAX_MISMATCHES = 1_000
"""How many mismatches of one value are counted."""

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
        self.quick = StrippingPass(self._thorough(self.planner))

    def repairing(self) -> Pass:
        """Return a thorough pass for one value."""
        return self._thorough(self.planner, types=self.quick.find)


def caches_of(scope: Scope, policy: CastPolicy) -> Caches:
    """Return the caches that belong to `scope`."""
    if policy not in scope.caches:
        scope.caches.setdefault(policy, Caches(scope, policy))
    found: Caches = scope.caches[policy]
    return found


class _StrippedInvalidError(NeedsRepair):
    """The value is not valid after stripping and filling."""


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
        self._is_exact = False
        """Whether a type expresses the whole schema, so that its values need no validator."""
        self.check_text: Callable[[bytes], Any] | None = None
        """Raises `REFUSALS` unless a JSON text is valid and needs no change under any policy."""

    def normalise(self, value: Any) -> tuple[Any, list[Change] | None]:
        """See `Normalise`."""
        undecided = self._planner.undecided
        report: _Report | None
        edited = False
        try:
            result, report = self._quick(value)
        except (NeedsRepair, ValueError) as refusal:
            repaired = self._repair(value, stripped=isinstance(refusal, _StrippedInvalidError))
            result, edited = repaired.value, repaired.edited
            report = partial(self._compared, repaired=repaired)
        unsettled = edited or self._planner.undecided != undecided
        if unsettled and (settled := self._settled(result)) is not result:
            changes = self._compared(value, settled)
            # A property that is stripped in one round and filled in the next was replaced.
            if self._caches.creates or all(change.kind != "replaced" for change in changes):
                return settled, changes or None
        return result, (report and report(value, result)) or None

    def _stripped(self, value: Any, result: Any) -> list[Change]:
        """Return the changes of the quick pass."""
        return Changes(self._place).compare_names(value, result).listed()

    def _compared(
        self, value: Any, result: Any, repaired: "_Repaired | None" = None
    ) -> list[Change]:
        """Return all changes between `value` and `result`, and the mismatches of `result`."""
        known: Known = {} if repaired is None else repaired.known
        changes = Changes(self._place, creates=self._caches.creates, known=known)
        changes.compare(value, result)
        if not (self._accepts(result) if repaired is None else repaired.is_valid):
            issues = explain(self._planner, self._site, result, MAX_MISMATCHES, known)
            changes.add_mismatches(issues, result)
        return changes.listed()

    # The quick pass.

    def _choose(self, value: Any) -> tuple[Any, "_Report | None"]:
        """Choose the fastest implementation when the first value arrives, because many schemas never cast a value."""
        if self._root.is_bare:
            self._quick = self._bare
        else:
            self._quick = self._find_types() or self._checked
        return self._quick(value)

    def _bare(self, value: Any) -> tuple[Any, "_Report | None"]:
        """Only convert to JSON, if every container is valid."""
        if type(value) in self._root.open_containers:
            return to_json(value), None
        return self._checked(value)

    def _checked(self, value: Any) -> tuple[Any, "_Report | None"]:
        value = without_objects(value)
        stripped = self._caches.quick.cast(self._root, value)
        if not self._accepts(stripped):
            raise _StrippedInvalidError
        return stripped, None if is_unchanged(value, stripped) else self._stripped

    def _find_types(self) -> "_Quick | None":
        """Return the quick pass by msgspec types, if the document is simple enough."""
        typed = self._caches.quick.typed(self._root, is_root=True)
        if typed is None or typed.shape.depth == 0:
            return None
        shape = typed.shape
        self._is_exact = shape.exact
        self.check_text = self._caches.quick.check_text(self._root)

        def quick(value: Any) -> tuple[Any, _Report | None]:
            report: _Report = self._stripped
            try:
                stripped, differs = typed.strip(value)
            except NeedsRepair:
                if _looks_plain(value):
                    raise
                plain = as_json(value)
                if plain is value:
                    raise
                stripped, differs = typed.strip(plain)
                report = lambda _value, result: self._stripped(plain, result)  # noqa: E731
            if not shape.exact and not self._accepts(stripped):
                raise _StrippedInvalidError
            return stripped, report if differs else None

        items, finish, decode = self._place.items, shape.finish_items, typed.decode
        if items is None or finish is None:
            return quick
        known: dict[Any, Uniform] = items.reports

        def quick_list(value: Any) -> tuple[Any, _Report | None]:
            """The quick pass for lists of flat objects, which usually have the same property names."""
            report: _Report | None = None
            try:
                names = tuple(value[0])
                stripped = decode(pack(value))
                uniform = known.get(names) if known else None
                if uniform and uniform.describes(value):
                    uniform.fill(stripped)
                    report = uniform.report
                elif finish(value, stripped):
                    report = self._stripped
            except REFUSALS:
                if value and type(value) is list and is_plain(value[0], MAX_DEPTH):
                    raise NeedsRepair from None
                return quick(value)
            if not shape.exact and not self._accepts(stripped):
                raise _StrippedInvalidError
            return stripped, report

        return quick_list

    # The thorough pass.

    def _settled(self, result: Any) -> Any:
        """Repeat the cast until the result no longer changes.

        After undeclared properties are removed and defaults filled, other members of a union may match. A declared
        default may be invalid itself.
        """
        seen = {canonical(result): result}
        for _ in range(_MAX_ROUNDS):
            again = self._once(result)
            text = canonical(again)
            if text in seen:
                # The result is stable, or the results repeat in a cycle; then any of them can be used.
                circle = list(seen)[list(seen).index(text) :]
                return seen[min(circle)]
            seen[text] = result = again
        return result

    def _once(self, value: Any) -> Any:
        """Run both passes; return the result."""
        is_stripped = False
        try:
            stripped = self._caches.quick.cast(self._root, value)
            is_stripped = True
            if self._accepts(stripped):
                return stripped
        except (NeedsRepair, ValueError):
            pass
        return self._repair(value, stripped=is_stripped).value

    def _repair(self, value: Any, *, stripped: bool) -> "_Repaired":
        """Run the thorough pass.

        Args:
            value: The value, which the quick pass refused.
            stripped: Whether it was refused because it is not valid after stripping and filling.
        """
        if stripped and self._is_valid(value):
            return _Repaired(to_json(value), edited=False, is_valid=True, known={})
        thorough, creates = self._caches.repairing(), self._caches.creates
        result = thorough.repair(self._root, value)
        if self._is_exact and not creates:
            is_valid = thorough.misfits == 0
        else:
            is_valid = self._accepts(result)
            if not is_valid and self._is_valid(value):
                return _Repaired(to_json(value), edited=False, is_valid=True, known={})
        # Conversions are final unless they may change the choice of a union, or a created value is not valid.
        edited = thorough.edits > 0 and (thorough.chose or creates)
        return _Repaired(result, edited=edited, is_valid=is_valid, known=thorough.known)

    def _is_valid(self, value: Any) -> bool:
        """Return whether `value`, including its undeclared properties, is valid."""
        try:
            return self._accepts(to_json(value))
        except JSONValueError:
            return False


def _looks_plain(value: Any) -> bool:
    """Return whether a sample of `value`, with the first item of each list, consists of the types of JSON."""
    if is_list(value):
        return not value or _looks_plain(value[0])
    if is_object(value):
        return all(map(_looks_plain, value.values()))
    return is_plain(value, 0)
