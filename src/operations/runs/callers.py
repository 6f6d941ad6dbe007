"""The caller of a run: what is stored of it, and who it is when the run continues.

Rule 1: the authority of a run is that of today: a caller that is expired, revoked or unknown continues nothing.
Rule 2: no token and no signature is stored.
"""

import inspect
from collections.abc import Awaitable, Callable
from hashlib import sha256
from typing import Any, TypeAlias

import msgspec
from msgspec.structs import replace

from operations.base.clock import is_over
from operations.base.errors import CallError, ErrorCode
from operations.base.json.values import canonical
from operations.contract.access import Identity, access_denied, has_valid_credential
from operations.contract.context import OperationContext
from operations.contract.grant import Grant, Issuer
from operations.runs.records import Caller

Subjects: TypeAlias = Callable[[Identity], Identity | Awaitable[Identity | None] | None]
"""Returns the present identity for that of the start, without its grant; None if it is not known any more."""

_TRACE = ("traceparent", "tracestate")

OPERATOR = "operator"
"""The owner of runs that the operator starts, in code or at the command line."""

ANONYMOUS = "anonymous"
"""The owner of runs of callers without identity, who see them by their ids only."""


def stored(context: OperationContext) -> bytes:
    """Return what is stored of a caller."""
    identity = context.identity
    trace = {name: context.metadata[name] for name in _TRACE if name in context.metadata}
    common: dict[str, Any] = {
        "authority": context.authority,
        "trusted": context.trusted,
        "lenient": context.lenient,
        "whole": context.whole,
        "metadata": trace,
    }
    if identity is None:
        return msgspec.json.encode(Caller(**common))
    grant, held = identity.grant, identity.resources
    return msgspec.json.encode(
        Caller(
            id=identity.id,
            issuer=identity.issuer,
            scopes=tuple(sorted(identity.scopes)),
            resources=None if held is None else {key: tuple(sorted(held[key])) for key in held},
            expires_at=identity.expires_at,
            acting=identity.acting,
            blocks=() if grant is None else grant.blocks,
            keys=() if grant is None else grant.keys,
            origin=None if grant is None else grant.origin,
            is_granted=grant is not None,
            is_issued=grant is not None and grant.issuer is not None,
            **common,
        )
    )


_read = msgspec.json.Decoder(Caller).decode


async def resolved(
    data: bytes, operation_id: str, subjects: Subjects | None, issuer: Issuer | None
) -> tuple[Caller, Identity | None]:
    """Return a stored caller and its identity of today.

    Raises:
        CallError: `ACCESS_DENIED` if it has expired, was revoked, or is unknown.
    """
    caller = _read(data)
    if caller.id is None:
        return caller, None
    if is_over(caller.expires_at):
        raise access_denied(operation_id)
    known = Identity(
        caller.id, caller.scopes, caller.resources, caller.expires_at, issuer=caller.issuer
    )
    identity: Identity | None = known
    if subjects is not None:
        found = subjects(known)
        identity = await found if inspect.isawaitable(found) else found
    if identity is None:
        raise access_denied(operation_id)
    grant = None
    if caller.is_granted:
        grant = Grant(blocks=caller.blocks, keys=caller.keys, origin=caller.origin)
        if caller.is_issued:
            if issuer is None:
                raise access_denied(operation_id)
            grant = grant.issued_by(issuer)
    identity = replace(identity, acting=caller.acting, grant=grant)
    await enforce_current(identity, operation_id)
    return caller, identity


async def enforce_current(identity: Identity | None, operation_id: str) -> None:
    """Reject a caller that has expired or was revoked.

    Raises:
        CallError: `ACCESS_DENIED`, or `UNAVAILABLE` if revocations cannot be read.
    """
    if identity is None:
        return
    grant = identity.grant
    is_gone = is_over(identity.expires_at) or (grant is not None and grant.has_ended)
    if not is_gone and grant is not None and grant.issuer is not None:
        is_gone = await grant.issuer.is_revoked(grant)
    if is_gone or not await has_valid_credential(identity):
        raise access_denied(operation_id)


# ------------------------------------------------------------ owners


def owner_of(context: OperationContext) -> tuple[str, str, str | None]:
    """Return the owner of the runs that a caller starts, its agent, and the account that people see."""
    identity = context.identity
    if identity is None:
        return (OPERATOR if context.trusted else ANONYMOUS), "", None
    owner = canonical([identity.id, identity.issuer]).decode()
    return owner, identity.limit_key if identity.acting else "", identity.account


def may_see(owner: str, agent: str, context: OperationContext, *scopes: str) -> bool:
    """Return whether a caller may see a run, because it owns it or has one of the scopes."""
    identity = context.identity
    if identity is None:
        return context.trusted or owner == ANONYMOUS
    if has_scope(identity, *scopes):
        return True
    own_owner, own_agent, _ = owner_of(context)
    return owner == own_owner and own_agent in ("", agent)


def has_scope(identity: Identity, *scopes: str) -> bool:
    """Return whether a person has one of these scopes for the runs of others. Its agents never do."""
    is_person = identity.grant is None and not identity.acting
    return is_person and not identity.scopes.isdisjoint(scopes)  # type: ignore[attr-defined]


def key_of(key: str, operation_id: str, context: OperationContext) -> str:
    """Return the stored form of a key: the same for a caller with a renewed grant.

    Raises:
        CallError: `VALIDATION_ERROR` for an anonymous caller.
    """
    identity = context.identity
    if not 1 <= len(key) <= 255:
        raise _invalid_key("A key has 1 to 255 characters")
    if identity is None:
        if not context.trusted:
            raise _invalid_key("Callers without identity cannot use keys")
        whose: list[Any] = [OPERATOR]
    else:
        whose = [identity.issuer, identity.id, identity.presented[0]]
    try:
        text = canonical([*whose, operation_id, key])
    except ValueError:
        raise _invalid_key("A key must be valid Unicode") from None
    return sha256(text).hexdigest()


def _invalid_key(message: str) -> CallError:
    issue = {"path": "/key", "message": message, "keyword": "key"}
    return CallError(ErrorCode.VALIDATION_ERROR, message, {"errors": [issue]})
