"""Events over Redis: requests through a stream and its consumer group, answers through a stream per caller."""

from operations.errors import MissingExtraError

try:
    import redis as _redis  # noqa: F401 - everything below needs it
except ModuleNotFoundError as error:
    raise MissingExtraError("operations.pubsub.redis", extra="redis") from error

from operations.pubsub.redis.interop import RedisInteropTarget, connect_redis_interop
from operations.pubsub.redis.target import RedisTarget, connect_redis

__all__ = ["RedisInteropTarget", "RedisTarget", "connect_redis", "connect_redis_interop"]
