"""The results of checks and casts, as data."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import msgspec

from operations._text import SUGGESTS
from operations.errors import CallError
from operations.types import Count


class ValidationIssue(msgspec.Struct, frozen=True, rename="camel"):
    """One failure of one value."""

    path: str
    """JSON pointer to the failing place; empty for the value itself."""

    message: str
    """The problem, as a phrase that follows the path: `is required`, `must be a string, not null`."""

    keyword: str
    """The JSON Schema keyword that failed; `json` where the value is not JSON at all."""


def misfit(code: str, sentence: str, issues: Sequence[ValidationIssue]) -> CallError:
    """Return the error for a value that does not fit. Its message names the first issue, its details all of them."""
    # A misspelt name explains more than the missing one that it was meant to be.
    issues = sorted(issues, key=lambda issue: SUGGESTS not in issue.message)
    first, more = issues[0], f" (and {len(issues) - 1} more)" if len(issues) > 1 else ""
    return CallError(
        code,
        f"{sentence}: {first.path or 'it'} {first.message}{more}",
        {"errors": msgspec.to_builtins(issues)},
    )


ChangeKind: TypeAlias = Literal[
    "stripped", "filled", "converted", "created", "replaced", "mismatch", "input"
]
"""The kinds of changes by normalisation:

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

MAX_PATH = 400
"""Characters of a change's path: property names come from third parties."""


class Change(msgspec.Struct, frozen=True, rename="camel", gc=False):
    """One kind of change at one location of the schema, however many values it affected."""

    path: Annotated[str, msgspec.Meta(max_length=MAX_PATH)]
    """JSON pointer to the first affected value; empty for the whole value."""

    kind: ChangeKind

    count: Count = 1
    """Number of affected values."""

    message: Annotated[str, msgspec.Meta(max_length=MAX_MESSAGE)] = ""
    """Describes the first of them, worded to follow the path."""


class CastResult(NamedTuple):
    """A normalised value, and what changed."""

    value: Any

    changes: list[Change]
    """Every change, mismatches first."""
