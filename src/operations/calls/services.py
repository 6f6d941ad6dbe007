"""What every worker offers about itself: `services.list`, `services.describe` and `services.schema`.

Rule 1: a caller sees what it may call, and nothing else. What it may not call does not exist for it.
"""

import asyncio
from collections.abc import AsyncGenerator
from hashlib import sha256
from time import monotonic
from typing import Any

from operations.access import check_access
from operations.calls.describing import WRAPPING, SpecEncoder
from operations.context import OperationContext
from operations.errors import CallError, ErrorCode, operation_not_found
from operations.pubsub.base import EventTarget
from operations.registry import OperationRegistry
from operations.schema import from_schema
from operations.specs import Operation, OperationSpec, OperationType
from operations.types import JSONObject

LIST = "services.list"
DESCRIBE = "services.describe"
SCHEMA = "services.schema"
SERVICES = frozenset({LIST, DESCRIBE, SCHEMA})
"""What every worker serves, whatever its registry holds."""

MAX_LIST = 4 * 1024 * 1024
"""How many bytes of specs one answer holds. It is written in one go, and others wait for that."""

_AT_ONCE = 0.005
"""Seconds of looking at specs before others get their turn."""

_MAX_DIGESTED = 500
"""Operations of a registry whose schemas are part of its digest."""

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

_DESCRIBE_SPEC = OperationSpec(
    name="describe",
    namespace="services",
    version="1.0.0",
    type=OperationType.SUBSCRIPTION,
    description="Every operation the caller may call, in pieces: what their schemas share is told once.",
    input_schema=_LIST_SPEC.input_schema,
    output_schema=from_schema({"type": "object"}),
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


def digest_of(registry: OperationRegistry) -> str:
    """Return a digest of the operations of a registry, by which callers notice changes."""
    specs = registry.specs()
    # The schemas of a large API take seconds to encode; its ids and versions change with it often enough.
    small = len(specs) <= _MAX_DIGESTED
    texts = [spec.encode() if small else f"{spec.id} {spec.version}".encode() for spec in specs]
    return sha256(b"\n".join(sorted(texts))).hexdigest()[:32]


def serves_itself(registry: OperationRegistry, operation_id: str) -> bool:
    """Whether `registry` has this operation of its own. One that makes its own list is not described by another."""
    return operation_id in registry or (operation_id == DESCRIBE and LIST in registry)


def service_operations(registry: OperationRegistry, target: EventTarget) -> list[Operation]:
    """The operations through which a registry describes itself to callers at the other end of `target`."""

    async def visible(input: Any, context: OperationContext) -> AsyncGenerator[OperationSpec]:
        namespace: str | None = input.get("namespace") if input else None
        resumed = monotonic()
        for spec in registry.specs():
            if namespace in {None, spec.namespace} and (
                context.trusted or check_access(spec.access_control, context.identity, spec.id)
            ):
                yield spec
            if monotonic() - resumed > _AT_ONCE:
                # Others are served meanwhile: a large API has large specs.
                await asyncio.sleep(0)
                resumed = monotonic()

    async def list_operations(input: Any, context: OperationContext) -> list[Any]:
        listed: list[Any] = []
        most = min(MAX_LIST, target.max_bytes - WRAPPING)
        left = most
        async for spec in visible(input, context):
            left -= len(spec.encode())
            if left < 0:
                raise CallError(
                    ErrorCode.RESOURCE_EXHAUSTED,
                    f"the specs take more than {most:,} bytes; subscribe to {DESCRIBE}, or ask for one "
                    f"namespace, or for one operation with {SCHEMA}",
                    retryable=False,
                )
            listed.append(spec.to_wire())
        return listed

    async def describe_operations(
        input: Any, context: OperationContext
    ) -> AsyncGenerator[JSONObject]:
        encoder = SpecEncoder(target.max_bytes)
        async for spec in visible(input, context):
            for piece in encoder.tell(spec):
                yield piece
        for piece in encoder.rest():
            yield piece

    async def show_operation(input: Any, context: OperationContext) -> Any:
        async for spec in visible(None, context):
            if spec.id == input["operationId"]:
                return spec.to_wire()
        raise operation_not_found(input["operationId"])

    return [
        Operation(_LIST_SPEC, list_operations, output="off", needs_grant=False),
        Operation(_DESCRIBE_SPEC, describe_operations, output="off", needs_grant=False),
        Operation(_SCHEMA_SPEC, show_operation, output="off", needs_grant=False),
    ]
