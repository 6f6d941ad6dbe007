"""Calls without `await`: from scripts, threads, notebooks, WSGI, and `def` handlers."""

import asyncio
import contextvars
import gc
import inspect
import json
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from urllib.request import urlopen
from wsgiref.simple_server import WSGIRequestHandler, make_server

import pytest
from tests.limits import scaled, time_limit

import operations
from operations import (
    CallError,
    Identity,
    LocalResponseMeta,
    OperationContext,
    OperationRegistry,
)
from operations.base.loops import shared_loop
from operations.server import APIKeys, create_app, hash_key
from operations.server.http11.running import running

CALLER = contextvars.ContextVar("CALLER", default="nobody")


@pytest.fixture
def registry() -> OperationRegistry:
    registry = OperationRegistry(max_threads=2)
    closed: list[str] = []
    registry.closed = closed  # type: ignore[attr-defined]

    @registry.operation("task.create", scopes=["task:write"])
    async def create(title: str, priority: int = 1) -> dict[str, Any]:
        return {"title": title, "priority": priority}

    @registry.operation("math.double", type="query")
    async def double(number: int) -> int:
        await asyncio.sleep(0)
        return 2 * number

    @registry.operation("math.quadruple", type="query")
    def quadruple(number: int, context: OperationContext) -> int:
        once = context.env.math.double({"number": number}).data
        return int(context.env.call("math.double", {"number": once}).data)

    @registry.operation("math.down", type="query")
    def down(number: int, context: OperationContext) -> int:
        return 1 + context.env.math.down({"number": number - 1}).data if number else 0

    @registry.operation("math.sum", type="query")
    def add(to: int, context: OperationContext) -> int:
        return sum(each.data for each in context.env.subscribe("math.count", {"to": to}))

    @registry.operation("math.count")
    async def count(to: int) -> AsyncIterator[int]:
        try:
            for number in range(to):
                yield number
        finally:
            closed.append("count")

    @registry.operation("math.forever", type="query")
    async def forever() -> None:
        closed.append("forever began")
        try:
            await asyncio.Event().wait()
        finally:
            closed.append("forever")

    @registry.operation("caller.name", type="query")
    async def name() -> str:
        return CALLER.get()

    return registry


def free_places(registry: OperationRegistry) -> int:
    places: Any = registry.threads.places()
    return int(places._free._value) - int(places._owed)


ALICE = OperationContext(identity=Identity("alice", ["task:write"]))


def test_a_script_calls_without_await(registry: OperationRegistry) -> None:
    assert registry.sync.execute("math.double", {"number": 4}).data == 8
    assert registry.sync.math.double(number=4) == 8
    assert registry.sync.math.double({"number": 4}) == 8
    assert registry.sync["math"]["double"](number=4) == 8
    created = registry.sync.execute("task.create", {"title": "x"}, ALICE)
    assert created.data == {"title": "x", "priority": 1}
    assert {"math", "task", "execute"} <= set(dir(registry.sync))
    assert "double" in dir(registry.sync.math)


def test_a_notebook_completes_the_names_of_operations(registry: OperationRegistry) -> None:
    # The completion of IPython runs no properties, but `dir` of what it finds.
    calls = inspect.getattr_static(registry, "sync")
    assert "math" in dir(calls)
    assert "double" in dir(calls.math)


def test_errors_are_those_of_execute(registry: OperationRegistry) -> None:
    for call, code in (
        (lambda: registry.sync.task.create(title="x"), "ACCESS_DENIED"),
        (lambda: registry.sync.math.double(nummer=1), "VALIDATION_ERROR"),
        (lambda: registry.sync.execute("math.forever", timeout=0.05), "TIMEOUT"),
        (registry.sync.math.nope, "OPERATION_NOT_FOUND"),
    ):
        with pytest.raises(CallError) as caught:
            call()
        assert caught.value.code == code
    with pytest.raises(TypeError, match="either"):
        registry.sync.math.double(1, number=2)


def test_a_subscription_is_iterated_and_ends_early(registry: OperationRegistry) -> None:
    closed: list[str] = registry.closed  # type: ignore[attr-defined]
    items = registry.sync.subscribe("math.count", {"to": 3})
    assert [each.data for each in items] == [0, 1, 2]
    assert list(items) == []
    assert closed == ["count"]
    with registry.sync.subscribe("math.count", {"to": 1000}) as items:
        assert next(items).data == 0
    assert closed == ["count", "count"]
    with pytest.raises(CallError) as caught:
        next(registry.sync.subscribe("math.count", {"too": 1}))
    assert caught.value.code == "VALIDATION_ERROR"


def test_a_subscription_that_is_dropped_ends(registry: OperationRegistry) -> None:
    closed: list[str] = registry.closed  # type: ignore[attr-defined]
    items = registry.sync.subscribe("math.count", {"to": 1000})
    next(items)
    del items
    gc.collect()
    registry.sync.run(asyncio.sleep(0.01))
    assert closed == ["count"]


def test_many_threads_call_on_one_loop(registry: OperationRegistry) -> None:
    before = {each.name for each in threading.enumerate()}
    with ThreadPoolExecutor(16) as threads:
        calls = [threads.submit(registry.sync.math.double, {"number": each}) for each in range(200)]
        assert [each.result() for each in calls] == [2 * each for each in range(200)]
        loops = [each.name for each in threading.enumerate() if each.name == "operations loop"]
    assert len(loops) == 1
    assert before <= before | {"operations loop"}


def test_context_variables_reach_the_handler(registry: OperationRegistry) -> None:
    CALLER.set("alice")
    assert registry.sync.caller.name() == "alice"


async def test_a_running_loop_may_wait_for_another_but_not_for_itself(
    registry: OperationRegistry,
) -> None:
    # As in a notebook, whose kernel runs a loop in this thread.
    assert registry.sync.math.double(number=2) == 4
    async with registry:
        with pytest.raises(RuntimeError, match="await"):
            registry.sync.math.double(number=2)
        assert await asyncio.to_thread(registry.sync.math.double, {"number": 2}) == 4


async def test_a_registry_that_is_open_is_called_on_its_loop(registry: OperationRegistry) -> None:
    loops: list[object] = []

    @registry.operation("loop.note", type="query")
    async def note() -> None:
        loops.append(asyncio.get_running_loop())

    async with registry:
        await asyncio.to_thread(registry.sync.loop.note)
    await asyncio.to_thread(registry.sync.loop.note)
    assert loops[0] is asyncio.get_running_loop()
    assert loops[1] is shared_loop.loop


def test_ctrl_c_cancels_the_call() -> None:
    code = """
import asyncio, signal, threading, os
from operations import OperationRegistry
registry = OperationRegistry()
started = threading.Event()
@registry.operation("math.forever", type="query")
async def forever() -> None:
    started.set()
    try:
        await asyncio.Event().wait()
    finally:
        print("cancelled", flush=True)
threading.Thread(target=lambda: (started.wait(), os.kill(os.getpid(), signal.SIGINT)), daemon=True).start()
try:
    registry.sync.math.forever()
except KeyboardInterrupt:
    registry.sync.run(asyncio.sleep(0))
    print("interrupted", flush=True)
"""
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=scaled(60), check=True
    )
    assert ran.stdout.split() == ["cancelled", "interrupted"]
    assert ran.stderr == ""


def test_the_process_ends_with_open_subscriptions_and_closes_them() -> None:
    code = """
import asyncio
from collections.abc import AsyncIterator
from operations import OperationRegistry
registry = OperationRegistry()
@registry.operation("math.count")
async def count() -> AsyncIterator[int]:
    try:
        yield 1
        await asyncio.Event().wait()
    finally:
        print("closed", flush=True)
items = registry.sync.subscribe("math.count")
print(next(items).data, flush=True)
"""
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=scaled(60), check=True
    )
    assert ran.stdout.split() == ["1", "closed"]
    assert ran.stderr == ""


# ------------------------------------------------------------ def handlers


async def test_the_env_of_a_def_handler_returns_values(registry: OperationRegistry) -> None:
    with time_limit(60):
        found = await registry.execute("math.quadruple", {"number": 3})
        assert found.data == 12
        assert (await registry.execute("math.sum", {"to": 4})).data == 6


async def test_nested_def_handlers_do_not_wait_for_each_others_threads(
    registry: OperationRegistry,
) -> None:
    # Only 2 threads may run at a time, and 6 wait for one below them.
    with time_limit(60):
        calls = (registry.execute("math.down", {"number": 6}) for _ in range(8))
        found = await asyncio.gather(*calls)
    assert [each.data for each in found] == [6] * 8
    assert free_places(registry) == 2


async def test_the_nested_call_of_a_def_handler_ends_with_its_caller(
    registry: OperationRegistry,
) -> None:
    closed: list[str] = registry.closed  # type: ignore[attr-defined]
    seen: list[str] = []
    over = asyncio.Event()
    loop = asyncio.get_running_loop()

    @registry.operation("math.outer", type="query")
    def outer(context: OperationContext) -> None:
        try:
            context.env.math.forever()
        except CallError as error:
            seen.append(error.code)
        finally:
            loop.call_soon_threadsafe(over.set)

    call = asyncio.create_task(registry.execute("math.outer"))
    with time_limit(60):
        while "forever began" not in closed:
            await asyncio.sleep(0)
        call.cancel()
        await over.wait()
    with pytest.raises(asyncio.CancelledError):
        await call
    await asyncio.sleep(0)
    assert seen == ["ABORTED"]
    assert closed == ["forever began", "forever"]
    assert free_places(registry) == 2


# ------------------------------------------------------------ other programs


@asynccontextmanager
async def served(registry: OperationRegistry) -> AsyncGenerator[str]:
    keys = APIKeys({hash_key("k" * 32): Identity("alice", ["task:write"])})
    async with running(create_app(registry, identity=keys)) as url:
        yield url


@pytest.fixture
def url(registry: OperationRegistry) -> Generator[str]:
    """The address of a server in another thread, as scripts see it."""
    with held(registry) as found:
        yield found


@contextmanager
def held(registry: OperationRegistry) -> Generator[str]:
    local = OperationRegistry()
    try:
        yield local.sync.enter(served(registry))
    finally:
        local.sync.close()


def test_a_hub_is_called_over_http(url: str) -> None:
    hub = operations.connect(url, token="k" * 32)
    with hub.sync:
        assert hub.sync.task.create(title="x") == {"title": "x", "priority": 1}
        meta = hub.sync.execute("task.create", {"title": "y"}).meta
        assert isinstance(meta, LocalResponseMeta)
        assert meta.operation_id == "task.create"
        items = hub.sync.subscribe("math.count", {"to": 3})
        assert [each.data for each in items] == [0, 1, 2]
        assert "task" in dir(hub.sync)
        assert "create" in dir(hub.sync.task)
        for call, code in (
            (lambda: hub.sync.task.create(titel="x"), "VALIDATION_ERROR"),
            (lambda: hub.sync.task.creat(title="x"), "OPERATION_NOT_FOUND"),
            (lambda: hub.sync.execute("math.forever", timeout=0.2), "TIMEOUT"),
            (lambda: next(hub.sync.subscribe("math.count", {})), "VALIDATION_ERROR"),
        ):
            with pytest.raises(CallError) as caught:
                call()
            assert caught.value.code == code


@pytest.mark.parametrize(
    "code",
    [
        "hub = operations.connect(url, token=token)\nprint(hub.sync.math.double(number=4))",
        "print(operations.connect(url, token=token).sync.math.double(number=4))\ngc.collect()",
    ],
    ids=["kept until the end", "dropped"],
)
def test_a_script_that_does_not_close_its_hub_ends_without_a_word(url: str, code: str) -> None:
    start = f"import gc\nimport operations\nurl, token = {url!r}, {'k' * 32!r}\n"
    ran = subprocess.run(
        [sys.executable, "-c", start + code],
        capture_output=True, text=True, timeout=scaled(60), check=True,
    )  # fmt: skip
    assert (ran.stdout, ran.stderr) == ("8\n", "")


def test_the_details_of_a_remote_error_arrive(url: str) -> None:
    hub = operations.connect(url, token="k" * 32)
    with hub.sync, pytest.raises(CallError, match="Did you mean") as caught:
        hub.sync.task.create(titel="x")
    assert caught.value.details["errors"]


async def test_a_hub_is_called_with_await_as_well(registry: OperationRegistry) -> None:
    async with served(registry) as url, operations.connect(url, token="k" * 32) as hub:
        assert (await hub.execute("task.create", {"title": "x"})).data["title"] == "x"
        assert [each.data async for each in hub.subscribe("math.count", {"to": 2})] == [0, 1]


def test_a_wrong_token_and_a_wrong_server_are_reported(url: str) -> None:
    with operations.connect(url, token="wrong").sync as calls, pytest.raises(CallError) as caught:
        calls.task.create(title="x")
    assert caught.value.code == "ACCESS_DENIED"
    with (
        operations.connect("http://127.0.0.1:9").sync as calls,
        pytest.raises(CallError) as caught,
    ):
        calls.task.create(title="x")
    assert caught.value.code == "UNAVAILABLE"
    for address in ("127.0.0.1:80", "http://user:secret@127.0.0.1", "http://127.0.0.1/?key=secret"):
        with pytest.raises(ValueError) as wrong:  # noqa: PT011
            operations.connect(address)
        assert "secret" not in str(wrong.value)


def test_a_wsgi_application_calls_operations(registry: OperationRegistry) -> None:
    def app(environ: Any, start_response: Any) -> list[bytes]:
        found = registry.sync.math.double(number=int(environ["QUERY_STRING"]))
        start_response("200 OK", [("content-type", "application/json")])
        return [json.dumps(found).encode()]

    class Quiet(WSGIRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

    with make_server("127.0.0.1", 0, app, handler_class=Quiet) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            with urlopen(f"http://127.0.0.1:{server.server_port}/?21") as answer:
                assert json.load(answer) == 42
        finally:
            server.shutdown()
            thread.join()


def test_forked_processes_have_loops_of_their_own(registry: OperationRegistry) -> None:
    code = """
import os
from operations import OperationRegistry
registry = OperationRegistry()
@registry.operation("math.double", type="query")
async def double(number: int) -> int:
    return 2 * number
assert registry.sync.math.double(number=1) == 2
child = os.fork()
found = registry.sync.math.double(number=2)
if child == 0:
    os._exit(0 if found == 4 else 1)
assert os.waitpid(child, 0)[1] == 0
print(found)
"""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True, text=True, timeout=scaled(60), check=True,
    )  # fmt: skip
    assert ran.stdout.strip() == "4"
