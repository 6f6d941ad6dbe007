"""The JSON Schemas of operation specs and of the five events, for implementations in other languages."""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

from operations.base.json.values import object_of
from operations.base.types import JSONObject, JSONSchema
from operations.contract.envelopes import RESPONSE_ENVELOPE_SCHEMA
from operations.contract.specs import NAME, NAMESPACE, OperationType
from operations.schema import Schema


def _object(required: JSONObject, optional: JSONObject) -> JSONObject:
    properties = {**required, **optional}
    return {"type": "object", "required": list(required), "properties": properties}


_TEXT: JSONObject = {"type": "string"}
_TEXTS: JSONObject = {"type": "array", "items": _TEXT}
_COUNT: JSONObject = {"type": "integer", "minimum": 0}
_FLAG: JSONObject = {"type": "boolean"}
_RESOURCES: JSONObject = {"type": "object", "additionalProperties": _TEXTS}

_PAYLOADS: Mapping[str, tuple[JSONObject, JSONObject]] = {
    "call.requested": (
        {"requestId": _TEXT, "operationId": _TEXT},
        {
            "input": True,
            "parentRequestId": _TEXT,
            "deadline": _COUNT,
            "timeoutMs": _COUNT,
            "idleTimeout": _COUNT,
            "identity": _object(
                {"id": _TEXT}, {"scopes": _TEXTS, "resources": _RESOURCES, "issuer": _TEXT}
            ),
            "credential": _TEXT,
            "metadata": {"type": "object"},
            "replyTo": _TEXT,
            "credit": {"type": "integer", "minimum": 1},
            "attempt": _COUNT,
            "resends": _COUNT,
            "requiredVersion": _COUNT,
            "key": _TEXT,
            "checked": _TEXT,
        },
    ),
    "call.responded": ({"requestId": _TEXT, "output": {}}, {"sequence": _COUNT, "replyTo": _TEXT}),
    "call.completed": ({"requestId": _TEXT}, {"sequence": _COUNT}),
    "call.aborted": ({"requestId": _TEXT}, {"resends": _COUNT}),
    "call.error": (
        {"requestId": _TEXT, "code": _TEXT, "message": _TEXT},
        {
            "details": True,
            "retryable": _FLAG,
            "unexpected": _FLAG,
            "sequence": _COUNT,
            "begun": _FLAG,
            "worker": _TEXT,
            "resends": _COUNT,
            "leaving": _FLAG,
            "missing": _FLAG,
        },
    ),
}
"""The required and the optional properties of a payload, by event type. The output is an envelope."""


def _event(kind: str) -> JSONSchema:
    required, optional = _PAYLOADS[kind]
    definitions: JSONObject = {}
    if "output" in required:
        envelope = dict(object_of(RESPONSE_ENVELOPE_SCHEMA.document))
        definitions = {"$defs": envelope.pop("$defs", {})}
        required = {**required, "output": envelope}
    payload = _object(required, optional)
    frame = _object({"type": {"const": kind}, "id": _TEXT, "payload": payload}, {})
    return {**frame, **definitions}


CALL_EVENT_SCHEMAS: Mapping[str, Schema] = MappingProxyType(
    {kind: Schema(partial(_event, kind)) for kind in _PAYLOADS}
)
"""The schema of each of the five events on the wire, by type."""

_SCHEMA: JSONObject = {"type": ["object", "boolean"]}
_ERROR = _object(
    {"code": _TEXT, "description": _TEXT, "schema": _SCHEMA}, {"httpStatus": {"type": "integer"}}
)
_ACCESS: JSONObject = {
    **_object(
        {"requiredScopes": _TEXTS},
        {
            "requiredScopesAny": _TEXTS,
            "resourceType": _TEXT,
            "resourceAction": _TEXT,
            "resourceInput": {"type": "string", "pattern": "^/"},
        },
    ),
    "dependentRequired": {
        "resourceInput": ["resourceType"],
        "resourceType": ["resourceAction"],
        "resourceAction": ["resourceType"],
    },
}

OPERATION_SPEC_SCHEMA = Schema(
    _object(
        {
            "name": {"type": "string", "pattern": f"^{NAME.pattern}$"},
            "namespace": {"type": "string", "pattern": f"^{NAMESPACE.pattern}$"},
            "version": _TEXT,
            "type": {"enum": [kind.value for kind in OperationType]},
            "description": _TEXT,
            "inputSchema": _SCHEMA,
            "outputSchema": _SCHEMA,
            "accessControl": _ACCESS,
        },
        {
            "title": _TEXT,
            "tags": _TEXTS,
            "errorSchemas": {"type": "array", "items": _ERROR},
            "idempotent": _FLAG,
            "keyed": _FLAG,
            "authority": _FLAG,
            "convertsInput": _FLAG,
            "_meta": {"type": "object"},
        },
    )
)
"""The schema of a spec on the wire."""
