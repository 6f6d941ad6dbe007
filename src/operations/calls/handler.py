"""Serve single requests that the program itself received.

Rule: this is a worker (`CallServer`) that takes no requests from the target. Identity, limits, deadlines, duplicates
and errors are handled by the same code as behind `serve_calls`.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

from operations.calls.client import PendingRequestMap
from operations.calls.config import WorkerConfig
from operations.calls.events import CallRequested
from operations.calls.worker import CallServer
from operations.front.front import CredentialResolver
from operations.registry import OperationRegistry

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
        call_map: Its target carries the replies; the target also decides whether `identity` in events is trusted.
        resolve: Return the identity that a `credential` belongs to.
        expose_errors: Show callers the text of unexpected exceptions; by default only on trusted targets.
    """
    target = call_map.target
    opening = asyncio.Lock()
    server: CallServer | None = None

    async def open_server() -> CallServer:
        nonlocal server
        async with opening:
            if server is None:
                # Replies without an address go to all callers of the group, of which the map is one.
                await call_map.open()
                opened = CallServer(
                    registry,
                    target,
                    WorkerConfig(
                        group=call_map.group, resolve=resolve, expose_errors=expose_errors
                    ),
                )
                await opened.listen()
                await call_map.close_with(opened.aclose)
                server = opened
        return server

    async def handle(event: CallRequested) -> None:
        request = event.payload
        reply_to = request.reply_to or call_map.address_of(request.request_id)
        worker = server or await open_server()
        await worker.serve(request, reply_to)

    return handle
