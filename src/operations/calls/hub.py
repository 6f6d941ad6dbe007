"""One registry in the middle, and peers that come and go with what they offer.

    spoke --- WebSocket --- hub --- WebSocket --- spoke

Each connection is used both ways: the peer calls what the hub serves, and what the peer serves is registered at the
hub for as long as the connection lives.
"""

import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

from operations.calls.remote import AccessRule, RemoteService, from_calls
from operations.calls.server import serve_calls
from operations.errors import CallError, RegistrationError
from operations.pubsub.websocket import AcceptedTarget
from operations.registry import OperationRegistry

logger = logging.getLogger("operations")


class Hub:
    """Serves a registry to peers and registers what they serve.

    Args:
        registry: What is served, and where the peers' operations appear.
        namespace: The namespace for a peer's operations, by its connection; None keeps their own ids.
        access: What callers need for a peer's operations, instead of what the peer says.
        send_identity: Tell peers on whose behalf they are called.
        options: For `serve_calls`: `resolve`, `concurrency` and the like.
    """

    def __init__(
        self,
        registry: OperationRegistry,
        *,
        namespace: Callable[[AcceptedTarget], str | None] = lambda _: None,
        access: AccessRule | None = None,
        send_identity: bool = True,
        **options: Any,
    ) -> None:
        self.registry = registry
        self._namespace = namespace
        self._access = access
        self._send_identity = send_identity
        self._options: dict[str, Any] = {"grace": 0, **options}

    async def attach(self, target: AcceptedTarget) -> None:
        """Serve one connection until it closes. What its peer registered goes with it."""
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(serve_calls(self.registry, target, **self._options))
            service = from_calls(
                target,
                namespace=self._namespace(target),
                access=self._access,
                send_identity=self._send_identity,
            )
            stack.push_async_callback(service.aclose)
            registered = await self._register(service)
            try:
                await target.wait_closed()
            finally:
                for operation_id in registered:
                    if operation_id in self.registry:
                        self.registry.unregister(operation_id)

    async def _register(self, service: RemoteService) -> list[str]:
        """Add what the peer offers; the ids that were free."""
        try:
            await service.open()
        except CallError as error:
            # A peer that only calls is as welcome as one that serves.
            logger.debug("a peer offers nothing: %s", error)
            return []
        registered: list[str] = []
        for operation in service:
            try:
                self.registry.register(operation)
            except RegistrationError as error:
                logger.warning("an operation of a peer was not registered: %s", error)
            else:
                registered.append(operation.spec.id)
        return registered
