"""The examples of responses that a document has, and how a value differs from what became of it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from operations._json import is_list, is_object, list_of, object_of
from operations.openapi.reading.document import Description, Entry
from operations.openapi.reading.media import is_json, is_range, is_stream, is_text

_TEXT = {"type": "string"}


@dataclass(frozen=True, kw_only=True)
class Example:
    """One example of one response."""

    entry: Entry
    status: int
    media_type: str
    value: Any
    schema: Any

    @property
    def where(self) -> str:
        """The operation and the status."""
        return f"{self.entry.method} {self.entry.path} {self.status}"


def examples_of(description: Description, entries: Iterable[Entry]) -> Iterator[Example]:
    """Yield the examples of all responses that are JSON or text."""
    follow = description.references.object_at
    for entry in entries:
        for status, node in object_of(entry.operation.get("responses")).items():
            response = follow(node)
            for media_type, schema, holder in _media(description, entry, response):
                for value in _values(description, schema, holder):
                    sent, sent_type = _meant(value), media_type
                    if is_range(media_type):
                        sent_type = "text/plain" if isinstance(sent, str) else "application/json"
                    is_sendable = is_text(sent_type) and isinstance(sent, str)
                    if is_json(sent_type) or (is_sendable and not is_stream(sent_type)):
                        yield Example(
                            entry=entry,
                            status=_status(str(status)),
                            media_type=sent_type,
                            value=sent,
                            schema=schema if is_json(sent_type) else _TEXT,
                        )


def _media(
    description: Description, entry: Entry, response: Any
) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield media type, schema, and what holds the examples."""
    if not description.is_swagger:
        for media_type, media in description.references.object_at(response.get("content")).items():
            node = description.references.object_at(media)
            yield media_type, node.get("schema", True), node
        return
    schema = response.get("schema", True)
    for media_type, value in object_of(response.get("examples")).items():
        yield media_type, schema, {"example": value}
    produces = entry.operation.get("produces", description.document.get("produces"))
    for media_type in list_of(produces)[:1] or ["application/json"]:
        yield media_type, schema, {}


def _values(description: Description, schema: Any, holder: dict[str, Any]) -> Iterator[Any]:
    if "example" in holder:
        yield holder["example"]
    for node in description.references.object_at(holder.get("examples")).values():
        example = description.references.object_at(node)
        if "value" in example:
            yield example["value"]
    own = description.schemas.resolve(schema)
    if "example" in own:
        yield own["example"]


def _status(text: str) -> int:
    digits = text[:1] + text[1:].upper().replace("X", "0")
    return int(digits) if digits.isdecimal() and len(digits) == 3 else 500


def _meant(value: Any) -> Any:
    """Return an example that is written as text of JSON as the JSON that it is."""
    if isinstance(value, str) and value.lstrip()[:1] in {"{", "["}:
        try:
            return msgspec.json.decode(value)
        except (ValueError, msgspec.DecodeError):
            return value
    return value


def differences(before: Any, after: Any) -> Iterator[str]:
    """Yield the kind of everything that differs."""
    if is_object(before) and is_object(after):
        for name in before.keys() | after.keys():
            if name not in after:
                yield "stripped"
            elif name not in before:
                yield "filled"
            else:
                yield from differences(before[name], after[name])
    elif is_list(before) and is_list(after) and len(before) == len(after):
        for one, other in zip(before, after, strict=True):
            yield from differences(one, other)
    elif type(before) is not type(after) or before != after:
        yield "converted"
