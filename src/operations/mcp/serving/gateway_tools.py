"""The four gateway tools: find operations, read a contract, call one operation, call several.

The gateway tools are operations with specs, so that they are listed like all other tools.
"""

from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any, Final

from msgspec import convert, to_builtins

from operations._pipeline.lenient import convert_input
from operations.context import OperationContext
from operations.errors import CallError, ErrorCode
from operations.front import Front
from operations.front.search import (
    MAX_BATCH,
    Batch,
    Described,
    OperationCall,
    Search,
    SearchResult,
)
from operations.mcp.codec import CHANGES_KEY
from operations.mcp.serving.catalog import Tool
from operations.mcp.serving.results import error_result, text_block, text_of
from operations.schema import Schema, format_value_errors, schema_for
from operations.specs import OperationSpec, OperationType
from operations.types import JSONObject

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
