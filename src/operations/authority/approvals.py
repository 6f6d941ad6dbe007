"""A person's consent to one exact call.

    pending -> approved | denied | expired -> used

Rule 1: one record for each digest of caller, acting, grant, operation, contract and input. The same call attaches to
        it; any other call needs an approval of its own.
Rule 2: every transition is one compare-and-set. An approval is used once.
Rule 3: a caller cannot answer its own request, nor can a grant that shares a block or a holder with the caller's.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from hashlib import sha256
from math import inf
from secrets import token_hex
from time import monotonic, time
from typing import Any, Final, Literal

import msgspec
from msgspec.structs import replace

from operations._grants import clock
from operations._json import canonical
from operations._time_limits import lent_slot
from operations.access import ApprovalRule, access_denied
from operations.authority.store import Store, StoreError, change, checked
from operations.context import OperationContext
from operations.errors import CallError, ErrorCode
from operations.functions import operation
from operations.specs import OperationSpec
from operations.types import JSONObject

SCOPE: Final = "approvals:answer"
"""The scope for seeing and answering approvals; a rule may require another scope as well."""

MAX_WAITING: Final = 1_000
"""Calls that wait for an answer at a time; others end with `APPROVAL_REQUIRED` at once."""

_MAX_INPUT = 256 * 1024
"""Bytes of an input that a person can approve."""

_LOOK_SECONDS = 0.5
"""Time in which those who follow the queue notice that the server shuts down."""

_BEFORE_DEADLINE = 1.0
"""Seconds before its caller's deadline at which a waiting call ends."""

_KEPT = 24 * 3600 * 1000
"""Milliseconds for which a record that has ended stays in the store."""

_QUESTION: JSONObject = {"type": "object", "properties": {}}


class Approval(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One request for approval, and its answer."""

    id: str
    state: Literal["pending", "approved", "denied", "used"]
    operation: str
    input: Any

    caller: str | None = None
    """The caller; None without identity."""

    is_operator: bool = False
    """Whether the operator asks, at the command line or in code."""

    acting: tuple[str, ...] = ()
    """Who acts for the caller, in the order of delegation."""

    grants: tuple[str, ...] = ()
    """The blocks of the grant that the caller presented."""

    scope: str = SCOPE
    created: int
    until: int
    """When the request or the approval expires, in milliseconds since the epoch."""

    answered_by: str | None = None
    reason: str | None = None

    confirmed: bool = False
    """Whether the caller itself confirmed the call, which is no approval by another person."""

    @property
    def has_ended(self) -> bool:
        """Whether it was used, or has expired."""
        return self.state == "used" or self.until <= clock()


_decode = msgspec.json.Decoder(Approval).decode


class Approvals:
    """The requests for approval in a store, and the calls that wait for them.

    Args:
        store: Where they are kept.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting = 0
        self._changed = asyncio.Event()
        store.listeners.append(self._wake)

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def obtain(
        self,
        spec: OperationSpec,
        digest: str,
        value: Any,
        context: OperationContext,
        rule: ApprovalRule,
        *,
        by_grant: bool,
    ) -> Approval:
        """Return the approval that a call has just used.

        Args:
            spec: The operation.
            digest: The digest of its contract.
            value: The input.
            context: Who calls.
            rule: Who may approve, and how long that takes.
            by_grant: Whether the caller's grant requires it: then the caller cannot confirm it itself.

        Raises:
            CallError: `APPROVAL_REQUIRED` if there is none yet; `ACCESS_DENIED` if it was denied; `UNAVAILABLE` if the
                store does not work.
        """
        asked = _request(spec, digest, value, context, rule)
        ends = monotonic() + rule.hold
        if context.deadline is not None and context.limit is None:
            ends = min(ends, monotonic() + context.deadline / 1000 - time() - _BEFORE_DEADLINE)
        may_ask = rule.ask_caller and not by_grant and context.channel.elicit is not None
        while True:
            changed, record = self._changed, await self._attach(asked)
            if record.state == "denied":
                raise _refused(record, "approved")
            if record.state == "pending" and may_ask:
                is_accepted = await _ask(record, context)
                state: Literal["used", "denied"] = "used" if is_accepted else "denied"
                fields = {"state": state, "confirmed": True, "answered_by": record.caller}
                if await self._replace(record, fields) and is_accepted:
                    return record
                raise _refused(record, "confirmed")
            if record.state == "approved" and await self._replace(record, {"state": "used"}):
                return record
            if record.state == "pending" and not await self._wait(ends, changed, context):
                raise CallError(
                    ErrorCode.APPROVAL_REQUIRED,
                    f"{spec.id} must be approved by a person: repeat the same call afterwards",
                    {"approval": record.id, "until": record.until},
                    retryable=True,
                )

    async def _wait(self, ends: float, changed: asyncio.Event, context: OperationContext) -> bool:
        """Wait until there may be an answer; return False if it is time to end."""
        seconds = min(ends - monotonic(), self._store.poll_seconds)
        if seconds <= 0 or self._waiting >= MAX_WAITING:
            return False
        self._waiting += 1
        try:
            with lent_slot():
                await context.answered(_within(seconds, changed))
        finally:
            self._waiting -= 1
        return True

    async def _attach(self, asked: Approval) -> Approval:
        """Return the record of a call; a new one if there is none, or the last one has ended."""

        def update(held: bytes | None) -> tuple[bytes | None, Approval]:
            record = None if held is None else _decode(held)
            if record is not None and not record.has_ended:
                return None, record
            return msgspec.json.encode(asked), asked

        known = await change(self._store, _key(asked.id), update)
        if known is asked:
            await self._announce()
        return known

    async def _replace(self, record: Approval, fields: JSONObject) -> bool:
        """Change a record, unless it was changed since or has ended; return whether it was changed."""

        def update(held: bytes | None) -> tuple[bytes | None, bool]:
            if held is None or record.has_ended or _decode(held) != record:
                return None, False
            return msgspec.json.encode(replace(record, **fields)), True

        is_changed = await change(self._store, _key(record.id), update)
        await self._announce()
        return is_changed

    async def _announce(self) -> None:
        # The change is stored: others find it later, when they look by themselves.
        with suppress(StoreError):
            await checked(self._store.announce())

    async def answer(
        self, approval_id: str, context: OperationContext, *, approve: bool, reason: str | None
    ) -> Approval:
        """Approve or deny a call.

        Raises:
            CallError: `VALIDATION_ERROR` if there is no such request for this caller, or it was answered or has
                expired; `ACCESS_DENIED` for a call of its own; `UNAVAILABLE` if the store does not work.
        """
        who, (held, _) = context.identity, await checked(self._store.get(_key(approval_id)))
        record = None if held is None else _decode(held)
        if record is None or record.id != approval_id or not _may_see(record, context):
            raise _unknown(approval_id)
        if _is_own(record, context):
            raise access_denied("approvals.answer")
        fields: JSONObject = {
            "state": "approved" if approve else "denied",
            "answered_by": "operator" if who is None else who.id,
            "reason": reason,
        }
        if record.state != "pending" or not await self._replace(record, fields):
            raise CallError(ErrorCode.VALIDATION_ERROR, "It was answered already, or has expired")
        return replace(record, **fields)

    async def pending(self, context: OperationContext) -> list[Approval]:
        """Return the requests that a caller may see and that wait for an answer, oldest first.

        Raises:
            StoreError: If the store does not work.
        """
        found: list[Approval] = []
        for name, held in (await checked(self._store.items("approval"))).items():
            record = _decode(held)
            if record.until + _KEPT < clock():
                await checked(self._store.delete(f"approval/{name}"))
            elif record.state == "pending" and not record.has_ended and _may_see(record, context):
                found.append(record)
        return sorted(found, key=lambda record: record.created)

    async def watch(
        self, context: OperationContext, is_up: Callable[[], bool] = lambda: True
    ) -> AsyncGenerator[list[Approval]]:
        """Yield the requests that wait for an answer, now and whenever they change, while `is_up`."""
        before: list[Approval] | None = None
        while is_up():
            changed, found = self._changed, await self.pending(context)
            if found != before:
                yield found
                before = found
            soonest = min((each.until for each in found), default=inf)
            # Requests also end by themselves.
            seconds = max(0.0, (soonest - clock()) / 1000) + 0.001
            ends = monotonic() + min(seconds, self._store.poll_seconds)
            while is_up() and not changed.is_set() and monotonic() < ends:
                await _within(min(ends - monotonic(), _LOOK_SECONDS), changed)


async def _within(seconds: float, changed: asyncio.Event) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await changed.wait()


async def _ask(record: Approval, context: OperationContext) -> bool:
    """Return whether the caller confirms its own call."""
    # Escaped, because invisible characters could make a text look different from its content.
    message = f"Run {record.operation} with {json.dumps(record.input, separators=(',', ':'))}?"
    with lent_slot():
        answer = await context.elicit(message, _QUESTION)
    return answer.get("action") == "accept"


def _request(
    spec: OperationSpec, digest: str, value: Any, context: OperationContext, rule: ApprovalRule
) -> Approval:
    identity, now = context.identity, clock()
    acting, keys = ((), ()) if identity is None else identity.presented
    caller = None if identity is None else identity.id
    is_operator = identity is None and context.trusted
    session = context.channel.session if identity is None else ""
    whose = [caller, is_operator, session, acting, keys]
    try:
        text = canonical([whose, spec.id, digest, value])
        copied = msgspec.json.decode(canonical(value))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise CallError(
            ErrorCode.VALIDATION_ERROR, f"A call of {spec.id} with files cannot be approved"
        ) from error
    if len(text) > _MAX_INPUT:
        raise CallError(ErrorCode.RESOURCE_EXHAUSTED, "The input is too large to be approved")
    return Approval(
        # Each request of the same call has an id of its own: an old answer does not fit a new one.
        id=f"{sha256(text).hexdigest()[:32]}-{token_hex(4)}",
        state="pending",
        operation=spec.id,
        input=copied,
        caller=caller,
        is_operator=is_operator,
        acting=acting,
        grants=keys,
        scope=rule.scope,
        created=now,
        until=now + int(rule.seconds * 1000),
    )


def _key(approval_id: str) -> str:
    digest = approval_id.partition("-")[0]
    if not digest.isalnum() or not digest.isascii():
        raise _unknown(approval_id)
    return f"approval/{digest}"


def _refused(record: Approval, what: str) -> CallError:
    message, details = f"{record.operation} was not {what}", {"approval": record.id}
    return CallError(ErrorCode.ACCESS_DENIED, message, details)


def _unknown(approval_id: str) -> CallError:
    return CallError(ErrorCode.VALIDATION_ERROR, f"There is no approval {approval_id!r}")


def _may_see(record: Approval, context: OperationContext) -> bool:
    if context.trusted:
        return True
    return context.identity is not None and record.scope in context.identity.scopes


def _is_own(record: Approval, context: OperationContext) -> bool:
    """Return whether the person who answers is the caller, or may act for the caller."""
    who = context.identity
    if who is None:
        return record.is_operator
    acting, keys = who.presented
    if who.id == record.caller and (not record.acting or (acting and not keys)):
        # A person answers for its agents; another agent of that person needs a grant which allows it.
        return True
    return not (set(acting).isdisjoint(record.acting) and set(keys).isdisjoint(record.grants))


def approval_operations(
    approvals: Approvals, is_up: Callable[[], bool] = lambda: True
) -> list[Any]:
    """Return the operations through which people answer requests for approval.

    Args:
        approvals: The requests.
        is_up: Returns whether the server is not shutting down: those who follow the queue must not delay that.
    """

    @operation("approvals.list", type="query", scopes=[SCOPE])
    async def pending(context: OperationContext) -> list[Approval]:
        """List the calls that wait for approval: the operation, the exact input, the caller and who it acts for."""
        return await approvals.pending(context)

    @operation("approvals.answer", scopes=[SCOPE])
    async def answer(
        id: str, approve: bool, context: OperationContext, reason: str | None = None
    ) -> Approval:
        """Approve or deny one call. An approval is used once, by the same caller with the same input.

        Args:
            id: The id of the request.
            approve: Whether the call may run.
            context: Who answers.
            reason: Why, for the record.
        """
        return await approvals.answer(id, context, approve=approve, reason=reason)

    @operation("approvals.watch", scopes=[SCOPE])
    async def watch(context: OperationContext) -> AsyncGenerator[list[Approval]]:
        """Follow the calls that wait for approval: all of them, now and whenever they change."""
        async for found in approvals.watch(context, is_up):
            yield found

    return [pending, answer, watch]
