"""F18 where permissions do not help: messages that are signed, and those that are not."""

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.calls.operations_under_test import build_registry
from tests.calls.waiting import caller, started, until
from tests.calls.worlds import BrokerWorld, World

from operations.calls import CallServer, PendingRequestMap, serve_calls
from operations.calls.events import encode_response
from operations.envelopes import local_envelope
from operations.errors import CallError, ErrorCode
from operations.pubsub.base import BoundedSet
from operations.pubsub.signing import MAX_AGE, SignedTarget, Signer

SECRET = "correct horse battery staple"

pytestmark = pytest.mark.requirement("R41", "F18")


def request(number: int, path: str, reply_to: str) -> bytes:
    """A request as a stranger would write it."""
    payload = {
        "requestId": f"forged{number}",
        "operationId": "slow.write",
        "input": {"seconds": 0, "path": path},
        "replyTo": reply_to,
    }
    return msgspec.json.encode({"type": "call.requested", "id": "", "payload": payload})


async def test_f18_signed_calls_and_subscriptions_work_as_any_others(
    broker_world: World, tmp_path: Path
) -> None:
    path = tmp_path / "log"
    async with (
        broker_world.serve(build_registry(), target={"secret": SECRET}),
        broker_world.connect(secret=SECRET) as target,
        PendingRequestMap(target) as calls,
    ):
        assert (await calls.call("math.add", {"a": 1, "b": 2})).data == 3
        items = [item.data async for item in calls.subscribe("count.up", {"n": 2000})]
        assert items == list(range(2000))
        task = asyncio.create_task(
            calls.call("slow.sleep", {"seconds": 60, "path": str(path)}, timeout=60)
        )
        await until(lambda: started(path))
        # Long enough for a heartbeat.
        await asyncio.sleep(1.6)
        task.cancel()
        await until(lambda: "cancelled" in path.read_text(encoding="utf-8"))
        with pytest.raises(CallError) as large:
            await calls.call("echo.any", {"value": "x" * target.max_bytes})

    assert large.value.code == ErrorCode.RESOURCE_EXHAUSTED
    assert isinstance(target, SignedTarget)
    assert target.forged == 0


@pytest.mark.parametrize(
    ("worker", "asker"), [(SECRET, None), (None, SECRET), (SECRET, SECRET * 2)]
)
async def test_secrets_that_differ_are_told_where_messages_are_dropped(
    broker_world: World,
    worker: str | None,
    asker: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with (
        broker_world.serve(build_registry(), target={"secret": worker}),
        broker_world.connect(secret=asker) as target,
        PendingRequestMap(target) as calls,
    ):
        for _ in range(2):
            with pytest.raises(CallError) as caught:
                await calls.call("math.add", {"a": 1, "b": 2}, timeout=0.3)
            assert caught.value.code == ErrorCode.TIMEOUT

    (told,) = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert "secret=" in told.message


async def test_f18_forged_answers_are_dropped_and_counted(
    broker_world: World, tmp_path: Path
) -> None:
    path = tmp_path / "log"
    async with (
        broker_world.serve(build_registry(), target={"secret": SECRET}),
        broker_world.connect(secret=SECRET) as target,
        PendingRequestMap(target) as calls,
        broker_world.connect() as stranger,
        broker_world.connect(secret="another secret altogether") as other,
    ):
        call = asyncio.create_task(
            calls.call("slow.sleep", {"seconds": 0.5, "path": str(path)}, timeout=10)
        )
        await until(lambda: started(path))
        (request_id,) = calls.pending
        forged = encode_response(request_id, local_envelope("forged", "slow.sleep"))
        for forger in (stranger, other):
            await forger.send(calls.mailbox, forged)
        await until(lambda: isinstance(target, SignedTarget) and target.forged == 2)
        assert (await call).data == "slept"


async def test_f18_forged_and_repeated_requests_are_not_run(
    broker_world: BrokerWorld, tmp_path: Path
) -> None:
    path = tmp_path / "log"
    overheard: list[bytes] = []
    async with broker_world.connect(secret=SECRET) as target:
        assert isinstance(target, SignedTarget)
        async with (
            serve_calls(build_registry(), target) as worker,
            broker_world.connect(secret=SECRET) as near,
            PendingRequestMap(near) as calls,
            broker_world.connect() as stranger,
        ):
            assert isinstance(worker, CallServer)
            assert isinstance(near, SignedTarget)
            original = near.signer.sign

            def overhear(body: bytes, queue: str) -> bytes:
                text = original(body, queue)
                if queue:
                    overheard.append(text)
                return text

            near.signer.sign = overhear  # type: ignore[method-assign]
            await calls.call("slow.write", {"seconds": 0, "path": str(path)})
            assert len(started(path)) == 1
            box = stranger.mailbox()
            await stranger.enqueue(
                "operations", request(1, str(path), box), key="k1", reply_to=box, wait=1
            )
            await stranger.enqueue("operations", overheard[0], key="k2", reply_to=box, wait=1)
            await until(lambda: target.forged == 2)
            assert (await calls.call("math.add", {"a": 1, "b": 2})).data == 3

    assert len(started(path)) == 1


async def test_without_the_secret_nobody_answers(broker_world: World) -> None:
    async with (
        broker_world.serve(build_registry(), target={"secret": SECRET}),
        caller(broker_world, timeout=1.0) as calls,
    ):
        with pytest.raises(CallError) as caught:
            await calls.call("math.add", {"a": 1, "b": 2})

    assert caught.value.code in (ErrorCode.TIMEOUT, ErrorCode.UNAVAILABLE)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text.replace(b'"a":1', b'"a":2'),
        lambda text: text[:-3] + (b'1"}' if text.endswith(b'0"}') else b'0"}'),
        lambda text: b'{"a":1}',
        lambda text: b"",
        lambda text: text[:-1],
        lambda text: text + b" ",
        lambda text: text[-60:],
    ],
)
def test_whatever_is_changed_the_seal_is_broken(spoil: Any) -> None:
    signer = Signer(SECRET)
    text = signer.sign(b'{"a":1}', "q")

    assert msgspec.json.decode(text)["a"] == 1
    assert signer.verify(spoil(text), "q", BoundedSet(9)) is None
    assert signer.verify(text, "q", BoundedSet(9)) == b'{"a":1}'


def test_a_seal_is_for_one_queue_for_once_and_for_now(monkeypatch: pytest.MonkeyPatch) -> None:
    signer, seen = Signer(SECRET), BoundedSet(9)
    text = signer.sign(b'{"a":1}', "q")

    assert signer.verify(text, "other", seen) is None
    assert signer.verify(text, "q", seen) is not None
    assert signer.verify(text, "q", seen) is None
    for skew in (600, -600):
        monkeypatch.setattr("operations.pubsub.signing.time", lambda at=skew: time.time() + at)
        assert signer.verify(text, "q", BoundedSet(9)) is not None
    monkeypatch.setattr("operations.pubsub.signing.time", lambda: time.time() + MAX_AGE + 5)
    assert signer.verify(text, "q", BoundedSet(9)) is None


def test_a_secret_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        Signer("short")
