"""What an operation's spec needs of its declared answers: errors, links, and whether it is a stream.

One look at each answer, as there are more of them than of anything else. Most documents write the same few
answers at every operation, so what a reference leads to is worked out once.
"""

from functools import partial
from typing import Any

import msgspec

from operations._json import is_object, list_of, object_of, text_of
from operations.errors import DocumentError
from operations.openapi.reading import media, openapi3, swagger2
from operations.openapi.reading.document import Description, Entry
from operations.openapi.reading.media import is_stream
from operations.openapi.reading.schemas import Direction
from operations.schema import Schema
from operations.specs import ErrorDefinition
from operations.types import JSONObject, JSONSchema


class Declared(msgspec.Struct, gc=False):
    """What the answers of one operation say."""

    errors: tuple[ErrorDefinition, ...]
    links: JSONObject | None

    has_stream: bool
    """Whether a successful response can be a stream."""

    has_other: bool
    """Whether a successful response can be something else."""


class DeclaredAnswers:
    """Reads the answers of one document's operations."""

    def __init__(self, description: Description) -> None:
        self._description = description
        self._errors: dict[tuple[str, str | None], ErrorDefinition] = {}
        self._good: dict[str, JSONObject] = {}
        self._produces = description.document.get("produces")
        self._others: set[str] = set()

    def read(self, entry: Entry) -> Declared:
        """What the answers of this operation say."""
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
                node = self._followed(node)  # noqa: PLW2901 - the same answer, found
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
        return Declared(tuple(errors), links, streams, others or not streams)

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
        """The error an answer declares; shared where two answers must be the same."""
        key = node.get("$ref")
        if key is None:
            if "content" in node or "schema" in node:
                return self._definition(entry, status, node)
            key = node.get("description")
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
