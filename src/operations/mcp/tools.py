"""A tool as an operation.

Rule 1: what a server says of its own tool is kept, and believed only where the operator says so: an untrusted tool is
        a mutation, is not idempotent, and is never sent twice.
Rule 2: a name is made safe, never trusted; the tool is still called by its own.
"""

from collections.abc import Awaitable, Callable, Collection
from fnmatch import fnmatchcase
from typing import Any, Protocol, cast

from msgspec.structs import replace

from operations._json import object_of
from operations._mcp_config import MCPClientConfig
from operations._text import safe_name
from operations.access import enforce_access
from operations.context import OperationContext
from operations.envelopes import ResponseEnvelope
from operations.errors import CallError, ErrorCode, operation_not_found
from operations.mcp.content import tool_envelope
from operations.mcp.exported import META_KEY, restore_spec
from operations.mcp.interaction import is_question, question_envelope, settle
from operations.mcp.restoring import restore_arguments, restore_envelope, restore_schemas
from operations.schema import Schema, from_schema, validate_or_raise
from operations.specs import Operation, OperationSpec, OperationType
from operations.types import JSONObject


class Request(Protocol):
    """Sends a request to the server, for a call."""

    def __call__(
        self, method: str, params: JSONObject, context: OperationContext, *, replayable: bool
    ) -> Awaitable[JSONObject]:
        """The result, as it came.

        Raises:
            CallError: If there is none.
        """
        ...


def is_imported(name: str, config: MCPClientConfig) -> bool:
    """Whether the operator wants this tool."""
    return (config.allow is None or matches(name, config.allow)) and not matches(name, config.deny)


def matches(name: str, patterns: Collection[str]) -> bool:
    """Whether one of `patterns` names `name`."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def build_spec(
    tool: JSONObject, server: str, version: str, config: MCPClientConfig
) -> OperationSpec:
    """The contract of `tool`.

    Raises:
        ValueError: If its name cannot be one of ours.
    """
    name = cast("str", tool["name"])
    annotations: JSONObject = object_of(tool.get("annotations"))
    trusted = config.trust_annotations
    reads = matches(name, config.queries) or (trusted and annotations.get("readOnlyHint") is True)
    meta: JSONObject = {"source": "mcp", "server": server, "tool": name}
    for key in ("annotations", "_meta", "icons", "execution"):
        if tool.get(key):
            meta[key] = tool[key]
    spec = OperationSpec(
        name=safe_name(name),
        namespace=cast("str", config.namespace),
        version=version,
        type=OperationType.QUERY if reads else OperationType.MUTATION,
        title=_text(tool.get("title")) or _text(annotations.get("title")),
        description=_text(tool.get("description")) or "",
        input_schema=from_schema(tool["inputSchema"], lenient=True),
        output_schema=_output_schema(tool.get("outputSchema")),
        idempotent=trusted and annotations.get("idempotentHint") is True,
        meta=meta,
    )
    if trusted:
        spec = restore_schemas(restore_spec(spec, tool.get("_meta")), tool.get("_meta"))
    return config.guarded(spec)


def _output_schema(document: Any) -> Schema:
    if not isinstance(document, (dict, bool)):
        return Schema({})
    return from_schema(cast("JSONObject | bool", document), lenient=True)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def build_tool(
    spec: OperationSpec,
    tool_name: str,
    request: Request,
    config: MCPClientConfig,
    on_question: Callable[[], str],
) -> Operation:
    """The operation that calls `tool_name`.

    Args:
        spec: Its contract.
        tool_name: Its name at the server.
        request: How to reach the server.
        config: Whose handlers answer questions.
        on_question: Called when a question goes to the caller; gives the id of the operation for its answer.
    """
    replayable, output_schema = spec.replayable, spec.output_schema
    exported = spec.meta.get("_meta") if config.trust_annotations else None
    if META_KEY not in object_of(exported):
        exported = None

    async def call(input: Any, context: OperationContext) -> ResponseEnvelope[Any]:
        arguments = _arguments(input if exported is None else restore_arguments(input, exported))
        params = {"name": tool_name, "arguments": arguments}
        result = await request("tools/call", params, context, replayable=replayable)
        if is_question(result):

            async def send(added: JSONObject) -> JSONObject:
                params = {"name": tool_name, "arguments": arguments, **added}
                return await request("tools/call", params, context, replayable=replayable)

            result = await settle(result, send, config, context)
            if is_question(result):
                resume = {"operation": on_question(), "name": tool_name, "arguments": arguments}
                return question_envelope(result, resume)
        envelope = tool_envelope(result, output_schema)
        return envelope if exported is None else restore_envelope(envelope, exported)

    return Operation(spec, call, config.output, source_timeout=config.timeout)


Find = Callable[[str], tuple[Operation, JSONObject] | None]
"""The operation of a tool, and the tool as the server listed it, by the tool's name."""


def build_resume(
    server: str, version: str, request: Request, config: MCPClientConfig, find: Find
) -> Operation:
    """`<server>.tools.resume`: answers the questions of a call that ended with `input_required`.

    It is another way to the same tools, so it asks for what they ask for: access, arguments that fit, no quarantine.
    """
    spec = OperationSpec(
        name="tools.resume",
        namespace=cast("str", config.namespace),
        version=version,
        type=OperationType.MUTATION,
        description="Go on with a tool that asked for input: the same tool and arguments, the answers by "
        "key, and the state it gave.",
        input_schema=from_schema(
            {
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "arguments": {"type": "object"},
                    "inputResponses": {"type": "object"},
                    "requestState": {"type": "string"},
                },
                "required": ["name"],
                "additionalProperties": False,
            }
        ),
        meta={"source": "mcp", "server": server},
    )

    async def resume(input: Any, context: OperationContext) -> ResponseEnvelope[Any]:
        found = find(input["name"])
        if found is None:
            operation_id = f"{config.namespace}.{input['name']}"
            raise operation_not_found(operation_id, f"{server} has no such tool")
        operation, tool = found
        if not context.trusted:
            enforce_access(
                operation.spec.access_control, context.identity, operation_id=operation.spec.id
            )
        if "quarantined" in operation.spec.meta:
            return await cast("Awaitable[ResponseEnvelope[Any]]", operation.handler(None, context))
        validate_or_raise(
            from_schema(tool["inputSchema"], lenient=True),
            input.get("arguments", {}),
            subject=f"arguments of {operation.spec.id}",
        )
        result = await request("tools/call", dict(input), context, replayable=False)
        return (
            question_envelope(result) if is_question(result) else tool_envelope(result, Schema({}))
        )

    return Operation(config.guarded(spec), resume)


def quarantine(spec: OperationSpec, known: Operation | None, server: str) -> Operation:
    """Return an operation that refuses calls: what it does now (`spec`) has not been accepted.

    It shows the contract that was `known`; without one only its name, because the rest was not reviewed.
    """
    meta: JSONObject = {key: spec.meta[key] for key in ("source", "server") if key in spec.meta}
    if "mcp" in spec.meta:
        # Neither a prompt nor a resource, as which its text would be listed.
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


def _arguments(input: Any) -> JSONObject:
    if input is None:
        return {}
    if not isinstance(input, dict):
        raise CallError(ErrorCode.VALIDATION_ERROR, "the input of a tool is an object")
    return cast("JSONObject", input)
