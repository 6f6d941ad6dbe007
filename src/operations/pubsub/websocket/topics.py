"""The original protocol on a WebSocket: a peer says by control messages which events it wants."""

import asyncio
from typing import Any, cast

import msgspec

from operations._json import enforce_bounds
from operations.types import JSONObject

CALLER_TOPICS = ("call.responded:", "call.completed:", "call.error:", "call.aborted:")
WORKER_TOPICS = ("call.requested:", "call.aborted:")
CONTROLS = ("__subscribe", "__unsubscribe")

_MAX_TOPICS = 10_000


class Frame(msgspec.Struct):
    """As much of an event as a socket needs to know."""

    type: Any = None
    payload: Any = None


_decode = msgspec.json.Decoder(Frame).decode


def read_frame(body: bytes, max_values: int) -> Frame:
    """Return the frame in a JSON text.

    Raises:
        ValueError: If it is not one, or too large to be decoded.
    """
    enforce_bounds(body, max_values=max_values)
    return _decode(body)


def control_message(kind: str, topic: str) -> bytes:
    """Return the control message that subscribes to a topic (`__subscribe`) or releases it (`__unsubscribe`)."""
    return msgspec.json.encode({"type": kind, "id": "", "payload": {"topic": topic}})


class Topics:
    """The topics that the peer has subscribed to.

    Args:
        max_values: How many JSON values a message may hold.
    """

    def __init__(self, max_values: int) -> None:
        self._max_values = max_values
        self._topics: set[str] = set()
        self._changed = asyncio.Event()

    def clear(self) -> None:
        """Forget everything: the peer is a new one."""
        self._topics.clear()

    def control(self, kind: str, payload: Any) -> bool:
        """Heed a control message; False if it makes no sense."""
        topic = cast("JSONObject", payload).get("topic") if isinstance(payload, dict) else None
        if not isinstance(topic, str):
            return False
        if kind == "__unsubscribe":
            self._topics.discard(topic)
            return True
        if len(self._topics) >= _MAX_TOPICS:
            return False
        self._topics.add(topic)
        self._changed.set()
        return True

    async def wait_for(self, topic: str) -> None:
        """Wait until the peer has subscribed to `topic`."""
        while topic not in self._topics:
            self._changed.clear()
            await self._changed.wait()

    def has(self, body: bytes) -> bool:
        """Whether the peer subscribed to this event, by its type alone or by type and request id."""
        frame = read_frame(body, self._max_values)
        if f"{frame.type}:" in self._topics:
            return True
        request_id = frame.payload.get("requestId", "")
        return f"{frame.type}:{request_id}" in self._topics
