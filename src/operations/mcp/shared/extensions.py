"""The extensions of the protocol that this package knows, and who declares them."""

from collections.abc import Mapping
from typing import Any, Final

from operations.base.json.values import object_of
from operations.base.types import JSONObject

TASKS: Final = "io.modelcontextprotocol/tasks"
"""Results of `tools/call` that are fetched later (SEP-2663)."""


def declared(capabilities: Mapping[str, Any] | None) -> JSONObject:
    """Return the extensions in the capabilities of a client or server, with their settings."""
    return object_of(object_of(capabilities).get("extensions"))
