"""Events over NATS: queue groups for requests, a subject of its own for every mailbox."""

from operations.errors import MissingExtraError

try:
    import nats as _nats  # noqa: F401 - everything below needs it
except ModuleNotFoundError as error:
    raise MissingExtraError("operations.pubsub.nats", extra="nats") from error

from operations.pubsub.nats.target import NatsTarget, connect_nats

__all__ = ["NatsTarget", "connect_nats"]
