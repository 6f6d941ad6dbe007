"""Nested calls on the authority of an operation, and access to the resource that an input names."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from operations import (
    AccessControl,
    CallError,
    ErrorCode,
    Identity,
    OperationContext,
    OperationRegistry,
    enforce_access,
)
from operations.calls import CallGraph
from operations.tools import ToolConfig, configure_tools


def build(**options: Any) -> OperationRegistry:
    """Return a registry in which `agent.run` calls the operation that its input names."""
    registry = OperationRegistry(**options.pop("registry", {}))

    @registry.operation("admin.drop", scopes=["admin"])
    async def drop() -> str:
        return "dropped"

    @registry.operation("price.of", scopes=["internal"])
    async def price(context: OperationContext, then: str = "") -> Any:
        if then:
            return (await context.env.call(then)).data
        return 3

    @registry.operation("price.watch", scopes=["internal"])
    async def watch() -> AsyncIterator[int]:
        yield 3

    @registry.operation("agent.run", **options)
    async def run(tool: str, context: OperationContext, arguments: dict[str, Any] = {}) -> Any:  # noqa: B006
        return (await context.env.call(tool, arguments)).data

    @registry.operation("agent.reuse", **options)
    async def reuse(context: OperationContext) -> Any:
        """Pass the context of a reached call on to another operation."""
        return (await registry.execute("admin.drop", {}, context.child("price.of"))).data

    @registry.operation("agent.follow")
    async def follow(context: OperationContext) -> AsyncIterator[Any]:
        yield (await context.env.call("admin.drop")).data

    @registry.operation("agent.read", **options)
    async def read(context: OperationContext) -> Any:
        return [item.data async for item in context.env.subscribe("price.watch")]

    return registry


async def outcome(registry: OperationRegistry, operation_id: str, **input: Any) -> Any:
    try:
        context = OperationContext(identity=Identity("anyone"))
        return (await registry.execute(operation_id, input, context)).data
    except CallError as error:
        return error.code


DENIED = ErrorCode.ACCESS_DENIED
THEN_DROP = {"then": "admin.drop"}


async def test_an_undeclared_nested_call_is_checked_as_its_caller() -> None:
    registry = build()

    assert await outcome(registry, "agent.run", tool="admin.drop") == DENIED
    assert await outcome(registry, "agent.run", tool="price.of") == DENIED
    assert await outcome(registry, "agent.read") == DENIED
    admin = OperationContext(identity=Identity("root", ["admin"]))
    assert (await registry.execute("agent.run", {"tool": "admin.drop"}, admin)).data == "dropped"


async def test_a_rejected_nested_call_is_not_named_to_the_outer_caller() -> None:
    registry = build(calls=["price.*"])
    context = OperationContext(identity=Identity("anyone"))

    errors: list[CallError] = []
    for arguments in ({"tool": "admin.drop"}, {"tool": "price.of", "arguments": THEN_DROP}):
        with pytest.raises(CallError) as caught:
            await registry.execute("agent.run", arguments, context)
        errors.append(caught.value)
    with pytest.raises(CallError) as caught:
        _ = [item async for item in registry.subscribe("agent.follow", {}, context)]
    errors.append(caught.value)

    text = "Access denied: {} calls an operation that its caller may not call"
    named = ("agent.run", "agent.run", "agent.follow")
    assert [error.message for error in errors] == [text.format(each) for each in named]
    assert {error.code for error in errors} == {DENIED}


async def test_a_check_inside_an_operation_is_reported_unchanged() -> None:
    registry = OperationRegistry()

    @registry.operation("bill.read", type="query")
    async def read(context: OperationContext) -> None:
        enforce_access(AccessControl(["boss"]), context.identity, operation_id="bill 7")

    with pytest.raises(CallError) as caught:
        await registry.execute("bill.read", {}, OperationContext(identity=Identity("anyone")))

    assert (caught.value.code, caught.value.message) == (DENIED, "Access denied: bill 7")


async def test_a_declared_nested_call_runs_on_the_authority_of_the_operation() -> None:
    registry = build(calls=["price.*"])

    assert await outcome(registry, "agent.run", tool="price.of") == 3
    assert await outcome(registry, "agent.read") == [3]
    assert await outcome(registry, "agent.run", tool="admin.drop") == DENIED


async def test_authority_ends_with_the_call_it_was_given_for() -> None:
    registry = build(calls=["price.*"])

    further = {"tool": "price.of", "arguments": {"then": "admin.drop"}}
    assert await outcome(registry, "agent.run", **further) == DENIED
    assert await outcome(registry, "agent.reuse") == DENIED


async def test_a_handler_that_runs_another_operation_with_its_context_lends_no_reach() -> None:
    registry = build()

    @registry.operation("shop.outer", calls=["admin.*"])
    async def outer(context: OperationContext) -> Any:
        return (await registry.execute("agent.run", {"tool": "admin.drop"}, context)).data

    assert await outcome(registry, "shop.outer") == DENIED


async def test_the_default_of_the_registry_restores_the_original_trust() -> None:
    registry = build(registry={"calls": ["*"]})

    assert await outcome(registry, "agent.run", tool="admin.drop") == "dropped"
    declared = build(registry={"calls": ["*"]}, calls=[])
    assert await outcome(declared, "agent.run", tool="price.of") == DENIED


async def test_settings_keep_the_reach_of_an_operation() -> None:
    registry = build(calls=["price.*"])
    configure_tools(registry, {"agent.*": ToolConfig(timeout=5, retry=1)})

    assert await outcome(registry, "agent.run", tool="price.of") == 3
    assert await outcome(registry, "agent.run", tool="admin.drop") == DENIED


async def test_trust_is_inherited_and_env_lists_the_reach() -> None:
    registry = build(calls=["price.*"])

    @registry.operation("agent.list", calls=["price.*"])
    async def listed(context: OperationContext) -> list[str]:
        return list(context.env.operation_ids())

    trusted = OperationContext(trusted=True)
    assert (await registry.execute("agent.run", {"tool": "admin.drop"}, trusted)).data == "dropped"
    found = await outcome(registry, "agent.list")
    assert "price.of" in found
    assert "admin.drop" not in found


async def test_events_record_the_authority() -> None:
    registry, graph = build(calls=["price.*"]), CallGraph()
    registry.record(graph)

    await outcome(registry, "agent.run", tool="price.of")
    await outcome(registry, "agent.run", tool="admin.drop")

    assert [(record.operation_id, record.authority) for record in graph] == [
        ("agent.run", None),
        ("price.of", "agent.run"),
        ("agent.run", None),
        ("admin.drop", None),
    ]


# ---------------------------------------------------------------------- resources

RENAME = AccessControl(resource_type="project", resource_action="edit", resource_input="/project")


@pytest.mark.parametrize(
    ("resources", "project", "allowed"),
    [
        ({"project:7": ["edit"]}, 7, True),
        ({"project:7": ["edit"]}, "7", True),
        ({"project:7": ["edit"]}, 8, False),
        ({"project:7": ["view"], "project:8": ["edit"]}, 7, False),
        ({"project:*": ["edit"]}, 8, True),
        ({"project:7": ["edit"]}, "*", False),
        ({"project:7": ["edit"]}, [7], False),
        ({"project:True": ["edit"], "project:1": ["edit"]}, True, False),
        ({"project:None": ["edit"]}, None, False),
        ({"team:7": ["edit"], "project:1": ["edit"]}, 7, False),
    ],
)
async def test_access_depends_on_the_resource_that_the_input_names(
    resources: dict[str, list[str]], project: Any, allowed: bool
) -> None:
    registry = OperationRegistry()
    context = OperationContext(identity=Identity("alice", [], resources))

    @registry.operation("project.rename", access=RENAME)
    async def rename(project: Any) -> str:
        return "renamed"

    @registry.operation("project.watch", access=RENAME)
    async def watch(project: Any) -> AsyncIterator[str]:
        yield "renamed"

    async def subscribed() -> Any:
        items = registry.subscribe("project.watch", {"project": project}, context)
        return [item.data async for item in items]

    async def executed() -> Any:
        return [(await registry.execute("project.rename", {"project": project}, context)).data]

    for call in (executed, subscribed):
        if allowed:
            assert await call() == ["renamed"]
        else:
            with pytest.raises(CallError) as caught:
                await call()
            assert caught.value.to_wire() == {"code": DENIED, "message": caught.value.message}


async def test_the_resource_is_checked_after_middleware_has_changed_the_input() -> None:
    registry = OperationRegistry()
    context = OperationContext(identity=Identity("alice", [], {"project:7": ["edit"]}))

    @registry.operation("project.rename", access=RENAME)
    async def rename(project: int) -> int:
        return project

    @registry.use
    async def redirect(call: Any, next: Any) -> Any:
        call.input["project"] += 1
        return await next(call)

    assert (await registry.execute("project.rename", {"project": 6}, context)).data == 7
    with pytest.raises(CallError):
        await registry.execute("project.rename", {"project": 7}, context)


@pytest.mark.parametrize(
    "fields",
    [
        {"resource_input": "/project"},
        {"resource_type": "project", "resource_action": "edit", "resource_input": "project"},
    ],
)
def test_a_pointer_that_cannot_work_is_rejected(fields: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="resource_input"):
        AccessControl(**fields)
