"""Mint, narrow, resolve and revoke grants, which are tokens.

    opg1.<subject>.<block>...<signature>

Rule 1: each block is signed with the signature of the previous block as key. Any holder can add a block without the
        secret key, but cannot remove or change a block.
Rule 2: resolving is cheap after the first time: a token is verified once, and revocations are read every few seconds.
Rule 3: fail closed: an unreadable token is rejected. If the store does not work, every grant is rejected, because it
        may have been revoked.
"""

import hmac
from base64 import b64decode, urlsafe_b64encode
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from hashlib import sha256
from math import inf
from secrets import token_hex
from time import monotonic
from typing import Any, Final, TypeAlias, TypedDict, Unpack

import msgspec
from msgspec.structs import replace

from operations.base.clock import is_over, settled
from operations.base.errors import CallError, ErrorCode, ExpiredError, OperationsError
from operations.base.types import JSONObject
from operations.contract.access import Identity, has_valid_credential
from operations.contract.context import OperationContext
from operations.contract.grant import (
    Block,
    BlockLimitError,
    Grant,
    GrantOrigin,
    Name,
    TokenPart,
    secret_key,
)
from operations.store.contract import StoreError
from operations.store.state import LoopLocks, Store

PREFIX: Final = "opg1."
"""The prefix of every token."""

_MAX_TOKEN = 8 * 1024
_MAX_DELEGATED = 256 * 1024
"""The largest token that a hub mints for one call. It contains all scopes and resources of the caller."""

_MAX_BLOCKS = 16
_MAX_NAME = 256
"""The largest length of an id; see `Name`."""

_MAX_RESOLVED = 1_000
_MAX_WEIGHT = 100_000
"""The largest weight of all cached grants: about 100 MB for the largest schemas."""

_DELEGATED_MS = 300_000
"""The lifetime in milliseconds of a grant that a hub mints for one call, after the deadline of the call. The clocks of
the hub and the worker may differ by as much."""

_FRESH_SECONDS = 1.5
"""Seconds for which revocations are cached. Together with the checks of open connections, a revocation takes at most 5
s."""

_KEPT = 24 * 3600 * 1000
"""Milliseconds for which the revocation of an expired block stays in the store: another hub may have a slow clock."""

Delegate: TypeAlias = Callable[[str, OperationContext | None], str | None]
"""Returns the credential for calling an operation on behalf of a caller; None for an unknown caller."""


class GrantError(OperationsError, ValueError):
    """A grant cannot be read, or is not valid. The text never contains the token."""


class _ExpiredGrantError(GrantError, ExpiredError):
    """A grant has expired."""


# ------------------------------------------------------------ tokens


class Subject(TokenPart, frozen=True, kw_only=True):
    """The party whose authority a grant narrows."""

    id: Name

    scopes: tuple[str, ...] | None = None
    """The scopes of the subject; None if the server that verifies the grant looks them up."""

    resources: dict[str, tuple[str, ...]] | None = None
    acting: tuple[str, ...] = ()

    issuer: str | None = None
    """The issuer of the token that named the subject."""

    origin: GrantOrigin | None = None
    """Set if a hub minted the grant for a call."""


class BlockOptions(TypedDict, total=False):
    """The restrictions of a block; see `Block`."""

    operations: Collection[str]
    input: Mapping[str, JSONObject | bool]
    calls: Mapping[str, int]
    approve: Collection[str]

    seconds: float | None
    """The lifetime in seconds."""


def new_block(holder: str, **options: Unpack[BlockOptions]) -> Block:
    """Return a block with a new id; without `operations` it covers all operations.

    Raises:
        GrantError: If a field is not valid; the message names it.
    """
    fields: JSONObject = {"id": token_hex(16), "holder": holder, "operations": ["*"], **options}
    try:
        # A text would be repeated a thousand times.
        seconds = msgspec.convert(fields.pop("seconds", None), float | None)
        if seconds is not None:
            fields["until"] = settled() + int(seconds * 1000)
        block = msgspec.convert(fields, Block)
        _ = Grant(blocks=(block,), keys=("",)).weight
    except (ValueError, OverflowError) as error:
        raise GrantError(f"this grant cannot work: {error}") from error
    return block


def mint(key: bytes, subject: Subject, block: Block) -> str:
    """Return the token of a new grant."""
    text = PREFIX + _encode(msgspec.json.encode(subject))
    return _extended(text, _sign(key, text), block)


def narrow(token: str, block: Block) -> str:
    """Return the token of a narrower grant. This needs no key.

    Raises:
        GrantError: If the token cannot be read, or its blocks are too large together.
    """
    _, blocks, signature = _split(token)
    narrowed = _extended(token.rpartition(".")[0], signature, block)
    if len(blocks) >= _MAX_BLOCKS:
        raise GrantError(f"a grant has at most {_MAX_BLOCKS} blocks")
    subject, chain = read_token(narrowed)
    _usable(Grant(blocks=chain, keys=("",) * len(chain), origin=subject.origin))
    return _short(narrowed)


def _short(token: str) -> str:
    """Return a token that fits into a header.

    Raises:
        GrantError: If it is too long.
    """
    if len(token) > _MAX_TOKEN:
        raise GrantError(f"a grant has at most {_MAX_TOKEN} characters")
    return token


def read_token(token: str) -> tuple[Subject, tuple[Block, ...]]:
    """Return the content of a token, without verifying it.

    Raises:
        GrantError: If the token cannot be decoded, or two blocks have the same id.
    """
    encoded, segments, _ = _split(token)
    subject: Subject = _decode(encoded, Subject)
    if subject.origin is None:
        # Only what a hub mints for one call may be longer.
        _short(token)
    blocks: tuple[Block, ...] = tuple(_decode(each, Block) for each in segments)
    if len({each.id for each in blocks}) < len(blocks):
        # Revoking the later block, whose holder chose its id, would also revoke the earlier one.
        raise GrantError("two blocks of the grant have the same id")
    return subject, blocks


def verify(token: str, key: bytes) -> tuple[Subject, Grant]:
    """Return the subject and the blocks of a token that was minted with `key`.

    Raises:
        GrantError: If the token is not valid.
    """
    subject, blocks, given = _split(token)
    signature, keys = _sign(key, PREFIX + subject), list[str]()
    for block in blocks:
        signature = _sign(signature, block)
        # A hash, not the signature itself, with which the chain could be extended.
        keys.append(sha256(b"key" + signature).hexdigest()[:32])
    if not hmac.compare_digest(signature, given):
        raise GrantError("the signature of the grant is wrong")
    whose, chain = read_token(token)
    return whose, _usable(Grant(blocks=chain, keys=tuple(keys), origin=whose.origin))


def _usable(grant: Grant) -> Grant:
    """Return a grant whose schemas can be used.

    Raises:
        GrantError: If a schema cannot be compiled, or is too large.
    """
    try:
        _ = grant.weight
    except BlockLimitError as error:
        raise GrantError(str(error)) from error
    except (ValueError, RecursionError) as error:
        raise GrantError(f"the grant cannot be used: {type(error).__name__}") from error
    return grant


def _sign(key: bytes, text: str) -> bytes:
    return hmac.digest(key, text.encode(), "sha256")


def _extended(text: str, signature: bytes, block: Block) -> str:
    segment = _encode(msgspec.json.encode(block))
    return f"{text}.{segment}.{_encode(_sign(signature, segment))}"


def _split(token: str) -> tuple[str, list[str], bytes]:
    """Return the subject, the blocks and the signature of a token."""
    is_token = token.startswith(PREFIX) and len(token) <= _MAX_DELEGATED and token.isascii()
    parts = token.removeprefix(PREFIX).split(".")
    if not is_token or not 3 <= len(parts) <= _MAX_BLOCKS + 2:
        raise GrantError("this is not a grant, or it is incomplete")
    signature = _decode(parts[-1], None)
    if _encode(signature) != parts[-1]:
        # Base64 has several texts for the same bytes; a grant has one.
        raise GrantError("the signature of the grant is not in its usual form")
    return parts[0], parts[1:-1], signature


def _encode(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode()


def _decode(segment: str, cls: type[Any] | None) -> Any:
    """Return a decoded part of a token; its bytes if `cls` is None."""
    try:
        data = b64decode(segment + "=" * (-len(segment) % 4), altchars=b"-_", validate=True)
        return data if cls is None else msgspec.json.decode(data, type=cls)
    except (ValueError, RecursionError) as error:
        cause = error.__cause__
        message = (
            str(cause)
            if isinstance(cause, BlockLimitError)
            else "this is not a grant, or it is incomplete"
        )
        raise GrantError(message) from error


# ------------------------------------------------------------ identities


_Resolved: TypeAlias = tuple[Subject, Grant, Identity | None, Identity]
"""A verified token: its subject, its grant, the current identity of the subject if the token does not contain its
scopes, and the resulting identity."""


class Grants:
    """Mints and resolves grants under one key; revocations and budgets are in a store.

    `resolve` resolves credentials: pass it to `create_app(resolve=...)` or `serve_calls(resolve=...)`.

    Args:
        key: At least 32 random bytes. The key can create any grant.
        store: Stores revocations; by default in the memory of this process.
        subjects: Returns the current identity of a subject whose scopes are not in the token, or None.

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
        self.store = store or Store()
        self._subjects = subjects
        self._resolved: dict[str, _Resolved] = {}
        self._weight = 0
        """The weight of the cached grants."""
        self._revoked = dict[str, int | None]()
        """The known revocations and their ends. They stay valid if the store loses them."""
        self._read_at = self._failed_at = -inf
        self._lock = LoopLocks()

    def create(self, subject: Identity | str, holder: str, **block: Unpack[BlockOptions]) -> str:
        """Return the token of a new grant.

        Args:
            subject: The subject whose authority the grant narrows: an identity, whose scopes the token then contains;
                or an id, whose scopes are looked up when the grant is used.
            holder: The agent that uses the grant.
            block: The restrictions.

        Raises:
            GrantError: If the restrictions are not valid; the message gives the reason.
        """
        if "operations" not in block:
            raise GrantError("name the operations that the grant covers, such as task.*")
        if isinstance(subject, Identity) and subject.grant is not None:
            raise GrantError(
                "the subject of a grant cannot be another grant: narrow that grant instead"
            )
        whose = Subject(id=subject) if isinstance(subject, str) else _subject(subject)
        if not 1 <= len(whose.id) <= _MAX_NAME:
            raise GrantError(f"the id of the subject must have 1 to {_MAX_NAME} characters")
        return _short(mint(self._key, whose, new_block(holder, **block)))

    def blocks(self, token: str) -> tuple[Block, ...]:
        """Return the blocks of a token, which may have expired.

        Raises:
            GrantError: If it was not created with this key.
        """
        return verify(token, self._key)[1].blocks

    def for_name(self, name: str) -> str:
        """Return the key for the `Grants` of a worker group or spoke, in hexadecimal."""
        return _sign(self._key, f"opg1 key of {name}").hex()

    def delegate(self, name: str, holder: str = "hub", namespace: str | None = None) -> Delegate:
        """Return a function that mints a grant for each call to a worker group or spoke.

        The grant covers that operation for a short time and is signed with the key `for_name(name)`. It identifies the
        caller to the receiver, and the operation of this process on whose authority the call runs, if it does not run
        as the caller. Approvals and budgets of the caller's grant also apply to the receiver's own calls; budgets are
        exact if the receiver shares the store.

        Args:
            name: The name of the group or spoke.
            holder: The name of this process in `acting`.
            namespace: The namespace into which the receiver's operations are imported, with their id as name.
        """
        own = "" if namespace is None else f"{namespace}."
        key = self.for_name(name).encode()

        def credential(operation_id: str, context: OperationContext | None) -> str | None:
            identity = None if context is None else context.identity
            if context is None or identity is None:
                return None
            left = context.remaining
            until = settled() + (0 if left == inf else int(left * 1000)) + _DELEGATED_MS
            if identity.expires_at is not None and context.authority_id is None:
                until = min(until, int(identity.expires_at))
            (acting, keys), grant = identity.presented, identity.grant
            approve, budgets = ((), ()) if grant is None else (grant.approve, grant.budgets)
            above = None if grant is None else grant.origin
            prefix = own if above is None else above.prefix + own
            origin = GrantOrigin(
                operation=operation_id,
                # Only for limits, because older workers reject grants with a prefix.
                prefix=prefix if approve or budgets else "",
                acting=acting,
                keys=keys,
                approve=approve,
                budgets=budgets,
                authority=context.authority_id,
            )
            block = Block(id=token_hex(16), holder=holder, operations=(operation_id,), until=until)
            token = mint(key, _subject(identity, origin), block)
            if len(token) > _MAX_DELEGATED:
                message = "The caller has too many scopes and resources to be named to the workers"
                raise CallError(ErrorCode.RESOURCE_EXHAUSTED, message)
            return token

        return credential

    async def resolve(self, credential: str) -> Identity | None:
        """Return the identity of a grant; None for a credential of another kind.

        Raises:
            GrantError: If the grant is not valid.
            StoreError: If revocations cannot be read.
        """
        if not credential.startswith(PREFIX):
            return None
        identity = self.identify(credential)
        if identity.grant is None or await self.is_revoked(identity.grant):
            raise GrantError("the grant was revoked")
        return identity

    def identify(self, token: str) -> Identity:
        """Return the identity of a grant, which may have been revoked.

        Raises:
            GrantError: If the grant is not valid.
        """
        found = self._resolved.get(token)
        if found is None:
            found = self._remember(token, *verify(token, self._key))
        subject, grant, base, identity = found
        if base is not None and self._base(subject) is not base:
            # The identity of the subject has changed.
            identity = self._remember(token, subject, grant)[-1]
        if has_expired(identity):
            raise _ExpiredGrantError("the grant has expired")
        return identity

    def is_valid(self, grant: Grant) -> bool:
        """Return whether no block was revoked; False if revocations must be read again to know this."""
        return monotonic() - self._read_at <= _FRESH_SECONDS and not self.has_revoked(grant)

    async def is_revoked(self, grant: Grant) -> bool:
        """Return whether a block was revoked, as of a few seconds ago at most.

        Raises:
            StoreError: If revocations cannot be read.
        """
        if monotonic() - self._read_at > _FRESH_SECONDS:
            await self._read_revocations()
        return self.has_revoked(grant)

    def has_revoked(self, grant: Grant) -> bool:
        """Return whether a block is known to be revoked, without reading revocations."""
        revoked = self._revoked
        return bool(revoked) and (
            any(each.id in revoked for each in grant.blocks)
            or any(key in revoked for key in grant.keys)
        )

    def _remember(self, credential: str, subject: Subject, grant: Grant) -> _Resolved:
        base, grant = self._base(subject), grant.issued_by(self)
        whose = base or Identity(
            subject.id, subject.scopes or (), subject.resources, issuer=subject.issuer
        )
        ends = min(grant.until, inf if whose.expires_at is None else whose.expires_at)
        holders = (each.holder for each in grant.blocks)
        identity = replace(
            whose,
            expires_at=None if ends == inf else ends,
            acting=(*subject.acting, *whose.acting, *holders),
            grant=grant,
        )
        found = subject, grant, base, identity
        # A grant for one call is not used again, and may be large.
        if grant.origin is None:
            self._forget(credential)
            self._resolved[credential] = found
            self._weight += grant.weight
        while len(self._resolved) > _MAX_RESOLVED or self._weight > _MAX_WEIGHT:
            self._forget(next(iter(self._resolved)))
        return found

    def _forget(self, credential: str) -> None:
        held = self._resolved.pop(credential, None)
        self._weight -= 0 if held is None else held[1].weight

    def _base(self, subject: Subject) -> Identity | None:
        if subject.scopes is not None:
            return None
        # Only callers without an issuer are known here by their id.
        found = None
        if self._subjects is not None and subject.issuer is None:
            found = self._subjects(subject.id)
        if found is None or found.grant is not None:
            raise GrantError("the subject of the grant is not known here, or is a grant")
        return found

    async def revoke(self, block_id: str, until: int | None = None) -> None:
        """Revoke a block, and every grant that contains it.

        Args:
            block_id: The id of the block, or its key, which the records of calls contain.
            until: When the block expires, in milliseconds since the epoch: the revocation is removed a day later.

        Raises:
            StoreError: If the store does not work.
        """

        def update(held: bytes | None) -> bytes:
            known: Any = until if held is None else msgspec.json.decode(held)["until"]
            # Holders choose the ids of their blocks: a later revocation must not shorten this one.
            ends = None if until is None or known is None else max(until, known)
            return msgspec.json.encode({"id": block_id, "until": ends})

        held = msgspec.json.decode(await self.store.change(_revocation(block_id), update))
        self._revoked[block_id], self._read_at = held["until"], -inf

    async def _read_revocations(self) -> None:
        asked = monotonic()
        async with self._lock("revocations"):
            if monotonic() - self._read_at <= _FRESH_SECONDS:
                return
            if self._failed_at > asked:
                # Callers that waited for this attempt would otherwise wait for one more attempt each.
                raise StoreError
            began = monotonic()
            try:
                found = await self.store.items("revoked")
            except StoreError:
                self._failed_at = monotonic()
                raise
            for key, value in found.items():
                held: JSONObject = msgspec.json.decode(value)
                self._revoked[held["id"]] = held["until"]
                if _is_over(held["until"]):
                    with suppress(StoreError):
                        await self.store.swap(key, value, None)
            for each in [each for each, until in self._revoked.items() if _is_over(until)]:
                del self._revoked[each]
            self._read_at = began


def _is_over(until: int | None) -> bool:
    """Return whether a revoked block has expired, also by the clock of another hub."""
    return until is not None and until + _KEPT < settled()


def has_expired(identity: Identity) -> bool:
    """Return whether an identity or its grant has expired."""
    return is_over(identity.expires_at)


async def enforce_valid(context: OperationContext, store: Store) -> None:
    """Reject a call whose credential expired or was revoked, or became required, while the call waited.

    Raises:
        CallError: `ACCESS_DENIED`, or `UNAVAILABLE` if the store does not work.
    """
    identity, serves_anonymous = context.identity, context.channel.serves_anonymous
    if identity is None:
        if serves_anonymous is not None and not serves_anonymous():
            raise CallError(ErrorCode.ACCESS_DENIED, "Send a credential")
        return
    is_over, grant = has_expired(identity), identity.grant
    if grant is not None and grant.issuer is not None:
        is_over = is_over or await grant.issuer.is_revoked(grant)
    # The issuer may have read revocations some seconds ago.
    for block in () if grant is None else grant.blocks:
        is_over = is_over or await store.get(_revocation(block.id)) is not None
    is_over = is_over or not await has_valid_credential(identity)
    if is_over:
        raise CallError(ErrorCode.ACCESS_DENIED, "The credential is not valid any more")


def _subject(identity: Identity, origin: GrantOrigin | None = None) -> Subject:
    held = identity.resources
    return Subject(
        id=identity.id,
        scopes=tuple(sorted(identity.scopes)),
        resources=None if held is None else {key: tuple(sorted(held[key])) for key in held},
        acting=identity.acting,
        issuer=identity.issuer,
        origin=origin,
    )


def _revocation(block_id: str) -> str:
    # Holders choose the ids of their blocks, but a store allows only some characters: use a hash.
    return "revoked." + sha256(block_id.encode()).hexdigest()
