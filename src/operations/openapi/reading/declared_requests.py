"""What is reported about the requests of a document when it is imported: read at once, so as little as possible."""

from typing import Any

from operations._json import is_object, list_of, object_of, text_of
from operations.errors import DocumentError
from operations.openapi.reading.document import Description, Entry, Problem
from operations.openapi.reading.media import intended


class DeclaredRequests:
    """Collects what callers should know about one document's requests.

    Args:
        description: The document.
        is_signed: Whether configuration sets the `Authorization` header.
    """

    def __init__(self, description: Description, *, is_signed: bool) -> None:
        self._description = description
        self._is_signed = is_signed
        self._has_security = bool(description.document.get("security"))
        self._known: dict[str, bool] = {}
        self._items: dict[int, bool] = {}
        self._corrected: dict[str, str] = {}
        self._unsigned: list[str] = []

    def read(self, entry: Entry) -> None:
        """Note what is odd about the request of an operation."""
        operation = entry.operation
        if not self._is_signed:
            security = operation.get("security")
            if not (self._has_security if security is None else security) and (
                self._requires_authorization(operation) or self._item(entry)
            ):
                self._unsigned.append(f"{entry.method} {entry.path}")
        body = operation.get("requestBody")
        if is_object(body):
            for kind in object_of(body.get("content")):
                self._note(entry, kind)
        elif self._description.is_swagger:
            for kind in list_of(operation.get("consumes")):
                self._note(entry, text_of(kind))

    def problems(self) -> list[Problem]:
        """Return what was noted, as problems that cost no operation."""
        found = [
            Problem(where, f"the media type of its body is misspelt and read as {kind!r}", False)
            for where, kind in self._corrected.items()
        ]
        if self._unsigned:
            first, *others = self._unsigned
            where = f"{first} and {len(others)} more" if others else first
            reason = "a required header 'Authorization' has no security scheme: set auth="
            found.append(Problem(where, reason, False))
        return found

    def _note(self, entry: Entry, kind: Any) -> None:
        meant = intended(kind)
        if meant != kind:
            self._corrected[f"{entry.method} {entry.path}"] = meant

    def _item(self, entry: Entry) -> bool:
        """Return whether the parameters of all operations of a path have the header."""
        if "parameters" not in entry.item:
            return False
        known = self._items.get(id(entry.item))
        if known is None:
            known = self._items[id(entry.item)] = self._requires_authorization(entry.item)
        return known

    def _requires_authorization(self, holder: Any) -> bool:
        for node in list_of(holder.get("parameters")):
            ref = node.get("$ref")
            if ref is None:
                found = _is_authorization(node)
            else:
                known = self._known.get(ref)
                if known is None:
                    known = self._known[ref] = self._follow(node)
                found = known
            if found:
                return True
        return False

    def _follow(self, node: Any) -> bool:
        try:
            return _is_authorization(self._description.references.follow(node))
        except DocumentError:
            return False


def _is_authorization(node: Any) -> bool:
    return (
        node.get("in") == "header"
        and node.get("required") is True
        and text_of(node.get("name")).lower() == "authorization"
    )
