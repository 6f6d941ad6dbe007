"""Choose the names of tools and prompts.

Rule 1: the name of an operation is a function of its id (`operations._text`), unless its `meta["mcp"]["name"]`
        asks for another.
Rule 2: a name is chosen by one operation at most, and is neither the default name of another nor a gateway tool's;
        otherwise the operations that ask for it keep their default names.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any, cast

from operations._text import TOOL_NAME, NameStyle, tool_name
from operations.specs import OperationSpec
from operations.types import JSONObject


def names_of(
    specs: Iterable[OperationSpec], style: NameStyle, *, reserved: Collection[str] = ()
) -> dict[str, OperationSpec]:
    """Return every operation by its name."""
    defaults = {tool_name(spec.id, style): spec for spec in specs}
    chosen = Counter(_chosen(spec) for spec in defaults.values())
    names: dict[str, OperationSpec] = {}
    for default, spec in defaults.items():
        name = _chosen(spec)
        is_free = name is not None and chosen[name] == 1 and name not in reserved
        names[name if name and is_free and name not in defaults else default] = spec
    return names


def _chosen(spec: OperationSpec) -> str | None:
    name = mcp_meta(spec).get("name")
    return name if isinstance(name, str) and TOOL_NAME.fullmatch(name) else None


def mcp_meta(spec: OperationSpec) -> Mapping[str, Any]:
    """Return what `meta["mcp"]` asks for when the operation is served over MCP."""
    meta = spec.meta.get("mcp")
    return cast("JSONObject", meta) if isinstance(meta, Mapping) else {}
