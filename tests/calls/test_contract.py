"""The guarantees for callers, over every transport."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from tests.calls.waiting import until
from tests.calls.worlds import World, calling
from tests.limits import time_limit

from operations.base.errors import CallError, ErrorCode
from operations.calls import PendingRequestMap
from operations.contract.access import Identity
from operations.contract.context import OperationContext
from operations.contract.envelopes import HTTPResponseMeta, LocalResponseMeta, MCPResponseMeta
from operations.registry import OperationRegistry


async def test_a_call_returns_the_same_envelope_as_in_process(
    world: World, registry: OperationRegistry
) -> None:
    local = await registry.execute("math.add", {"a": 1, "b": 2})
    async with calling(world, registry) as calls:
        remote = await calls.call("math.add", {"a": 1, "b": 2})

    assert remote.data == local.data == 3
    assert isinstance(remote.meta, LocalResponseMeta)
    assert remote.meta.operation_id == "math.add"


@pytest.mark.parametrize(
    "value", [None, 0, "", [], {}, "ü𝄞", 2**63, -(2**70), 1.5, [None, {"a": [True]}]], ids=repr
)
async def test_json_values_survive_the_round_trip(
    world: World, registry: OperationRegistry, value: Any
) -> None:
    async with calling(world, registry) as calls:
        envelope = await calls.call("echo.any", {"value": value})

    assert envelope.data == value
    assert type(envelope.data) is type(value)


async def test_bytes_come_back_as_bytes(world: World, registry: OperationRegistry) -> None:
    async with calling(world, registry) as calls:
        envelope = await calls.call("echo.bytes", {"size": 1024})

    assert envelope.data == bytes(range(256)) * 4


async def test_envelopes_of_every_source_pass_unchanged(
    world: World, registry: OperationRegistry
) -> None:
    async with calling(world, registry) as calls:
        http = await calls.call("echo.http")
        mcp = await calls.call("echo.mcp")

    assert isinstance(http.meta, HTTPResponseMeta)
    assert http.meta.status_code == 201
    assert http.meta.headers == {"x-one": "1"}
    assert isinstance(mcp.meta, MCPResponseMeta)
    assert mcp.meta.is_error
    assert mcp.data == [{"type": "text", "text": "no"}]


async def test_a_megabyte_travels_both_ways(world: World, registry: OperationRegistry) -> None:
    text = "x" * 1_000_000
    async with calling(world, registry) as calls:
        envelope = await calls.call("echo.any", {"value": text})

    assert envelope.data == text


@pytest.mark.parametrize(
    ("operation_id", "input", "code"),
    [
        ("math.nope", {}, ErrorCode.OPERATION_NOT_FOUND),
        ("math.add", {"a": "x", "b": 1}, ErrorCode.VALIDATION_ERROR),
        ("math.add", {"a": 1, "b": 1, "c": 1}, ErrorCode.VALIDATION_ERROR),
        ("secret.read", {}, ErrorCode.ACCESS_DENIED),
        ("fail.domain", {}, "NO_FUNDS"),
        ("fail.unexpected", {}, ErrorCode.EXECUTION_ERROR),
        ("count.up", {"n": 1}, ErrorCode.VALIDATION_ERROR),
    ],
)
async def test_failures_have_the_codes_they_have_in_process(
    world: World, registry: OperationRegistry, operation_id: str, input: Any, code: str
) -> None:
    with pytest.raises(CallError) as here:
        await registry.execute(operation_id, input)
    async with calling(world, registry) as calls:
        with pytest.raises(CallError) as there:
            await calls.call(operation_id, input)

    assert there.value.code == here.value.code == code
    if code == "NO_FUNDS":
        assert there.value.details == {"missing": 3}


@pytest.mark.requirement("R17")
async def test_texts_of_unexpected_exceptions_are_not_sent_to_callers(
    world: World, registry: OperationRegistry
) -> None:
    async with calling(world, registry, expose_errors=False) as calls:
        with pytest.raises(CallError) as caught:
            await calls.call("fail.unexpected")

    assert "hunter2" not in str(caught.value)


async def test_a_thousand_callers_at_once_get_their_own_answers(
    world: World, registry: OperationRegistry
) -> None:
    async with calling(world, registry) as calls:
        answers = await asyncio.gather(
            *(calls.call("math.add", {"a": index, "b": 1}) for index in range(1000))
        )

    assert [answer.data for answer in answers] == [index + 1 for index in range(1000)]


async def test_a_stream_of_ten_thousand_items_arrives_whole_and_in_order(
    world: World, registry: OperationRegistry
) -> None:
    async with calling(world, registry) as calls:
        items = [envelope.data async for envelope in calls.subscribe("count.up", {"n": 10_000})]

    assert items == list(range(10_000))


async def test_a_stream_of_large_items_stays_within_its_bounds(
    world: World, registry: OperationRegistry
) -> None:
    async with calling(world, registry) as calls:
        stream = calls.subscribe("count.up", {"n": 40, "size": 500_000})
        indexes = [envelope.data["index"] async for envelope in stream]

    assert indexes == list(range(40))


async def test_an_error_in_a_stream_comes_after_its_items(
    world: World, registry: OperationRegistry
) -> None:
    async with calling(world, registry) as calls:
        stream = calls.subscribe("count.broken", {"n": 3})
        items = [(await anext(stream)).data for _ in range(3)]
        with pytest.raises(CallError) as caught:
            await anext(stream)

    assert items == [0, 1, 2]
    assert caught.value.code == "BROKEN"


async def test_subscribing_to_a_query_is_rejected(
    world: World, registry: OperationRegistry
) -> None:
    async with calling(world, registry) as calls:
        with pytest.raises(CallError) as caught:
            async for _ in calls.subscribe("math.add", {"a": 1, "b": 1}):
                pass

    assert caught.value.code == ErrorCode.VALIDATION_ERROR


@pytest.mark.requirement("R31")
async def test_cancelling_a_call_cancels_its_handler_and_nested_calls(
    world: World, registry: OperationRegistry, tmp_path: Path
) -> None:
    path = tmp_path / "log"
    async with calling(world, registry) as calls:
        task = asyncio.create_task(calls.call("nest.outer", {"path": str(path)}))
        await until(path.exists)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: "cancelled" in path.read_text())


async def test_aborting_by_id_ends_the_call_with_aborted(
    world: World, registry: OperationRegistry
) -> None:
    async with calling(world, registry) as calls:
        task = asyncio.create_task(calls.call("slow.sleep", {"seconds": 60}))
        await until(lambda: len(calls) == 1)
        calls.abort(next(iter(calls.pending)))
        with pytest.raises(CallError) as caught:
            await task

    assert caught.value.code == ErrorCode.ABORTED


async def test_closing_the_map_ends_everything_that_waits(
    world: World, registry: OperationRegistry
) -> None:
    async with world.serve(registry), world.connect() as target:
        calls = PendingRequestMap(target)
        tasks = [asyncio.create_task(calls.call("slow.sleep", {"seconds": 60})) for _ in range(10)]
        await until(lambda: len(calls) == 10)
        await calls.aclose()
        results = await asyncio.gather(*tasks, return_exceptions=True)

    assert {result.code for result in results if isinstance(result, CallError)} == {"ABORTED"}
    assert len(results) == 10


async def test_a_call_times_out_at_its_deadline(world: World, registry: OperationRegistry) -> None:
    loop = asyncio.get_running_loop()
    async with calling(world, registry) as calls:
        started = loop.time()
        with time_limit(20), pytest.raises(CallError) as caught:
            await calls.call("slow.sleep", {"seconds": 3600}, timeout=1)
        elapsed = loop.time() - started

    assert caught.value.code == ErrorCode.TIMEOUT
    # Either the caller or the worker notices first; the worker has slightly less time.
    assert re.fullmatch(
        r"slow\.sleep did not (answer|finish) within (1|0\.\d+) s", caught.value.message
    )
    assert elapsed > 0.5


@pytest.mark.requirement("R30")
async def test_the_remaining_time_and_the_parent_travel_along(
    world: World, registry: OperationRegistry
) -> None:
    context = OperationContext(metadata={"trace": "t1"}, deadline=2e12)
    async with calling(world, registry) as calls:
        envelope = await calls.call("echo.whoami", {}, context, timeout=20)

    assert envelope.data["parent"] == context.request_id
    assert envelope.data["metadata"] == {"trace": "t1"}
    assert envelope.data["deadline"] < 2e12


async def test_a_stream_without_items_ends_at_its_idle_timeout(
    world: World, registry: OperationRegistry
) -> None:
    async with calling(world, registry) as calls:
        stream = calls.subscribe("count.forever", {"pause": 60}, idle_timeout=1.5)
        assert (await anext(stream)).data == 0
        with pytest.raises(CallError) as caught:
            await anext(stream)

    assert caught.value.code == ErrorCode.TIMEOUT


@pytest.mark.requirement("R09", "R07", "F19")
async def test_f19_the_identity_in_an_event_counts_on_trusted_targets_only(
    world: World, registry: OperationRegistry
) -> None:
    admin = Identity("admin", ["secret:read"])
    async with (
        world.serve(registry),
        world.connect() as target,
        # Workers ignore it even if a caller sends it.
        PendingRequestMap(target, send_identity=True) as calls,
    ):
        if world.name == "memory":
            assert (await calls.call("secret.read", {}, identity=admin)).data == "42"
            return
        with pytest.raises(CallError) as caught:
            await calls.call("secret.read", {}, identity=admin)

    assert caught.value.code == ErrorCode.ACCESS_DENIED


@pytest.mark.requirement("R09", "R08")
async def test_a_credential_is_verified_by_the_worker(
    world: World, registry: OperationRegistry
) -> None:
    async def resolve(token: str) -> Identity | None:
        if token == "broken":
            raise RuntimeError("the directory is down")
        return Identity("alice", ["secret:read"]) if token == "good" else None

    async with calling(world, registry, resolve=resolve) as calls:
        assert (await calls.call("secret.read", {}, credential="good")).data == "42"
        for token in ("bad", "broken"):
            with pytest.raises(CallError) as caught:
                await calls.call("secret.read", {}, credential=token)
            assert caught.value.code == ErrorCode.ACCESS_DENIED


@pytest.mark.requirement("R08")
async def test_a_credential_that_cannot_be_checked_now_is_reported_at_once(
    world: World, registry: OperationRegistry
) -> None:
    async def resolve(token: str) -> Identity | None:
        raise ConnectionError("the directory is down")

    async with calling(world, registry, resolve=resolve) as calls:
        for operation in ("secret.read", "echo.any"):
            # Sooner than a call without a worker is given up.
            with time_limit(5), pytest.raises(CallError) as caught:
                await calls.call(operation, {}, credential="good")
            error = caught.value
            assert (error.code, error.retryable) == (ErrorCode.UNAVAILABLE, True)
            assert "could not be checked" in error.message


@pytest.mark.requirement("R07")
async def test_a_caller_sees_only_operations_that_it_may_call(
    world: World, registry: OperationRegistry
) -> None:
    def resolve(token: str) -> Identity:
        return Identity(token, ["secret:read"])

    async with calling(world, registry, resolve=resolve) as calls:
        everyone = await calls.call("services.list")
        insider = await calls.call("services.list", credential="alice")
        with pytest.raises(CallError) as caught:
            await calls.call("services.schema", {"operationId": "secret.read"})
        schema = await calls.call("services.schema", {"operationId": "math.add"})

    names = {f"{spec['namespace']}.{spec['name']}" for spec in everyone.data}
    assert "secret.read" not in names
    assert "math.add" in names
    assert len(insider.data) == len(everyone.data) + 1
    assert caught.value.code == ErrorCode.OPERATION_NOT_FOUND
    assert schema.data["type"] == "query"
