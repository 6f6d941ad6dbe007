"""Write the body of a request in its media type: JSON, a form, parts, text or bytes. Arguments may be files.

A file argument is its content, a path, an open file, base64 text, or an object that also has a name and type.

Rule 1: an argument is only data. It cannot end a part or a header, add a field, or choose the boundary.
Rule 2: a declared header of a part is sent with the caller's value. A required header without a caller's value gets the
        value that its schema fixes (`const`, an `enum` of one, `default`); if there is none, the call is rejected.
Rule 3: only code in this process can pass `bytes`, paths and open files. They are removed from the input while the rest
        is converted and validated as JSON.
"""

import base64
import secrets
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from secrets import token_hex
from typing import Any, NamedTuple, cast
from urllib.parse import quote_plus

import msgspec

from operations.base.errors import CallError, ErrorCode, invalid_argument
from operations.base.json.values import (
    SCALARS,
    is_list,
    is_object,
    list_of,
    object_of,
    pointer,
    text_of,
    with_texts,
)
from operations.base.types import JSONObject
from operations.io.files import (
    FileContent,
    FilesRoot,
    StreamedBody,
    from_base64,
    is_file_value,
    is_target_value,
    refused,
)
from operations.io.http.client import enforce_header
from operations.openapi.reading import media
from operations.openapi.reading.definitions import Definitions
from operations.openapi.reading.keywords import base64_encoding, is_file
from operations.openapi.reading.model import Media, Parameter
from operations.openapi.reading.schemas import SchemaConverter
from operations.openapi.source.parameters import (
    content_text,
    form_pairs,
    header_value,
    percent,
    percent_reserved,
    styled_fields,
    text_of_value,
)

OCTETS = "application/octet-stream"


class Upload(NamedTuple):
    """A file, or a part of a form, to send; missing fields are empty."""

    content: bytes | FileContent
    filename: str = ""
    content_type: str = ""

    def read(self, name: str) -> bytes:
        """Return the content, for a body that cannot stream a file.

        Raises:
            CallError: `VALIDATION_ERROR` if this is a file on disk.
        """
        if isinstance(self.content, FileContent):
            raise refused(name, "a file cannot be sent from disk here: pass its bytes")
        return self.content


def upload_of(value: Any, name: str, root: FilesRoot | None = None) -> Upload | None:
    """Return the argument `name` as a file, or None if it is not a file.

    Args:
        value: The argument.
        name: The name of the argument.
        root: The folder that contains files which an object may name as `path`.

    Raises:
        CallError: `VALIDATION_ERROR` if its text is not base64, or there is no such file.
    """
    described: JSONObject = {}
    if is_object(value):
        described, value = value, value.get("content")
        if not isinstance(value, str):
            if isinstance(described.get("text"), str):
                value = described["text"].encode()
            elif isinstance(described.get("path"), str) and root is not None:
                value = root.content(described["path"], name)
    content: bytes | FileContent
    if isinstance(value, str):
        content = _bytes_of(value, name)
    elif isinstance(value, (bytes, bytearray, memoryview)):
        content = bytes(cast("bytes", value))
    elif isinstance(value, FileContent):
        content = value
    elif is_file_value(value):
        content = FileContent.of(value, name)
    else:
        return None
    filename = content.filename if isinstance(content, FileContent) else ""
    return Upload(
        content,
        text_of(described.get("filename")) or filename,
        text_of(described.get("contentType")),
    )


@dataclass(frozen=True, slots=True)
class HeldFiles:
    """An input whose files were replaced, and the files.

    Attributes:
        value: The input, with a text in place of each file.
    """

    value: Any
    _files: dict[str, Any]
    _target: tuple[str, Any] | None

    def restore(self, value: Any) -> Any:
        """Put the files back into `value`, which was derived from the input without files."""
        files = self._files
        restored = with_texts(value, lambda text: files.get(text, text)) if files else value
        if self._target is not None:
            restored = {**restored, self._target[0]: self._target[1]}
        return restored


def hold_files(value: Any, save_to: str, *, is_deep: bool) -> HeldFiles | None:
    """Replace the files in an input; return None if it has no files.

    Args:
        value: The input.
        save_to: The argument that names the file to save the response to.
        is_deep: Whether the input may contain files to send.
    """
    target: tuple[str, Any] | None = None
    if is_object(value) and is_target_value(value.get(save_to)):
        target = (save_to, value[save_to])
        value = {name: item for name, item in value.items() if name != save_to}
    files: dict[str, Any] = {}
    if is_deep:
        value = _without_files(value, files, 0)
    return HeldFiles(value, files, target) if files or target is not None else None


def without_files(value: Any) -> Any:
    """Return `value` with a text in place of each file."""
    return _without_files(value, {}, 0)


def _without_files(value: Any, files: dict[str, Any], depth: int) -> Any:
    if depth > _MAX_DEPTH:
        return value
    if is_object(value):
        return {name: _without_files(item, files, depth + 1) for name, item in value.items()}
    if is_list(value):
        return [_without_files(item, files, depth + 1) for item in value]
    if type(value) in SCALARS or not is_file_value(value):
        return value
    # A placeholder that is valid base64 and different from all other arguments.
    stand_in = token_hex(16)
    files[stand_in] = value
    return stand_in


_MAX_DEPTH = 8


_NO_FILE_NAME = "A text is the content of a file, not its name. In Python, pass bytes or a Path."


def _bytes_of(text: str, name: str) -> bytes:
    """Return the bytes that `text` encodes in base64.

    Raises:
        CallError: With code `VALIDATION_ERROR`, if it is not base64.
    """
    try:
        return from_base64(text.encode())
    except ValueError:
        message = f"{name!r} must be base64. {_NO_FILE_NAME}"
        raise invalid_argument("/" + name, message, "contentEncoding") from None


def is_base64(text: str) -> bool:
    """Return whether `text` is base64."""
    with suppress(ValueError):
        from_base64(text.encode())
        return True
    return False


PART_HEADERS = "part_headers"
"""The argument that holds the headers of parts."""

_NO_HEADERS: JSONObject = {}

NO_VALUE: Any = object()

JSON = "application/json"


class Payload(NamedTuple):
    """A serialised body."""

    content: bytes | StreamedBody
    content_type: str


def write_multipart(
    chosen: Media, value: Any, converter: SchemaConverter, headers: JSONObject
) -> Payload:
    """Return the body.

    Args:
        chosen: The media type, and how each property is encoded.
        value: An object, or a list for parts without names.
        converter: Provides the properties of the schema.
        headers: The headers of each part, by name; a list of such objects for a part that is a list.

    Raises:
        CallError: With code `VALIDATION_ERROR`, if the value cannot be written in this media type.
    """
    writer = _Writer(chosen, converter, headers)
    if is_list(value):
        writer.add_items(value)
    else:
        writer.add_fields(fields_of(value, chosen, converter.definitions))
    kind = media.concrete(media.essence(chosen.media_type), "multipart/form-data")
    return Payload(writer.finish(), f"{kind}; boundary={writer.boundary}")


def fields_of(value: Any, chosen: Media, definitions: Definitions) -> JSONObject:
    """Return the fields of a form to send.

    A form cannot express null, so null for an optional field means that it is absent, unless the field has a default.

    Raises:
        CallError: With code `VALIDATION_ERROR`, if `value` is not an object.
    """
    if not is_object(value):
        raise CallError(ErrorCode.VALIDATION_ERROR, "A form's body must be an object.")
    if None not in value.values():
        return value
    form = definitions.flattened(chosen.schema)
    absent = {
        name
        for name, schema in form["properties"].items()
        if value.get(name, name) is None
        and name not in form["required"]
        and definitions.resolve(schema).get("default") is None
        and not is_json_part(object_of(chosen.encoding.get(name)))
    }
    return {name: item for name, item in value.items() if name not in absent}


def is_json_part(encoding: JSONObject) -> bool:
    """Return whether a field is declared as JSON."""
    return media.is_json(text_of(encoding.get("contentType")))


def style_of(encoding: JSONObject) -> tuple[str, bool] | None:
    """Return the style that an encoding declares, and whether it explodes; None if it declares none."""
    style, explode = text_of(encoding.get("style")), encoding.get("explode")
    if not style and not isinstance(explode, bool) and not encoding.get("allowReserved"):
        return None
    style = style or "form"
    return style, explode if isinstance(explode, bool) else style in {"form", "deepObject"}


def fixed_value(parameter: Parameter, definitions: Definitions) -> Any:
    """Return the only value that a header's schema allows, or its default; `NO_VALUE` if there is neither."""
    value = only_value(parameter.schema, definitions)
    return (
        definitions.resolve(parameter.schema).get("default", NO_VALUE)
        if value is NO_VALUE
        else value
    )


def only_value(schema: Any, definitions: Definitions) -> Any:
    """Return the only value that a schema allows; `NO_VALUE` if it allows several."""
    node = definitions.resolve(schema)
    choices = list_of(node.get("enum"))
    if "const" in node:
        return node["const"]
    return choices[0] if len(choices) == 1 else NO_VALUE


class _Writer:
    """Writes one multipart body."""

    def __init__(self, chosen: Media, converter: SchemaConverter, headers: JSONObject) -> None:
        self._chosen = chosen
        self._definitions, self._files = converter.definitions, converter.files
        self._headers = headers
        self._out: list[bytes | FileContent] = []
        self._is_form = media.essence(chosen.media_type) == "multipart/form-data"
        self.boundary = secrets.token_hex(16)

    def finish(self) -> bytes | StreamedBody:
        pieces = [*self._out, f"--{self.boundary}--\r\n".encode()]
        plain = [piece for piece in pieces if isinstance(piece, bytes)]
        return b"".join(plain) if len(plain) == len(pieces) else StreamedBody(pieces)

    def add_fields(self, fields: JSONObject) -> None:
        for name, item in fields.items():
            encoding = object_of(self._chosen.encoding.get(name))
            schema = self._files.field(self._definitions.property(self._chosen.schema, name), item)
            styled = style_of(encoding)
            # Styles do not apply to files.
            holds_files = _is_file(item, schema, encoding) or self._files.holds_files(schema, item)
            if styled is not None and not holds_files:
                for field, text in styled_fields(name, item, *styled):
                    self._add(field, text, {}, {}, self._headers_of(name, 0))
            elif is_list(item) and not is_json_part(encoding):
                for index, part in enumerate(item):
                    inner = self._files.field(schema.get("items"), part)
                    self._add(name, part, encoding, inner, self._headers_of(name, index))
            else:
                self._add(name, item, encoding, schema, self._headers_of(name, 0))

    def add_items(self, items: list[Any]) -> None:
        """Append parts without names, which 3.2 identifies by their position."""
        schema = self._definitions.resolve(self._chosen.schema)
        schemas = list_of(schema.get("prefixItems"))
        first, rest = self._chosen.prefix_encoding, self._chosen.item_encoding
        for index, item in enumerate(items):
            held = schemas[index] if index < len(schemas) else schema.get("items")
            encoding = object_of(first[index]) if index < len(first) else rest
            self._add("", item, encoding, self._definitions.resolve(held), {})

    def _headers_of(self, part: str, index: int) -> dict[str, str]:
        """Return the serialised headers of a part, by name."""
        declared = self._chosen.part_headers.get(part, ())
        given: Any = self._headers.get(part)
        if is_list(given):
            given = given[index] if index < len(given) else {}
        values, result = object_of(given), dict[str, str]()
        for parameter in declared:
            value = values.get(parameter.name, NO_VALUE)
            if value is NO_VALUE and parameter.required:
                value = fixed_value(parameter, self._definitions)
                if value is NO_VALUE:
                    raise _missing(part, parameter.name)
            if value is not NO_VALUE:
                result[parameter.name] = header_value(parameter, value)
        return result

    def _add(
        self,
        name: str,
        value: Any,
        encoding: JSONObject,
        schema: JSONObject,
        headers: dict[str, str],
    ) -> None:
        """Append one part with its headers."""
        content, filename, kind = self._part(name, value, encoding, schema)
        lines: list[str] = []
        if name or self._is_form:
            disposition = f'Content-Disposition: form-data; name="{_quoted(name)}"'
            if filename:
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

    def _part(self, name: str, value: Any, encoding: JSONObject, schema: JSONObject) -> Upload:
        """Return the content of a part: a file, an object as JSON, or text."""
        # `encoding.contentType` may contain several types, or a range.
        kinds = [kind.strip() for kind in text_of(encoding.get("contentType")).split(",")]
        declared = kinds[0]
        if _is_file(value, schema, encoding):
            upload = upload_of(value, name, self._files.root)
            if upload is None:
                raise CallError(
                    ErrorCode.VALIDATION_ERROR, f"{name!r} must be a file. {_NO_FILE_NAME}"
                )
            fallback = media.concrete(text_of(schema.get("contentMediaType")) or OCTETS, OCTETS)
            kind = upload.content_type or media.concrete(declared or fallback, fallback)
            return Upload(upload.content, upload.filename or name, kind)
        if isinstance(value, (dict, list)) or media.is_json(declared):
            declared = next(filter(media.is_json, kinds), declared)
            kind = media.concrete(declared or JSON, JSON)
            return Upload(msgspec.json.encode(value), content_type=media.in_utf8(kind))
        if media.parameter_of(declared, "charset"):
            content, kind = _encoded_text(text_of_value(value), declared)
            return Upload(content, content_type=kind)
        return Upload(text_of_value(value).encode(), content_type=declared)


def _is_file(value: Any, schema: JSONObject, encoding: JSONObject) -> bool:
    """Return whether a part is sent as a file: because it is one, or because the document declares one.

    An object whose `content` is a file is one too, unless the document declares what the part is.
    """
    if is_file_value(value) or (is_file(schema) and value is not None):
        return True
    is_described = schema.keys() <= _NOTES and not is_json_part(encoding)
    return is_described and is_object(value) and is_file_value(value.get("content"))


_NOTES = frozenset({"title", "description", "nullable", "example", "examples", "deprecated"})
"""Keywords that do not say what a value is."""


def _quoted(text: str) -> str:
    """Return `text` escaped for the header of a part, as browsers do, so that it cannot end the header."""
    return text.replace('"', "%22").replace("\r", "%0D").replace("\n", "%0A").replace("\0", "%00")


def _missing(part: str, header: str) -> CallError:
    message = f"The part {part!r} needs the header {header!r}: give it in {PART_HEADERS!r}."
    path = pointer(PART_HEADERS) + pointer(part) + pointer(header)
    return invalid_argument(path, message, "required")


def write_body(
    chosen: Media,
    value: Any,
    converter: SchemaConverter,
    *,
    is_bytes: bool,
    part_headers: JSONObject = _NO_HEADERS,
) -> Payload:
    """Return `value` in the media type `chosen`.

    Args:
        chosen: The media type, and the encoding of a form's fields.
        value: The argument.
        converter: Provides the properties of a form's schema.
        is_bytes: For types other than JSON and forms: whether a string is base64 instead of the text itself.
        part_headers: The headers of the parts of a multipart body.

    Raises:
        CallError: With code `VALIDATION_ERROR`, if the value cannot be written in this media type.
    """
    kind = chosen.media_type
    if is_file_value(value):
        upload = upload_of(value, "body")
        return Payload(_sent(upload, chosen, converter.definitions), media.concrete(kind, OCTETS))
    if media.is_json(kind):
        return _json_payload(value, kind)
    if is_list(value) and media.is_sequence(kind):
        return Payload(write_sequence(value, kind), media.in_utf8(kind))
    if media.is_multipart(kind):
        return write_multipart(chosen, value, converter, part_headers)
    if media.is_form(kind):
        return _encoded_form(chosen, value, converter)
    if is_bytes:
        upload = upload_of(value, "body", converter.files.root)
        own_type = upload.content_type if upload is not None else ""
        enforce_header("Content-Type", own_type)
        content = _sent(upload, chosen, converter.definitions)
        return Payload(content, own_type or media.concrete(kind, OCTETS))
    if isinstance(value, str):
        return Payload(*_encoded_text(value, kind))
    return _json_payload(value, kind)


def _json_payload(value: Any, kind: str) -> Payload:
    return Payload(msgspec.json.encode(value), media.in_utf8(media.concrete(kind, JSON)))


def _sent(upload: Upload | None, chosen: Media, definitions: Definitions) -> bytes | StreamedBody:
    """Return the content of a file; encoded, if the schema describes the body as text that encodes it."""
    if upload is None:
        raise CallError(ErrorCode.VALIDATION_ERROR, f"The body must be base64. {_NO_FILE_NAME}")
    encode = _ENCODE.get(base64_encoding(definitions.resolve(chosen.schema)))
    if encode is not None:
        return encode(upload.read("body"))
    return upload.content if isinstance(upload.content, bytes) else StreamedBody([upload.content])


def write_sequence(items: list[Any], kind: str) -> bytes:
    """Return a sequence of JSON values, one per line; in a `json-seq` each begins with a separator."""
    mark = b"\x1e" if "json-seq" in kind else b""
    return b"".join([mark + msgspec.json.encode(item) + b"\n" for item in items])


_ENCODE = {"base64": base64.b64encode, "base64url": base64.urlsafe_b64encode}


def _encoded_text(value: str, kind: str) -> tuple[bytes, str]:
    """Return text in the charset of its media type, and the media type; in UTF-8 if there is none or it is unknown."""
    charset = media.parameter_of(kind, "charset")
    kind = media.concrete(kind, "text/plain")
    try:
        return value.encode(charset), kind
    except (LookupError, ValueError):
        return value.encode(), f"{media.in_utf8(kind)}; charset=utf-8"


def whole_query(parameter: Parameter, value: Any, converter: SchemaConverter) -> str:
    """Return a value as the whole query (`querystring` of 3.2): a form, or any other content percent-encoded."""
    kind = parameter.media_type or ""
    if not media.is_form(kind) or not is_object(value):
        return percent(content_text(value, kind))
    form = Media(media_type=kind, schema=parameter.schema, encoding=parameter.encoding)
    return _form(form, value, converter)


def _encoded_form(chosen: Media, value: Any, converter: SchemaConverter) -> Payload:
    """Return a form in the charset of its media type; in UTF-8 if the charset is unknown or lacks a character."""
    kind = chosen.media_type
    charset = media.parameter_of(kind, "charset") or "utf-8"
    # Like browsers, only use charsets that contain ASCII.
    with suppress(LookupError, ValueError):
        if "=".encode(charset) == b"=":
            return Payload(_form(chosen, value, converter, charset).encode(), kind)
    return Payload(_form(chosen, value, converter).encode(), media.in_utf8(kind))


def _form(chosen: Media, value: Any, converter: SchemaConverter, charset: str = "utf-8") -> str:
    """Return a form, percent-encoded; a charset without a character raises `UnicodeError`."""
    if isinstance(value, str):
        return value
    plus = partial(quote_plus, encoding=charset, errors="strict")
    pairs: list[str] = []
    for name, item in fields_of(value, chosen, converter.definitions).items():
        schema = converter.files.field(converter.definitions.property(chosen.schema, name), item)
        if item is not None and converter.files.holds_files(schema, item):
            # A form cannot express a file's name and type, so only its content is sent.
            files = [upload_of(each, name) for each in (item if is_list(item) else [item])]
            pairs += [f"{plus(name)}={quote_plus(file.read(name))}" for file in files if file]
            continue
        encoding = object_of(chosen.encoding.get(name))
        styled = style_of(encoding)
        if styled is None and is_list(item) and not is_json_part(encoding):
            styled = ("form", True)
        if styled is not None:
            style, explode = styled
            reserved = partial(percent_reserved, encoding=charset)
            encode = reserved if encoding.get("allowReserved") is True else plus
            pairs += form_pairs(name, item, style=style, explode=explode, encode=encode)
        else:
            text = content_text(item, JSON) if is_json_part(encoding) else text_of_value(item)
            pairs.append(f"{plus(name)}={plus(text)}")
    return "&".join(pairs)
