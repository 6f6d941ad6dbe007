"""Names of operations: as tools in MCP listings and exports, and made from names that others chose.

Rule 1: a name depends on the operation id alone, so it stays the same while other operations come and go.
Rule 2: no two ids have the same name. A name with `__` is the id with `.` for each `__`; all others contain a hash
        and no `__`.
"""

import re
from hashlib import sha256
from typing import Final, Literal, TypeAlias

NameStyle: TypeAlias = Literal["portable", "dotted"]
"""`portable`: `[A-Za-z0-9_-]{1,64}`, which every model accepts. `dotted`: the id itself, as MCP allows."""

Disclosure: TypeAlias = Literal["auto", "tools", "gateway"]
"""List all operations as tools, the four gateway tools instead, or whichever fits (`auto`)."""

TOOL_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""What every model accepts as the name of a tool."""

_DOTTED: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9_.-]")
_LONGEST_NAME: Final = 256
_HASH: Final = 8
_LONGEST: Final = 64


def tool_name(operation_id: str, style: NameStyle = "portable") -> str:
    """Return the name of an operation as a tool.

    `portable` writes `__` for `.`, and appends a hash if that is too long or does not lead back to the id: because
    the id contains `__`, `_.` or characters that a name may not have. `dotted` is the id, unless MCP forbids it.
    """
    if style == "dotted" and _DOTTED.fullmatch(operation_id):
        return operation_id
    name = operation_id.replace(".", "__")
    if TOOL_NAME.fullmatch(name) and name.replace("__", ".") == operation_id != name:
        return name
    digest = sha256(operation_id.encode()).hexdigest()[:_HASH]
    words = re.sub(r"[^A-Za-z0-9-]+", "_", operation_id)[: _LONGEST - _HASH - 1]
    return f"{words.rstrip('_')}_{digest}"


def safe_name(name: str) -> str:
    """Return `name` as the name of an operation: what is not a letter, digit, `_`, `-` or `.` becomes `_`.

    Raises:
        ValueError: If it is empty, too long, or holds characters that cannot be seen.
    """
    if not name or len(name) > _LONGEST_NAME:
        raise ValueError(f"its name has {len(name)} characters")
    if not name.isprintable():
        raise ValueError("its name holds characters that cannot be seen")
    return _UNSAFE.sub("_", name)


def safe_namespace(name: str) -> str:
    """Return `name` as a namespace.

    Raises:
        ValueError: As `safe_name`.
    """
    return safe_name(name)[:128].replace(".", "_")
