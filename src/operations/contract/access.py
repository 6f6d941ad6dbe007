"""Identities, the grants that narrow them for agents, and the access that operations require.

Rule 1: fail closed. An operation with requirements rejects a caller without identity. Every error during the check
        rejects the call, for example an unreadable schema in a grant or a broken clock.
Rule 2: a rejection never names the missing scope or resource, nor an operation that the caller did not call itself.
Rule 3: access to one specific resource is checked once the input is final. Earlier checks accept access to any resource
        of the type.
Rule 4: a grant is a chain of blocks, and allows a call only if every block allows it, so a new block can only restrict
        it. It adds no access: the access of its subject is checked first. `authority.grants` has the tokens.
Rule 5: no pattern allows an operation that administers authority, only its exact id. Patterns that restrict (`approve`,
        `calls`, `input`) apply to it as to all others.
"""

from collections.abc import Awaitable, Callable, Collection, Mapping, Set
from typing import Any, Final

import msgspec
from msgspec.structs import force_setattr

from operations.base.attached import Attached
from operations.base.errors import CallError, ErrorCode
from operations.base.json.references import steps
from operations.base.text import enforce_lists
from operations.contract.grant import Grant

# ------------------------------------------------------------ identities and requirements


def _names(field: str, names: Collection[str]) -> tuple[str, ...]:
    enforce_lists(**{field: names})
    # Sorted, because a digest needs a fixed order.
    return tuple(sorted(names) if isinstance(names, Set) else names)


class Identity(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True, dict=True):
    """A caller that an entry point, a connection or code in this process has identified.

    The caller's token may be stored outside the fields, for token exchange: see `caller_tokens`.
    """

    id: str

    scopes: Collection[str] = frozenset()
    """The caller's scopes, converted to a frozen set."""

    resources: Mapping[str, Collection[str]] | None = None
    """The caller's actions on specific resources: `{"type:id": ["action", ...]}`."""

    expires_at: float | None = None
    """When the credential expires, in milliseconds since the epoch; None if it does not."""

    acting: tuple[str, ...] = ()
    """The parties that act for `id`, in the order of delegation."""

    grant: Grant | None = None
    """Restricts the acting parties to a subset of the access of `id`; None for no restriction."""

    issuer: str | None = None
    """The issuer of the token that names the caller; None for a caller that this server names itself, such as that of
    an API key. The same id of two issuers names two callers."""

    @property
    def account(self) -> str:
        """The id, with the issuer after `@` if there is one: different for all callers, without their grants."""
        return self.id if self.issuer is None else f"{self.id}@{self.issuer}"

    @property
    def key(self) -> str:
        """A key from account and grant, which distinguishes two agents of one person from each other and the person."""
        acting, keys = self.presented
        names = [*map(_escaped, (self.id, *acting))]
        if self.issuer is not None:
            # No escaped name contains a single backslash before this character.
            names[0] += "\\@" + _escaped(self.issuer)
        return "\n".join((*names, *keys))

    @property
    def limit_key(self) -> str:
        """A key for limits, which all grants derived from one grant share, because its holder can narrow it at will."""
        keys = self.presented[1]
        return "\n".join((self.key.partition("\n")[0], keys[0])) if keys else self.key

    @property
    def presented(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The parties that act for `id` and the keys of its grant, without the hubs that forwarded the call."""
        if self.grant is None:
            return self.acting, ()
        origin = self.grant.origin
        return (self.acting, self.grant.keys) if origin is None else (origin.acting, origin.keys)

    def __post_init__(self) -> None:
        force_setattr(self, "scopes", frozenset(_names("scopes", self.scopes)))
        for actions in (self.resources or {}).values():
            enforce_lists(resources=actions)
        if self.acting:
            enforce_lists(acting=self.acting)

    def __hash__(self) -> int:
        return hash((self.id, self.issuer, self.scopes))


def _escaped(name: str) -> str:
    """Return a name without line breaks, so that no id is the key of another caller."""
    return name.replace("\\", "\\\\").replace("\n", "\\n")


_CHECK: Attached[Callable[[], Awaitable[bool]]] = Attached("_check")


def with_check(identity: Identity, check: Callable[[], Awaitable[bool]]) -> Identity:
    """Return a copy of an identity with a function that checks its credential again.

    A copy, because a resolver may return the same identity for several credentials.
    """
    return _CHECK.to(identity, check)


async def has_valid_credential(identity: Identity) -> bool:
    """Return whether the credential of a caller is still valid, if that can be checked."""
    check = _CHECK.of(identity)
    return check is None or await check()


class AccessControl(
    msgspec.Struct, frozen=True, rename="camel", omit_defaults=True, forbid_unknown_fields=True
):
    """The access that a call requires; by default none."""

    required_scopes: Collection[str] = ()
    """Scopes that the caller must all have."""

    required_scopes_any: Collection[str] | None = None
    """Scopes of which the caller must have at least one; an empty list does not restrict access."""

    resource_type: str | None = None
    """With `resource_action`: the type of resource that the caller needs."""

    resource_action: str | None = None
    """With `resource_type`: the action that the caller must be allowed on at least one resource of that type."""

    resource_input: str | None = None
    """With `resource_type`: a JSON pointer to the id of the resource in the input. The caller then needs the action on
    that resource (`type:id`) or on all of the type (`type:*`)."""

    def __post_init__(self) -> None:
        force_setattr(self, "required_scopes", _names("required_scopes", self.required_scopes))
        if self.required_scopes_any is not None:
            some = _names("required_scopes_any", self.required_scopes_any)
            force_setattr(self, "required_scopes_any", some or None)
        if (self.resource_type is None) != (self.resource_action is None):
            raise ValueError("resource_type and resource_action must be set together")
        if self.resource_input is not None:
            if self.resource_type is None:
                raise ValueError("resource_input requires resource_type and resource_action")
            if not self.resource_input.startswith("/"):
                raise ValueError("resource_input must be a JSON pointer, which begins with /")

    @property
    def is_open(self) -> bool:
        """Whether there are no requirements."""
        return not self.required_scopes and self.required_scopes_any is self.resource_type is None


OPEN = AccessControl()
"""No requirements."""

UNGRANTED = AccessControl()
"""No requirements, and no grant must cover the operation. Compared by identity, so that no process can send it."""

HIDDEN: Final = "operations: hidden"
"""The scope that hidden operations require. It contains a space, so no token can have it."""


def has_delegated_authority(
    access_control: AccessControl,
    identity: Identity | None,
    operation_id: str | None,
    *,
    authority: bool,
) -> bool:
    """Return whether a hub makes this call on the authority of one of its operations, and not as the caller."""
    grant = None if identity is None else identity.grant
    if grant is None or (origin := grant.origin) is None or origin.authority is None:
        return False
    is_called = origin.operation == operation_id and grant.covers(
        origin.operation, authority=authority
    )
    return is_called and HIDDEN not in access_control.required_scopes


def check_access(
    access_control: AccessControl,
    identity: Identity | None,
    operation_id: str | None = None,
    *,
    authority: bool = False,
) -> bool:
    """Return whether `identity` satisfies `access_control` and its grant covers the operation. Return False on errors.

    Args:
        access_control: The access that the operation requires.
        identity: The caller.
        operation_id: The id of the operation; without it, an identity with a grant is always rejected.
        authority: Whether the operation administers authority (`spec.authority`): a grant then covers it by its exact
            id only.
    """
    try:
        grant = None if identity is None else identity.grant
        if (
            grant is not None
            and access_control is not UNGRANTED
            and (operation_id is None or not grant.covers(operation_id, authority=authority))
        ):
            return False
        is_permitted = access_control.is_open or permission(access_control)(identity)
        return is_permitted or has_delegated_authority(
            access_control, identity, operation_id, authority=authority
        )
    except Exception:  # noqa: BLE001 - an identity that cannot be checked is rejected
        return False


def permission(access_control: AccessControl) -> Callable[[Identity | None], bool]:
    """Return the compiled check of an access control that has requirements, for use with many callers."""
    every = frozenset(access_control.required_scopes)
    some = access_control.required_scopes_any
    more = some is not None or access_control.resource_type is not None

    def permits(identity: Identity | None) -> bool:
        if identity is None:
            return False
        try:
            scopes: Any = identity.scopes  # a frozen set: see Identity
            return scopes >= every and (
                not more
                or (
                    (some is None or not scopes.isdisjoint(some))
                    and (access_control.resource_type is None or _may_act(access_control, identity))
                )
            )
        except Exception:  # noqa: BLE001 - an identity that cannot be checked is rejected
            return False

    return permits


def _may_act(required: AccessControl, identity: Identity) -> bool:
    """Return whether the identity may perform the action on any resource of the type."""
    return any(
        key.partition(":")[:2] == (required.resource_type, ":")
        and not isinstance(actions, (str, Mapping))
        and required.resource_action in actions
        for key, actions in (identity.resources or {}).items()
    )


def resource_permission(
    access_control: AccessControl,
) -> Callable[[Identity | None, Any], bool] | None:
    """Return the check for the resource that the input names; None if access does not depend on the input."""
    pointer = access_control.resource_input
    if pointer is None:
        return None
    kind, action = access_control.resource_type, access_control.resource_action

    def permits(identity: Identity | None, value: Any) -> bool:
        try:
            path = steps(value, pointer)
            named = path[-1][1] if path else None
            if identity is None or type(named) not in (str, int):
                return False
            held = identity.resources or {}
            keys = (f"{kind}:{named}", f"{kind}:*")
            return any(action in held[key] for key in keys if key in held)
        except Exception:  # noqa: BLE001 - an identity that cannot be checked is rejected
            return False

    return permits


def enforce_access(
    access_control: AccessControl,
    identity: Identity | None,
    *,
    operation_id: str,
    authority: bool = False,
) -> None:
    """Check that the caller has access; see `check_access`.

    Raises:
        CallError: With code `ACCESS_DENIED`. The message never names the missing scope.
    """
    if not check_access(access_control, identity, operation_id, authority=authority):
        raise access_denied(operation_id)


def token_not_stored(what: str) -> CallError:
    """Return the error for a call in a run that needs the token of its caller."""
    message = (
        f"{what} acts for its caller at another service, with the token that the caller sent. A run stores no token: "
        "call the operation outside of runs"
    )
    return CallError(ErrorCode.UNAVAILABLE, message, retryable=False)


def access_denied(operation_id: str) -> CallError:
    """Return the error for a rejected caller, without a reason."""
    return CallError(ErrorCode.ACCESS_DENIED, f"Access denied: {operation_id}")
