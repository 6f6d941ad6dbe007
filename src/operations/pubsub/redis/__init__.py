"""Events over Redis: requests through a stream and its consumer group, answers through a stream per caller."""

from operations.pubsub.redis.target import RedisTarget, connect_redis

__all__ = ["RedisTarget", "connect_redis"]
