"""The last events of one HTTP session, for a client that lost its stream and comes back."""

from collections import deque
from itertools import count

from mcp.server.streamable_http import EventCallback, EventMessage, EventStore
from mcp_types import JSONRPCMessage

MAX_EVENTS = 256


class ReplayStore(EventStore):
    """Keeps the last events; one store serves one session, so that nobody reads another's."""

    def __init__(self) -> None:
        self._events: deque[tuple[int, str, JSONRPCMessage | None]] = deque(maxlen=MAX_EVENTS)
        self._numbers = count(1)

    async def store_event(self, stream_id: str, message: JSONRPCMessage | None) -> str:
        """Keep an event; its id is its number."""
        number = next(self._numbers)
        self._events.append((number, stream_id, message))
        return str(number)

    async def replay_events_after(
        self, last_event_id: str, send_callback: EventCallback
    ) -> str | None:
        """Send what came after an event on its stream, and name the stream; None if it is not known any more."""
        last = int(last_event_id) if last_event_id.isascii() and last_event_id.isdigit() else 0
        stream = next((stream for number, stream, _ in self._events if number == last), None)
        if stream is None:
            return None
        for number, of_stream, message in tuple(self._events):
            if number > last and of_stream == stream and message is not None:
                await send_callback(EventMessage(message, str(number)))
        return stream
