"""The same brokers as the tests of calls use."""

from tests.calls.conftest import broker_world, nats_server, redis_server, world

__all__ = ["broker_world", "nats_server", "redis_server", "world"]
