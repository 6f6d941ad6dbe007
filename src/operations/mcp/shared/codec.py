"""Convert the contract of an operation to that of an MCP tool, and back.

The input of a tool is an object; before 2026-07-28 its output is an object too. A result has content blocks and one
structured value. Other values are boxed; the tool's `_meta` (`META_KEY`) records this with the rest of the contract:

    "input":  "any"         any input                         "boxed"       under `input`
              "object"      `type` was added at the root
    "output": "boxed"       under `result`                    "bytes"       bytes
              "items"       a subscription's list of items    "object"      `type` was added at the root

    "inputSchema":  {...}           the listed schema has copies of its definitions; the schema with references
    "outputSchema": EXACT_OUTPUT    the listed schema accepts other results too; location of the exact schema

Rule 1: an import uses this data only if the operator trusts the server.
Rule 2: a listed schema accepts every value that the operation's own schema accepts, and may accept more.
Rule 3: unreferenced definitions are omitted. If the definitions exceed a size limit, those farthest from the root
        become `{}`.
"""

import re
from base64 import b64decode
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Final, cast

import mcp_types as types
import msgspec
from msgspec.structs import replace

from operations.base.json.references import objects_in, reference_of, target_of
from operations.base.json.values import is_list, is_object, list_of, object_of, unescape
from operations.base.text import first_sentence
from operations.base.types import JSONObject, JSONSchema
from operations.contract.channel import NOTHING
from operations.contract.context import OperationContext
from operations.contract.envelopes import (
    ERROR_KEY,
    AudioContent,
    ImageContent,
    MCPContentBlock,
    MCPResponseMeta,
    ResourceContent,
    ResponseEnvelope,
    read_changes,
)
from operations.contract.events import trace_context
from operations.contract.specs import SOURCE_NAMESPACE, OperationSpec, OperationType
from operations.schema import Schema
from operations.schema.references import DEFINITION, DEFINITIONS, possible_types, rewritten

# ------------------------------------------------------------ `_meta`

META_KEY = "alkdev.operations/spec"
"""The key in a tool's `_meta`."""

SOURCES_KEY = "alkdev.operations/sources"
"""The key in the `_meta` of a list of tools for the `serverInfo` of each imported server, by namespace."""

CHANGES_KEY = "alkdev.operations/changes"
"""The key in a result's `_meta` for the changes of normalisation: `changes` and `changesCount` of the envelope."""

SHORT: Final = 200
"""The largest number of characters in a short description."""

EXACT_OUTPUT = "#/outputSchema/anyOf/0"
"""The location of the exact output schema in a listed tool whose schema accepts every result."""

_RESERVED: Final = "alkdev.operations/"
_ENVELOPE: Final = frozenset({
    types.CLIENT_CAPABILITIES_META_KEY, types.CLIENT_INFO_META_KEY, types.LOG_LEVEL_META_KEY,
    types.PROTOCOL_VERSION_META_KEY, types.SERVER_INFO_META_KEY, "progressToken",
})  # fmt: skip
"""Keys that describe the two ends of one connection; they are not forwarded."""


_PROTOCOL: Final = re.compile(r"([\w-]+\.)*(modelcontextprotocol|mcp)(\.[\w-]+)*/", re.ASCII)
"""Prefixes that the protocol reserves."""

_CREDENTIAL: Final = re.compile(
    r"auth|bearer|cookie|credential|key|passw|secret|session|token", re.IGNORECASE
)
_BAGGAGE: Final = "baggage"
"""The key of W3C baggage in `_meta`."""

_MAX_SENT: Final = 8 * 1024


def passed_meta(meta: Any) -> JSONObject:
    """Return the `_meta` of another server to forward, without our keys and those of its connection."""
    return {
        key: value
        for key, value in object_of(meta).items()
        if not key.startswith(_RESERVED) and key not in _ENVELOPE
    }


def sent_meta(meta: Any) -> Mapping[str, Any]:
    """Return the part of a client's `_meta` to forward to the server of an imported operation.

    Keys of the protocol and of this library concern only this connection. Trace context is forwarded separately, and
    `baggage` only to sources that are configured to receive it. Keys that indicate a credential, and more than
    `_MAX_SENT` bytes, are not forwarded.
    """
    sent = {
        key: value
        for key, value in passed_meta(meta).items()
        if ("/" in key and not _PROTOCOL.match(key) and not _CREDENTIAL.search(key))
        or (key == _BAGGAGE and isinstance(value, str))
    }
    return sent if sent and len(msgspec.json.encode(sent)) <= _MAX_SENT else NOTHING


def with_caller_meta(
    params: JSONObject, context: OperationContext, *, modern: bool, baggage: bool
) -> JSONObject:
    """Return a copy of `params` with the caller's `_meta`, trace context and requested log level (2026-07-28).

    Only the server of the called operation receives the caller's `_meta`, not the servers of nested calls.

    Args:
        params: The parameters of the request.
        context: The context of the call.
        modern: Whether the server speaks 2026-07-28 or later.
        baggage: Whether the server may receive the caller's `baggage`.
    """
    meta: JSONObject = {}
    if context.channel.meta and context.parent_request_id is None:
        meta |= context.channel.meta
        if not baggage:
            meta.pop(_BAGGAGE, None)
    if context.metadata:
        meta |= trace_context(context.metadata)
    level = context.channel.log_level
    if level is not None and modern:
        meta[types.LOG_LEVEL_META_KEY] = level
    return {**params, "_meta": {**object_of(params.get("_meta")), **meta}} if meta else dict(params)


def is_imported(spec: OperationSpec) -> bool:
    """Return whether an operation was imported from an MCP server."""
    return spec.meta.get("source") == "mcp"


def server_of(spec: OperationSpec) -> str | None:
    """Return the namespace of the server of an operation, which a renamed one may have left; None if not imported."""
    return str(spec.meta.get(SOURCE_NAMESPACE, spec.namespace)) if is_imported(spec) else None


def entry_of(spec: OperationSpec, name: str) -> JSONObject:
    """Return the common fields of an entry in a listing."""
    wire: JSONObject = {"name": name}
    if spec.title is not None:
        wire["title"] = spec.title
    if spec.description:
        wire["description"] = spec.description
    return wire


def with_passed(wire: JSONObject, listed: Mapping[str, Any], export: JSONObject) -> JSONObject:
    """Add the icons and `_meta` of an imported definition, and our own `_meta`, to an entry of a listing."""
    icons = list_of(listed.get("icons"))
    if icons:
        wire["icons"] = icons
    wire["_meta"] = {**passed_meta(listed.get("_meta")), META_KEY: export}
    return wire


_CARRIED = (
    "namespace",
    "name",
    "version",
    "type",
    "tags",
    "errorSchemas",
    "idempotent",
    "authority",
)


def export_spec(spec: OperationSpec) -> JSONObject:
    """Return the value of `META_KEY`: the part of the contract that the fields of a tool do not contain.

    Error schemas are not copied.
    """
    wire = spec.shared_wire()
    return {key: wire[key] for key in _CARRIED if key in wire}


def mcp_meta(spec: OperationSpec) -> Mapping[str, Any]:
    """Return the settings in `meta["mcp"]` for serving the operation over MCP."""
    meta = spec.meta.get("mcp")
    return cast("JSONObject", meta) if isinstance(meta, Mapping) else {}


# ------------------------------------------------------------ boxes

DATA_KEY: Final = "alkdev.operations/data"
"""The key in a result's `_meta` for its data: `bytes`, or, if it differs from other results of the tool, `boxed` (under
`result`) or `plain` (not under `result`)."""

INPUT: Final = "input"
"""The argument that contains an input that is not an object."""

RESULT: Final = "result"
"""The property that contains a result that is not an object, for clients that accept only objects."""

BYTES: Final[JSONSchema] = {"type": "string", "contentEncoding": "base64"}


def restore_spec(spec: OperationSpec, meta: Any) -> OperationSpec:
    """Return the original contract of an exported tool.

    Args:
        spec: The contract from the tool's listing.
        meta: The tool's `_meta`; without an exported contract, `spec` is returned.
    """
    extension = _extension(meta)
    if not extension:
        return spec
    carried = {key: extension[key] for key in _CARRIED if key in extension}
    if carried.get("type") == OperationType.SUBSCRIPTION:
        del carried["type"]  # a tool has one result
    with suppress(ValueError):
        spec = OperationSpec.from_wire({**spec.to_wire(), **carried})
    taken = _restored(spec.input_schema.document, extension.get("input"), INPUT)
    given = _exact(spec.output_schema.document, extension.get("outputSchema"))
    return replace(
        spec,
        input_schema=Schema(object_of(extension.get("inputSchema")) or taken, lenient=True),
        output_schema=Schema(_restored(given, extension.get("output"), RESULT), lenient=True),
    )


def is_marked(meta: Any) -> bool:
    """Return whether the `_meta` of a tool says that it administers authority. No trust is needed to believe that."""
    return object_of(object_of(meta).get(META_KEY)).get("authority") is True


def is_open(meta: Any) -> bool:
    """Return whether the output schema of an exported tool was listed with an alternative."""
    return _extension(meta).get("outputSchema") == EXACT_OUTPUT


def _exact(listed: JSONSchema, place: Any) -> JSONSchema:
    """Return the exact output schema of a tool that accepts every result."""
    members = list_of(listed.get("anyOf")) if isinstance(listed, dict) else []
    if place != EXACT_OUTPUT or not members:
        return listed
    shared = {key: object_of(listed)[key] for key in DEFINITIONS if key in object_of(listed)}
    exact: JSONSchema = {**object_of(members[0]), **shared} if shared else members[0]
    return moved(exact, "#", "#/anyOf/0")


def restore_arguments(input: Any, meta: Any) -> Any:
    """Return the input of an operation as the arguments of its tool."""
    return {INPUT: input} if _extension(meta).get("input") == "boxed" else input


def restore_envelope(envelope: ResponseEnvelope[Any], meta: Any) -> ResponseEnvelope[Any]:
    """Return the envelope of a tool's result with the original data, changes or error of the operation."""
    result = envelope.meta
    if not isinstance(result, MCPResponseMeta):
        return envelope
    noted = object_of(result.meta)
    if result.is_error:
        error = result.structured_content
        own = result.meta if error is None else {**noted, ERROR_KEY: error}
        return replace(envelope, meta=replace(result, meta=own))
    envelope, note = read_changes(envelope, noted.get(CHANGES_KEY)), noted.get(DATA_KEY)
    if note == "plain":
        return envelope
    if note == "bytes" and result.content:
        return replace(envelope, data=_bytes_of(result.content[0]))
    boxed = object_of(result.structured_content)
    if "boxed" in (note, _extension(meta).get("output")) and RESULT in boxed:
        data = boxed[RESULT]
        # Structured null cannot be told from missing structured content, so null stays in its box.
        structured = boxed if data is None else data
        meta = replace(envelope.meta, structured_content=structured)
        return replace(envelope, data=data, meta=meta)
    return envelope


def _bytes_of(block: MCPContentBlock) -> bytes:
    if isinstance(block, ResourceContent):
        return b64decode(block.resource.blob or "")
    return b64decode(block.data if isinstance(block, (AudioContent, ImageContent)) else "")


def moved(schema: JSONSchema, to: str, since: str = "#") -> JSONSchema:
    """Return a schema that moves from `since` to `to` in its document, with its internal references rewritten."""

    def change(copy: JSONObject) -> None:
        for keyword in ("$ref", "$dynamicRef"):
            if _is_at(copy.get(keyword), since):
                copy[keyword] = to + copy[keyword][len(since) :]

    return rewritten(schema, change)


def _is_at(reference: Any, place: str) -> bool:
    return isinstance(reference, str) and (reference == place or reference.startswith(f"{place}/"))


def _restored(document: JSONSchema, how: Any, key: str) -> JSONSchema:
    if how == "any":
        return {}
    if how == "bytes":
        return BYTES
    if not isinstance(document, dict):
        return document
    if how == "object":
        return {name: value for name, value in document.items() if name != "type"}
    properties = object_of(document.get("properties"))
    if how == "boxed" and key in properties:
        return moved(properties[key], "#", f"#/properties/{key}")
    # "items" stays: the tool of a subscription has one result, its list of items.
    return document


def _extension(meta: Any) -> JSONObject:
    return object_of(object_of(meta).get(META_KEY))


# ------------------------------------------------------------ schemas

WRAPPED: Final = "x-fastmcp-wrap-result"
"""Marks the output schema of a tool with boxed results, so that FastMCP's client unwraps `result`."""


def accepts_only_objects(document: JSONSchema) -> bool:
    """Return whether a schema certainly accepts only objects, and can be listed with `"type": "object"`."""
    is_listed = is_list(object_of(document).get("type"))
    return not is_listed and possible_types(document, document) == frozenset({"object"})


def object_schema(document: JSONSchema) -> JSONObject:
    """Return a schema that accepts only objects, with `type` at its root, where clients expect it."""
    if isinstance(document, dict) and document.get("type") == "object":
        return document
    return {"type": "object", **cast("JSONObject", document)}


def with_alternative(document: JSONSchema) -> JSONObject:
    """Return a schema that describes values of `document`, but accepts any other value of its type as well.

    Shared definitions stay at the root, because some clients resolve references through objects only.
    """
    place = "#/anyOf/0"
    exact = moved(document, place)
    if not isinstance(exact, dict):
        return {"anyOf": [exact, {}]}
    definitions: JSONObject = {}
    for keyword in DEFINITIONS:
        if keyword in exact:
            exact = cast("JSONObject", moved(exact, f"#/{keyword}", f"{place}/{keyword}"))
            definitions[keyword] = exact.pop(keyword)
    schema: JSONObject = {"anyOf": [exact, {}], **definitions}
    if exact.get(WRAPPED):
        # FastMCP's client expects both at the root.
        schema = {"properties": {RESULT: {}}, WRAPPED: True, **schema}
    return {"type": "object", **schema} if exact.get("type") == "object" else schema


def boxed_result(document: JSONSchema) -> JSONObject:
    """Return the schema of an object that contains a value of `document` under `result`."""
    return {**boxed(document, RESULT), WRAPPED: True}


def boxed(document: JSONSchema, key: str) -> JSONObject:
    """Return the schema of an object that contains a value of `document` under `key`."""
    inside = moved(document, f"#/properties/{key}")
    return {"type": "object", "properties": {key: inside}, "required": [key]}


def pruned(document: JSONSchema, budget: int) -> JSONSchema:
    """Return `document` with the definitions that it uses, up to `budget` bytes of JSON."""
    if not isinstance(document, dict) or not any(key in document for key in DEFINITIONS):
        return document
    root: JSONObject = {
        key: value for key, value in document.items() if key not in DEFINITIONS or not value
    }
    kept: dict[str, Any] = {}
    waiting = deque(_references(root))
    while waiting:
        place = waiting.popleft()
        if place in kept:
            continue
        definition = target_of(place, document)
        if definition is None:
            continue
        budget -= len(msgspec.json.encode(definition))
        kept[place] = definition if budget >= 0 else {}
        waiting.extend(_references(kept[place]))
    for place, definition in kept.items():
        _, keyword, name = place.split("/")
        root.setdefault(keyword, {})[unescape(name)] = definition
    return root


def shortened(document: JSONSchema) -> JSONSchema:
    """Return `document` with the first sentence of each description."""

    def change(schema: JSONObject) -> None:
        if isinstance(text := schema.get("description"), str):
            schema["description"] = first_sentence(text, SHORT)

    return rewritten(document, change)


def inlined(document: JSONSchema, budget: int) -> JSONSchema:
    """Return `document` with its definitions in place of the references to them, for clients that follow no references.

    Returns `document` itself if it is recursive, or if the copies exceed `budget` bytes of JSON.
    """
    if not isinstance(document, dict) or not any(document.get(key) for key in DEFINITIONS):
        return document
    open_references = ["#"]

    def change(schema: JSONObject) -> None:
        nonlocal budget
        for keyword in DEFINITIONS:
            schema.pop(keyword, None)
        # Refers to definitions, and repeats in the words of OpenAPI which member of a union is valid.
        schema.pop("discriminator", None)
        if not _BOUND_TO_PLACE.isdisjoint(schema):
            raise _CannotInlineError
        reference = reference_of(schema)
        if reference is None:
            return
        del schema["$ref"]
        target = target_of(reference, document)
        budget -= len(msgspec.json.encode(target))
        is_plain = is_object(target) and _DESCRIBING.issuperset(schema)
        is_nested = reference in open_references or len(open_references) > _MAX_NESTED
        if not is_plain or is_nested or budget < 0:
            raise _CannotInlineError
        open_references.append(reference)
        schema |= {**object_of(rewritten(object_of(target), change)), **schema}
        open_references.pop()

    try:
        found = rewritten(
            {key: document[key] for key in document if key not in DEFINITIONS}, change
        )
    except _CannotInlineError:
        return document
    # Keywords that do not validate, such as `contentSchema`, may contain references as well.
    return document if any(_references(found)) else found


class _CannotInlineError(Exception):
    """Raised if a definition cannot take the place of a reference."""


_BOUND_TO_PLACE: Final = frozenset({
    "$id", "id", "$anchor", "$dynamicAnchor", "$dynamicRef", "$recursiveAnchor", "$recursiveRef",
})  # fmt: skip
"""Keywords that refer to other schemas, or to which other schemas refer, by other means than `$ref`."""

_DESCRIBING: Final = frozenset({
    "$comment", "default", "deprecated", "description", "examples", "readOnly", "title", "writeOnly",
})  # fmt: skip
"""Keywords beside a reference that do not change which values are valid."""

_MAX_NESTED: Final = 8
"""The most definitions inside one another, because clients limit the depth of JSON."""


def _references(node: Any) -> Iterator[str]:
    """Yield the pointers of the definitions that a schema refers to, in order."""
    for reference in filter(None, map(reference_of, objects_in(node))):
        if found := DEFINITION.match(reference):
            yield found[0]
