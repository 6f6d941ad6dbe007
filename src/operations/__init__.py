"""Typed operations: functions, HTTP endpoints and MCP tools with one way to call and one result."""

from typing import TYPE_CHECKING

from operations.base.errors import (
    CallError,
    ErrorCode,
    MissingExtraError,
    OperationsError,
    RegistrationError,
    SchemaError,
    TransportError,
    map_error,
)
from operations.base.lazy import lazily
from operations.contract.access import AccessControl, Identity, check_access, enforce_access
from operations.contract.channel import CallerChannel
from operations.contract.context import OperationContext, OperationEnv
from operations.contract.envelopes import (
    RESPONSE_ENVELOPE_SCHEMA,
    RESPONSE_META_SCHEMA,
    RESPONSE_SOURCES,
    AudioContent,
    HTTPResponseMeta,
    ImageContent,
    LocalResponseMeta,
    MCPAnnotations,
    MCPContentBlock,
    MCPResourceContent,
    MCPResponseMeta,
    ResourceContent,
    ResourceLink,
    ResponseEnvelope,
    ResponseMeta,
    ResponseSource,
    TextContent,
    http_envelope,
    is_response_envelope,
    local_envelope,
    mcp_envelope,
    unwrap,
)
from operations.contract.events import CallEvent, Observer
from operations.contract.functions import operation
from operations.contract.specs import (
    ErrorDefinition,
    InputPolicy,
    Operation,
    OperationHandler,
    OperationSpec,
    OperationType,
    OutputPolicy,
    SubscriptionHandler,
)
from operations.contract.wire import CALL_EVENT_SCHEMAS, OPERATION_SPEC_SCHEMA
from operations.registry.middleware import Call, Middleware, Next, NextStream, StreamMiddleware
from operations.registry.registry import OperationRegistry, build_env, subscribe
from operations.registry.remotes import Remote
from operations.registry.streams import Subscription
from operations.schema import (
    CastResult,
    Change,
    Schema,
    ValidationIssue,
    assert_is_schema,
    collect_errors,
    format_value_errors,
    from_schema,
    schema_for,
    validate_or_raise,
)
from operations.sources.local import ScanResult, scan_operations

__version__ = "0.2.0"

if TYPE_CHECKING:
    from operations.calls.source.http import connect
    from operations.server.script import run

_find = lazily(
    __name__, {"operations.calls.source.http": "connect", "operations.server.script": "run"}
)

_ELSEWHERE = {
    "agents": "Toolbox",
    "authority": "ApprovalRule Authority Grants Ledger narrow new_block",
    "calls": "CallGraph PendingRequestMap build_call_handler from_calls serve_calls",
    "config": "load_config parse_config",
    "hub": "Hub open_hub",
    "mcp": "MCPClientConfig MCPClientLoader MCPServerSettings connect_mcp to_mcp",
    "openapi": "HTTPAuth HTTPServiceConfig from_openapi from_openapi_file from_openapi_url to_openapi",
    "pubsub.nats": "connect_nats",
    "pubsub.redis": "connect_redis",
    "pubsub.websocket": "connect_websocket serve_websocket",
    "server": "APIKeys JWTConfig Limits ServerConfig create_app hash_key",
    "testing": "FakeUpstream RegistryUnderTest",
    "tools": "ToolConfig configure_tools",
}
"""Public names of submodules that users often try to import from `operations`, by submodule."""


def __getattr__(name: str) -> object:
    for module, names in _ELSEWHERE.items():
        if name in names.split():
            raise ImportError(
                f"{name} is in operations.{module}: from operations.{module} import {name}"
            )
    return _find(name)


__all__ = [
    "CALL_EVENT_SCHEMAS",
    "OPERATION_SPEC_SCHEMA",
    "RESPONSE_ENVELOPE_SCHEMA",
    "RESPONSE_META_SCHEMA",
    "RESPONSE_SOURCES",
    "AccessControl",
    "AudioContent",
    "Call",
    "CallError",
    "CallEvent",
    "CallerChannel",
    "CastResult",
    "Change",
    "ErrorCode",
    "ErrorDefinition",
    "HTTPResponseMeta",
    "Identity",
    "ImageContent",
    "InputPolicy",
    "LocalResponseMeta",
    "MCPAnnotations",
    "MCPContentBlock",
    "MCPResourceContent",
    "MCPResponseMeta",
    "Middleware",
    "MissingExtraError",
    "Next",
    "NextStream",
    "Observer",
    "Operation",
    "OperationContext",
    "OperationEnv",
    "OperationHandler",
    "OperationRegistry",
    "OperationSpec",
    "OperationType",
    "OperationsError",
    "OutputPolicy",
    "RegistrationError",
    "Remote",
    "ResourceContent",
    "ResourceLink",
    "ResponseEnvelope",
    "ResponseMeta",
    "ResponseSource",
    "ScanResult",
    "Schema",
    "SchemaError",
    "StreamMiddleware",
    "Subscription",
    "SubscriptionHandler",
    "TextContent",
    "TransportError",
    "ValidationIssue",
    "__version__",
    "assert_is_schema",
    "build_env",
    "check_access",
    "collect_errors",
    "connect",
    "enforce_access",
    "format_value_errors",
    "from_schema",
    "http_envelope",
    "is_response_envelope",
    "local_envelope",
    "map_error",
    "mcp_envelope",
    "operation",
    "run",
    "scan_operations",
    "schema_for",
    "subscribe",
    "unwrap",
    "validate_or_raise",
]
