"""Operations as the tools of a model: their names, descriptions and the schemas of their arguments.

Rule: a schema that a provider rejects is simplified, and every simplification is reported as a `Loss`. The operation
      still validates its input with the full schema.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from operations.agents.formats.contract import Loss, Report, ToolDefinition, ToolLimits
from operations.agents.formats.kinds import format_of
from operations.agents.formats.plain import PlainSchemas
from operations.base.errors import CallError, ErrorCode
from operations.base.json.decoding import decode_json
from operations.base.json.values import MAX_REQUEST_VALUES, object_of
from operations.base.text import tool_name
from operations.base.types import JSONObject
from operations.contract.specs import OperationSpec, OperationType
from operations.schema.outline import Outline
from operations.schema.references import with_items

_AT_ROOT = ("allOf", "anyOf", "oneOf", "enum", "const", "not", "if", "then", "else")
"""Keywords that are not allowed at the root of a tool's schema."""


def _object_root(outline: Outline, report: Report) -> JSONObject:
    """Return the schema with a plain object at its root, because the arguments of a tool are an object."""
    schema = outline.schema
    if _is_wrapped(outline):
        report("", "is not an object: the value is the argument `input`")
        return {
            "type": "object",
            "properties": {"input": outline.standalone},
            "required": ["input"],
        }
    root: JSONObject = {
        key: value for key, value in outline.standalone.items() if key not in _AT_ROOT
    }
    root["type"] = "object"
    if "allOf" in schema:
        root["properties"] = {name: each.schema for name, each in outline.properties.items()}
        root["required"] = outline.required
    root.setdefault("properties", {})
    for keyword in _AT_ROOT:
        if keyword in schema and keyword != "allOf":
            report(f"/{keyword}", "is not allowed at the root: omitted")
    return root


def _is_wrapped(outline: Outline) -> bool:
    """Return whether the input is not an object, and is therefore passed as the argument `input`."""
    return bool(outline.schema and outline.types and "object" not in outline.types)


def input_of(spec: OperationSpec, arguments: JSONObject) -> Any:
    """Return the input of an operation for the arguments of a tool call."""
    return arguments.get("input") if _is_wrapped(Outline.of(spec.input_schema)) else arguments


def definition(spec: OperationSpec, limits: ToolLimits, report: Report) -> ToolDefinition:
    """Return an operation as a tool."""
    name = tool_name(spec.id)
    if "__" not in name:
        report("name", f"is called {name}, from which the id cannot be derived")
    description, longest = spec.description or spec.title or spec.id, limits.longest_description
    if len(description) > longest:
        report("description", f"is truncated to {longest} characters")
        description = description[: longest - 1] + "…"
    schema = object_of(with_items(_object_root(Outline.of(spec.input_schema), report)))
    if limits.is_plain:
        schema = PlainSchemas(report).convert(Outline(schema), "", 0)
    # Copied, so that users and frameworks cannot change the operation.
    return ToolDefinition(name, description, msgspec.to_builtins(schema))


def provider_tools(
    specs: Sequence[OperationSpec], provider: str
) -> tuple[list[JSONObject], list[Loss]]:
    """Return every query and mutation as a tool, and the losses: omitted operations first.

    Raises:
        ValueError: If there is no form with this name.
    """
    form = format_of(provider)
    limits = form.limits
    losses: list[Loss] = []
    omitted: list[Loss] = []
    tools: list[JSONObject] = []
    for spec in specs:

        def report(place: str, what: str, operation_id: str = spec.id) -> None:
            losses.append(Loss(operation_id, place or "/", what))

        if spec.type is OperationType.SUBSCRIPTION:
            what = "is a subscription, and a tool returns one result: omitted"
            omitted.append(Loss(spec.id, "type", what))
        elif len(tools) == limits.most_tools:
            what = f"is omitted: {provider} accepts {limits.most_tools} tools at a time"
            omitted.append(Loss(spec.id, "/", what))
        else:
            tools.append(form.write(definition(spec, limits, report)))
    return tools, omitted + losses


def read_arguments(name: str, arguments: Any) -> JSONObject:
    """Return the arguments of a tool call, given as an object or as its JSON text.

    Raises:
        CallError: `VALIDATION_ERROR` if they are not a JSON object.
    """
    if isinstance(arguments, (str, bytes)):
        try:
            arguments = decode_json(arguments or b"{}", max_values=MAX_REQUEST_VALUES)
        except ValueError as error:
            reason = f"Invalid arguments of {name}: {error}"
            raise CallError(ErrorCode.VALIDATION_ERROR, reason) from error
    if arguments is None:
        return {}
    if isinstance(arguments, Mapping):
        return dict(cast("Mapping[str, Any]", arguments))
    raise CallError(ErrorCode.VALIDATION_ERROR, f"The arguments of {name} must be an object")
