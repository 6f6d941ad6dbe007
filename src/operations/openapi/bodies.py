"""Writes a request's body in the media type its document asks for.

Rule: what an argument says is written as data. It cannot end a part, add a field or choose the framing.
"""

import base64
import binascii
import secrets
from typing import Any, NamedTuple
from urllib.parse import quote_plus

import msgspec

from operations.errors import CallError, ErrorCode
from operations.openapi import media
from operations.openapi.keywords import is_file
from operations.openapi.model import Media
from operations.openapi.nodes import list_of, object_of, text_of
from operations.openapi.schemas import SchemaConverter
from operations.openapi.styles import form_pairs, text_of_value
from operations.types import JSONObject

OCTETS = "application/octet-stream"


class Payload(NamedTuple):
    """A body ready to be sent."""

    content: bytes
    content_type: str


def write_body(chosen: Media, value: Any, converter: SchemaConverter, *, is_bytes: bool) -> Payload:
    """`value` in the media type `chosen`.

    Args:
        chosen: The media type, and how a form's fields are encoded.
        value: The argument.
        converter: Knows the properties of a form's schema.
        is_bytes: For what is neither JSON nor a form: whether a string is base64 rather than the text itself.

    Raises:
        CallError: With code `VALIDATION_ERROR`, if the value cannot be written that way.
    """
    kind = chosen.media_type
    if isinstance(value, (bytes, bytearray)):
        return Payload(bytes(value), concrete(kind, OCTETS))
    if media.is_json(kind):
        return Payload(msgspec.json.encode(value), concrete(kind, "application/json"))
    if media.is_multipart(kind):
        return _multipart(chosen, value, converter)
    if media.is_form(kind):
        return _form(chosen, value, converter)
    if is_bytes:
        content, _, own_type = _file(value, "body")
        if content is None:
            raise CallError(ErrorCode.VALIDATION_ERROR, "The body must be base64.")
        return Payload(content, own_type or concrete(kind, OCTETS))
    if isinstance(value, str):
        return Payload(*_encoded_text(value, kind))
    return Payload(msgspec.json.encode(value), concrete(kind, "application/json"))


def concrete(kind: str, default: str) -> str:
    """`kind`, or `default` where it stands for several."""
    return default if media.is_range(kind) else kind


def from_base64(text: str, name: str) -> bytes:
    """The bytes that `text` encodes, in either alphabet.

    Raises:
        CallError: With code `VALIDATION_ERROR`, if it is not base64.
    """
    try:
        padded = text + "=" * (-len(text) % 4)
        return base64.b64decode(padded.replace("-", "+").replace("_", "/"), validate=True)
    except (binascii.Error, ValueError):
        message = f"{name!r} must be base64."
        raise CallError(
            ErrorCode.VALIDATION_ERROR,
            message,
            {"errors": [{"path": "/" + name, "message": message, "keyword": "contentEncoding"}]},
        ) from None


def _encoded_text(value: str, kind: str) -> tuple[bytes, str]:
    charset = media.parameter_of(kind, "charset")
    kind = concrete(kind, "text/plain")
    try:
        return value.encode(charset or "utf-8"), kind if charset else f"{kind}; charset=utf-8"
    except (LookupError, UnicodeEncodeError):
        return value.encode(), f"{media.essence(kind)}; charset=utf-8"


def _fields(value: Any) -> JSONObject:
    if type(value) is not dict:
        raise CallError(ErrorCode.VALIDATION_ERROR, "A form's body must be an object.")
    return object_of(value)


# ---- application/x-www-form-urlencoded


def _form(chosen: Media, value: Any, converter: SchemaConverter) -> Payload:
    if isinstance(value, str):
        return Payload(value.encode(), chosen.media_type)
    properties = converter.properties(chosen.schema)
    pairs: list[str] = []
    for name, item in _fields(value).items():
        encoding = object_of(chosen.encoding.get(name))
        style, explode = text_of(encoding.get("style")), encoding.get("explode")
        if style or isinstance(explode, bool) or encoding.get("allowReserved"):
            style = style or "form"
            pairs += form_pairs(
                name,
                item,
                style=style,
                explode=explode if isinstance(explode, bool) else style in {"form", "deepObject"},
                encode=quote_plus,
            )
        elif type(item) is list and not _is_json_part(encoding):
            pairs += [f"{quote_plus(name)}={quote_plus(_field_text(i))}" for i in list_of(item)]
        else:
            pairs.append(
                f"{quote_plus(name)}={quote_plus(_field_text(item, properties.get(name)))}"
            )
    return Payload("&".join(pairs).encode(), chosen.media_type)


def _is_json_part(encoding: JSONObject) -> bool:
    return media.is_json(text_of(encoding.get("contentType")))


def _field_text(value: Any, schema: Any = None) -> str:
    if isinstance(value, (bytes, bytearray)):
        return base64.b64encode(value).decode()
    if value is None and isinstance(schema, dict):
        return ""
    return text_of_value(value)


# ---- multipart/*


def _multipart(chosen: Media, value: Any, converter: SchemaConverter) -> Payload:
    boundary = secrets.token_hex(16)
    properties = converter.properties(chosen.schema)
    out: list[bytes] = []
    for name, item in _fields(value).items():
        encoding = object_of(chosen.encoding.get(name))
        schema = converter.resolve(properties.get(name))
        if type(item) is list and not _is_json_part(encoding):
            inner = converter.resolve(schema.get("items"))
            for part in list_of(item):
                _part(out, boundary, name, part, encoding, inner)
        else:
            _part(out, boundary, name, item, encoding, schema)
    out.append(f"--{boundary}--\r\n".encode())
    kind = concrete(media.essence(chosen.media_type), "multipart/form-data")
    return Payload(b"".join(out), f"{kind}; boundary={boundary}")


def _part(
    out: list[bytes], boundary: str, name: str, value: Any, encoding: JSONObject, schema: JSONObject
) -> None:
    """Append one part: a file, an object as JSON, or text."""
    # `encoding.contentType` may list several types, or a range.
    declared = text_of(encoding.get("contentType")).partition(",")[0].strip()
    filename: str | None = None
    if is_file(schema) or isinstance(value, (bytes, bytearray)):
        content, filename, own_type = _file(value, name)
        if content is None:
            raise CallError(ErrorCode.VALIDATION_ERROR, f"{name!r} must be a file.")
        filename = filename or name
        fallback = concrete(text_of(schema.get("contentMediaType")) or OCTETS, OCTETS)
        kind = own_type or concrete(declared or fallback, fallback)
    elif isinstance(value, (dict, list)) or media.is_json(declared):
        content = msgspec.json.encode(value)
        kind = concrete(declared or "application/json", "application/json")
    else:
        content, kind = text_of_value(value).encode(), declared
    head = f'Content-Disposition: form-data; name="{_quoted(name)}"'
    if filename is not None:
        head += f'; filename="{_quoted(filename)}"'
    if kind:
        head += f"\r\nContent-Type: {_quoted(kind)}"
    out.append(f"--{boundary}\r\n{head}\r\n\r\n".encode() + content + b"\r\n")


def _quoted(text: str) -> str:
    """`text` inside a part's header, as browsers write it: nothing in it can end the header."""
    return text.replace('"', "%22").replace("\r", "%0D").replace("\n", "%0A").replace("\0", "%00")


def _file(value: Any, name: str) -> tuple[bytes | None, str | None, str]:
    """Content, file name and media type of a file argument; no content where it is none."""
    if isinstance(value, (bytes, bytearray)):
        return bytes(value), None, ""
    if isinstance(value, str):
        return from_base64(value, name), None, ""
    described = object_of(value)
    filename = text_of(described.get("filename")) or None
    kind = text_of(described.get("contentType"))
    content = described.get("content")
    if isinstance(content, (bytes, bytearray)):
        return bytes(content), filename, kind
    if isinstance(content, str):
        return from_base64(content, name), filename, kind
    if isinstance(described.get("text"), str):
        return described["text"].encode(), filename, kind
    return None, None, ""
