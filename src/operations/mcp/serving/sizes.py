"""What the operations of a registry take in a list of tools."""

from collections import Counter
from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from operations.base.text import tool_name
from operations.contract.specs import Descriptions, OperationSpec
from operations.front.config import MCPServerSettings
from operations.mcp.serving.tools import Tool
from operations.registry.registry import OperationRegistry

BYTES_PER_TOKEN = 4


def tools_of(
    registry: OperationRegistry,
    specs: Iterable[OperationSpec],
    descriptions: Descriptions | None = None,
) -> Iterator[Tool]:
    """Yield operations as a server with default settings lists them.

    Args:
        registry: The registry.
        specs: The operations.
        descriptions: Replaces the setting of the operations.
    """
    budget = MCPServerSettings().schema_budget
    siblings = Counter(spec.namespace for spec in registry.specs())
    for spec in specs:
        operation = registry.get(spec.id)
        if operation is not None and descriptions is not None:
            operation = replace(operation, descriptions=descriptions)
        yield Tool(
            tool_name(spec.id),
            spec,
            budget,
            operation=operation,
            siblings=max(1, siblings[spec.namespace]),
            policy=registry.output_of(spec.id),
        )


def tokens_of(tools: Iterable[Tool]) -> int:
    """Return the tokens that tools take in a list, without those whose schemas cannot be built."""
    return sum(tool.size for tool in tools if tool.is_usable) // BYTES_PER_TOKEN
