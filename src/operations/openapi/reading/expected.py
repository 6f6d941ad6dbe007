"""What a good answer of one operation looks like: worked out once, when the operation is first used."""

from typing import Any

from operations.openapi.reading import media
from operations.openapi.reading.model import EVENT_STREAM, Media, Model, Response
from operations.openapi.reading.schemas import Direction, SchemaConverter
from operations.types import JSONSchema


class Expected:
    """The answer to expect.

    Args:
        model: What the document says.
        schemas: Converts the document's schemas.
        is_stream: Whether the answer is an event stream.

    Attributes:
        accept: The Accept header: what is expected, and anything rather than nothing.
        is_json: Whether the document promises JSON.
        is_sequence: Whether it promises a sequence of JSON values, and describes them one by one.
        has_redirects: Whether a redirect is one of the declared answers.
    """

    __slots__ = ("_media", "_schemas", "accept", "has_redirects", "is_json", "is_sequence")

    def __init__(self, model: Model, schemas: SchemaConverter, *, is_stream: bool) -> None:
        self._schemas = schemas
        response = best_response(model.responses)
        chosen = media.best(response.media) if response is not None else None
        kind = chosen.media_type if chosen is not None else "application/json"
        if response is not None and is_stream:
            chosen = next(filter(_is_stream, response.media), chosen)
        self._media = chosen
        self.accept = kind if kind.startswith("*/*") else f"{kind}, */*;q=0.1"
        if is_stream:
            self.accept = f"{EVENT_STREAM}, application/json;q=0.5"
        self.is_json = chosen is not None and media.is_json(kind)
        self.is_sequence = chosen is not None and is_sequence(chosen)
        self.has_redirects = any(r.status[:1] == "3" for r in model.responses)

    def schema(self) -> JSONSchema:
        """The schema of the answer's data; of one item's for a stream."""
        chosen = self._media
        if chosen is None:
            return {}
        if _is_stream(chosen):
            return self._schemas.build(self._item_schema(chosen), Direction.RESPONSE)
        if media.is_json(chosen.media_type) or self.is_sequence:
            return self._schemas.build(whole_schema(chosen), Direction.RESPONSE)
        if media.is_range(chosen.media_type):
            return {}
        # Text is a string whatever an object schema for XML says about its tree; bytes are checked by nobody.
        return {"type": "string"} if media.is_text(chosen.media_type) else {}

    def _item_schema(self, chosen: Media) -> Any:
        """3.2 describes a whole event; what we yield is its data."""
        if chosen.item_schema is None:
            return chosen.schema
        data = self._schemas.properties(chosen.item_schema).get("data")
        if data is None:
            return chosen.item_schema
        return self._schemas.resolve(data).get("contentSchema", data)


def best_response(responses: tuple[Response, ...]) -> Response | None:
    """The best of the good answers."""
    good = {r.status.upper(): r for r in responses}
    ranked = ["200", "201", *sorted(s for s in good if s[:1] == "2" and s.isdigit()), "2XX"]
    with_content = [good[s] for s in ranked if s in good and good[s].media]
    if with_content:
        return with_content[0]
    for status in (*ranked, "DEFAULT"):
        if status in good:
            return good[status]
    return None


def is_sequence(chosen: Media) -> bool:
    """Whether a body is a sequence of JSON values that the document describes one by one."""
    return chosen.item_schema is not None and media.is_sequence(chosen.media_type)


def whole_schema(chosen: Media) -> Any:
    """The schema of a whole body, also where the document describes only one item of it."""
    if chosen.schema is True and chosen.item_schema is not None:
        return {"type": "array", "items": chosen.item_schema}
    return chosen.schema


def _is_stream(candidate: Media) -> bool:
    return media.essence(candidate.media_type) == EVENT_STREAM
