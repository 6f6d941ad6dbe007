"""R13: malformed events over every transport, to workers and callers; `scripts/fuzz` runs the same for longer."""

import os
import random
import time

import pytest
from tests.calls.worlds import World, calling

from operations.base.errors import TransportError
from operations.registry import OperationRegistry

SECONDS = float(os.environ.get("OPERATIONS_FUZZ_SECONDS", "2.5"))

EVENTS = tuple(
    f'{{"type":"{kind}","id":"","payload":{payload}}}'.encode()
    for kind, payload in (
        (
            "call.requested",
            (
                '{"requestId":"r","operationId":"count.up","input":{"n":3},"timeoutMs":50,"credit":2,"replyTo":"BOX",'
                '"identity":{"id":"a","scopes":["x"]},"metadata":{"a":1}}'
            ),
        ),
        ("call.requested", '{"requestId":"r","operationId":"math.add","input":{"a":1,"b":2}}'),
        (
            "call.responded",
            (
                '{"requestId":"r","output":{"data":1,"meta":{"source":"local","operationId":"a.b","timestamp":1}},'
                '"sequence":0,"replyTo":"BOX"}'
            ),
        ),
        ("call.completed", '{"requestId":"r","sequence":3}'),
        ("call.error", '{"requestId":"r","code":"X","message":"m","retryable":true}'),
        ("call.aborted", '{"requestId":"r"}'),
        ("call.credit", '{"requestId":"r","credit":9}'),
        ("call.probed", '{"requestIds":["r"],"replyTo":"BOX"}'),
        ("call.alive", '{"worker":"w","requestIds":["r"],"leaving":false}'),
        ("__subscribe", '{"topic":"call.requested:"}'),
    )
)
PIECES = (
    *(b"{", b"}", b"[", b"]", b'"', b",", b":", b"null", b"true", b"-1", b"1e400", b"9" * 400),
    *(b"\\ud800", b"\\u0000", b"\xff", b"\x00", b'"replyTo":7', b'"requestId":""', b"[" * 5000),
)


def spoiled(rng: random.Random, box: str) -> bytes:
    """An event with a few random errors."""
    body = bytearray(rng.choice(EVENTS).replace(b"BOX", box.encode()))
    for _ in range(rng.randrange(1, 5)):
        at = rng.randrange(len(body) + 1)
        kind = rng.randrange(4)
        if kind == 0:
            body[at:at] = rng.choice(PIECES)
        elif kind == 1:
            del body[at : at + rng.randrange(1, 20)]
        elif kind == 2 and at < len(body):
            body[at] = rng.randrange(256)
        else:
            other = rng.choice(EVENTS)
            body[at : at + rng.randrange(20)] = other[: rng.randrange(len(other))]
    return bytes(body)


@pytest.mark.slow
@pytest.mark.no_cover
@pytest.mark.requirement("R13")
@pytest.mark.timeout(SECONDS + 240)
async def test_r13_malformed_events_stop_no_client_on_any_transport(
    world: World, registry: OperationRegistry
) -> None:
    rng = random.Random(os.environ.get("OPERATIONS_FUZZ_SEED", "1"))
    ends = time.monotonic() + SECONDS
    number = 0
    async with calling(world, registry) as calls:
        target = calls.target
        addresses = (
            calls.mailbox,
            target.control("operations"),
            target.topic("operations.callers"),
        )
        while time.monotonic() < ends or number <= 100:
            for _ in range(20):
                number += 1
                body = spoiled(rng, calls.mailbox)
                try:
                    await target.enqueue(
                        "operations", body, key=f"k{number}", reply_to=calls.mailbox, wait=1
                    )
                    await target.send(rng.choice(addresses), body)
                except TransportError:
                    # Some transports check messages and reject these.
                    continue
            answer = await calls.call("math.add", {"a": number, "b": 2}, timeout=60)
            assert answer.data == number + 2
        assert calls.target.is_connected
