"""Transports that carry bytes between processes; independent of operations."""

from operations.pubsub.base import EventTarget, Receiver, Subscription

__all__ = ["EventTarget", "Receiver", "Subscription"]
