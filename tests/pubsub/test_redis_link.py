"""One connection to Redis, and its answers."""

import pytest
from tests.servers import Broker

from operations.errors import TransportError
from operations.pubsub.config import RedisConfig
from operations.pubsub.redis.connection import Connector, ask


@pytest.mark.requirement("R35", "F6")
async def test_f6_silence_breaks_a_connection_and_is_no_answer(
    redis_server: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("operations.pubsub.redis.connection._READ_TIMEOUT", 0.1)
    connection = await Connector(RedisConfig(redis_server.url)).connect()
    try:
        # A late answer would be taken for that to the next command.
        with pytest.raises(TransportError, match=r"no answer for 0\.1 seconds"):
            await ask(connection, "BLPOP", "nobody writes here", 1)
        assert not connection.is_connected
    finally:
        await connection.disconnect()
