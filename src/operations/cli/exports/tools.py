"""Operations as the tools of a model provider."""

from collections.abc import Sequence

from operations.cli.exports.dialects import DIALECTS, Provider, description_of, fit
from operations.cli.exports.losses import Loss
from operations.cli.exports.names import tool_names
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
    names = tool_names(
        (spec.id for spec in specs), allowed=dialect.name_letters, longest=dialect.longest_name
    )
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
        if names[spec.id] != spec.id:
            report("name", f"is called {names[spec.id]}")
        description = description_of(spec.description or spec.title or spec.id, dialect, report)
        schema = fit(Outline.of(spec.input_schema), dialect, report)
        tools.append(dialect.wrap(names[spec.id], description, schema))
    return tools, left_out + losses


def mcp_tools(specs: Sequence[OperationSpec]) -> list[JSONObject]:
    """Every operation as `tools/list` of the MCP door shows it."""
    return [Tool(spec.id, spec, _SCHEMA_BUDGET).wire(modern=True) for spec in specs]
