"""Mint, resolve and revoke grants.

Rule 1: resolving is cheap after the first time: a token is verified once, and revocations are read every few seconds.
Rule 2: a store that does not work rejects every grant: a revocation may be in it.
"""

import asyncio
from collections.abc import Callable
from hashlib import sha256
from math import inf
from secrets import token_hex
from time import monotonic
from typing import Any, TypeAlias, Unpack

import msgspec
from msgspec.structs import replace

from operations._grants import (
    PREFIX,
    Block,
    BlockOptions,
    Grant,
    GrantError,
    Origin,
    Subject,
    clock,
    derived_key,
    mint,
    new_block,
    secret_key,
    verify,
)
from operations.access import Identity
from operations.authority.store import MemoryStore, Store, change, checked
from operations.context import OperationContext
from operations.errors import CallError, ErrorCode
from operations.types import JSONObject

_MAX_RESOLVED = 1_000
_DELEGATED_MS = 60_000
"""Milliseconds for which a grant that a hub mints for one call is valid, unless the call may take longer."""

_FRESH_SECONDS = 1.5
"""Seconds for which revocations that were read are used. With the checks of open connections: 5 s."""


Delegate: TypeAlias = Callable[[str, OperationContext | None], str | None]
"""Returns the credential for a call of an operation on a caller's behalf; None for an unknown caller."""


class _Resolved:
    """A verified token and its content.

    Args:
        subject: Its subject.
        grant: Its blocks.
        base: What the subject was known as, if its scopes are not in the token.
    """

    __slots__ = ("base", "ends", "grant", "identity", "revoked", "subject")

    def __init__(self, subject: Subject, grant: Grant, base: Identity | None) -> None:
        self.subject, self.grant, self.base = subject, grant, base
        self.revoked: frozenset[str] | None = None
        """The revocations that it was checked against."""

        whose = base or Identity(subject.id, subject.scopes or (), subject.resources)
        self.ends = grant.until if whose.expires_at is None else min(grant.until, whose.expires_at)
        self.identity = replace(
            whose,
            expires_at=None if self.ends == inf else self.ends,
            acting=(*subject.acting, *whose.acting, *(each.holder for each in grant.blocks)),
            grant=grant,
        )


class Grants:
    """Mints and resolves grants under one key; revocations and budgets are in a store.

    `resolve` is a resolver of credentials: pass it to `create_app(resolve=...)` or `serve_calls(resolve=...)`.

    Args:
        key: At least 32 random bytes. Any grant can be made with it.
        store: Where revocations are kept; by default in this process.
        subjects: Returns the identity that a subject without scopes of its own has now, or None.

    Raises:
        ValueError: If the key is too short.
    """

    def __init__(
        self,
        key: str | bytes,
        *,
        store: Store | None = None,
        subjects: Callable[[str], Identity | None] | None = None,
    ) -> None:
        self._key = secret_key(key, "grants")
        self.store: Store = store or MemoryStore()
        self._subjects = subjects
        self._resolved: dict[str, _Resolved] = {}
        self._revoked: frozenset[str] = frozenset()
        self._read_at = -inf
        self._reading = asyncio.Lock()

    def create(self, subject: Identity | str, holder: str, **block: Unpack[BlockOptions]) -> str:
        """Return the token of a new grant.

        Args:
            subject: Whose authority it narrows: an identity, whose scopes the token then contains; or an id, whose
                scopes are looked up whenever the grant is used.
            holder: Who will act with it.
            block: What it allows.

        Raises:
            GrantError: If the token is not valid; the message names the reason.
        """
        if "operations" not in block:
            raise GrantError("name the operations that the grant covers, such as task.*")
        if isinstance(subject, str):
            whose = Subject(id=subject)
        elif subject.grant is not None:
            raise GrantError("a grant is narrowed, not made from a grant")
        else:
            whose = _subject(subject)
        return mint(self._key, whose, new_block(holder, **block))

    def for_name(self, name: str) -> str:
        """Return the key for a group of workers or a spoke, in hexadecimal: its `Grants` take it, and nothing else."""
        return derived_key(self._key, name).hex()

    def delegate(self, name: str, holder: str = "hub") -> Delegate:
        """Return a function that mints a grant for each call to a group of workers or a spoke.

        The grant covers that operation for a short time, under the key `for_name(name)`, so that the receiver knows on
        whose behalf it acts. Approvals and budgets of the caller's grant hold for further calls of the receiver as
        well; budgets are exact if it shares the store.
        """
        key = self.for_name(name).encode()

        def credential(operation_id: str, context: OperationContext | None) -> str | None:
            identity = None if context is None else context.identity
            if context is None or identity is None:
                return None
            until = max(clock() + _DELEGATED_MS, int(context.deadline or 0))
            if identity.expires_at is not None:
                until = min(until, int(identity.expires_at))
            acting, keys = identity.presented
            grant = identity.grant
            origin = Origin(
                operation=operation_id,
                acting=acting,
                keys=keys,
                approve=() if grant is None else grant.approve,
                budgets=() if grant is None else grant.budgets,
            )
            block = Block(id=token_hex(8), holder=holder, operations=(operation_id,), until=until)
            return mint(key, _subject(identity, origin), block)

        return credential

    async def resolve(self, credential: str) -> Identity | None:
        """Return the identity behind a grant; None for a credential of another kind.

        Raises:
            GrantError: If the grant is not valid.
            StoreError: If revocations cannot be read.
        """
        found = self._resolved.get(credential)
        if found is None:
            if not credential.startswith(PREFIX):
                return None
            found = self._remember(credential, *verify(credential, self._key))
        elif found.base is not None and self._base(found.subject) is not found.base:
            # Its subject has changed.
            found = self._remember(credential, found.subject, found.grant)
        if clock() >= found.ends:
            raise GrantError("a grant that has expired")
        if monotonic() - self._read_at > _FRESH_SECONDS:
            await self._read_revocations()
        if found.revoked is not self._revoked:
            if not self._revoked.isdisjoint(each.id for each in found.grant.blocks):
                raise GrantError("a grant that was revoked")
            found.revoked = self._revoked
        return found.identity

    def _remember(self, credential: str, subject: Subject, grant: Grant) -> _Resolved:
        found = self._resolved[credential] = _Resolved(subject, grant, self._base(subject))
        if len(self._resolved) > _MAX_RESOLVED:
            del self._resolved[next(iter(self._resolved))]
        return found

    def _base(self, subject: Subject) -> Identity | None:
        if subject.scopes is not None:
            return None
        found = None if self._subjects is None else self._subjects(subject.id)
        if found is None:
            raise GrantError("a grant whose subject is not known here")
        if found.grant is not None:
            raise GrantError("a grant whose subject is a grant")
        return found

    async def revoke(self, block_id: str, until: int | None = None) -> None:
        """Revoke a block, and every grant that contains it.

        Args:
            block_id: Its id.
            until: When the block expires, in milliseconds since the epoch: the revocation is not needed then.

        Raises:
            StoreError: If the store does not work.
        """

        def update(held: bytes | None) -> tuple[bytes, None]:
            known: Any = until if held is None else msgspec.json.decode(held)["until"]
            # Holders choose the ids of their blocks: no later revocation shortens this one.
            ends = None if until is None or known is None else max(until, known)
            return msgspec.json.encode({"id": block_id, "until": ends}), None

        await change(self.store, _revocation(block_id), update)
        self._read_at = -inf

    async def _read_revocations(self) -> None:
        async with self._reading:
            if monotonic() - self._read_at <= _FRESH_SECONDS:
                return
            began, revoked = monotonic(), set[str]()
            for value in (await checked(self.store.items("revoked"))).values():
                held: JSONObject = msgspec.json.decode(value)
                until: Any = held["until"]
                if until is not None and until < clock():
                    await checked(self.store.delete(_revocation(held["id"])))
                else:
                    revoked.add(held["id"])
            if revoked ^ self._revoked:
                self._revoked = frozenset(revoked)
            self._read_at = began


async def enforce_valid(identity: Identity, store: Store) -> None:
    """Reject a call that has waited if its credential has expired, or its grant was revoked meanwhile.

    Raises:
        CallError: `ACCESS_DENIED`, or `UNAVAILABLE` if the store does not work.
    """
    is_over = identity.expires_at is not None and identity.expires_at <= clock()
    for block in () if identity.grant is None else identity.grant.blocks:
        is_over = is_over or (await checked(store.get(_revocation(block.id))))[0] is not None
    if is_over:
        raise CallError(ErrorCode.ACCESS_DENIED, "The credential is not valid any more")


def credential_of(
    own: str | None,
    delegate: Delegate | None,
    operation_id: str,
    context: OperationContext | None,
    given: str | None,
) -> str | None:
    """Return the credential of a call to another process: the one given, one on behalf of the caller, or the `own` one.

    Listings, and calls on the authority of the operator or of an operation, use the own one.
    """
    if given is not None:
        return given
    is_own = context is None or context.trusted or context.authority is not None
    return own if delegate is None or is_own else delegate(operation_id, context)


def _subject(identity: Identity, origin: Origin | None = None) -> Subject:
    held = identity.resources
    return Subject(
        id=identity.id,
        scopes=tuple(sorted(identity.scopes)),
        resources=None if held is None else {key: tuple(sorted(held[key])) for key in held},
        acting=identity.acting,
        origin=origin,
    )


def _revocation(block_id: str) -> str:
    # Holders choose the ids of their blocks; a store allows only some characters.
    return "revoked/" + sha256(block_id.encode()).hexdigest()
