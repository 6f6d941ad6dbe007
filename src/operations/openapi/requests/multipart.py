"""Writes multipart bodies: a part for each property or item, with the headers its `encoding` declares.

Rule 1: what an argument says is written as data. It cannot end a part or a header, nor add one.
Rule 2: a declared header is sent with the value the caller gives. Where the caller gives none, a required one has the
        value its schema fixes (`const`, an `enum` of one, `default`), and without such a value the call is refused.
"""

import base64
import secrets
from typing import Any

import msgspec

from operations._json import is_list, is_object, list_of, object_of, pointer, text_of
from operations.errors import CallError, ErrorCode
from operations.openapi.files import FileContent, StreamedBody, is_file_value
from operations.openapi.headers import enforce_header
from operations.openapi.reading import media
from operations.openapi.reading.keywords import is_file
from operations.openapi.reading.model import Media, Parameter
from operations.openapi.reading.schemas import SchemaConverter
from operations.openapi.requests.styles import header_value, plain_fields, text_of_value
from operations.openapi.requests.uploads import OCTETS, Upload, upload_of
from operations.types import JSONObject

PART_HEADERS = "part_headers"
"""The argument that holds the headers of parts."""

NO_VALUE: Any = object()


def write_multipart(
    chosen: Media, value: Any, converter: SchemaConverter, headers: JSONObject
) -> tuple[bytes | StreamedBody, str]:
    """The body and its content type.

    Args:
        chosen: The media type, and how each property is encoded.
        value: An object, or a list for parts without names.
        converter: Knows the properties of the schema.
        headers: By part: its headers by name, or a list of such for a part that is a list.

    Raises:
        CallError: With code `VALIDATION_ERROR`, if the value cannot be written that way.
    """
    writer = _Writer(chosen, converter, headers)
    if is_list(value):
        writer.add_items(value)
    else:
        writer.add_fields(fields_of(value))
    kind = media.concrete(media.essence(chosen.media_type), "multipart/form-data")
    return writer.finish(), f"{kind}; boundary={writer.boundary}"


def fields_of(value: Any) -> JSONObject:
    """The fields of a form.

    Raises:
        CallError: With code `VALIDATION_ERROR`, if `value` is no object.
    """
    if not is_object(value):
        raise CallError(ErrorCode.VALIDATION_ERROR, "A form's body must be an object.")
    return value


def is_json_part(encoding: JSONObject) -> bool:
    """Whether a field is declared to be JSON."""
    return media.is_json(text_of(encoding.get("contentType")))


def style_of(encoding: JSONObject) -> tuple[str, bool] | None:
    """The style that an encoding declares, and whether it explodes; None where it declares none."""
    style, explode = text_of(encoding.get("style")), encoding.get("explode")
    if not style and not isinstance(explode, bool) and not encoding.get("allowReserved"):
        return None
    style = style or "form"
    return style, explode if isinstance(explode, bool) else style in {"form", "deepObject"}


def fixed_value(parameter: Parameter, converter: SchemaConverter) -> Any:
    """Return the only value that a header's schema allows, or its default; `NO_VALUE` if there is neither."""
    value = only_value(parameter.schema, converter)
    return (
        converter.resolve(parameter.schema).get("default", NO_VALUE) if value is NO_VALUE else value
    )


def only_value(schema: Any, converter: SchemaConverter) -> Any:
    """Return the only value that a schema allows; `NO_VALUE` if it allows several."""
    node = converter.resolve(schema)
    choices = list_of(node.get("enum"))
    if "const" in node:
        return node["const"]
    return choices[0] if len(choices) == 1 else NO_VALUE


class _Writer:
    """One body in the making."""

    def __init__(self, chosen: Media, converter: SchemaConverter, headers: JSONObject) -> None:
        self._chosen = chosen
        self._converter = converter
        self._headers = headers
        self._out: list[bytes | FileContent] = []
        self._is_form = media.essence(chosen.media_type) == "multipart/form-data"
        self.boundary = secrets.token_hex(16)

    def finish(self) -> bytes | StreamedBody:
        pieces = [*self._out, f"--{self.boundary}--\r\n".encode()]
        plain = [piece for piece in pieces if isinstance(piece, bytes)]
        return b"".join(plain) if len(plain) == len(pieces) else StreamedBody(pieces)

    def add_fields(self, fields: JSONObject) -> None:
        properties = self._converter.properties(self._chosen.schema)
        for name, item in fields.items():
            encoding = object_of(self._chosen.encoding.get(name))
            schema = self._converter.resolve(properties.get(name))
            inner = self._converter.resolve(schema.get("items"))
            styled = style_of(encoding)
            if styled is not None and not _holds_files(item, schema, inner):
                style, explode = styled
                for field, text in plain_fields(name, item, style=style, explode=explode):
                    self._add(field, text, {}, {}, self._headers_of(name, 0))
            elif is_list(item) and not is_json_part(encoding):
                for index, part in enumerate(item):
                    self._add(name, part, encoding, inner, self._headers_of(name, index))
            else:
                self._add(name, item, encoding, schema, self._headers_of(name, 0))

    def add_items(self, items: list[Any]) -> None:
        """3.2: parts told apart by their place."""
        schema = self._converter.resolve(self._chosen.schema)
        schemas = list_of(schema.get("prefixItems"))
        first, rest = self._chosen.prefix_encoding, self._chosen.item_encoding
        for index, item in enumerate(items):
            held = schemas[index] if index < len(schemas) else schema.get("items")
            encoding = object_of(first[index]) if index < len(first) else rest
            self._add("", item, encoding, self._converter.resolve(held), {})

    def _headers_of(self, part: str, index: int) -> dict[str, str]:
        """The headers of a part by name, written."""
        declared = self._chosen.part_headers.get(part, ())
        given: Any = self._headers.get(part)
        if is_list(given):
            given = given[index] if index < len(given) else {}
        values, result = object_of(given), dict[str, str]()
        for parameter in declared:
            value = values.get(parameter.name, NO_VALUE)
            if value is NO_VALUE and parameter.required:
                value = fixed_value(parameter, self._converter)
                if value is NO_VALUE:
                    raise _missing(part, parameter.name)
            if value is not NO_VALUE:
                result[parameter.name] = text = header_value(parameter, value)
                enforce_header(parameter.name, text)
        return result

    def _add(
        self,
        name: str,
        value: Any,
        encoding: JSONObject,
        schema: JSONObject,
        headers: dict[str, str],
    ) -> None:
        """Append one part: a file, an object as JSON, or text."""
        # `encoding.contentType` may list several types, or a range.
        declared = text_of(encoding.get("contentType")).partition(",")[0].strip()
        filename: str | None = None
        content: bytes | FileContent
        if is_file(schema) or is_file_value(value):
            upload = upload_of(value, name, self._converter.files_root)
            if upload is None:
                raise CallError(ErrorCode.VALIDATION_ERROR, f"{name!r} must be a file.")
            content, filename = upload.content, upload.filename or name
            fallback = media.concrete(text_of(schema.get("contentMediaType")) or OCTETS, OCTETS)
            kind = upload.content_type or media.concrete(declared or fallback, fallback)
        elif isinstance(value, (dict, list)) or media.is_json(declared):
            content = msgspec.json.encode(value)
            kind = media.concrete(declared or "application/json", "application/json")
        else:
            content, kind = text_of_value(value).encode(), declared
        lines: list[str] = []
        if name or self._is_form:
            disposition = f'Content-Disposition: form-data; name="{_quoted(name)}"'
            if filename is not None:
                disposition += f'; filename="{_quoted(filename)}"'
            lines.append(disposition)
        if kind:
            enforce_header("Content-Type", kind)
            lines.append(f"Content-Type: {kind}")
        for header, text in headers.items():
            lines.append(f"{header}: {text}")
            if header.lower() == "content-transfer-encoding" and text.lower() == "base64":
                content = base64.b64encode(Upload(content).read(name))
        head = "".join(f"{line}\r\n" for line in lines)
        self._out += [f"--{self.boundary}\r\n{head}\r\n".encode(), content, b"\r\n"]


def _holds_files(value: Any, schema: JSONObject, inner: JSONObject) -> bool:
    """Whether a field is a file or several: styles say nothing about those."""
    return is_file(schema) or is_file(inner) or is_file_value(value)


def _quoted(text: str) -> str:
    """`text` inside a part's header, as browsers write it: nothing in it can end the header."""
    return text.replace('"', "%22").replace("\r", "%0D").replace("\n", "%0A").replace("\0", "%00")


def _missing(part: str, header: str) -> CallError:
    message = f"The part {part!r} needs the header {header!r}: give it in {PART_HEADERS!r}."
    path = pointer(PART_HEADERS) + pointer(part) + pointer(header)
    return CallError(
        ErrorCode.VALIDATION_ERROR,
        message,
        {"errors": [{"path": path, "message": message, "keyword": "required"}]},
    )
