"""What every worker offers about itself: `services.list` and `services.schema`.

Rule 1: a caller sees what it may call, and nothing else. What it may not call does not exist for it.
"""

import asyncio
from typing import Any

from operations.access import check_access
from operations.context import OperationContext
from operations.errors import CallError, ErrorCode
from operations.registry import OperationRegistry
from operations.schema import from_schema
from operations.specs import Operation, OperationSpec, OperationType

LIST = "services.list"
SCHEMA = "services.schema"
SERVICES = frozenset({LIST, SCHEMA})
"""What every worker serves, whatever its registry holds."""

MAX_LIST = 16 * 1024 * 1024
"""How many bytes of specs one answer holds: what most transports carry."""

_AT_ONCE = 20

_LIST_SPEC = OperationSpec(
    name="list",
    namespace="services",
    version="1.0.0",
    type=OperationType.QUERY,
    description="Every operation the caller may call, as specs.",
    input_schema=from_schema(
        {"type": ["object", "null"], "properties": {"namespace": {"type": "string"}}}
    ),
    output_schema=from_schema({"type": "array", "items": {"type": "object"}}),
)

_SCHEMA_SPEC = OperationSpec(
    name="schema",
    namespace="services",
    version="1.0.0",
    type=OperationType.QUERY,
    description="The spec of one operation.",
    input_schema=from_schema(
        {
            "type": "object",
            "properties": {"operationId": {"type": "string"}},
            "required": ["operationId"],
        }
    ),
    output_schema=from_schema({"type": "object"}),
)


def service_operations(registry: OperationRegistry) -> list[Operation]:
    """The two operations through which a registry describes itself to callers elsewhere."""

    def visible(context: OperationContext) -> list[OperationSpec]:
        return [
            spec
            for spec in registry.specs()
            if context.trusted or check_access(spec.access_control, context.identity)
        ]

    async def list_operations(input: Any, context: OperationContext) -> list[Any]:
        namespace: str | None = input.get("namespace") if input else None
        listed: list[Any] = []
        left = MAX_LIST
        for spec in visible(context):
            if namespace is not None and spec.namespace != namespace:
                continue
            left -= len(spec.encode())
            if left < 0:
                raise CallError(
                    ErrorCode.RESOURCE_EXHAUSTED,
                    f"the specs take more than {MAX_LIST:,} bytes; ask for one namespace, or for one "
                    f"operation with {SCHEMA}",
                    retryable=False,
                )
            listed.append(spec.to_wire())
            if len(listed) % _AT_ONCE == 0:
                # Others are served meanwhile: a large API has large specs.
                await asyncio.sleep(0)
        return listed

    async def show_operation(input: Any, context: OperationContext) -> Any:
        for spec in visible(context):
            if spec.id == input["operationId"]:
                return spec.to_wire()
        raise CallError(
            ErrorCode.OPERATION_NOT_FOUND, f"There is no operation {input['operationId']!r}"
        )

    return [
        Operation(_LIST_SPEC, list_operations, output="off"),
        Operation(_SCHEMA_SPEC, show_operation, output="off"),
    ]
