"""Merge the requirements of several schemas for one value into a plan for casting it.

References, `allOf` and the matching members of a union apply to the same value. A `Plan` merges them, so that a
property that one schema declares is not stripped because another does not declare it.

Rule 1: references and `allOf` are merged in advance. A keyword that depends on the value (`anyOf`, `oneOf`, `if`,
        `dependentSchemas`) becomes a `Choice`; `Plan.pick` returns the plan for one outcome of it.
Rule 2: plans are created when data first needs them, and cached. Their number is limited, also for a hostile document.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any, Final, TypeAlias

import msgspec

from operations.base.json.values import MAX_NAME, SCALARS, is_list, is_object, object_of
from operations.base.types import JSONObject
from operations.schema.checking import Checker, SharedDefinitions
from operations.schema.compiling import ANY_TEXT, text_test
from operations.schema.references import VARIANTS, Document, Site, is_annotation, item_keywords
from operations.schema.values import has_type, identity, scalar_types, type_of

PLAN: Final = 2_000
"""The units of work to create a plan."""

_EVERY_TYPE = ("string", "integer", "number", "boolean", "null", "object", "array")


class Facet(msgspec.Struct, frozen=True, gc=False):
    """The keywords of one of the merged schemas."""

    site: Site
    keywords: JSONObject


def constants_of(facets: tuple[Facet, ...]) -> list[Any] | None:
    """Return the values that every `const` and `enum` allows."""
    allowed: list[Any] | None = None
    for facet in facets:
        keywords = facet.keywords
        for listed in ([keywords["const"]] if "const" in keywords else None, keywords.get("enum")):
            if is_list(listed):
                before = None if allowed is None else set(map(identity, allowed))
                allowed = [
                    member for member in listed if before is None or identity(member) in before
                ]
    return allowed


def types_of(facets: tuple[Facet, ...], constants: list[Any] | None) -> tuple[str, ...] | None:
    """Return the types that every `type` allows; an integer is also a number."""
    allowed: tuple[str, ...] | None = None
    for facet in facets:
        named = facet.keywords.get("type")
        if named is not None:
            names = named if is_list(named) else [named]
            allowed = tuple(names) if allowed is None else _both(allowed, names)
    if constants is None:
        return allowed
    seen = list(dict.fromkeys(type_of(constant) for constant in constants))
    return tuple(seen) if allowed is None else _both(allowed, seen)


def _both(first: tuple[str, ...], second: list[str]) -> tuple[str, ...]:
    found = [
        name
        for name in _EVERY_TYPE
        if (name in first or (name == "integer" and "number" in first))
        and (name in second or (name == "integer" and "number" in second))
    ]
    if "number" in found and "integer" in found:
        found.remove("integer")
    order = {name: index for index, name in enumerate(first)}
    return tuple(sorted(found, key=lambda name: order.get(name, order.get("number", 0))))


MISSING: Final[Any] = object()
"""Marks an absent value; None is the value null."""

_OBJECT_HINTS = ("properties", "required", "additionalProperties", "patternProperties")
_ARRAY_HINTS = ("prefixItems", "items", "minItems", "maxItems")
_USED = frozenset({
    "additionalItems", "additionalProperties", "const", "enum", "exclusiveMaximum", "exclusiveMinimum", "items",
    "maxItems", "maxLength", "maximum", "minItems", "minLength", "minimum", "multipleOf", "not", "pattern",
    "patternProperties", "prefixItems", "properties", "required", "type", "unevaluatedProperties", "uniqueItems",
})  # fmt: skip
_MAX_NAMES = 1_000
"""How many plans of undeclared properties are cached."""

_MAX_SHARED = 20
"""The number of names that a plan stores for properties with the same plan, so that large unions need little memory."""

_SWEEPING = frozenset({"additionalProperties", "patternProperties", "unevaluatedProperties"})
"""Keywords for undeclared properties."""

_CONTAINERS: tuple[tuple[type, str], ...] = ((dict, "object"), (list, "array"))
_NOTHING: frozenset[str] = frozenset()
_NO_TYPES: frozenset[type] = frozenset()
_TYPE = frozenset({"type"})
_ITEMS = frozenset({"type", "items"})
_LISTED = frozenset({"type", "const", "enum"})
_MERE = frozenset(
    {"$comment", "$defs", "$ref", "definitions", "deprecated", "description", "title"}
)


Scope: TypeAlias = Checker | SharedDefinitions
"""The owner of plans: one document, or all documents that share definitions."""


class Choice(msgspec.Struct, frozen=True, gc=False):
    """A part of a plan that depends on the value."""

    members: tuple[Site, ...] = ()
    """The members of an `anyOf` or a `oneOf`."""

    is_exclusive: bool = False
    """Whether exactly one member must match."""

    variants: JSONObject = {}
    """The annotation `VARIANTS`."""

    condition: Site | None = None
    """The schema of an `if`."""

    name: str = ""
    """The property that a schema of `dependentSchemas` depends on."""

    then: Site | None = None
    otherwise: Site | None = None

    def named(self, value: Any) -> Site | None:
        """Return the member that the value itself names; None if it names none."""
        if not self.variants or not is_object(value):
            return None
        tag = value.get(self.variants["property"])
        members: dict[str, int] = self.variants["members"]
        return self.members[members[tag]] if isinstance(tag, str) and tag in members else None


class FieldPlan(msgspec.Struct, frozen=True, gc=False):
    """The part of a plan for one property name."""

    sites: tuple[Site, ...]

    kept: bool
    """Whether the property is kept; undeclared properties are stripped."""

    barred: bool
    """Whether a schema forbids this property."""


class Planner:
    """The plans of one document.

    Args:
        scope: The validators of the document, or of all documents that share definitions.
        keep: Whether undeclared properties are kept.

    Attributes:
        scope: The validators.
        document: The references.
        keep: Whether undeclared properties are kept.
        made: The number of plans that were created so far.
        undecided: The number of choices so far whose outcome may change after stripping and filling
            (`Plan.is_unstable`). Compared before and after a cast.
        defaults: The declared defaults of plans, cast; a cache of the module `thorough`.
        places, unions: Caches of the module `members`.
    """

    def __init__(self, scope: Scope, *, keep: bool = False) -> None:
        self.scope = scope
        self.keep = keep
        self.document: Document = scope.document
        self.made = 0
        self.undecided = 0
        self.defaults: dict[Plan, Any] = {}
        self.places: dict[Any, Any] = {}
        self.unions: dict[Any, Any] = {}
        self._properties: dict[tuple[str, str], tuple[Site, Plan]] = {}
        self._beyond = Plan(self, (), (), (), asked=_NOTHING, opaque=True)
        self._plans: dict[tuple[str, ...], Plan] = {}

    def plan(self, sites: tuple[Site, ...]) -> "Plan":
        """Return the plan for a value to which all of `sites` apply; without sites, every value is valid."""
        direct = tuple(map(self.direct, sites))
        return self._kept(tuple(site.pointer for site in direct), direct, direct)

    def property(self, site: Site, name: str) -> "tuple[Site, Plan]":
        """Return the schema of a declared property, and its plan."""
        key = site.pointer, name
        found = self._properties.get(key)
        if found is None:
            part = self.document.at(site, "properties", name)
            found = self._properties[key] = part, self.plan((part,))
        return found

    def direct(self, site: Site) -> Site:
        """Return the target of a schema that is only a reference, so that equal plans are the same."""
        while "$ref" in (keywords := self.document.keywords(site)) and _MERE.issuperset(keywords):
            target = next(target for _, target in self.document.references(site))
            if target is None:
                break
            site = target
        return site

    def pick(self, plan: "Plan", picks: tuple[Site, ...]) -> "Plan":
        """Return the plan for one outcome of the choices of `plan`."""
        sites = plan.sites + picks
        key = (*(site.pointer for site in plan.sites), "|", *(site.pointer for site in picks))
        return self._kept(key, sites, picks, plan)

    def _kept(
        self,
        key: tuple[str, ...],
        sites: tuple[Site, ...],
        fresh: tuple[Site, ...],
        chosen_from: "Plan | None" = None,
    ) -> "Plan":
        """Return the plan with this key, which is built when first needed."""
        found = self._plans.get(key)
        if found is None:
            if len(self._plans) >= self.scope.max_plans:
                return self._beyond
            self.made += 1
            facets = list(chosen_from.facets) if chosen_from else []
            asked = chosen_from.asked if chosen_from else _NOTHING
            choices: list[Choice] = []
            known = [self._merge(site, facets, choices) for site in fresh]
            if choices:
                asked = asked.union(*(self._asked(choice) for choice in choices))
            found = Plan(
                self, sites, tuple(facets), tuple(choices), asked=asked, opaque=not all(known)
            )
            self._plans[key] = found
        return found

    def _asked(self, choice: Choice) -> list[str]:
        """Return the names that a condition depends on. Stripping these properties would change its outcome."""
        if choice.condition is not None:
            return list(self.plan((choice.condition,)).fields)
        return [choice.name] if choice.name else []

    def _merge(self, site: Site, facets: list[Facet], choices: list[Choice]) -> bool:
        """Add the keywords of `site`; return False if only the validator can evaluate some of them."""
        if any(facet.site.pointer == site.pointer for facet in facets):
            return True
        document, known = self.document, True
        keywords = document.keywords(site)
        # First the target of a reference, so that keywords beside the reference take precedence.
        own = Facet(site, keywords)
        for _, target in document.references(site):
            known = target is not None and self._merge(target, facets, choices) and known
        for index in range(len(keywords.get("allOf", ()))):
            known = self._merge(document.at(site, "allOf", index), facets, choices) and known
        if isinstance(site.schema, bool):
            # A `false` schema rejects every value, but has no facet.
            return site.schema
        facets.append(own)
        choices.extend(_choices(document, own))
        return known


def _choices(document: Document, facet: Facet) -> list[Choice]:
    site, keywords = facet.site, facet.keywords
    found: list[Choice] = []
    for keyword in ("anyOf", "oneOf"):
        if keywords.get(keyword):
            count = len(keywords[keyword])
            members = (document.at(site, keyword, i) for i in range(count))
            variants = _variants(keywords.get(VARIANTS), count)
            found.append(Choice(tuple(members), keyword == "oneOf", variants))
    if "if" in keywords and ("then" in keywords or "else" in keywords):
        then, otherwise = (
            document.at(site, name) if name in keywords else None for name in ("then", "else")
        )
        condition = document.at(site, "if")
        found.append(Choice(condition=condition, then=then, otherwise=otherwise))
    for keyword in ("dependentSchemas", "dependencies"):
        dependents: JSONObject = keywords.get(keyword, {})
        for name, member in dependents.items():
            if not isinstance(member, list):
                found.append(Choice(name=name, then=document.at(site, keyword, name)))
    return found


def _variants(node: Any, count: int) -> JSONObject:
    """Return a usable annotation of a union with `count` members, or an empty object."""
    variants = object_of(node)
    members = object_of(variants.get("members"))
    indices = {
        tag: index for tag, index in members.items() if type(index) is int and 0 <= index < count
    }
    name = variants.get("property")
    return {"property": name, "members": indices} if isinstance(name, str) and indices else {}


class Plan:
    """The merged requirements of the schemas at `sites`.

    Attributes:
        sites: The schemas, before merging.
        facets: The merged schemas.
        choices: The parts that depend on the value.
        asked: Properties that a condition of this plan, or of the plan that it was picked from, depends on.
        opaque: Whether a keyword cannot be planned; all properties are then kept.
        types: The allowed JSON types, in the order of the schema; None for any.
        constants: The allowed values; None for any.
        default: The declared default, or `MISSING`. The last of several is used.
        required: The required properties.
    """

    def __init__(
        self,
        planner: Planner,
        sites: tuple[Site, ...],
        facets: tuple[Facet, ...],
        choices: tuple[Choice, ...],
        *,
        asked: frozenset[str],
        opaque: bool,
    ) -> None:
        self._planner = planner
        self._accepts: Callable[[Any], bool] | None = None
        self.sites = sites
        self.facets = facets
        self.choices = choices
        self.asked = asked
        self.opaque = opaque
        self.constants = constants_of(facets)
        self.types = types_of(facets, self.constants)
        self.default = next(
            (f.keywords["default"] for f in reversed(facets) if "default" in f.keywords), MISSING
        )
        self.required = dict.fromkeys(n for f in facets for n in f.keywords.get("required", ()))
        self.is_map = not any(facet.keywords.get("properties") for facet in facets)
        self.is_patterned = any("patternProperties" in facet.keywords for facet in facets)
        self._sweeping = tuple(f for f in facets if not _SWEEPING.isdisjoint(f.keywords))

    @property
    def accepts(self) -> Callable[[Any], bool]:
        """Returns whether a JSON value is valid for all merged schemas."""
        # Not a `cached_property`: in Python 3.11, plans of other documents would wait while this one is compiled.
        if self._accepts is None:
            # A validator is worthwhile only if there is more to check than the type or a list of constants.
            if self.is_bare:
                self._accepts = self._has_type
            elif self.is_listed:
                self._accepts = self.is_constant
            else:
                self._accepts = self._planner.scope.accepts_at(self.sites)
        return self._accepts

    @cached_property
    def width(self) -> int:
        """The number of schemas that a check tests along one path into the value, at most."""
        graph = self._planner.scope.graph
        width = sum([graph.costs.get(site.pointer, 1) for site in self.sites])
        return max(width, 1) * (max(len(graph.costs), 1) if graph.has_unknown else 1)

    @cached_property
    def pattern_length(self) -> int:
        """The total length of the patterns that a check applies along one path into the value, at most."""
        patterns = self._planner.scope.graph.patterns
        return sum([patterns.get(site.pointer, 0) for site in self.sites]) if patterns else 0

    @cached_property
    def weight(self) -> int:
        """The units of work to check one value, or one character of it."""
        return self.width + self.pattern_length * 2 // 5

    def _has_type(self, value: Any) -> bool:
        return self.types is None or has_type(value, *self.types)

    @cached_property
    def is_unknown(self) -> bool:
        """Whether the plan has no keywords that affect a cast."""
        if self.opaque or self.choices:
            return self.opaque
        return not any(_USED.intersection(facet.keywords) for facet in self.facets)

    @property
    def is_bare(self) -> bool:
        """Whether the plan consists of a type only, so that every value of that type is valid."""
        return (
            bool(self.facets) and not self.choices and not self.opaque and self.assertions <= _TYPE
        )

    @cached_property
    def is_listed(self) -> bool:
        """Whether exactly the values among `constants`, which are scalars, are valid."""
        return (
            self.constants is not None
            and not self.choices
            and not self.opaque
            and self.assertions <= _LISTED
            and all(type(each) in SCALARS and self.allows(type_of(each)) for each in self.constants)
        )

    @cached_property
    def certain(self) -> frozenset[type]:
        """The types of scalars whose values are valid if they are JSON."""
        return scalar_types(self.types) if self.is_bare and self.types else _NO_TYPES

    @cached_property
    def holds_texts(self) -> bool:
        """Whether every array of texts is valid."""
        if self.choices or self.opaque or not self.assertions <= _ITEMS or not self.allows("array"):
            return False
        first, rest = self.items
        return not first and str in rest.certain

    @cached_property
    def texts(self) -> frozenset[str]:
        """The texts that are valid, if the plan consists of constants only."""
        if not self.is_listed:
            return _NOTHING
        return frozenset(
            each for each in self.constants or () if type(each) is str and each.isascii()
        )

    @cached_property
    def open_containers(self) -> frozenset[type]:
        """The types of containers that are valid with any JSON content."""
        if not self.is_bare:
            return frozenset()
        return frozenset(kind for kind, name in _CONTAINERS if self.allows(name))

    @property
    def assertions(self) -> frozenset[str]:
        """The keywords that decide which values are valid."""
        return frozenset(
            name
            for facet in self.facets
            for name, held in facet.keywords.items()
            if not is_annotation(name) and (name != "pattern" or held != ANY_TEXT)
        )

    def is_constant(self, value: Any) -> bool:
        """Return whether a JSON value is one of `constants`."""
        return identity(value) in self._identities

    @cached_property
    def _identities(self) -> frozenset[Any]:
        return frozenset(map(identity, self.constants or ()))

    @cached_property
    def is_unstable(self) -> bool:
        """Whether a choice may change after stripping and filling, because it depends on more than the type."""
        choices = [[self.member(member) for member in choice.members] for choice in self.choices]
        return any(
            not members or sum(member.allows(kind) for member in members) > 1
            for members in choices
            for kind in ("object", "array")
        )

    def allows(self, kind: str) -> bool:
        """Return whether values of the JSON type `kind` are allowed."""
        if self.types is None or kind in self.types:
            return True
        return kind == "integer" and "number" in self.types

    def pick(self, picks: tuple[Site, ...]) -> "Plan":
        """Return the plan with the schemas `picks` instead of the choices."""
        return self._planner.pick(self, picks)

    def member(self, site: Site) -> "Plan":
        """Return the plan of a single member of a choice."""
        return self._planner.plan((site,))

    def part(self, sites: tuple[Site, ...]) -> "Plan":
        """Return the plan for a part of the value."""
        return self._planner.plan(sites)

    @cached_property
    def leaf_types(self) -> frozenset[type] | None:
        """The exact types of the scalars that the plan accepts; None if it also accepts containers or has no types.

        The validator checks these scalars, so that no other check is needed.
        """
        return self.scalars if _takes_no_container(self) else None

    @cached_property
    def scalars(self) -> frozenset[type] | None:
        """The exact types of the scalars that the plan accepts, beside containers; None if unknown."""
        known_types = [] if self.types is None else [scalar_types(self.types)]
        for choice in self.choices:
            members = [self.member(member).scalars for member in choice.members]
            known = [member for member in members if member is not None]
            if known and len(known) == len(members):
                known_types.append(frozenset[type]().union(*known))
        if len(known_types) < 2:
            # Avoid an intersection with an empty set, which would create a copy for every plan.
            return known_types[0] if known_types else None
        return known_types[0].intersection(*known_types[1:])

    def keyword(self, name: str) -> list[Any]:
        """Return the value of the keyword in each schema that has it."""
        return [facet.keywords[name] for facet in self.facets if name in facet.keywords]

    @cached_property
    def fields(self) -> dict[str, FieldPlan]:
        """The properties known by name."""
        declared: dict[str, list[Facet]] = {}
        for facet in self.facets:
            for name in facet.keywords.get("properties", ()):
                declared.setdefault(name, []).append(facet)
        for name in self.required:
            declared.setdefault(name, [])
        return {name: self._field(name, facets) for name, facets in declared.items()}

    @cached_property
    def names(self) -> "list[Plan]":
        """The plans for the names of properties."""
        at = self._planner.document.at
        sites = [f.site for f in self.facets if "propertyNames" in f.keywords]
        return [self.part((at(site, "propertyNames"),)) for site in sites]

    @cached_property
    def fillable(self) -> list[tuple[str, "Plan"]]:
        """The properties that may be added to an object: those that are required or have a default."""
        parts = [(n, self.part(f.sites)) for n, f in self.fields.items() if not f.barred]
        return [(n, p) for n, p in parts if n in self.required or p.default is not MISSING]

    @cached_property
    def children(self) -> "_Children":
        """The plans of properties by name; None for a property that is stripped."""
        return _Children(self)

    def listed(self, field: FieldPlan) -> list[Any] | None:
        """Return the constants of a property if its schema lists them; creates no plan for other properties."""
        planner = self._planner
        schemas = (planner.document.keywords(planner.direct(site)) for site in field.sites)
        is_listed = any("const" in schema or "enum" in schema for schema in schemas)
        return self.part(field.sites).constants if is_listed else None

    def field(self, name: str) -> FieldPlan:
        """Return the schemas of the property `name`."""
        return self.fields.get(name) or self._field(name, [])

    def _field(self, name: str, declaring: list[Facet]) -> FieldPlan:
        at = self._planner.document.at
        sites = [at(facet.site, "properties", name) for facet in declaring]
        needed = name in self.required or name in self.asked
        known = self.opaque or self.is_map or needed or bool(sites)
        forbidden = any(site.schema is False for site in sites)
        for facet in self._sweeping:
            site, keywords = facet.site, facet.keywords
            mine = name in keywords.get("properties", ())
            for pattern in keywords.get("patternProperties", ()):
                if text_test(pattern)(name):
                    sites.append(at(site, "patternProperties", pattern))
                    mine = True
            known = known or mine
            rest = MISSING if mine else keywords.get("additionalProperties", MISSING)
            forbidden = forbidden or rest is False
            if isinstance(rest, dict):
                sites.append(at(site, "additionalProperties"))
            known = known or rest is True or isinstance(rest, dict)
        if not known:
            for facet in self._sweeping:
                rest = facet.keywords.get("unevaluatedProperties", False)
                if rest is not False:
                    sites.append(at(facet.site, "unevaluatedProperties"))
                    known = True
        # A closed schema that does not declare the name would always reject the property.
        kept = self._planner.keep or (known and (needed or not forbidden))
        return FieldPlan(tuple(sites), kept, barred=forbidden)

    @cached_property
    def keeps_unnamed(self) -> bool:
        """Whether properties that are not in `fields` may be kept."""
        return (
            self._planner.keep
            or self.opaque
            or self.is_map
            or self.is_patterned
            or bool(self.asked)
            or any(rest is not False for rest in self.keyword("additionalProperties"))
            or any(rest is not False for rest in self.keyword("unevaluatedProperties"))
        )

    def item(self, index: int) -> "Plan":
        """Return the plan for the item at `index` of an array."""
        first, rest = self.items
        return first[index] if index < len(first) else rest

    @cached_property
    def items(self) -> tuple[list["Plan"], "Plan"]:
        """The plans for the leading items of an array that have their own schemas, and for all others."""
        count = max(
            (len(f.keywords.get(item_keywords(f.keywords)[0], ())) for f in self.facets), default=0
        )
        *first, rest = (self.part(self._item_sites(index)) for index in range(count + 1))
        return first, rest

    def _item_sites(self, index: int) -> tuple[Site, ...]:
        at = self._planner.document.at
        sites: list[Site] = []
        for facet in self.facets:
            site, keywords = facet.site, facet.keywords
            first, rest = item_keywords(keywords)
            if index < len(keywords.get(first, ())):
                sites.append(at(site, first, index))
            elif isinstance(keywords.get(rest), dict):
                sites.append(at(site, rest))
        return tuple(sites)

    @property
    def least_items(self) -> int:
        """`minItems`."""
        return max((int(least) for least in self.keyword("minItems")), default=0)

    @property
    def most_items(self) -> int | None:
        """`maxItems`, or the length of a tuple without further items."""
        limits = [int(most) for most in self.keyword("maxItems")]
        for facet in self.facets:
            keywords = facet.keywords
            first, rest = item_keywords(keywords)
            if keywords.get(rest) is False:
                limits.append(len(keywords.get(first, ())))
        return min(limits, default=None)

    @property
    def likely_types(self) -> tuple[str, ...]:
        """The types to try when a value is created."""
        if self.types is not None:
            return self.types
        if any(self.keyword(name) for name in _OBJECT_HINTS):
            return ("object",)
        if any(self.keyword(name) for name in _ARRAY_HINTS):
            return ("array",)
        return ("null", "string", "integer", "boolean", "object", "array")


class _Children(dict[str, Plan | None]):
    """The plans of properties, each created when it is first needed."""

    __slots__ = ("_plan", "_rest")

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self._plan = plan
        self._rest: Any = MISSING
        """The plan of all properties that no schema names; only patterns distinguish them."""

    def __missing__(self, name: str) -> Plan | None:
        plan = self._plan
        is_named = name in plan.fields
        if not is_named and not plan.keeps_unnamed:
            return None
        is_rest = not is_named and not plan.is_patterned and name not in plan.asked
        if is_rest and self._rest is not MISSING:
            found: Plan | None = self._rest
        else:
            field = plan.field(name)
            found = plan.part(field.sites) if field.kept else None
            if is_rest:
                self._rest = found
        has_room = len(self) < (_MAX_SHARED if is_rest else _MAX_NAMES) and len(name) <= MAX_NAME
        if is_named or has_room:
            self[name] = found
        return found


def _takes_no_container(plan: Plan) -> bool:
    if plan.opaque:
        return False
    if plan.types is not None and not plan.allows("object") and not plan.allows("array"):
        return True
    return any(
        choice.members
        and all(plan.member(member).leaf_types is not None for member in choice.members)
        for choice in plan.choices
    )
