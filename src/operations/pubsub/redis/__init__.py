"""Events over Redis: requests through a stream and its consumer group, answers through a stream per caller."""

from importlib.util import find_spec

from operations.errors import MissingExtraError

if find_spec("redis") is None:
    raise MissingExtraError("operations.pubsub.redis", extra="redis")

from operations.pubsub.config import RedisConfig
from operations.pubsub.redis.channels import RedisInteropTarget, connect_redis_interop
from operations.pubsub.redis.target import RedisTarget, connect_redis

__all__ = [
    "RedisConfig",
    "RedisInteropTarget",
    "RedisTarget",
    "connect_redis",
    "connect_redis_interop",
]
