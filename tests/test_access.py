from collections.abc import AsyncIterator
from typing import Any, cast

import msgspec
import pytest

from operations import (
    AccessControl,
    CallError,
    ErrorCode,
    Identity,
    OperationContext,
    OperationRegistry,
    check_access,
    enforce_access,
)

ALICE = Identity("alice", ["task:read", "task:write"], {"project:7": ["edit"], "team:1": ["view"]})
NOBODY = Identity("nobody")


@pytest.mark.requirement("R08")
@pytest.mark.parametrize(
    ("access", "identity", "allowed"),
    [
        (AccessControl(), None, True),
        (AccessControl(), NOBODY, True),
        (AccessControl(["task:read"]), None, False),
        (AccessControl(["task:read"]), NOBODY, False),
        (AccessControl(["task:read"]), ALICE, True),
        (AccessControl(["task:read", "task:write"]), ALICE, True),
        (AccessControl(["task:read", "admin"]), ALICE, False),
        (AccessControl(required_scopes_any=["admin", "task:write"]), ALICE, True),
        (AccessControl(required_scopes_any=["admin"]), ALICE, False),
        (AccessControl(required_scopes_any=["admin"]), None, False),
        (AccessControl(["admin"], ["task:write"]), ALICE, False),
        (AccessControl(resource_type="project", resource_action="edit"), ALICE, True),
        (AccessControl(resource_type="project", resource_action="delete"), ALICE, False),
        (AccessControl(resource_type="team", resource_action="edit"), ALICE, False),
        (AccessControl(resource_type="pro", resource_action="edit"), ALICE, False),
        (AccessControl(resource_type="project", resource_action="edit"), NOBODY, False),
        (AccessControl(resource_type="project", resource_action="edit"), None, False),
        (AccessControl(["admin"], resource_type="project", resource_action="edit"), ALICE, False),
    ],
)
def test_access_follows_the_table(
    access: AccessControl, identity: Identity | None, allowed: bool
) -> None:
    assert check_access(access, identity) is allowed


class _Broken:
    def issuperset(self, _: object) -> bool:
        raise RuntimeError("the directory is down")


@pytest.mark.requirement("R08")
def test_an_exception_during_the_access_check_rejects_the_call() -> None:
    identity = Identity("eve")
    msgspec.structs.force_setattr(identity, "scopes", _Broken())

    assert check_access(AccessControl(["x"]), identity) is False


class _BrokenGrant:
    def covers(self, _: str) -> bool:
        raise RuntimeError("the store is down")


@pytest.mark.requirement("R08")
@pytest.mark.parametrize(
    "broken", ["eve", Identity("eve", ["x"], grant=cast("Any", _BrokenGrant()))]
)
async def test_a_caller_that_cannot_be_checked_is_rejected(broken: Any) -> None:
    registry = OperationRegistry()

    @registry.operation("task.get", scopes=["x"])
    async def get() -> int:
        return 1

    @registry.operation("task.watch", scopes=["x"])
    async def watch() -> AsyncIterator[int]:
        yield 1

    assert check_access(AccessControl(["x"]), broken, "task.get") is False
    context = OperationContext(identity=broken)
    with pytest.raises(CallError) as called:
        await registry.execute("task.get", {}, context)
    with pytest.raises(CallError) as subscribed:
        await anext(aiter(registry.subscribe("task.watch", {}, context)))

    assert called.value.code == subscribed.value.code == ErrorCode.ACCESS_DENIED


def test_an_action_given_as_a_string_is_rejected() -> None:
    odd: Any = {"project:7": "edit"}

    with pytest.raises(ValueError, match="resources must be a list of strings"):
        Identity("eve", [], odd)


def test_enforce_permits_allowed_callers_and_reveals_no_scope_to_others() -> None:
    enforce_access(AccessControl(["task:read"]), ALICE, operation_id="task.get")

    with pytest.raises(CallError) as caught:
        enforce_access(AccessControl(["secret:scope"]), ALICE, operation_id="task.get")

    assert caught.value.code == ErrorCode.ACCESS_DENIED
    assert "secret:scope" not in caught.value.message
    assert caught.value.details is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: AccessControl("admin"),
        lambda: AccessControl(required_scopes_any="admin"),
        lambda: AccessControl(resource_type="project"),
        lambda: AccessControl(resource_action="edit"),
        lambda: Identity("x", "admin"),
    ],
)
def test_a_contradictory_rule_is_rejected(make: Any) -> None:
    with pytest.raises(ValueError, match=r"scopes|resource"):
        make()


def test_identities_and_rules_go_over_the_wire() -> None:
    access = AccessControl(["a"], ["b", "c"], "project", "edit")

    assert msgspec.json.decode(msgspec.json.encode(access), type=AccessControl) == access
    assert msgspec.json.decode(msgspec.json.encode(ALICE), type=Identity) == ALICE
    assert b'"requiredScopesAny":["b","c"]' in msgspec.json.encode(access)
    assert hash(access) == hash(AccessControl(["a"], ["b", "c"], "project", "edit"))
    assert len({ALICE, Identity("alice", ["task:read"])}) == 2


def test_a_control_made_of_a_set_is_the_same_in_every_process() -> None:
    assert AccessControl({"b", "a", "c"}).required_scopes == ("a", "b", "c")


def test_a_resource_without_its_id_grants_nothing() -> None:
    needed = AccessControl(resource_type="doc", resource_action="read")

    assert check_access(needed, Identity("a", resources={"doc:1": ["read"]}))
    assert not check_access(needed, Identity("a", resources={"doc": ["read"]}))
    assert not check_access(needed, Identity("a", resources={"doc:1": {"read": False}}))


def test_a_requirement_that_is_not_understood_is_rejected() -> None:
    with pytest.raises(msgspec.ValidationError, match="required_scopes"):
        msgspec.convert({"required_scopes": ["admin"]}, AccessControl)
