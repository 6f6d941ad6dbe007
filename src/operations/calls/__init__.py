"""Call operations in other processes: clients, workers, and the protocol between them."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any, TypeAlias

from operations.calls.protocol.events import CallRequested
from operations.calls.serving.jobs import WorkerConfig
from operations.calls.serving.worker import CallServer, serve_calls
from operations.calls.source.client import PendingRequestMap
from operations.calls.source.remote import RemoteConfig, RemoteService, from_calls
from operations.contract.wire import CALL_EVENT_SCHEMAS
from operations.front.credentials import CredentialResolver
from operations.recorder.graph import CallGraph, CallRecord, read_graph, render_tree
from operations.registry.registry import OperationRegistry

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

CallHandler: TypeAlias = Callable[[CallRequested], Coroutine[Any, Any, None]]


def build_call_handler(
    registry: OperationRegistry,
    call_map: PendingRequestMap,
    *,
    resolve: CredentialResolver | None = None,
    expose_errors: bool | None = None,
) -> CallHandler:
    """Return the coroutine function that serves one `call.requested` event.

    The coroutine returns when the last reply was sent. It raises `ValueError` if the event has no `replyTo` on a target
    that needs one, `TransportError` if the target cannot be reached, and `CallError` if `call_map` is closed. Aborts,
    credit and probes for its requests arrive through the target. Closing `call_map` gives running requests 10 seconds
    and ends the rest with `UNAVAILABLE`.

    Args:
        registry: The operations to serve.
        call_map: Its target transports the replies, and determines whether `identity` in events is trusted.
        resolve: Returns the identity for a `credential`.
        expose_errors: Show callers the text of unexpected exceptions; by default only on trusted targets.
    """
    target = call_map.target
    opening = asyncio.Lock()
    server: CallServer | None = None

    async def open_server() -> CallServer:
        nonlocal server
        async with opening:
            if server is None:
                # Replies without an address are sent to all callers of the group, including the map.
                await call_map.open()
                config = WorkerConfig(
                    group=call_map.group, resolve=resolve, expose_errors=expose_errors
                )
                async with AsyncExitStack() as stack:
                    opened = CallServer(registry, target, config)
                    stack.push_async_callback(opened.aclose)
                    await opened.listen()
                    await call_map.close_with(stack.pop_all().aclose)
                    server = opened
        return server

    async def handle(event: CallRequested) -> None:
        request = event.payload
        reply_to = call_map.address_of(request.request_id, request.reply_to)
        worker = server or await open_server()
        await worker.serve(request, reply_to)

    return handle
