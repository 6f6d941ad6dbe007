"""The queue of requests for approval in a store, in small records that people can list.

Rule 1: an input of more than `SHORT` bytes is a value of its own, so that listing reads, decodes and returns little.
Rule 2: such a value exists only while the record of its request does: it is written afterwards, and removed before.
Rule 3: the number and the bytes of open requests are limited for each owner and in total. An owner gets at most half of
        what the others leave, so that several owners cannot take all.
"""

from collections.abc import Callable
from contextlib import suppress
from math import inf
from operator import attrgetter
from secrets import token_hex
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta
from msgspec.structs import replace

from operations.base.clock import is_over, settled
from operations.base.errors import CallError, ErrorCode
from operations.base.text import counted
from operations.base.types import JSONObject
from operations.store.contract import StoreError
from operations.store.state import LoopLocks, Store

SCOPE: Final = "approvals:answer"
"""The scope for listing and answering approvals; a rule may require an additional scope."""

SHORT: Final = 1_000
"""The largest input that a record and a list contain, in bytes."""

MAX_OPEN = 100
"""The largest number of open requests of one caller, or of the holders of one grant."""

MAX_OPEN_BYTES = 4 * 1024 * 1024
"""The largest total size of the inputs of the open requests of one caller or grant."""

MAX_ALL = 1_000
"""The largest number of open requests of all callers."""

MAX_ALL_BYTES = 64 * 1024 * 1024
"""The largest total size of the inputs of all open requests."""

MAX_RECORDS = 2_000
"""The number of records from which used ones are removed early."""

PAGE: Final = 50
MAX_PAGE: Final = 100
"""The largest number of requests for approval in one page of a list."""

KEPT: Final = 24 * 3600 * 1000
"""Milliseconds for which an answered request stays in the store after it has expired."""

_MOST_REMOVED = 20
"""The largest number of old records that a new request removes: more than it adds, and few enough to wait for."""

_NEXT = {"pending": ("approved", "denied", "used"), "approved": ("used",)}
"""The states that may follow each state. If a caller confirms its own call, the approval is used at once."""


class Approval(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One request for approval, and its answer."""

    id: str
    state: Literal["pending", "approved", "denied", "used"]
    operation: str

    input: Any = UNSET
    """The input as the handler receives it, with masked secrets. Lists contain only inputs of at most 1,000 bytes;
    `approvals.get` returns every input."""

    generated: tuple[str, ...] = ()
    """JSON pointers to the values of the input that are set when the call runs, and may differ then."""

    size: int
    """The length of the input, as JSON without spaces, and of these pointers, in bytes."""

    caller: str | None = None
    """The caller; None without identity."""

    issuer: str | None = None
    """The issuer of the token that named the caller."""

    is_operator: bool = False
    """Whether the operator made the call, at the command line or in code."""

    acting: tuple[str, ...] = ()
    """The parties that act for the caller, in the order of delegation."""

    grants: tuple[str, ...] = ()
    """The blocks of the grant that the caller presented."""

    scope: str = SCOPE
    created: int
    until: int
    """When the request or the approval expires, in milliseconds since the epoch."""

    answered_by: str | None = None
    reason: str | None = None

    claim: JSONObject | None = None
    """What the author of the call, such as a script, claims about its reason: `by`, and for a script its digest, the
    line of the call, and the calls before it. Shortened, with secrets masked; not part of what is approved."""

    confirmed: bool = False
    """Whether the caller itself confirmed the call, which is not an approval by another person."""

    @property
    def has_ended(self) -> bool:
        """Whether the approval was used or has expired."""
        return self.state == "used" or is_over(self.until)

    @property
    def is_open(self) -> bool:
        """Whether the request counts for the limits: no other person has answered it."""
        is_open = self.state == "pending" or (self.state == "denied" and self.confirmed)
        return is_open and not self.has_ended

    @property
    def owner(self) -> object:
        """The caller and the first block of its grant, from which holders can derive others."""
        return self.caller, self.issuer, self.is_operator, self.grants[:1]


class ApprovalPage(msgspec.Struct, frozen=True, kw_only=True):
    """Some of the requests that wait for approval, the oldest first."""

    approvals: list[Approval]

    total: int
    """The number of requests that wait."""

    next: str | None = None
    """The `after` of the next page; None on the last page."""


class _Summary(msgspec.Struct):
    """The part of a record that decides whether it is on a page."""

    id: str
    state: str
    scope: str
    created: int
    until: int

    @property
    def place(self) -> str:
        return f"{self.created:015}-{self.id}"


_decode = msgspec.json.Decoder(Approval).decode
_decode_summary = msgspec.json.Decoder(_Summary).decode


class _Input(msgspec.Struct):
    """The long part of a request."""

    input: Any
    generated: tuple[str, ...]


_decode_input = msgspec.json.Decoder(_Input).decode

Id: TypeAlias = Annotated[str, Meta(pattern="^[0-9a-f]{32}-[0-9a-f]{8}$")]
"""The digest of a call and a random part for each request, so that an old answer does not match a new request."""

After: TypeAlias = Annotated[str, Meta(pattern="^[0-9]{15}-[0-9a-f]{32}-[0-9a-f]{8}$")]
"""The time and the id of the last request of a page."""


class ApprovalQueue:
    """The requests for approval in a store.

    Args:
        store: Stores the requests.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._adding = LoopLocks()

    async def add(self, asked: Approval) -> tuple[Approval, bool]:
        """Return the record of a call, and whether it is new: there was none, or the last one has ended.

        Raises:
            CallError: `RESOURCE_EXHAUSTED` if too many requests of the caller, or of all callers, are open.
        """
        key = _key(asked.id)
        if (record := await self.find(asked.id)) is not None and not record.has_ended:
            return record, False
        # Calls at the same time must not find the same free place.
        async with self._adding(repr(asked.owner)):
            old = await self.find(asked.id)
            if old is None or old.has_ended:
                await self._enforce_room(asked)
            if old is not None and old.has_ended:
                await self._remove_input(old)
            new = _begun(asked)
            encoded = msgspec.json.encode(_without_long_input(new))

            def update(held: bytes | None) -> bytes:
                return encoded if held is None or _decode(held).has_ended else held

            record = _decode(await self._store.change(key, update))
            if record.id == new.id and new.size > SHORT:
                await self._add_input(new)
        return record, record.id == new.id

    async def find(self, approval_id: str) -> Approval | None:
        """Return the record with this id, or another request of the same call; without its input if that is long."""
        stored = await self._store.get(_key(approval_id))
        return None if stored is None else _decode(stored)

    async def whole(self, record: Approval) -> Approval:
        """Return a record with its input.

        Raises:
            CallError: If the input was removed, because the request was answered or has expired.
        """
        if record.input is not UNSET:
            return record
        stored = await self._store.get(_input_key(record))
        if stored is None:
            message = f"The input of {record.id!r} is not available any more"
            raise CallError(ErrorCode.VALIDATION_ERROR, message)
        long = _decode_input(stored)
        return replace(record, input=long.input, generated=long.generated)

    async def replace(self, record: Approval, state: str, **fields: Any) -> Approval | None:
        """Change the state of a record and return it; None if its state has changed or it has ended."""
        record = _without_long_input(record)
        new: Approval = replace(record, state=state, **fields)
        may_change = state in _NEXT.get(record.state, ()) and not record.has_ended
        # Compare decoded records: a hub of another version may have encoded the record differently.
        held = await self._store.get(_key(record.id)) if may_change else None
        is_same = held is not None and _decode(held) == record
        encoded = msgspec.json.encode(new)
        is_changed = is_same and await self._store.swap(_key(record.id), held, encoded)
        if is_changed and state in ("used", "denied"):
            # If this fails, the input is removed with its record.
            with suppress(StoreError):
                await self._remove_input(new)
        return new if is_changed else None

    async def page(
        self, may_see: Callable[[str], bool], after: str | None, limit: int
    ) -> tuple[ApprovalPage, float]:
        """Return a page of the requests that wait, and the time when the next request expires.

        Args:
            may_see: Returns whether the person may see requests with a scope.
            after: Where the page begins; None for the first page.
            limit: The number of requests on the page.
        """
        ends = inf
        waiting: dict[str, bytes] = {}
        for held in (await self._store.items("approval")).values():
            each = _decode_summary(held)
            if each.state == "pending" and not is_over(each.until) and may_see(each.scope):
                waiting[each.place] = held
                ends = min(ends, each.until)
        places = sorted(place for place in waiting if after is None or place > after)
        approvals = [_decode(waiting[place]) for place in places[:limit]]
        following = places[limit - 1] if len(places) > limit else None
        return ApprovalPage(approvals=approvals, total=len(waiting), next=following), ends

    async def remove_expired(self) -> None:
        """Remove the requests without an answer that have expired, and answered ones some time afterwards."""
        for key, held in (await self._store.items("approval")).items():
            record, kept = _decode(held), 0
            if record.state in ("denied", "used"):
                kept = KEPT
            if record.until + kept < settled():
                await self._remove(key, held, record)

    async def _enforce_room(self, asked: Approval) -> None:
        """Raise if too many requests are open: people could not find the others, or the store would become full."""
        records = {
            key: (held, _decode(held))
            for key, held in (await self._store.items("approval")).items()
        }
        await self._remove_some(records)
        open_ = [record for _, record in records.values() if record.is_open]
        mine = [each for each in open_ if each.owner == asked.owner]
        size, all_size = (sum(map(attrgetter("size"), some)) for some in (mine, open_))
        most = min(MAX_OPEN, (MAX_ALL - len(open_) + len(mine)) // 2)
        most_bytes = min(MAX_OPEN_BYTES, (MAX_ALL_BYTES - all_size + size) // 2)
        if len(mine) >= most or size + asked.size > most_bytes:
            waiting = f"{counted(len(mine), 'request')} of this caller with {size:,} bytes"
            message = f"{waiting} wait for approval: repeat this call when they have an answer"
            raise CallError(ErrorCode.RESOURCE_EXHAUSTED, message, retryable=True)

    async def _remove_some(self, records: dict[str, tuple[bytes, Approval]]) -> None:
        """Remove some records that are not needed any more."""
        unneeded = [
            (key, held, record)
            for key, (held, record) in records.items()
            if record.state in ("pending", "approved") and record.until < settled()
        ]
        if len(records) > MAX_RECORDS:
            ended = ((key, *pair) for key, pair in records.items() if pair[1].state == "used")
            unneeded += sorted(ended, key=lambda item: item[2].created)
        for key, held, record in unneeded[:_MOST_REMOVED]:
            await self._remove(key, held, record)

    async def _remove(self, key: str, held: bytes, record: Approval) -> None:
        await self._remove_input(record)
        await self._store.swap(key, held, None)

    async def _add_input(self, record: Approval) -> None:
        try:
            long = msgspec.json.encode(_Input(record.input, record.generated))
            await self._store.swap(_input_key(record), None, long)
        except StoreError:
            # A request whose input people cannot see must not take a place.
            with suppress(StoreError):
                encoded = msgspec.json.encode(_without_long_input(record))
                await self._store.swap(_key(record.id), encoded, None)
            raise

    async def _remove_input(self, record: Approval) -> None:
        key = _input_key(record)
        if record.size > SHORT and (held := await self._store.get(key)) is not None:
            await self._store.swap(key, held, None)


def _begun(asked: Approval) -> Approval:
    """Return a request that begins now. A call that waits may make several, and an answer is valid for one of them."""
    now = settled()
    until = now + asked.until - asked.created
    return replace(asked, id=f"{asked.id}-{token_hex(4)}", created=now, until=until)


def _without_long_input(record: Approval) -> Approval:
    return replace(record, input=UNSET, generated=()) if record.size > SHORT else record


def _key(approval_id: str) -> str:
    return f"approval.{approval_id.partition('-')[0]}"


def _input_key(record: Approval) -> str:
    return f"input.{record.id}"
