"""What is reported about the requests of a document when it is imported: read at once, so as little as possible."""

from typing import Any

from operations._json import is_object, list_of, object_of, text_of
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
        self._correct: set[Any] = set()
        self._corrected: dict[str, str] = {}
        self._unsigned: list[str] = []

    def read(self, entry: Entry) -> None:
        """Note what is odd about the request of an operation."""
        operation, authorized = entry.operation, self._description.authorized
        if authorized and not self._is_signed:
            security = operation.get("security")
            is_secured = self._has_security if security is None else security
            if not is_secured and (id(entry.item) in authorized or id(operation) in authorized):
                self._unsigned.append(f"{entry.method} {entry.path}")
        body = operation.get("requestBody")
        if is_object(body):
            for kind in object_of(body.get("content")):
                if kind not in self._correct:
                    self._note(entry, kind)
        elif "consumes" in operation:
            for kind in list_of(operation["consumes"]):
                self._note(entry, kind)

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
        text = text_of(kind)
        meant = intended(text)
        if meant != text:
            self._corrected[f"{entry.method} {entry.path}"] = meant
        else:
            self._correct.add(text)
