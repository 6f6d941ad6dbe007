"""No input and no result costs the event loop, or after its call has ended the processor, more than promised.

The tests measure processor time, in units of this machine's speed: of the thread of the event loop between two of its
turns, and of each check in native code, which holds the interpreter lock in any thread. They count the steps that
threads begin after the call has ended at its registry: none, so that only the step in progress goes on.

A call ends with its client, except in a session of MCP 2025, whose client may resume the response: there it goes on.
"""

import asyncio
import gc
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, make_dataclass
from time import thread_time
from typing import Any, Literal, Union

import pytest
from aiohttp import web
from tests.authority.test_entry_points import ENTRY_POINTS, Failed, opened
from tests.limits import slowness, time_limit
from tests.openapi.serving import serving as serving_http
from tests.schema.test_budget import BRANCHES, HOSTILE, MEMBERS, NAMES, WIDE

from operations import (
    CallError,
    Identity,
    OperationContext,
    OperationRegistry,
    OperationSpec,
    OperationType,
    from_schema,
)
from operations.authority import ApprovalRule, Grants
from operations.base.work import Work
from operations.calls import from_calls, serve_calls
from operations.contract.events import CallEvent, CallFinished, CallStarted
from operations.contract.specs import Operation
from operations.mcp import MCPClientConfig, connect_mcp, to_mcp
from operations.openapi import HTTPServiceConfig, from_openapi
from operations.pubsub.memory import MemoryTarget
from operations.schema import compiling
from operations.tools import ToolConfig, configure_tools

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("R67")]

LOOP = 0.1
"""The most processor time between two turns of the event loop, in seconds."""

CHECK = 0.05
"""The most processor time of a native check: the estimate is 0.02."""

CLASSES = [make_dataclass(f"C{index}", [(f"p{index}", int), ("a", str)]) for index in range(60)]
NESTED = {"rows": [[number] for number in range(45_000)]}


def _document(rows: Any) -> Any:
    return {"type": "object", "properties": {"rows": rows, "names": {}}, "required": ["rows"]}


INPUTS: dict[str, tuple[Any, Any]] = {
    "valid for the last member of a union": (WIDE, {"rows": [{"p199": 1, "a": "x"}] * 20_000}),
    "invalid for a union": (WIDE, {"rows": HOSTILE * 30}),
    "names in branches": (BRANCHES, {"rows": NAMES}),
    "contains": ({"contains": {"properties": {"a": {"const": 1}}, "type": "object"}}, NESTED),
    "enum": ({"enum": [[number] for number in range(1_000)]}, NESTED),
    "const": ({"const": [[1]] * 1_000}, NESTED),
    "unique": ({"type": "array", "uniqueItems": True}, NESTED),
    "not": ({"not": {"anyOf": MEMBERS}}, {"rows": HOSTILE * 30}),
    "text": ({"pattern": "(a|b)*a(a|b){600}"}, {"rows": "ab" * 200_000}),
}


def register(registry: OperationRegistry) -> dict[str, Any]:
    """Register the operations of all inputs; return the inputs by operation."""

    async def handler(input: Any, context: OperationContext) -> str:
        return "ran"

    found = dict[str, Any]()
    for number, (document, value) in enumerate(INPUTS.values()):
        policies: tuple[Literal["strict", "convert"], ...] = ("strict", "convert")
        for policy in policies[: 2 if number < 2 else 1]:
            name = f"{policy}{number}"
            spec = OperationSpec(
                name=name,
                namespace="work",
                type=OperationType.MUTATION,
                input_schema=from_schema(_document(document)),
            )
            registry.register(Operation(spec, handler, input=policy))
            found[spec.id] = value

    async def typed(rows: Any) -> str:
        return "ran"

    union: Any = Union
    item: Any = union[tuple(CLASSES)]
    rows: Any = list
    typed.__annotations__ = {"rows": rows[item], "return": str}
    registry.operation("work.typed")(typed)
    found["work.typed"] = {"rows": [{"p59": 1, "a": "x"}] * 20_000}
    return found


class Threads(ThreadPoolExecutor):
    """The threads of the event loop, and their jobs."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs: list[Future[Any]] = []

    def submit(self, *args: Any, **options: Any) -> Future[Any]:
        job: Future[Any] = super().submit(*args, **options)
        self.jobs.append(job)
        return job

    async def wait(self) -> None:
        """Wait for the end of all jobs, also of those whose caller has left."""
        ended = [asyncio.wrap_future(each) for each in self.jobs if not each.cancelled()]
        await asyncio.gather(*ended, return_exceptions=True)
        self.jobs.clear()


class Times:
    """The longest processor times since it was reset, in seconds, and the steps after the end of a call."""

    loop = 0.0
    """Between two turns of the event loop, in its thread."""

    check = 0.0
    """Of one check in native code."""

    late = 0
    """The steps that other threads have begun after the end of the call."""

    is_over = False
    """Whether the call has ended."""

    def __init__(self) -> None:
        self.threads = Threads()

    def note_step(self, work: Work) -> bool:
        """Return whether work was stopped, which each of its steps asks before it begins."""
        is_late = self.is_over and threading.current_thread() is not threading.main_thread()
        is_stopped = vars(work).get("stopped", False)
        self.late += is_late and not is_stopped
        return bool(is_stopped)

    async def tick(self) -> None:
        while True:
            before = thread_time()
            await asyncio.sleep(0.001)
            self.loop = max(self.loop, thread_time() - before)


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Times:
    """Measure the checks of the schemas that are compiled from now on."""
    found = Times()

    def stop(work: Work, value: bool) -> None:
        vars(work)["stopped"] = value

    monkeypatch.setattr(Work, "is_stopped", property(found.note_step, stop))

    def spied(*args: Any, **options: Any) -> Callable[[Any], bool]:
        is_valid = compiling.compile_schema(*args, **options)

        def spy(value: Any) -> bool:
            before = thread_time()
            try:
                return is_valid(value)
            finally:
                found.check = max(found.check, thread_time() - before)

        return spy

    monkeypatch.setattr("operations.schema.checking.compile_schema", spied)
    return found


@asynccontextmanager
async def measured(times: Times, registry: OperationRegistry) -> AsyncGenerator[None]:
    """Measure what the block and the work that it leaves behind take."""
    asyncio.get_running_loop().set_default_executor(times.threads)
    running, has_ended = set[str](), asyncio.Event()

    def note(event: CallEvent) -> None:
        if isinstance(event, CallStarted):
            running.add(event.request_id)
        elif isinstance(event, CallFinished):
            running.discard(event.request_id)
            has_ended.set()

    gc.collect()
    times.loop = times.check = times.late = 0
    stop, task = registry.observe(note), asyncio.create_task(times.tick())
    await asyncio.sleep(0)
    gc.disable()
    try:
        yield
        with time_limit(10):
            while running:
                has_ended.clear()
                await has_ended.wait()
            times.is_over = True
            await times.threads.wait()
        # The turn that measures the last step may still be due.
        await asyncio.sleep(0.005)
    finally:
        times.is_over = False
        gc.enable()
        task.cancel()
        stop()


async def enforce_free_loop(
    what: str, times: Times, registry: OperationRegistry, act: Callable[[], Awaitable[None]]
) -> None:
    """Fail the test if `act` holds the event loop too long, or leaves work behind.

    What it takes is the shortest of three times: other processes on the machine disturb caches, and so processor time.
    """
    for attempt in range(3):
        before = slowness()
        async with measured(times, registry):
            await act()
        factor = max(1.0, before, slowness())
        assert times.late == 0, f"{what}: {times.late} steps after its end"
        if times.loop < LOOP * factor and times.check < CHECK * factor:
            return
        found = f"{times.loop:.3f} s of the event loop, {times.check:.3f} s of a native check"
        assert attempt < 2, f"{what}: {found}"


@pytest.mark.parametrize("name", ENTRY_POINTS)
async def test_no_input_holds_the_event_loop_of_an_entry_point(name: str, times: Times) -> None:
    call = ENTRY_POINTS[name]
    async with opened(name) as world:
        inputs = register(world.registry)
        for operation, value in inputs.items():
            # The first call compiles the schema.
            with suppress(Failed):
                await call(world, operation, {"rows": []}, "alice")

            async def act(operation: str = operation, value: Any = value) -> None:
                with suppress(Failed, TimeoutError):
                    async with asyncio.timeout(0.5):
                        assert await call(world, operation, value, "alice") == "ran"

            await enforce_free_loop(f"{name}, {operation}", times, world.registry, act)


@dataclass
class Item:
    a: int = 0
    b: str = "x"


ROWS = {"type": "array", "items": {"anyOf": MEMBERS[:20]}}
ORDER = {"properties": {"amount": {"default": 5, "type": "integer"}}}
VALID = [{"p19": 1, "a": "x"}] * 10_000
RULED: dict[str, tuple[Any, Any, Any]] = {
    "defaults": (
        {"properties": {"rows": ROWS, "order": ORDER}},
        None,
        {"rows": VALID, "order": {}},
    ),
    "schema": (
        {"type": "object"},
        {"properties": {"rows": ROWS}, "required": ["never"]},
        {"rows": VALID},
    ),
    "names": ({"type": "object"}, None, {f"name{number}": number for number in range(99_000)}),
    "typed": (list[Item], None, {"rows": [{} for _ in range(30_000)]}),
    "long text": ({"type": "object"}, None, {"rows": "\u202e" * 1_000_000}),
}
"""The input schema of an operation or the type of its parameter, the schema of an approval rule, and an input."""


@pytest.mark.parametrize("is_granted", [False, True])
@pytest.mark.parametrize("name", RULED)
async def test_no_input_that_rules_read_holds_the_event_loop(
    name: str, is_granted: bool, times: Times
) -> None:
    kind, when, value = RULED[name]
    registry = OperationRegistry()

    async def handler(input: Any, context: OperationContext) -> str:
        return "ran"

    async def typed(rows: Any) -> str:
        return "ran"

    if isinstance(kind, dict):
        spec = OperationSpec(
            name="pay",
            namespace="task",
            type=OperationType.MUTATION,
            input_schema=from_schema(kind),
        )
        registry.register(Operation(spec, handler))
    else:
        typed.__annotations__ = {"rows": kind, "return": str}
        registry.operation("task.pay")(typed)
    if when is not None or not is_granted:
        configure_tools(registry, {"task.pay": ToolConfig(approve=ApprovalRule(when=when))})
    identity = Identity("ann")
    if is_granted:
        order = {"properties": {"amount": {"maximum": 9}}}
        schema = {"properties": {"order": order, "rows": {"items": {"maximum": 9}}}}
        grants = Grants(b"k" * 32)
        token = grants.create(identity, "bot", operations=["*"], input={"*": schema})
        found = await grants.resolve(token)
        assert found is not None
        identity = found
    context = OperationContext(identity=identity)
    small: Any = {"rows": []}
    for each in (small, value):

        async def act(each: Any = each) -> None:
            with suppress(CallError, TimeoutError):
                async with asyncio.timeout(2):
                    await registry.execute("task.pay", each, context)

        await enforce_free_loop(name, times, registry, act)


RESULTS: dict[str, tuple[Any, Any]] = {
    "union": (WIDE, HOSTILE),
    "long union": (WIDE, HOSTILE * 20),
    "names": ({**BRANCHES, "required": ["first"]}, NAMES),
    "not": ({"type": "array", "items": {"not": {"anyOf": MEMBERS}}}, HOSTILE * 20),
    "enum": ({"enum": [[number] for number in range(1_000)]}, NESTED["rows"]),
    "text": (
        {"type": "array", "items": {"type": "string", "pattern": "(a|b)*a(a|b){600}"}},
        ["ab" * 100_000] * 4,
    ),
}


@pytest.mark.parametrize("name", RESULTS)
async def test_no_result_of_a_source_holds_the_event_loop(name: str, times: Times) -> None:
    schema, value = RESULTS[name]

    async def get(input: Any, context: OperationContext) -> Any:
        return value

    async def watch(input: Any, context: OperationContext) -> AsyncIterator[Any]:
        yield value

    def upstream(policy: Any) -> OperationRegistry:
        found = OperationRegistry()
        for kind, handler in ((OperationType.QUERY, get), (OperationType.SUBSCRIPTION, watch)):
            spec = OperationSpec(
                name=handler.__name__,
                namespace="row",
                type=kind,
                output_schema=from_schema(schema),
            )
            found.register(Operation(spec, handler, policy, exact_schemas=False))
        return found

    async def respond(request: web.Request) -> web.StreamResponse:
        return web.json_response(value)

    content = {"application/json": {"schema": schema}}
    document: Any = {
        "openapi": "3.1.0",
        "info": {"title": "Rows", "version": "1"},
        "paths": {
            "/row": {
                "get": {
                    "operationId": "get",
                    "responses": {"200": {"description": "", "content": content}},
                }
            }
        },
    }
    registry, target = OperationRegistry(upstream(None)), MemoryTarget()
    async with (
        serving_http(respond) as url,
        from_openapi(document, HTTPServiceConfig("http", base_url=url)) as http,
        connect_mcp(
            "tools",
            MCPClientConfig(server=to_mcp(upstream("off")), trust_annotations=False),
        ) as mcp,
        serve_calls(upstream("off"), target),
        from_calls(target, namespace="calls") as calls,
    ):
        for service in (http, mcp, calls):
            registry.register_all(service)
        for spec in sorted(registry.specs(), key=lambda each: each.id):
            operation, is_stream = spec.id, spec.type == OperationType.SUBSCRIPTION
            for _ in range(2):

                async def act(operation: str = operation, is_stream: bool = is_stream) -> None:
                    with suppress(CallError, TimeoutError):
                        async with asyncio.timeout(0.5):
                            if is_stream:
                                found = [each async for each in registry.subscribe(operation, {})]
                            else:
                                found = [await registry.execute(operation, {})]
                            assert found[0].data is not None

                await enforce_free_loop(f"{name}, {operation}", times, registry, act)
