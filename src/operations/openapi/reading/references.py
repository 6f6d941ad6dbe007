"""Resolve the `$ref`s of one API description, without reading files.

A document with several files is combined into one document first (`files.py`); a reference to any other document is an
error.
"""

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from operations.base.errors import DocumentError
from operations.base.json.references import MAX_HOPS, objects_in, reference_of, steps
from operations.base.json.values import (
    escape,
    is_list,
    is_object,
    list_of,
    object_of,
    text_of,
    unescape,
)
from operations.base.types import JSONObject

BUNDLED = "x-bundled-files"
"""The root property that contains the other files of a document, by relative path."""

_DATA = frozenset({"example", "default", "const", "enum", "value"})
"""Keys whose values are data, in which a `$ref` is not a reference."""

_NAMES = frozenset(
    {"properties", "patternProperties", "responses", "schemas", "definitions", "$defs"}
)
"""Objects whose keys are names."""


class References:
    """The targets of every `$ref` of one document.

    Args:
        document: The document.
        missing: The reasons why files could not be read, by path relative to the document.

    Attributes:
        document: The document.
    """

    def __init__(self, document: JSONObject, missing: Mapping[str, str] | None = None) -> None:
        self.document = document
        self._missing = missing or {}
        self._targets: dict[str, tuple[str, Any] | None] = {}
        self._named: dict[str, str] | None = None

    def value(self, node: Any) -> Any:
        """Return `node`, or the target if it is a reference.

        Raises:
            DocumentError: If the target does not exist, or references form a cycle.
        """
        hops = 0
        while (ref := reference_of(node)) is not None:
            if hops == MAX_HOPS:
                raise DocumentError(f"references form a cycle: {ref}")
            hops += 1
            node = self.locate(ref)[1]
        return node

    def follow(self, node: Any) -> JSONObject:
        """Return `node`, or its target, as an object.

        Raises:
            DocumentError: If there is no object, or references form a cycle.
        """
        found = self.value(node)
        if not is_object(found):
            raise DocumentError("an object was expected")
        if found.get("$ref") is not None:
            raise DocumentError("its $ref is not text")
        return found

    def find(self, node: Any) -> JSONObject | None:
        """Return `node`, or its target, as an object; None if there is none."""
        try:
            return self.follow(node)
        except DocumentError:
            return None

    def object_at(self, node: Any) -> JSONObject:
        """Return `node`, or its target, if it is an object; else an empty object."""
        if is_object(node) and "$ref" not in node:
            return node
        return object_of(self.value_at(node))

    def list_at(self, node: Any) -> list[Any]:
        """Return `node`, or its target, as a list, with referenced lists inserted; empty if it is not a list."""
        found = list_of(self.value_at(node))
        for item in found:
            if is_object(item) and "$ref" in item and is_list(self.value_at(item)):
                break
        else:
            return found
        spread: list[Any] = []
        for item in found:
            inner = self.value_at(item)
            spread.extend(inner if is_list(inner) else [item])
        return spread

    def text_at(self, node: Any) -> str:
        """Return `node`, or its target, if it is text; else an empty string."""
        return node if isinstance(node, str) else text_of(self.value_at(node))

    def value_at(self, node: Any) -> Any:
        """Return `node`, or its target if it is a reference; None if the target does not exist."""
        if reference_of(node) is None:
            return node
        try:
            return self.value(node)
        except DocumentError:
            return None

    def merged(self, node: Any) -> JSONObject:
        """Return the object that `node` refers to; keywords beside the reference take precedence.

        Raises:
            DocumentError: If there is no object, or references form a cycle.
        """
        if not is_object(node) or "$ref" not in node:
            return self.follow(node)
        target = self.follow(node)
        beside = {key: part for key, part in node.items() if key != "$ref"}
        return {**target, **beside} if beside else target

    def locate(self, ref: str) -> tuple[str, Any]:
        """Return the normalised JSON pointer of the target of `ref`, and the target.

        Raises:
            DocumentError: If the target does not exist.
        """
        found = self.located(ref)
        if found is None:
            raise DocumentError(self._reason(ref))
        return found

    def located(self, ref: str) -> tuple[str, Any] | None:
        """As `locate`; None if the target does not exist."""
        if ref not in self._targets:
            self._targets[ref] = self._locate(ref)
        return self._targets[ref]

    def has(self, pointer: str) -> bool:
        """Return whether there is a value at a JSON pointer. Names such as `$id` are not looked up."""
        return self._at(pointer) is not None

    def locate_final(self, ref: str) -> tuple[str, Any]:
        """As `locate`, for the final target of a chain of references that begins with `ref`.

        Raises:
            DocumentError: If a target does not exist, or the references form a cycle.
        """
        for _ in range(MAX_HOPS):
            pointer, target = self.locate(ref)
            onward = reference_of(target)
            if onward is None or len(target) > 1:
                return pointer, target
            ref = onward
        raise DocumentError(f"references form a cycle: {ref}")

    def _reason(self, ref: str) -> str:
        """Return the reason why a reference cannot be resolved."""
        rest, _, anchor = ref.partition(f"#/{BUNDLED}/")[2].partition("#")
        file = unescape(unquote(rest.partition("/")[0]))
        if file in self._missing:
            return self._missing[file]
        if file:
            return f"{anchor or unquote(rest.partition('/')[2])!r} is not in {file!r}"
        if not ref.startswith("#"):
            return f"{ref!r} is not in this document, and no other is read for it"
        return f"{ref!r} is not in this document"

    def _locate(self, ref: str) -> tuple[str, Any] | None:
        fragment = ref[1:]
        if ref.startswith("#") and (not fragment or fragment.startswith("/")):
            found = self._below("", fragment)
            if found is not None:
                return found
        # Generators that copy a schema into a document often do not adjust its references to its own `$defs`.
        if self._named is None:
            self._named = dict(self._names())
        named = self._named.get(ref)
        if named is None and not ref.startswith("#"):
            name, _, fragment = ref.partition("#")
            named = self._named.get(name)
            if named is not None and fragment.startswith("/"):
                return self._below(named, fragment)
            if named is not None and fragment:
                named = self._named.get(f"{_file_of(named)}#{fragment}")
        return None if named is None else self._at(named)

    def _below(self, place: str, fragment: str) -> tuple[str, Any] | None:
        """Return the position and the value at the pointer in a reference to `place`."""
        # Percent-encoding belongs to the URI, so it is decoded first; some documents do not encode references.
        pointers = dict.fromkeys((place + unquote(fragment), place + fragment))
        return next(filter(None, map(self._at, pointers)), None)

    def _at(self, pointer: str) -> tuple[str, Any] | None:
        """Return the position and the value at a pointer, following references on the path."""
        found = steps(self.document, pointer)
        if found is not None:
            return found[-1] if found else ("", self.document)
        place, value, is_direct = "", self.document, True
        for token in pointer.split("/")[1:]:
            inner = steps(value, "/" + token) if is_direct else None
            if inner is None:
                # From here on, the path leads through targets of references.
                is_direct = False
                target = self._followed(place, value)
                inner = None if target is None else steps(target[1], "/" + token)
                if target is None or inner is None:
                    return None
                place = target[0]
            [(step, value)] = inner
            place += step
        return place, value

    def _followed(self, place: str, value: Any) -> tuple[str, Any] | None:
        """Return the position and the value at the end of a chain of references; None if it has no end."""
        holder = (place, value) if place else None
        for _ in range(MAX_HOPS):
            ref = reference_of(holder[1]) if holder is not None else None
            if holder is None or ref is None:
                break
            try:
                holder = self.located(ref)
            except RecursionError:
                return None
        return holder

    def _names(self) -> Iterator[tuple[str, str]]:
        """Yield the names of schemas and files (`$anchor`, `$id`, `$defs`, `$self`), in reverse order."""
        for place, node in reversed(list(_places(self.document))):
            for key, item in node.items():
                if key in {"$anchor", "$dynamicAnchor"}:
                    # An anchor belongs to its file.
                    yield f"{_file_of(place)}#{item}", place
                elif key in {"$id", "$self"} and isinstance(item, str):
                    yield item.removesuffix("#"), place
                elif key in {"$defs", "definitions"} and place:
                    for name in object_of(item):
                        yield f"#/{key}/{escape(name)}", f"{place}/{key}/{escape(name)}"

    def unresolved(self) -> list[tuple[str, str]]:
        """Return the first position of each unresolvable `$ref`, and the reason with the number of other positions.

        This searches the whole document, which takes about as long as decoding it.
        """
        refs = {
            ref for node in objects_in(self.document) if (ref := reference_of(node)) is not None
        }
        broken = {ref: reason for ref in refs if (reason := self._fault(ref)) is not None}
        if not broken:
            return []
        found: dict[str, list[str]] = {}
        for place, node in _places(self.document):
            ref = reference_of(node)
            if ref in broken and not _is_data(place):
                found.setdefault(ref, []).append("#" + place)
        return [
            (places[0], broken[ref] + (f" (and {len(places) - 1} more)" if places[1:] else ""))
            for ref, places in found.items()
        ]

    def _fault(self, ref: str) -> str | None:
        """Return why `ref` has no target; None for a reference to another reference that has none."""
        passed: set[str] = set()
        here: str | None = ref
        while here is not None and here not in passed:
            passed.add(here)
            try:
                here = reference_of(self.locate(here)[1])
            except DocumentError as error:
                return str(error) if here == ref else None
        return f"references form a cycle: {ref}" if here == ref else None


def bundled(file: str) -> str:
    """Return the reference to a file, whose name is escaped, in the combined document."""
    return f"#/{BUNDLED}/{file.replace('%', '%25')}"


def _file_of(place: str) -> str:
    """Return the reference to the file of a position in the combined document; empty for the document itself."""
    _, holder, file = (*place.split("/", 3), "", "")[:3]
    return bundled(file) if holder == BUNDLED else ""


def _is_data(place: str) -> bool:
    """Return whether a position is inside an example or other data."""
    above = ""
    for token in place.split("/"):
        if token in _DATA and above not in _NAMES:
            return True
        above = token
    return False


def _places(document: Any) -> Iterator[tuple[str, JSONObject]]:
    """Yield every object of `document` with its JSON pointer."""
    stack: list[tuple[str, Any]] = [("", document)]
    while stack:
        place, node = stack.pop()
        if is_object(node):
            yield place, node
            stack.extend(
                (f"{place}/{escape(str(key))}", item)
                for key, item in reversed(node.items())
                if is_object(item) or is_list(item)
            )
        elif is_list(node):
            stack.extend(
                (f"{place}/{index}", node[index]) for index in range(len(node) - 1, -1, -1)
            )
