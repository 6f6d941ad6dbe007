"""Convert tools to operations, and their results to envelopes.

Rule 1: annotations of a server are stored, but used only if the operator trusts the server. A tool of an untrusted
        server is a mutation that is not idempotent, so its calls are never retried.
Rule 2: the name of an operation contains only safe characters; calls to the server use the tool's original name.
Rule 3: no part of a result is lost. A block of an unknown type becomes a text block that contains its JSON.
Rule 4: the data is the structured content or, if that is null, the content blocks. If the operation declares an output
        schema, JSON in the only text block is used as structured content and is normalised.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Final, TypeAlias, cast

import msgspec
from msgspec.structs import replace

from operations.base.errors import CallError, ErrorCode, operation_not_found
from operations.base.json.decoding import decode_json
from operations.base.json.values import (
    MAX_RESPONSE_VALUES,
    JSONValueError,
    is_object,
    list_of,
    object_of,
    to_json,
)
from operations.base.text import safe_name
from operations.base.types import JSONObject, JSONSchema
from operations.contract.context import OperationContext
from operations.contract.envelopes import (
    ERROR_KEY,
    MCPContentBlock,
    ResponseEnvelope,
    add_changes,
    content_block,
    mcp_envelope,
)
from operations.contract.specs import SOURCE_NAMESPACE, Operation, OperationSpec, OperationType
from operations.mcp.config import MCPClientConfig
from operations.mcp.shared import codec
from operations.mcp.shared.interaction import MAX_ROUNDS, answers_to, is_question, question_envelope
from operations.mcp.source.tasks import call_with_tasks, is_task, result_of
from operations.schema import Change, Schema, from_schema
from operations.schema.compiling import drop_invalid_patterns
from operations.schema.references import rewritten
from operations.sources.credentials import CallerToken

# ------------------------------------------------------------ content


def map_content_blocks(blocks: Iterable[Any]) -> list[MCPContentBlock]:
    """Convert content blocks of the SDK, or in wire form, to our own."""
    return [content_block(_plain(block)) for block in blocks]


def _plain(block: Any) -> Any:
    dump = getattr(block, "model_dump", None)
    return dump(by_alias=True, mode="json", exclude_none=True) if dump is not None else block


def content_to_wire(blocks: Iterable[MCPContentBlock]) -> list[JSONObject]:
    """Return our blocks as JSON with the names of the protocol."""
    return cast("list[JSONObject]", msgspec.to_builtins(list(blocks)))


def tool_envelope(result: JSONObject, output_schema: Schema) -> ResponseEnvelope[Any]:
    """Return the envelope of a `tools/call` result. An error result is an envelope too.

    Raises:
        CallError: `EXECUTION_ERROR` if the content is not a list, or `isError` is not a boolean.
        JSONValueError: If the result contains values that are not JSON (NaN, too deep nesting).
    """
    content = _list_in(result, "content")
    blocks = map_content_blocks(content)
    is_error = result.get("isError")
    # Some servers write null for a missing field.
    if not isinstance(is_error, bool | None):
        raise _malformed("isError is not a boolean")
    structured = to_json(result.get("structuredContent"))
    meta = _meta_of(result)
    # `restore_envelope` alone sets this key: a tool cannot vouch for itself.
    error = None if meta is None else meta.pop(ERROR_KEY, None)
    if is_error and structured is None:
        structured = error
    data = structured
    if structured is None:
        data = content_to_wire(blocks)
        if not is_error and not output_schema.is_unknown:
            data = _json_in(content, data)
    return mcp_envelope(
        data,
        is_error=bool(is_error),
        content=blocks,
        structured_content=structured,
        meta=meta,
    )


def _json_in(content: list[Any], otherwise: Any) -> Any:
    """Return the JSON value in the only text block; else `otherwise`.

    `content` is as the server sent it, because other blocks become text that contains their JSON.
    """
    texts = [block.get("text") for block in map(object_of, content) if block.get("type") == "text"]
    if len(texts) != 1 or not isinstance(texts[0], str):
        return otherwise
    try:
        return to_json(decode_json(texts[0], max_values=MAX_RESPONSE_VALUES))
    except JSONValueError:
        return otherwise


def resource_envelope(result: JSONObject) -> ResponseEnvelope[Any]:
    """Return the envelope of a `resources/read` result: its contents, also as `resource` blocks.

    Raises:
        CallError: `EXECUTION_ERROR` if the contents are not a list of objects.
    """
    contents = _objects(result, "contents")
    blocks = [content_block({"type": "resource", "resource": item}) for item in contents]
    return mcp_envelope(contents, is_error=False, content=blocks, meta=_meta_of(result))


def prompt_envelope(result: JSONObject) -> ResponseEnvelope[Any]:
    """Return the envelope of a `prompts/get` result: data with description and messages, and meta with their blocks.

    Raises:
        CallError: `EXECUTION_ERROR` if the messages are not a list of objects.
    """
    messages = _objects(result, "messages")
    data: JSONObject = {"messages": messages}
    if isinstance(result.get("description"), str):
        data["description"] = result["description"]
    blocks = map_content_blocks(message.get("content") for message in messages)
    return mcp_envelope(data, is_error=False, content=blocks, meta=_meta_of(result))


def data_envelope(value: Any) -> ResponseEnvelope[Any]:
    """Return the envelope of a listing, or of completions, which have no content blocks."""
    return mcp_envelope(to_json(value), is_error=False, content=[])


def _objects(result: JSONObject, key: str) -> list[JSONObject]:
    items = _list_in(result, key)
    if not all(map(is_object, items)):
        raise _malformed(f"{key} has an item that is not an object")
    return cast("list[JSONObject]", to_json(items))


def _list_in(result: JSONObject, key: str) -> list[Any]:
    """Return a list in a result; an empty one if it is missing."""
    value = result.get(key)
    if value is not None and not isinstance(value, list):
        raise _malformed(f"{key} is not a list")
    return list_of(value)


def _meta_of(result: JSONObject) -> JSONObject | None:
    meta = result.get("_meta")
    return to_json(meta) if is_object(meta) else None


def _malformed(reason: str) -> CallError:
    message = f"the server sent a result that the protocol does not allow: {reason}"
    return CallError(ErrorCode.EXECUTION_ERROR, message)


# ------------------------------------------------------------ tools

Convert: TypeAlias = Callable[[JSONObject], ResponseEnvelope[Any]]


@dataclass(frozen=True, slots=True)
class ServerAccess:
    """The interface of one server for its operations."""

    server: str
    version: str
    config: MCPClientConfig
    request: Callable[..., Awaitable[JSONObject]]
    """`(method, params, context, replayable=...)` -> the unchanged result; raises `CallError` if there is none."""

    list_all: Callable[[str, OperationContext], Awaitable[list[JSONObject]]]
    """`(kind, context)` -> every valid entry of one of the `LISTS`."""

    watch: Callable[[str, OperationContext], AsyncGenerator[str]]
    """`(uri, context)` -> the URI of the changed resource, for each change."""

    offers_tasks: bool = False
    marks_tasks: bool = False
    """Whether the server offers tasks, and marks the tools whose calls may be tasks."""

    async def settled(
        self, method: str, params: JSONObject, context: OperationContext, *, replayable: bool
    ) -> JSONObject:
        """Send a request, and repeat it with answers until its result is final or a question cannot be answered.

        Raises:
            CallError: If there is no result, or a question fails.
        """
        result = await self.request(method, params, context, replayable=replayable)
        for _ in range(MAX_ROUNDS):
            added = await answers_to(result, self.config, context)
            if added is None:
                return result
            try:
                again = {**params, **added}
                result = await self.request(method, again, context, replayable=replayable)
            except CallError as error:
                # The request has started, because the server has asked a question.
                error.begun = None
                raise
        if is_question(result):
            message = f"asked for input more than {MAX_ROUNDS} times"
            raise CallError(ErrorCode.EXECUTION_ERROR, message)
        return result

    async def read(
        self, method: str, params: JSONObject, context: OperationContext, convert: Convert
    ) -> ResponseEnvelope[Any]:
        """Send a read-only request, and return its result or the questions that cannot be answered."""
        result = await self.settled(method, params, context, replayable=True)
        return question_envelope(result) if is_question(result) else convert(result)


def is_selected(name: str, config: MCPClientConfig) -> bool:
    """Return whether the configuration includes this tool."""
    return (config.allow is None or matches(name, config.allow)) and not matches(name, config.deny)


def matches(name: str, patterns: Collection[str]) -> bool:
    """Return whether `name` matches one of `patterns`."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def build_spec(tool: JSONObject, source: ServerAccess) -> OperationSpec:
    """Return the contract of `tool`.

    Raises:
        ValueError: If its name is not allowed for an operation.
    """
    name, config = cast("str", tool["name"]), source.config
    annotations: JSONObject = object_of(tool.get("annotations"))
    trusted = config.trust_annotations
    reads = matches(name, config.queries) or (trusted and annotations.get("readOnlyHint") is True)
    meta: JSONObject = {"source": "mcp", "server": source.server, "tool": name}
    meta[SOURCE_NAMESPACE] = config.namespace
    for key in ("annotations", "_meta", "icons", "execution"):
        if tool.get(key):
            meta[key] = tool[key]
    spec = OperationSpec(
        name=safe_name(name),
        namespace=cast("str", config.namespace),
        version=source.version,
        type=OperationType.QUERY if reads else OperationType.MUTATION,
        title=_text(tool.get("title")) or _text(annotations.get("title")),
        description=_text(tool.get("description")) or "",
        input_schema=_schema(tool["inputSchema"]),
        output_schema=_schema(tool.get("outputSchema")),
        idempotent=trusted and annotations.get("idempotentHint") is True,
        authority=codec.is_marked(tool.get("_meta")),
        meta=meta,
    )
    if trusted:
        spec = codec.restore_spec(spec, tool.get("_meta"))
    return config.guarded(spec)


_NULLABLE: Final = frozenset({"const", "default"})
"""Keywords whose value may be null."""


def _schema(document: Any) -> Schema:
    if not isinstance(document, (dict, bool)):
        return Schema({})
    schema = cast("JSONSchema", document)
    text = msgspec.json.encode(schema)
    # Searching the text is much faster than a copy, and few schemas have patterns or nulls.
    if b'"pattern' in text or b":null" in text:
        schema = rewritten(schema, _drop_invalid_keywords)
    return from_schema(schema, lenient=True)


def _drop_invalid_keywords(schema: JSONObject) -> None:
    """Remove invalid patterns and nulls: servers in Go write `"required": null` for an empty list."""
    drop_invalid_patterns(schema)
    for keyword in [key for key, value in schema.items() if value is None]:
        if keyword not in _NULLABLE:
            del schema[keyword]


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def build_tool(
    spec: OperationSpec,
    tool_name: str,
    source: ServerAccess,
    on_question: Callable[[], str],
    *,
    durable: bool = False,
) -> Operation:
    """Return the operation that calls `tool_name`.

    Args:
        spec: The contract of the operation.
        tool_name: The name of the tool at the server.
        source: The server.
        on_question: Called when a question is returned to the caller; returns the id of the operation for its answer.
        durable: Whether its calls are runs.
    """
    replayable, config = spec.replayable, source.config

    async def call(input: Any, context: OperationContext) -> ResponseEnvelope[Any]:
        params = {"name": tool_name, "arguments": _arguments(spec, config, input)}
        send = partial(source.settled, "tools/call", params, context, replayable=replayable)
        if source.offers_tasks or durable:
            result = await call_with_tasks(
                send, source, context, durable=durable, once=not replayable
            )
        else:
            result = await send()
        if is_question(result):
            resume = {"operation": on_question(), "name": tool_name, "arguments": input}
            return question_envelope(result, resume)
        return _envelope(spec, config, result)

    return Operation(
        spec,
        call,
        config.output,
        source_timeout=config.timeout,
        forwards=True,
        input=config.input,
        exact_schemas=config.exact_schemas,
        descriptions=config.descriptions,
        durable=durable,
        needs_token=isinstance(config.auth, CallerToken) and config.auth.exchange is not None,
    )


def _exported(spec: OperationSpec, config: MCPClientConfig) -> JSONObject | None:
    """Return the `_meta` of a tool that another registry exported; None for other tools, or without trust."""
    meta = object_of(spec.meta.get("_meta"))
    return meta if config.trust_annotations and codec.META_KEY in meta else None


def _arguments(spec: OperationSpec, config: MCPClientConfig, input: Any) -> JSONObject:
    """Return the input of an operation as the arguments of its tool."""
    exported = _exported(spec, config)
    arguments = input if exported is None else codec.restore_arguments(input, exported)
    if arguments is None:
        return {}
    if not is_object(arguments):
        raise CallError(ErrorCode.VALIDATION_ERROR, "the input of a tool must be an object")
    return arguments


def _envelope(
    spec: OperationSpec, config: MCPClientConfig, result: JSONObject
) -> ResponseEnvelope[Any]:
    """Return the result of a tool as the result of its operation."""
    envelope, exported = tool_envelope(result, spec.output_schema), _exported(spec, config)
    return envelope if exported is None else codec.restore_envelope(envelope, exported)


_RESUME: Final[JSONObject] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "arguments": {},
        "inputResponses": {"type": "object"},
        "requestState": {"type": "string"},
    },
    "required": ["name"],
    "additionalProperties": False,
}


def build_resume(source: ServerAccess, find: Callable[[str], Operation | None]) -> Operation:
    """Return `<server>.tools.resume`, which answers the questions of a call that ended with `input_required`.

    It calls the same tools, so it has the same requirements: access, valid arguments, no quarantine.

    Args:
        source: The server.
        find: Returns the operation of a tool, given the name of the tool.
    """
    config = source.config
    spec = OperationSpec(
        name="tools.resume",
        namespace=cast("str", config.namespace),
        version=source.version,
        type=OperationType.MUTATION,
        description="Continue a tool that asked for input: pass the same tool and arguments, the answers by "
        "key, and the returned state.",
        input_schema=from_schema(_RESUME),
        meta={"source": "mcp", "server": source.server},
    )

    async def resume(input: Any, context: OperationContext) -> ResponseEnvelope[Any]:
        operation = find(input["name"])
        if operation is None:
            operation_id = f"{config.namespace}.{input['name']}"
            raise operation_not_found(operation_id, f"{source.server} has no such tool")
        given = arguments = input.get("arguments", {})
        if context.registry is not None:
            # The schema, grants and rules of the tool also apply to its continuation.
            arguments = await context.registry.authorize(operation.spec.id, given, context)
        tool = operation.spec
        if "quarantined" in tool.meta:
            raise in_quarantine(tool.id, source.server)
        params = {**input, "arguments": _arguments(tool, config, arguments)}
        result = await source.request("tools/call", params, context, replayable=False)
        if is_task(result):
            result = await result_of(result, source, context)
        if is_question(result):
            return question_envelope(result)
        envelope = _envelope(tool, config, result)
        if arguments == given:
            return envelope
        converted = Change(
            "/arguments", "input", 1, "was converted to match the schema of the tool"
        )
        return replace(envelope, meta=add_changes(envelope.meta, [converted]))

    return Operation(config.guarded(spec), resume)


def quarantine(spec: OperationSpec, known: Operation | None, server: str) -> Operation:
    """Return an operation that rejects calls: its changed definition (`spec`) has not been accepted.

    It shows the `known` contract, or only its name if there is none, because the rest has not been reviewed.
    """
    meta: JSONObject = {key: spec.meta[key] for key in ("source", "server") if key in spec.meta}
    if "mcp" in spec.meta:
        # Not listed as a prompt or resource, which would show its text.
        meta["mcp"] = {"tool": False}
    shown = replace(
        spec,
        title=None,
        description="",
        input_schema=Schema({}),
        output_schema=Schema({}),
        meta=meta,
    )
    if known is not None:
        shown = known.spec

    async def refuse(input: Any, context: OperationContext) -> Any:
        raise in_quarantine(spec.id, server)

    return Operation(replace(shown, meta={**shown.meta, "quarantined": True}), refuse)


def in_quarantine(name: str, server: str) -> CallError:
    """Return the error for a definition that has not been accepted."""
    return CallError(
        ErrorCode.UNAVAILABLE,
        f"{name} is in quarantine: its definition at {server} is new or has changed, and has not been accepted",
        {"server": server, "quarantined": True},
        retryable=False,
    )
