"""The words for JSON and for numbers that every other module uses. Imports nothing of ours."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeAlias

from msgspec import Meta

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

Seconds: TypeAlias = Annotated[float, Meta(gt=0)]
"""A time span; files and command lines check that it is positive."""

Count: TypeAlias = Annotated[int, Meta(ge=1)]
"""How many or how much of something; files check that it is at least 1."""

Names: TypeAlias = tuple[str, ...]
