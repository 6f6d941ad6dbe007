"""Mint, resolve and revoke grants.

Rule 1: resolving is cheap after the first time: a token is verified once, and revocations are read every few seconds.
Rule 2: a store that does not work rejects every grant: a revocation may be in it.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from secrets import token_hex
from time import monotonic
from typing import Any, TypeAlias, TypedDict, Unpack

import msgspec
from msgspec.structs import replace

from operations._grants import (
    PREFIX,
    Block,
    Grant,
    GrantError,
    Subject,
    clock,
    derived_key,
    matcher,
    mint,
    new_block,
    verify,
)
from operations.access import Identity
from operations.authority.store import MemoryStore, Store, change
from operations.context import OperationContext
from operations.types import JSONObject

_MAX_RESOLVED = 1_000
_DELEGATED_MS = 60_000
"""Milliseconds for which a grant that a hub mints for one call is valid, unless the call may take longer."""

_FRESH_SECONDS = 1.5
"""Seconds for which revocations that were read are used. With the checks of open connections: 5 s."""

MIN_KEY = 32
"""Bytes of a key."""


Delegate: TypeAlias = Callable[[str, OperationContext | None], str | None]
"""Returns the credential for a call of an operation on a caller's behalf; None for an unknown caller."""


class BlockOptions(TypedDict, total=False):
    """What a block may restrict; see `Block`."""

    operations: Iterable[str]
    input: Mapping[str, JSONObject | bool]
    calls: Mapping[str, int]

    seconds: float
    """How long it is valid."""

    approve: Iterable[str]


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
        self._key = key.encode() if isinstance(key, str) else key
        if len(self._key) < MIN_KEY:
            raise ValueError(f"the key of grants needs at least {MIN_KEY} bytes")
        self.store: Store = store or MemoryStore()
        self._subjects = subjects
        self._verified: OrderedDict[bytes, tuple[Subject, Grant, Identity | None, Identity]] = (
            OrderedDict()
        )
        self._revoked: frozenset[str] = frozenset()
        self._read_at = float("-inf")
        self._reading = asyncio.Lock()

    def create(self, subject: Identity | str, holder: str, **block: Unpack[BlockOptions]) -> str:
        """Return the token of a new grant.

        Args:
            subject: Whose authority it narrows: an identity, whose scopes the token then contains; or an id, whose
                scopes are looked up whenever the grant is used.
            holder: Who will act with it.
            block: What it allows.

        Raises:
            GrantError: Naming what is wrong.
        """
        if "operations" not in block:
            raise GrantError("a grant names the operations that it covers")
        if isinstance(subject, str):
            whose = Subject(id=subject)
        elif subject.grant is not None:
            raise GrantError("a grant is narrowed, not made from a grant")
        else:
            whose = replace(subject_of(subject), grants=None)
        return mint(self._key, whose, new_block(holder, **block))

    def for_name(self, name: str) -> str:
        """Return the key for a group of workers or a spoke, in hexadecimal: its `Grants` take it, and nothing else."""
        return derived_key(self._key, name).hex()

    def delegate(self, name: str, holder: str = "hub") -> Delegate:
        """Return a function that mints a grant for each call to a group of workers or a spoke.

        The grant covers that operation for a short time, under the key `for_name(name)`, so that the receiver knows on
        whose behalf it acts. Approvals that the caller's grant requires hold for the calls of the receiver as well.
        """
        key = self.for_name(name).encode()

        def credential(operation_id: str, context: OperationContext | None) -> str | None:
            identity = None if context is None else context.identity
            if context is None or identity is None:
                return None
            grant = identity.grant
            until = max(clock() + _DELEGATED_MS, int(context.deadline or 0))
            if identity.expires_at is not None:
                until = min(until, int(identity.expires_at))
            patterns = () if grant is None else (p for each in grant.blocks for p in each.approve)
            block = Block(
                id=token_hex(8),
                holder=holder,
                operations=(operation_id,),
                until=until,
                # This call has its approval already.
                approve=tuple(p for p in patterns if not matcher((p,))(operation_id)),
            )
            return mint(key, subject_of(identity), block)

        return credential

    async def resolve(self, credential: str) -> Identity | None:
        """Return the identity behind a grant; None for a credential of another kind.

        Raises:
            GrantError: If the grant is not valid.
            StoreError: If revocations cannot be read.
        """
        if not credential.startswith(PREFIX):
            return None
        mark = sha256(credential.encode(errors="replace")).digest()
        found = self._verified.get(mark)
        if found is None:
            subject, grant = verify(credential, self._key)
            found = self._remember(mark, subject, grant)
        else:
            self._verified.move_to_end(mark)
            subject, grant = found[:2]
        if subject.scopes is None and self._base(subject) is not found[2]:
            # Its subject has changed.
            found = self._remember(mark, subject, grant)
        identity = found[3]
        if clock() >= grant.until:
            raise GrantError("a grant that has expired")
        if monotonic() - self._read_at > _FRESH_SECONDS:
            await self._read_revocations()
        if not self._revoked.isdisjoint(each.id for each in grant.blocks):
            raise GrantError("a grant that was revoked")
        return identity

    def _remember(
        self, mark: bytes, subject: Subject, grant: Grant
    ) -> tuple[Subject, Grant, Identity | None, Identity]:
        base = self._base(subject)
        whose = base or Identity(subject.id, subject.scopes or (), subject.resources)
        ends = min(grant.until, whose.expires_at or float("inf"))
        identity = replace(
            whose,
            expires_at=None if ends == float("inf") else ends,
            acting=(*subject.acting, *whose.acting, *(each.holder for each in grant.blocks)),
            grant=grant,
        )
        found = self._verified[mark] = (subject, grant, base, identity)
        if len(self._verified) > _MAX_RESOLVED:
            self._verified.popitem(last=False)
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
        value = msgspec.json.encode({"id": block_id, "until": until})
        await change(self.store, _revocation(block_id), lambda held: (value, None))
        self._read_at = float("-inf")

    async def _read_revocations(self) -> None:
        async with self._reading:
            if monotonic() - self._read_at <= _FRESH_SECONDS:
                return
            began, revoked = monotonic(), set[str]()
            for value in (await self.store.items("revoked")).values():
                held: JSONObject = msgspec.json.decode(value)
                until: Any = held["until"]
                if until is not None and until < clock():
                    await self.store.delete(_revocation(held["id"]))
                else:
                    revoked.add(held["id"])
            self._revoked, self._read_at = frozenset(revoked), began


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


def subject_of(identity: Identity) -> Subject:
    """Return an identity as the subject of a grant, with its scopes."""
    resources = identity.resources
    return Subject(
        id=identity.id,
        scopes=tuple(sorted(identity.scopes)),
        resources=None
        if resources is None
        else {key: tuple(sorted(actions)) for key, actions in resources.items()},
        acting=identity.acting,
        grants=() if identity.grant is None else identity.grant.presented,
    )


def _revocation(block_id: str) -> str:
    # Holders choose the ids of their blocks; a store allows only some characters.
    return "revoked/" + sha256(block_id.encode()).hexdigest()
