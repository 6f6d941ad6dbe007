"""Operations as the tools of a model provider."""

from collections.abc import Sequence

from operations._text import tool_name
from operations.cli.exports.dialects import DIALECTS, Provider, description_of, fit
from operations.cli.exports.losses import Loss
from operations.cli.outline import Outline
from operations.mcp.serving.catalog import Tool
from operations.specs import OperationSpec, OperationType
from operations.types import JSONObject

_SCHEMA_BUDGET = 1 << 20
"""Bytes of shared definitions in one schema of an exported MCP tool: as good as all."""


def provider_tools(
    specs: Sequence[OperationSpec], provider: Provider
) -> tuple[list[JSONObject], list[Loss]]:
    """Every query and mutation as a tool, and what could not be said of them: first what is left out."""
    dialect = DIALECTS[provider]
    losses: list[Loss] = []
    left_out: list[Loss] = []
    tools: list[JSONObject] = []
    for spec in specs:

        def report(place: str, what: str, operation_id: str = spec.id) -> None:
            losses.append(Loss(operation_id, place or "/", what))

        if spec.type is OperationType.SUBSCRIPTION:
            what = "is a subscription: a tool gives one result, so it is left out"
            left_out.append(Loss(spec.id, "type", what))
            continue
        if len(tools) == dialect.most_tools:
            what = f"is left out: {provider} takes {dialect.most_tools} tools at a time"
            left_out.append(Loss(spec.id, "/", what))
            continue
        name = tool_name(spec.id)
        if "__" not in name:
            report("name", f"is called {name}, from which the id cannot be derived")
        description = description_of(spec.description or spec.title or spec.id, dialect, report)
        schema = fit(Outline.of(spec.input_schema), dialect, report)
        tools.append(dialect.wrap(name, description, schema))
    return tools, left_out + losses


def mcp_tools(specs: Sequence[OperationSpec]) -> list[JSONObject]:
    """Return every operation as an MCP server lists it."""
    return [Tool(tool_name(spec.id), spec, _SCHEMA_BUDGET).wire(modern=True) for spec in specs]
