"""Receivers of messages for tests."""

from operations.pubsub.base import Delivery


class SilentReceiver:
    """Ignores everything; subclasses override what they observe."""

    name = ""
    backlog: int | None = None

    def receive(self, delivery: Delivery) -> None: ...
    def undelivered(self, key: str, worker: str = "") -> None: ...
    def lost(self, reason: str) -> None: ...
    def restored(self) -> None: ...

    def capacity(self) -> int:
        return 64
