"""Writes a request's body in the media type its document asks for.

Rule: what an argument says is written as data. It cannot end a part, add a field or choose the framing.
"""

from typing import Any, NamedTuple
from urllib.parse import quote_plus

import msgspec

from operations._json import is_list, object_of
from operations.errors import CallError, ErrorCode
from operations.openapi.files import StreamedBody, is_file_value
from operations.openapi.headers import enforce_header
from operations.openapi.reading import media
from operations.openapi.reading.keywords import is_file
from operations.openapi.reading.model import Media
from operations.openapi.reading.schemas import SchemaConverter
from operations.openapi.requests.multipart import fields_of, is_json_part, style_of, write_multipart
from operations.openapi.requests.styles import (
    content_text,
    form_pairs,
    percent_reserved,
    text_of_value,
)
from operations.openapi.requests.uploads import OCTETS, Upload, upload_of
from operations.types import JSONObject

JSON = "application/json"
_NO_HEADERS: JSONObject = {}


class Payload(NamedTuple):
    """A body ready to be sent."""

    content: bytes | StreamedBody
    content_type: str


def write_body(
    chosen: Media,
    value: Any,
    converter: SchemaConverter,
    *,
    is_bytes: bool,
    part_headers: JSONObject = _NO_HEADERS,
) -> Payload:
    """`value` in the media type `chosen`.

    Args:
        chosen: The media type, and how a form's fields are encoded.
        value: The argument.
        converter: Knows the properties of a form's schema.
        is_bytes: For what is neither JSON nor a form: whether a string is base64 rather than the text itself.
        part_headers: The headers of a multipart body's parts.

    Raises:
        CallError: With code `VALIDATION_ERROR`, if the value cannot be written that way.
    """
    kind = chosen.media_type
    if is_file_value(value):
        upload = upload_of(value, "body")
        return Payload(_sent(upload), media.concrete(kind, OCTETS))
    if media.is_json(kind):
        return Payload(msgspec.json.encode(value), media.concrete(kind, JSON))
    if is_list(value) and media.is_sequence(kind):
        return Payload(write_sequence(value, kind), kind)
    if media.is_multipart(kind):
        return Payload(*write_multipart(chosen, value, converter, part_headers))
    if media.is_form(kind):
        return _form(chosen, value, converter)
    if is_bytes:
        upload = upload_of(value, "body", converter.files_root)
        own_type = upload.content_type if upload is not None else ""
        enforce_header("Content-Type", own_type)
        return Payload(_sent(upload), own_type or media.concrete(kind, OCTETS))
    if isinstance(value, str):
        return Payload(*_encoded_text(value, kind))
    return Payload(msgspec.json.encode(value), media.concrete(kind, JSON))


def _sent(upload: Upload | None) -> bytes | StreamedBody:
    if upload is None:
        raise CallError(ErrorCode.VALIDATION_ERROR, "The body must be base64.")
    content = upload.content
    return content if isinstance(content, bytes) else StreamedBody([content])


def write_sequence(items: list[Any], kind: str) -> bytes:
    """JSON values one behind the other, each on a line; in a `json-seq` each also begins with a mark."""
    mark = b"\x1e" if "json-seq" in kind else b""
    return b"".join([mark + msgspec.json.encode(item) + b"\n" for item in items])


def _encoded_text(value: str, kind: str) -> tuple[bytes, str]:
    charset = media.parameter_of(kind, "charset")
    kind = media.concrete(kind, "text/plain")
    try:
        return value.encode(charset or "utf-8"), kind if charset else f"{kind}; charset=utf-8"
    except (LookupError, ValueError):
        return value.encode(), f"{media.essence(kind)}; charset=utf-8"


def _form(chosen: Media, value: Any, converter: SchemaConverter) -> Payload:
    if isinstance(value, str):
        return Payload(value.encode(), chosen.media_type)
    pairs: list[str] = []
    properties = converter.properties(chosen.schema)
    for name, item in fields_of(value).items():
        schema = converter.resolve(properties.get(name))
        if is_file(schema) or is_file(converter.resolve(schema.get("items"))):
            # A form has no place for a file's name and type: what is sent is its content.
            files = [upload_of(each, name) for each in (item if is_list(item) else [item])]
            pairs += [f"{quote_plus(name)}={quote_plus(file.read(name))}" for file in files if file]
            continue
        encoding = object_of(chosen.encoding.get(name))
        styled = style_of(encoding)
        if styled is None and is_list(item) and not is_json_part(encoding):
            styled = ("form", True)
        if styled is not None:
            style, explode = styled
            encode = percent_reserved if encoding.get("allowReserved") is True else quote_plus
            pairs += form_pairs(name, item, style=style, explode=explode, encode=encode)
        else:
            text = content_text(item, JSON) if is_json_part(encoding) else text_of_value(item)
            pairs.append(f"{quote_plus(name)}={quote_plus(text)}")
    return Payload("&".join(pairs).encode(), chosen.media_type)
