"""Another implementation, in another language, against ours: the interoperable mode in both roles."""

import asyncio
import json
import shutil
import subprocess
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.calls.operations_under_test import build_registry
from tests.limits import scaled, time_limit
from tests.servers import RedisServer, installer_environment, running

from operations.base.errors import CallError, ErrorCode
from operations.calls import PendingRequestMap, serve_calls
from operations.pubsub.redis import connect_redis_interop
from operations.pubsub.websocket import AcceptedTarget, serve_websocket

HERE = Path(__file__).parent

pytestmark = [pytest.mark.slow, pytest.mark.requirement("R50")]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of the peer, with its packages beside it."""
    npm = shutil.which("npm")
    if shutil.which("node") is None or npm is None:
        pytest.skip("Node is not installed")
    folder = tmp_path_factory.mktemp("node")
    for name in ("package.json", "peer.mjs"):
        shutil.copy(HERE / name, folder)
    installed = subprocess.run(
        [npm, "install", "--silent", "--no-audit", "--no-fund"],
        cwd=folder,
        env=installer_environment(),
        capture_output=True,
        timeout=scaled(100),
        check=False,
    )
    if installed.returncode != 0:
        pytest.skip("npm cannot install ws and ioredis here")
    return str(folder / "peer.mjs")


async def run_caller(*arguments: str) -> Any:
    process = await asyncio.create_subprocess_exec("node", *arguments, stdout=subprocess.PIPE)
    with time_limit(60):
        output, _ = await process.communicate()
    return json.loads(output)


@asynccontextmanager
async def running_worker(*arguments: str) -> AsyncGenerator[None]:
    process = await asyncio.create_subprocess_exec("node", *arguments, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        with time_limit(60):
            assert await process.stdout.readline() == b"ready\n"
        yield
    finally:
        process.kill()
        await process.wait()


def check_what_node_received(seen: Any) -> None:
    assert seen["sum"]["data"] == 3
    assert seen["sum"]["meta"]["operationId"] == "math.add"
    assert seen["failure"]["code"] == "NO_FUNDS"
    assert seen["failure"]["details"] == {"missing": 3}
    assert seen["missing"] == ErrorCode.OPERATION_NOT_FOUND
    assert seen["items"] == [0, 1, 2]
    assert seen["end"] == "call.completed"


async def check_what_node_serves(calls: PendingRequestMap) -> None:
    with time_limit(30):
        assert (await calls.call("node.double", {"value": 21})).data == 42
        items = [item.data async for item in calls.subscribe("node.count", {"n": 3})]
        assert items == [0, 1, 2]
        with pytest.raises(CallError) as caught:
            await calls.call("node.nope")
        assert caught.value.code == ErrorCode.OPERATION_NOT_FOUND


async def test_node_calls_us_over_redis(node: str) -> None:
    with running(RedisServer()) as broker:
        async with (
            connect_redis_interop(broker.url, prefix="app:") as target,
            serve_calls(build_registry(), target),
        ):
            seen = await run_caller(node, "redis", "caller", broker.url, "app:")

    check_what_node_received(seen)


async def test_we_call_node_over_redis(node: str) -> None:
    with running(RedisServer()) as broker:
        async with (
            running_worker(node, "redis", "worker", broker.url, "app:"),
            connect_redis_interop(broker.url, prefix="app:") as target,
            PendingRequestMap(target) as calls,
        ):
            await check_what_node_serves(calls)


async def test_node_calls_us_over_a_websocket(node: str) -> None:
    async def attach(target: AcceptedTarget) -> None:
        async with serve_calls(build_registry(), target):
            await target.wait_closed()

    async with serve_websocket(attach, interop=True) as server:
        port = server.sockets[0].getsockname()[1]
        seen = await run_caller(node, "websocket", "caller", f"ws://127.0.0.1:{port}")

    check_what_node_received(seen)


async def test_we_call_node_over_a_websocket_that_it_opened(node: str) -> None:
    checked = asyncio.Event()

    async def attach(target: AcceptedTarget) -> None:
        async with PendingRequestMap(target) as calls:
            await target.wants("call.requested:")
            await check_what_node_serves(calls)
        checked.set()

    async with serve_websocket(attach, interop=True) as server:
        port = server.sockets[0].getsockname()[1]
        async with running_worker(node, "websocket", "worker", f"ws://127.0.0.1:{port}"):
            with time_limit(30):
                await checked.wait()
