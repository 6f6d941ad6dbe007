"""Follow `$ref`s and JSON pointers through JSON of unknown shape. Nothing is ever fetched.

Rule: every other module that follows a reference does it with these functions. The meaning of a reference (dialects and
`$id` in `schema.reading`, files and component names in `openapi.reading`) is added there.
"""

from collections.abc import Iterator
from typing import Any

from operations._json import escape, is_list, is_object, object_of, unescape
from operations.types import JSONObject

MAX_HOPS = 32
"""How many references may refer to one another in a row."""


def steps(value: Any, pointer: str) -> list[tuple[str, Any]] | None:
    """Return each place that a JSON pointer passes, as a pointer, with its value; None if it leads nowhere.

    The last one is the target; the list is empty for the empty pointer.
    """
    found: list[tuple[str, Any]] = []
    place = ""
    for token in pointer.split("/")[1:]:
        name = unescape(token)
        if is_object(value) and name in value:
            value = value[name]
            place += "/" + escape(name)
        elif is_list(value) and _is_index(name) and int(name) < len(value):
            value = value[int(name)]
            place += f"/{int(name)}"
        else:
            return None
        found.append((place, value))
    return found


def _is_index(name: str) -> bool:
    return name.isascii() and name.isdecimal() and len(name) < 10


def target_of(ref: str, root: Any) -> Any:
    """Return the value that a `#/...` reference refers to; None if it leads nowhere."""
    found = steps(root, ref[1:]) if ref.startswith("#") else None
    return None if found is None else found[-1][1] if found else root


def reference_of(node: Any) -> str | None:
    """Return what `node` refers to; None if it is not a reference."""
    ref = node.get("$ref") if is_object(node) else None
    return ref if isinstance(ref, str) else None


def followed(schema: Any, root: Any) -> tuple[JSONObject, list[str]]:
    """Return the schema at the end of a chain of `#/...` references, and the references passed.

    Keywords beside a reference are added to those of its target, and win. A reference that leads nowhere adds nothing.
    """
    here = object_of(schema)
    passed: list[str] = []
    while (ref := reference_of(here)) is not None and len(passed) < MAX_HOPS:
        passed.append(ref)
        here = object_of(target_of(ref, root)) | {
            key: value for key, value in here.items() if key != "$ref"
        }
    return here, passed


def objects_in(value: Any) -> Iterator[JSONObject]:
    """Yield `value` and everything in it that is an object, in the order of the document."""
    stack = [value]
    while stack:
        node = stack.pop()
        if is_object(node):
            yield node
            stack.extend(reversed(node.values()))
        elif is_list(node):
            stack.extend(reversed(node))
