"""Which forms of model providers there are: those of the library, and those of installed packages.

Rule: the form of another package is imported when a caller names it, so an installed package cannot add itself.
"""

from typing import Any, cast

from operations.agents.formats.contract import ToolCall, ToolFormat
from operations.base.plugins import registered
from operations.base.text import suggestion

GROUP = "operations.providers"
"""The group of the entry points by which packages register forms."""

BUILT_IN = {
    "openai": "operations.agents.formats.openai:CHAT",
    "openai-responses": "operations.agents.formats.openai:RESPONSES",
    "anthropic": "operations.agents.formats.anthropic:FORMAT",
    "langchain": "operations.agents.formats.langchain:FORMAT",
    "gemini": "operations.agents.formats.gemini:FORMAT",
}
"""Our own forms, in the order in which a tool call is tried: Gemini's call has no mark of its own."""


def format_of(name: str) -> ToolFormat:
    """Return a form by its name.

    Raises:
        ValueError: If there is none, or its package cannot be imported.
    """
    found = registered(name, BUILT_IN, GROUP)
    if found is None:
        near = suggestion(name, BUILT_IN)
        raise ValueError(f"there is no format {name!r}; known: {', '.join(BUILT_IN)}.{near}")
    return cast("ToolFormat", found)


def read_call(raw: Any, name: str | None = None) -> tuple[ToolFormat, ToolCall]:
    """Read a tool call in the form with a name, or in any form of the library; return the form as well.

    Raises:
        TypeError: If it is not a tool call in this form, or in any.
    """
    for each in BUILT_IN if name is None else (name,):
        found = format_of(each)
        call = found.read_call(raw)
        if call is not None:
            return found, call
    raise TypeError(
        f"{raw!r} is not a tool call of {name or 'a known provider'}: pass the call as the provider's package returns"
        " it."
        " To run an operation that no model requested, call it with registry.execute."
    )
