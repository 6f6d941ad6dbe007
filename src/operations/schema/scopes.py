"""Definitions that many documents share: which of them say the same, and what a document needs of them.

Rule 1: within a scope a name has one meaning.
Rule 2: a document belongs to a scope only if its definitions are exactly what its references lead to: then they
        can be left out, and found again.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from operations._json import canonical
from operations.schema.kinds import is_array, is_object
from operations.types import JSONObject, JSONSchema

_DEFINITION = "#/$defs/"


@dataclass(frozen=True, slots=True)
class Placed:
    """A document in its scope."""

    scope: str

    root: JSONSchema
    """The document without its definitions."""

    fresh: dict[str, tuple[JSONSchema, int]]
    """Those of its definitions that were new to the scope, and the bytes they take."""


class Scopes:
    """The scopes of some documents, as they are found."""

    def __init__(self) -> None:
        self._scopes: list[_Scope] = []
        self._references = References()

    def place(self, document: JSONSchema) -> Placed | None:
        """Put `document` where its definitions agree with others; None where it has none, or cannot do without."""
        if isinstance(document, bool) or not is_object(document.get("$defs")):
            return None
        root = document.copy()
        definitions: JSONObject = root.pop("$defs")
        if not definitions or self._references.reach(root, definitions) != definitions.keys():
            return None
        for scope in self._scopes:
            if scope.agrees(definitions):
                break
        else:
            scope = _Scope(str(len(self._scopes)))
            self._scopes.append(scope)
        return Placed(scope.name, root, scope.add(definitions))

    def take_back(self, placed: Placed) -> None:
        """Forget what a document brought."""
        for name in placed.fresh:
            del self._scopes[int(placed.scope)].definitions[name]


class _Scope:
    def __init__(self, name: str) -> None:
        self.name = name
        self.definitions: dict[str, tuple[JSONSchema, bytes]] = {}

    def agrees(self, others: JSONObject) -> bool:
        """Whether no name means one thing here and another there."""
        for name, other in others.items():
            known = self.definitions.get(name)
            if known is not None and known[0] is not other and known[1] != canonical(other):
                return False
        return True

    def add(self, others: JSONObject) -> dict[str, tuple[JSONSchema, int]]:
        """Take in definitions; gives those that are new."""
        fresh: dict[str, tuple[JSONSchema, int]] = {}
        for name, other in others.items():
            if name not in self.definitions:
                text = canonical(other)
                self.definitions[name] = (other, text)
                fresh[name] = (other, len(text))
        return fresh


class References:
    """Which definitions a schema refers to. Each is looked through once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, tuple[str, ...]]] = {}

    def reach(self, root: JSONSchema, definitions: Mapping[str, Any]) -> set[str]:
        """The names that `root` refers to, directly or through others; also those that nobody defines."""
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
    names: set[str] = set()
    waiting = [schema]
    while waiting:
        value = waiting.pop()
        if is_object(value):
            reference = value.get("$ref")
            if isinstance(reference, str) and reference.startswith(_DEFINITION):
                token = reference[len(_DEFINITION) :].partition("/")[0]
                names.add(token.replace("~1", "/").replace("~0", "~"))
            waiting += value.values()
        elif is_array(value):
            waiting += value
    return names
