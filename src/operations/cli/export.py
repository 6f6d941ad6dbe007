"""`operations export`: operations for others, and what was lost on the way."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from operations._text import suggestion, tool_name
from operations.agents.providers import Loss, provider_tools
from operations.cli.lookup import caller
from operations.cli.options import DEFAULTS, Common, command
from operations.cli.python_client import python_client
from operations.cli.render import Screen, encoded
from operations.cli.session import open_session
from operations.errors import CallError, ErrorCode
from operations.front.search import visible_specs
from operations.hub.hub import Hub
from operations.mcp.serving.catalog import Tool
from operations.openapi import to_openapi
from operations.specs import OperationSpec
from operations.types import JSONObject

Format = Literal["openapi", "openai", "anthropic", "gemini", "mcp", "python"]

_SHOWN = 20
"""How many losses are printed one by one."""

_SCHEMA_BUDGET = 1 << 20
"""Bytes of shared definitions in one schema of an exported MCP tool: practically no limit."""


@command
async def export(
    format: Format,
    /,
    *ids: str,
    output: Annotated[Path | None, Parameter(alias="-o")] = None,
    as_: Annotated[str | None, Parameter(name="--as")] = None,
    common: Common = DEFAULTS,
) -> None:
    """Write operations as an OpenAPI document, as tools for a model, or as a typed Python client.

    What the other side cannot say is told on standard error; with --json the result is `{"result", "losses"}`.

    Args:
        format: What to write.
        ids: Which operations; `*` stands for anything. All by default.
        output: Write to this file instead of standard output.
        as_: Only operations that this caller of [access.keys] may call; `anonymous` for no identity.
        common: Options of every command.
    """
    screen = common.screen()
    async with open_session(common, screen) as hub:
        specs = await _chosen(hub, ids, as_)
        result, losses = _exported(format, specs)
    _write(result, losses, output, screen)
    if not screen.json:
        _tell(losses, screen, verbose=common.verbose)


async def _chosen(hub: Hub, patterns: tuple[str, ...], as_: str | None) -> list[OperationSpec]:
    specs = sorted(visible_specs(hub.registry, await caller(hub, as_)), key=lambda spec: spec.id)
    for pattern in patterns:
        if not any(fnmatchcase(spec.id, pattern) for spec in specs):
            hub.enforce_open(pattern)
            near = suggestion(pattern, (spec.id for spec in specs))
            raise CallError(ErrorCode.OPERATION_NOT_FOUND, f"nothing is called {pattern}.{near}")
    if not patterns:
        return specs
    return [spec for spec in specs if any(fnmatchcase(spec.id, each) for each in patterns)]


def mcp_tools(specs: Sequence[OperationSpec]) -> list[JSONObject]:
    """Return every operation as an MCP server lists it."""
    return [Tool(tool_name(spec.id), spec, _SCHEMA_BUDGET).wire(modern=True) for spec in specs]


def _exported(format: Format, specs: list[OperationSpec]) -> tuple[Any, list[Loss]]:
    match format:
        case "openapi":
            return to_openapi(specs), []
        case "mcp":
            return {"tools": mcp_tools(specs)}, []
        case "python":
            return python_client(specs), []
        case _:
            return provider_tools(specs, format)


def _write(result: Any, losses: list[Loss], output: Path | None, screen: Screen) -> None:
    text = result if isinstance(result, str) else encoded(result, indent=2) + "\n"
    if output is not None:
        output.write_text(text, encoding="utf-8")
        screen.note(f"written to {output}")
    elif screen.json:
        screen.value({"result": result, "losses": [loss.to_json() for loss in losses]})
    elif screen.is_terminal and not isinstance(result, str):
        screen.value(result)
    else:
        screen.write(text.rstrip("\n"))


def _tell(losses: list[Loss], screen: Screen, *, verbose: bool) -> None:
    shown = losses if verbose else losses[:_SHOWN]
    for loss in shown:
        screen.note(f"{loss.operation_id} {loss.place}: {loss.what}", "yellow")
    if len(shown) < len(losses):
        screen.note(f"... and {len(losses) - len(shown)} more; --verbose tells all", "yellow")
