"""Events over NATS: queue groups for requests, a subject of its own for every mailbox."""

from importlib.util import find_spec

from operations.errors import MissingExtraError

if find_spec("nats") is None:
    raise MissingExtraError("operations.pubsub.nats", extra="nats")

from operations.pubsub.config import NatsConfig
from operations.pubsub.nats.target import NatsTarget, connect_nats

__all__ = ["NatsConfig", "NatsTarget", "connect_nats"]
