"""Follows `$ref` inside one document. Reads nothing: what a reference names outside of it is an error.

(Documents that span files become one document first: `files.py`.)
"""

from typing import Any
from urllib.parse import unquote

from operations._json import escape, is_list, is_object, list_of, object_of, unescape
from operations.errors import DocumentError
from operations.types import JSONObject

MAX_HOPS = 32
"""How many references may stand behind one another."""

_MISSING: Any = object()


class References:
    """Where every `$ref` of one document leads."""

    def __init__(self, document: JSONObject) -> None:
        self._document = document
        self._targets: dict[str, tuple[str, Any]] = {}
        self._named: dict[str, str] | None = None

    @property
    def document(self) -> JSONObject:
        """The document that references are resolved in."""
        return self._document

    def follow(self, node: Any) -> JSONObject:
        """The object that `node` is or refers to.

        Raises:
            DocumentError: If there is none, or references go round in circles.
        """
        ref: Any = None
        for _ in range(MAX_HOPS):
            if type(node) is not dict:
                raise DocumentError("an object was expected")
            found = object_of(node)
            ref = found.get("$ref")
            if not isinstance(ref, str):
                return found
            node = self.locate(ref)[1]
        raise DocumentError(f"references go round in circles: {ref}")

    def locate(self, ref: str) -> tuple[str, Any]:
        """The JSON pointer that `ref` means, spelled in one way, and what stands there.

        Raises:
            DocumentError: If nothing does.
        """
        known = self._targets.get(ref)
        if known is None:
            known = self._targets[ref] = self._locate(ref)
        if known[1] is _MISSING:
            raise DocumentError(f"{ref!r} leads nowhere in this document")
        return known

    def locate_final(self, ref: str) -> tuple[str, Any]:
        """Return what `locate` does for the last of the references that follow one another from `ref`.

        Raises:
            DocumentError: If one leads nowhere, or they lead back to the first.
        """
        for _ in range(MAX_HOPS):
            pointer, target = self.locate(ref)
            node = object_of(target)
            if type(node.get("$ref")) is not str or len(node) > 1:
                return pointer, target
            ref = node["$ref"]
        raise DocumentError(f"references go round in circles: {ref}")

    def _locate(self, ref: str) -> tuple[str, Any]:
        own = self._document.get("$self")
        if isinstance(own, str) and ref.startswith(own + "#"):
            # 3.2: the document by its own name.
            ref = ref.removeprefix(own)
        if not ref.startswith("#"):
            return self._by_name(ref)
        fragment = ref[1:]
        if fragment and not fragment.startswith("/"):
            return self._by_name(ref)
        # Percent-encoding belongs to the URI, so it comes off first; some documents never put it on.
        for pointer in dict.fromkeys((unquote(fragment), fragment)):
            tokens = [unescape(token) for token in pointer.split("/")[1:]]
            target = self._walk(tokens)
            if target is not _MISSING:
                return "".join("/" + escape(token) for token in tokens), target
        # Generators that copy a schema into a document often leave its references to its own `$defs` as they were.
        return self._by_name(ref)

    def _walk(self, tokens: list[str]) -> Any:
        node: Any = self._document
        for token in tokens:
            if type(node) is dict:
                node = object_of(node).get(token, _MISSING)
            elif type(node) is list and token.isascii() and token.isdigit() and len(token) < 10:
                items, index = list_of(node), int(token)
                node = items[index] if index < len(items) else _MISSING
            else:
                return _MISSING
        return node

    def _by_name(self, ref: str) -> tuple[str, Any]:
        """A reference to an `$anchor`, an `$id` or the `$defs` of a schema somewhere in the document."""
        if self._named is None:
            self._named = {}
            self._index(self._named)
        pointer = self._named.get(ref)
        return self._locate("#" + pointer) if pointer is not None else (ref, _MISSING)

    def _index(self, named: dict[str, str]) -> None:
        """Collect the names that schemas declare; the first of two equal ones counts."""
        stack: list[tuple[Any, str]] = [(self._document, "")]
        while stack:
            node, here = stack.pop()
            for key, item in object_of(node).items():
                place = f"{here}/{escape(key)}"
                if key in {"$anchor", "$dynamicAnchor"}:
                    named.setdefault(f"#{item}", here)
                elif key == "$id" and isinstance(item, str):
                    named.setdefault(item, here)
                elif key in {"$defs", "definitions"} and here:
                    for name in object_of(item):
                        named.setdefault(f"#/{key}/{escape(name)}", f"{place}/{escape(name)}")
                if is_object(item) or is_list(item):
                    stack.append((item, place))
            stack.extend((item, f"{here}/{index}") for index, item in enumerate(list_of(node)))
