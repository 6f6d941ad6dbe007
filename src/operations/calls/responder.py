"""The replying side of a `PendingRequestMap`: publishes replies to requests that its owner serves."""

from collections.abc import Callable, Container
from typing import Any

from operations.calls.events import (
    CallCompleted,
    CompletePayload,
    RequestPayload,
    encode_error,
    encode_event,
    encode_item,
    encode_response,
)
from operations.envelopes import lift_envelope
from operations.errors import CallError
from operations.pubsub.base import EventTarget


class Responder:
    """Publishes the replies to requests.

    Args:
        target: Carries them.
        group: The group whose callers receive replies to requests without an address.
        mailbox: The mailbox of the map itself.
        own: The ids of the requests that the map itself made.
        receive: Receives the replies to those if the target reaches only the peer.
    """

    def __init__(
        self,
        target: EventTarget,
        group: str,
        mailbox: str,
        own: Container[str],
        receive: Callable[[bytes, str], None],
    ) -> None:
        self._target = target
        self._callers = target.topic(f"{group}.callers")
        self._mailbox = mailbox
        self._own = own
        self._receive = receive
        self._addresses: dict[str, str] = {}
        self._streams: set[str] = set()

    def serve(self, request: RequestPayload, reply_to: str) -> None:
        """Remember where the replies to a request go."""
        self._addresses[request.request_id] = reply_to
        if request.credit is not None:
            self._streams.add(request.request_id)

    def address_of(self, request_id: str) -> str:
        """Return the address for replies to a request.

        Raises:
            ValueError: If it is unknown and the target delivers replies only to the caller's own mailbox.
        """
        if request_id in self._own:
            return self._mailbox
        address = self._addresses.get(request_id)
        if address:
            return address
        if self._target.broadcasts_replies:
            return self._callers
        raise ValueError(
            f"no address is known for replies to request {request_id!r}: "
            "announce the request with serve(request, reply_to) first"
        )

    async def respond(self, request_id: str, envelope: Any, sequence: int | None) -> None:
        """Publish an envelope; with a `sequence`, as one item of a subscription.

        Raises:
            TypeError: If it is anything but an envelope.
            ValueError: As `address_of`.
        """
        lifted = lift_envelope(envelope)
        if lifted is None:
            raise TypeError("only a response envelope can be an answer: use local_envelope(...)")
        if sequence is None:
            last = request_id not in self._streams
            await self._send(request_id, encode_response(request_id, lifted), last=last)
        else:
            body = encode_item(request_id, lifted, sequence, self._mailbox)
            await self._send(request_id, body, last=False)

    async def fail(self, request_id: str, error: CallError) -> None:
        """Publish an error.

        Raises:
            ValueError: As `address_of`.
        """
        await self._send(request_id, encode_error(request_id, error), last=True)

    async def complete(self, request_id: str, sequence: int | None) -> None:
        """Publish the end of a subscription.

        Raises:
            ValueError: As `address_of`.
        """
        event = CallCompleted(payload=CompletePayload(request_id=request_id, sequence=sequence))
        await self._send(request_id, encode_event(event), last=True)

    async def _send(self, request_id: str, body: bytes, *, last: bool) -> None:
        address = self.address_of(request_id)
        if last:
            self._addresses.pop(request_id, None)
            self._streams.discard(request_id)
        if self._target.direct and request_id in self._own:
            # The target reaches only the peer, and the caller is on this side.
            self._receive(body, "")
        await self._target.send(address, body)
