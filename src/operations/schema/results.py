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


ChangeKind: TypeAlias = Literal[
    "stripped", "filled", "converted", "created", "replaced", "mismatch", "input"
]
"""What normalisation did:

- `stripped`: removed properties that the schema does not declare
- `filled`: added declared defaults
- `converted`: wrote values as another type without loss
- `created`: added values that the schema requires and does not declare a default for (policy `create`)
- `replaced`: put another value in the place of one that does not fit (policy `create`)
- `mismatch`: left a value unchanged that does not fit the schema
- `input`: changed the input of the call
"""

MAX_MESSAGE = 200
"""Characters of a change's message."""


class Change(msgspec.Struct, frozen=True, rename="camel", gc=False):
    """One kind of change at one location of the schema, however many values it affected."""

    path: str
    """JSON pointer to the first affected value; empty for the whole value."""

    kind: ChangeKind

    count: int = 1
    """Number of affected values."""

    message: str = ""
    """Describes the first of them, worded to follow the path; at most `MAX_MESSAGE` characters."""


class CastResult(NamedTuple):
    """A normalised value, and what changed."""

    value: Any

    changes: list[Change]
    """Every change, mismatches first."""
