"""Follow `$ref`s and JSON pointers through JSON of unknown shape, and find definitions that many documents share.

Rule 1: nothing is ever fetched.
Rule 2: all other modules follow references with these functions. Two packages add meaning: `schema.references` handles
        dialects and `$id`, and `openapi.reading` handles files and component names.
Rule 3: a scope is a set of definitions that several documents share, in which a name has one meaning. A document
        belongs to a scope only if its references reach exactly its definitions: then the definitions can be omitted
        from the document and restored from the scope.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from operations.base.json.values import canonical, escape, is_list, is_object, object_of, unescape
from operations.base.types import JSONObject, JSONSchema

T = TypeVar("T")

MAX_HOPS = 32
"""The longest chain of references to references."""


def steps(value: Any, pointer: str) -> list[tuple[str, Any]] | None:
    """Return each location on the path of a JSON pointer, as a pointer with its value; None if the path does not exist.

    The last location is the target. The list is empty for the empty pointer.
    """
    found: list[tuple[str, Any]] = []
    place = ""
    for token in pointer.split("/")[1:]:
        name = unescape(token)
        if is_object(value) and name in value:
            value = value[name]
            place += "/" + escape(name)
        elif is_list(value) and _is_index(name) and int(name) < len(value):
            value = value[int(name)]
            place += f"/{int(name)}"
        else:
            return None
        found.append((place, value))
    return found


def _is_index(name: str) -> bool:
    return name.isascii() and name.isdecimal() and len(name) < 10


def target_of(ref: str, root: Any) -> Any:
    """Return the target of a `#/...` reference; None if there is no target."""
    found = steps(root, ref[1:]) if ref.startswith("#") else None
    return None if found is None else found[-1][1] if found else root


def reference_of(node: Any) -> str | None:
    """Return the `$ref` of `node`; None if it is not a reference."""
    ref = node.get("$ref") if is_object(node) else None
    return ref if isinstance(ref, str) else None


def followed(schema: Any, root: Any) -> tuple[JSONObject, list[str]]:
    """Return the schema at the end of a chain of `#/...` references, and the references passed.

    Keywords beside a reference are added to those of its target and override them. A reference without a target adds
    nothing.
    """
    here = object_of(schema)
    passed: list[str] = []
    while (ref := reference_of(here)) is not None and len(passed) < MAX_HOPS:
        passed.append(ref)
        here = object_of(target_of(ref, root)) | {
            key: value for key, value in here.items() if key != "$ref"
        }
    return here, passed


def reachable(start: Iterable[T], following: Callable[[T], Iterable[T]]) -> set[T]:
    """Return everything that can be reached from `start`, including `start` itself."""
    reached = set(start)
    waiting = list(reached)
    while waiting:
        for each in following(waiting.pop()):
            if each not in reached:
                reached.add(each)
                waiting.append(each)
    return reached


def objects_in(value: Any) -> Iterator[JSONObject]:
    """Yield every object in `value`, including `value` itself, in document order."""
    stack = [value]
    while stack:
        node = stack.pop()
        if is_object(node):
            yield node
            stack.extend(reversed(node.values()))
        elif is_list(node):
            stack.extend(reversed(node))


_DEFINITION = "#/$defs/"


MAX_SCOPES = 64
"""The largest number of scopes; documents that match none of them keep their definitions."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A document that belongs to a scope."""

    scope: str

    root: JSONSchema
    """The document without its definitions."""

    fresh: dict[str, JSONSchema]
    """The definitions that this document added to the scope."""


class Scopes:
    """Assigns documents to scopes."""

    def __init__(self) -> None:
        self._scopes: list[_Scope] = []
        self._references = DefinitionReferences()

    def place(self, document: JSONSchema) -> Placed | None:
        """Add `document` to a scope whose definitions agree with its own; return None if it must keep its definitions.

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
        """Remove the definitions that a document added."""
        for scope in self._scopes:
            if scope.name == placed.scope:
                scope.remove(placed.fresh)


class _Scope:
    """Definitions by name. Each is encoded as JSON at most once, for comparison."""

    def __init__(self, definitions: JSONObject, name: str = "") -> None:
        self.name = name
        self.definitions = definitions
        self._texts: dict[str, bytes] = {}

    def agrees(self, other: "_Scope") -> bool:
        """Return whether the definitions of all common names are equal."""
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
        """Add definitions, and return the new ones."""
        fresh = {
            name: definition
            for name, definition in other.definitions.items()
            if name not in self.definitions
        }
        self.definitions |= fresh
        return fresh

    def remove(self, names: Iterable[str]) -> None:
        """Remove definitions."""
        for name in names:
            self.definitions.pop(name, None)
            self._texts.pop(name, None)


class DefinitionReferences:
    """Finds the definitions that a schema refers to. Scans each definition once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, tuple[str, ...]]] = {}

    def reach(self, root: JSONSchema, definitions: Mapping[str, Any]) -> set[str]:
        """Return the names that `root` refers to, directly or indirectly, including names without a definition."""

        def following(name: str) -> Iterable[str]:
            return self._of(definitions[name]) if name in definitions else ()

        return reachable(_names_in(root), following)

    def _of(self, definition: Any) -> tuple[str, ...]:
        known = self._known.get(id(definition))
        if known is None:
            # Hold a reference to the definition, so that its `id()` stays unique.
            known = self._known[id(definition)] = (definition, tuple(_names_in(definition)))
        return known[1]


def _names_in(schema: Any) -> set[str]:
    references = filter(None, map(reference_of, objects_in(schema)))
    return {
        unescape(reference[len(_DEFINITION) :].partition("/")[0])
        for reference in references
        if reference.startswith(_DEFINITION)
    }
