"""Explain why a value is invalid: every failure with its location and a message for people.

The validator of `checking` decides whether a value is valid; this module finds the reasons. The number of failures and
of steps is limited.
"""

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import msgspec

from operations.base.errors import CallError, ErrorCode
from operations.base.json.values import (
    SCALARS,
    JSONValueError,
    is_list,
    is_object,
    object_of,
    short_pointer,
)
from operations.base.text import SUGGESTS, suggestion
from operations.base.types import JSONObject
from operations.base.work import STEP, Work
from operations.schema.compiling import text_test
from operations.schema.dividing import fits, size_of
from operations.schema.members import Member, Tags, fitting_of, nearest, union_at
from operations.schema.plans import PLAN, Plan, Planner
from operations.schema.references import Site, item_keywords
from operations.schema.values import flat_failures, one_of, type_of


class ValidationIssue(msgspec.Struct, frozen=True, rename="camel"):
    """One failure of one value."""

    path: str
    """JSON pointer to the invalid value; empty for the whole value."""

    message: str
    """The problem, as a phrase that follows the path: `is required`, `must be a string, not null`."""

    keyword: str
    """The JSON Schema keyword that failed; `json` if the value is not JSON."""


def mismatch_error(code: str, sentence: str, issues: Sequence[ValidationIssue]) -> CallError:
    """Return the error for an invalid value. Its message names the first issue, its details name all of them."""
    # An unknown property often explains a missing one that was misspelled, so it comes first.
    issues = sorted(issues, key=lambda issue: SUGGESTS not in issue.message)
    first, more = issues[0], f" (and {len(issues) - 1} more)" if len(issues) > 1 else ""
    return CallError(
        code,
        f"{sentence}: {first.path or 'it'} {first.message}{more}",
        {"errors": msgspec.to_builtins(issues)},
    )


def invalid_json(operation_id: str, error: JSONValueError) -> CallError:
    """Return the error for an input that cannot be converted to JSON."""
    issue = ValidationIssue(error.path, error.reason, "json")
    return mismatch_error(ErrorCode.VALIDATION_ERROR, f"Invalid input of {operation_id}", [issue])


def _wrong_tag(
    members: list[Member], tags: Tags | None, value: JSONObject
) -> tuple[str, list[Any]] | None:
    """Return the property that selects an alternative but has none of the expected values, and these values."""
    if tags is not None and tags.choices and tags.name in value and not tags.named(value):
        return tags.name, tags.choices
    plans = [plan for _, plan in members]
    if len(plans) == 1:
        return None
    for name, item in value.items():
        parts = [
            plan.part(plan.fields[name].sites) if name in plan.fields else None for plan in plans
        ]
        found = [None if part is None else part.constants for part in parts]
        is_tag = None not in found and any(group != found[0] for group in found)
        if is_tag and not any(part and part.is_constant(item) for part in parts):
            choices = [constant for group in found for constant in group or ()]
            return name, [each for i, each in enumerate(choices) if each not in choices[:i]]
    return None


def evaluated(planner: Planner, site: Site, value: Any, work: Work) -> set[Any]:
    """Return the names or indexes that a schema at `site`, other than `unevaluated*`, has evaluated in a container."""
    schema = planner.document.keywords(site)
    found: set[Any]
    everything: set[Any]
    work.spend(STEP + len(value) * _ENTRY)
    if is_object(value):
        everything, rest, unevaluated = set(value), "additionalProperties", "unevaluatedProperties"
        found = set(schema.get("properties", ())) & everything
        for pattern in schema.get("patternProperties", ()):
            found.update(_named(pattern, value, work))
    else:
        first, rest = item_keywords(schema)
        everything, unevaluated = set(range(len(value))), "unevaluatedItems"
        found = set(range(len(schema.get(first, ()))))
        # Up to 2019-09, `contains` did not evaluate items.
        if "contains" in schema and first == "prefixItems":
            wanted = planner.plan((planner.document.at(site, "contains"),))
            found.update(index for index, item in enumerate(value) if fits(wanted, item, work))
    if rest in schema:
        return everything
    for member in _applied(planner, site, value, work):
        if unevaluated in planner.document.keywords(member):
            return everything
        found |= evaluated(planner, member, value, work)
    return found


def _named(pattern: str, value: JSONObject, work: Work) -> set[str]:
    """Return the names of properties that match a pattern."""
    work.spend(len(value) * 3 * _ENTRY + size_of([*value]) * len(pattern) * 2 // 5)
    return set(filter(text_test(pattern), value))


def _applied(planner: Planner, site: Site, value: Any, work: Work) -> Iterator[Site]:
    """Yield the schemas that apply to the same value as `site`, and accept it."""
    at, schema = planner.document.at, planner.document.keywords(site)
    candidates = [target for _, target in planner.document.references(site) if target]
    for keyword in ("allOf", "anyOf", "oneOf"):
        candidates += [at(site, keyword, index) for index in range(len(schema.get(keyword, ())))]
    if "if" in schema:
        holds = fits(planner.plan((at(site, "if"),)), value, work)
        candidates += [
            at(site, name) for name in ("if", "then" if holds else "else") if name in schema
        ]
    dependents: JSONObject = schema.get("dependentSchemas", {})
    candidates += [at(site, "dependentSchemas", name) for name in dependents if name in value]
    yield from (member for member in candidates if fits(planner.plan((member,)), value, work))


MAX_ISSUES = 100
"""How many failures are reported for one value."""

_MAX_STEPS = 10_000
"""The largest number of checks of a value against a schema in one explanation."""

_ISSUE = 5 * STEP
"""The units of work to follow one schema at one place."""

_ENTRY = 4
"""The units of work for one property or item, beside those of its value."""

_COMPARED = frozenset({"const", "enum", "uniqueItems"})

_LONG = 20
"""Similar names are not suggested for objects with more properties than this."""


class Valid(NamedTuple):
    """A reason to know that parts of a value are valid."""

    plan: Plan
    """What they are valid for."""

    differs: bool
    """Whether they may differ from the values that they were cast from, in stripped and filled properties only."""


Known: TypeAlias = Mapping[int, Valid]
"""The parts of a value that are known to be valid, by their ids."""

NONE_KNOWN: Known = MappingProxyType({})


def explain(
    planner: Planner,
    root: Site,
    value: Any,
    work: Work,
    limit: int = MAX_ISSUES,
    known: Known = NONE_KNOWN,
    *,
    into: list[ValidationIssue] | None = None,
) -> list[ValidationIssue]:
    """Return at most `limit` failures of `value`, a JSON value that the validator of `root` rejects.

    Args:
        planner: Creates the plans.
        root: The schema.
        value: The value.
        work: The budget.
        limit: The largest number of failures.
        known: The parts of the value that are known to be valid.
        into: The list to fill, which has the failures so far if an error is raised.

    Raises:
        BudgetSpentError: If the budget is spent.
    """
    found: list[ValidationIssue] = [] if into is None else into
    seen = set[ValidationIssue]()
    for issue in _Walk(planner, work, known).issues(root, value, ""):
        if issue not in seen:
            seen.add(issue)
            found.append(issue)
        if len(found) == limit:
            break
    if not found:
        found.append(ValidationIssue("", "does not match the schema", "schema"))
    return found


class _Walk:
    """One explanation, which follows the schema and the value in parallel."""

    def __init__(self, planner: Planner, work: Work, known: Known) -> None:
        self._planner = planner
        self._work = work
        self._made = planner.made
        self._known = known
        self._document = planner.document
        self._seen: set[tuple[str, str]] = set()

    def issues(self, site: Site, value: Any, path: str) -> Iterator[ValidationIssue]:
        """Yield the failures of `value`, located at `path`, against one schema."""
        if (site.pointer, path) in self._seen or len(self._seen) >= _MAX_STEPS:
            return
        self._seen.add((site.pointer, path))
        made = self._planner.made
        self._work.spend(_ISSUE + (made - self._made) * PLAN)
        self._made = made
        if site.schema is False:
            yield ValidationIssue(path, "is not allowed here", "false")
            return
        schema = self._document.keywords(site)
        if not _COMPARED.isdisjoint(schema):
            # Compared in Python.
            compared = [schema.get("enum"), schema.get("const"), value]
            self._work.spend(sum(size_of(each) for each in compared if each is not None) * STEP)
        for keyword, message in flat_failures(schema, value):
            yield ValidationIssue(path, message, keyword)
        for keyword, target in self._document.references(site):
            if target is not None:
                yield from self.issues(target, value, path)
            elif not self._matches(site, value):
                yield ValidationIssue(path, f"does not match {schema[keyword]}", keyword)
        yield from self._in_place(site, schema, value, path)
        if is_object(value):
            yield from self._object(site, schema, value, path)
        elif is_list(value):
            yield from self._array(site, schema, value, path)

    def _matches(self, site: Site, value: Any) -> bool:
        return fits(self._planner.plan((site,)), value, self._work)

    def _test(self, site: Site) -> Callable[[Any], bool]:
        """Return the validator of a schema, which selects the invalid parts of a value: most parts are valid."""
        plan, work = self._planner.plan((site,)), self._work
        return lambda value: fits(plan, value, work)

    def _in_place(
        self, site: Site, schema: JSONObject, value: Any, path: str
    ) -> Iterator[ValidationIssue]:
        at = self._document.at
        for index in range(len(schema.get("allOf", ()))):
            yield from self.issues(at(site, "allOf", index), value, path)
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                yield from self._alternatives(site, keyword, value, path)
        if "not" in schema and self._matches(at(site, "not"), value):
            yield ValidationIssue(path, "matches a schema that it must not match", "not")
        if "if" in schema and ("then" in schema or "else" in schema):
            branch = "then" if self._matches(at(site, "if"), value) else "else"
            if branch in schema:
                yield from self.issues(at(site, branch), value, path)

    def _alternatives(
        self, site: Site, keyword: str, value: Any, path: str
    ) -> Iterator[ValidationIssue]:
        """Yield the failures of the alternative that is nearest to the value."""
        union = union_at(self._planner, site, keyword)
        fitting = len(fitting_of(union.candidates(value), value, self._work))
        if fitting > 1 and keyword == "oneOf":
            yield ValidationIssue(
                path, f"matches {fitting} of the alternatives instead of one", keyword
            )
        if fitting:
            return
        kind = type_of(value)
        likely = union.named(value) or union.of_kind(kind)
        constants = [plan.constants for _, plan in likely]
        tags = union.tags if is_object(value) else None
        if not likely:
            types = dict.fromkeys(name for _, plan in union.members for name in plan.types or ())
            yield ValidationIssue(
                path, f"must be of type {' or '.join(types)}, not {kind}", keyword
            )
        elif None not in constants:
            choices = [constant for group in constants for constant in group or ()]
            yield ValidationIssue(path, one_of(choices, value), keyword)
        elif is_object(value) and (tag := _wrong_tag(likely, tags, value)):
            name, choices = tag
            place = path + short_pointer(name)
            yield ValidationIssue(place, one_of(choices, value[name]), keyword)
        else:
            yield from self.issues(nearest(likely, value, self._work), value, path)

    def _object(
        self, site: Site, schema: JSONObject, value: JSONObject, path: str
    ) -> Iterator[ValidationIssue]:
        at = self._document.at
        self._work.spend(len(value) * 2 * _ENTRY)
        properties: JSONObject = schema.get("properties", {})
        for name in schema.get("required", ()):
            # In draft 4 and older, `required: true` may appear in other places; the meta-schema reports it.
            if name not in value:
                yield ValidationIssue(path + short_pointer(name), "is required", "required")
        yield from self._dependencies(site, schema, value, path)
        for name in filter(properties.__contains__, value):
            (part, plan), item = self._planner.property(site, name), value[name]
            if type(item) not in SCALARS or not fits(plan, item, self._work):
                yield from self.issues(part, item, path + short_pointer(name))
        unnamed = value.keys() - properties.keys()
        for pattern in schema.get("patternProperties", ()):
            matched = _named(pattern, value, self._work)
            unnamed -= matched
            yield from self._parts(site, ("patternProperties", pattern), matched, value, path)
        if "additionalProperties" in schema:
            yield from self._parts(site, ("additionalProperties",), unnamed, value, path)
        if "propertyNames" in schema:
            names = at(site, "propertyNames")
            for name in itertools.filterfalse(self._test(names), value):
                place = path + short_pointer(name)
                for issue in self.issues(names, name, place):
                    yield ValidationIssue(
                        place, f"has a name that {issue.message}", "propertyNames"
                    )
        if "unevaluatedProperties" in schema:
            rest = value.keys() - evaluated(self._planner, site, value, self._work)
            yield from self._parts(site, ("unevaluatedProperties",), rest, value, path)

    def _parts(
        self,
        site: Site,
        tokens: tuple[str, ...],
        names: Collection[str],
        value: JSONObject,
        path: str,
    ) -> Iterator[ValidationIssue]:
        """Yield the failures of the properties that share the schema below `site`, in the order of the value."""
        part = self._document.at(site, *tokens)
        self._work.spend(len(value) * _ENTRY)
        if part.schema is not False or "patternProperties" in tokens:
            test = self._test(part)
            for name in [name for name in value if name in names and not test(value[name])]:
                yield from self.issues(part, value[name], path + short_pointer(name))
            return
        known = object_of(object_of(site.schema).get("properties")).keys() - value.keys()
        for name in [name for name in value if name in names]:
            near = suggestion(name, known) if len(value) <= _LONG else ""
            message = f"is not a known property{near and '.'}{near}"
            yield ValidationIssue(path + short_pointer(name), message, tokens[0])

    def _dependencies(
        self, site: Site, schema: JSONObject, value: JSONObject, path: str
    ) -> Iterator[ValidationIssue]:
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
            dependents: JSONObject = schema.get(keyword, {})
            for name, wanted in dependents.items():
                if name not in value:
                    continue
                if not is_list(wanted):
                    yield from self.issues(self._document.at(site, keyword, name), value, path)
                    continue
                for other in wanted:
                    if other not in value:
                        place = path + short_pointer(other)
                        yield ValidationIssue(place, f"is required beside {name!r}", keyword)

    def _array(
        self, site: Site, schema: JSONObject, value: list[Any], path: str
    ) -> Iterator[ValidationIssue]:
        first, rest = item_keywords(schema)
        start = len(schema.get(first, ()))
        for index, item in enumerate(value[:start]):
            yield from self.issues(self._document.at(site, first, index), item, f"{path}/{index}")
        if rest in schema:
            yield from self._items(site, rest, range(start, len(value)), value, path)
        if "contains" in schema:
            yield from self._contains(site, schema, value, path)
        if "unevaluatedItems" in schema:
            left = sorted(
                set(range(len(value))) - evaluated(self._planner, site, value, self._work)
            )
            yield from self._items(site, "unevaluatedItems", left, value, path)

    def _items(
        self, site: Site, keyword: str, places: Sequence[int], value: list[Any], path: str
    ) -> Iterator[ValidationIssue]:
        rest = self._document.at(site, keyword)
        plan, known = self._planner.plan((rest,)), self._known
        self._work.spend(len(places) * _ENTRY)
        if known:
            # In C, because most items are known.
            found = map(known.get, map(id, map(value.__getitem__, places)))
            pairs = zip(places, found, strict=True)
            places = [index for index, valid in pairs if valid is None or valid.plan is not plan]
        for index in places:
            if rest.schema is False:
                yield ValidationIssue(f"{path}/{index}", "is one item too many", keyword)
            elif not fits(plan, value[index], self._work):
                yield from self.issues(rest, value[index], f"{path}/{index}")

    def _contains(
        self, site: Site, schema: JSONObject, value: list[Any], path: str
    ) -> Iterator[ValidationIssue]:
        wanted = self._document.at(site, "contains")
        found = sum(self._matches(wanted, item) for item in value)
        least, most = schema.get("minContains", 1), schema.get("maxContains")
        if found < least:
            message = (
                f"must contain at least {least} matching item{'s' * (least != 1)}, not {found}"
            )
            yield ValidationIssue(path, message, "contains")
        elif most is not None and found > most:
            message = f"must contain at most {most} matching item{'s' * (most != 1)}, not {found}"
            yield ValidationIssue(path, message, "maxContains")
