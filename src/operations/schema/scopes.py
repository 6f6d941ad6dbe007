"""Definitions that many documents share: which of them are equal, and which of them a document needs.

Rule 1: within a scope a name has one meaning.
Rule 2: a document belongs to a scope only if its definitions are exactly what its references lead to: then they
        can be left out, and found again.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from operations._json import canonical, is_object, unescape
from operations._references import objects_in, reference_of
from operations.types import JSONObject, JSONSchema

_DEFINITION = "#/$defs/"


MAX_SCOPES = 64
"""Documents that agree with none of so many keep their definitions."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A document in its scope."""

    scope: str

    root: JSONSchema
    """The document without its definitions."""

    fresh: dict[str, JSONSchema]
    """Those of its definitions that were new to the scope."""


class Scopes:
    """The scopes of some documents, as they are found."""

    def __init__(self) -> None:
        self._scopes: list[_Scope] = []
        self._references = References()

    def place(self, document: JSONSchema) -> Placed | None:
        """Put `document` where its definitions agree with others; None if it has none, or needs its own.

        Raises:
            ValueError, TypeError, RecursionError: If a definition is not JSON.
        """
        if isinstance(document, bool) or not is_object(document.get("$defs")):
            return None
        root = document.copy()
        definitions: JSONObject = root.pop("$defs")
        if not definitions or self._references.reach(root, definitions) != definitions.keys():
            return None
        found = _Scope(definitions)
        for index, scope in enumerate(self._scopes):
            if scope.agrees(found):
                # Consecutive documents often belong to the same scope.
                self._scopes.insert(0, self._scopes.pop(index))
                break
        else:
            if len(self._scopes) >= MAX_SCOPES:
                return None
            scope = _Scope({}, str(len(self._scopes)))
            self._scopes.insert(0, scope)
        return Placed(scope.name, root, scope.add(found))

    def take_back(self, placed: Placed) -> None:
        """Forget the definitions of a document."""
        for scope in self._scopes:
            if scope.name == placed.scope:
                scope.remove(placed.fresh)


class _Scope:
    """Definitions by name, each written as JSON at most once, for comparison."""

    def __init__(self, definitions: JSONObject, name: str = "") -> None:
        self.name = name
        self.definitions = definitions
        self._texts: dict[str, bytes] = {}

    def agrees(self, other: "_Scope") -> bool:
        """Return whether names that both have mean the same."""
        for name, definition in other.definitions.items():
            known = self.definitions.get(name)
            if (
                known is not None
                and known is not definition
                and self.text(name) != other.text(name)
            ):
                return False
        return True

    def text(self, name: str) -> bytes:
        """Return a definition as canonical text, which is equal for equal definitions."""
        text = self._texts.get(name)
        if text is None:
            text = self._texts[name] = canonical(self.definitions[name])
        return text

    def add(self, other: "_Scope") -> JSONObject:
        """Take in definitions; gives those that are new."""
        fresh = {
            name: definition
            for name, definition in other.definitions.items()
            if name not in self.definitions
        }
        self.definitions |= fresh
        return fresh

    def remove(self, names: Iterable[str]) -> None:
        """Forget definitions."""
        for name in names:
            self.definitions.pop(name, None)
            self._texts.pop(name, None)


class References:
    """Which definitions a schema refers to. Each is looked through once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, tuple[str, ...]]] = {}

    def reach(self, root: JSONSchema, definitions: Mapping[str, Any]) -> set[str]:
        """Return the names that `root` refers to, directly or through others; also those without a definition."""
        reached: set[str] = set()
        waiting = list(_names_in(root))
        while waiting:
            name = waiting.pop()
            if name not in reached:
                reached.add(name)
                if name in definitions:
                    waiting += self._of(definitions[name])
        return reached

    def _of(self, definition: Any) -> tuple[str, ...]:
        known = self._known.get(id(definition))
        if known is None:
            # Kept with it, so that its id stays its own.
            known = self._known[id(definition)] = (definition, tuple(_names_in(definition)))
        return known[1]


def _names_in(schema: Any) -> set[str]:
    references = filter(None, map(reference_of, objects_in(schema)))
    return {
        unescape(reference[len(_DEFINITION) :].partition("/")[0])
        for reference in references
        if reference.startswith(_DEFINITION)
    }
