"""The four gateway tools: find operations, read a contract, call one operation, call several.

The gateway tools are operations with specs, so that they are listed like all other tools.
"""

from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any, Final

import msgspec

from operations._pipeline.lenient import convert_input
from operations.context import OperationContext
from operations.errors import CallError, ErrorCode
from operations.front import Front
from operations.front.search import MAX_BATCH, BatchCall
from operations.mcp.codec import CHANGES_KEY
from operations.mcp.serving.catalog import GATEWAY_TOOLS, Tool
from operations.mcp.serving.results import error_result, text_block, text_of
from operations.schema import Schema, format_value_errors
from operations.specs import OperationSpec, OperationType
from operations.types import JSONObject

Run = Callable[[str, Any, OperationContext], Awaitable[JSONObject]]
"""Runs an operation by id and returns the result of its tool."""

_TEXT: Final = {"type": "string"}
_TEXTS: Final = {"type": "array", "items": _TEXT}
_OPERATION: Final = {**_TEXT, "description": "The id of the operation, as search returns it."}
_INPUT: Final = {"description": "The input of the operation, which must match its inputSchema."}


def _object(properties: JSONObject, *required: str) -> JSONObject:
    schema: JSONObject = {"type": "object", "properties": properties}
    return {**schema, "required": list(required)} if required else schema


def _closed(properties: JSONObject, *required: str) -> JSONObject:
    return {**_object(properties, *required), "additionalProperties": False}


_CALL: Final = _closed({"operation": _OPERATION, "input": _INPUT}, "operation")

_SPECS: Final = (
    OperationSpec(
        namespace="gateway",
        name="search",
        type=OperationType.QUERY,
        title="Search operations",
        description=(
            "Find operations by words in their names, titles, tags and descriptions, best first. "
            "Then read an operation's contract with schema and run it with call."
        ),
        input_schema=Schema(
            _closed(
                {
                    "query": {
                        **_TEXT,
                        "description": "The search words; empty lists all operations.",
                    },
                    "limit": {"type": "integer", "minimum": 1, "maximum": 100, "default": 20},
                    "namespace": _TEXT,
                    "tags": _TEXTS,
                    "type": {"enum": [kind.value for kind in OperationType]},
                }
            )
        ),
        output_schema=Schema(
            _object(
                {
                    "operations": {
                        "type": "array",
                        "items": _object(
                            {
                                "id": _TEXT,
                                "type": _TEXT,
                                "title": {"type": ["string", "null"]},
                                "description": _TEXT,
                                "tags": _TEXTS,
                                "score": {"type": "number"},
                            },
                            *("id", "type", "description"),
                        ),
                    }
                },
                "operations",
            )
        ),
    ),
    OperationSpec(
        namespace="gateway",
        name="schema",
        type=OperationType.QUERY,
        title="Read an operation's contract",
        description="Read the input schema, the declared errors and, on request, the output schema of one operation.",
        input_schema=Schema(
            _closed(
                {
                    "operation": _OPERATION,
                    "output": {
                        "type": "boolean",
                        "default": False,
                        "description": "Whether to include outputSchema, which is often large.",
                    },
                },
                "operation",
            )
        ),
        output_schema=Schema({"type": "object"}),
    ),
    OperationSpec(
        namespace="gateway",
        name="call",
        type=OperationType.MUTATION,
        title="Call an operation",
        description="Run one operation and return its result.",
        input_schema=Schema(_CALL),
    ),
    OperationSpec(
        namespace="gateway",
        name="batch",
        type=OperationType.MUTATION,
        title="Call several operations",
        description=(
            f"Run up to {MAX_BATCH} operations concurrently. Returns the envelope or the error of each, in order;"
            " a failure does not stop the others."
        ),
        input_schema=Schema(
            _closed({"calls": {"type": "array", "maxItems": MAX_BATCH, "items": _CALL}}, "calls")
        ),
        output_schema=Schema(
            _object({"results": {"type": "array", "items": {"type": "object"}}}, "results")
        ),
    ),
)


@cache
def gateway_tools() -> tuple[Tool, ...]:
    """Return the four tools."""
    return tuple(Tool(spec.name, spec, budget=16 * 1024) for spec in _SPECS)


async def run_gateway_tool(
    name: str,
    arguments: JSONObject,
    front: Front,
    context: OperationContext,
    run: Run,
    caller: str,
) -> JSONObject | None:
    """Run a gateway tool; return None if `name` is not one."""
    if name not in GATEWAY_TOOLS:
        return None
    tool = gateway_tools()[GATEWAY_TOOLS.index(name)]
    meta: JSONObject = {}
    try:
        schema = tool.spec.input_schema.compile()
        # Too many calls exceed a limit, which has its own error code: see `Front.batch`.
        errors = [error for error in schema.errors(arguments) if error.keyword != "maxItems"]
        converted = convert_input(schema, arguments) if errors and context.lenient else None
        if converted is not None:
            arguments, changes = converted
            count = sum(change.count for change in changes)
            noted = {"changes": msgspec.to_builtins(changes), "changesCount": count}
            meta = {"_meta": {CHANGES_KEY: noted}}
        elif errors:
            raise CallError(
                ErrorCode.VALIDATION_ERROR,
                f"the arguments of {name} do not match its schema: {format_value_errors(errors)}",
                {"errors": msgspec.to_builtins(errors)},
            )
        if name == "call":
            return await run(arguments["operation"], arguments.get("input", {}), context)
        data = await _answer(name, arguments, front, context, caller)
    except CallError as error:
        declared = tool.declares_output()
        return error_result(
            error, context.request_id, expose=front.expose_errors, declared=declared
        )
    return {"content": [text_block(text_of(data))], "structuredContent": data, **meta}


async def _answer(
    name: str, arguments: JSONObject, front: Front, context: OperationContext, caller: str
) -> JSONObject:
    gateway = front.gateway
    if name == "schema":
        return gateway.schema(
            arguments["operation"], context, output=arguments.get("output", False)
        )
    if name == "batch":
        calls = [
            BatchCall(operation=call["operation"], input=call.get("input", {}))
            for call in arguments["calls"]
        ]
        return {"results": await front.batch(calls, context, caller)}
    kind = arguments.get("type")
    found = await gateway.search(
        arguments.get("query", ""),
        context,
        limit=arguments.get("limit", 20),
        namespace=arguments.get("namespace"),
        tags=arguments.get("tags", ()),
        type=None if kind is None else OperationType(kind),
    )
    return {"operations": msgspec.to_builtins(found)}
