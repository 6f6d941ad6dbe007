"""F18 without permissions: signed and unsigned messages."""

import asyncio
import json
import logging
import re
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.calls.operations_under_test import build_registry
from tests.calls.processes import worker_process
from tests.calls.waiting import caller, started, until
from tests.calls.worlds import BrokerWorld, World

from operations.base.errors import CallError, ErrorCode
from operations.calls import CallServer, PendingRequestMap, serve_calls
from operations.calls.protocol.events import (
    AbortPayload,
    CallAborted,
    encode_event,
    encode_response,
)
from operations.contract.envelopes import local_envelope
from operations.pubsub import signing
from operations.pubsub.base import EventTarget
from operations.pubsub.delivery import Recent
from operations.pubsub.memory import MemoryTarget
from operations.pubsub.signing import MAX_AGE, WINDOW, Senders, SignedTarget, Signer, signed

SECRET = "correct horse battery staple"

pytestmark = pytest.mark.requirement("R41", "F18")


PROTOCOL = Path(__file__).resolve().parents[2] / "docs" / "protocol"
VECTORS: list[Any] = json.loads((PROTOCOL / "signatures.json").read_text(encoding="utf-8"))["cases"]


@pytest.mark.requirement("R50")
@pytest.mark.parametrize("case", VECTORS, ids=lambda case: case["name"])
def test_r50_texts_are_signed_and_verified_as_the_vectors_require(
    case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signing, "time", lambda: case["time"] / 1000)
    monkeypatch.setattr(signing, "token_hex", lambda _: case["epoch"])
    signer, senders = Signer(case["secret"]), Senders()
    for _ in range(case["number"]):
        text = signer.sign(case["event"].encode(), case["address"]).decode()

    assert (text == case["text"]) is case["valid"]
    opened = signer.verify(case["text"].encode(), case["address"], senders)
    assert opened == (case["event"].encode() if case["valid"] else None)
    assert signer.verify(case["text"].encode(), case["address"], senders) is None


def request(number: int, path: str, reply_to: str) -> bytes:
    """A request as an attacker would write it."""
    payload = {
        "requestId": f"forged{number}",
        "operationId": "slow.write",
        "input": {"seconds": 0, "path": path},
        "replyTo": reply_to,
    }
    return msgspec.json.encode({"type": "call.requested", "id": "", "payload": payload})


def requests_of(target: EventTarget) -> list[tuple[str, bytes]]:
    """Return a list to which every request that `target` signs is added, as an attacker could read it."""
    assert isinstance(target, SignedTarget)
    sign, requests = target.signer.sign, list[tuple[str, bytes]]()

    def overhear(body: bytes, address: str) -> bytes:
        text = sign(body, address)
        if b'"call.requested"' in body:
            requests.append((address, text))
        return text

    target.signer.sign = overhear  # type: ignore[method-assign]
    return requests


async def repeat(stranger: EventTarget, address: str, text: bytes, key: str) -> None:
    """Send a request again, to its queue or to the worker that it was sent to."""
    if address.startswith("queue "):
        await stranger.enqueue("operations", text, key=key, reply_to="", wait=1)
    else:
        await stranger.send(address, text)


async def test_f18_signed_calls_and_subscriptions_work(broker_world: World, tmp_path: Path) -> None:
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


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("worker", "asker"), [(SECRET, None), (None, SECRET), (SECRET, SECRET * 2)]
)
async def test_messages_dropped_because_of_different_secrets_are_logged(
    broker_world: World,
    worker: str | None,
    asker: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with (
        broker_world.serve(build_registry(), target={"secret": worker}),
        broker_world.connect(secret=asker) as target,
        PendingRequestMap(target, heartbeat=0.1) as calls,
    ):
        for _ in range(2):
            with pytest.raises(CallError) as caught:
                await calls.call("math.add", {"a": 1, "b": 2}, timeout=0.3)
            assert caught.value.code == ErrorCode.TIMEOUT
            assert "secret=" in str(caught.value)
        await until(lambda: warnings_of(caplog))

    (told,) = warnings_of(caplog)
    assert "secret=" in told.message


async def test_f18_forged_replies_are_dropped_and_counted(
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
            calls.call("slow.sleep", {"seconds": 0.5, "path": str(path)}, timeout=60)
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
    async with broker_world.connect(secret=SECRET) as target:
        assert isinstance(target, SignedTarget)
        async with (
            serve_calls(build_registry(), target) as worker,
            broker_world.connect(secret=SECRET) as near,
            PendingRequestMap(near) as calls,
            broker_world.connect() as stranger,
        ):
            assert isinstance(worker, CallServer)
            overheard = requests_of(near)
            await calls.call("slow.write", {"seconds": 0, "path": str(path)})
            assert len(started(path)) == 1
            box = stranger.mailbox()
            await stranger.enqueue(
                "operations", request(1, str(path), box), key="k1", reply_to=box, wait=1
            )
            await repeat(stranger, *overheard[0], key="k2")
            await until(lambda: target.forged == 2)
            assert (await calls.call("math.add", {"a": 1, "b": 2})).data == 3

    assert len(started(path)) == 1


async def test_without_the_secret_there_is_no_reply(broker_world: World) -> None:
    async with (
        broker_world.serve(build_registry(), target={"secret": SECRET}),
        caller(broker_world, timeout=1.0) as calls,
    ):
        with pytest.raises(CallError) as caught:
            await calls.call("math.add", {"a": 1, "b": 2})

    assert caught.value.code in (ErrorCode.TIMEOUT, ErrorCode.UNAVAILABLE)


@pytest.mark.requirement("R34")
async def test_a_mutation_does_not_run_again_after_many_other_messages(tmp_path: Path) -> None:
    path = tmp_path / "log"
    bare = MemoryTarget()
    worker_side, near = signed(bare, SECRET), signed(bare, SECRET)
    overheard = requests_of(near)
    async with (
        serve_calls(build_registry(), worker_side) as worker,
        PendingRequestMap(near) as calls,
    ):
        await calls.call("slow.write", {"seconds": 0, "path": str(path)})
        for number in range(10_000):
            body = b'{"type":"other","id":"%d","payload":{}}' % number
            await near.enqueue("operations", body, key=f"k{number}", reply_to="", wait=1)
        assert worker.ignored == 10_000
        # The number of ids that the worker itself stores is bounded as well.
        worker._replies.recent = Recent()
        await repeat(bare, *overheard[0], key="again")
        assert (await calls.call("math.add", {"a": 1, "b": 2})).data == 3

    assert len(started(path)) == 1
    assert isinstance(worker_side, SignedTarget)
    assert worker_side.forged == 1


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text.replace(b'"a":1', b'"a":2'),
        lambda text: text[:-3] + (b'1"}' if text.endswith(b'0"}') else b'0"}'),
        lambda text: re.sub(rb"\.(\d{15})\.", b".000000000000009.", text),
        lambda text: re.sub(rb'"signed":"\w{16}', b'"signed":"0123456789abcdef', text),
        lambda text: b'{"a":1}',
        lambda text: b"",
        lambda text: text[:-1],
        lambda text: text + b" ",
        lambda text: text[-60:],
    ],
)
def test_a_text_that_was_changed_is_rejected(spoil: Any) -> None:
    signer = Signer(SECRET)
    text = signer.sign(b'{"a":1}', "q")

    assert msgspec.json.decode(text)["a"] == 1
    assert signer.verify(spoil(text), "q", Senders()) is None
    assert signer.verify(text, "q", Senders()) == b'{"a":1}'


def test_a_signature_is_for_one_address_for_once_and_for_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    signer, senders = Signer(SECRET), Senders()
    text = signer.sign(b'{"a":1}', "q")

    assert signer.verify(text, "other", senders) is None
    assert signer.verify(text, "q", senders) is not None
    assert signer.verify(text, "q", senders) is None
    for skew in (600, -600):
        monkeypatch.setattr("operations.pubsub.signing.time", lambda at=skew: time.time() + at)
        assert signer.verify(text, "q", Senders()) is not None
    monkeypatch.setattr("operations.pubsub.signing.time", lambda: time.time() + MAX_AGE + 5)
    assert signer.verify(text, "q", Senders()) is None


@pytest.mark.parametrize("skew", [3600, -3600])
async def test_callers_whose_clock_is_wrong_by_an_hour_learn_the_reason(
    broker_world: World, skew: int
) -> None:
    async with (
        worker_process(broker_world, skew=skew, target={"secret": SECRET}),
        broker_world.connect(secret=SECRET) as target,
        PendingRequestMap(target, heartbeat=0.1) as calls,
    ):
        with pytest.raises(CallError, match="clocks that differ by less than 15 minutes"):
            await calls.call("math.add", {"a": 1, "b": 2}, timeout=0.5)


def test_messages_may_overtake_others_within_a_window() -> None:
    signer, senders = Signer(SECRET), Senders()
    early, late, *texts = [signer.sign(b"{}", "q") for _ in range(2 * WINDOW + 2)]

    assert all(signer.verify(text, "q", senders) for text in texts[:WINDOW])
    assert signer.verify(late, "q", senders)
    assert signer.verify(late, "q", senders) is None
    assert all(signer.verify(text, "q", senders) for text in texts[WINDOW:])
    # Older than all stored numbers, so it may have been received before.
    assert signer.verify(early, "q", senders) is None
    # Another sender has separate numbers.
    assert Signer(SECRET).verify(Signer(SECRET).sign(b"{}", "q"), "q", senders) is not None


def test_senders_are_forgotten_when_their_messages_are_too_old(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    senders = Senders()
    now = time.time()
    for number in range(1500):
        assert senders.add(b"old%d" % number, 1, now - MAX_AGE - 1)
    assert len(senders) < 1100
    for number in range(1500):
        assert senders.add(b"new%d" % number, 1, now)
    assert len(senders) >= 1500
    assert not senders.add(b"new0", 1, now)


@pytest.mark.parametrize("kind", ["aborted", "responded"])
async def test_a_signed_message_cannot_be_sent_to_another_address(
    broker_world: BrokerWorld, tmp_path: Path, kind: str
) -> None:
    """An attacker who reads all messages sends a caller its own abort, or the reply to another of its calls."""
    path = tmp_path / "log"
    async with (
        broker_world.serve(build_registry(), target={"secret": SECRET}),
        broker_world.connect(secret=SECRET) as target,
        PendingRequestMap(target) as calls,
        PendingRequestMap(target) as others,
        broker_world.connect() as stranger,
    ):
        assert isinstance(target, SignedTarget)
        call = asyncio.create_task(
            calls.call("slow.sleep", {"seconds": 0.4, "path": str(path)}, timeout=60)
        )
        await until(lambda: started(path))
        (request_id,) = calls.pending
        body = encode_response(request_id, local_envelope("forged", "slow.sleep"))
        elsewhere = others.mailbox
        if kind == "aborted":
            body = encode_event(CallAborted(payload=AbortPayload(request_id=request_id)))
            elsewhere = target.control("operations")
        await stranger.send(calls.mailbox, target.signer.sign(body, elsewhere))
        await until(lambda: target.forged == 1)
        assert (await call).data == "slept"


@pytest.mark.parametrize("workers", [1, 2])
async def test_f18_a_mutation_that_is_sent_again_at_once_runs_once(
    broker_world: BrokerWorld, tmp_path: Path, workers: int
) -> None:
    """The copy reaches another worker, or one that has started since, which cannot know the number."""
    path = tmp_path / "log"
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        for _ in range(workers):
            await enter(broker_world.serve(build_registry(), target={"secret": SECRET}))
        target = await enter(broker_world.connect(secret=SECRET))
        stranger = await enter(broker_world.connect())
        calls = await enter(PendingRequestMap(target))
        overheard = requests_of(target)
        call = asyncio.create_task(
            calls.call("slow.write", {"seconds": 0.3, "path": str(path)}, timeout=60)
        )
        await until(lambda: overheard)
        for number in range(8):
            await repeat(stranger, *overheard[0], key=f"again{number}")
        assert (await call).data == "written"
        async with broker_world.serve(build_registry(), target={"secret": SECRET}):
            for number in range(8, 16):
                await repeat(stranger, *overheard[0], key=f"again{number}")
            assert (await calls.call("math.add", {"a": 1, "b": 2})).data == 3
            await asyncio.sleep(0.1)

    assert len(started(path)) == 1


def test_an_invalid_secret_is_rejected() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        Signer("short")
