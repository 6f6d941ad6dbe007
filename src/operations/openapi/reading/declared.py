"""Read what an import needs to know about every operation: its declared responses, and what is odd about its request.

Each response is looked at once, as there are more of them than of anything else. Most documents repeat the same few
responses at every operation, so the target of a reference is read once.
"""

from functools import partial
from typing import Any

import msgspec

from operations._json import is_object, list_of, object_of, text_of
from operations.errors import DocumentError
from operations.openapi.reading import media, openapi3, swagger2
from operations.openapi.reading.document import Description, Entry, Problem
from operations.openapi.reading.media import intended, is_stream
from operations.openapi.reading.schemas import Direction
from operations.schema import Schema
from operations.specs import ErrorDefinition
from operations.types import JSONObject, JSONSchema


class Declared(msgspec.Struct, gc=False):
    """What the responses of one operation declare."""

    errors: tuple[ErrorDefinition, ...]
    links: JSONObject | None

    has_stream: bool
    """Whether a successful response can be a stream."""

    has_other: bool
    """Whether a successful response can be something else."""


class DeclaredResponses:
    """Reads the declared responses of one document's operations."""

    def __init__(self, description: Description) -> None:
        self._description = description
        self._errors: dict[tuple[str, str | None], ErrorDefinition] = {}
        self._good: dict[str, JSONObject] = {}
        self._produces = description.document.get("produces")
        self._others: set[str] = set()
        self._tuples: dict[tuple[int, ...], tuple[ErrorDefinition, ...]] = {}
        """By the identities of the errors, all of which are kept here: most operations declare the same."""

    def read(self, entry: Entry) -> Declared:
        """Return what the responses of this operation declare."""
        errors: list[ErrorDefinition] = []
        links: JSONObject | None = None
        streams = others = False
        shared = self._errors
        for status, node in object_of(entry.operation.get("responses")).items():
            if not is_object(node):
                continue
            if type(status) is not str:
                # YAML reads a bare 200 as a number, and some readers keep it.
                status = str(status)  # noqa: PLW2901 - the same status, spelled
            ref = node.get("$ref")
            if status[:1] != "2":
                known = shared.get((status, ref))
                if known is not None:
                    errors.append(known)
                elif status[:2] != "x-":
                    errors.append(self._error(entry, status, node))
                continue
            if ref is not None:
                node = self._followed(node)  # noqa: PLW2901 - the same response, found
            if "links" in node:
                links = {**(links or {}), **object_of(node["links"])}
            content = node.get("content")
            if content:
                if "$ref" in content:
                    content = self._description.references.object_at(content)
                for kind in content:
                    if kind in self._others or not self._is_stream(kind):
                        others = True
                    else:
                        streams = True
        if self._description.is_swagger:
            produces = entry.operation.get("produces", self._produces)
            kinds = [is_stream(text_of(kind)) for kind in list_of(produces)]
            streams, others = True in kinds, False in kinds
        key = tuple(map(id, errors))
        same = self._tuples.get(key)
        if same is None:
            same = self._tuples[key] = tuple(errors)
        return Declared(same, links, streams, others or not streams)

    def _is_stream(self, kind: str) -> bool:
        if is_stream(kind):
            return True
        self._others.add(kind)
        return False

    def _followed(self, node: JSONObject) -> JSONObject:
        ref = str(node["$ref"])
        known = self._good.get(ref)
        if known is None:
            try:
                known = self._description.references.follow(node)
            except DocumentError:
                known = {}
            self._good[ref] = known
        return known

    def _error(self, entry: Entry, status: str, node: JSONObject) -> ErrorDefinition:
        """Return the error that a response declares; shared if two responses must be the same."""
        key = node.get("$ref")
        if key is None:
            key = node.get("description")
            if "content" in node or "schema" in node:
                ref = _only_ref(node)
                key = f"{key}\n{ref}" if ref and type(key) is str else None
        if type(key) is not str:
            return self._definition(entry, status, node)
        known = self._errors.get((status, key))
        if known is None:
            known = self._errors[status, key] = self._definition(entry, status, node)
        return known

    def _definition(self, entry: Entry, status: str, node: JSONObject) -> ErrorDefinition:
        description = node.get("description")
        if "$ref" in node:
            try:
                description = self._description.references.follow(node).get("description")
            except DocumentError:
                description = ""
        return ErrorDefinition(
            "HTTP_ERROR" if status == "default" else f"HTTP_{status.upper()}",
            text_of(description),
            Schema(
                partial(self._schema, entry, status),
                lenient=True,
                shared=self._description.schemas.responses,
            ),
            int(status) if status.isdecimal() and status.isascii() else None,
        )

    def _schema(self, entry: Entry, status: str) -> JSONSchema:
        """The schema of an error's details, whose `body` is what the document describes."""
        description = self._description
        if description.is_swagger:
            responses = swagger2.read_responses(
                description.references, description.document, entry.operation
            )
        else:
            responses = openapi3.read_responses(description.references, entry.operation)
        body: Any = True
        for response in responses:
            if response.status == status:
                chosen = media.best(response.media)
                if chosen is not None and media.is_json(chosen.media_type):
                    body = chosen.schema
        draft = description.schemas.draft(Direction.RESPONSE)
        return draft.close({"type": "object", "properties": {"body": draft.convert(body)}})


def _only_ref(node: JSONObject) -> str | None:
    """Return what a response is if it is only a media type and a reference to a schema; None if it is more."""
    content = object_of(node.get("content"))
    if len(content) != 1 or not node.keys() <= {"content", "description"}:
        return None
    [(kind, offered)] = content.items()
    schema = object_of(offered).get("schema")
    if not is_object(schema) or schema.keys() != {"$ref"} or len(offered) != 1:
        return None
    return f"{kind}\n{schema['$ref']}"


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
