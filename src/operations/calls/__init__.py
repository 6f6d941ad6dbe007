"""Operations that run somewhere else: callers, workers, and the protocol between them."""

from operations.calls.events import CALL_EVENT_SCHEMAS
from operations.calls.handler import build_call_handler
from operations.calls.pending import PendingRequestMap
from operations.calls.server import CallServer, serve_calls

__all__ = [
    "CALL_EVENT_SCHEMAS",
    "CallServer",
    "PendingRequestMap",
    "build_call_handler",
    "serve_calls",
]
