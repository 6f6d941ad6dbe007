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

from operations.base.errors import CallError, MissingExtraError

try:
    from websockets.asyncio.server import Server
except ModuleNotFoundError as error:
    raise MissingExtraError("operations.calls.socket", extra="websocket") from error

from operations.authority.grants import Delegate
from operations.base.text import printable
from operations.calls.serving.jobs import WorkerConfig
from operations.calls.serving.worker import serve_calls
from operations.calls.source.remote import AccessRule, RemoteService, from_calls
from operations.contract.access import Identity, with_check
from operations.front.config import ServerConfig
from operations.front.credentials import Credential, credentials_in
from operations.front.front import Front
from operations.front.limits import Limits, address_prefix, caller_key
from operations.pubsub.websocket import AcceptedTarget, Headers, serve_websocket
from operations.registry.registry import OperationRegistry

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
        # Reject a wrong option now, instead of every connection later.
        WorkerConfig(**self._options)
        self._peers: dict[RemoteService, set[str]] = {}
        """The ids of the operations of each peer, in the order of their arrival."""

        self._refused: set[str] = set()
        """The ids that no peer could register: an adapter renames them to an id that is taken."""

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
            service.max_operations = self._max_operations
            stack.push_async_callback(service.aclose)
            try:
                await service.open()
            except CallError as error:
                # Some peers serve no operations.
                logger.debug("a peer serves no operations: %s", printable(str(error)))
            stack.callback(self._remove, service)
            self._add(service)
            await target.wait_closed()

    def _end(self, target: AcceptedTarget) -> None:
        self.registry.keep(asyncio.Task(target.aclose()))

    def _add(self, peer: RemoteService) -> None:
        """Register the operations of a peer whose names are free, now and when they change."""
        peer.attach(self.registry)
        peer.on_change = partial(self._register_free, peer)
        self._register_free(peer)
        taken = [each.spec.id for each in peer.operations if self.registry.imported(each) is None]
        if taken:
            logger.warning(
                "%s of a peer are not registered: the names are taken. Set WebSocketHub(namespace=...)",
                ", ".join(taken[:10]),
            )

    def _remove(self, peer: RemoteService) -> None:
        """Remove the operations of a disconnected peer; those of other peers with the same names take their place."""
        peer.detach(self.registry)
        for operation in peer.operations:
            self.registry.remove_imported(operation)
        peer.operations = []
        self._register_free(peer)

    def _register_free(self, peer: RemoteService) -> None:
        """Register the operations that a peer has now if their names are free, and those of others that it freed."""
        before = self._peers.get(peer, set())
        self._peers[peer] = {each.spec.id for each in peer.operations}
        free = self._free(before | self._peers[peer] | self._refused)
        for other, ids in self._peers.items():
            if not free.isdisjoint(ids):
                other.register_free(self.registry)
                free = self._free(free)
        if not self._peers[peer]:
            del self._peers[peer]
        self._refused = {each for ids in self._peers.values() for each in free & ids}

    def _free(self, ids: set[str]) -> set[str]:
        """Return those of the ids that no operation has."""
        return {each for each in ids if self.registry.registered(each) is None}
