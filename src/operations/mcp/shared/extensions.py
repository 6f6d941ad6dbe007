"""The extensions of the protocol that this package knows, and who declares them."""

from collections.abc import Collection, Mapping
from typing import Any, Final

from operations.base.json.values import object_of
from operations.base.types import JSONObject

TASKS: Final = "io.modelcontextprotocol/tasks"
"""Results of `tools/call` that are fetched later (SEP-2663)."""


SKILLS: Final = "io.modelcontextprotocol/skills"
"""Folders of instructions and files for models (SEP-2640)."""

UI: Final = "io.modelcontextprotocol/ui"
"""MCP Apps: tools with views."""


def declared(capabilities: Mapping[str, Any] | None) -> JSONObject:
    """Return the extensions in the capabilities of a client or server, with their settings."""
    return object_of(object_of(capabilities).get("extensions"))


VIEW: Final = "text/html;profile=mcp-app"
"""The media type of a view."""

_SETTINGS: Final[Mapping[str, JSONObject]] = {UI: {"mimeTypes": [VIEW]}}


def declared_to(allowed: Collection[str] | None) -> dict[str, JSONObject]:
    """Return the extensions that a connection declares to its server, unless the operator allows others."""
    names = (UI,) if allowed is None else allowed
    return {name: _SETTINGS.get(name, {}) for name in names if name != TASKS}


def passed_on(extensions: Mapping[str, Any], allowed: Collection[str] | None) -> JSONObject:
    """Return the extensions of a client that its own connection to a server declares."""
    return {
        name: settings
        for name, settings in extensions.items()
        if name != TASKS and (allowed is None or name in allowed)
    }
