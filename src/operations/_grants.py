"""A grant: an identity narrowed for an agent, as a chain of blocks.

    opg1.<subject>.<block>...<signature>

Rule 1: a call is allowed only if every block allows it, so adding a block can only narrow.
Rule 2: each block is signed with the signature before it. Any holder can add a block without the key, and no holder can
        remove or change one.
Rule 3: a grant gives nothing: the access of its subject is checked first.
Rule 4: fail closed: a token or schema that cannot be read, and a broken clock, reject the call.
"""

import hmac
import re
from base64 import b64decode, urlsafe_b64encode
from collections.abc import Callable, Collection, Mapping
from fnmatch import translate
from functools import cached_property, lru_cache
from hashlib import sha256
from math import inf
from secrets import token_hex
from time import time
from typing import Annotated, Any, Final, TypeAlias, TypedDict, Unpack

import msgspec
from msgspec import Meta

from operations.errors import OperationsError
from operations.schema import from_schema
from operations.types import JSONObject

PREFIX: Final = "opg1."
"""The beginning of every token."""

_MIN_KEY = 32
MAX_TOKEN: Final = 8 * 1024
MAX_BLOCKS: Final = 16
_MAX_RULES = 1_000
"""Operations whose rules one grant remembers."""

APPROVALS: Final = "approvals."
"""Operations that a grant covers only by a pattern that begins so: `*` lets no agent answer for a person."""

Pattern: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]
Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]


class GrantError(OperationsError, ValueError):
    """A grant cannot be read, or is not valid. The text never contains the token."""


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


class Block(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
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


class Origin(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """The caller's own grant, as presented to the hub that minted a grant for one of its calls."""

    operation: str
    """The operation that was called: the hub has already approved and counted that call."""

    acting: tuple[str, ...] = ()

    keys: tuple[str, ...] = ()
    """The keys of the blocks of the caller's grant."""

    approve: tuple[Pattern, ...] = ()
    budgets: tuple[tuple[str, Pattern, int], ...] = ()
    """Counters, the pattern of the operations that each counts, and the number of calls that it allows."""


class Subject(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Whose authority a grant narrows."""

    id: Name

    scopes: tuple[str, ...] | None = None
    """Its scopes; None: those that it has where the grant is used."""

    resources: dict[str, tuple[str, ...]] | None = None
    acting: tuple[str, ...] = ()

    origin: Origin | None = None
    """Set if a hub minted the grant for a call."""


class Rules(msgspec.Struct, frozen=True):
    """The requirements of a grant for calls to one operation."""

    is_covered: bool
    """Whether every block covers the operation."""

    accepts: tuple[Callable[[Any], bool], ...]
    """Checks of the input, all of which must hold."""

    budgets: tuple[tuple[str, int], ...]
    """Counters, and the number of calls that each allows."""

    approve: bool
    """Whether a person must approve the call."""


class Grant(msgspec.Struct, frozen=True, kw_only=True, dict=True):
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
    def budgets(self) -> tuple[tuple[str, str, int], ...]:
        """Counters, the pattern of the operations that each counts, and the number of calls that it allows."""
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
    def _rules(self) -> dict[str, Rules]:
        return {}

    @cached_property
    def schemas(self) -> tuple[tuple[str, Callable[[Any], bool]], ...]:
        """Checks of inputs, by pattern; a schema that cannot be used raises a `ValueError`."""
        return tuple(
            (pattern, from_schema(schema).compile().accepts)
            for block in self.blocks
            for pattern, schema in block.input.items()
        )

    @property
    def presented(self) -> tuple[str, ...]:
        """The keys of the blocks that the caller presented, here or at the hub that called."""
        return self.keys if self.origin is None else self.origin.keys

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

        # The call itself was approved and counted by the hub that passed it on.
        skipped = self.origin if self.origin and self.origin.operation == operation_id else None
        approve = self.approve if skipped is None else self.approve[len(skipped.approve) :]
        budgets = self.budgets if skipped is None else self.budgets[len(skipped.budgets) :]
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


# ------------------------------------------------------------ tokens


class BlockOptions(TypedDict, total=False):
    """The restrictions of a block; see `Block`."""

    operations: Collection[str]
    input: Mapping[str, JSONObject | bool]
    calls: Mapping[str, int]
    approve: Collection[str]

    seconds: float | None
    """How long it is valid."""


def new_block(holder: str, **options: Unpack[BlockOptions]) -> Block:
    """Return a block with a new id; without `operations` it covers all.

    Raises:
        GrantError: Naming the field that is wrong.
    """
    seconds = options.pop("seconds", None)
    until = None if seconds is None else clock() + int(seconds * 1000)
    fields = {"id": token_hex(8), "holder": holder, "until": until, "operations": ["*"], **options}
    try:
        block = msgspec.convert(fields, Block)
        _ = Grant(blocks=(block,), keys=("",)).schemas
    except ValueError as error:
        raise GrantError(f"this grant cannot work: {error}") from error
    return block


def mint(key: bytes, subject: Subject, block: Block) -> str:
    """Return the token of a new grant."""
    text = PREFIX + _encode(subject)
    return _extended(text, hmac.digest(key, text.encode(), "sha256"), block)


def narrow(token: str, block: Block) -> str:
    """Return the token of a narrower grant: no key is needed.

    Raises:
        GrantError: If the token cannot be read.
    """
    _, blocks, signature = _split(token)
    if len(blocks) >= MAX_BLOCKS:
        raise GrantError(f"a grant has at most {MAX_BLOCKS} blocks")
    narrowed = _extended(token.rpartition(".")[0], signature, block)
    if len(narrowed) > MAX_TOKEN:
        raise GrantError(f"a grant has at most {MAX_TOKEN} characters")
    return narrowed


def read_token(token: str) -> tuple[Subject, tuple[Block, ...]]:
    """Return the content of a token, without verifying it.

    Raises:
        GrantError: If it cannot be read.
    """
    subject, blocks, _ = _split(token)
    return _decode(subject, Subject), tuple(_decode(each, Block) for each in blocks)


def verify(token: str, key: bytes) -> tuple[Subject, Grant]:
    """Return the subject and the blocks of a token that was minted with `key`.

    Raises:
        GrantError: If it is not valid.
    """
    subject, blocks, given = _split(token)
    signature = hmac.digest(key, (PREFIX + subject).encode(), "sha256")
    keys: list[str] = []
    for block in blocks:
        signature = hmac.digest(signature, block.encode(), "sha256")
        # A name, not the signature itself: with that, the chain could be extended.
        keys.append(sha256(b"key" + signature).hexdigest()[:32])
    if not hmac.compare_digest(signature, given):
        raise GrantError("a grant whose signature is wrong")
    whose, chain = read_token(token)
    grant = Grant(blocks=chain, keys=tuple(keys), origin=whose.origin)
    try:
        _ = grant.schemas
    except (ValueError, RecursionError) as error:
        raise GrantError(f"a grant that cannot be used: {type(error).__name__}") from error
    return whose, grant


def secret_key(key: str | bytes, purpose: str) -> bytes:
    """Return a key as bytes.

    Raises:
        ValueError: If it is too short.
    """
    found = key.encode() if isinstance(key, str) else key
    if len(found) < _MIN_KEY:
        raise ValueError(f"the key of {purpose} needs at least {_MIN_KEY} bytes")
    return found


def derived_key(key: bytes, name: str) -> bytes:
    """Return the key under which a group of workers or a spoke verifies grants. It never holds the root key."""
    return hmac.digest(key, b"opg1 key of " + name.encode(), "sha256")


def _extended(text: str, signature: bytes, block: Block) -> str:
    segment = _encode(block)
    signature = hmac.digest(signature, segment.encode(), "sha256")
    return f"{text}.{segment}.{_base64(signature)}"


def _split(token: str) -> tuple[str, list[str], bytes]:
    if not token.startswith(PREFIX) or len(token) > MAX_TOKEN or not token.isascii():
        raise GrantError("a grant that cannot be read")
    parts = token.removeprefix(PREFIX).split(".")
    if not 3 <= len(parts) <= MAX_BLOCKS + 2:
        raise GrantError("a grant that cannot be read")
    return parts[0], parts[1:-1], _unbase64(parts[-1])


def _encode(value: Any) -> str:
    return _base64(msgspec.json.encode(value))


def _decode(segment: str, cls: type[Any]) -> Any:
    try:
        return msgspec.json.decode(_unbase64(segment), type=cls)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise GrantError("a grant that cannot be read") from error


def _base64(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode()


def _unbase64(text: str) -> bytes:
    try:
        return b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except ValueError as error:
        raise GrantError("a grant that cannot be read") from error
