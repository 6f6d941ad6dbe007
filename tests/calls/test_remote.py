"""Operations of other processes as local operations: imports, remotes, hubs and spokes."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest
from tests.calls.waiting import until
from tests.calls.worlds import BrokerWorld, World
from tests.limits import scaled, time_limit
from tests.servers import free_port

from operations.base.errors import (
    CallError,
    ErrorCode,
    NotSentError,
    RegistrationError,
    TransportError,
)
from operations.calls import PendingRequestMap, from_calls, serve_calls
from operations.calls.socket import WebSocketHub
from operations.contract.access import AccessControl, Identity
from operations.contract.context import OperationContext
from operations.contract.specs import Operation, OperationSpec, OperationType
from operations.front.limits import Limits, call_seconds
from operations.mcp.shared.codec import server_of
from operations.pubsub.memory import MemoryTarget
from operations.pubsub.websocket import connect_websocket, serve_websocket
from operations.registry import OperationRegistry
from operations.schema import from_schema
from operations.server import create_app
from operations.server.http11.running import running


def restrict(registry: OperationRegistry, operation_id: str) -> None:
    """Restrict an imported operation, as an application does."""
    imported = registry.registered(operation_id)
    assert imported is not None
    spec = msgspec.structs.replace(imported.spec, access_control=AccessControl(["admin"]))
    registry.register(msgspec.structs.replace(imported, spec=spec), replace=True)


async def test_imported_operations_are_called_like_local_ones(
    world: World, registry: OperationRegistry
) -> None:
    here = OperationRegistry()
    async with world.serve(registry), world.connect() as target, from_calls(target) as service:
        here.register_all(service)
        answer = await here.execute("math.add", {"a": 1, "b": 2})
        items = [item.data async for item in here.subscribe("count.up", {"n": 3})]
        with pytest.raises(CallError) as invalid:
            await here.execute("math.add", {"a": "x"})
        with pytest.raises(CallError) as domain:
            await here.execute("fail.domain", {})

    assert answer.data == 3
    assert items == [0, 1, 2]
    assert invalid.value.code == ErrorCode.VALIDATION_ERROR
    assert domain.value.code == "NO_FUNDS"
    assert here.get_spec("math.add") == registry.get_spec("math.add")
    assert "secret.read" not in here


@pytest.mark.requirement("R17")
async def test_a_hub_hides_the_text_of_an_exception_that_a_trusted_worker_shows_it() -> None:
    there, here, target = OperationRegistry(), OperationRegistry(), MemoryTarget()

    @there.operation("test.break")
    async def fail() -> None:
        raise ValueError("hunter2")

    @there.operation("test.watch")
    async def watch() -> AsyncIterator[int]:
        yield 1
        raise ValueError("hunter2")

    async with serve_calls(there, target), from_calls(target) as service:
        here.register_all(service)
        with pytest.raises(CallError, match="hunter2"):
            await here.execute("test.break")
        async with (
            running(create_app(here)) as url,
            aiohttp.ClientSession() as client,
            client.post(f"{url}/test/break") as response,
            client.post(f"{url}/test/watch") as stream,
        ):
            body, events = await response.json(), await stream.text()

    assert body["code"] == ErrorCode.EXECUTION_ERROR
    assert body["message"] == f"The operation failed (request {body['requestId']})"
    assert "event: error" in events
    assert "hunter2" not in events


@pytest.mark.requirement("R52")
async def test_every_hop_appends_the_changes_it_makes(world: World) -> None:
    there = OperationRegistry(output="keep")
    properties = {"id": {"type": "integer"}, "state": {"enum": ["open", "closed"]}}
    spec = OperationSpec(
        name="get",
        namespace="task",
        type=OperationType.QUERY,
        output_schema=from_schema({"type": "object", "properties": properties}),
    )

    async def get(_input: Any, _context: OperationContext) -> Any:
        return {"id": "7", "state": "paused", "secret": 1}

    async def watch(input: Any, context: OperationContext) -> AsyncIterator[Any]:
        yield await get(input, context)

    there.register(Operation(spec, get))
    watched = msgspec.structs.replace(spec, name="watch", type=OperationType.SUBSCRIPTION)
    there.register(Operation(watched, watch))
    here = OperationRegistry()
    async with world.serve(there), world.connect() as target, from_calls(target) as service:
        here.register_all(service)
        answer = await here.execute("task.get", {})
        items = [item async for item in here.subscribe("task.watch", {})]

    for envelope in (answer, *items):
        assert envelope.data == {"id": 7, "state": "paused"}
        assert [(change.kind, change.path) for change in envelope.meta.changes] == [
            ("mismatch", "/state"),
            ("converted", "/id"),
            ("stripped", "/secret"),
        ]
        assert envelope.meta.changes_count == 3
    assert len(items) == 1


async def test_an_operation_without_a_local_handler_goes_to_the_remote(
    world: World, registry: OperationRegistry
) -> None:
    async with world.serve(registry), world.connect() as target, PendingRequestMap(target) as calls:
        here = OperationRegistry(remote=calls)
        spec = registry.get_spec("math.add")
        assert spec is not None
        here.register_spec(spec)

        @here.operation("sum.three", type="query")
        async def three(a: int, b: int, c: int, context: OperationContext) -> Any:
            first = await context.env.math.add({"a": a, "b": b})
            second = await context.env.math.add({"a": first.data, "b": c})
            return second.data

        assert (await here.execute("sum.three", {"a": 1, "b": 2, "c": 3})).data == 6
        unknown = [item.data async for item in here.subscribe("count.up", {"n": 2})]

    assert unknown == [0, 1]


def _long_operations() -> OperationRegistry:
    """Operations that return the seconds they have, with time limits of 120 s, 1200 s and none."""
    there = OperationRegistry()

    async def seconds_left(context: OperationContext) -> float:
        assert context.deadline is not None
        return context.deadline / 1000 - time.time()

    there.operation("report.build", timeout=120)(seconds_left)
    there.operation("report.archive", timeout=1200)(seconds_left)
    there.operation("report.show")(seconds_left)
    return there


async def test_an_imported_operation_may_take_its_own_time_limit(world: World) -> None:
    here = OperationRegistry()
    async with (
        world.serve(_long_operations()),
        world.connect() as target,
        from_calls(target) as service,
    ):
        here.register_all(service)
        build = (await here.execute("report.build")).data
        archive = (await here.execute("report.archive")).data
        show = (await here.execute("report.show")).data
        asked = (await here.execute("report.show", timeout=90)).data
        shorter = (await here.execute("report.build", timeout=60)).data

    assert 60 < build <= 120
    assert 120 < archive <= 600, "a third party cannot keep callers waiting without limit"
    assert show <= 30
    assert 30 < asked <= 90
    assert 30 < shorter <= 60


async def test_a_time_limit_of_the_import_replaces_those_of_its_operations(world: World) -> None:
    here = OperationRegistry()
    async with (
        world.serve(_long_operations()),
        world.connect() as target,
        from_calls(target, timeout=50) as service,
    ):
        here.register_all(service)
        left = [
            (await here.execute("report.build")).data,
            (await here.execute("report.show", timeout=90)).data,
        ]
        served = call_seconds(here.get("report.show"), 30)

    assert all(30 < seconds <= 50 for seconds in left)
    assert served == 50


async def test_a_call_of_an_unknown_operation_has_thirty_seconds(world: World) -> None:
    async with (
        world.serve(_long_operations()),
        world.connect() as target,
        PendingRequestMap(target) as calls,
    ):
        left = (await calls.call("report.build")).data

    assert left <= 30


async def test_the_time_limit_of_a_new_worker_reaches_the_import(broker_world: World) -> None:
    here = OperationRegistry()
    new = _long_operations()
    show = new.get("report.show")
    assert show is not None
    new.register(msgspec.structs.replace(show, timeout=300), replace=True)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(broker_world.serve(_long_operations()))
        target = await stack.enter_async_context(broker_world.connect())
        here.register_all(await stack.enter_async_context(from_calls(target)))
        await stack.enter_async_context(broker_world.serve(new))
        await until(lambda: call_seconds(here.get("report.show"), 30) == 300)
        left = (await here.execute("report.show")).data

    assert 120 < left <= 300


@pytest.mark.requirement("R30")
async def test_time_is_inherited_over_three_levels(world: World) -> None:
    """The innermost call, two processes away, has at most the time of the outermost."""
    seen: list[float] = []
    times: list[float] = []
    async with AsyncExitStack() as stack:
        far = OperationRegistry()

        @far.operation("far.end", type="query")
        async def end(context: OperationContext) -> None:
            assert context.deadline is not None
            seen.append(context.deadline)
            times.append(time.time() * 1000)

        await stack.enter_async_context(world.serve(far))
        target = await stack.enter_async_context(world.connect())
        calls = await stack.enter_async_context(PendingRequestMap(target))
        near = OperationRegistry(remote=calls)

        @near.operation("near.middle", type="query")
        async def middle(context: OperationContext) -> None:
            assert context.deadline is not None
            seen.append(context.deadline)
            times.append(time.time() * 1000)
            await context.env.far.end({})

        bridge = MemoryTarget()
        await stack.enter_async_context(serve_calls(near, bridge))
        caller = await stack.enter_async_context(PendingRequestMap(bridge))
        await caller.call("near.middle", {}, timeout=20)

    # Clocks may differ, so the remaining seconds are sent, and the time of transport is not counted.
    assert seen[1] <= seen[0] + (times[1] - times[0]) + 20


async def test_an_import_can_be_renamed_and_guarded(registry: OperationRegistry) -> None:
    target = MemoryTarget()
    here = OperationRegistry()
    async with (
        serve_calls(registry, target),
        from_calls(target, namespace="far", access=AccessControl(["far:use"])) as service,
    ):
        here.register_all(service)
        with pytest.raises(CallError) as denied:
            await here.execute("far.math.add", {"a": 1, "b": 2})
        allowed = OperationContext(identity=Identity("a", ["far:use"]))
        assert (await here.execute("far.math.add", {"a": 1, "b": 2}, allowed)).data == 3

    assert denied.value.code == ErrorCode.ACCESS_DENIED


@pytest.mark.requirement("R64")
@pytest.mark.parametrize("namespace", [None, "far"])
async def test_a_worker_cannot_pass_its_operations_as_those_of_an_mcp_server(
    namespace: str | None,
) -> None:
    """Views of a server call the tools of its namespace."""
    there = OperationRegistry()
    for name, source in (("evil.refresh", "oslo"), ("own.refresh", "own")):
        meta = {"source": "mcp", "server": "oslo", "tool": "refresh", "namespace": source}

        @there.operation(name, meta=meta)
        async def refresh() -> None: ...

    target = MemoryTarget()
    async with serve_calls(there, target), from_calls(target, namespace=namespace) as service:
        registry = OperationRegistry(service)

    found = {spec.id: server_of(spec) for spec in registry.specs()}
    if namespace is None:
        assert found == {"evil.refresh": "evil", "own.refresh": "own"}
    else:
        assert found == {"far.evil.refresh": "far", "far.own.refresh": "far"}


@pytest.mark.requirement("R25")
async def test_a_collision_is_an_error_unless_it_is_excluded(registry: OperationRegistry) -> None:
    target = MemoryTarget()
    here = OperationRegistry()

    @here.operation("math.add")
    async def add() -> None: ...

    async with serve_calls(registry, target):
        async with from_calls(target) as service:
            with pytest.raises(RegistrationError):
                here.register_all(service)
            assert len(here) == 1
        async with from_calls(target, exclude=here) as service:
            here.register_all(service)
            assert len(here) > 1


async def test_calls_to_a_group_are_limited_and_the_others_wait() -> None:
    there, target, release = OperationRegistry(), MemoryTarget(), asyncio.Event()
    running = most = 0

    @there.operation("slow.wait")
    async def wait() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await release.wait()
        running -= 1

    with time_limit(20):
        async with serve_calls(there, target), from_calls(target, concurrent_calls=2) as service:
            here = OperationRegistry()
            here.register_all(service)
            calls = [asyncio.create_task(here.execute("slow.wait", {})) for _ in range(5)]
            await until(lambda: running == 2)
            release.set()
            await asyncio.gather(*calls)

    assert most == 2


async def test_an_import_without_workers_is_unavailable() -> None:
    with pytest.raises(CallError) as caught:
        async with from_calls(MemoryTarget()):
            pass

    assert caught.value.code == ErrorCode.UNAVAILABLE


async def test_operations_of_spokes_are_registered_while_they_are_connected() -> None:
    center = OperationRegistry()

    @center.operation("hub.hello", type="query")
    async def hello() -> str:
        return "hello"

    def spoke(name: str) -> OperationRegistry:
        registry = OperationRegistry()

        @registry.operation(f"{name}.whoami", type="query")
        async def whoami(context: OperationContext) -> Any:
            return [name, context.identity.id if context.identity else None]

        return registry

    hub = WebSocketHub(center)
    async with serve_websocket(
        hub.attach, identify=lambda request: Identity(request.headers.get("x-name", "?"))
    ) as server:
        url = f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with AsyncExitStack() as stack:
            maps = []
            for name in ("alice", "bob"):
                target = await stack.enter_async_context(
                    connect_websocket(url, headers={"x-name": name}, trusted=True)
                )
                await stack.enter_async_context(serve_calls(spoke(name), target))
                maps.append(await stack.enter_async_context(PendingRequestMap(target)))
            await until(lambda: "alice.whoami" in center and "bob.whoami" in center)
            assert (await maps[0].call("hub.hello")).data == "hello"
            # Alice reaches Bob through the hub, and Bob learns on whose behalf he is called.
            assert (await maps[0].call("bob.whoami")).data == ["bob", "alice"]
            assert (await center.execute("alice.whoami")).data == ["alice", None]
        await until(lambda: "alice.whoami" not in center and "bob.whoami" not in center)
        with pytest.raises(CallError) as caught:
            await center.execute("alice.whoami")

    assert caught.value.code == ErrorCode.OPERATION_NOT_FOUND


@pytest.mark.requirement("R63")
async def test_a_restricted_operation_of_a_spoke_is_removed_and_returns_restricted() -> None:
    center, spoke = OperationRegistry(), OperationRegistry()

    @spoke.operation("spoke.one", type="query")
    async def one() -> int:
        return 1

    async with serve_websocket(WebSocketHub(center).attach) as server:
        url = f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with connect_websocket(url) as target, serve_calls(spoke, target):
            await until(lambda: "spoke.one" in center)
            restrict(center, "spoke.one")
        await until(lambda: "spoke.one" not in center)
        async with connect_websocket(url) as target, serve_calls(spoke, target):
            await until(lambda: "spoke.one" in center)
            with pytest.raises(CallError, match="Access denied"):
                await center.execute("spoke.one")


async def test_operations_that_a_spoke_registers_or_removes_later_reach_its_hub() -> None:
    center, spoke = OperationRegistry(), OperationRegistry()

    @spoke.operation("spoke.first", type="query")
    async def first() -> int:
        return 1

    async with serve_websocket(WebSocketHub(center).attach) as server:
        url = f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with connect_websocket(url) as target, serve_calls(spoke, target, heartbeat=0.05):
            await until(lambda: "spoke.first" in center)

            @spoke.operation("spoke.later", type="query")
            async def later() -> int:
                return 2

            await until(lambda: "spoke.later" in center)
            assert (await center.execute("spoke.later")).data == 2
            spoke.unregister("spoke.first")
            await until(lambda: "spoke.first" not in center)
        await until(lambda: "spoke.later" not in center)


async def test_an_import_has_its_own_idle_timeout() -> None:
    registry, here, target = OperationRegistry(), OperationRegistry(), MemoryTarget()

    @registry.operation("quiet.watch")
    async def watch() -> AsyncIterator[int]:
        yield 1
        await asyncio.Event().wait()

    async with (
        serve_calls(registry, target),
        from_calls(target, idle_timeout=1) as service,
    ):
        here.register_all(service)
        items = here.subscribe("quiet.watch", {})
        assert (await anext(items)).data == 1
        with time_limit(20), pytest.raises(CallError) as caught:
            await anext(items)

    assert caught.value.code == ErrorCode.TIMEOUT


async def test_calls_to_a_spoke_that_leaves_fail_at_once() -> None:
    center = OperationRegistry()
    hub = WebSocketHub(center)
    started = asyncio.Event()
    spoke = OperationRegistry()

    @spoke.operation("spoke.wait")
    async def wait() -> None:
        started.set()
        await asyncio.sleep(60)

    async with serve_websocket(hub.attach) as server:
        url = f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with connect_websocket(url) as target, serve_calls(spoke, target, grace=0):
            await until(lambda: "spoke.wait" in center)
            call = asyncio.create_task(center.execute("spoke.wait"))
            await started.wait()
        with pytest.raises(CallError) as caught:
            await asyncio.wait_for(call, scaled(20))

    assert caught.value.code == ErrorCode.UNAVAILABLE


@pytest.mark.requirement("R09", "R25")
async def test_a_hostile_spoke_takes_no_name_and_impersonates_no_caller() -> None:
    center = OperationRegistry()

    @center.operation("hub.hello", type="query")
    async def hello(context: OperationContext) -> Any:
        return ["hello", context.identity.id if context.identity else None]

    spoke = OperationRegistry()

    @spoke.operation("hub.hello", type="query")
    async def impostor() -> str:
        return "hello from elsewhere"

    def spec(name: str) -> dict[str, Any]:
        return {"namespace": "evil", "name": name, "version": "1.0.0", "type": "query"}

    @spoke.operation("services.describe")
    async def everything() -> AsyncIterator[Any]:
        mine = {"namespace": "hub", "name": "hello", "version": "1.0.0", "type": "query"}
        services = {"namespace": "services", "name": "list", "version": "1", "type": "query"}
        odd = [7, None, {"name": 1}, {"namespace": "a b", "name": "\n", "type": "query"}]
        specs = [mine, services, *odd, *(spec(f"n{index}") for index in range(50))]
        entries = [json.dumps({"spec": each, "scopes": [None, None]}) for each in specs]
        yield "\n".join(("no JSON", "{}", *entries, ""))

    hub = WebSocketHub(center, max_operations=20)
    async with serve_websocket(
        hub.attach, identify=lambda request: Identity(request.headers["x-name"])
    ) as server:
        url = f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with AsyncExitStack() as stack:
            enter = stack.enter_async_context
            target = await enter(connect_websocket(url, headers={"x-name": "eve"}))
            await enter(serve_calls(spoke, target))
            eve = await enter(PendingRequestMap(target, send_identity=True))
            honest = await enter(connect_websocket(url, headers={"x-name": "alice"}))
            alice = await enter(PendingRequestMap(honest))
            await until(lambda: "evil.n0" in center)
            assert (await alice.call("hub.hello")).data == ["hello", "alice"]
            admin = Identity("admin", ["everything"])
            assert (await eve.call("hub.hello", identity=admin)).data == ["hello", "eve"]
            listed = {spec["name"] for spec in (await alice.call("services.list")).data}
            assert "hello" in listed
            assert len(center) <= 21

            @center.operation("late.comer")
            async def late() -> None: ...

        await until(lambda: "evil.n0" not in center)

    assert {known.spec.id for known in center} == {"hub.hello", "late.comer"}


async def test_a_spoke_that_is_back_before_it_was_missed_keeps_its_operations() -> None:
    def spoke(answer: str) -> OperationRegistry:
        registry = OperationRegistry()

        @registry.operation("spoke.hello", type="query")
        async def hello() -> str:
            return answer

        return registry

    center = OperationRegistry()
    async with serve_websocket(WebSocketHub(center).attach) as server:
        url = f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with AsyncExitStack() as old, AsyncExitStack() as new:
            first = await old.enter_async_context(connect_websocket(url))
            await old.enter_async_context(serve_calls(spoke("first"), first))
            await until(lambda: "spoke.hello" in center)
            second = await new.enter_async_context(connect_websocket(url))
            await new.enter_async_context(serve_calls(spoke("second"), second))
            calls = await new.enter_async_context(PendingRequestMap(second))
            assert (await calls.call("spoke.hello")).data == "first"
            before = center.get("spoke.hello")
            await old.aclose()
            await until(lambda: center.get("spoke.hello") not in (before, None))
            assert (await calls.call("spoke.hello")).data == "second"

        await until(lambda: "spoke.hello" not in center)


@asynccontextmanager
async def serving_at(url: str, registry: OperationRegistry) -> AsyncGenerator[None]:
    """Connect a spoke to the hub at `url`."""
    async with connect_websocket(url) as target, serve_calls(registry, target):
        yield


async def test_a_spoke_that_leaves_costs_no_look_at_unrelated_spokes() -> None:
    def spoke(*names: str) -> OperationRegistry:
        registry = OperationRegistry()
        for name in names:

            @registry.operation(name, type="query")
            async def answer(name: str = name) -> str:
                return name

        return registry

    seen: list[str] = []

    class Center(OperationRegistry):
        def registered(self, operation_id: str) -> Operation | None:
            seen.append(operation_id)
            return super().registered(operation_id)

    center = Center()
    async with serve_websocket(WebSocketHub(center).attach) as server, AsyncExitStack() as others:
        url = f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with AsyncExitStack() as leaving:
            await leaving.enter_async_context(serving_at(url, spoke("a.one", "b.two")))
            await until(lambda: "b.two" in center)
            await others.enter_async_context(serving_at(url, spoke("b.two", "c.three")))
            await others.enter_async_context(serving_at(url, spoke("d.four")))
            await until(lambda: "c.three" in center and "d.four" in center)
            before = center.get("b.two")
            seen.clear()
        await until(lambda: "a.one" not in center)

        assert center.get("b.two") not in (before, None)
        assert "d.four" not in seen


async def test_spokes_whose_renamed_operations_are_taken_get_them_when_they_are_free() -> None:
    def spoke(namespace: str) -> OperationRegistry:
        registry = OperationRegistry()
        for number in range(20):

            @registry.operation(f"{namespace}.{number}", type="query")
            async def answer() -> None: ...

        return registry

    asked: list[str] = []

    def rename(operation: Operation) -> Operation:
        asked.append(operation.spec.id)
        spec = msgspec.structs.replace(operation.spec, namespace="shared")
        return msgspec.structs.replace(operation, spec=spec)

    center = OperationRegistry()
    center.adapt(rename)
    async with serve_websocket(WebSocketHub(center).attach) as server, AsyncExitStack() as others:
        url = f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with AsyncExitStack() as leaving:
            await leaving.enter_async_context(serving_at(url, spoke("first")))
            await until(lambda: "shared.19" in center)
            await others.enter_async_context(serving_at(url, spoke("second")))
            await until(lambda: "second.19" in asked)
        await until(lambda: center.current_id("second.19") == "shared.19")

    # Once when the second connected, and once when the first left.
    assert asked.count("second.0") <= 2


@pytest.mark.requirement("F14")
async def test_f14_a_result_larger_than_the_hub_accepts_fails_its_call_alone() -> None:
    spoke, center = OperationRegistry(), OperationRegistry()

    @spoke.operation("spoke.text")
    async def text(size: int) -> str:
        return "x" * size

    hub = WebSocketHub(center, limits=Limits(body_bytes=100_000))
    with time_limit(20):
        async with hub.serve() as server:
            url = f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            async with connect_websocket(url) as target, serve_calls(spoke, target):
                await until(lambda: "spoke.text" in center)
                operation = center.get("spoke.text")
                with pytest.raises(CallError) as caught:
                    await center.execute("spoke.text", {"size": 200_000})
                assert (await center.execute("spoke.text", {"size": 3})).data == "xxx"
                assert center.get("spoke.text") is operation, "the connection was lost"

    assert caught.value.code == ErrorCode.RESOURCE_EXHAUSTED


@pytest.mark.requirement("R08")
async def test_r08_a_websocket_is_rejected_in_its_handshake(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def identify(request: Any) -> Identity:
        raise PermissionError(f"not with {request.headers['authorization']}")

    async with serve_websocket(
        WebSocketHub(OperationRegistry()).attach, identify=identify
    ) as server:
        url = f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(TransportError, match="401"):
            async with connect_websocket(url, headers={"authorization": "CANARY"}):
                pass

    assert "CANARY" not in caplog.text
    assert "identify raised PermissionError" in caplog.text


async def test_a_closed_service_raises(registry: OperationRegistry) -> None:
    target = MemoryTarget()
    with pytest.raises(RuntimeError, match="async with from_calls"):
        registry.register_all(from_calls(target))
    with pytest.raises(TypeError, match="async with connect_"):
        PendingRequestMap(connect_websocket("ws://127.0.0.1:1"))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not an event target"):
        async with serve_calls(registry, "ws://127.0.0.1:1"):  # type: ignore[arg-type]
            pass
    with pytest.raises(TypeError, match="takes an OperationRegistry"):
        async with serve_calls("registry", target):  # type: ignore[arg-type]
            pass


@pytest.mark.requirement("F34")
async def test_f34_a_closed_connection_or_one_of_another_loop_raises_at_once(
    broker_world: BrokerWorld, registry: OperationRegistry
) -> None:
    async with broker_world.connect() as target:
        control = target.control("worker")

        def elsewhere() -> str:
            async def call() -> None:
                await PendingRequestMap(target).call("math.add", {"a": 1, "b": 2})

            for use in (
                lambda: target.send(target.mailbox(), b"{}"),
                lambda: target.enqueue("math", b"{}", key="k", reply_to="", wait=1),
                lambda: target.enqueue(
                    "operations", b"{}", key="k", reply_to="", wait=1, worker=control
                ),
                lambda: target.is_present(control),
            ):
                with pytest.raises(NotSentError, match="another event loop"):
                    asyncio.run(use())
            with pytest.raises(CallError) as caught:
                asyncio.run(call())
            return caught.value.message

        with time_limit(20):
            assert "another event loop" in await asyncio.to_thread(elsewhere)
    with time_limit(20):
        with pytest.raises(CallError, match="closed: connect again") as caught:
            await PendingRequestMap(target).call("math.add", {"a": 1, "b": 2})
        with pytest.raises(TransportError, match="closed: connect again"):
            async with serve_calls(registry, target):
                pass

    assert caught.value.code == ErrorCode.UNAVAILABLE


@pytest.mark.requirement("F34")
async def test_f34_calls_over_a_closed_connection_fail_at_once(
    remote_world: World, registry: OperationRegistry
) -> None:
    async with remote_world.serve(registry):
        async with remote_world.connect() as target:
            calls = PendingRequestMap(target)
            await calls.call("math.add", {"a": 1, "b": 2})
        with pytest.raises(CallError) as caught:
            await calls.call("math.add", {"a": 1, "b": 2}, timeout=5)
        await calls.aclose()

    # Not TIMEOUT: the connection will not return.
    assert caught.value.code == ErrorCode.UNAVAILABLE


async def test_an_import_over_a_websocket_follows_a_restarted_server() -> None:
    async def one() -> int:
        return 1

    def serving(name: str) -> Any:
        registry = OperationRegistry()
        registry.operation(name, type="query")(one)
        return WebSocketHub(registry, max_operations=0).serve(port=port)

    port = free_port()
    async with AsyncExitStack() as stack:
        async with serving("old.one"):
            target = await stack.enter_async_context(connect_websocket(f"ws://127.0.0.1:{port}"))
            service = await stack.enter_async_context(from_calls(target))
            assert [each.spec.id for each in service] == ["old.one"]
        await until(lambda: service.problem is not None)
        async with serving("new.one"):
            await until(lambda: [each.spec.id for each in service] == ["new.one"])
            await until(lambda: service.problem is None)


@pytest.mark.parametrize("timeout", ["5", float("nan"), [1]])
async def test_a_non_numeric_timeout_is_rejected(timeout: Any, registry: OperationRegistry) -> None:
    target = MemoryTarget()
    async with serve_calls(registry, target), PendingRequestMap(target) as calls:
        with pytest.raises(CallError, match="timeout is not a number") as caught:
            await calls.call("math.add", {"a": 1, "b": 2}, timeout=timeout)

    assert caught.value.code == ErrorCode.VALIDATION_ERROR


@pytest.mark.requirement("R08")
@pytest.mark.parametrize(
    ("resolve", "credential", "said"),
    [
        (None, "token", "pass serve_calls(resolve=...)"),
        (lambda _: "alice", "token", "a resolver returned str"),
        (lambda token: Identity(token) if token else None, "", ""),
    ],
)
async def test_r08_an_unchecked_credential_is_rejected_and_logged_at_the_worker(
    resolve: Any,
    credential: str,
    said: str,
    registry: OperationRegistry,
    caplog: pytest.LogCaptureFixture,
) -> None:
    target = MemoryTarget()
    async with serve_calls(registry, target, resolve=resolve), PendingRequestMap(target) as calls:
        with pytest.raises(CallError) as caught:
            await calls.call("math.add", {"a": 1, "b": 2}, credential=credential)

    assert caught.value.code == ErrorCode.ACCESS_DENIED
    assert said in caplog.text


async def test_a_caller_cannot_fill_the_log_of_a_worker_with_credentials(
    registry: OperationRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    target = MemoryTarget()
    async with serve_calls(registry, target), PendingRequestMap(target) as calls:
        for _ in range(20):
            with pytest.raises(CallError):
                await calls.call("math.add", {"a": 1, "b": 2}, credential="token")

    assert [each.levelname for each in caplog.records].count("WARNING") == 1


async def test_a_peer_with_a_malformed_listing_can_only_call() -> None:
    spoke = OperationRegistry()

    @spoke.operation("services.describe")
    async def nonsense() -> AsyncIterator[Any]:
        yield None

    center = OperationRegistry()

    @center.operation("hub.hello", type="query")
    async def hello() -> str:
        return "hello"

    async with serve_websocket(WebSocketHub(center).attach) as server:
        url = f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with (
            connect_websocket(url) as target,
            serve_calls(spoke, target),
            PendingRequestMap(target) as calls,
        ):
            for _ in range(3):
                assert (await calls.call("hub.hello")).data == "hello"
                await asyncio.sleep(0.05)


@pytest.mark.requirement("R30", "R09")
async def test_a_nested_call_over_the_wire_is_made_for_the_same_caller() -> None:
    far = OperationRegistry()
    there, bridge = MemoryTarget(), MemoryTarget()

    @far.operation("far.who", type="query", scopes=["far:ask"])
    async def who(context: OperationContext) -> Any:
        assert context.identity is not None
        return [context.identity.id, context.trusted]

    async with (
        serve_calls(far, there),
        PendingRequestMap(there) as onward,
        AsyncExitStack() as stack,
    ):
        near = OperationRegistry(remote=onward)

        @near.operation("near.ask", type="query")
        async def ask(context: OperationContext) -> Any:
            return (await context.env.far.who({})).data

        await stack.enter_async_context(serve_calls(near, bridge))
        calls = await stack.enter_async_context(PendingRequestMap(bridge))
        allowed = Identity("alice", ["far:ask"])
        assert (await calls.call("near.ask", identity=allowed)).data == ["alice", False]
        with pytest.raises(CallError) as denied:
            await calls.call("near.ask", identity=Identity("bob"))

    assert denied.value.code == ErrorCode.ACCESS_DENIED


async def test_a_list_too_large_to_send_is_rejected_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("operations.calls.protocol.services.MAX_LIST", 2_000)
    registry = OperationRegistry()
    for index in range(50):
        registry.register_spec(
            OperationSpec(
                name=f"n{index}",
                namespace="few" if index < 3 else "many",
                type=OperationType.QUERY,
            )
        )
    target = MemoryTarget()
    async with serve_calls(registry, target):
        calls = PendingRequestMap(target)
        with pytest.raises(CallError) as caught:
            await calls.call("services.list")
        assert caught.value.code == ErrorCode.RESOURCE_EXHAUSTED
        assert "one namespace" in caught.value.message
        assert len((await calls.call("services.list", {"namespace": "few"})).data) == 3
        await calls.aclose()


async def test_a_change_that_cannot_be_imported_does_not_hide_later_ones(world: World) -> None:
    registry, refused = OperationRegistry(), asyncio.Event()

    async def one() -> int:
        return 1

    def access(spec: OperationSpec) -> AccessControl:
        if spec.namespace == "refused":
            refused.set()
            raise RuntimeError("the program has no rule")
        return AccessControl()

    registry.operation("first.one", type="query")(one)
    async with (
        world.serve(registry, heartbeat=0.1),
        world.connect() as target,
        from_calls(target, access=access) as service,
    ):
        registry.operation("refused.one", type="query")(one)
        with time_limit(30):
            await refused.wait()
            registry.unregister("refused.one")
            registry.operation("later.one", type="query")(one)
            await until(lambda: {each.spec.id for each in service} == {"first.one", "later.one"})


async def test_a_changed_time_limit_is_imported(world: World) -> None:
    registry = OperationRegistry()

    @registry.operation("slow.one", type="query", timeout=60)
    async def one() -> int:
        return 1

    async with (
        world.serve(registry, heartbeat=0.1),
        world.connect() as target,
        from_calls(target) as service,
    ):
        assert [each.source_timeout for each in service] == [60]
        operation = registry.get("slow.one")
        assert operation is not None
        registry.register(msgspec.structs.replace(operation, timeout=120), replace=True)
        with time_limit(30):
            await until(lambda: [each.source_timeout for each in service] == [120])


async def test_an_update_that_failed_is_repeated(world: World) -> None:
    registry, local, failed = OperationRegistry(), OperationRegistry(), asyncio.Event()

    async def one(more: int = 1) -> int:
        return more

    def adapt(operation: Operation) -> Operation:
        if operation.spec.version == "2" and not failed.is_set():
            failed.set()
            raise RuntimeError("a defect of the program")
        if operation.spec.name == "taken":
            spec = msgspec.structs.replace(operation.spec, name="local")
            return msgspec.structs.replace(operation, spec=spec)
        return operation

    registry.operation("shop.one", type="query")(one)
    local.operation("shop.local", type="query")(one)
    local.adapt(adapt)
    async with (
        world.serve(registry, heartbeat=0.1),
        world.connect() as target,
        from_calls(target) as service,
    ):
        local.register_all(service)
        with time_limit(30):
            registry.unregister("shop.one")
            registry.operation("shop.one", type="query", version="2")(one)
            await failed.wait()
            # One operation whose name is taken does not hide the others.
            registry.operation("shop.taken", type="query")(one)
            registry.operation("shop.two", type="query")(one)
            await until(lambda: "shop.two" in local)
        assert [spec.version for spec in local.specs() if spec.id == "shop.one"] == ["2"]
        assert "shop.taken" not in local


@pytest.mark.requirement("R63")
async def test_restrictions_of_the_application_survive_changes_of_the_workers(
    world: World,
) -> None:
    there, here = OperationRegistry(), OperationRegistry()

    async def one() -> int:
        return 1

    def offer(version: str) -> None:
        there.operation("shop.one", type="query", version=version)(one)

    async def enforce_restricted() -> None:
        with pytest.raises(CallError, match="Access denied"):
            await here.execute("shop.one")

    offer("1")
    there.operation("shop.other", type="query")(one)
    async with (
        world.serve(there, heartbeat=0.1),
        world.connect() as target,
        from_calls(target) as service,
    ):
        here.register_all(service)
        restrict(here, "shop.one")
        with time_limit(30):
            there.unregister("shop.one")
            offer("2")
            await until(lambda: here.get_spec("shop.one").version == "2")  # type: ignore[union-attr]
            await enforce_restricted()
            there.unregister("shop.one")
            await until(lambda: "shop.one" not in here)
            offer("3")
            await until(lambda: "shop.one" in here)
            await enforce_restricted()


async def test_a_service_closed_during_a_failing_refresh_stops_following(
    registry: OperationRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, asked = MemoryTarget(), asyncio.Event()

    async def fail_when_cancelled() -> bool:
        asked.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise CallError(ErrorCode.UNAVAILABLE, "the call has ended") from None
        return True

    before = asyncio.all_tasks()
    async with serve_calls(registry, target), from_calls(target) as service:
        monkeypatch.setattr(service.calls, "has_workers", fail_when_cancelled)
        await asyncio.wait_for(asked.wait(), scaled(10))
    await until(lambda: asyncio.all_tasks() == before)
