"""JSON Schemas as Python annotations, with a `TypedDict` for every object that has properties."""

import keyword
import re
from typing import Any, NamedTuple

from operations._json import object_of
from operations.cli.outline import Outline
from operations.cli.render import first_line
from operations.schema import Schema
from operations.schema.scopes import Scopes

_SIMPLE = {
    "string": "str",
    "integer": "int",
    "number": "float",
    "boolean": "bool",
    "null": "None",
}


def is_identifier(name: str) -> bool:
    """Whether a name can be written as one in Python."""
    return name.isidentifier() and not keyword.iskeyword(name)


def identifier(text: str) -> str:
    """`text` as a name in snake case."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", text)
    name = re.sub(r"[^A-Za-z0-9]+", "_", words).strip("_").lower() or "value"
    name = f"n{name}" if name[0].isdigit() else name
    return f"{name}_" if keyword.iskeyword(name) else name


def class_name(*parts: str) -> str:
    """Words as the name of a class."""
    words = [word for part in parts for word in re.split(r"[^A-Za-z0-9]+", part) if word]
    name = "".join(word[0].upper() + word[1:] for word in words) or "Value"
    return f"N{name}" if name[0].isdigit() else name


def docstring(text: str) -> str:
    """The first line of a text, as it can stand between three quotes."""
    line = first_line(text).replace("\\", "\\\\").replace('"""', "'''").rstrip('"')
    return line or "No description."


class Home(NamedTuple):
    """A document, and the scope that its definitions share with others, if they do."""

    document: int
    scope: str | None

    def key(self, reference: str) -> tuple[str | int, str]:
        """The same for references that mean the same."""
        is_shared = self.scope is not None and reference.startswith("#/$defs/")
        return (self.scope if self.scope is not None and is_shared else self.document, reference)


class Types:
    """Collects the classes that annotations need."""

    def __init__(self) -> None:
        self.classes: list[str] = []
        self._names: set[str] = set()
        self._by_reference: dict[tuple[str | int, str], str] = {}
        self._scopes = Scopes()

    def home_of(self, schema: Schema) -> "Home":
        """Where the references of a schema mean what they mean."""
        try:
            placed = self._scopes.place(schema.document)
        except (ValueError, TypeError, RecursionError):
            placed = None
        return Home(id(schema), None if placed is None else placed.scope)

    def annotation(self, outline: Outline, hint: str, home: "Home") -> str:
        """The type of what a schema describes.

        Args:
            outline: The schema.
            hint: The name a class for it would like.
            home: The document it stands in; see `home_of`.
        """
        if outline.reference is not None:
            known = self._by_reference.get(home.key(outline.reference))
            if known is not None:
                return known
        if outline.is_recursive:
            return "Any"
        if (choices := outline.choices) and all(
            choice is None or isinstance(choice, (str, int)) for choice in choices
        ):
            return f"Literal[{', '.join(map(repr, choices))}]"
        if outline.properties:
            return self._typed_dict(outline, hint, home)
        if members := outline.members:
            return _union(
                self.annotation(member, f"{hint}{number}", home)
                for number, member in enumerate(members, 1)
            )
        return _union(self._simple(kind, outline, hint, home) for kind in sorted(outline.types))

    def _simple(self, kind: str, outline: Outline, hint: str, home: "Home") -> str:
        if kind == "array":
            return f"list[{self.annotation(outline.items, f'{hint}Item', home)}]"
        if kind == "object":
            rest = object_of(outline.schema.get("additionalProperties"))
            inner = self.annotation(outline.inner(rest), f"{hint}Value", home) if rest else "Any"
            return f"dict[str, {inner}]"
        return _SIMPLE.get(kind, "Any")

    def _typed_dict(self, outline: Outline, hint: str, home: "Home") -> str:
        wanted = class_name(outline.reference.rpartition("/")[2]) if outline.reference else hint
        name = self._free(wanted if wanted not in self._names else hint)
        if outline.reference is not None:
            # Before its fields are read: they may refer back to it.
            self._by_reference[home.key(outline.reference)] = name
        required = set(outline.required)
        fields: dict[str, str] = {}
        for field, inner in outline.properties.items():
            kind = self.annotation(inner, name + class_name(field), home)
            fields[field] = kind if field in required else f"NotRequired[{kind}]"
        self.classes.append(_written(name, fields, outline.description))
        return name

    def _free(self, wanted: str) -> str:
        name, number = wanted, 2
        while name in self._names:
            name, number = f"{wanted}{number}", number + 1
        self._names.add(name)
        return name


def _written(name: str, fields: dict[str, str], description: str) -> str:
    if all(map(is_identifier, fields)):
        lines = [f'class {name}(TypedDict):\n    """{docstring(description or name)}"""\n']
        lines += [f'    {field}: "{kind}"' for field, kind in fields.items()]
        return "\n".join(lines)
    inside = "".join(f"        {field!r}: {kind!r},\n" for field, kind in fields.items())
    return f'{name} = TypedDict(\n    "{name}",\n    {{\n{inside}    }},\n)'


def _union(kinds: Any) -> str:
    found = list(dict.fromkeys(kinds))
    return "Any" if not found or "Any" in found else " | ".join(found)
