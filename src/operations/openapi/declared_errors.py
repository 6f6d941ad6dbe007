"""The errors an operation declares: every answer of its document that is not a good one.

Most documents write the same few answers at every operation, so what a reference leads to is worked out once.
"""

from functools import partial
from typing import Any

from operations.errors import DocumentError
from operations.openapi import media, openapi3, swagger2
from operations.openapi.document import Description, Entry
from operations.openapi.nodes import object_of, text_of
from operations.openapi.schemas import Direction
from operations.schema import Schema
from operations.specs import ErrorDefinition
from operations.types import JSONObject, JSONSchema


class DeclaredErrors:
    """Reads what the operations of one document declare to go wrong."""

    def __init__(self, description: Description) -> None:
        self._description = description
        self._shared: dict[tuple[str, str], ErrorDefinition] = {}

    def read(self, entry: Entry) -> tuple[tuple[ErrorDefinition, ...], JSONObject]:
        """The declared errors, and the links of the good answers."""
        errors: list[ErrorDefinition] = []
        links: JSONObject = {}
        for status, node in self._description.responses(entry):
            first = status[:1]
            if type(node) is not dict or first == "x":
                continue
            if first == "2":
                if "links" in node:
                    links.update(object_of(node["links"]))
                continue
            ref = node.get("$ref")
            if type(ref) is str:
                known = self._shared.get((status, ref))
                if known is None:
                    known = self._shared[status, ref] = self._definition(entry, status, node)
                errors.append(known)
            else:
                errors.append(self._definition(entry, status, node))
        return tuple(errors), links

    def _definition(self, entry: Entry, status: str, node: JSONObject) -> ErrorDefinition:
        description = node.get("description")
        if type(description) is not str:
            try:
                description = text_of(self._description.references.follow(node).get("description"))
            except DocumentError:
                description = ""
        return ErrorDefinition(
            "HTTP_ERROR" if status == "default" else f"HTTP_{status.upper()}",
            description,
            Schema(partial(self._schema, entry, status), lenient=True),
            int(status) if status.isdigit() else None,
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
