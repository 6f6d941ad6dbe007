"""Replies of a client to requests that its program serves itself."""

from collections.abc import Callable
from typing import Any

from operations.base.errors import CallError
from operations.calls.protocol.events import (
    CallCompleted,
    CompletePayload,
    encode_error,
    encode_event,
    encode_item,
    encode_response,
)
from operations.calls.source.open_calls import OpenCalls
from operations.contract.envelopes import lift_envelope
from operations.pubsub.base import Delivery, EventTarget


class Responder:
    """Sends replies to requests.

    Args:
        target: Transports the replies.
        mailbox: The address of the client.
        callers_topic: The address of all callers of the group.
        open_calls: The calls of the client, which may be the caller of a request.
        receive: Processes an event for the client.
    """

    def __init__(
        self,
        target: EventTarget,
        mailbox: str,
        callers_topic: str,
        open_calls: OpenCalls,
        receive: Callable[[Delivery], None],
    ) -> None:
        self._target = target
        self._mailbox = mailbox
        self._callers_topic = callers_topic
        self._open = open_calls
        self._receive = receive

    def address_of(self, request_id: str, reply_to: str | None) -> str:
        """Return the address for replies to a request that names `reply_to`.

        Raises:
            ValueError: If there is none, and the target delivers replies only to the caller's own mailbox.
        """
        if reply_to:
            return reply_to
        if request_id in self._open.by_id:
            return self._mailbox
        if self._target.broadcasts_replies:
            return self._callers_topic
        raise ValueError(f"replies to request {request_id!r} have no address: pass its reply_to")

    async def respond(
        self, request_id: str, envelope: Any, *, sequence: int | None, reply_to: str | None
    ) -> None:
        """Send the reply to a request; with a `sequence`, as one item of a subscription.

        Raises:
            TypeError: If `envelope` is not an envelope.
            ValueError: If the reply has no address.
            TransportError: If it cannot be sent.
        """
        lifted = lift_envelope(envelope)
        if lifted is None:
            raise TypeError("only a response envelope can be a reply: use local_envelope(...)")
        if sequence is None:
            body = encode_response(request_id, lifted)
        else:
            body = encode_item(request_id, lifted, sequence, self._mailbox)
        await self._reply(request_id, body, reply_to)

    async def emit_error(self, request_id: str, error: CallError, *, reply_to: str | None) -> None:
        """Send an error as the reply to a request; errors are raised as by `respond`."""
        await self._reply(request_id, encode_error(request_id, error), reply_to)

    async def complete(
        self, request_id: str, *, sequence: int | None, reply_to: str | None
    ) -> None:
        """Send the end of a subscription; errors are raised as by `respond`."""
        event = CallCompleted(payload=CompletePayload(request_id=request_id, sequence=sequence))
        await self._reply(request_id, encode_event(event), reply_to)

    async def _reply(self, request_id: str, body: bytes, reply_to: str | None) -> None:
        address = self.address_of(request_id, reply_to)
        if self._target.direct and request_id in self._open.by_id:
            # The target reaches only the peer, but the caller is in this process.
            self._receive(Delivery(body))
        await self._target.send(address, body)
