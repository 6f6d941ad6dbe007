"""Convert outcomes of calls to results of tools, prompts and resources, and run the four gateway tools.

Rule 1: data is sent twice, as structured content and as text, for clients that read only one of them.
Rule 2: an error is also a result, so that the model can read it. An undeclared error shows only its code and the id of
        the request.

An operation that is a prompt returns:

"text"                                                  one message of the user
{"role": "assistant", "content": "text" or a block}     one message
[message or text, ...]                                  several
{"description": "...", "messages": [...]}               with a description
an MCP envelope                                         one message of the user for each of its blocks

The gateway tools find operations, read a contract, call one operation, or call several. They have specs, so that they
are listed like all other tools.
"""

from base64 import b64encode
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from typing import Any, Final, cast

import msgspec
from msgspec import convert, to_builtins

from operations._decoding import decode_json
from operations._json import (
    MAX_REQUEST_VALUES,
    JSONValueError,
    is_list,
    is_object,
    list_of,
    object_of,
)
from operations._pipeline.lenient import convert_input
from operations.context import OperationContext
from operations.envelopes import (
    HTTPResponseMeta,
    MCPResponseMeta,
    ResourceContent,
    ResponseEnvelope,
    changes_to_wire,
)
from operations.errors import CallError, ErrorCode, with_code
from operations.front import Front
from operations.front.public_errors import public_error
from operations.front.search import (
    MAX_BATCH,
    Batch,
    Described,
    OperationCall,
    Search,
    SearchResult,
)
from operations.mcp.codec import CHANGES_KEY, DATA_KEY, ERROR_KEY, RESULT, is_imported, passed_meta
from operations.mcp.serving.catalog import Addresses, Resource, Tool, prefixed, properties_of
from operations.schema import Schema, format_value_errors, schema_for
from operations.specs import OperationSpec, OperationType
from operations.types import JSONObject

# ------------------------------------------------------------ tools

_MAGIC: Final = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"ID3", "audio/mpeg"),
    (b"OggS", "audio/ogg"),
    (b"fLaC", "audio/flac"),
    (b"%PDF-", "application/pdf"),
)


def text_block(text: str) -> JSONObject:
    """Return a block of text."""
    return {"type": "text", "text": text}


def text_of(data: Any) -> str:
    """Return data as text for a model: a string unchanged, any other value as JSON."""
    return data if isinstance(data, str) else msgspec.json.encode(data).decode()


def tool_result(
    envelope: ResponseEnvelope[Any], *, boxed: bool, declared: bool, mime_type: str | None = None
) -> JSONObject:
    """Return the `tools/call` result of an envelope.

    Args:
        envelope: The outcome of the operation.
        boxed: Whether the client accepts only objects, and the operation may return other values.
        declared: Whether the tool was listed with an output schema, which requires structured content.
        mime_type: The media type of bytes, unless the envelope has one.
    """
    result = _tool_result(envelope, boxed=boxed, declared=declared, mime_type=mime_type)
    if envelope.meta.changes:
        noted = {CHANGES_KEY: changes_to_wire(envelope.meta)}
        result["_meta"] = {**result.get("_meta", {}), **noted}
    return result


def _tool_result(
    envelope: ResponseEnvelope[Any], *, boxed: bool, declared: bool, mime_type: str | None
) -> JSONObject:
    data, meta = envelope.data, envelope.meta
    if isinstance(data, bytes):
        return {
            "content": [binary_block(data, mime_type or _content_type(envelope))],
            "_meta": {DATA_KEY: "bytes"},
        }
    if not isinstance(meta, MCPResponseMeta):
        result: JSONObject = {"content": [text_block(text_of(data))]}
        if data is None and not boxed:
            # The SDK treats structured null as absent, so `_meta` records it.
            return {**result, "_meta": {DATA_KEY: "null"}}
        result["structuredContent"] = _box(data, boxed)
        return result
    result = {"content": msgspec.to_builtins(meta.content)}
    if meta.is_error:
        result["isError"] = True
        if meta.structured_content is not None:
            result |= _structured_error(meta.structured_content, declared=declared)
    elif meta.structured_content is not None or declared:
        # Use the normalised data instead of the original structured content, because it matches the schema.
        result["structuredContent"] = _box(data, boxed)
    passed = passed_meta(meta.meta)
    if passed:
        result["_meta"] = {**passed, **result.get("_meta", {})}
    return result


def _box(data: Any, boxed: bool) -> Any:
    return {RESULT: data} if boxed else data


def error_result(error: CallError, request_id: str, *, expose: bool, declared: bool) -> JSONObject:
    """Return the `tools/call` result of an error.

    Args:
        error: The error.
        request_id: The id of the call.
        expose: Whether clients may read the text of unexpected errors.
        declared: Whether the tool was listed with an output schema. Some clients validate the structured content of
            errors with it, so that the error is in `_meta` instead.
    """
    wire = public_error(error, request_id, expose=expose).to_wire()
    text = with_code(wire["code"], wire["message"])
    if "details" in wire:
        text = f"{text}\n{msgspec.json.encode(wire['details']).decode()}"
    result: JSONObject = {"content": [text_block(text)], "isError": True}
    return result | _structured_error(wire, declared=declared)


def _structured_error(wire: Any, *, declared: bool) -> JSONObject:
    return {"_meta": {ERROR_KEY: wire}} if declared else {"structuredContent": wire}


def binary_block(data: bytes, mime_type: str | None) -> JSONObject:
    """Return bytes as an image, audio or blob block."""
    mime_type = mime_type or sniffed(data)
    encoded = b64encode(data).decode("ascii")
    for kind in ("image", "audio"):
        if mime_type.startswith(f"{kind}/"):
            return {"type": kind, "data": encoded, "mimeType": mime_type}
    resource = {"uri": "operations:result", "mimeType": mime_type, "blob": encoded}
    return {"type": "resource", "resource": resource}


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


def _content_type(envelope: ResponseEnvelope[Any]) -> str | None:
    if isinstance(envelope.meta, HTTPResponseMeta):
        return envelope.meta.content_type.partition(";")[0].strip().lower() or None
    return None


# ------------------------------------------------------------ prompts


def prompt_result(envelope: ResponseEnvelope[Any], spec: OperationSpec) -> JSONObject:
    """Return the `prompts/get` result of an envelope."""
    data, meta = envelope.data, envelope.meta
    description = "" if is_imported(spec) else spec.description
    if is_object(data) and is_list(data.get("messages")):
        description = data.get("description") or description
        data = data["messages"]
    elif isinstance(meta, MCPResponseMeta):
        data = [{"role": "user", "content": block} for block in msgspec.to_builtins(meta.content)]
    messages = data if is_list(data) else [data]
    result: JSONObject = {"messages": [_message(message) for message in messages]}
    if description:
        result["description"] = description
    passed = passed_meta(meta.meta) if isinstance(meta, MCPResponseMeta) else {}
    return {**result, "_meta": passed} if passed else result


def _message(value: Any) -> JSONObject:
    content = object_of(value).get("content")
    if isinstance(content, str):
        content = text_block(content)
    if is_object(content):
        return {"role": value.get("role", "user"), "content": content}
    return {"role": "user", "content": text_block(text_of(value))}


# ------------------------------------------------------------ resources


def resource_result(
    envelope: ResponseEnvelope[Any], uri: str, resource: Resource, addresses: Addresses
) -> JSONObject:
    """Return the `resources/read` result of an envelope: text, a blob, or the contents that an MCP server returned.

    Args:
        envelope: The outcome of the operation.
        uri: The requested URI.
        resource: The resource that was read.
        addresses: The URIs of all resources.
    """
    data, meta, mime_type = envelope.data, envelope.meta, resource.mime_type
    if resource.source is not None and isinstance(meta, MCPResponseMeta):
        return _imported(envelope, uri, resource, addresses)
    if isinstance(meta, MCPResponseMeta):
        passed_on = [
            msgspec.to_builtins(block.resource)
            for block in meta.content
            if isinstance(block, ResourceContent)
        ]
        if passed_on:
            return {"contents": passed_on}
    if mime_type is None and isinstance(meta, HTTPResponseMeta):
        mime_type = meta.content_type or None
    content: JSONObject = {"uri": uri}
    if isinstance(data, bytes):
        content["mimeType"] = mime_type or sniffed(data)
        content["blob"] = b64encode(data).decode("ascii")
    else:
        content["mimeType"] = mime_type or (
            "text/plain" if isinstance(data, str) else "application/json"
        )
        content["text"] = text_of(data)
    return {"contents": [content]}


def _imported(
    envelope: ResponseEnvelope[Any], uri: str, resource: Resource, addresses: Addresses
) -> JSONObject:
    namespace = cast("str", resource.source)
    contents: list[JSONObject] = []
    for each in list_of(envelope.data):
        content: JSONObject = dict(object_of(each))
        given = str(content.get("uri", ""))
        # The requested resource has the requested URI; other contents have their own URIs.
        is_read = prefixed(namespace, given) == uri
        content["uri"] = uri if is_read or given == uri else addresses.link(namespace, given)
        if "_meta" in content:
            content["_meta"] = passed_meta(content["_meta"])
        contents.append(content)
    result: JSONObject = {"contents": contents}
    passed = passed_meta(cast("MCPResponseMeta", envelope.meta).meta)
    return {**result, "_meta": passed} if passed else result


def publish_addresses(blocks: list[JSONObject], namespace: str, addresses: Addresses) -> None:
    """Replace the URIs in the result of an imported tool by the URIs that clients of this server use.

    The URI of an embedded resource changes only if another source claims it.
    """
    for block in blocks:
        if block.get("type") == "resource_link":
            block["uri"] = addresses.link(namespace, str(block.get("uri", "")))
        elif block.get("type") == "resource":
            resource = object_of(block.get("resource"))
            uri = str(resource.get("uri", ""))
            block["resource"] = {**resource, "uri": addresses.public(namespace, uri) or uri}


def arguments_from_text(spec: OperationSpec, values: Mapping[str, Any]) -> JSONObject:
    """Convert an input whose values were sent as text: decode values that should not be strings as JSON."""
    properties = properties_of(spec)
    return {name: _read(value, properties.get(name, {})) for name, value in values.items()}


def _read(value: Any, schema: JSONObject) -> Any:
    kind = schema.get("type")
    if not isinstance(value, str) or kind is None or kind == "string" or "string" in kind:
        return value
    try:
        return decode_json(value, max_values=MAX_REQUEST_VALUES)
    except JSONValueError:
        # The validation of the operation reports the error.
        return value


# ------------------------------------------------------------ gateway tools

Run = Callable[[str, Any, OperationContext], Awaitable[JSONObject]]
"""Runs an operation by id and returns the result of its tool."""

_REQUESTS: Final = {
    "search": Search,
    "schema": Described,
    "call": OperationCall,
    "batch": Batch,
}


def _spec(
    name: str, type: OperationType, title: str, description: str, output: Schema
) -> OperationSpec:
    return OperationSpec(
        namespace="gateway",
        name=name,
        type=type,
        title=title,
        description=description,
        input_schema=schema_for(_REQUESTS[name]),
        output_schema=output,
    )


@cache
def gateway_tools() -> dict[str, Tool]:
    """Return the four tools by name."""
    results = {"type": "object", "properties": {"results": {"type": "array"}}}
    specs = (
        _spec(
            "search",
            OperationType.QUERY,
            "Search operations",
            "Find operations by words in their names, titles, tags and descriptions, best first. "
            "Then read an operation's contract with schema and run it with call.",
            schema_for(SearchResult),
        ),
        _spec(
            "schema",
            OperationType.QUERY,
            "Read an operation's contract",
            "Read the input schema, the declared errors and, on request, the output schema of one operation.",
            Schema({"type": "object"}),
        ),
        _spec(
            "call",
            OperationType.MUTATION,
            "Call an operation",
            "Run one operation and return its result.",
            Schema({}),
        ),
        _spec(
            "batch",
            OperationType.MUTATION,
            "Call several operations",
            f"Run up to {MAX_BATCH} operations concurrently. Returns the envelope or the error of each, in order;"
            " a failure does not stop the others.",
            Schema(results),
        ),
    )
    return {spec.name: Tool(spec.name, spec, budget=16 * 1024) for spec in specs}


async def run_gateway_tool(
    name: str,
    arguments: JSONObject,
    front: Front,
    context: OperationContext,
    run: Run,
    caller: str,
) -> JSONObject | None:
    """Run a gateway tool; return None if `name` is not one."""
    tool = gateway_tools().get(name)
    if tool is None:
        return None
    meta: JSONObject = {}
    try:
        schema = tool.spec.input_schema.compile()
        errors = list(schema.errors(arguments))
        converted = convert_input(schema, arguments) if errors and context.lenient else None
        if converted is not None:
            arguments, changes = converted
            count = sum(change.count for change in changes)
            noted = {"changes": to_builtins(changes), "changesCount": count}
            meta = {"_meta": {CHANGES_KEY: noted}}
        elif errors:
            raise CallError(
                ErrorCode.VALIDATION_ERROR,
                f"the arguments of {name} do not match its schema: {format_value_errors(errors)}",
                {"errors": to_builtins(errors)},
            )
        request: Any = convert(arguments, _REQUESTS[name])
        if isinstance(request, OperationCall):
            return await run(request.operation, request.input, context)
        data = await front.answer(request, context, caller)
    except CallError as error:
        declared = tool.declares_output()
        return error_result(
            error, context.request_id, expose=front.expose_errors, declared=declared
        )
    return {"content": [text_block(text_of(data))], "structuredContent": data, **meta}
