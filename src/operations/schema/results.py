"""What a check and a cast have to say, as data."""

from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec


class ValueFault(msgspec.Struct, frozen=True, rename="camel"):
    """One failure of one value."""

    path: str
    """JSON pointer to the failing place; empty for the value itself."""

    message: str
    """What is wrong there, worded to follow the path: `is required`, `must be a string, not null`."""

    keyword: str
    """The JSON Schema keyword that failed; `json` where the value is not JSON at all."""


Kind: TypeAlias = Literal["converted", "replaced", "created"]
"""Written differently without loss; exchanged for something else; made where nothing was."""


class Repair(msgspec.Struct, frozen=True):
    """One change a cast made to fit the schema. Stripping and declared defaults are none."""

    path: str
    """JSON pointer to the place in the result; empty for the value itself."""

    kind: Kind

    message: str
    """What was done, worded to follow the path: `is now 42, converted from a string`."""


class CastResult(NamedTuple):
    """A value made to fit its schema, and what that took."""

    value: Any
    repairs: list[Repair]
