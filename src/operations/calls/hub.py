"""One registry in the middle, and peers that come and go with what they offer.

    spoke --- WebSocket --- hub --- WebSocket --- spoke

Each connection is used both ways: the peer calls what the hub serves, and what the peer serves is registered at the
hub for as long as the connection lives.

Rule 1: a peer adds names that are free, so many of them, and takes away its own. Nothing that others registered is
        touched, and nothing is answered in the hub's name.
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
from operations.specs import Operation

logger = logging.getLogger("operations")


class Hub:
    """Serves a registry to peers and registers what they serve.

    Args:
        registry: What is served, and where the peers' operations appear.
        namespace: The namespace for a peer's operations, by its connection; None keeps their own ids.
        access: What callers need for a peer's operations, instead of what the peer says.
        send_identity: Tell peers on whose behalf they are called.
        max_operations: How many operations of one peer are registered.
        options: For `serve_calls`: `resolve`, `concurrency` and the like.
    """

    def __init__(
        self,
        registry: OperationRegistry,
        *,
        namespace: Callable[[AcceptedTarget], str | None] = lambda _: None,
        access: AccessRule | None = None,
        send_identity: bool = True,
        max_operations: int = 1000,
        **options: Any,
    ) -> None:
        self.registry = registry
        self._namespace = namespace
        self._access = access
        self._send_identity = send_identity
        self._max_operations = max_operations
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
                for operation in registered:
                    if self.registry.get(operation.spec.id) is operation:
                        self.registry.unregister(operation.spec.id)

    async def _register(self, service: RemoteService) -> list[Operation]:
        """Add what the peer offers, where its name is free."""
        try:
            await service.open()
        except CallError as error:
            # A peer that only calls is as welcome as one that serves.
            logger.debug("a peer offers nothing: %s", error)
            return []
        if len(service) > self._max_operations:
            logger.warning(
                "a peer offers %d operations; the first %d are registered",
                len(service),
                self._max_operations,
            )
        registered: list[Operation] = []
        for operation in service.operations[: self._max_operations]:
            try:
                registered.append(self.registry.register(operation))
            except RegistrationError as error:
                logger.warning("an operation of a peer was not registered: %s", error)
        return registered
