"""Whether somebody is there, at an address that came in a message."""

from operations.errors import NotSentError
from operations.pubsub.base import EventTarget

SETTLING = 2.0
"""Seconds after a reconnect in which others may still be on their way back."""


async def is_there(target: EventTarget, address: str) -> bool:
    """Whether somebody listens at `address`. At what is no address at all, nobody does.

    Raises:
        TransportError: If that cannot be known now.
    """
    try:
        return await target.is_present(address)
    except NotSentError:
        if target.is_connected:
            return False
        raise
