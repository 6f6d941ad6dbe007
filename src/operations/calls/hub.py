"""A registry that peers connect to by WebSocket, and that includes the operations of connected peers.

    spoke --- WebSocket --- hub --- WebSocket --- spoke

Each connection is used in both directions: the peer calls the hub's operations, and its own operations are registered
at the hub while it is connected.

Rule 1: a peer can add operations with unused names, up to a limit, and can remove only its own.
Rule 2: if two peers have an operation of the same name, the second peer's is registered when the first disconnects.
        They may be the same peer, which reconnected before its old connection was closed.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

from operations.errors import CallError, MissingExtraError, RegistrationError

try:
    from websockets.asyncio.server import Server
except ModuleNotFoundError as error:
    raise MissingExtraError("operations.calls.hub", extra="websocket") from error

from operations._text import printable
from operations.access import Identity, with_check
from operations.authority.grants import Delegate
from operations.calls.remote import AccessRule, RemoteService, from_calls
from operations.calls.worker import serve_calls
from operations.front import Front
from operations.front.config import ServerConfig
from operations.front.credentials import Credential, credentials_in
from operations.front.limits import Limits, address_prefix, caller_key
from operations.pubsub.websocket import AcceptedTarget, Headers, serve_websocket
from operations.registry import OperationRegistry
from operations.specs import Operation

logger = logging.getLogger("operations")


class WebSocketHub:
    """Serves a registry to peers and registers their operations.

    Args:
        registry: The operations to serve; the operations of peers are added to it.
        namespace: The namespace for a peer's operations, by its connection; None keeps their own ids.
        access: The access control of a peer's operations, instead of the peer's own.
        send_identity: Send the identity of the caller to peers.
        credential: Returns a token for the peer's resolver, by its connection: for listings and the hub's own calls.
        delegate: Returns the function that mints a grant for each call of a peer, by its connection: `Grants.delegate`.
        max_operations: The largest number of operations of one peer; 0 imports none.
        limits: Limits on sizes, times and rates, for all peers together.
        front: The limits and rules to share with other entry points, instead of `limits`.
        options: Options of `serve_calls`, such as `resolve` and `grace`.

    Attributes:
        front: The limits and rules for all peers.
    """

    def __init__(
        self,
        registry: OperationRegistry,
        *,
        namespace: Callable[[AcceptedTarget], str | None] = lambda _: None,
        access: AccessRule | None = None,
        send_identity: bool = True,
        credential: Callable[[AcceptedTarget], str | None] = lambda _: None,
        delegate: Callable[[AcceptedTarget], Delegate | None] = lambda _: None,
        max_operations: int = 1000,
        limits: Limits | None = None,
        front: Front | None = None,
        **options: Any,
    ) -> None:
        self.registry = registry
        self.front = front or Front(registry, ServerConfig(limits=limits or Limits()))
        self._namespace = namespace
        self._access = access
        self._send_identity = send_identity
        self._credential = credential
        self._delegate = delegate
        self._max_operations = max_operations
        self._options: dict[str, Any] = {"grace": 0, **options}
        self._peers: list[dict[str, Operation]] = []

    @asynccontextmanager
    async def serve(
        self, host: str = "127.0.0.1", port: int = 0, **options: Any
    ) -> AsyncGenerator[Server]:
        """Accept peers for the duration of an `async with` block; `options` are those of `serve_websocket`.

        Peers with wrong credentials are throttled, and messages have the size limits of the front.
        """

        async def authenticate(
            address: str, headers: Headers, resolve: Callable[[], Any]
        ) -> Identity | None:
            shown = credentials_in(headers)
            return await self.front.auth.authenticate(address_prefix(address), shown, resolve)

        options.setdefault("max_received", self.front.limits.body_bytes)
        options.setdefault("max_values", self.front.limits.values)
        async with serve_websocket(
            self.attach, host, port, authenticate=authenticate, **options
        ) as server:
            yield server

    async def attach(self, target: AcceptedTarget) -> None:
        """Serve one connection until it closes or its credential expires; then remove the operations of its peer."""
        address = address_prefix(target.address)
        try:
            slot = self.front.sockets.enter(caller_key(target.identity, address))
        except CallError as error:
            logger.warning("a peer was disconnected: %s", error)
            return
        async with AsyncExitStack() as stack:
            stack.enter_context(slot)
            identity, end = target.identity, partial(self._end, target)
            if identity is not None:
                credential = Credential(identity, target.check or (lambda: identity), id(target))
                # For calls that wait for approval.
                target.identity = with_check(identity, credential.is_valid)
                stack.enter_context(self.front.credentials.watching(credential, end))
            worker = serve_calls(
                self.registry, target, front=self.front, address=address, **self._options
            )
            await stack.enter_async_context(worker)
            if not self._max_operations:
                await target.wait_closed()
                return
            service = from_calls(
                target,
                namespace=self._namespace(target),
                access=self._access,
                send_identity=self._send_identity,
                credential=self._credential(target),
                delegate=self._delegate(target),
            )
            stack.push_async_callback(service.aclose)
            offered = await self._import(service)
            self._peers.append(offered)
            try:
                for operation in offered.values():
                    self._register(operation)
                service.on_change = partial(self._update, offered)
                await target.wait_closed()
            finally:
                # Compared by identity, because another peer may have equal operations.
                self._peers = [peer for peer in self._peers if peer is not offered]
                for operation in offered.values():
                    self._pass_on(operation)

    def _end(self, target: AcceptedTarget) -> None:
        self.registry.keep(asyncio.Task(target.aclose()))

    def _register(self, operation: Operation) -> None:
        """Register an operation of a peer, if its name is free."""
        try:
            self.registry.register(self.registry.restricted(operation))
        except RegistrationError:
            logger.warning(
                "%s of a peer is not registered: the name is taken. Set WebSocketHub(namespace=...)",
                operation.spec.id,
            )

    def _update(
        self, offered: dict[str, Operation], before: list[Operation], after: list[Operation]
    ) -> None:
        """Register and remove the operations that a peer has added, changed and removed."""
        wanted = {each.spec.id: each for each in after[: self._max_operations]}
        for operation_id, operation in tuple(offered.items()):
            if wanted.get(operation_id) is not operation:
                del offered[operation_id]
                self._pass_on(operation)
        for operation_id, operation in wanted.items():
            if operation_id not in offered:
                offered[operation_id] = operation
                self._register(operation)

    def _pass_on(self, operation: Operation) -> None:
        """Remove an operation of a disconnected peer; register the operation of the next peer with the same name."""
        if self.registry.imported(operation) is None:
            return
        self.registry.remove_imported(operation)
        operation_id = operation.spec.id
        for peer in self._peers:
            if operation_id in peer:
                self._register(peer[operation_id])
                return

    async def _import(self, service: RemoteService) -> dict[str, Operation]:
        """Return the operations of a peer, by id."""
        try:
            await service.open()
        except CallError as error:
            # Some peers serve no operations.
            logger.debug("a peer serves no operations: %s", printable(str(error)))
            return {}
        if len(service) > self._max_operations:
            logger.warning(
                "a peer serves %d operations; the first %d are registered",
                len(service),
                self._max_operations,
            )
        return {each.spec.id: each for each in service.operations[: self._max_operations]}
