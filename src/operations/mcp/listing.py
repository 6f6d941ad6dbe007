"""Everything a server lists, page after page, within limits; one bad entry costs that entry.

Tools become what `tools.py` makes operations of: their name is a string, their input schema an object.
"""

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, cast

import mcp_types as types
from mcp import MCPError
from mcp.shared.inbound import find_invalid_x_mcp_header
from mcp_types import METHOD_NOT_FOUND
from pydantic import BaseModel, ValidationError

from operations._json import JSONValueError, object_of, to_json
from operations.mcp.session import RelaySession
from operations.types import JSONObject

Fetch: TypeAlias = Callable[[str, JSONObject], Awaitable[JSONObject]]
"""`(method, params)` -> the result of one request."""

_MAX_PAGES = 1000
_MAX_DESCRIPTION = 100_000
_MAX_INSTRUCTIONS = 10_000
_MOMENT: Final = re.compile(
    r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}(:\d{2}(\.\d{1,9})?)?(Z|[+-]\d{2}:?\d{2})", re.ASCII
)


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a server says of itself."""

    name: str
    version: str
    title: str | None = None

    protocol_version: str = ""
    """The revision spoken with it."""

    instructions: str | None = None
    capabilities: JSONObject = field(default_factory=dict[str, Any])


@dataclass(slots=True)
class Listing:
    """What a server offers, and what was left out and why."""

    tools: list[JSONObject] = field(default_factory=list[JSONObject])
    resources: list[JSONObject] = field(default_factory=list[JSONObject])
    templates: list[JSONObject] = field(default_factory=list[JSONObject])
    prompts: list[JSONObject] = field(default_factory=list[JSONObject])
    instructions: str = ""
    """What the server tells models about its use."""

    can_watch: bool = False
    """Whether the server reports changes of a resource to those who ask for it."""

    can_complete: bool = False
    """Whether the server suggests values for the arguments of prompts and templates."""

    skipped: dict[str, str] = field(default_factory=dict[str, str])
    """What was left out, by name (escaped where it must be), with the reason."""


async def list_everything(session: RelaySession, limit: int) -> Listing:
    """Every tool, resource, template and prompt the server says it has.

    Raises:
        MCPError: If the tools cannot be listed; failures of the others count as none.
    """
    listing = Listing(instructions=(session.instructions or "")[:_MAX_INSTRUCTIONS])
    offers = session.server_capabilities
    if offers is None or offers.tools is not None:
        fault = _modern_tool_fault if session.is_modern else _tool_fault
        listing.tools = await pages(
            session.relay, "tools/list", "tools", limit, listing.skipped, fault
        )
        listing.tools = _unique(listing.tools, listing.skipped)
        session.learn(listing.tools)
    if offers is not None and offers.resources is not None:
        listing.resources = await _optional(session, "resources/list", "resources", limit, "uri")
        listing.templates = await _optional(
            session, "resources/templates/list", "resourceTemplates", limit, "uriTemplate"
        )
    if offers is not None and offers.prompts is not None:
        listing.prompts = await _optional(session, "prompts/list", "prompts", limit, "name")
    if offers is not None:
        listing.can_watch = offers.resources is not None and bool(offers.resources.subscribe)
        listing.can_complete = offers.completions is not None
    return listing


_MODELS: Final[dict[str, type[BaseModel]]] = {
    "tools": types.Tool,
    "resources": types.Resource,
    "resourceTemplates": types.ResourceTemplate,
    "prompts": types.Prompt,
}
_OPTIONAL: Final = frozenset({
    "_meta", "annotations", "arguments", "description", "execution", "icons", "mimeType", "size", "title",
})  # fmt: skip


def cleaned(key: str, entry: JSONObject) -> JSONObject:
    """Return an entry without optional fields of the wrong form.

    They are passed on to clients, which would reject the whole list, with the entries of other servers.
    """
    try:
        _MODELS[key].model_validate(entry, by_name=False)
    except ValidationError as error:
        wrong = {str(each["loc"][0]) for each in error.errors(include_url=False) if each["loc"]}
        entry = {name: value for name, value in entry.items() if name not in wrong & _OPTIONAL}
    modified = object_of(entry.get("annotations")).get("lastModified")
    if modified is not None and not _MOMENT.fullmatch(modified):
        entry = {name: value for name, value in entry.items() if name != "annotations"}
    return entry


async def pages(
    fetch: Fetch,
    method: str,
    key: str,
    limit: int,
    skipped: dict[str, str],
    fault: Callable[[Any], str | None],
) -> list[JSONObject]:
    """All entries of a paged list that have no fault. Raises what `fetch` raises."""
    entries: list[JSONObject] = []
    cursors: set[str] = set()
    cursor: str | None = None
    for _ in range(_MAX_PAGES):
        result = await fetch(method, {} if cursor is None else {"cursor": cursor})
        page: Any = result.get(key)
        for index, entry in enumerate(cast("list[object]", page) if isinstance(page, list) else []):
            reason = fault(entry)
            if reason is not None:
                skipped[_label(entry, f"{key}[{index}]")] = reason
            elif len(entries) == limit:
                skipped[key] = f"there are more than {limit}"
                return entries
            else:
                entries.append(cleaned(key, to_json(entry)))
        cursor = result.get("nextCursor")
        if not isinstance(cursor, str) or not cursor:
            return entries
        if cursor in cursors:
            skipped[key] = "the list repeats itself"
            return entries
        cursors.add(cursor)
    skipped[key] = f"the list has more than {_MAX_PAGES} pages"
    return entries


async def _optional(
    session: RelaySession, method: str, key: str, limit: int, named: str
) -> list[JSONObject]:
    try:
        return await pages(
            session.relay, method, key, limit, {}, lambda entry: _fault(entry, named)
        )
    except MCPError as error:
        if error.code == METHOD_NOT_FOUND or session.is_open:
            return []
        raise


def _label(entry: Any, place: str) -> str:
    name = cast("JSONObject", entry).get("name") if isinstance(entry, dict) else None
    return ascii(name)[1:-1][:200] if isinstance(name, str) and name else place


def _fault(entry: Any, named: str = "name") -> str | None:
    if not isinstance(entry, dict):
        return "it is no object"
    entry = cast("JSONObject", entry)
    if not isinstance(entry.get(named), str) or not entry[named]:
        return f"it has no {named}"
    try:
        to_json(entry)
    except JSONValueError as error:
        return f"it is not JSON: {error}"
    return None


def _tool_fault(entry: Any) -> str | None:
    reason = _fault(entry)
    if reason is not None:
        return reason
    tool = cast("JSONObject", entry)
    if not isinstance(tool.get("inputSchema"), dict):
        return "it has no input schema"
    if len(str(tool.get("description") or "")) > _MAX_DESCRIPTION:
        return f"its description has more than {_MAX_DESCRIPTION} characters"
    return None


def _modern_tool_fault(entry: Any) -> str | None:
    """As above; 2026-07-28 also rules on arguments that travel as headers."""
    reason = _tool_fault(entry)
    if reason is not None:
        return reason
    tool = cast("JSONObject", entry)
    invalid = find_invalid_x_mcp_header(tool["inputSchema"])
    return f"it asks for headers in a way that is not allowed: {invalid}" if invalid else None


def _unique(tools: list[JSONObject], skipped: dict[str, str]) -> list[JSONObject]:
    """The first tool of each name."""
    found: dict[str, JSONObject] = {}
    for tool in tools:
        if tool["name"] in found:
            skipped[_label(tool, "tools")] = "its name is taken by an earlier tool"
        else:
            found[tool["name"]] = tool
    return list(found.values())
