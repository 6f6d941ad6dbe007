"""Grants as data: blocks that narrow what an identity may call.

Rule 1: any holder can add a block, without a key. The size of a block is therefore limited, and its schemas are checked
        within a budget of work, beyond which the call is rejected.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from math import inf
from typing import Annotated, Any, Final, Protocol, TypeAlias

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from operations.base.attached import Attached
from operations.base.clock import is_over
from operations.base.errors import CallError, ErrorCode
from operations.base.patterns import Patterns
from operations.base.text import printable
from operations.base.types import JSONObject
from operations.schema.work import (
    CountedSchema,
    TooMuchWorkError,
    Work,
    count_schemas,
    patterns_weight,
)

# ------------------------------------------------------------ grants

_MIN_KEY = 32

MAX_PATTERNS: Final = 256
"""The largest number of patterns of operations in one block."""

MAX_BLOCK_BYTES: Final = 16 * 1024
"""The largest size of one block, as JSON."""

MAX_SUBSCHEMAS: Final = 500
"""The largest number of schemas in one block, including those inside others. Compiling takes about 20 µs for each."""

MAX_EXPRESSIONS: Final = 3_000
"""The largest length of the regular expressions in the schemas of a grant, with their repetitions expanded. Compiling
takes up to 20 µs for each character."""

_MAX_RULES = 1_000
"""Operations whose rules one grant caches."""

Pattern: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]
Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]
Budget: TypeAlias = tuple[str, Pattern, int]
"""A counter, the pattern of the operations that it counts, and the number of calls that it allows."""


def secret_key(key: str | bytes, purpose: str) -> bytes:
    """Return a key as bytes.

    Raises:
        ValueError: If it is too short.
    """
    found = key.encode() if isinstance(key, str) else key
    if len(found) < _MIN_KEY:
        raise ValueError(f"the key of {purpose} needs at least {_MIN_KEY} bytes")
    return found


def secret_keys(keys: str | bytes | Sequence[str | bytes], purpose: str) -> list[bytes]:
    """Return one key or several as bytes.

    Raises:
        ValueError: If one is too short, or there is none.
    """
    given = [keys] if isinstance(keys, (str, bytes)) else list(keys)
    if not given:
        raise ValueError(f"{purpose} needs at least one key")
    return [secret_key(key, purpose) for key in given]


class TokenPart(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A part of a token."""


class BlockLimitError(ValueError):
    """A block is too large. Its holder sees the text."""


class Block(TokenPart, frozen=True, kw_only=True):
    """One step of a delegation: the limits of its holder."""

    id: Name
    """Revoking this id revokes every grant that contains the block."""

    holder: Name
    """The agent that uses the grant."""

    operations: tuple[Pattern, ...]
    """Patterns of the operations that the block covers."""

    input: dict[Pattern, JSONObject | bool] = {}
    """JSON Schemas that the input must satisfy, by pattern."""

    calls: dict[Pattern, Annotated[int, Meta(ge=0)]] = {}
    """The total number of calls that the block allows, by pattern."""

    until: int | None = None
    """When the block expires, in milliseconds since the epoch."""

    approve: tuple[Pattern, ...] = ()
    """Patterns of the operations whose calls a person must approve."""

    def __post_init__(self) -> None:
        patterns = len(self.operations) + len(self.input) + len(self.calls) + len(self.approve)
        if patterns > MAX_PATTERNS:
            raise BlockLimitError(
                f"a block of a grant has at most {MAX_PATTERNS} patterns, and this one {patterns:,}: use patterns that "
                "match several operations"
            )
        # A block without schemas is smaller than its patterns may be together.
        size = len(msgspec.json.encode(self)) if patterns > 1 or self.input else 0
        if size > MAX_BLOCK_BYTES:
            raise BlockLimitError(
                f"a block of a grant has at most {MAX_BLOCK_BYTES:,} bytes, and this one {size:,}: shorten its schemas "
                "and patterns"
            )


class GrantOrigin(TokenPart, frozen=True, kw_only=True):
    """The caller's own grant, as presented to the hub that minted a grant for one of its calls."""

    operation: str
    """The operation that was called: the hub has already approved and counted that call. Empty for further calls."""

    acting: tuple[str, ...] = ()

    keys: tuple[str, ...] = ()
    """The keys of the blocks of the caller's grant."""

    approve: tuple[Pattern, ...] = ()
    budgets: tuple[Budget, ...] = ()

    prefix: str = ""
    """The prefix of the receiver's ids at the hub, where `approve` and `budgets` name operations by their ids."""

    authority: str | None = None
    """The operation of the hub on whose authority the call runs; None if it runs as the caller."""


Complete: TypeAlias = Callable[[Any], Any]
"""Returns an input with the defaults of everything that it omits; the input itself if there are none."""


class Rules(Struct, frozen=True):
    """The requirements of a grant for calls to one operation, besides that it covers the operation."""

    accepts: tuple["InputRule", ...]
    """Checks of the input, all of which must hold."""

    budgets: tuple[tuple[str, int], ...]
    """Counters, and the number of calls that each allows."""

    approve: bool
    """Whether a person must approve the call."""


class Issuer(Protocol):
    """Knows which blocks of its grants were revoked."""

    def is_valid(self, grant: "Grant") -> bool:
        """Return whether no block was revoked; False if revocations must be read again to know this."""
        ...

    def has_revoked(self, grant: "Grant") -> bool:
        """Return whether a block is known to be revoked, without reading revocations."""
        ...

    async def is_revoked(self, grant: "Grant") -> bool:
        """Return whether a block was revoked, as of a few seconds ago at most."""
        ...


_ISSUER: Attached[Issuer] = Attached("_issuer")


class Grant(Struct, frozen=True, kw_only=True, dict=True):
    """A verified chain of blocks."""

    blocks: tuple[Block, ...]

    keys: tuple[str, ...]
    """A unique name for each block, which its holder cannot choose."""

    origin: GrantOrigin | None = None

    @property
    def issuer(self) -> Issuer | None:
        """The issuer, attached by `issued_by`; no field, because it is never sent to another process."""
        return _ISSUER.of(self)

    def issued_by(self, issuer: Issuer) -> "Grant":
        """Return the grant with its issuer, which every call with it asks for revocations."""
        return self if self.issuer is issuer else _ISSUER.to(self, issuer)

    @cached_property
    def until(self) -> float:
        """When the first block expires, in milliseconds since the epoch."""
        return min((each.until for each in self.blocks if each.until is not None), default=inf)

    @property
    def has_ended(self) -> bool:
        """Whether a block has expired, or is known to be revoked."""
        is_revoked = self.issuer is not None and self.issuer.has_revoked(self)
        return is_revoked or (self.until != inf and is_over(self.until))

    @cached_property
    def approve(self) -> tuple[str, ...]:
        """Patterns of the operations whose calls a person must approve."""
        passed_on = () if self.origin is None else self.origin.approve
        return (*passed_on, *(pattern for block in self.blocks for pattern in block.approve))

    @cached_property
    def budgets(self) -> tuple[Budget, ...]:
        """The limits on the number of calls. The name of a counter begins with the blocks whose holders derived it."""
        above, budgets = (
            ((), ()) if self.origin is None else (self.origin.keys, self.origin.budgets)
        )
        keys = (*above, *self.keys)
        for index, block in enumerate(self.blocks, len(above)):
            name = "/".join((*(key[:12] for key in keys[1:index]), keys[index]))
            own = ((f"{name}:{pattern}", pattern, most) for pattern, most in block.calls.items())
            budgets = (*budgets, *own)
        return budgets

    @cached_property
    def is_limited(self) -> bool:
        """Whether the grant limits the number of calls, or requires approval for some."""
        return bool(self.approve or self.budgets)

    @cached_property
    def weight(self) -> int:
        """The size of the schemas: their number, and the length of their regular expressions.

        Raises:
            ValueError: If a schema cannot be used, or is too large.
        """
        schemas = expressions = 0
        for block in self.blocks:
            own = sum(map(count_schemas, block.input.values()))
            if own > MAX_SUBSCHEMAS:
                raise BlockLimitError(
                    f"the input of one block of a grant has at most {MAX_SUBSCHEMAS} schemas, with those inside "
                    f"others, and that of {printable(block.holder)} {own:,}: restrict fewer operations or parameters"
                )
            expressions += sum(map(patterns_weight, block.input.values()))
            if expressions > MAX_EXPRESSIONS:
                raise BlockLimitError(
                    f"the regular expressions in the schemas of a grant have at most {MAX_EXPRESSIONS:,} characters, "
                    f"with expanded repetitions, and up to those of {printable(block.holder)} {expressions:,}: a class "
                    "such as \\w makes each count 20 times, and look-around 5 times"
                )
            schemas += own
        _ = self.schemas
        return schemas + expressions

    @cached_property
    def schemas(self) -> tuple[tuple[str, "InputRule"], ...]:
        """Checks of inputs, by pattern; a schema that cannot be used raises a `ValueError`."""
        return tuple(
            (pattern, InputRule(block, schema))
            for block in self.blocks
            for pattern, schema in block.input.items()
        )

    @cached_property
    def further(self) -> "Grant":
        """The grant for calls that a handler makes. A grant that a hub minted covers one call and no further ones."""
        origin = self.origin
        if origin is None or not origin.operation:
            return self
        grant = Grant(
            blocks=tuple(replace(block, operations=()) for block in self.blocks),
            keys=self.keys,
            origin=replace(origin, operation="", authority=None),
        )
        return grant if self.issuer is None else grant.issued_by(self.issuer)

    @cached_property
    def _rules(self) -> dict[str, Rules]:
        return {}

    @cached_property
    def _covered(self) -> dict[str, bool]:
        return {}

    @cached_property
    def _operations(self) -> tuple[Patterns, ...]:
        """The operations of each block."""
        return tuple(Patterns(block.operations) for block in self.blocks)

    @cached_property
    def _limits(self) -> tuple[Patterns, Patterns]:
        """All other patterns: those of input schemas, and those of approvals and budgets."""
        counted = (pattern for _, pattern, _ in self.budgets)
        return Patterns(pattern for pattern, _ in self.schemas), Patterns((*self.approve, *counted))

    def covers(self, operation_id: str, *, authority: bool) -> bool:
        """Return whether every block covers an operation, and none has ended. Never raises.

        Args:
            operation_id: The id of the operation.
            authority: Whether the operation administers authority: then a block covers it by its exact id only.
        """
        try:
            return not self.has_ended and self._is_covered(operation_id, authority=authority)
        except Exception:  # noqa: BLE001 - fail closed
            return False

    def _is_covered(self, operation_id: str, *, authority: bool) -> bool:
        if authority:
            return all(operation_id in each.ids for each in self._operations)
        found = self._covered.get(operation_id)
        if found is None:
            found = all(each.cover(operation_id) for each in self._operations)
            if len(self._covered) < _MAX_RULES:
                self._covered[operation_id] = found
        return found

    def accepts(
        self, operation_id: str, value: Any, complete: Complete, *, authority: bool
    ) -> bool:
        """Return whether every block covers an operation with this input; False if that cannot be checked.

        Raises:
            CallError: `ACCESS_DENIED` if the schemas and the input are so large that the check would take too long.
        """
        try:
            if not self._is_covered(operation_id, authority=authority):
                return False
            rules = self.rules(operation_id).accepts
            # The handler uses the defaults of parameters and properties that the caller omits.
            filled, work = complete(value) if rules else value, Work()
            for rule in rules:
                try:
                    if not rule.accepts(value, filled, work):
                        return False
                except (TooMuchWorkError, RecursionError):
                    error = rule.too_much_work(operation_id)
                    break
            else:
                return True
        except Exception:  # noqa: BLE001 - fail closed
            return False
        raise error

    def is_enough(
        self, operation_id: str, value: Any, complete: Complete, *, authority: bool
    ) -> bool:
        """Return whether a call is allowed, and the grant requires no further step for it.

        Raises:
            CallError: As `accepts`.
        """
        return (
            not self.is_limited
            and self.origin is None
            and self.accepts(operation_id, value, complete, authority=authority)
            and (self.issuer is None or self.issuer.is_valid(self))
        )

    def rules(self, operation_id: str) -> Rules:
        """Return the requirements of this grant for a call. They also apply to operations that need no grant.

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
        origin, approve, budgets = self.origin, self.approve, self.budgets
        if origin is not None and origin.operation == operation_id:
            # The hub that forwarded the call has already approved and counted it.
            approve, budgets = approve[len(origin.approve) :], budgets[len(origin.budgets) :]
        # Limits also name it as the hub does, which may have imported it into a namespace.
        there = () if origin is None else (origin.prefix + operation_id,)
        inputs, limits = self._limits
        checked, limited = inputs.matching(operation_id), limits.matching(operation_id, *there)
        return Rules(
            tuple(check for pattern, check in self.schemas if pattern in checked),
            tuple((counter, most) for counter, each, most in budgets if each in limited),
            not limited.isdisjoint(approve),
        )


class InputRule:
    """A schema of a block, which the input of some operations must satisfy.

    Args:
        block: The block.
        schema: The schema.

    Raises:
        SchemaError: If the schema cannot be used.
    """

    def __init__(self, block: Block, schema: JSONObject | bool) -> None:
        self._block = block
        self._schema = CountedSchema(schema)

    def accepts(self, value: Any, filled: Any, work: Work) -> bool:
        """Return whether the schema accepts an input, also with the defaults in `filled` that it restricts.

        Raises:
            TooMuchWorkError: If this would cost more than what is left of the budget.
        """
        if not self._schema.accepts(value, work):
            return False
        if filled is value:
            return True
        whole = self._schema.with_defaults(value, filled, work)
        return whole is value or self._schema.accepts(whole, work)

    def too_much_work(self, operation_id: str) -> CallError:
        """Return the error for a call whose check would take too long."""
        block = self._block
        named = f"block {printable(block.id)} of {printable(block.holder)}"
        message = (
            f"Access denied: {operation_id}: checking this input against the schemas of the grant takes too much work, "
            f"at {named}. Send a smaller input, or use a grant with smaller schemas"
        )
        error = CallError(ErrorCode.ACCESS_DENIED, message, {"block": block.id})
        error.operation_id = operation_id
        return error
