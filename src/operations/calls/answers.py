"""The answering side of a `PendingRequestMap`: what is said to the requests that are served through it."""

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


class Answers:
    """Where the answers to requests go.

    Args:
        target: What carries them.
        mailbox: Where the reader of a subscription says how much room it has.
        own: The ids of requests that were made here: their answers stay here.
        receive: Takes those.
    """

    def __init__(
        self,
        target: EventTarget,
        mailbox: str,
        own: Container[str],
        receive: Callable[[bytes, str], None],
    ) -> None:
        self._target = target
        self._mailbox = mailbox
        self._own = own
        self._receive = receive
        self._addresses: dict[str, str] = {}

    def serve(self, request: RequestPayload, reply_to: str) -> None:
        """Remember where the answers to a request go."""
        self._addresses[request.request_id] = reply_to

    async def respond(self, request_id: str, envelope: Any, sequence: int | None) -> None:
        """Answer with an envelope; with a `sequence`, as one item of several.

        Raises:
            TypeError: If it is anything but an envelope.
        """
        lifted = lift_envelope(envelope)
        if lifted is None:
            raise TypeError("only a response envelope can be an answer: use local_envelope(...)")
        if sequence is None:
            await self._send(request_id, encode_response(request_id, lifted), last=True)
        else:
            body = encode_item(request_id, lifted, sequence, self._mailbox)
            await self._send(request_id, body, last=False)

    async def fail(self, request_id: str, error: CallError) -> None:
        """Answer with an error."""
        await self._send(request_id, encode_error(request_id, error), last=True)

    async def complete(self, request_id: str, sequence: int | None) -> None:
        """End a subscription."""
        event = CallCompleted(payload=CompletePayload(request_id=request_id, sequence=sequence))
        await self._send(request_id, encode_event(event), last=True)

    async def _send(self, request_id: str, body: bytes, *, last: bool) -> None:
        reply_to = self._addresses.get(request_id)
        if last:
            self._addresses.pop(request_id, None)
        if reply_to is None or request_id in self._own:
            # Asked by this very map, or by nobody we know of.
            self._receive(body, "")
        else:
            await self._target.send(reply_to, body)
