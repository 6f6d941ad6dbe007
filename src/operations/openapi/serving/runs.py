"""The paths of runs in an exported document: `/runs` and those below it, and the response 202 of durable operations.

Rule 1: they are not operations: an import skips them, because their `x-operations` refers to another entry.
Rule 2: an import that does not read `x-operations` makes operations of them. These are marked, because the runs of all
        callers of the importing hub belong to its one identity.
"""

from typing import Any, Final

from operations.base.types import JSONObject
from operations.openapi.reading.media import EVENT_STREAM
from operations.openapi.serving.components import AUTHORITY, ERROR, KEY, PREFIX

_JSON: Final = "application/json"

RUN: Final[JSONObject] = {"$ref": PREFIX + "RunState"}
"""The schema of the state of a run."""

_TIME: Final[JSONObject] = {
    "type": "integer",
    "description": "In milliseconds since the epoch.",
}
_TEXT: Final[JSONObject] = {"type": "string"}
_STATUS: Final[JSONObject] = {
    "enum": [
        "queued", "working", "input_required", "completed", "failed", "cancelled", "unknown",
    ],
}  # fmt: skip

_STATE: Final[JSONObject] = {
    "type": "object",
    "description": "A run at one moment.",
    "required": ["id", "operation", "status", "created", "updated", "attempt"],
    "properties": {
        "id": _TEXT,
        "operation": _TEXT,
        "status": _STATUS,
        "created": _TIME,
        "updated": _TIME,
        "expires": _TIME,
        "attempt": {"type": "integer"},
        "owner": _TEXT,
        "progress": {"type": "object"},
        "message": _TEXT,
        "waiting": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["key", "kind"],
                "properties": {"key": _TEXT, "kind": _TEXT, "request": {}},
            },
        },
        "result": {"type": "object", "description": "The envelope of a completed run."},
        "error": ERROR,
    },
}
_STEP: Final[JSONObject] = {
    "type": "object",
    "required": ["name", "parent", "operation", "begun"],
    "properties": {
        "name": _TEXT,
        "parent": _TEXT,
        "operation": _TEXT,
        "begun": _TIME,
        "ended": _TIME,
        "once": {"type": "boolean"},
        "error": ERROR,
        "answeredBy": _TEXT,
    },
}
_PAGE: Final[JSONObject] = {
    "type": "object",
    "required": ["runs"],
    "properties": {"runs": {"type": "array", "items": RUN}, "next": _TEXT},
}
_STEPS: Final[JSONObject] = {
    "type": "object",
    "required": ["steps"],
    "properties": {"steps": {"type": "array", "items": {"$ref": PREFIX + "RunStep"}}},
}
_DECISION: Final[JSONObject] = {
    "type": "object",
    "properties": {"ran": {}, "notRun": {"type": "boolean"}},
    "additionalProperties": False,
}

RUN_SCHEMAS: Final[JSONObject] = {"RunState": _STATE, "RunStep": _STEP}
"""The schemas of the paths of runs, by name."""

ACCEPTED: Final[JSONObject] = {
    "description": "The call goes on as a run, whose address is in `Location`.",
    "headers": {
        "Location": {"schema": _TEXT, "description": "The address of the run."},
        "Retry-After": {"schema": {"type": "integer"}},
    },
    "content": {_JSON: {"schema": RUN}},
}
"""The response to a call whose run has not ended in time."""


def run_paths(security: list[JSONObject]) -> JSONObject:
    """Return the paths of runs.

    Args:
        security: The security requirements of each of them; without any, none is written.
    """

    def entry(
        name: str, summary: str, responses: JSONObject, *parameters: JSONObject, body: Any = None
    ) -> JSONObject:
        written: JSONObject = {"operationId": name, "summary": summary, "tags": ["runs"]}
        if parameters:
            written["parameters"] = [*parameters]
        if body is not None:
            written["requestBody"] = {"content": {_JSON: {"schema": body}}}
        written["responses"] = {**responses, "default": {"$ref": "#/components/responses/Failed"}}
        if security:
            written["security"] = security
        return written | {KEY: {"id": name, "sameAs": "run"}, AUTHORITY: True}

    run_id = _parameter("id", "path", _TEXT)
    state, done = _response("The state.", RUN), {"204": {"description": "Done."}}
    wait = _parameter("Prefer", "header", _TEXT, "`wait=SECONDS`: at most 60.")
    filters = [_parameter(name, "query", _TEXT) for name in ("operation", "after")]
    page = entry(
        "run.list", "List the runs that the caller may see, the newest first",
        {"200": _response("A page.", _PAGE)}, _parameter("status", "query", _STATUS), *filters,
        _parameter("limit", "query", {"type": "integer", "maximum": 100}),
    )  # fmt: skip
    found: JSONObject = {"/runs": {"get": page}}
    envelope = {"200": _response("The result, as the call returns it.", {}), "202": state}
    stream = {
        "200": {
            "description": "The present state, then every change; then `event: complete`.",
            "content": {EVENT_STREAM: {"schema": _TEXT}},
        }
    }
    steps = {"200": _response("The steps.", _STEPS)}
    for verb, summary, responses in (
        ("", "Return the state of a run", {"200": state}),
        ("result", "Return the result of a run", envelope),
        ("steps", "List the recorded steps of a run", steps),
        ("events", "Follow a run", stream),
    ):
        waits = (wait,) if verb in ("", "result") else ()
        item = entry(f"run.{verb or 'get'}", summary, responses, run_id, *waits)
        found[f"/runs/{{id}}/{verb}".rstrip("/")] = {"get": item}
    for verb, summary, part, body in (
        ("cancel", "Cancel a run", "", None),
        ("retry", "Run a run again that has failed, was cancelled or is unknown", "", _DECISION),
        ("answers", "Answer a question of a run", "key", {"type": "object"}),
        ("signals", "Send a signal to a run", "name", {}),
    ):
        parts = (_parameter(part, "path", _TEXT),) if part else ()
        given = done if part else {"202": state}
        item = entry(f"run.{verb.removesuffix('s')}", summary, given, run_id, *parts, body=body)
        found[f"/runs/{{id}}/{verb}" + (f"/{{{part}}}" if part else "")] = {"post": item}
    return found


def _parameter(name: str, place: str, schema: JSONObject, description: str = "") -> JSONObject:
    written: JSONObject = {"name": name, "in": place, "required": place == "path"}
    if description:
        written["description"] = description
    return {**written, "schema": schema}


def _response(description: str, schema: JSONObject) -> JSONObject:
    return {"description": description, "content": {_JSON: {"schema": schema}}}
