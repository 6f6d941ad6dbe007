"""What an operation is called as a tool.

Rule 1: a name depends on the operation's id alone, as long as no two operations want the same one; then both carry
        a hash of their ids. So a name a client has learnt stays true.
Rule 2: no operation takes a name that is reserved for the gateway's tools.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from hashlib import sha256
from typing import Any, Final, Literal, TypeAlias, cast

from operations.specs import OperationSpec

NameStyle: TypeAlias = Literal["full", "short"]
"""`full`: `[A-Za-z0-9_.-]{1,128}`, as the protocol allows. `short`: `[A-Za-z0-9_-]{1,64}`, as every model takes."""

_LIMIT: Final = {"full": 128, "short": 64}
_OTHER: Final = {"full": re.compile(r"[^A-Za-z0-9_.-]"), "short": re.compile(r"[^A-Za-z0-9_-]")}
_HASH = 8


def tool_names(
    specs: Iterable[OperationSpec], style: NameStyle, *, reserved: Collection[str] = ()
) -> dict[str, OperationSpec]:
    """Every operation by a name of its own."""
    wanted = [(spec, _fitted(wish(spec), spec.id, style)) for spec in specs]
    count = Counter(name for _, name in wanted)
    return {
        _hashed(name, spec.id, style) if count[name] > 1 or name in reserved else name: spec
        for spec, name in wanted
    }


def wish(spec: OperationSpec) -> str:
    """The name in `meta["mcp"]["name"]`, or the operation's id."""
    name = mcp_meta(spec).get("name")
    return name if isinstance(name, str) and name else spec.id


def mcp_meta(spec: OperationSpec) -> Mapping[str, Any]:
    """What `meta["mcp"]` says about serving an operation."""
    meta = spec.meta.get("mcp")
    return cast("Mapping[str, Any]", meta) if isinstance(meta, Mapping) else {}


def _fitted(name: str, operation_id: str, style: NameStyle) -> str:
    fitted = _OTHER[style].sub("_", name)
    return fitted if len(fitted) <= _LIMIT[style] else _hashed(fitted, operation_id, style)


def _hashed(name: str, operation_id: str, style: NameStyle) -> str:
    digest = sha256(operation_id.encode()).hexdigest()[:_HASH]
    return f"{name[: _LIMIT[style] - _HASH - 1]}_{digest}"
