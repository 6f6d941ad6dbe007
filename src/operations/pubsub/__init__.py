"""Ways to carry bytes between processes. Nothing here knows what an operation is."""

from operations.pubsub.base import EventTarget, Receiver, Subscription

__all__ = ["EventTarget", "Receiver", "Subscription"]
