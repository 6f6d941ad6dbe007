"""What every worker offers about itself: `services.list` and `services.schema`.

Rule 1: a caller sees what it may call, and nothing else. What it may not call does not exist for it.
"""

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
        return [
            spec.to_wire()
            for spec in visible(context)
            if namespace is None or spec.namespace == namespace
        ]

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
