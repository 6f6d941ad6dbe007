"""Follow `$ref`s and JSON pointers through JSON of unknown shape, and find definitions that many documents share.

Rule 1: nothing is ever fetched.
Rule 2: every other module that follows a reference does it with these functions. The meaning of a reference (dialects
        and `$id` in `schema.references`, files and component names in `openapi.reading`) is added there.
Rule 3: within a scope a name has one meaning. A document belongs to a scope only if its definitions are exactly what
        its references lead to: then they can be left out, and found again.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from operations._json import canonical, escape, is_list, is_object, object_of, unescape
from operations.types import JSONObject, JSONSchema

T = TypeVar("T")

MAX_HOPS = 32
"""How many references may refer to one another in a row."""


def steps(value: Any, pointer: str) -> list[tuple[str, Any]] | None:
    """Return each place that a JSON pointer passes, as a pointer, with its value; None if it leads nowhere.

    The last one is the target; the list is empty for the empty pointer.
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
    """Return the value that a `#/...` reference refers to; None if it leads nowhere."""
    found = steps(root, ref[1:]) if ref.startswith("#") else None
    return None if found is None else found[-1][1] if found else root


def reference_of(node: Any) -> str | None:
    """Return what `node` refers to; None if it is not a reference."""
    ref = node.get("$ref") if is_object(node) else None
    return ref if isinstance(ref, str) else None


def followed(schema: Any, root: Any) -> tuple[JSONObject, list[str]]:
    """Return the schema at the end of a chain of `#/...` references, and the references passed.

    Keywords beside a reference are added to those of its target, and win. A reference that leads nowhere adds nothing.
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
    """Return everything that `start` leads to, itself included."""
    reached = set(start)
    waiting = list(reached)
    while waiting:
        for each in following(waiting.pop()):
            if each not in reached:
                reached.add(each)
                waiting.append(each)
    return reached


def objects_in(value: Any) -> Iterator[JSONObject]:
    """Yield `value` and everything in it that is an object, in the order of the document."""
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
        self._references = DefinitionReferences()

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


class DefinitionReferences:
    """Which definitions a schema refers to. Each is looked through once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, tuple[str, ...]]] = {}

    def reach(self, root: JSONSchema, definitions: Mapping[str, Any]) -> set[str]:
        """Return the names that `root` refers to, directly or through others; also those without a definition."""

        def following(name: str) -> Iterable[str]:
            return self._of(definitions[name]) if name in definitions else ()

        return reachable(_names_in(root), following)

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
