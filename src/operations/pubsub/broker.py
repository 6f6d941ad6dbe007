"""The state of a connection to Redis or NATS."""

import asyncio
import logging
from contextlib import AsyncExitStack

from operations._resilience import LogThrottle
from operations.errors import NotSentError
from operations.pubsub.base import EventTarget, Receiver, wait_until
from operations.pubsub.config import BrokerConfig, enforce_client

logger = logging.getLogger("operations")


class BrokerTarget(EventTarget):
    """A client of a broker, which belongs to one event loop.

    Args:
        config: The settings of the connection.
        broker: The name of the broker, for messages.

    Attributes:
        client: The name of this client.
        receivers: Notified when the connection is lost and restored.
        connected: Set while the broker can be reached.
        is_closed: Whether the connection was closed.
    """

    def __init__(self, config: BrokerConfig, broker: str) -> None:
        enforce_client(config.client)
        self.client = config.client
        self.trusted, self.max_values = config.trusted, config.max_values
        self.receivers: list[Receiver] = []
        self.connected = asyncio.Event()
        self.is_closed = False
        self._broker = broker
        self._losses = LogThrottle()
        self._loop = asyncio.get_running_loop()

    @property
    def is_connected(self) -> bool:
        """Whether the broker can be reached now."""
        return self.connected.is_set()

    def enforce_usable(self) -> None:
        """Raise an error unless the connection can be used on the running event loop.

        Raises:
            NotSentError: If the connection is closed, or belongs to another loop.
        """
        if self.is_closed:
            raise NotSentError("the connection was closed: connect again")
        if asyncio.get_running_loop() is not self._loop:
            raise NotSentError("the connection belongs to another event loop: connect on this one")

    async def ready(self, wait: float) -> None:
        """Wait until the connection is restored; raise `NotSentError` if that takes too long."""
        if not self.connected.is_set():
            self.enforce_usable()
            await wait_until(self.connected, wait, f"{self._broker} cannot be reached")

    def notify(self, receiver: Receiver, undo: AsyncExitStack) -> None:
        """Report changes of the connection to `receiver` until `undo` is closed."""
        self.receivers.append(receiver)
        undo.callback(self.receivers.remove, receiver)

    def lost(self, reason: str) -> None:
        """Report that the connection was lost."""
        logger.log(self._losses.level(), reason)
        for receiver in tuple(self.receivers):
            receiver.lost(reason)

    def restored(self) -> None:
        """Report that the connection was restored."""
        for receiver in tuple(self.receivers):
            receiver.restored()
