"""The JSON Schemas of the five events, for implementations in other languages."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, cast

from operations.envelopes import RESPONSE_ENVELOPE_SCHEMA
from operations.schema import Schema
from operations.types import JSONObject, JSONSchema


def _frame(kind: str, payload: JSONObject) -> Schema:
    def build() -> JSONSchema:
        return {
            "type": "object",
            "required": ["type", "id", "payload"],
            "properties": {"type": {"const": kind}, "id": {"type": "string"}, "payload": payload},
        }

    return Schema(build)


def _object(required: Mapping[str, Any], optional: Mapping[str, Any]) -> JSONObject:
    return {
        "type": "object",
        "required": list(required),
        "properties": {**required, **optional},
    }


_TEXT: JSONObject = {"type": "string"}
_NUMBER: JSONObject = {"type": "number", "minimum": 0}
_COUNT: JSONObject = {"type": "integer", "minimum": 0}


def _responded() -> JSONSchema:
    document = dict(cast("JSONObject", RESPONSE_ENVELOPE_SCHEMA.document))
    definitions = document.pop("$defs", {})
    payload = _object(
        {"requestId": _TEXT, "output": document}, {"sequence": _COUNT, "replyTo": _TEXT}
    )
    return {
        "type": "object",
        "required": ["type", "id", "payload"],
        "properties": {
            "type": {"const": "call.responded"},
            "id": {"type": "string"},
            "payload": payload,
        },
        "$defs": definitions,
    }


_IDENTITY = _object(
    {"id": _TEXT},
    {
        "scopes": {"type": "array", "items": _TEXT},
        "resources": {
            "type": "object",
            "additionalProperties": {"type": "array", "items": _TEXT},
        },
    },
)

CALL_EVENT_SCHEMAS: Mapping[str, Schema] = MappingProxyType(
    {
        "call.requested": _frame(
            "call.requested",
            _object(
                {"requestId": _TEXT, "operationId": _TEXT},
                {
                    "input": True,
                    "parentRequestId": _TEXT,
                    "deadline": _NUMBER,
                    "timeoutMs": _NUMBER,
                    "idleTimeout": _NUMBER,
                    "identity": _IDENTITY,
                    "credential": _TEXT,
                    "metadata": {"type": "object"},
                    "replyTo": _TEXT,
                    "credit": _COUNT,
                    "attempt": _COUNT,
                    "requiredVersion": _COUNT,
                },
            ),
        ),
        "call.responded": Schema(_responded),
        "call.completed": _frame(
            "call.completed", _object({"requestId": _TEXT}, {"sequence": _COUNT})
        ),
        "call.aborted": _frame("call.aborted", _object({"requestId": _TEXT}, {})),
        "call.error": _frame(
            "call.error",
            _object(
                {"requestId": _TEXT, "code": _TEXT, "message": _TEXT},
                {
                    "details": True,
                    "retryable": {"type": "boolean"},
                    "sequence": _COUNT,
                    "begun": {"type": "boolean"},
                    "worker": _TEXT,
                },
            ),
        ),
    }
)
"""The schema of each of the five events on the wire, by type."""
