"""Hooks of schemathesis for `scripts/conform-http`."""

from typing import Any

import schemathesis


@schemathesis.hook
def before_load_schema(context: Any, raw_schema: dict[str, Any]) -> None:
    """Check each event of a stream: `schema` describes the whole text, and OpenAPI 3.1 has no `itemSchema`."""
    for operations in raw_schema["paths"].values():
        for operation in operations.values():
            content = operation["responses"].get("200", {}).get("content", {})
            stream = content.get("text/event-stream")
            if stream is not None:
                stream["itemSchema"] = stream.pop("schema")["contentSchema"]


@schemathesis.hook
def filter_case(context: Any, case: Any) -> bool:
    """Skip null as a body: it stands for no input, so an operation accepts it wherever it accepts an empty body."""
    return case.body is not None
