"""Rules of a hub see what the handlers of its workers receive, for calls that it forwards."""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from decimal import Decimal
from typing import Annotated, Any

import pytest
from pydantic import BeforeValidator
from tests.authority.test_checked_input import (
    ALICE,
    AT_MOST,
    CASES,
    DENIED,
    IDS,
    KEY,
    REQUIRED,
    ByName,
    Lazy,
    Login,
    Project,
    Task,
    World,
    agent,
)
from tests.calls.waiting import until

from operations import (
    AccessControl,
    CallError,
    ErrorCode,
    Identity,
    OperationRegistry,
    OperationSpec,
)
from operations.authority import ApprovalRule, Grants
from operations.calls import PendingRequestMap, from_calls, serve_calls
from operations.calls.protocol.events import CallRequested, read_event
from operations.calls.socket import WebSocketHub
from operations.pubsub.memory import MemoryTarget
from operations.pubsub.websocket import connect_websocket
from operations.tools import RetryPolicy, ToolConfig, configure_tools

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("R65")]


class Recorded(MemoryTarget):
    """A target that records the requests."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, bool]] = []
        """The operation of each request, and whether it carries the digest of a form."""

    async def enqueue(self, *args: Any, **options: Any) -> Any:
        event = read_event(args[1])
        if isinstance(event, CallRequested) and event.payload.operation_id != "services.describe":
            payload = event.payload
            self.sent.append((payload.operation_id, payload.checked is not None))
        return await super().enqueue(*args, **options)


class Hub(World):
    """A world whose operations run at a worker."""

    def __init__(self, far: World) -> None:
        self.registry = OperationRegistry()
        self.ran = far.ran
        self.far = far
        self.target = Recorded()
        self.registry.register_object(self.registry.authority.approvals)

    def require(self, rule: ApprovalRule) -> None:
        configure_tools(self.registry, {"task.*": ToolConfig(approve=rule)})


@asynccontextmanager
async def hub_of(annotation: Any, **options: Any) -> AsyncGenerator[Hub]:
    """A hub that forwards calls to a worker on its callers' behalf."""
    hub = Hub(World(annotation, **options))
    root = Grants(KEY)
    own = Grants(root.for_name("workers"))

    def resolve(credential: str) -> Any:
        return Identity("hub", ["task"]) if credential == "hub" else own.resolve(credential)

    async with (
        serve_calls(hub.far.registry, hub.target, resolve=resolve),
        from_calls(
            hub.target,
            delegate=root.delegate("workers"),
            credential="hub",
            send_identity=False,
            exclude=[spec.id for spec in hub.registry.specs()],
        ) as service,
    ):
        hub.registry.register_all(service)
        yield hub


@pytest.mark.parametrize("name", ["task.run", "task.block", "task.watch"])
@pytest.mark.parametrize(("annotation", "schema", "permitted", "evasions"), CASES, ids=IDS)
async def test_a_grant_sees_what_the_handler_of_a_worker_receives(
    annotation: Any, schema: Any, permitted: Any, evasions: list[Any], name: str
) -> None:
    async with hub_of(annotation) as hub:
        bot = await agent(schema)

        assert await hub.outcome(permitted, bot, name) == "ran"
        for evasion in evasions:
            assert await hub.outcome(evasion, ALICE, name) == "ran"
            assert await hub.outcome(evasion, bot, name) == DENIED
        assert len(hub.ran) == 1 + len(evasions)


@pytest.mark.parametrize("name", ["task.run", "task.watch"])
@pytest.mark.parametrize(("annotation", "schema", "permitted", "evasions"), CASES, ids=IDS)
async def test_an_approval_rule_sees_what_the_handler_of_a_worker_receives(
    annotation: Any, schema: Any, permitted: Any, evasions: list[Any], name: str
) -> None:
    rule = {"required": ["order"], "properties": {"order": {"not": schema}}}
    async with hub_of(annotation) as hub:
        hub.require(ApprovalRule(when=rule))

        assert await hub.outcome(permitted, name=name) == "ran"
        for evasion in evasions:
            assert await hub.outcome(evasion, name=name) == REQUIRED
        assert len(hub.ran) == 1


@pytest.mark.parametrize(
    ("order", "outcome"),
    [({"id": "7"}, "ran"), ({"id": "8"}, DENIED), ({"name": "8"}, DENIED), ({"id": "x7"}, DENIED)],
)
async def test_a_resource_rule_of_a_hub_sees_what_the_handler_receives(
    order: Any, outcome: Any
) -> None:
    access = AccessControl(
        resource_type="project", resource_action="edit", resource_input="/order/id"
    )
    far = World(Project)
    hub = Hub(far)
    async with (
        serve_calls(far.registry, hub.target),
        from_calls(
            hub.target, access=access, exclude=[spec.id for spec in hub.registry.specs()]
        ) as service,
    ):
        hub.registry.register_all(service)

        assert await hub.outcome(order) == outcome


async def test_a_worker_is_asked_only_if_a_rule_reads_the_input_and_it_converts_the_input() -> None:
    limited = {"order": AT_MOST}
    async with hub_of(ByName) as hub:
        await hub.outcome({"amount": 1})
        await hub.outcome({"amount": 1}, await agent(calls={"task.*": 5}))
        assert hub.target.sent == [("task.run", False)] * 2
        hub.target.sent.clear()

        await hub.outcome({"amount": 1}, await agent(AT_MOST))
        assert hub.target.sent == [("services.check", False), ("task.run", True)]
    async with hub_of(dict[str, int]) as hub:
        await hub.outcome({"amount": 1}, await agent(limited))
        assert hub.target.sent == [("task.run", False)]


def test_a_spec_announces_whether_the_input_is_converted() -> None:
    for annotation, converts in ((ByName, True), (int, False), (list[str], False)):
        spec = World(annotation).registry.get_spec("task.run")
        assert spec is not None
        assert spec.converts_input is converts
        assert spec.to_wire().get("convertsInput", False) is converts
        assert OperationSpec.decode(spec.encode()) == spec


async def test_an_approval_at_a_hub_shows_and_binds_what_the_handler_receives() -> None:
    async with hub_of(Login) as hub:
        hub.require(ApprovalRule())
        first, second = ({"user": "u", "password": each} for each in ("one...", "two..."))

        assert await hub.outcome(first) == REQUIRED
        record = await hub.approve()
        assert record["input"]["order"]["user"] == "u"
        assert "one..." not in str(record)
        assert await hub.outcome(second) == REQUIRED
        assert await hub.outcome(first) == "ran"
        assert hub.ran[0].password.get_secret_value() == "one..."


async def test_an_approval_at_a_hub_does_not_bind_what_the_worker_creates() -> None:
    async with hub_of(Task) as hub:
        hub.require(ApprovalRule())

        assert await hub.outcome({"title": "x"}) == REQUIRED
        record = await hub.approve()
        assert record["generated"] == ["/order/id"]
        assert await hub.outcome({"title": "x"}) == "ran"


async def test_a_worker_that_would_run_something_else_rejects_the_call() -> None:
    values = iter([1, 9, 1, 1])

    def next_value(_: Any) -> int:
        return next(values)

    async with hub_of(Annotated[int, BeforeValidator(next_value)]) as hub:
        bot = await agent({"maximum": 5})

        assert await hub.outcome(0, bot) == DENIED
        assert hub.ran == []
        assert await hub.outcome(0, bot) == "ran"


async def test_a_form_that_the_worker_does_not_have_is_denied() -> None:
    async with hub_of(Lazy) as hub:
        order = {"items": [1]}

        assert await hub.outcome(order) == "ran"
        assert await hub.outcome(order, await agent({"title": "any"})) == DENIED
        hub.require(ApprovalRule(when={"not": {}}))
        assert await hub.outcome(order) == DENIED


def not_found(_: Any) -> Any:
    raise CallError(ErrorCode.OPERATION_NOT_FOUND, "There is no operation 'services.check'")


def garbage(value: Any) -> Any:
    return lambda _: value


@pytest.mark.parametrize(
    "answer",
    [
        not_found,
        *map(garbage, [None, {"form": {}}, {"form": 1}, {"form": {"value": 1, "filled": [[1.5]]}}]),
    ],
)
async def test_a_worker_that_cannot_return_the_form_needs_an_approval(
    answer: Callable[[Any], Any],
) -> None:
    far = World(ByName)
    hub = Hub(far)

    # As a worker of another implementation.
    @far.registry.operation("services.check", type="query")
    async def check(operationId: str, input: Any) -> Any:  # noqa: N803 - the name on the wire
        return answer(input)

    async with one_more_hub(hub.registry, far.registry):
        order = {"amountCents": 1}
        assert await hub.outcome(order) == "ran"
        assert await hub.outcome(order, await agent(AT_MOST)) == DENIED
        hub.require(ApprovalRule(when={"not": {}}))
        assert await hub.outcome(order) == REQUIRED
        assert (await hub.approve())["input"] == {"order": order}
        assert await hub.outcome(order) == "ran"


async def test_a_failure_of_the_worker_is_the_failure_of_the_call() -> None:
    far = World(ByName)
    hub = Hub(far)

    @far.registry.operation("services.check", type="query")
    async def check(operationId: str, input: Any) -> Any:  # noqa: N803
        raise CallError(ErrorCode.UNAVAILABLE, "not now")

    async with one_more_hub(hub.registry, far.registry):
        hub.require(ApprovalRule())
        assert await hub.outcome({"amount": 1}) == ErrorCode.UNAVAILABLE


async def test_an_invalid_input_is_reported_as_such() -> None:
    async with hub_of(Decimal) as hub:
        assert await hub.outcome("x", await agent({"maximum": 5})) == ErrorCode.VALIDATION_ERROR


async def test_a_form_is_shown_only_to_callers_that_may_call_the_operation() -> None:
    far = World(ByName, scopes=["admin"])
    question = {"operationId": "task.run", "input": {"order": {"amount": 1}}}
    target = MemoryTarget()
    async with serve_calls(far.registry, target), PendingRequestMap(target) as calls:
        with pytest.raises(CallError) as caught:
            await calls.call("services.check", question, identity=ALICE)
        assert caught.value.code == DENIED
        admin = Identity("root", ["admin"])
        found = await calls.call("services.check", question, identity=admin)

    assert found.data["form"]["value"] == {"order": {"amountCents": 1}}
    assert far.ran == []


async def test_a_grant_of_the_worker_applies_to_the_check_as_well() -> None:
    far, target, grants = World(ByName), MemoryTarget(), Grants(KEY)
    block = {"task.*": {"properties": {"order": AT_MOST}}}
    token = grants.create(ALICE, "bot", operations=["task.*"], input=block)
    async with (
        serve_calls(far.registry, target, resolve=grants.resolve),
        PendingRequestMap(target) as calls,
    ):
        question = {"operationId": "task.run", "input": {"order": {"amountCents": 9999}}}
        with pytest.raises(CallError) as caught:
            await calls.call("services.check", question, credential=token)

    assert caught.value.code == DENIED


async def test_a_retry_of_a_forwarded_call_carries_the_same_form() -> None:
    far, tries = World(ByName), list[int]()

    @far.registry.operation("task.flaky", idempotent=True)
    async def flaky(order: ByName) -> str:
        tries.append(order.amount)
        if len(tries) < 2:
            raise CallError(ErrorCode.UNAVAILABLE, "not now", retryable=True)
        return "ran"

    hub = Hub(far)
    async with (
        serve_calls(far.registry, hub.target),
        from_calls(hub.target, exclude=[each.spec.id for each in hub.registry]) as service,
    ):
        hub.registry.register_all(service)
        policy = RetryPolicy(attempts=2, first_pause=0)
        configure_tools(hub.registry, {"task.flaky": ToolConfig(retry=policy, rename="my.flaky")})
        block = {"*.flaky": {"properties": {"order": AT_MOST}}}
        token = Grants(KEY).create(ALICE, "bot", operations=["*.flaky"], input=block)
        bot = await Grants(KEY).resolve(token)

        assert await hub.outcome({"amount": 5}, bot, "my.flaky") == "ran"
        assert hub.target.sent == [
            ("services.check", False),
            ("task.flaky", True),
            ("task.flaky", True),
        ]
        assert await hub.outcome({"amount": 501}, bot, "my.flaky") == DENIED


@asynccontextmanager
async def one_more_hub(near: OperationRegistry, far: OperationRegistry) -> AsyncGenerator[None]:
    target = MemoryTarget()
    async with (
        serve_calls(far, target),
        from_calls(target, exclude=[each.spec.id for each in near]) as service,
    ):
        near.register_all(service)
        yield


async def test_a_call_through_two_hubs_is_checked_at_both() -> None:
    far, middle = World(ByName), OperationRegistry()
    near = Hub(far)
    async with one_more_hub(middle, far.registry), one_more_hub(near.registry, middle):
        bot = await agent(AT_MOST)

        assert await near.outcome({"amount": 5}, bot) == "ran"
        assert await near.outcome({"amount": 501}, bot) == DENIED
        assert await near.outcome({"amount": 501}) == "ran"


async def test_a_call_of_a_spec_that_a_remote_runs_is_checked() -> None:
    far, target = World(ByName), MemoryTarget()
    spec = far.registry.get_spec("task.run")
    assert spec is not None
    async with serve_calls(far.registry, target), PendingRequestMap(target) as calls:
        hub = Hub(far)
        hub.registry = OperationRegistry(remote=calls)
        bot = await agent(AT_MOST)
        exact = {"task.run": {"properties": {"order": AT_MOST}}}
        token = Grants(KEY).create(ALICE, "bot", operations=["task.run"], input=exact)
        named = await Grants(KEY).resolve(token)
        # Not registered, so that a grant must name it, and nothing is known about its input.
        assert await hub.outcome({"amount": 5}, named) == "ran"
        assert await hub.outcome({"amount": 501}, named) == DENIED
        hub.registry.register_spec(spec)
        assert await hub.outcome({"amount": 5}, bot) == "ran"
        assert await hub.outcome({"amount": 501}, bot) == DENIED


async def test_a_call_to_a_spoke_is_checked() -> None:
    far = World(ByName)
    hub = Hub(far)
    bot = await agent(AT_MOST)
    sockets = WebSocketHub(hub.registry)
    async with sockets.serve() as server:
        port = next(iter(server.sockets)).getsockname()[1]
        async with (
            connect_websocket(f"ws://127.0.0.1:{port}") as target,
            serve_calls(far.registry, target),
        ):
            await until(lambda: "task.run" in hub.registry)
            assert await hub.outcome({"amount": 5}, bot) == "ran"
            assert await hub.outcome({"amount": 501}, bot) == DENIED
