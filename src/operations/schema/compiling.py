"""Compile schemas with jsonschema-rs, and bound the work of their regular expressions and references.

Rule 1: formats are annotations, nothing is fetched, and Python's `re` never runs a third party's pattern.
Rule 2: the time of the linear engine is proportional to text length times pattern length, so both are limited. The
        length of a pattern includes its expanded repetitions; the longer the pattern, the shorter the allowed text.
Rule 3: a pattern that the linear engine does not support (look-around, back-references) runs on the backtracking
        engine, with a limit on steps and short texts.
Rule 4: a cycle of references that does not descend into the value is an error. Long chains of references, and too many
        nested alternatives, are rejected before any data arrives (`Graph`).
"""

from collections import ChainMap
from collections.abc import Callable, Iterable, MutableMapping
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple

import jsonschema_rs
from msgspec import to_builtins

from operations.base.errors import SchemaError
from operations.base.json.values import (
    JSONValueError,
    as_json,
    count_values,
    is_list,
    is_object,
    object_of,
    pointer,
)
from operations.base.text import shortened
from operations.base.types import JSONObject, JSONSchema
from operations.schema.references import (
    APPLIED,
    DEFINITIONS,
    Dialect,
    Document,
    Site,
)

# ------------------------------------------------------------ regular expressions

MAX_LENGTH = 2_100
"""The largest length of a pattern, with its repetitions expanded."""

MAX_WORK = MAX_LENGTH**2
"""The largest product of pattern length and text length; one unit takes about 10 ns in the worst case."""

MAX_FANCY_TEXT = 10_000
"""The longest text that is tested with the backtracking engine."""

MAX_WEIGHT = 400_000
"""The cost limit for compiling all patterns of one document; each takes about 3 µs."""

_WIDE = tuple("\\" + letter for letter in "wWdDsSbBpP")
"""Character classes that cover many Unicode ranges."""

_SIZE = 1_000_000
"""The largest size of a compiled pattern in bytes; Unicode classes need much memory."""

ANY_TEXT = "^"
"""A pattern that every text matches."""

LINEAR = jsonschema_rs.RegexOptions(size_limit=_SIZE, dfa_size_limit=_SIZE)
FANCY = jsonschema_rs.FancyRegexOptions(
    backtrack_limit=1_000, size_limit=_SIZE, dfa_size_limit=_SIZE
)

_REGEX = jsonschema_rs.Draft202012Validator({"format": "regex"}, validate_formats=True)


def longest_text(pattern: str) -> int | None:
    """Return the longest text that may be matched against `pattern`; None if the pattern cannot be used."""
    length = written_length(pattern)
    if length > MAX_LENGTH:
        return None
    if _compiles(pattern, LINEAR):
        return MAX_WORK // length
    return min(MAX_FANCY_TEXT, MAX_WORK // length) if _compiles(pattern, FANCY) else None


def is_regex(pattern: str) -> bool:
    """Return whether `pattern` is a regular expression of ECMAScript, even if it cannot be used here."""
    return _REGEX.is_valid(pattern)


def drop_invalid_patterns(schema: JSONObject) -> None:
    """Remove texts that are not regular expressions, because many tools reject a document that contains one."""
    pattern, named = schema.get("pattern"), schema.get("patternProperties")
    if isinstance(pattern, str) and not is_regex(pattern):
        del schema["pattern"]
    if is_object(named) and not all(map(is_regex, named)):
        schema["patternProperties"] = {
            name: value for name, value in named.items() if is_regex(name)
        }
        # As in `BoundPatterns`.
        schema["additionalProperties"] = True


def linear_weight(pattern: str) -> int:
    """Return the cost of compiling `pattern` for the linear engine, in characters: Unicode classes cost more."""
    length = min(written_length(pattern), MAX_LENGTH)
    if not pattern.isascii() or any(escape in pattern for escape in _WIDE):
        length *= 20
    return length


def weight(pattern: str) -> int:
    """Return the cost of compiling `pattern`, in characters: the backtracking engine costs more."""
    return linear_weight(pattern) * (1 if is_linear(pattern) else 50)


def is_linear(pattern: str) -> bool:
    """Return whether the linear engine supports `pattern`."""
    return _compiles(pattern, LINEAR)


@lru_cache(maxsize=512)
def text_test(pattern: str) -> Callable[[Any], bool]:
    """Return the test whether a text contains a match of `pattern`; always False if the pattern cannot be used."""
    return new_text_test(pattern)


def new_text_test(pattern: str) -> Callable[[Any], bool]:
    """Return a test as `text_test` does, compiled anew."""
    if longest_text(pattern) is None:
        return lambda _text: False
    options = LINEAR if is_linear(pattern) else FANCY
    schema = {"pattern": pattern, "maxLength": longest_text(pattern)}
    return jsonschema_rs.Draft202012Validator(schema, pattern_options=options).is_valid


@lru_cache(maxsize=1_024)
def _compiles(
    pattern: str, options: jsonschema_rs.RegexOptions | jsonschema_rs.FancyRegexOptions
) -> bool:
    try:
        jsonschema_rs.Draft202012Validator({"pattern": pattern}, pattern_options=options)
    except ValueError:
        return False
    return True


def written_length(pattern: str) -> int:
    """Return the number of characters, classes and escapes in `pattern`, with repetitions expanded.

    This is an upper bound for well-formed patterns; the engines reject others. Counting stops beyond the limit.
    """
    groups = [0]  # the length of each open group so far
    last = 0  # the length of the part that a quantifier would repeat
    position, end = 0, len(pattern)
    while position < end and sum(groups) <= MAX_LENGTH:
        character = pattern[position]
        position += 1
        if character == "(":
            groups.append(0)
            last = 0
            continue
        if character == ")" and len(groups) > 1:
            last = groups.pop()
        elif character == "[":
            position = _after_class(pattern, position)
            last = 1
        elif character == "{":
            count, after = _repetition(pattern, position)
            if count is None:
                last = 1
            else:
                position = after
                groups[-1] += last * max(count - 1, 0)
                continue
        elif character == "\\":
            position = _after_escape(pattern, position)
            last = 1
        else:
            last = 0 if character in "*+?|^$" else 1
        groups[-1] += last
    return max(sum(groups), 1)


def _after_class(pattern: str, position: int) -> int:
    """Return the end of the class that was opened just before `position`."""
    while position < len(pattern):
        if pattern[position] == "\\":
            position += 1
        elif pattern[position] == "]":
            return position + 1
        position += 1
    return position


def _after_escape(pattern: str, position: int) -> int:
    """Return the end of the escape that began just before `position`. Unicode classes have braces."""
    if (
        pattern[position : position + 1] in {"p", "P", "u", "x"}
        and pattern[position + 1 : position + 2] == "{"
    ):
        return pattern.find("}", position) + 1 or len(pattern)
    return position + 1


def _repetition(pattern: str, position: int) -> tuple[int | None, int]:
    """Return the largest count of a quantifier (`{n}`, `{n,}`, `{,m}`, `{n,m}`) after its open brace, and its end."""
    close = pattern.find("}", position)
    low, comma, high = pattern[position : max(close, position)].partition(",")
    if close < 0 or not (low or high).isdecimal() or not (low + high).isdecimal():
        return None, position
    # Limit the digits: a count of thousands of digits is never useful.
    if len(low) > len(str(MAX_LENGTH)) or len(high) > len(str(MAX_LENGTH)):
        return MAX_LENGTH + 1, close + 1
    return max(int(low or 0) + bool(comma), int(high or 0)), close + 1


class BoundPatterns:
    """Bounds every regular expression of the schemas at `sites` in place; the schemas must not be shared.

    Adds a `maxLength` to each `pattern`, and a limit on property names to each `patternProperties`, so that the check
    is as cheap as any other keyword. For a plain `type: string` the validator would accept lone surrogates without
    reading the text, so a pattern that matches every text is added.

    Args:
        sites: The schemas.
        drop: Remove patterns that cannot be used, instead of raising an error.

    Attributes:
        fancy: Whether a pattern needs the backtracking engine.
        dropped: The removed patterns, which no engine runs safely, with their locations.

    Raises:
        SchemaError: If a pattern cannot be used and `drop` is false.
    """

    def __init__(self, sites: list[Site], *, drop: bool) -> None:
        self._drop = drop
        self._weights: dict[str, int] = {}
        self.fancy = False
        self.dropped: list[str] = []
        for site in sites:
            if is_object(site.schema):
                self._bound(site.schema, site.pointer)

    def _bound(self, schema: JSONObject, place: str) -> None:
        pattern, named = schema.get("pattern"), schema.get("patternProperties")
        if isinstance(pattern, str):
            cap = self._cap(pattern, place + "/pattern")
            if cap is None:
                del schema["pattern"]
            else:
                _lower(schema, cap)
        if is_object(named):
            self._bound_names(schema, named, place + "/patternProperties")
        types = schema.get("type")
        if "pattern" not in schema and (
            types == "string" or (is_list(types) and "string" in types)
        ):
            schema["pattern"] = ANY_TEXT

    def _bound_names(self, schema: JSONObject, named: JSONObject, place: str) -> None:
        caps: list[int] = []
        for pattern in list(named):
            cap = self._cap(pattern, place)
            if cap is None:
                del named[pattern]
                # Its properties are not known, so that the schema cannot forbid others.
                schema["additionalProperties"] = True
            else:
                caps.append(cap)
        if caps:
            names: JSONObject = {"maxLength": min(caps)}
            others = schema.get("propertyNames", True)
            schema["propertyNames"] = names if others is True else {"allOf": [names, others]}

    def _cap(self, pattern: str, place: str) -> int | None:
        """Return the longest text for `pattern`; None if the pattern was removed."""
        cap = longest_text(pattern)
        if cap is not None and pattern not in self._weights:
            self._weights[pattern] = weight(pattern)
            if sum(self._weights.values()) > MAX_WEIGHT:
                del self._weights[pattern]
                cap = None
        if cap is None:
            shown = shortened(pattern, 60)
            if not self._drop:
                raise SchemaError(f"{place}: {shown!r} is not a pattern that can be run safely")
            self.dropped.append(f"{place}: {shown}")
        elif not is_linear(pattern):
            self.fancy = True
        return cap


def _lower(schema: JSONObject, cap: int) -> None:
    limit = schema.get("maxLength", cap)
    if isinstance(limit, (int, float)):
        schema["maxLength"] = min(limit, cap)


# ------------------------------------------------------------ references

MAX_ALTERNATIVES = 10_000
"""The largest number of schemas that are checked along one path into the data. Each takes about 25 ns."""

MAX_CHAIN = 64
"""The longest chain of schemas that apply to the same value."""

_ONE_EACH = frozenset({"properties", "prefixItems"})


class _Edges(NamedTuple):
    """The schemas that one schema refers to or contains, by their places."""

    here: list[str]
    """Schemas that apply to the same value, by reference or by keywords such as `allOf`, `not` and `if`."""

    one_each: list[str]
    """Schemas that apply to parts of the value, at most one to each part."""

    shared: list[str]
    """Schemas that apply to parts of the value, possibly several to one part."""

    unknown: bool
    """Whether only the validator can resolve a reference."""


def _edges(document: Document, site: Site) -> _Edges:
    targets = document.references(site)
    found = [target.pointer for _, target in targets if target is not None]
    edges = _Edges(found, [], [], unknown=len(found) < len(targets))
    below = document.below(site)
    old_tuple = bool(below) and is_list(document.keywords(site).get("items"))
    for keyword, inner in below:
        if keyword in _ONE_EACH or (old_tuple and keyword == "items"):
            edges.one_each.append(inner.pointer)
        elif keyword in APPLIED:
            edges.here.append(inner.pointer)
        elif keyword not in DEFINITIONS:
            edges.shared.append(inner.pointer)
    return edges


class Graph:
    """The graph of a document's references.

    It is checked before the document is compiled, because compiling a bad document might not terminate.

    Args:
        document: The document.
        shared: The graph of the shared definitions.

    Raises:
        SchemaError: For a cycle that does not descend into the value, a long chain, or too many nested alternatives.
    """

    def __init__(self, document: Document, shared: "Graph | None" = None) -> None:
        self._document = document
        self._shared = shared
        self.costs: MutableMapping[str, int] = {} if shared is None else ChainMap({}, shared.costs)
        """For each schema, the number of schemas along one path into the data; 1 for a schema that is not listed. Costs
        of shared schemas are only read here."""
        self.patterns: MutableMapping[str, int] = (
            {} if shared is None else ChainMap({}, shared.patterns)
        )
        """The total length of the patterns along one path into the data, for each schema that has some."""
        self.has_unknown: bool = shared is not None and shared.has_unknown
        """Whether only the validator can resolve some reference, so that `costs` may be too low."""
        self._recursive: set[str] = set()
        self.add(document.sites, [document.root.pointer])

    def add(self, sites: list[Site], starts: Iterable[str]) -> None:
        """Add schemas of the document.

        Args:
            sites: The schemas, which may refer to one another and to known schemas.
            starts: The places of the schemas that data is checked against.
        """
        document = self._document
        for site in sites:
            if length := _length_of_patterns(site.schema):
                self.patterns[site.pointer] = length
        fresh = {
            site.pointer: _edges(document, site)
            for site in sites
            if document.below(site) or document.references(site)
        }
        _refuse_idle_loops(fresh)
        self._refuse_explosions(self._ordered(starts, fresh), fresh)

    def include(self, other: "Graph") -> None:
        """Add the costs of a document that uses the schemas of this graph."""
        self.costs.update(_own(other.costs))
        self.patterns.update(_own(other.patterns))
        self.has_unknown = self.has_unknown or other.has_unknown

    @property
    def has_circles(self) -> bool:
        """Whether the references of any schema are recursive."""
        return bool(self._recursive)

    def is_recursive(self, place: str) -> bool:
        """Return whether the references of a schema are recursive."""
        return place in self._recursive or (
            self._shared is not None and self._shared.is_recursive(place)
        )

    def _ordered(self, starts: Iterable[str], graph: dict[str, _Edges]) -> list[str]:
        """Return every new schema with edges that is reachable from `starts`, dependencies first.

        Records the schemas with recursive references.
        """
        known = self.costs
        order: list[str] = []
        finished: dict[str, bool] = {}
        stack: list[tuple[str, bool]] = [(start, False) for start in starts]
        while stack:
            place, leaving = stack.pop()
            if leaving:
                near = graph[place]
                edges = (*near.here, *near.one_each, *near.shared)
                # References that only the validator can resolve may be recursive: assume that they are.
                if near.unknown or any(
                    finished.get(edge) is False or self.is_recursive(edge) for edge in edges
                ):
                    self._recursive.add(place)
                finished[place] = True
                order.append(place)
            elif place not in finished and place not in known and place in graph:
                near = graph[place]
                finished[place] = False
                stack.append((place, True))
                stack += [(edge, False) for edge in (*near.here, *near.one_each, *near.shared)]
        return order

    def _refuse_explosions(self, order: list[str], graph: dict[str, _Edges]) -> None:
        """Count, for every schema, the schemas along one path into the data, and reject too many.

        A recursive reference counts once, because the validator caches its result.
        """
        costs, patterns = self.costs, self.patterns
        for place in order:
            near = graph[place]
            self.has_unknown = self.has_unknown or near.unknown
            if patterns:
                length = sum([patterns.get(edge, 0) for edge in (place, *near.here, *near.shared)])
                length += max([patterns.get(edge, 0) for edge in near.one_each], default=0)
                if length:
                    patterns[place] = length
            cost = 1 + sum([costs.get(edge, 1) for edge in (*near.here, *near.shared)])
            cost += max([costs.get(edge, 1) for edge in near.one_each], default=0)
            if cost > MAX_ALTERNATIVES:
                raise ExplosionError(place)
            costs[place] = cost


class ExplosionError(SchemaError):
    """Raised for a schema whose alternatives multiply along one path into the data.

    Attributes:
        place: The place of the schema.
    """

    def __init__(self, place: str) -> None:
        super().__init__(
            f"{place or 'the schema'}: too many alternatives nest here "
            f"(more than {MAX_ALTERNATIVES:,})"
        )
        self.place = place


def _own(entries: MutableMapping[str, int]) -> MutableMapping[str, int]:
    return entries.maps[0] if isinstance(entries, ChainMap) else entries


def _length_of_patterns(schema: JSONSchema) -> int:
    if isinstance(schema, bool) or ("pattern" not in schema and "patternProperties" not in schema):
        return 0
    found = [*object_of(schema.get("patternProperties")), schema.get("pattern")]
    return sum(written_length(each) for each in found if isinstance(each, str) and each != ANY_TEXT)


def _refuse_idle_loops(graph: dict[str, _Edges]) -> None:
    here = {place: edges.here for place, edges in graph.items() if edges.here}
    chains = {
        place: onward
        for place, edges in here.items()
        if (onward := [edge for edge in edges if edge in here])
    }
    try:
        order = list(TopologicalSorter(chains).static_order())
    except CycleError as error:
        place = error.args[1][0] or "the schema"
        raise SchemaError(f"{place}: refers to itself without consuming any data") from None
    lengths: dict[str, int] = {}
    for place in order:
        lengths[place] = 1 + max([lengths[edge] for edge in chains.get(place, ())], default=0)
        if lengths[place] > MAX_CHAIN:
            raise SchemaError(
                f"{place or 'the schema'}: leads to a chain of more than {MAX_CHAIN} schemas "
                "that apply to the same value"
            )


# ------------------------------------------------------------ validators

MAX_SCHEMA_DEPTH = 128
"""How deep a schema document may nest."""

MAX_SCHEMA_VALUES = 100_000
"""How many JSON values a schema document may hold."""

_MAX_MESSAGE = 300
"""Characters of a message of the validator, which may quote an invalid value."""


def compile_schema(
    schema: JSONSchema,
    dialect: Dialect,
    *,
    fancy: bool,
    registry: jsonschema_rs.Registry | None = None,
    keywords: dict[str, type[Any]] | None = None,
) -> Callable[[Any], bool]:
    """Return the test whether a JSON value is valid.

    Args:
        schema: The schema, with bounded patterns.
        dialect: The dialect of the schema.
        fancy: Whether a pattern needs the backtracking engine.
        registry: Other documents that the schema refers to.
        keywords: Custom keywords.

    Raises:
        SchemaError: If it is not a JSON Schema; the message names the location.
    """
    try:
        return dialect.validator(
            schema,
            pattern_options=FANCY if fancy else LINEAR,
            registry=registry,
            keywords=keywords,
            validate_formats=False,
            offline=True,
        ).is_valid
    except jsonschema_rs.ValidationError as error:
        inner = _innermost(error)
        place = "".join(map(pointer, inner.instance_path)) or "the schema"
        raise SchemaError(f"{place}: {shortened(inner.message, _MAX_MESSAGE)}") from None
    except (ValueError, jsonschema_rs.ReferencingError) as error:
        raise SchemaError(
            f"the schema cannot be compiled: {shortened(str(error), _MAX_MESSAGE)}"
        ) from None
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        # The Rust code panicked, which raises a BaseException.
        raise SchemaError("the schema cannot be compiled") from None


def _innermost(error: jsonschema_rs.ValidationError) -> jsonschema_rs.ValidationError:
    """Return the failure that is deepest in the document, among the alternatives of a meta-schema."""
    alternatives: list[list[jsonschema_rs.ValidationError]] = getattr(error.kind, "context", [])
    inner = [each for alternative in alternatives for each in alternative]
    deepest = max(inner, key=lambda each: len(each.instance_path), default=error)
    if len(deepest.instance_path) <= len(error.instance_path):
        return error
    return _innermost(deepest)


def measured(document: Any) -> JSONSchema:
    """Return a copy of a document, after checking that it is JSON and not too large.

    Raises:
        SchemaError: If it is not valid; the message names the location.
    """
    if not isinstance(document, (dict, bool)):
        raise SchemaError("a schema is an object, true or false")
    if count_values(document, MAX_SCHEMA_VALUES) > MAX_SCHEMA_VALUES:
        raise SchemaError(f"the schema contains more than {MAX_SCHEMA_VALUES:,} values")
    try:
        copy: JSONSchema = to_builtins(as_json(document, MAX_SCHEMA_DEPTH))
    except JSONValueError as error:
        raise SchemaError(f"{error.path or 'the schema'} {error.reason}") from None
    return copy
