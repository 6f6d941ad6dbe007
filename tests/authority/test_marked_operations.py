"""Operations that administer authority carry a mark, under every id and behind every hub; no pattern allows them."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.authority.test_approvals import ALICE, BOSS, DENIED, KEY, REQUIRED, Office

from operations import (
    AccessControl,
    CallError,
    ErrorCode,
    Identity,
    Operation,
    OperationContext,
    OperationRegistry,
    OperationSpec,
    OperationType,
    build_env,
)
from operations.agents import Toolbox
from operations.authority import Grants, Store
from operations.calls import from_calls, serve_calls
from operations.code import Code
from operations.front.search import Gateway
from operations.hub import open_hub
from operations.hub.operations import control_operations, worker_operations
from operations.mcp import MCPClientConfig, connect_mcp, to_mcp
from operations.openapi import HTTPServiceConfig, from_openapi, to_openapi
from operations.pubsub.memory import MemoryTarget
from operations.server import create_app
from operations.server.http11.running import running
from operations.tools import ToolConfig, configure_tools

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("R66")]

ANN = Identity("ann", ["approvals:answer", "task"])
ANSWER = "approvals.answer"
NO_REQUEST = {"id": f"{'0' * 32}-{'0' * 8}", "approve": True}
NO_APPROVAL = ErrorCode.VALIDATION_ERROR
"""The outcome of a permitted answer to a request that does not exist."""


async def outcome(
    registry: OperationRegistry, operation_id: str, *patterns: str, **block: Any
) -> str:
    """Return the code of an answer by an agent of Ann whose grant has these patterns."""
    token = Grants(KEY).create(ANN, "bot", operations=patterns, **block)
    context = OperationContext(identity=await Grants(KEY).resolve(token))
    try:
        spec = registry.get_spec(operation_id)
        if spec is not None and spec.type is OperationType.SUBSCRIPTION:
            await anext(aiter(registry.subscribe(operation_id, {}, context)))
        else:
            await registry.execute(operation_id, NO_REQUEST, context)
    except CallError as error:
        return error.code
    return "answered"


async def enforce_marked(registry: OperationRegistry, operation_id: str) -> None:
    """Check that no pattern allows the operation at any entry point, and that its exact id does."""
    namespace, _, name = operation_id.partition(".")
    for pattern in (
        "*",
        f"{namespace}.*",
        f"{namespace}.*{name[-3:]}",
        f"{operation_id}*",
        f"[{namespace[0]}]*",
    ):
        assert await outcome(registry, operation_id, pattern) == DENIED, pattern
    assert await outcome(registry, operation_id, "*", operation_id) == NO_APPROVAL
    for patterns, is_listed in ((["*"], False), ([operation_id], True)):
        token = Grants(KEY).create(ANN, "bot", operations=patterns)
        agent = await Grants(KEY).resolve(token)
        context = OperationContext(identity=agent)
        found = await Gateway(registry).search(name.replace(".", " "), context)
        assert (operation_id in [each.id for each in found]) is is_listed
        names = [tool["function"]["name"] for tool in Toolbox(registry, identity=agent).openai()]
        assert (operation_id.replace(".", "__") in names) is False


def with_approvals(**options: Any) -> OperationRegistry:
    registry = OperationRegistry(**options)
    registry.register_object(registry.authority.approvals)
    return registry


async def test_the_operations_that_answer_approvals_are_marked() -> None:
    registry = with_approvals()

    assert [spec.id for spec in registry.specs() if spec.authority] == [
        "approvals.answer",
        "approvals.get",
        "approvals.list",
        "approvals.watch",
    ]
    await enforce_marked(registry, ANSWER)


async def test_a_spec_keeps_its_mark_on_the_wire_and_has_another_digest() -> None:
    spec = with_approvals().get_spec(ANSWER)
    assert spec is not None

    wire = spec.to_wire()
    assert wire["authority"] is True
    assert OperationSpec.decode(spec.encode()) == spec
    del wire["authority"]
    plain = OperationSpec.from_wire(wire)
    assert plain.authority is False
    assert "authority" not in plain.to_wire()
    assert plain.digest != spec.digest
    with pytest.raises(ValueError, match="authority"):
        OperationSpec.from_wire({**wire, "authority": "yes"})


async def test_a_renamed_operation_keeps_its_mark() -> None:
    registry = with_approvals()
    configure_tools(registry, {ANSWER: ToolConfig(rename="team.answer", timeout=5, retry=1)})

    await enforce_marked(registry, "team.answer")


@asynccontextmanager
async def workers_in(
    namespace: str, hub: OperationRegistry, far: OperationRegistry, root: Grants
) -> AsyncGenerator[None]:
    """Import the operations of `far` into a namespace of `hub`, which delegates calls."""
    target = MemoryTarget()
    own = Grants(root.for_name(namespace))

    def resolve(credential: str) -> Any:
        return (
            Identity("hub", ["approvals:answer"])
            if credential == "hub"
            else own.resolve(credential)
        )

    delegate = root.delegate(namespace, namespace=namespace)
    async with (
        serve_calls(far, target, resolve=resolve),
        from_calls(
            target, namespace=namespace, delegate=delegate, credential="hub", send_identity=False
        ) as service,
    ):
        hub.register_all(service)
        yield


async def test_an_operation_in_a_namespace_of_a_hub_keeps_its_mark() -> None:
    hub, root = OperationRegistry(), Grants(KEY)
    async with workers_in("far", hub, with_approvals(), root):
        await enforce_marked(hub, "far.approvals.answer")


async def test_an_agent_cannot_approve_a_call_of_another_person_at_a_worker() -> None:
    hub, root, store = OperationRegistry(), Grants(KEY), Store()
    office = Office(store)
    office.registry.register_object(office.registry.authority.approvals, replace=True)
    async with workers_in("far", hub, office.registry, root):
        assert await office.call(who=ALICE) == REQUIRED
        (waiting,) = (
            await office.registry.authority.approvals.pending(OperationContext(identity=BOSS))
        ).approvals
        token = root.create(BOSS, "bot", operations=["*"])
        agent = OperationContext(identity=await root.resolve(token))
        with pytest.raises(CallError) as caught:
            await hub.execute("far.approvals.answer", {"id": waiting.id, "approve": True}, agent)

        assert caught.value.code == DENIED
        assert await office.call(who=ALICE) == REQUIRED


async def test_an_operation_behind_two_hubs_keeps_its_mark() -> None:
    near, middle, root = OperationRegistry(), OperationRegistry(), Grants(KEY)
    at_middle = Grants(root.for_name("b"))
    async with (
        workers_in("c", middle, with_approvals(), at_middle),
        workers_in("b", near, middle, root),
    ):
        await enforce_marked(near, "b.c.approvals.answer")


async def test_a_mark_that_a_worker_of_an_older_version_does_not_send_can_be_restored() -> None:
    hub, far = OperationRegistry(), with_approvals()
    for spec in far.specs():
        wire = spec.to_wire()
        del wire["authority"]
        far.register(
            Operation(OperationSpec.from_wire(wire), far.get_handler(spec.id) or print),
            replace=True,
        )
    async with workers_in("far", hub, far, Grants(KEY)):
        assert await outcome(hub, "far.approvals.answer", "*") == NO_APPROVAL
        configure_tools(hub, {"far.approvals.*": ToolConfig(authority=True)})
        await enforce_marked(hub, "far.approvals.answer")


def test_no_setting_removes_a_mark() -> None:
    with pytest.raises(ValueError, match="authority can only be true"):
        ToolConfig(authority=False)


async def test_an_unregistered_operation_of_a_remote_is_called_by_its_exact_id_only() -> None:
    target, far = MemoryTarget(), with_approvals()
    async with serve_calls(far, target), from_calls(target) as service:
        hub = OperationRegistry(remote=service.calls)
        await enforce_marked_calls(hub, ANSWER)


async def enforce_marked_calls(registry: OperationRegistry, operation_id: str) -> None:
    assert await outcome(registry, operation_id, "*", "approvals.*") == DENIED
    assert await outcome(registry, operation_id, operation_id) == NO_APPROVAL


@pytest.mark.parametrize("trusted", [False, True])
async def test_a_tool_of_another_server_keeps_its_mark_without_trust(trusted: bool) -> None:
    far, hub, last = with_approvals(), OperationRegistry(), OperationRegistry()
    config = MCPClientConfig(server=to_mcp(far, identity=ANN), trust_annotations=trusted)
    async with connect_mcp("far", config) as client:
        hub.register_all(client)
        marked = [spec.id for spec in hub.specs() if spec.authority]
        assert any("answer" in each for each in marked)
        for each in marked:
            assert await outcome(hub, each, "*", "far.*", "approvals.*") == DENIED
        async with connect_mcp("last", MCPClientConfig(server=to_mcp(hub, identity=ANN))) as again:
            last.register_all(again)
            assert len([spec.id for spec in last.specs() if spec.authority]) == len(marked)


async def test_the_tools_that_call_every_operation_of_a_hub_are_marked_when_they_are_imported() -> (
    None
):
    far, hub = with_approvals(), OperationRegistry()
    config = MCPClientConfig(server=to_mcp(far, disclosure="gateway"))
    async with connect_mcp("far", config) as client:
        hub.register_all(client)

        marked = {spec.id: spec.authority for spec in hub.specs()}
        assert marked["far.call"]
        assert marked["far.batch"]
        assert not marked["far.search"]


async def test_an_imported_document_keeps_the_mark() -> None:
    far = with_approvals()
    document = to_openapi(far)
    path = document["paths"]["/approvals/answer"]["post"]
    assert path["x-operations-authority"] is True
    for is_export in (True, False):
        if not is_export:
            # As a proxy that drops the extension of this library, but not the mark.
            for item in document["paths"].values():
                for operation in item.values():
                    operation.pop("x-operations")
        async with running(create_app(far)) as url:
            config = HTTPServiceConfig("far", base_url=url, restore=is_export)
            async with from_openapi(document, config) as service:
                hub = OperationRegistry()
                hub.register_all(service)
                assert len(hub.specs()) >= 3
                for spec in hub.specs():
                    assert spec.authority, spec.id
                    assert await outcome(hub, spec.id, "*") == DENIED


async def test_the_paths_of_runs_are_marked_when_a_document_is_imported_as_operations() -> None:
    far, hub = with_approvals(), OperationRegistry()
    document = to_openapi(far, durable=["approvals.answer"])
    runs = {path: item for path, item in document["paths"].items() if path.startswith("/runs")}
    assert runs

    # At the other hub, the runs of all callers of this hub belong to its one identity.
    config = HTTPServiceConfig("far", base_url="http://127.0.0.1:9")
    async with from_openapi({**document, "paths": runs}, config) as service:
        hub.register_all(service)
        assert len(hub.specs()) == sum(map(len, runs.values()))
        for spec in hub.specs():
            assert spec.authority, spec.id
            assert await outcome(hub, spec.id, "*") == DENIED


SCRIPT = f"return await approvals.answer(id={NO_REQUEST['id']!r}, approve=True)"


async def test_a_script_at_another_hub_answers_no_approval_with_the_grant_of_this_hub() -> None:
    far, hub, target = with_approvals(), OperationRegistry(), MemoryTarget()
    far.register_all(Code(far))
    scopes = Identity("hub", ["approvals:answer"])
    token = Grants(KEY).create(scopes, "hub", operations=["code.*", ANSWER])
    async with (
        serve_calls(far, target, resolve=Grants(KEY).resolve),
        from_calls(target, namespace="far", credential=token, send_identity=False) as service,
    ):
        hub.register_all(service)
        grants = Grants(KEY)
        bot = await grants.resolve(grants.create(ANN, "bot", operations=["*"]))
        context = OperationContext(identity=bot)

        with pytest.raises(CallError) as caught:
            await hub.execute("far.approvals.answer", NO_REQUEST, context)
        assert caught.value.code == DENIED
        with pytest.raises(CallError) as caught:
            await hub.execute("far.code.run", {"script": SCRIPT}, context)
        assert caught.value.code == "SCRIPT_REJECTED"


async def test_patterns_that_restrict_apply_to_marked_operations() -> None:
    registry = with_approvals()

    assert await outcome(registry, ANSWER, ANSWER, approve=["*"]) == REQUIRED
    assert (
        await outcome(registry, ANSWER, ANSWER, calls={"app*": 0}) == ErrorCode.RESOURCE_EXHAUSTED
    )
    assert await outcome(registry, ANSWER, ANSWER, input={"*.answer": False}) == DENIED


@pytest.mark.parametrize(
    ("calls", "code"), [(["*"], DENIED), (["approvals.*"], DENIED), ([ANSWER], NO_APPROVAL)]
)
async def test_the_reach_of_an_operation_names_a_marked_operation(
    calls: list[str], code: str
) -> None:
    registry = with_approvals()

    @registry.operation("agent.run", calls=calls)
    async def run(context: OperationContext) -> Any:
        assert (ANSWER in list(context.env.operation_ids())) is (code != DENIED)
        try:
            return (await context.env.call(ANSWER, NO_REQUEST)).data
        except CallError as error:
            return error.code

    eve = OperationContext(identity=Identity("eve"))
    assert (await registry.execute("agent.run", {}, eve)).data == code


async def test_a_handler_reaches_no_marked_operation_of_another_registry() -> None:
    registry, other = OperationRegistry(calls=("*",)), with_approvals()

    @registry.operation("agent.run")
    async def run(context: OperationContext) -> Any:
        env = build_env(other, context)
        return (await env.call(ANSWER, NO_REQUEST)).data

    with pytest.raises(CallError) as caught:
        await registry.execute("agent.run", {}, OperationContext(identity=Identity("eve")))
    assert caught.value.code == DENIED


async def test_an_adapter_that_builds_its_own_spec_does_not_remove_the_mark() -> None:
    registry = with_approvals()

    def adapter(operation: Operation) -> Operation:
        spec = operation.spec
        plain = OperationSpec(
            namespace="x", name=spec.name, type=spec.type, access_control=AccessControl()
        )
        return Operation(plain, operation.handler)

    registry.adapt(adapter)

    assert all(spec.authority for spec in registry.specs())


async def test_a_source_cannot_remove_a_mark_that_it_or_the_application_has_set() -> None:
    registry = OperationRegistry()
    spec = OperationSpec(namespace="far", name="pay", type=OperationType.MUTATION, authority=True)
    plain = OperationSpec(namespace="far", name="pay", type=OperationType.MUTATION)
    first, second, third = Operation(spec, print), Operation(plain, min), Operation(plain, max)

    registry.register(first)
    registry.register(registry.restricted(second, first), replace=True)
    assert registry.specs()[0].authority
    registry.remove_imported(second)
    registry.register(registry.restricted(third))
    assert registry.specs()[0].authority


async def test_a_toolbox_offers_a_marked_operation_only_if_it_is_named() -> None:
    registry = with_approvals()

    def offered(*allow: str) -> set[str]:
        found = Toolbox(registry, identity=ANN, allow=allow).openai()
        return {tool["function"]["name"] for tool in found} & {
            "approvals__answer",
            "approvals__list",
        }

    assert offered("*") == set()
    assert offered("approvals.*") == set()
    assert offered("*", ANSWER) == {"approvals__answer"}


async def test_operations_that_control_a_hub_are_marked(tmp_path: Path) -> None:
    path = tmp_path / "operations.toml"
    path.write_text("")
    async with open_hub(path) as hub:
        controls = OperationRegistry([*control_operations(hub), *worker_operations(hub)])

        assert len(controls) >= 8
        assert all(spec.authority for spec in controls.specs())
