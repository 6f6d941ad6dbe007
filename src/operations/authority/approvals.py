"""Approvals: the consent of a person to one exact call.

    pending -> approved | denied | expired -> used

Rule 1: there is one record for each digest of caller, acting parties, grant, operation, contract, scope to approve it
        and input. A repeated call uses the same record; any other call needs its own approval.
Rule 2: every transition is one compare-and-set. An approval is used once.
Rule 3: a caller cannot answer its own request, and neither can a grant that shares a block or a holder with the
        caller's grant.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import suppress
from hashlib import sha256
from math import inf
from time import monotonic
from typing import Annotated, Any, Final, TypeAlias

import msgspec
from msgspec import Meta

from operations.authority.grants import enforce_valid
from operations.authority.queue import (
    KEPT,
    MAX_PAGE,
    PAGE,
    SCOPE,
    After,
    Approval,
    ApprovalPage,
    ApprovalQueue,
    Id,
)
from operations.base.clock import clock, settled
from operations.base.errors import CallError, ErrorCode
from operations.base.json.secrets import masked, secret_places
from operations.base.json.values import MAX_DEPTH, WRAPPING_DEPTH, canonical, nests_within, pointer
from operations.base.slots import lent_slot
from operations.base.types import JSONObject
from operations.contract.access import access_denied
from operations.contract.context import OperationContext
from operations.contract.functions import operation
from operations.contract.grant import Complete, Rules
from operations.contract.specs import ApprovalRule, Operation, OperationSpec
from operations.schema import CheckedForm, CheckedInput, Place
from operations.schema.work import Work as CheckWork
from operations.store.contract import StoreError
from operations.store.state import Signal, Store

MAX_WAITING: Final = 1_000
"""The largest number of calls that wait for an answer; further calls end with `APPROVAL_REQUIRED` at once."""

_MAX_INPUT = 256 * 1024
"""The largest input that a person can approve, in bytes."""

_MAX_WHO = 4_000
"""The largest description of a caller that a person can read beside each of its requests, in bytes."""

_BEFORE_DEADLINE = 1.0
"""A waiting call ends this many seconds before the caller's deadline."""

_CLEAN_SECONDS = 600.0
"""Seconds between two searches for records, and counters of grants, that have expired."""

_MAX_COUNTERS = 1_000
"""The largest number of counters of all grants derived from one grant."""

_DEFAULT_RULE = ApprovalRule()

_QUESTION: JSONObject = {"type": "object", "properties": {}}

_PAUSE = 0.1
"""Seconds between two reads of the queue for one subscription: a caller may cause many changes."""

Reason: TypeAlias = Annotated[str, Meta(max_length=1_000)]
Limit: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_PAGE)]


class Approvals:
    """The requests for approval in a store, the calls that wait for them, and the operations that answer them.

    Register the operations with `registry.register_object`.

    Args:
        store: Stores the requests.

    Attributes:
        is_up: Returns False while the server shuts down. Wake the store then (`Store.wake`), so that waiting calls and
            subscriptions of the queue end.
    """

    def __init__(self, store: Store) -> None:
        self.is_up: Callable[[], bool] = lambda: True
        self._store = store
        self._queue = ApprovalQueue(store)
        self._waiting = 0

    async def obtain(
        self, asked: Approval, rule: ApprovalRule, context: OperationContext, *, by_grant: bool
    ) -> Approval:
        """Obtain and use the approval of a call, and return it.

        Args:
            asked: The request for approval, which is stored with a new id if there is none yet.
            rule: The scope to approve the call, and the time limits.
            context: The context of the call.
            by_grant: Whether the caller's grant requires the approval: then the caller cannot confirm the call itself.

        Raises:
            CallError: `APPROVAL_REQUIRED` if there is no approval yet; `ACCESS_DENIED` if it was denied;
                `RESOURCE_EXHAUSTED` if too many requests of the caller have no answer; `UNAVAILABLE` if the store does
                not work.
        """
        # A run does not hold its slot: it waits without one, and continues when the request is answered.
        ends = monotonic() + (rule.hold if context.scope is None else 0)
        if context.limit is None:
            ends = min(ends, monotonic() + context.remaining - _BEFORE_DEADLINE)
        may_ask = rule.ask_caller and not by_grant and context.channel.elicit is not None
        while True:
            changed, record = self._store.changed, await self._attach(asked)
            if record.state == "denied":
                raise _refused(record, "approved")
            if record.state == "approved":
                if await self._replace(record, "used"):
                    return record
                continue
            action = await _ask(record, context) if may_ask else None
            if action in ("accept", "decline"):
                state = "used" if action == "accept" else "denied"
                fields = {"confirmed": True, "answered_by": record.caller}
                if await self._replace(record, state, **fields) and state == "used":
                    return record
                raise _refused(record, "confirmed")
            # A caller that dismissed the question, without an answer, is asked again by its next call.
            if action is not None or not await self._wait(record, ends, changed, context):
                message = (
                    f"A person must approve {record.operation}: repeat the same call afterwards"
                )
                details = {"approval": record.id, "until": record.until}
                raise CallError(ErrorCode.APPROVAL_REQUIRED, message, details, retryable=True)

    async def _wait(
        self, record: Approval, ends: float, changed: Signal, context: OperationContext
    ) -> bool:
        """Wait until the store changes or the request expires; return False if the waiting time is over."""
        seconds = ends - monotonic()
        if seconds <= 0 or self._waiting >= MAX_WAITING or not self.is_up():
            return False
        self._waiting += 1
        try:
            with lent_slot():
                seconds = min(seconds, _seconds_until(record.until))
                await context.answered(self._changed_within(seconds, changed))
        finally:
            self._waiting -= 1
        return True

    async def _changed_within(self, seconds: float, changed: Signal) -> None:
        """Wait for a change of the store, at most for some seconds. The store is woken when the server shuts down."""
        seconds = min(seconds, self._store.poll_seconds)
        with suppress(TimeoutError):
            async with asyncio.timeout(None if seconds == inf else seconds):
                await changed.wait()

    async def _attach(self, asked: Approval) -> Approval:
        """Return the record of a call; create one if there is none or the last one has ended."""
        record, is_new = await self._queue.add(asked)
        if is_new:
            await self._store.announce()
        return record

    async def _replace(self, record: Approval, state: str, **fields: Any) -> Approval | None:
        """Change the state of a record, and announce that the queue has changed."""
        done = await self._queue.replace(record, state, **fields)
        await self._store.announce()
        return done

    async def is_pending(self, approval_id: str) -> bool:
        """Return whether a request still waits for an answer."""
        record = await self._queue.find(approval_id)
        return (
            record is not None
            and record.id == approval_id
            and record.state == "pending"
            and not record.has_ended
        )

    async def answered_by(self, approval_id: str) -> str | None:
        """Return who has answered a request."""
        record = await self._queue.find(approval_id)
        return None if record is None or record.id != approval_id else record.answered_by

    async def remove_expired(self) -> None:
        """Remove requests that expired some time ago."""
        await self._queue.remove_expired()

    async def _find(self, approval_id: str, context: OperationContext) -> Approval:
        record = await self._queue.find(approval_id)
        if record is None or record.id != approval_id or not _may_see(record.scope, context):
            raise CallError(
                ErrorCode.VALIDATION_ERROR,
                f"There is no approval {approval_id!r}; approvals.list shows the ids",
            )
        return record

    @operation("approvals.answer", scopes=[SCOPE], authority=True)
    async def answer(
        self, id: Id, approve: bool, context: OperationContext, reason: Reason | None = None
    ) -> Approval:
        """Approve or deny one call. An approval is used once, by the same caller with the same input.

        Args:
            id: The id of the request.
            approve: Whether the call may run.
            context: The context of the person who answers.
            reason: The reason, which is stored with the answer; a denied caller sees it.
        """
        identity, record = context.identity, await self._find(id, context)
        if _is_own(record, context):
            raise access_denied("approvals.answer")
        if approve and record.state == "pending" and not record.has_ended:
            # A person cannot approve an input that cannot be shown.
            await self._queue.whole(record)
        state, by = (
            "approved" if approve else "denied",
            "operator" if identity is None else identity.account,
        )
        done = await self._replace(record, state, answered_by=by, reason=reason)
        if done is None:
            raise CallError(
                ErrorCode.VALIDATION_ERROR, "The request was already answered, or has expired"
            )
        return done

    @operation("approvals.get", type="query", scopes=[SCOPE], authority=True)
    async def get(self, id: Id, context: OperationContext) -> Approval:
        """Return one request for approval with its exact input, whatever its length.

        Args:
            id: The id of the request.
            context: The context of the person who answers.
        """
        return await self._queue.whole(await self._find(id, context))

    @operation("approvals.list", type="query", scopes=[SCOPE], authority=True)
    async def pending(
        self, context: OperationContext, after: After | None = None, limit: Limit = PAGE
    ) -> ApprovalPage:
        """List the calls that wait for approval, the oldest first: operation, caller, acting parties and short inputs.

        Inputs of more than 1,000 bytes are not listed, but their size: read them with `approvals.get`.

        Args:
            context: The context of the person who answers.
            after: The `next` of the page before.
            limit: The number of requests on the page.
        """
        return (await self._page(context, after, limit))[0]

    async def _page(
        self, context: OperationContext, after: str | None, limit: int
    ) -> tuple[ApprovalPage, float]:
        return await self._queue.page(lambda scope: _may_see(scope, context), after, limit)

    @operation("approvals.watch", scopes=[SCOPE], authority=True)
    async def watch(
        self, context: OperationContext, after: After | None = None, limit: Limit = PAGE
    ) -> AsyncGenerator[ApprovalPage]:
        """Return a page of the calls that wait for approval now, and again whenever it changes.

        Args:
            context: The context of the person who answers.
            after: The `next` of the page before.
            limit: The number of requests on the page.
        """
        before: ApprovalPage | None = None
        while self.is_up():
            changed, (page, ends) = self._store.changed, await self._page(context, after, limit)
            if page != before:
                yield page
                before = page
                await asyncio.sleep(_PAUSE)
            await self._changed_within(_seconds_until(ends), changed)


def _seconds_until(milliseconds: float) -> float:
    """Return the seconds after which a request that ends at this time has expired."""
    return max(0.0, (milliseconds - clock()) / 1000) + 0.001


async def _ask(record: Approval, context: OperationContext) -> object:
    """Ask the caller to confirm its own call; return its action, such as `accept`."""
    # Escaped, because invisible characters could disguise the content.
    message = f"Run {record.operation} with {json.dumps(record.input, separators=(',', ':'))}?"
    with lent_slot():
        answer = await context.elicit(message, _QUESTION)
    return answer.get("action", "")


def _request(
    spec: OperationSpec,
    digest: str,
    value: Any,
    context: OperationContext,
    rule: ApprovalRule,
    form: CheckedForm | None,
) -> tuple[Approval, Any]:
    """Return the request for a call, and a copy of what it binds."""
    identity, now = context.identity, settled()
    whose: JSONObject = {"is_operator": identity is None and context.trusted}
    if identity is not None:
        whose["caller"] = identity.id
        if identity.issuer is not None:
            whose["issuer"] = identity.issuer
        whose["acting"], whose["grants"] = identity.presented
    through: object = context.channel.session if identity is None else ""
    if identity is not None and identity.acting != whose["acting"]:
        # A hub and the worker to which it forwards the call obtain separate approvals.
        through = identity.acting
    try:
        if len(msgspec.json.encode(value)) > 2 * _MAX_INPUT:
            # Sorting the names of a large input takes longer.
            raise _too_large()
        bound = [value] if form is None else [value, form.bound]
        text = canonical([whose, through, spec.id, digest, rule.scope, *bound])
        copied = msgspec.json.decode(canonical(value if form is None else form.shown))
        visible = masked(copied, secret_places(spec.input_schema.document, copied))
        shown = canonical(visible)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        message = f"A call of {spec.id} with files cannot be approved"
        raise CallError(ErrorCode.VALIDATION_ERROR, message) from error
    generated = () if form is None else tuple(map(_pointer, form.generated))
    size = len(shown) + sum(map(len, generated))
    if max(size, len(text) // 2) > _MAX_INPUT:
        raise _too_large()
    if not nests_within(copied, MAX_DEPTH - WRAPPING_DEPTH):
        # The list of requests could not contain it.
        raise CallError(
            ErrorCode.RESOURCE_EXHAUSTED, "The input is nested too deeply to be approved"
        )
    if len(canonical(whose)) > _MAX_WHO:
        message = "The names of the caller and its grant are too long for an approval"
        raise CallError(ErrorCode.RESOURCE_EXHAUSTED, message)
    asked = Approval(
        id=sha256(text).hexdigest()[:32],
        state="pending",
        operation=spec.id,
        input=visible,
        generated=generated,
        size=size,
        scope=rule.scope,
        created=now,
        until=now + int(rule.seconds * 1000),
        claim=context.claim,
        **whose,
    )
    return asked, copied


def _too_large() -> CallError:
    return CallError(ErrorCode.RESOURCE_EXHAUSTED, "The input is too large to be approved")


def _pointer(place: Place) -> str:
    return "".join(map(pointer, place))


def _applies(rule: ApprovalRule, form: CheckedForm | None, work: CheckWork) -> bool:
    """Return whether a call needs approval for what its handler receives; True if that is unknown."""
    return form is None or rule.applies(form.sent, lambda _: form.value, work)


def _refused(record: Approval, what: str) -> CallError:
    message, details = f"{record.operation} was not {what}", {"approval": record.id}
    if record.reason:
        message, details["reason"] = f"{message}: {record.reason}", record.reason
    return CallError(ErrorCode.ACCESS_DENIED, message, details)


def _may_see(scope: str, context: OperationContext) -> bool:
    identity = context.identity
    return context.trusted or (identity is not None and scope in identity.scopes)


def _is_own(record: Approval, context: OperationContext) -> bool:
    """Return whether the answering person is the caller, or may act for the caller."""
    identity = context.identity
    if identity is None:
        return record.is_operator
    acting, keys = identity.presented
    is_caller = (identity.id, identity.issuer) == (record.caller, record.issuer)
    if is_caller and (not record.acting or (acting and not keys)):
        # A person may answer for their agents. Another agent of that person needs a grant that covers it.
        return True
    return not (set(acting).isdisjoint(record.acting) and set(keys).isdisjoint(record.grants))


# ------------------------------------------------------------ the call


class Authority:
    """The store that the calls of a registry share.

    Args:
        store: Stores budgets and approvals; by default in the memory of this process.
    """

    def __init__(self, store: Store | None = None) -> None:
        self.store = store or Store()
        self.approvals = Approvals(self.store)
        self._cleaned_at = -inf

    async def admit(
        self,
        operation: Operation,
        digest: str,
        value: Any,
        context: OperationContext,
        checked: CheckedInput | None,
        complete: Complete,
    ) -> tuple[Any, str | None]:
        """Admit a call whose access and input were checked: check approval, then budget.

        Args:
            operation: The operation.
            digest: The digest of its contract.
            value: The input.
            context: The context of the call.
            checked: What the handler receives; None if that is the input.
            complete: Returns the input with its defaults.

        Returns:
            The input; after an approval, exactly the approved input, even if `value` was modified. And the id of the
            approval that was used, or None.

        Raises:
            CallError: If the call is not admitted.
        """
        operation_id, identity, used = operation.spec.id, context.identity, None
        grant = None if identity is None else identity.grant
        rules = None if grant is None else grant.rules(operation_id)
        rule, by_grant = operation.approve, rules is not None and rules.approve
        form, work = None if checked is None else checked.form, CheckWork()
        if (
            by_grant
            or (rule is not None and rule.applies(value, complete, work))
            or (rule is not None and checked is not None and _applies(rule, form, work))
        ):
            if checked is not None and form is None and not checked.is_foreign:
                # A person could not see what runs.
                raise access_denied(operation_id)
            await self._remove_expired()
            rule = rule or _DEFAULT_RULE
            asked, copied = _request(operation.spec, digest, value, context, rule, form)
            approval = await self.approvals.obtain(asked, rule, context, by_grant=by_grant)
            used = approval.id
            if checked is None:
                value = copied
            await enforce_valid(context, self.store)
        if identity and grant and rules and rules.budgets:
            await self._remove_expired()
            # The counters of all blocks are in one value, so that they change together or not at all.
            root = (identity.presented[1] or grant.keys)[0]
            # A grant that a hub minted for one call does not contain the end of the caller's own grant.
            until = grant.blocks[0].until if grant.origin is None else None
            await self.store.change(f"budget.{root}", lambda held: _spent(held, rules, until))
        return value, used

    async def _remove_expired(self) -> None:
        """Remove the approvals, and the counters of grants, that expired some time ago; every few minutes."""
        if monotonic() - self._cleaned_at < _CLEAN_SECONDS:
            return
        self._cleaned_at = monotonic()
        # If the store does not work, the call that needs it is rejected afterwards.
        with suppress(StoreError):
            await self.approvals.remove_expired()
            for key, held in (await self.store.items("budget")).items():
                until = _decode_spent(held).until
                if until is not None and until + KEPT < settled():
                    await self.store.swap(key, held, None)


class _Spent(msgspec.Struct):
    """The calls that were made with a grant and with all grants derived from it."""

    counts: dict[str, int] = {}
    until: int | None = None
    """When the grant expires, in milliseconds since the epoch; None if that is not known."""


_decode_spent = msgspec.json.Decoder(_Spent).decode


def _spent(held: bytes | None, rules: Rules, until: int | None) -> bytes:
    spent = _Spent() if held is None else _decode_spent(held)
    spent.until = until if spent.until is None else spent.until
    counts, blocks = spent.counts, set[str]()
    for name, most in rules.budgets:
        if name not in counts:
            # The name of a block contains no colon.
            blocks.add(name.partition(":")[0])
        counts[name] = counts.get(name, 0) + 1
        if counts[name] > most:
            raise CallError(ErrorCode.RESOURCE_EXHAUSTED, "The budget of the grant is exhausted")
    # Once for each block, because a holder may count hundreds of patterns.
    if not all(_has_room(counts, block) for block in blocks):
        raise CallError(
            ErrorCode.RESOURCE_EXHAUSTED, "Too many grants were derived from the same grant"
        )
    return msgspec.json.encode(spent)


def _has_room(counts: Collection[str], block: str) -> bool:
    """Return whether new counters of a block are within the limits.

    The holder of a derived grant may use half of the counters that remain, so that it cannot block the others.
    """
    names, most, end = counts, _MAX_COUNTERS, 0
    while len(names) <= most:
        end = block.find("/", end) + 1
        if not end:
            return True
        derived = [each for each in names if each.startswith(block[:end])]
        names, most = derived, (most - len(names) + len(derived)) // 2
    return False
