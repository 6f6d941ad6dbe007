"""The call protocol on the WebSockets of an app."""

import asyncio

from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from operations.access import Identity
from operations.calls import serve_calls
from operations.front.front import CredentialResolver, Front
from operations.front.http import CREDENTIAL, IDENTITY, PIPELINE
from operations.front.limits import client_address
from operations.pubsub.websocket import accept_websocket
from operations.pubsub.websocket.target import ANNOUNCED
from operations.registry import OperationRegistry


class WebSocketEntry:
    """Serves the call protocol on WebSockets, inside an app of `create_app`, whose limits hold for all entry points.

    Args:
        registry: The operations to serve.
        resolve: Returns the identity that a credential inside a call belongs to.
    """

    def __init__(self, registry: OperationRegistry, resolve: CredentialResolver | None) -> None:
        self._registry = registry
        self._resolve = resolve

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection until it closes."""
        front: Front = scope[PIPELINE].front
        socket = WebSocket(scope, receive, send)
        # Clients of this library then reject a larger message themselves, and the connection stays open.
        announced = (ANNOUNCED.lower().encode(), b"%d" % front.limits.body_bytes)
        await socket.accept(headers=[announced])
        identity: Identity | None = scope.get(IDENTITY)

        async with (
            accept_websocket(
                _Socket(socket, front.limits.body_bytes),
                identity=identity,
                max_values=front.limits.values,
            ) as target,
            serve_calls(
                self._registry,
                target,
                front=front,
                address=client_address(scope),
                resolve=self._resolve,
                expose_errors=front.expose_errors,
                grace=0,
            ),
        ):
            # When the credential of the connection expires or is revoked, the connection ends.
            revoked = asyncio.Event()
            with front.credentials.watching(scope.get(CREDENTIAL), revoked.set):
                ends = [
                    asyncio.ensure_future(end) for end in (target.wait_closed(), revoked.wait())
                ]
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                for end in ends:
                    end.cancel()


class _Socket:
    """A WebSocket of Starlette, as the call protocol needs it.

    Args:
        socket: The accepted socket.
        max_bytes: The largest message that is received. Our own server checks it first; others may not.
    """

    def __init__(self, socket: WebSocket, max_bytes: int) -> None:
        self._socket = socket
        self._max_bytes = max_bytes
        self._sending = asyncio.Lock()

    async def send(self, text: bytes) -> None:
        try:
            # One at a time: a server lets all that wait go on as soon as the client has read a little.
            async with self._sending:
                await self._socket.send_text(text.decode())
        except (WebSocketDisconnect, RuntimeError) as error:
            raise EOFError(str(error)) from error

    async def receive(self) -> bytes:
        try:
            message = (await self._socket.receive_text()).encode()
        except (WebSocketDisconnect, RuntimeError, KeyError) as error:
            # A KeyError is a binary frame: not this protocol.
            raise EOFError(str(error)) from error
        if len(message) > self._max_bytes:
            await self._socket.close(1009)
            raise EOFError(f"a message of more than {self._max_bytes} bytes")
        return message

    async def close(self) -> None:
        if self._socket.client_state is WebSocketState.CONNECTED:
            await self._socket.close()
