"""Transports that send messages between processes. They do not depend on operations."""

from operations.pubsub.base import EventTarget, Receiver, Subscription

__all__ = ["EventTarget", "Receiver", "Subscription"]
