"""One connection to Redis, and its answers."""

import asyncio
import signal
import time

import pytest
from redis.asyncio import Redis
from tests.calls.waiting import until
from tests.limits import time_limit
from tests.receivers import SilentReceiver
from tests.servers import Broker, RedisServer, running

from operations.base.errors import TransportError
from operations.pubsub.base import Delivery
from operations.pubsub.config import RedisConfig
from operations.pubsub.redis import RedisTarget, connect_redis
from operations.pubsub.redis.connection import Connector, ask


@pytest.mark.requirement("R35", "F6")
async def test_f6_a_silent_connection_is_closed_and_counts_as_no_reply(
    redis_server: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("operations.pubsub.redis.connection._READ_TIMEOUT", 0.1)
    connection = await Connector(RedisConfig(redis_server.url)).connect()
    try:
        # A late reply would be read as the reply to the next command.
        with pytest.raises(TransportError, match=r"no response for 0\.1 seconds"):
            await ask(connection, "BLPOP", "nobody writes here", 1)
        assert not connection.is_connected
    finally:
        await connection.disconnect()


@pytest.mark.requirement("R35", "F6")
async def test_f6_a_server_that_stops_reading_is_detected_while_many_messages_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("operations.pubsub.redis.connection.KEEPALIVE", 0.1)
    monkeypatch.setattr("operations.pubsub.redis.connection.SILENCE", 0.5)
    with running(RedisServer()) as server:
        async with connect_redis(server.url, connect_timeout=5) as target:
            box, large = target.mailbox(), bytes(6 * 1024 * 1024)
            assert isinstance(target, RedisTarget)
            assert server.process is not None
            server.process.send_signal(signal.SIGSTOP)
            # More than the socket takes, and more than may wait for it.
            sending = [asyncio.create_task(target.send(box, large)) for _ in range(6)]
            with time_limit(30):
                await until(lambda: not target.link.up.is_set())
            server.process.send_signal(signal.SIGCONT)
            await asyncio.gather(*sending, return_exceptions=True)


@pytest.mark.requirement("R35", "F33")
async def test_f33_a_blocked_event_loop_is_not_a_silent_server(
    redis_server: Broker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("operations.pubsub.redis.connection.KEEPALIVE", 0.1)
    monkeypatch.setattr("operations.pubsub.redis.connection.SILENCE", 0.5)
    async with connect_redis(redis_server.url) as target:
        await target.listen([target.mailbox()], SilentReceiver())
        for _ in range(3):
            time.sleep(0.8)  # noqa: ASYNC251 - block the loop
            await asyncio.sleep(0.3)
    assert "the connection to Redis was lost" not in caplog.text


async def test_a_client_sends_and_is_restored_although_a_reader_stays_broken() -> None:
    class Noting(SilentReceiver):
        def __init__(self) -> None:
            self.lost_again, self.restored_again = asyncio.Event(), asyncio.Event()
            self.arrived = asyncio.Event()

        def receive(self, delivery: Delivery) -> None:
            self.arrived.set()

        def lost(self, reason: str) -> None:
            self.lost_again.set()

        def restored(self) -> None:
            self.restored_again.set()

    with running(RedisServer()) as server:
        async with connect_redis(server.url) as target, Redis.from_url(server.url) as admin:
            kept, denied, receiver = target.mailbox(), target.mailbox(), Noting()
            await target.listen([kept], receiver)
            broken = await target.listen([denied], SilentReceiver())
            # Its reader cannot reconnect, the others can.
            await admin.acl_setuser("default", enabled=True, reset_keys=True, keys=[kept])
            await admin.client_kill_filter(_type="normal", skipme=True)
            with time_limit(30):
                await receiver.lost_again.wait()
                assert isinstance(target, RedisTarget)
                connections = target.connections
                await until(lambda: [each.up.is_set() for each in connections].count(False) == 1)
                await target.send(kept, b"{}")
                await receiver.arrived.wait()
                await broken.aclose()
                await receiver.restored_again.wait()
            assert target.is_connected
