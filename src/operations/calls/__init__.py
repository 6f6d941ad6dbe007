"""Call operations in other processes: clients, workers, and the protocol between them."""

from operations.calls.client import PendingRequestMap
from operations.calls.jobs import WorkerConfig
from operations.calls.remote import RemoteConfig, RemoteService, from_calls
from operations.calls.worker import CallServer, build_call_handler, serve_calls
from operations.observe import CallGraph, CallRecord, read_graph, render_tree
from operations.protocol import CALL_EVENT_SCHEMAS

__all__ = [
    "CALL_EVENT_SCHEMAS",
    "CallGraph",
    "CallRecord",
    "CallServer",
    "PendingRequestMap",
    "RemoteConfig",
    "RemoteService",
    "WorkerConfig",
    "build_call_handler",
    "from_calls",
    "read_graph",
    "render_tree",
    "serve_calls",
]
