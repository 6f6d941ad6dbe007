"""The envelope that every call returns: data and its origin.

Rule 1: `data` is in the same place for every source; `meta` has the fields of one source.
Rule 2: `lift_envelope` alone recognises envelopes in JSON; `is_response_envelope` uses it.
Rule 3: an envelope is never modified. To change one, create another.
"""

from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from time import time_ns
from typing import (
    Annotated,
    Any,
    ClassVar,
    Generic,
    Literal,
    NoReturn,
    Self,
    TypeAlias,
    TypeVar,
    cast,
)

import msgspec

from operations.base.errors import CallError, ErrorCode
from operations.base.json.decoding import decode_json
from operations.base.json.values import MAX_NAME, MAX_RESPONSE_VALUES, list_of, object_of, to_json
from operations.base.text import enforce_lists
from operations.base.types import JSONObject, JSONSchema
from operations.schema import MAX_MESSAGE, MAX_PATH, Change, Schema

_encode = msgspec.json.Encoder().encode

T = TypeVar("T")
DataT_co = TypeVar("DataT_co", covariant=True)

ResponseSource: TypeAlias = Literal["local", "http", "mcp"]
"""The value of `meta.source`."""

RESPONSE_SOURCES: tuple[ResponseSource, ...] = ("local", "http", "mcp")
"""All values of `meta.source`."""

MAX_CHANGES = 20
"""Entries in `meta.changes`."""

ERROR_KEY = "alkdev.operations/error"
"""The key in the `_meta` of an MCP result for the error of a trusted registry, whose code may be one of ours."""

Changes: TypeAlias = Annotated[tuple[Change, ...], msgspec.Meta(max_length=MAX_CHANGES)]
ChangesCount: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


Audience: TypeAlias = Annotated[
    str, msgspec.Meta(extra_json_schema={"enum": ["user", "assistant"]})
]
"""Any text is accepted, because newer servers may send new values; the exported schema lists the known ones."""


class _Wire(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """A frozen struct with camelCase names on the wire, where defaults are omitted."""


class MCPAnnotations(_Wire, frozen=True, kw_only=True):
    """Hints of an MCP server about a content block."""

    audience: list[Audience] | None = None
    priority: float | None = None
    last_modified: str | None = None

    def __post_init__(self) -> None:
        enforce_lists(audience=self.audience)


class MCPResourceContent(_Wire, frozen=True, kw_only=True):
    """The resource inside a `resource` block: text, or a base64 blob."""

    uri: str
    mime_type: str | None = None
    text: str | None = None
    blob: str | None = None
    meta: JSONObject | None = msgspec.field(default=None, name="_meta")


class _Block(_Wire, frozen=True, kw_only=True):
    """The fields of all content blocks."""

    annotations: MCPAnnotations | None = None
    meta: JSONObject | None = msgspec.field(default=None, name="_meta")


class TextContent(_Block, frozen=True, kw_only=True, tag_field="type", tag="text"):
    """Text."""

    type: ClassVar[Literal["text"]] = "text"

    text: str


class ImageContent(_Block, frozen=True, kw_only=True, tag_field="type", tag="image"):
    """An image, as base64."""

    type: ClassVar[Literal["image"]] = "image"

    data: str
    mime_type: str


class AudioContent(_Block, frozen=True, kw_only=True, tag_field="type", tag="audio"):
    """Sound, as base64."""

    type: ClassVar[Literal["audio"]] = "audio"

    data: str
    mime_type: str


class ResourceContent(_Block, frozen=True, kw_only=True, tag_field="type", tag="resource"):
    """A resource that is included in the result."""

    type: ClassVar[Literal["resource"]] = "resource"

    resource: MCPResourceContent


class ResourceLink(_Block, frozen=True, kw_only=True, tag_field="type", tag="resource_link"):
    """A resource that can be read later."""

    type: ClassVar[Literal["resource_link"]] = "resource_link"

    uri: str
    name: str
    title: str | None = None
    description: str | None = None
    mime_type: str | None = None
    size: int | None = None


MCPContentBlock: TypeAlias = (
    TextContent | ImageContent | AudioContent | ResourceContent | ResourceLink
)
"""A content block of an MCP tool's result."""


class LocalResponseMeta(
    _Wire, frozen=True, kw_only=True, gc=False, tag_field="source", tag="local"
):
    """The operation ran in this process or in one of our workers."""

    source: ClassVar[Literal["local"]] = "local"

    operation_id: str

    timestamp: int | float
    """Milliseconds since the epoch, when the result was wrapped. Other implementations may send a fraction."""

    sequence: int | str | None = None
    """The position of a stream item, if its transport has one: a number counted from 0 in the call protocol."""

    changes: Changes = ()
    """The changes made by normalisation: at most `MAX_CHANGES` entries, mismatches first."""

    changes_count: ChangesCount = 0
    """The number of changed values, including those that `changes` does not list."""


class HTTPResponseMeta(_Wire, frozen=True, kw_only=True, tag_field="source", tag="http"):
    """The result is an HTTP response."""

    source: ClassVar[Literal["http"]] = "http"

    status_code: int

    headers: dict[str, str]
    """Lower-case names; several values of one name joined by a comma and a space."""

    content_type: str
    changes: Changes = ()
    changes_count: ChangesCount = 0

    sequence: int | str | None = None
    """The position of a stream item, if its transport has one: the event id of a server-sent event."""


class MCPResponseMeta(_Wire, frozen=True, kw_only=True, tag_field="source", tag="mcp"):
    """The result comes from an MCP tool. `is_error` is True if the tool ran and reported an error."""

    source: ClassVar[Literal["mcp"]] = "mcp"

    is_error: bool
    content: list[MCPContentBlock]
    structured_content: Any = None
    meta: JSONObject | None = msgspec.field(default=None, name="_meta")
    changes: Changes = ()
    changes_count: ChangesCount = 0

    sequence: int | str | None = None
    """The position of a stream item, if its transport has one."""


ResponseMeta: TypeAlias = LocalResponseMeta | HTTPResponseMeta | MCPResponseMeta
"""The origin of a result; `source` identifies its kind."""

MetaT = TypeVar("MetaT", bound=ResponseMeta)


class ResponseEnvelope(msgspec.Struct, Generic[DataT_co], frozen=True):
    """The result of every call: JSON builtins or `bytes` in `data`, its origin in `meta`."""

    data: DataT_co
    meta: ResponseMeta

    def raise_for_error(self) -> Self:
        """Return this envelope, unless it holds the error result of an MCP tool.

        Raises:
            CallError: With the tool's own code if its structured content has one, else `EXECUTION_ERROR`; `details`
                has the tool's content. Only tools of a trusted registry can use the codes of this library.
        """
        if isinstance(self.meta, MCPResponseMeta) and self.meta.is_error:
            _raise_tool_error(self.meta)
        return self

    def to_wire(self) -> JSONObject:
        """Return JSON builtins with the names of the wire; `bytes` become base64, marked by `encoding`."""
        wire: JSONObject = {"data": self.data, "meta": msgspec.to_builtins(self.meta)}
        if self.meta.changes:
            wire["meta"]["changes"] = list(wire["meta"]["changes"])
        if isinstance(self.data, bytes):
            wire["data"] = b64encode(self.data).decode("ascii")
            wire["encoding"] = "base64"
        return wire

    def encode(self) -> bytes:
        """Return the JSON of `to_wire`."""
        if isinstance(self.data, bytes):
            return _encode(self.to_wire())
        return _encode(self)

    @classmethod
    def from_wire(cls, wire: Any) -> "ResponseEnvelope[Any]":
        """Return the envelope that `to_wire` wrote. Absent `data` is null: other implementations leave it out.

        Raises:
            ValueError: If `wire` is not an envelope.
        """
        if isinstance(wire, Mapping) and "data" not in wire:
            wire = {**cast("Mapping[str, Any]", wire), "data": None}
        envelope = lift_envelope(wire)
        if envelope is None:
            raise ValueError("not a response envelope: it needs data, and meta with a known source")
        return envelope

    @classmethod
    def decode(cls, text: bytes | str) -> "ResponseEnvelope[Any]":
        """Return the envelope in a JSON text.

        Raises:
            ValueError: If the text is not JSON, or not an envelope.
        """
        return cls.from_wire(decode_json(text, max_values=MAX_RESPONSE_VALUES))


class DescribedEnvelope(ResponseEnvelope[DataT_co], Generic[DataT_co], frozen=True):
    """An envelope of a handler with its own schema, which replaces the operation's output schema.

    Adapters return it if an operation has several kinds of responses. The pipeline normalises the data with `schema`
    and returns a plain envelope. The adapter must not use the data afterwards: the caller may receive it without a
    copy.
    """

    schema: Schema | None = None
    """None if there is no schema; the data then stays unchanged."""

    is_raw: bool = False
    """Whether the data is text although the operation declares JSON. No output policy replaces such data."""

    size: int | None = None
    """The number of bytes that the data was decoded from; None if unknown."""

    is_clean: bool = False
    """Whether the data is known to be valid JSON that needs no normalisation."""


def _raise_tool_error(meta: MCPResponseMeta) -> NoReturn:
    structured = object_of(meta.structured_content)
    text = "\n".join(block.text for block in meta.content if isinstance(block, TextContent))
    if all(isinstance(structured.get(name), str) for name in ("code", "message")):
        is_trusted = object_of(meta.meta).get(ERROR_KEY) == structured
        if is_trusted or structured["code"] not in ErrorCode.__members__:
            raise CallError.from_wire(structured)
        text = structured["message"]
    details: JSONObject = {"content": msgspec.to_builtins(meta.content)}
    if meta.structured_content is not None:
        details["structuredContent"] = meta.structured_content
    raise CallError(ErrorCode.EXECUTION_ERROR, text or "the tool reported an error", details)


_MAGIC = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"ID3", "audio/mpeg"),
    (b"OggS", "audio/ogg"),
    (b"fLaC", "audio/flac"),
    (b"%PDF-", "application/pdf"),
)


def sniffed(data: bytes) -> str:
    """Return the media type of bytes, detected from the first bytes."""
    for beginning, mime_type in _MAGIC:
        if data.startswith(beginning):
            return mime_type
    if data[:4] == b"RIFF":
        return {b"WEBP": "image/webp", b"WAVE": "audio/wav"}.get(
            data[8:12], "application/octet-stream"
        )
    return "application/octet-stream"


def local_envelope(data: T, operation_id: str) -> ResponseEnvelope[T]:
    """Return an envelope for a result of this process, with the current time."""
    return ResponseEnvelope(
        data, LocalResponseMeta(operation_id=operation_id, timestamp=time_ns() // 1_000_000)
    )


def http_envelope(
    data: T,
    *,
    status_code: int,
    headers: Mapping[str, str],
    content_type: str,
    sequence: int | str | None = None,
) -> ResponseEnvelope[T]:
    """Return an envelope for an HTTP response; header names become lower case."""
    lowered: dict[str, str] = {}
    for name, value in headers.items():
        key = name.lower()
        lowered[key] = f"{lowered[key]}, {value}" if key in lowered else value
    return ResponseEnvelope(
        data,
        HTTPResponseMeta(
            status_code=status_code, headers=lowered, content_type=content_type, sequence=sequence
        ),
    )


def mcp_envelope(
    data: T,
    *,
    is_error: bool = False,
    content: Iterable[MCPContentBlock | Mapping[str, Any]],
    structured_content: Any = None,
    meta: JSONObject | None = None,
) -> ResponseEnvelope[T]:
    """Return an envelope for the result of an MCP tool.

    Args:
        data: The result for callers that do not read blocks.
        is_error: Whether the tool reports an error.
        content: The blocks, as objects or as mappings with the names of the wire.
        structured_content: The structured content of the result.
        meta: The `_meta` of the result.
    """
    return ResponseEnvelope(
        data,
        MCPResponseMeta(
            is_error=is_error,
            content=[content_block(block) for block in content],
            structured_content=structured_content,
            meta=meta,
        ),
    )


def add_changes(meta: MetaT, changes: Sequence[Change]) -> MetaT:
    """Return `meta` with `changes` appended to those of earlier hops.

    A mismatch is not repeated if an earlier hop reported it with the same message: the value is unchanged.
    """
    known = {change for change in meta.changes if change.kind == "mismatch"}
    later = [change for change in changes if change not in known]
    if not later:
        return meta
    count = sum(change.count for change in later)
    if len(known) == MAX_CHANGES:
        # The earlier hop counted more mismatches than it listed: the new ones may be among them.
        unlisted = meta.changes_count - sum(change.count for change in known)
        repeated = sum(change.count for change in later if change.kind == "mismatch")
        count -= min(unlisted, repeated)
    listed = sorted((*meta.changes, *later), key=lambda change: change.kind != "mismatch")
    return msgspec.structs.replace(
        meta,
        changes=tuple(listed[:MAX_CHANGES]),
        changes_count=meta.changes_count + count,
    )


def changes_to_wire(meta: ResponseMeta) -> JSONObject:
    """Return the changes in `meta` in the form for responses without an envelope."""
    return {
        "changes": msgspec.to_builtins(list(meta.changes)),
        "changesCount": meta.changes_count,
    }


def read_changes(envelope: ResponseEnvelope[T], wire: Any) -> ResponseEnvelope[T]:
    """Return `envelope` with the changes that `changes_to_wire` wrote; unchanged if there are none."""
    changes, total = _changes_of(object_of(wire))
    if not total:
        return envelope
    meta = msgspec.structs.replace(envelope.meta, changes=tuple(changes), changes_count=total)
    return msgspec.structs.replace(envelope, meta=meta)


def unwrap(envelope: ResponseEnvelope[T]) -> T:
    """Return only the data, for callers that do not need its origin."""
    return envelope.data


def is_response_envelope(value: object) -> bool:
    """Return whether `value` is an envelope, or a mapping with exactly the fields of one."""
    return lift_envelope(value) is not None


def lift_envelope(value: Any) -> ResponseEnvelope[Any] | None:
    """Return `value` as an envelope, or None if it is not one.

    An instance is returned unchanged. A mapping must have `data` and a `meta` whose `source` is
    known and whose fields have the types that this source requires.
    """
    if isinstance(value, ResponseEnvelope):
        return value  # pyright: ignore[reportUnknownVariableType]
    if not isinstance(value, Mapping) or "data" not in value or "meta" not in value:
        return None
    wire = cast("Mapping[str, Any]", value)
    meta: Any = wire["meta"]
    if not isinstance(meta, Mapping):
        return None
    fields = dict(cast("Mapping[str, Any]", meta))
    try:
        if fields.get("source") not in RESPONSE_SOURCES:
            return None
        blocks: Any = fields.get("content")
        if fields["source"] == "mcp" and isinstance(blocks, list):
            fields["content"] = []
        if "changes" in fields or "changesCount" in fields:
            fields["changes"], fields["changesCount"] = _changes_of(fields)
        lifted = cast("ResponseMeta", msgspec.convert(fields, ResponseMeta))
        if isinstance(lifted, MCPResponseMeta):
            content = [content_block(block) for block in cast("list[Any]", blocks)]
            lifted = msgspec.structs.replace(lifted, content=content)
        return ResponseEnvelope(_data_of(wire), lifted)
    except (ValueError, TypeError, RecursionError):
        # Wrong fields, invalid base64, or blocks that are not JSON.
        return None


def _data_of(wire: Mapping[str, Any]) -> Any:
    data = wire["data"]
    if wire.get("encoding") == "base64" and isinstance(data, str):
        return b64decode(data, validate=True)
    return data


def _changes_of(meta: JSONObject) -> tuple[list[Change], int]:
    """Return the valid changes, with texts truncated to their limits, and the total number of changes.

    Unknown kinds are skipped, because a newer version may add them.
    """
    changes: list[Change] = []
    for entry in map(object_of, list_of(meta.get("changes"))[:MAX_CHANGES]):
        try:
            cut = {
                name: entry[name][:limit]
                for name, limit in (("path", MAX_PATH), ("message", MAX_MESSAGE))
                if isinstance(entry.get(name), str)
            }
            changes.append(msgspec.convert({**entry, **cut}, Change))
        except msgspec.ValidationError:
            continue
    listed, count = sum(change.count for change in changes), meta.get("changesCount")
    return changes, max(listed, count) if type(count) is int else listed


def content_block(block: Any) -> MCPContentBlock:
    """Return one content block from its wire form.

    Unknown fields are kept. A block of an unknown type, or with invalid fields, becomes a text block with its JSON.
    """
    if isinstance(block, (TextContent, ImageContent, AudioContent, ResourceContent, ResourceLink)):
        return block
    try:
        known = cast("MCPContentBlock", msgspec.convert(block, MCPContentBlock))
        return cast("MCPContentBlock", _with_unknown_fields(known, block))
    except msgspec.ValidationError:
        return TextContent(text=_encode(block).decode())


_MAX_UNKNOWN_FIELDS = 64


def _with_unknown_fields(known: msgspec.Struct, fields: Mapping[str, Any]) -> msgspec.Struct:
    """Return `known`, or an instance of a subclass with the additional fields of `fields`."""
    kind = type(known)
    unknown = fields.keys() - {*kind.__struct_encode_fields__, "type"}
    parts: dict[str, Any] = {}
    for name in ("annotations", "resource"):
        part = getattr(known, name, None)
        if part is not None:
            extended = _with_unknown_fields(part, fields[name])
            if extended is not part:
                parts[name] = extended
    if not unknown:
        return msgspec.structs.replace(known, **parts) if parts else known
    if len(unknown) > _MAX_UNKNOWN_FIELDS or any(len(name) > MAX_NAME for name in unknown):
        raise msgspec.ValidationError("too many unknown fields, or one with a long name")
    names = tuple(sorted(unknown))
    extras = {f"unknown_{index}": fields[name] for index, name in enumerate(names)}
    values = {name: getattr(known, name) for name in kind.__struct_fields__}
    return _extended(kind, names)(**{**values, **parts, **extras})


@lru_cache(256)
def _extended(kind: type[msgspec.Struct], names: tuple[str, ...]) -> type[msgspec.Struct]:
    """Return a subclass of `kind` with additional fields, given by their names on the wire."""
    config = kind.__struct_config__
    return msgspec.defstruct(
        kind.__name__,
        [(f"unknown_{index}", Any, msgspec.field(name=name)) for index, name in enumerate(names)],
        bases=(kind,),
        frozen=True,
        kw_only=True,
        tag_field=config.tag_field,
        tag=config.tag,
    )


class _EnvelopeOnTheWire(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of a call: its data and the origin of the data."""

    data: Any
    meta: ResponseMeta
    encoding: Literal["base64"] | None = None


def _schema_of(kind: Any) -> Schema:
    def build() -> JSONSchema:
        (root,), definitions = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
        # msgspec writes the default of a tuple as a tuple, which is not JSON.
        return cast("JSONObject", to_json({**root, "$defs": definitions}))

    return Schema(build)


RESPONSE_META_SCHEMA = _schema_of(ResponseMeta)
"""The schema of `meta` on the wire."""

RESPONSE_ENVELOPE_SCHEMA = _schema_of(_EnvelopeOnTheWire)
"""The schema of an envelope on the wire."""
