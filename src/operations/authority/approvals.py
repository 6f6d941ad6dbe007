"""A person's consent to one exact call.

    pending -> approved | denied | expired -> used

Rule 1: one record for each digest of caller, acting, grant, operation, contract and input. The same call attaches to
        it; any other call needs an approval of its own.
Rule 2: every transition is one compare-and-set. An approval is used once.
Rule 3: a caller cannot answer its own request, nor can a grant that shares a block or a holder with the caller's.
"""

import asyncio
from collections.abc import AsyncGenerator
from hashlib import sha256
from time import monotonic, time
from typing import Any, Final, Literal

import msgspec
from msgspec.structs import replace

from operations._grants import clock
from operations._json import canonical
from operations._time_limits import lent_slot
from operations.access import ApprovalRule, access_denied
from operations.authority.store import Store, StoreError, change
from operations.context import OperationContext
from operations.errors import CallError, ErrorCode
from operations.functions import operation
from operations.specs import OperationSpec
from operations.types import JSONObject

SCOPE: Final = "approvals:answer"
"""What a caller needs to see and answer approvals; a rule may require another scope as well."""

MAX_WAITING: Final = 1_000
"""Calls that wait for an answer at a time; others end with `APPROVAL_REQUIRED` at once."""

_MAX_INPUT = 256 * 1024
"""Bytes of an input that a person can approve."""

_POLL_SECONDS = 0.25
"""Time between two looks at whether another process has answered."""

_BEFORE_DEADLINE = 1.0
"""Seconds before its caller's deadline at which a waiting call ends."""

_KEPT = 24 * 3600 * 1000
"""Milliseconds for which a record that has ended stays in the store."""

_QUESTION: JSONObject = {"type": "object", "properties": {}}


class Approval(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """One request for approval, and its answer."""

    id: str
    state: Literal["pending", "approved", "denied", "used"]
    operation: str
    input: Any

    caller: str | None = None
    """Who asks; None for an unknown caller."""

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

    round: int = 1
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
        self._news = asyncio.Event()

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
            CallError: `APPROVAL_REQUIRED` if there is none yet; `ACCESS_DENIED` if it was denied.
            StoreError: If the store does not work.
        """
        asked = _request(spec, digest, value, context, rule)
        ends = monotonic() + rule.hold
        deadline = context.deadline if context.limit is None else None
        if deadline is not None:
            ends = min(ends, monotonic() + deadline / 1000 - time() - _BEFORE_DEADLINE)
        record = await self._attach(asked)
        if (
            rule.ask_caller
            and not by_grant
            and context.channel.elicit
            and record.state == "pending"
        ):
            return await self._ask(record, context)
        while True:
            if record.state == "approved" and await self._use(record):
                return replace(record, state="used")
            if record.state == "denied":
                raise CallError(
                    ErrorCode.ACCESS_DENIED, f"{spec.id} was not approved", {"approval": record.id}
                )
            if record.state == "pending" and not await self._wait(ends, context):
                raise CallError(
                    ErrorCode.APPROVAL_REQUIRED,
                    f"{spec.id} must be approved by a person: repeat the same call afterwards",
                    {"approval": record.id, "until": record.until},
                    retryable=True,
                )
            record = await self._attach(asked)

    async def _wait(self, ends: float, context: OperationContext) -> bool:
        """Wait until there may be an answer; return False if it is time to end."""
        seconds = min(ends - monotonic(), _POLL_SECONDS)
        if seconds <= 0 or self._waiting >= MAX_WAITING:
            return False
        self._waiting += 1
        news = self._news
        try:
            with lent_slot():
                await context.answered(_within(seconds, news))
        finally:
            self._waiting -= 1
        return True

    async def _ask(self, record: Approval, context: OperationContext) -> Approval:
        """Let the caller confirm its own call."""
        shown = canonical(record.input).decode()
        message = f"Run {record.operation} with {shown}?"
        with lent_slot():
            answer = await context.elicit(message, _QUESTION)
        accepted = answer.get("action") == "accept"
        state: Literal["used", "denied"] = "used" if accepted else "denied"

        def update(held: bytes | None) -> tuple[bytes | None, Approval | None]:
            now = None if held is None else _decode(held)
            if now is None or now.id != record.id or now.state != "pending" or now.has_ended:
                return None, None
            done = replace(now, state=state, confirmed=True, answered_by=record.caller)
            return msgspec.json.encode(done), done

        done = await change(self._store, _key(record.id), update)
        if done is None or done.state != "used":
            details = {"approval": record.id}
            raise CallError(
                ErrorCode.ACCESS_DENIED, f"{record.operation} was not confirmed", details
            )
        return done

    async def _attach(self, asked: Approval) -> Approval:
        """Return the record of a call; a new one if there is none, or the last one has ended."""

        def update(held: bytes | None) -> tuple[bytes | None, Approval]:
            record = None if held is None else _decode(held)
            if record is not None and not record.has_ended:
                return None, record
            number = 1 if record is None else record.round + 1
            new = replace(asked, id=f"{asked.id}-{number}", round=number)
            return msgspec.json.encode(new), new

        known = await change(self._store, _key(asked.id), update)
        if known.created == asked.created:
            self._announce()
        return known

    async def _use(self, record: Approval) -> bool:
        def update(held: bytes | None) -> tuple[bytes | None, bool]:
            now = None if held is None else _decode(held)
            if now is None or now.id != record.id or now.state != "approved" or now.has_ended:
                return None, False
            return msgspec.json.encode(replace(now, state="used")), True

        return await change(self._store, _key(record.id), update)

    async def answer(
        self, approval_id: str, context: OperationContext, *, approve: bool, reason: str | None
    ) -> Approval:
        """Approve or deny a call.

        Raises:
            CallError: `OPERATION_NOT_FOUND` if there is no such request for this caller; `ACCESS_DENIED` for a
                call of its own; `VALIDATION_ERROR` if it was answered or has expired.
            StoreError: If the store does not work.
        """
        who = context.identity

        def update(held: bytes | None) -> tuple[bytes | None, Approval]:
            record = None if held is None else _decode(held)
            if record is None or record.id != approval_id or not _may_see(record, context):
                raise CallError(ErrorCode.VALIDATION_ERROR, f"There is no approval {approval_id!r}")
            if record.state != "pending" or record.has_ended:
                state = "expired" if record.state == "pending" else record.state
                raise CallError(ErrorCode.VALIDATION_ERROR, f"It is not pending any more: {state}")
            if _is_own(record, context):
                raise access_denied("approvals.answer")
            done = replace(
                record,
                state="approved" if approve else "denied",
                answered_by="operator" if who is None else who.id,
                reason=reason,
            )
            return msgspec.json.encode(done), done

        done = await change(self._store, _key(approval_id), update)
        self._announce()
        return done

    async def pending(self, context: OperationContext) -> list[Approval]:
        """Return the requests that a caller may see and that wait for an answer, oldest first.

        Raises:
            StoreError: If the store does not work.
        """
        found: list[Approval] = []
        for name, held in (await self._store.items("approval")).items():
            record = _decode(held)
            if record.until + _KEPT < clock():
                await self._store.delete(f"approval/{name}")
            elif record.state == "pending" and not record.has_ended and _may_see(record, context):
                found.append(record)
        return sorted(found, key=lambda record: record.created)

    async def watch(self, context: OperationContext) -> AsyncGenerator[list[Approval]]:
        """Yield the requests that wait for an answer, now and whenever they change."""
        before: list[Approval] | None = None
        while True:
            news = self._news
            found = await self.pending(context)
            if found != before:
                yield found
                before = found
            await _within(_POLL_SECONDS * 2, news)

    def _announce(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


async def _within(seconds: float, news: asyncio.Event) -> None:
    try:
        async with asyncio.timeout(seconds):
            await news.wait()
    except TimeoutError:
        pass


def _request(
    spec: OperationSpec, digest: str, value: Any, context: OperationContext, rule: ApprovalRule
) -> Approval:
    identity, now = context.identity, clock()
    grant = None if identity is None else identity.grant
    asked = Approval(
        id="",
        state="pending",
        operation=spec.id,
        input=value,
        caller=None if identity is None else identity.id,
        is_operator=identity is None and context.trusted,
        acting=() if identity is None else identity.acting,
        grants=() if grant is None else grant.presented,
        scope=rule.scope,
        created=now,
        until=now + int(rule.seconds * 1000),
    )
    session = context.channel.session if identity is None else ""
    whose = [asked.caller, asked.is_operator, session, asked.acting, asked.grants]
    try:
        text = canonical([whose, spec.id, digest, value])
    except (TypeError, OverflowError, RecursionError) as error:
        raise CallError(
            ErrorCode.VALIDATION_ERROR, f"A call of {spec.id} with files cannot be approved"
        ) from error
    if len(text) > _MAX_INPUT:
        raise CallError(ErrorCode.RESOURCE_EXHAUSTED, "The input is too large to be approved")
    return replace(asked, id=sha256(text).hexdigest()[:32])


def _key(approval_id: str) -> str:
    digest = approval_id.partition("-")[0]
    if not digest.isalnum() or not digest.isascii():
        raise CallError(ErrorCode.VALIDATION_ERROR, f"There is no approval {approval_id!r}")
    return f"approval/{digest}"


def _may_see(record: Approval, context: OperationContext) -> bool:
    if context.trusted:
        return True
    return context.identity is not None and record.scope in context.identity.scopes


def _is_own(record: Approval, context: OperationContext) -> bool:
    """Return whether the one who answers is, or may act for, the one who asks."""
    who = context.identity
    if who is None:
        return record.is_operator
    shared = set(who.acting) & set(record.acting)
    if who.grant is not None:
        shared |= set(who.grant.presented) & set(record.grants)
    return bool(shared) or (who.id == record.caller and not record.acting)


def approval_operations(approvals: Approvals) -> list[Any]:
    """Return the operations through which people answer requests for approval."""

    async def guarded(work: Any) -> Any:
        try:
            return await work
        except StoreError as error:
            raise unavailable() from error

    @operation("approvals.list", type="query", scopes=[SCOPE])
    async def pending(context: OperationContext) -> list[Approval]:
        """List the calls that wait for approval: the operation, the exact input, who asks and for whom."""
        found: list[Approval] = await guarded(approvals.pending(context))
        return found

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
        done: Approval = await guarded(
            approvals.answer(id, context, approve=approve, reason=reason)
        )
        return done

    @operation("approvals.watch", scopes=[SCOPE])
    async def watch(context: OperationContext) -> AsyncGenerator[list[Approval]]:
        """Follow the calls that wait for approval: all of them, now and whenever they change."""
        async for found in approvals.watch(context):
            yield found

    return [pending, answer, watch]


def unavailable() -> CallError:
    """Return the error of a call whose authority could not be checked."""
    return CallError(ErrorCode.UNAVAILABLE, "The authority of this call cannot be checked now")
