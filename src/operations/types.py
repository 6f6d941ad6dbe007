"""The words for JSON that every other module uses. Imports nothing of ours."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

JSON: TypeAlias = dict[str, Any] | list[Any] | str | int | float | bool | None
"""A value made of JSON builtins. (Recursive aliases cost readers and type checkers more than they give.)"""

JSONObject: TypeAlias = dict[str, Any]
"""A JSON object, as decoded: string keys, JSON values."""

JSONSchema: TypeAlias = JSONObject | bool
"""A JSON Schema document: an object, or one of the two trivial schemas."""

ReadOnlyJSON: TypeAlias = (
    Mapping[str, "ReadOnlyJSON"] | Sequence["ReadOnlyJSON"] | str | int | float | bool | None
)
"""JSON that a function promises not to alter."""
