"""Write JSON Schemas as Python annotations, for generated clients and stubs.

Rule 1: third-party text (names, enums, descriptions) appears in the source only as a literal made by `repr`.
Rule 2: an identifier in the source is either generated ASCII, or a property name that Python does not change.
"""

import ast
import keyword
import re
from collections.abc import Collection, Iterable
from typing import Any, Final, NamedTuple

from operations.base.json.references import Scopes
from operations.base.json.values import object_of
from operations.base.text import numbered_name, printable
from operations.schema.document import Schema
from operations.schema.outline import Outline

_SIMPLE: Final = {
    "string": "str",
    "integer": "int",
    "number": "float",
    "boolean": "bool",
    "null": "None",
}
_MAX_NESTING: Final = 32
"""The largest nesting of an annotation; Python's parser fails at about 100."""

_MEMBERS: Final = 3
"""Members of a union in stubs that count as one level of nesting."""

_MAX_LITERAL: Final = 1 << 64


class Home(NamedTuple):
    """A document and the scope of its shared definitions, if any."""

    document: int
    scope: str | None

    def key(self, reference: str) -> tuple[str | int, str]:
        """Return the same key for references to the same definition."""
        is_shared = self.scope is not None and reference.startswith("#/$defs/")
        return (self.scope if self.scope is not None and is_shared else self.document, reference)


class TypeHints:
    """Converts JSON Schemas to annotations, and collects the classes that the annotations need.

    Args:
        taken: Names that a generated class must not have.
        brief: For stubs: an enum accepts no other values, and there are neither quotes nor empty descriptions.
        depth: How deeply objects with properties of their own may be nested; deeper ones are `dict[str, Any]`.
    """

    def __init__(
        self, taken: Collection[str], *, brief: bool = False, depth: int | None = None
    ) -> None:
        self.classes: list[str] = []
        self._names = set(taken)
        self._brief = brief
        self._left = depth
        self._by_reference: dict[tuple[str | int, str], str] = {}
        self._by_content: dict[tuple[Any, ...], str] = {}
        self._scopes = Scopes()

    def home_of(self, schema: Schema) -> Home:
        """Return the document in which the references of `schema` are resolved."""
        try:
            placed = self._scopes.place(schema.document)
        except (ValueError, TypeError, RecursionError):
            placed = None
        return Home(id(schema), None if placed is None else placed.scope)

    def free(self, wanted: str) -> str:
        """Reserve a class name: `wanted`, with a number appended if it is taken."""
        return free_name(wanted, self._names)

    def annotation(self, outline: Outline, hint: str, home: Home, nesting: int = 0) -> str:
        """Return the annotation for a schema, not yet quoted.

        Args:
            outline: The schema.
            hint: The preferred name of a class for it.
            home: The document that contains the schema; see `home_of`.
            nesting: The number of brackets around the annotation.
        """
        if outline.reference is not None:
            known = self._by_reference.get(home.key(outline.reference))
            if known is not None:
                return known
        if outline.is_recursive or nesting > _MAX_NESTING:
            return "Any"
        if (choices := outline.choices) and all(
            choice is None
            or isinstance(choice, str)
            or (isinstance(choice, int) and abs(choice) < _MAX_LITERAL)
            for choice in choices
        ):
            return closed_literal(choices) if self._brief else open_literal(choices)
        if outline.properties:
            if self._left is None:
                return self._typed_dict(outline, hint, home)
            if not self._left:
                return "dict[str, Any]"
            self._left -= 1
            try:
                return self._typed_dict(outline, hint, home)
            finally:
                self._left += 1
        if members := outline.members:
            if self._brief:
                # `A | B | C` is nested as well, and the checker of scripts rejects deep source.
                nesting += len(members) // _MEMBERS
            return _union(
                self.annotation(member, f"{hint}{number}", home, nesting)
                for number, member in enumerate(members, 1)
            )
        return _union(
            self._simple(kind, outline, hint, home, nesting + 1) for kind in sorted(outline.types)
        )

    def _simple(self, kind: str, outline: Outline, hint: str, home: Home, nesting: int) -> str:
        if kind == "array":
            return f"list[{self.annotation(outline.items, f'{hint}Item', home, nesting)}]"
        if kind == "object":
            rest = object_of(outline.schema.get("additionalProperties"))
            if not rest:
                return "dict[str, Any]"
            return (
                f"dict[str, {self.annotation(outline.inner(rest), f'{hint}Value', home, nesting)}]"
            )
        return _SIMPLE.get(kind, "Any")

    def _typed_dict(self, outline: Outline, hint: str, home: Home) -> str:
        wanted = class_name(outline.reference.rpartition("/")[2]) if outline.reference else hint
        name = self.free(wanted if wanted not in self._names else hint)
        if outline.reference is not None:
            # Registered before its fields are converted, because they may refer to it.
            self._by_reference[home.key(outline.reference)] = name
        required = set(outline.required)
        fields: dict[str, str] = {}
        for field, inner in outline.properties.items():
            kind = self.annotation(inner, name + class_name(field), home)
            fields[field] = kind if field in required else f"NotRequired[{kind}]"
        content = (outline.description, *fields.items())
        known = self._by_content.setdefault(content, name)
        if known != name and outline.reference is None and outline.description:
            self._names.discard(name)
            return known
        write = _brief_source if self._brief else _typed_dict_source
        self.classes.append(write(name, fields, outline.description))
        return name


def _typed_dict_source(name: str, fields: dict[str, str], description: str) -> str:
    if all(map(is_identifier, fields)):
        lines = [f"class {name}(TypedDict):\n    {docstring(description or name)}\n"]
        lines += [f"    {field}: {quoted(kind)}" for field, kind in fields.items()]
        return "\n".join(lines)
    inside = "".join(f"        {field!r}: {quoted(kind)},\n" for field, kind in fields.items())
    return f'{name} = TypedDict(\n    "{name}",\n    {{\n{inside}    }},\n)'


def _brief_source(name: str, fields: dict[str, str], description: str) -> str:
    if not all(map(is_identifier, fields)):
        return _typed_dict_source(name, fields, description)
    return "\n".join(
        [f"class {name}(TypedDict):", *(f"    {field}: {kind}" for field, kind in fields.items())]
    )


def is_identifier(name: str) -> bool:
    """Return whether an attribute of a class can have exactly this name.

    Python normalises identifiers beyond ASCII and renames those that begin with two underscores.
    """
    return (
        name.isascii()
        and name.isidentifier()
        and not keyword.iskeyword(name)
        and not name.startswith("__")
    )


def identifier(text: str) -> str:
    """Return `text` as an identifier in snake case."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", text)
    name = re.sub(r"[^A-Za-z0-9]+", "_", words).strip("_").lower() or "value"
    name = f"n{name}" if name[0].isdigit() else name
    return f"{name}_" if keyword.iskeyword(name) else name


def class_name(*parts: str) -> str:
    """Return words as a class name."""
    words = [word for part in parts for word in re.split(r"[^A-Za-z0-9]+", part) if word]
    name = "".join(word[0].upper() + word[1:] for word in words) or "Value"
    return f"N{name}" if name[0].isdigit() else name


def free_name(wanted: str, taken: set[str]) -> str:
    """Reserve a name in `taken`: `wanted`, with a number appended if it is taken."""
    name = numbered_name(wanted, taken, "_" if wanted.islower() else "")
    taken.add(name)
    return name


def _union(kinds: Iterable[str]) -> str:
    found = list(dict.fromkeys(kinds))
    return "Any" if not found or "Any" in found else " | ".join(found)


def closed_literal(values: Collection[Any]) -> str:
    """Return the annotation of an enum."""
    literals = [repr(str(value) if isinstance(value, str) else value) for value in values]
    return f"Literal[{', '.join(literals)}]"


def open_literal(values: Collection[Any]) -> str:
    """Return the annotation of an enum: editors suggest its values, and other values are accepted as well."""
    rest = ["str"] if any(isinstance(value, str) for value in values) else []
    return " | ".join([closed_literal(values), *rest])


def literal(text: str) -> str:
    """Return `text` as a literal, in double quotes if they need no escapes."""
    plain = repr(text)
    return f'"{plain[1:-1]}"' if plain[0] == "'" and '"' not in plain else plain


def quoted(annotation: str, hidden: frozenset[str] = frozenset()) -> str:
    """Return an annotation as a literal, with the names in `hidden` as attributes of `builtins`.

    Raises:
        SyntaxError: If it is not an expression.
    """
    tree = ast.parse(annotation, "<annotation>", "eval")
    if not hidden:
        return literal(annotation)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in hidden:
            node.id = f"builtins.{node.id}"
    return literal(ast.unparse(tree))


def docstring(text: str) -> str:
    """Return the first line of a text as a docstring."""
    line = printable(text.strip().partition("\n")[0].strip())
    written = literal(line or "No description.")
    return f'""{written}""' if written[0] == '"' and written[-2] != "\\" else written
