"""Outline a JSON Schema for people: its properties by name and kind.

Rule 1: an outline never decides validity. It is used to ask for values, to convert typed text, and to print schemas.
        Malformed keywords of a third party's schema are ignored.
"""

from collections.abc import Iterator
from typing import Any

from msgspec.json import encode

from operations.base.json.references import followed
from operations.base.json.values import is_list, kind_of, list_of, object_of
from operations.base.types import JSONObject, JSONSchema
from operations.schema.document import Schema

_MAX_PLACES = 100_000
"""Places of one document that are examined: a few definitions that refer to each other have endlessly many paths."""


class Outline:
    """One place in a schema, with its document."""

    __slots__ = ("_left", "_root", "names", "reference", "schema")

    def __init__(
        self,
        schema: JSONSchema,
        root: JSONObject | None = None,
        names: tuple[str, ...] = (),
        left: Iterator[int] | None = None,
    ) -> None:
        here: JSONObject = {} if isinstance(schema, bool) else schema
        self._root = here if root is None else root
        self._left = iter(range(_MAX_PLACES)) if left is None else left
        self.schema, passed = followed(here, self._root)
        self.reference = passed[-1] if passed else None
        """The reference to the definition at this place, if any."""
        self.names = (*names, *passed)
        """The references on the path to this place, to detect recursion."""

    @classmethod
    def of(cls, schema: Schema) -> "Outline":
        """Return the outline of a whole schema."""
        return cls(schema.document)

    def inner(self, schema: Any) -> "Outline":
        """Return a schema inside this one."""
        return Outline(object_of(schema), self._root, self.names, self._left)

    @property
    def standalone(self) -> JSONObject:
        """This schema as a separate document, with the definitions that it may refer to."""
        kept: JSONObject = {
            key: self._root[key]
            for key in ("$defs", "definitions", "components")
            if key in self._root
        }
        return {**kept, **self.schema}

    @property
    def is_recursive(self) -> bool:
        """Whether the path to this place contains the same definition twice, or the document has too many places."""
        return len(set(self.names)) < len(self.names) or next(self._left, None) is None

    @property
    def description(self) -> str:
        """The description or title of the schema."""
        text = self.schema.get("description") or self.schema.get("title") or ""
        return text if isinstance(text, str) else ""

    @property
    def members(self) -> "list[Outline]":
        """The members of `anyOf` or `oneOf`."""
        options = list_of(self.schema.get("anyOf")) or list_of(self.schema.get("oneOf"))
        return [self.inner(option) for option in options]

    @property
    def properties(self) -> "dict[str, Outline]":
        """The properties by name, including those of `allOf`."""
        found: dict[str, Outline] = {}
        for part in self.parts():
            for name, schema in object_of(part.schema.get("properties")).items():
                found[name] = part.inner(schema)
        return found

    @property
    def required(self) -> list[str]:
        """The required properties, including those of `allOf`."""
        names: dict[str, None] = {}
        for part in self.parts():
            listed = list_of(part.schema.get("required"))
            names |= dict.fromkeys(name for name in listed if isinstance(name, str))
        return list(names)

    def parts(self) -> "Iterator[Outline]":
        """This schema and the schemas of its `allOf`."""
        yield self
        for schema in list_of(self.schema.get("allOf")):
            member = self.inner(schema)
            if not member.is_recursive:
                yield from member.parts()

    @property
    def items(self) -> "Outline":
        """The schema of an array's items."""
        return self.inner(self.schema.get("items"))

    @property
    def choices(self) -> list[Any]:
        """The allowed values of an enum or a constant."""
        if "const" in self.schema:
            return [self.schema["const"]]
        if "enum" in self.schema:
            return list_of(self.schema["enum"])
        members = self.members
        if members and all(
            "const" in member.schema or "enum" in member.schema for member in members
        ):
            return [value for member in members for value in member.choices]
        return []

    @property
    def types(self) -> frozenset[str]:
        """The JSON types a value may have; empty if the schema has no `type`."""
        named: Any = self.schema.get("type")
        if named is not None:
            names = named if is_list(named) else [named]
            return frozenset(name for name in names if isinstance(name, str))
        if self.choices:
            return frozenset(map(kind_of, self.choices))
        if members := self.members:
            kinds = [frozenset[str]() if each.is_recursive else each.types for each in members]
            return frozenset[str]().union(*kinds) if all(kinds) else frozenset()
        for part in self.parts():
            if part is not self and part.types:
                return part.types
        return frozenset({"object"}) if "properties" in self.schema else frozenset()

    @property
    def kind(self) -> str:
        """The type as a short text for people."""
        if choices := self.choices:
            shown = " | ".join(_spelled(choice) for choice in choices[:6])
            return shown + (" | ..." if len(choices) > 6 else "")
        members = [] if self.is_recursive else self._values
        kinds = dict.fromkeys(member.kind for member in members) or [self._word]
        return " or ".join([*kinds, *(["null"] if "null" in self.types else ())])

    @property
    def limits(self) -> str:
        """The other limits on a value, as text: ranges, lengths, patterns."""
        if self.is_recursive:
            return ""
        if self._values:
            return "; ".join(filter(None, dict.fromkeys(each.limits for each in self._values)))
        found = [
            _range(self.schema, "minimum", "maximum", ""),
            _range(self.schema, "minLength", "maxLength", "characters"),
            _range(self.schema, "minItems", "maxItems", "items"),
            _range(self.schema, "minProperties", "maxProperties", "properties"),
        ]
        for key, words in _LIMITS.items():
            if key in self.schema and self.schema[key] is not False:
                found.append(words.format(self.schema[key]))
        if "array" in self.types and (inner := self.items.limits):
            found.append(f"each {inner}")
        return ", ".join(filter(None, found))

    @property
    def _values(self) -> "list[Outline]":
        """The members of a union other than null."""
        return [member for member in self.members if set(member.types) != {"null"}]

    @property
    def _word(self) -> str:
        named = sorted(self.types - {"null"})
        if (
            named == ["array"]
            and not self.items.is_recursive
            and (inner := self.items.kind) != "any"
        ):
            is_one = " or " not in inner and " | " not in inner
            return f"list of {inner}" if is_one else f"list of ({inner})"
        word = " or ".join(named) or "any"
        form = self.schema.get("format")
        return f"{word} ({form})" if isinstance(form, str) else word


_LIMITS = {
    "exclusiveMinimum": "more than {}",
    "exclusiveMaximum": "less than {}",
    "multipleOf": "a multiple of {}",
    "pattern": "matching {}",
    "uniqueItems": "all different",
}


def _range(schema: JSONObject, least: str, most: str, unit: str) -> str:
    low, high = schema.get(least), schema.get(most)
    if unit:
        low = low or None
    shown = [f"at least {low}"] if high is None else [f"at most {high}"]
    if low is None and high is None:
        return ""
    if low is not None and high is not None:
        shown = [str(low)] if low == high else [f"{low} to {high}"]
    if unit:
        shown.append(unit if (low if high is None else high) != 1 else _ONE[unit])
    return " ".join(shown)


_ONE = {"characters": "character", "items": "item", "properties": "property"}


def _spelled(value: Any) -> str:
    return value if isinstance(value, str) else encode(value).decode()
