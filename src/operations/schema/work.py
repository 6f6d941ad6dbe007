"""Count the work of a check before it runs: a native check holds the interpreter, and cannot be stopped.

Rule 1: the number of units never depends on the machine. One unit takes about 10 ns at most.
Rule 2: counts are upper bounds: every part of a schema counts, also one that the check skips after a mismatch.
Rule 3: counting costs no more than the work that it permits: it stops when the budget is spent.

A first bound needs only the size of the value; for most calls it is far below the budget. Otherwise the schema and the
value are followed together, so that a schema that reads one property of a large value costs little.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any, Final

from operations.base.errors import SchemaError
from operations.base.json.values import (
    SCALARS,
    count_values,
    is_list,
    is_object,
    list_of,
    object_of,
)
from operations.base.types import JSONObject, JSONSchema
from operations.schema.checking import Checker
from operations.schema.compiling import (
    ANY_TEXT,
    is_linear,
    linear_weight,
    new_text_test,
    written_length,
)
from operations.schema.references import (
    APPLIED,
    PART_LISTS,
    PART_MAPS,
    PARTS,
    Document,
    Site,
    item_keywords,
    schemas_in,
    subschemas,
)

MAX_WORK: Final = 4_000_000
"""The units that the checks of one input may cost, by default: at most 40 ms, usually much less."""

_STEP: Final = 300
"""Following one schema into one value, in Python. This is many times the native check of the same step."""

_TOUCH: Final = 5
"""Checking one value with one schema, without the keywords below."""

_NAME: Final = 10
"""Reading the name of a property, for schemas that apply to properties with other names."""

_SEARCH: Final = 25
"""Beginning to search a text for a pattern."""

_TEXT: Final = 3
"""Comparing a text with one value of `enum` or `const`."""

_COMPARISON: Final = 100
"""Comparing any other value with one value of `enum` or `const`."""

_LIMIT: Final = 200
"""`multipleOf`, or a limit of a number."""

_UNIQUE: Final = 40
"""`uniqueItems`, for each value inside."""

_REQUIRED: Final = 15
"""One name in `required` or `dependentRequired`."""

_LONG: Final = 13
"""Bits of an integer; each further part of this size costs as much as a short integer."""

_LIMITS = ("multipleOf", "maximum", "minimum", "exclusiveMaximum", "exclusiveMinimum")
_UNEVALUATED = ("unevaluatedProperties", "unevaluatedItems")


class TooMuchWorkError(ValueError):
    """A check would cost more than its budget."""


class Work:
    """A budget that several checks share.

    Args:
        most: The units of the budget.

    Attributes:
        left: The units that are left.
    """

    __slots__ = ("left",)

    def __init__(self, most: int = MAX_WORK) -> None:
        self.left = most

    def spend(self, units: int) -> None:
        """Spend units.

        Raises:
            TooMuchWorkError: If fewer are left.
        """
        if units > self.left:
            raise TooMuchWorkError
        self.left -= units


def count_schemas(document: JSONSchema) -> int:
    """Return the number of schemas in a document, itself included. Compiles nothing."""
    count, waiting = 0, [document]
    while waiting:
        schema = waiting.pop()
        count += 1
        if is_object(schema):
            waiting += [inner for _, _, inner in subschemas(schema)]
    return count


def patterns_weight(document: JSONSchema) -> int:
    """Return the cost of compiling the regular expressions of a document, in characters of at most 20 µs."""
    weights = {each: linear_weight(each) for each in _expressions(document)}
    # To know which engine a pattern needs, it must be compiled.
    if sum(weights.values()) <= _MAX_COMPILED:
        weights = {each: units * (1 if is_linear(each) else 5) for each, units in weights.items()}
    return sum(weights.values())


def _expressions(document: JSONSchema) -> Iterator[str]:
    for schema in schemas_in(document):
        if isinstance(schema.get("pattern"), str):
            yield schema["pattern"]
        yield from object_of(schema.get("patternProperties"))


_MAX_COMPILED = 3_000
"""The largest weight of regular expressions that are compiled to find out how much they cost."""


class CountedSchema:
    """A schema whose checks are paid from a budget.

    Args:
        document: The schema.

    Attributes:
        size: The number of schemas in it.

    Raises:
        SchemaError: If it cannot be compiled, or refers to something that it does not contain.
    """

    def __init__(self, document: JSONSchema) -> None:
        self._check = Checker(document)
        inside = self._check.document
        self._root = _Node(inside, inside.root)
        self._nodes = _linked(inside, self._root)
        self.size = len(self._nodes)

    def accepts(self, value: Any, work: Work) -> bool:
        """Return whether a JSON value is valid.

        Raises:
            TooMuchWorkError: If the check would cost more than what is left of the budget.
        """
        units = self._bound(value, work.left)
        work.spend(self._count(value, work.left) if units is None else units)
        return self._check.accepts(value)

    def with_defaults(self, value: Any, filled: Any, work: Work) -> Any:
        """Return `value` with what it omits of `filled` and the schema restricts; itself if there is nothing.

        A schema restricts a property by its name, by a pattern or as a further property, but not by forbidding all
        properties that it does not name: that applies to what is sent, not to defaults.

        Raises:
            TooMuchWorkError: If this would cost more than what is left of the budget.
        """
        gap = _gap(value, filled, work)
        waiting = [] if gap is None else [(self._root, gap)]
        is_changed = False
        while waiting:
            node, inner = waiting.pop()
            waiting += [(each, inner) for each in node.here]
            work.spend(_STEP * (1 + len(inner.omitted) + len(inner.parts)))
            for name in inner.omitted:
                if next(node.restricting(name, work), None) is not None:
                    inner.restricted.add(name)
                    is_changed = True
            for place, part in inner.parts.items():
                found = (
                    node.restricting(place, work) if isinstance(place, str) else node.items(place)
                )
                waiting += [(each, part) for each in found]
        return value if gap is None or not is_changed else gap.added_to(value)

    @cached_property
    def _rates(self) -> tuple[int, int] | None:
        """The most units for each value and for each character.

        None if a schema may apply to values at several depths, because of a reference, or several times to the same.
        """
        return None if any(node.is_repeated for node in self._nodes) else self._root.rates

    def _bound(self, value: Any, most: int) -> int | None:
        """Return an upper bound of the units of a check, from the size of the value; None if that is above `most`."""
        if self._rates is None:
            return None
        for_value, for_character = self._rates
        units, waiting = for_value, [value]
        for held in waiting:
            given: object = held
            kind = type(given)
            if kind is dict:
                units += for_value * len(held)
                if for_character:
                    units += for_character * sum(map(len, held))
                waiting += held.values()
            elif kind is list:
                units += for_value * len(held)
                waiting += held
            elif kind is str:
                units += for_character * len(held)
            elif kind is int:
                if held.bit_length() > _LONG:
                    units += for_value * held.bit_length() // _LONG
            elif kind not in SCALARS:
                return None
            if units > most:
                return None
        return units

    def _count(self, value: Any, most: int) -> int:
        """Return the units of a check, including those of this count; stop beyond `most`."""
        units, waiting = _STEP, [(self._root, value, 1)]
        while waiting and units <= most:
            node, held, times = waiting.pop()
            # Each step counts when it is found, because there may be very many.
            units += times * node.cost(held) + _STEP * len(node.here)
            waiting += [(each, held, times * node.times_here) for each in node.here]
            if is_object(held):
                for name, inner, found in node.properties_of(held):
                    units += times * node.cost_of_name(name) + _STEP * len(found)
                    waiting += [(each, inner, times) for each in found]
                    if node.names is not None:
                        units += _STEP
                        waiting.append((node.names, name, times))
                    if units > most:
                        break
            elif is_list(held) and node.has_items:
                for index, inner in enumerate(held):
                    found = node.items(index)
                    units += _STEP * (1 + len(found))
                    waiting += [(each, inner, times) for each in found]
                    if units > most:
                        break
        return units


# ------------------------------------------------------------ schemas


class _Pattern:
    """A regular expression."""

    __slots__ = ("_test", "_text", "begin", "is_linear", "length")

    def __init__(self, text: str) -> None:
        self._text = text
        self._test: Callable[[Any], bool] | None = None
        self.is_linear = is_linear(text)
        self.begin, self.length = (0, 0) if text == ANY_TEXT else (_SEARCH, written_length(text))

    def cost(self, text: str) -> int:
        """Return the units of a search in a text."""
        units = self.begin + self.length * len(text)
        # The backtracking engine may search the rest of the text again at each character, up to its limit of steps.
        return units if self.is_linear else units * (1 + min(len(text), 1_000))

    def test(self, text: str) -> bool:
        """Return whether a text matches."""
        # Not the cache that all schemas share, because callers could fill it.
        if self._test is None:
            self._test = new_text_test(self._text)
        return self._test(text)


class _Node:
    """One schema, with the schemas that apply to the same value and to its parts."""

    def __init__(self, document: Document, site: Site) -> None:
        self.site = site
        keywords = self.keywords = document.keywords(site)
        held = [keywords["const"]] if "const" in keywords else []
        held += list_of(keywords.get("enum"))
        self._compared = sum(count_values(each, 1 << 30) for each in held)
        self._limits = sum(each in keywords for each in _LIMITS)
        self._required = len(list_of(keywords.get("required")))
        for keyword in ("dependentRequired", "dependencies"):
            dependent = object_of(keywords.get(keyword)).values()
            self._required += sum(1 + len(list_of(each)) for each in dependent)
        self._is_unique = keywords.get("uniqueItems") is True
        pattern = keywords.get("pattern")
        self._pattern = _Pattern(pattern) if isinstance(pattern, str) else None
        self._is_unevaluated = any(each in keywords for each in _UNEVALUATED)
        references = document.references(site)
        if any(target is None for _, target in references):
            raise SchemaError(f"{site.pointer or 'the schema'}: refers to no part of itself")
        self.is_repeated = bool(references) or self._is_unevaluated
        if self._pattern is not None and not self._pattern.is_linear:
            self.is_repeated = True
        self.here: list[_Node] = []
        self._named: dict[str, _Node] = {}
        self._patterns: list[tuple[_Pattern, _Node]] = []
        self._further: list[_Node] = []
        self.names: _Node | None = None
        self._first: list[_Node] = []
        self._rest: list[_Node] = []
        self._all: list[_Node] = []

    def link(self, keyword: str, token: str | int | None, inner: "_Node") -> None:
        """Add a schema that this one contains."""
        first, rest = item_keywords(self.keywords)
        if keyword in APPLIED:
            self.here.append(inner)
        elif keyword == "properties":
            self._named[str(token)] = inner
        elif keyword == "patternProperties":
            self._patterns.append((_Pattern(str(token)), inner))
            self.is_repeated = self.is_repeated or not self._patterns[-1][0].is_linear
        elif keyword in ("additionalProperties", "unevaluatedProperties"):
            self._further.append(inner)
        elif keyword == "propertyNames":
            self.names = inner
        elif keyword == first:
            self._first.append(inner)
        elif keyword == rest:
            self._rest.append(inner)
        elif keyword in ("contains", "unevaluatedItems"):
            self._all.append(inner)

    @property
    def is_object(self) -> bool:
        """Whether the schema is an object, and not a boolean."""
        return is_object(self.site.schema)

    @cached_property
    def rates(self) -> tuple[int, int]:
        """The most units for each value and for each character, with all schemas that apply to the parts of the value.

        Each value is at one depth, and each schema inside applies to the values at one depth. One property has at most
        one schema that names it.
        """
        own = (
            _TOUCH
            + _COMPARISON * self._compared
            + _LIMIT * self._limits
            + _REQUIRED * self._required
            + _UNIQUE * self._is_unique
            + (0 if self._pattern is None else self._pattern.begin)
            + sum(pattern.begin for pattern, _ in self._patterns)
            + _NAME * (self.names is not None or bool(self._patterns or self._further))
        )
        characters = 0 if self._pattern is None else self._pattern.length
        characters += sum(pattern.length for pattern, _ in self._patterns)
        others = [inner for _, inner in self._patterns]
        others += [*self.here, *self._further, *self._rest, *self._all]
        others += [] if self.names is None else [self.names]
        either = [each.rates for each in (*self._named.values(), *self._first)]
        for_value = own + sum(each.rates[0] for each in others)
        for_value += max((rate for rate, _ in either), default=0)
        characters += sum(each.rates[1] for each in others)
        return for_value, characters + max((rate for _, rate in either), default=0)

    @cached_property
    def times_here(self) -> int:
        """How often the schemas for the same value are checked.

        `unevaluated*` checks each of them again to know what it evaluates, and those inside them.
        """
        return 1 + self.height if self._is_unevaluated else 1

    @cached_property
    def height(self) -> int:
        """The length of the longest chain of schemas for the same value, which begins here.

        The compiled schema has no long chain, and no circle.
        """
        return 1 + max([each.height for each in self.here], default=0)

    @property
    def has_items(self) -> bool:
        """Whether a schema applies to items of a list."""
        return bool(self._first or self._rest or self._all)

    def cost(self, value: Any) -> int:
        """Return the units of checking one value, without its parts."""
        compared = self._compared
        given: object = value
        kind = type(given)
        if kind is str:
            searched = 0 if self._pattern is None else self._pattern.cost(value)
            return _TOUCH + _TEXT * compared + searched
        units = _TOUCH + _COMPARISON * compared
        if kind is int or kind is float:
            units += _LIMIT * self._limits
            return units * (1 + value.bit_length() // _LONG) if kind is int else units
        if kind is dict:
            units += _REQUIRED * self._required + _TOUCH * min(len(value), len(self._named))
        elif self._is_unique and kind is list:
            units += _UNIQUE * count_values(value, MAX_WORK // _UNIQUE)
        return units

    def cost_of_name(self, name: str) -> int:
        """Return the units of finding the schemas of a property."""
        return _NAME + sum(pattern.cost(name) for pattern, _ in self._patterns)

    def properties_of(self, value: JSONObject) -> Iterator[tuple[str, Any, list["_Node"]]]:
        """Yield the properties of an object to which schemas apply, and all schemas that may apply to each."""
        named, patterns = self._named, [inner for _, inner in self._patterns]
        if patterns or self._further or self.names is not None:
            for name, inner in value.items():
                own = [named[name]] if name in named else self._further
                yield name, inner, [*own, *patterns]
        else:
            names: Iterable[str] = named if len(named) < len(value) else value
            for name in names:
                if name in named and name in value:
                    yield name, value[name], [named[name]]

    def items(self, index: int) -> list["_Node"]:
        """Return the schemas for an item of a list."""
        own = [self._first[index]] if index < len(self._first) else self._rest
        return [*own, *self._all]

    def restricting(self, name: str, work: Work) -> Iterator["_Node"]:
        """Yield the schemas that restrict a property, which a default must satisfy as well."""
        named = self._named.get(name)
        work.spend(self.cost_of_name(name))
        found = [inner for pattern, inner in self._patterns if pattern.test(name)]
        if named is not None:
            yield named
        elif not found:
            found = self._further
        yield from (each for each in found if each.is_object)


def _linked(document: Document, root: _Node) -> list[_Node]:
    """Link a schema to all that it contains and refers to; return all."""
    nodes = {root.site.pointer: root}
    waiting = [root]

    def node_at(site: Site) -> _Node:
        found = nodes.get(site.pointer)
        if found is None:
            found = nodes[site.pointer] = _Node(document, site)
            waiting.append(found)
        return found

    while waiting:
        node = waiting.pop()
        if not node.is_object:
            continue
        for keyword, token, _ in subschemas(node.keywords):
            place = (keyword,) if token is None else (keyword, token)
            if keyword in APPLIED or keyword in PARTS or keyword in _PART_GROUPS:
                node.link(keyword, token, node_at(document.at(node.site, *place)))
        for _, target in document.references(node.site):
            if target is not None:
                node.here.append(node_at(target))
    return list(nodes.values())


_PART_GROUPS = frozenset({*PART_LISTS, *PART_MAPS})


# ------------------------------------------------------------ defaults


class _Gap:
    """What a value omits of another one, which has the same parts and more properties."""

    __slots__ = ("omitted", "parts", "restricted")

    def __init__(self) -> None:
        self.omitted: JSONObject = {}
        self.restricted = set[str]()
        """The omitted properties that a schema restricts."""

        self.parts: dict[str | int, _Gap] = {}

    def added_to(self, value: Any) -> Any:
        """Return a value with the omitted properties that a schema restricts."""
        copy: Any = value.copy()
        for name in self.restricted:
            copy[name] = self.omitted[name]
        for place, part in self.parts.items():
            copy[place] = part.added_to(copy[place])
        return copy


def _gap(value: Any, filled: Any, work: Work) -> _Gap | None:
    # Equal parts are found in C.
    if value == filled:
        return None
    gap = _Gap()
    if is_object(value) and is_object(filled):
        work.spend(_STEP * len(filled))
        gap.omitted = {name: whole for name, whole in filled.items() if name not in value}
        pairs: Iterable[tuple[str | int, Any, Any]] = (
            (name, value[name], whole) for name, whole in filled.items() if name in value
        )
    elif is_list(value) and is_list(filled):
        work.spend(_STEP * len(filled))
        pairs = ((index, *both) for index, both in enumerate(zip(value, filled, strict=True)))
    else:
        return None
    for place, inner, whole in pairs:
        found = _gap(inner, whole, work)
        if found is not None:
            gap.parts[place] = found
    return gap if gap.omitted or gap.parts else None
