"""What a grant allows: an identity narrowed for an agent, as a chain of blocks. `authority.grants` has the tokens.

Rule 1: a call is allowed only if every block allows it, so adding a block can only narrow.
Rule 2: a grant gives nothing: the access of its subject is checked first.
Rule 3: fail closed: a schema that cannot be read and a broken clock reject the call.
"""

import re
from collections.abc import Callable
from fnmatch import translate
from functools import cached_property, lru_cache
from math import inf
from time import time
from typing import Annotated, Any, Final, TypeAlias

from msgspec import Meta, Struct

from operations.schema import from_schema
from operations.types import JSONObject

_MIN_KEY = 32
_MAX_RULES = 1_000
"""Operations whose rules one grant remembers."""

APPROVALS: Final = "approvals."
"""Operations that a grant covers only by a pattern that begins so: `*` lets no agent answer for a person."""

Pattern: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]
Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]
Budget: TypeAlias = tuple[str, Pattern, int]
"""A counter, the pattern of the operations that it counts, and the number of calls that it allows."""


@lru_cache(maxsize=1024)
def matcher(patterns: tuple[str, ...]) -> Callable[[str], bool]:
    """Return whether an operation id matches one of the patterns, such as `price.*`."""
    match = re.compile("|".join(map(translate, patterns)) or r"(?!)").match
    return lambda operation_id: match(operation_id) is not None


_latest = 1_735_689_600_000
"""The latest time that was seen, in milliseconds; at first the beginning of 2025."""


def clock() -> int:
    """Return the time in milliseconds since the epoch. It never goes back, so an expired grant stays expired."""
    global _latest  # noqa: PLW0603
    now = int(time() * 1000)
    if now > _latest:
        _latest = now
    return _latest


def secret_key(key: str | bytes, purpose: str) -> bytes:
    """Return a key as bytes.

    Raises:
        ValueError: If it is too short.
    """
    found = key.encode() if isinstance(key, str) else key
    if len(found) < _MIN_KEY:
        raise ValueError(f"the key of {purpose} needs at least {_MIN_KEY} bytes")
    return found


class _Part(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A part of a token."""


class Block(_Part, frozen=True, kw_only=True):
    """One step of a delegation: the most that its holder may do."""

    id: Name
    """Revoking it revokes every grant that contains this block."""

    holder: Name
    """The agent that acts with it."""

    operations: tuple[Pattern, ...]
    """Patterns of the operations that it covers."""

    input: dict[Pattern, JSONObject | bool] = {}
    """JSON Schemas that the input must satisfy, by pattern."""

    calls: dict[Pattern, Annotated[int, Meta(ge=0)]] = {}
    """How many calls it allows in total, by pattern."""

    until: int | None = None
    """When it expires, in milliseconds since the epoch."""

    approve: tuple[Pattern, ...] = ()
    """Patterns of the operations whose calls a person must approve."""


class Origin(_Part, frozen=True, kw_only=True):
    """The caller's own grant, as presented to the hub that minted a grant for one of its calls."""

    operation: str
    """The operation that was called: the hub has already approved and counted that call."""

    acting: tuple[str, ...] = ()

    keys: tuple[str, ...] = ()
    """The keys of the blocks of the caller's grant."""

    approve: tuple[Pattern, ...] = ()
    budgets: tuple[Budget, ...] = ()


class Subject(_Part, frozen=True, kw_only=True):
    """Whose authority a grant narrows."""

    id: Name

    scopes: tuple[str, ...] | None = None
    """Its scopes; None: those that it has where the grant is used."""

    resources: dict[str, tuple[str, ...]] | None = None
    acting: tuple[str, ...] = ()

    origin: Origin | None = None
    """Set if a hub minted the grant for a call."""


class Rules(Struct, frozen=True):
    """The requirements of a grant for calls to one operation."""

    is_covered: bool
    """Whether every block covers the operation."""

    accepts: tuple[Callable[[Any], bool], ...]
    """Checks of the input, all of which must hold."""

    budgets: tuple[tuple[str, int], ...]
    """Counters, and the number of calls that each allows."""

    approve: bool
    """Whether a person must approve the call."""


class Grant(Struct, frozen=True, kw_only=True, dict=True):
    """A chain of blocks that was verified."""

    blocks: tuple[Block, ...]

    keys: tuple[str, ...]
    """A name for each block that no holder can choose."""

    origin: Origin | None = None

    @cached_property
    def until(self) -> float:
        """When the first of its blocks expires, in milliseconds since the epoch."""
        return min((each.until for each in self.blocks if each.until is not None), default=inf)

    @cached_property
    def approve(self) -> tuple[str, ...]:
        """Patterns of the operations whose calls a person must approve."""
        passed_on = () if self.origin is None else self.origin.approve
        return (*passed_on, *(pattern for block in self.blocks for pattern in block.approve))

    @cached_property
    def budgets(self) -> tuple[Budget, ...]:
        """The limits on the number of calls."""
        passed_on = () if self.origin is None else self.origin.budgets
        own = (
            (f"{key}:{pattern}", pattern, most)
            for block, key in zip(self.blocks, self.keys, strict=True)
            for pattern, most in block.calls.items()
        )
        return (*passed_on, *own)

    @cached_property
    def is_limited(self) -> bool:
        """Whether some calls count, or need approval."""
        return bool(self.approve or self.budgets)

    @cached_property
    def schemas(self) -> tuple[tuple[str, Callable[[Any], bool]], ...]:
        """Checks of inputs, by pattern; a schema that cannot be used raises a `ValueError`."""
        return tuple(
            (pattern, from_schema(schema).compile().accepts)
            for block in self.blocks
            for pattern, schema in block.input.items()
        )

    @cached_property
    def _rules(self) -> dict[str, Rules]:
        return {}

    def covers(self, operation_id: str) -> bool:
        """Return whether every block covers an operation, and none has expired. Never raises."""
        try:
            return clock() < self.until and self.rules(operation_id).is_covered
        except Exception:  # noqa: BLE001 - fail closed
            return False

    def accepts(self, operation_id: str, value: Any) -> bool:
        """Return whether every block covers an operation with this input. Never raises."""
        try:
            rules = self.rules(operation_id)
            return rules.is_covered and all(accepts(value) for accepts in rules.accepts)
        except Exception:  # noqa: BLE001 - fail closed
            return False

    def rules(self, operation_id: str) -> Rules:
        """Return the requirements of this grant for a call; limits also apply to operations that it need not cover.

        Raises:
            SchemaError: If a schema cannot be used.
        """
        found = self._rules.get(operation_id)
        if found is None:
            found = self._find(operation_id)
            if len(self._rules) < _MAX_RULES:
                self._rules[operation_id] = found
        return found

    def _find(self, operation_id: str) -> Rules:
        def matches(pattern: str) -> bool:
            return matcher((pattern,))(operation_id)

        origin, approve, budgets = self.origin, self.approve, self.budgets
        if origin is not None and origin.operation == operation_id:
            # The call itself was approved and counted by the hub that passed it on.
            approve, budgets = approve[len(origin.approve) :], budgets[len(origin.budgets) :]
        prefix = APPROVALS if operation_id.startswith(APPROVALS) else ""
        return Rules(
            all(
                any(each.startswith(prefix) and matches(each) for each in block.operations)
                for block in self.blocks
            ),
            tuple(check for pattern, check in self.schemas if matches(pattern)),
            tuple((counter, most) for counter, pattern, most in budgets if matches(pattern)),
            any(map(matches, approve)),
        )
