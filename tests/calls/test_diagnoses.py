"""The errors of calls name what is wrong: a full disk, large replies, a busy caller, a worker that blocks its loop."""

import asyncio
import resource
import time
from pathlib import Path

import pytest
from tests.calls.operations_under_test import build_registry
from tests.calls.processes import worker_process
from tests.calls.waiting import caller, started, until
from tests.calls.worlds import World, nats_world
from tests.limits import time_limit
from tests.servers import NatsServer, running

from operations.base.errors import CallError, ErrorCode
from operations.calls import PendingRequestMap, serve_calls
from operations.pubsub.nats import connect_nats


@pytest.mark.requirement("F33", "R36")
async def test_a_caller_that_is_blocked_does_not_declare_its_workers_lost(
    broker_world: World, tmp_path: Path
) -> None:
    path = tmp_path / "log"
    async with (
        worker_process(broker_world),
        caller(broker_world, heartbeat=0.2, silence=1) as calls,
    ):
        writing = asyncio.create_task(
            calls.call("slow.write", {"seconds": 4, "path": str(path)}, replayable=False)
        )
        await until(lambda: started(path))
        for _ in range(12):
            time.sleep(0.5)  # noqa: ASYNC251 - blocking the loop is the point
            await asyncio.sleep(0)
        with time_limit(30):
            assert (await writing).data == "written"

    assert len(started(path)) == 1


@pytest.mark.requirement("F33")
async def test_a_worker_can_ask_for_more_silence(broker_world: World, tmp_path: Path) -> None:
    path = tmp_path / "log"
    async with (
        worker_process(broker_world, options={"silence": 60}),
        caller(broker_world, heartbeat=0.5, silence=1) as calls,
    ):
        # The worker has reported.
        assert (await calls.call("math.add", {"a": 1, "b": 1})).data == 2
        await until(lambda: calls._workers._silences)
        with time_limit(60):
            value = {"seconds": 4, "path": str(path)}
            assert (await calls.call("slow.block_loop", value)).data == "blocked"

    assert len(started(path)) == 1


@pytest.mark.requirement("F9", "F14")
async def test_large_replies_wait_for_each_other() -> None:
    """Together they are larger than what a NATS server keeps for a client before it disconnects it."""
    config = "max_payload: 4MB\nmax_pending: 8MB"
    with running(NatsServer(config=config)) as broker:
        world = nats_world(broker.url)
        async with world.serve(build_registry()), caller(world) as calls:
            size = 2 * 1024 * 1024
            with time_limit(60):
                replies = await asyncio.gather(
                    *(calls.call("echo.bytes", {"size": size}, replayable=False) for _ in range(16))
                )

    assert [len(reply.data) for reply in replies] == [size] * 16


@pytest.mark.requirement("F40")
async def test_a_full_disk_of_jetstream_is_named() -> None:
    broker = NatsServer("-js")
    broker.options = ("-js", "-sd", broker.folder)
    with running(broker):
        async with (
            connect_nats(broker.url, queue="jetstream", connect_timeout=30) as there,
            serve_calls(build_registry(), there),
            connect_nats(broker.url, queue="jetstream", connect_timeout=30) as here,
            PendingRequestMap(here) as calls,
        ):
            assert (await calls.call("math.add", {"a": 1, "b": 1})).data == 2
            assert broker.process is not None
            # From now on, the server can write no file.
            resource.prlimit(broker.process.pid, resource.RLIMIT_FSIZE, (0, 0))
            with time_limit(30), pytest.raises(CallError) as caught:
                await calls.call("slow.write", {"seconds": 0, "path": "unused"}, timeout=5)

    assert caught.value.code == ErrorCode.UNAVAILABLE
    assert "disk of its servers" in caught.value.message
    assert not caught.value.retryable
