"""Which forms of model providers there are: those of the library, and those of installed packages.

Rule: the form of another package is imported when a caller names it, so an installed package cannot add itself.
"""

from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, cast

from operations.agents.formats.contract import ToolCall, ToolFormat
from operations.base.text import suggestion

GROUP = "operations.providers"
"""The group of the entry points by which packages register forms."""

BUILT_IN = {
    "openai": "openai:CHAT",
    "openai-responses": "openai:RESPONSES",
    "anthropic": "anthropic:FORMAT",
    "langchain": "langchain:FORMAT",
    "gemini": "gemini:FORMAT",
}
"""Our own forms, in the order in which a tool call is tried: Gemini's call has no mark of its own."""


@cache
def format_of(name: str) -> ToolFormat:
    """Return a form by its name.

    Raises:
        ValueError: If there is none, or its package cannot be imported.
    """
    if place := BUILT_IN.get(name):
        module, _, attribute = place.partition(":")
        found = import_module(f"operations.agents.formats.{module}")
        return cast("ToolFormat", getattr(found, attribute))
    for each in entry_points(group=GROUP, name=name):
        try:
            return cast("ToolFormat", each.load())
        except Exception as error:
            package = each.dist.name if each.dist is not None else each.value
            raise ValueError(
                f"the format {name!r} is in {package}, which fails: {error}"
            ) from error
    near = suggestion(name, BUILT_IN)
    raise ValueError(f"there is no format {name!r}; known: {', '.join(BUILT_IN)}.{near}")


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
