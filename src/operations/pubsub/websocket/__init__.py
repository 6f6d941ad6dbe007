"""Events over one WebSocket: both ends may call, and both may serve."""

from importlib.util import find_spec

from operations.errors import MissingExtraError

if find_spec("websockets") is None:
    raise MissingExtraError("operations.pubsub.websocket", extra="websocket")

from operations.pubsub.websocket.connections import (
    AcceptedTarget,
    accept_websocket,
    connect_websocket,
    serve_websocket,
)
from operations.pubsub.websocket.target import Socket, WebSocketTarget

__all__ = [
    "AcceptedTarget",
    "Socket",
    "WebSocketTarget",
    "accept_websocket",
    "connect_websocket",
    "serve_websocket",
]
