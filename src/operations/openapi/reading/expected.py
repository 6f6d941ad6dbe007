"""The successful responses of one operation, computed when the operation is first used.

Rule 1: the schema of the data is selected by the status of the response (exact, then a range such as `2XX`), and by its
        media type. `default` describes errors only.
Rule 2: a response that the document does not describe has no schema.
"""

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import msgspec

from operations.base.json.values import kind_of, list_of, object_of
from operations.base.types import JSONObject, JSONSchema
from operations.io.http.client import DEFAULT_HEADERS
from operations.openapi.reading import media
from operations.openapi.reading.definitions import Definitions
from operations.openapi.reading.keywords import as_object, base64_encoding
from operations.openapi.reading.media import EVENT_STREAM
from operations.openapi.reading.model import Media, Model, Response, best
from operations.openapi.reading.schemas import Direction, SchemaConverter, SchemaDraft
from operations.schema import Schema
from operations.schema.references import possible_types

_NULL: JSONObject = {"type": "null"}
_STRING = frozenset({"string"})

EMPTY = frozenset({204, 205, 304})
"""Statuses of responses that never have a body, even if a document declares one."""


class ResponseData:
    """The description of the data of a response.

    Args:
        declared: One media type of a declared response; None for a response that the document does not describe.
        schema: The schema of the whole response, or of one item of a stream; None if there is none.
        listed: The schema of all items of a stream as a list; None if it is not a stream.
        is_base64: Whether the schema describes the content as base64.

    Attributes:
        media: The declared media type.
        is_json: Whether JSON is declared.
        is_stream: Whether it is a sequence of items.
        is_text: Whether text other than JSON is declared.
        is_base64: Whether bytes are declared that are sent as base64.
        is_open: Whether it is no stream, and there is no schema, or one without any requirement.
        check_text: Raises `REFUSALS` unless a text is JSON that is valid and needs no change; None if that is unknown.
    """

    def __init__(
        self,
        declared: Media | None,
        schema: Schema | None,
        listed: Schema | None = None,
        *,
        is_base64: bool = False,
    ) -> None:
        kind = declared.media_type if declared is not None else ""
        self.media = declared
        self.is_json = media.is_json(kind)
        self.is_stream = media.is_stream(kind)
        self.is_text = media.is_text(kind) and not self.is_stream
        self.is_base64 = is_base64 and not (self.is_json or self.is_stream or self.is_text)
        self.schema = schema
        self.listed = listed
        self.is_open = not self.is_stream and (schema is None or schema.is_empty)
        self.check_text: Callable[[bytes], Any] | None = None

    def find_check(self) -> Callable[[bytes], Any] | None:
        """Return `check_text`, which is known once the schema has cast a value."""
        if self.is_json and self.schema is not None:
            self.check_text = self.schema.check_text
        return self.check_text

    @property
    def has_text_items(self) -> bool:
        """Whether the data of an event stays text even if it looks like JSON."""
        return self._types == _STRING

    def keeps_text(self, data: Any) -> bool:
        """Return whether a text that looks like the JSON `data` stays text: a string is declared, that type is not."""
        kind = kind_of(data)
        is_declared = ("number" if kind == "integer" else kind) in self._types
        return "string" in self._types and not is_declared

    @cached_property
    def _types(self) -> frozenset[str]:
        document = True if self.schema is None else self.schema.document
        return possible_types(document, document)

    def takes_text(self, text: str) -> bool:
        """Return whether an event may contain `text` instead of JSON."""
        if self.schema is None or object_of(self.schema.document).get("type") == "string":
            return True
        return self.schema.check(text)

    def quotes_text(self, text: str) -> bool:
        """Return whether `text` is not a declared text, but may be the JSON of one."""
        return text[:1] == '"' and self.schema is not None and not self.schema.check(text)

    def replaces_json(self, text: str, content_type: str) -> bool:
        """Return whether `text` may be the data, although JSON is declared; a page of HTML may not."""
        is_page = media.essence(content_type) == "text/html"
        return self.schema is not None and not is_page and self.takes_text(text)


_UNKNOWN = ResponseData(None, None)
ANY_JSON = ResponseData(Media(media_type="application/json"), None)
"""Describes a response that is JSON without a schema."""


class Expected:
    """The declared successful responses.

    Args:
        model: The model of the operation.
        schemas: Converts the document's schemas.
        output: The operation's output schema, used for the data if there is only one successful response.
        method: The method of the request.
        is_stream: Whether the operation is a subscription.
        is_split: Whether the document declares both a stream and other media types, which are separate operations.

    Attributes:
        headers: The headers of every request.
        redirects: The declared redirects: statuses, or `3XX`.
        found: The descriptions found so far, by status and content type.
    """

    def __init__(
        self,
        model: Model,
        schemas: SchemaConverter,
        output: Schema,
        *,
        method: str,
        is_stream: bool,
        is_split: bool,
    ) -> None:
        self._schemas, self._definitions = schemas, schemas.definitions
        self._output = output
        self._method = method
        self._is_stream = is_stream
        self._responses = {r.status.upper(): r for r in model.responses}
        self.found: dict[tuple[int, str], ResponseData] = {}
        self.headers = {**DEFAULT_HEADERS, "Accept": self._accept(is_split=is_split)}
        self.redirects = frozenset(s for s in self._responses if s[:1] == "3")

    def find(self, status: int, content_type: str) -> ResponseData:
        """Return the description of the data of a response, which is kept in `found`."""
        found, kind = _UNKNOWN, media.essence(content_type)
        response = self._responses.get(str(status)) or self._responses.get(f"{status // 100}XX")
        if response is not None and self._has_body(response) and status not in EMPTY:
            declared = _matching(response.media, kind)
            found = self._share(declared) if declared is not None else found
        # A server may send any number of media types.
        if len(self.found) < 100:
            self.found[status, content_type] = found
        return found

    def _share(self, declared: Media) -> ResponseData:
        """Return one shared description for media types with the same content."""
        for known in self.found.values():
            if known.media == declared:
                return known
        members = self._members()
        is_sole = len(members) == 1 and members[0] == declared
        is_stream = media.is_stream(declared.media_type)
        is_output = is_sole and (self._is_stream or not is_stream)
        schema = self._output if is_output else self._schema(declared)
        listed = self._schema(declared, is_listed=True) if is_stream else None
        is_base64 = base64_encoding(self._definitions.resolve(declared.schema)) != ""
        return ResponseData(declared, schema, listed, is_base64=is_base64)

    def _schema(self, declared: Media, *, is_listed: bool = False) -> Schema:
        """Return the schema of a response's data, or of all items of a stream, converted when it is first used."""

        def build() -> JSONSchema:
            draft = self._schemas.draft(Direction.RESPONSE)
            return draft.close(_data(draft, declared, is_listed=is_listed))

        return Schema(build, lenient=True, shared=self._schemas.responses)

    def schema(self) -> JSONSchema:
        """Return the schema of the data of any successful response, or of an item of a stream."""
        draft = self._schemas.draft(Direction.RESPONSE)
        members: list[JSONObject] = []
        are_objects = True
        offered = self._members()
        if not any(offered) and not self._is_always_empty():
            return {}
        for declared in offered:
            if declared is None:
                member, is_one = _NULL, False
            else:
                is_listed = media.is_stream(declared.media_type) and not self._is_stream
                member = _data(draft, declared, is_listed=is_listed)
                is_one = not is_listed and self._is_object(_raw(declared, self._definitions))
            if not member:
                return {}
            if member not in members:
                members.append(member)
            are_objects = are_objects and is_one
        if len(members) < 2:
            return draft.close(members[0]) if members else {}
        union: JSONObject = {"type": "object"} if are_objects else {}
        return draft.close({**union, "anyOf": members})

    def _members(self) -> list[Media | None]:
        """Return the requested representation of every successful response; None for a response without a body."""
        members: list[Media | None] = []
        for status, response in sorted(self._responses.items()):
            if status[:1] == "2":
                has_body = self._has_body(response) and status not in {"204", "205"}
                found = self._representations(response) if has_body else []
                # A stream without items has no data.
                members += found or ([] if self._is_stream else [None])
        return members

    def _representations(self, response: Response) -> list[Media]:
        """Return the requested representation of a response.

        If it can only be null, the others are results as well, such as bytes: exports describe such a union this way.
        """
        offered = self._offered(response)
        chosen = best(offered)
        if chosen is None:
            return []
        is_null = self._definitions.resolve(chosen.schema) in (
            {"const": None},
            {"type": "null"},
        )
        return [chosen, *(m for m in offered if is_null and m is not chosen)]

    def _is_always_empty(self) -> bool:
        """Return whether no response can have a body. A response without a declared body may still have one."""
        successes = [status for status in self._responses if status[:1] == "2"]
        return self._method == "HEAD" or (bool(successes) and set(successes) <= {"204", "205"})

    def _has_body(self, response: Response) -> bool:
        return bool(response.media) and self._method != "HEAD"

    def _offered(self, response: Response) -> Sequence[Media]:
        """Return the media types of a response that the operation requests: streams, or the others."""
        wanted = [m for m in response.media if media.is_stream(m.media_type) is self._is_stream]
        return wanted or response.media

    def _accept(self, *, is_split: bool) -> str:
        kinds = [m.media_type for m in self._members() if m is not None]
        if self._is_stream:
            streams = [kind for kind in kinds if media.is_stream(kind)]
            return f"{streams[0] if streams else EVENT_STREAM}, application/json;q=0.5"
        kind = kinds[0] if kinds else "application/json"
        return kind if is_split or kind.startswith("*/*") else f"{kind}, */*;q=0.1"

    def _is_object(self, schema: Any) -> bool:
        parts = self._definitions.parts(self._definitions.resolve(schema))
        return any(
            part["type"] == "object" if "type" in part else "properties" in part for part in parts
        )


def describes_items(declared: Media) -> bool:
    """Return whether a body is a sequence of JSON values for which the document describes single items."""
    return declared.item_schema is not None and media.is_sequence(declared.media_type)


def whole_schema(declared: Media) -> Any:
    """Return the schema of a whole body, also if the document describes only one item of it."""
    if declared.schema is True and declared.item_schema is not None:
        return {"type": "array", "items": declared.item_schema}
    return declared.schema


def _matching(offered: Sequence[Media], kind: str) -> Media | None:
    """Return the declared media type that matches a response of the type `kind`."""
    for declared in offered:
        if media.essence(declared.media_type) == kind:
            return declared
    for declared in offered:
        if media.is_range(declared.media_type) and fnmatchcase(
            kind, media.essence(declared.media_type)
        ):
            return msgspec.structs.replace(declared, media_type=kind)
    if media.is_stream(kind):
        return next((m for m in offered if media.is_stream(m.media_type)), None)
    # JSON is often sent as text of another type.
    may_be_json = kind.startswith("text/") and kind not in {"text/xml", "text/csv"}
    if media.is_json(kind) or media.is_unspecific(kind) or may_be_json:
        return next((m for m in offered if media.is_json(m.media_type)), None)
    return None


def _data(draft: SchemaDraft, declared: Media, *, is_listed: bool) -> JSONObject:
    """Return the schema of a response's data, or of one item or all items of a stream; empty if unknown."""
    kind, definitions = declared.media_type, draft.converter.definitions
    if is_listed:
        return {"type": "array", "items": _data(draft, declared, is_listed=False)}
    if media.is_json(kind) or media.is_stream(kind) or _is_json_range(declared, definitions):
        return as_object(draft.convert(_raw(declared, definitions)))
    # Text is a string, even if a schema describes its XML as an object.
    if media.is_text(kind):
        return {"type": "string"}
    if media.is_range(kind):
        return {}
    # Bytes are not checked, but a server that returns them must know their type.
    return {"type": "string", "contentEncoding": "base64", "contentMediaType": media.essence(kind)}


def _is_json_range(declared: Media, definitions: Definitions) -> bool:
    """Return whether a range of media types (`*/*`) describes only JSON."""
    if not media.is_range(declared.media_type) or not fnmatchcase(
        "application/json", media.essence(declared.media_type)
    ):
        return False
    node = definitions.resolve(declared.schema)
    kinds = [kind for kind in list_of(node.get("type")) or [node.get("type")] if kind != "null"]
    return all(kind in ("object", "array") for kind in kinds) or "properties" in node


def _raw(declared: Media, definitions: Definitions) -> Any:
    """Return the unconverted schema of a response's data or of one item of a stream."""
    if not media.is_stream(declared.media_type):
        return whole_schema(declared)
    item = declared.item_schema
    if item is None:
        whole = definitions.resolve(declared.schema)
        if media.is_sequence(declared.media_type):
            return whole.get("items", True) if whole.get("type") == "array" else declared.schema
        # Our own exports describe the text of all events.
        whole = definitions.resolve(whole.get("contentSchema", whole))
        events: list[Any] = list_of(whole.get("anyOf")) or [whole]
        items = [_event_data(event, definitions) for event in events]
        return declared.schema if None in items else {"anyOf": items}
    if media.is_sequence(declared.media_type):
        return item
    # 3.2 describes a whole event, but a subscription yields only its data.
    data = definitions.properties(item).get("data")
    return item if data is None else definitions.resolve(data).get("contentSchema", data)


def _event_data(event: Any, definitions: Definitions) -> Any:
    """Return the schema of the JSON in the data of an event; None if the schema does not describe an event."""
    return definitions.resolve(definitions.properties(event).get("data")).get("contentSchema")
