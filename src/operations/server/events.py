"""Send the items of a subscription as server-sent events.

Rule 1: a stream is `data: <item as JSON>` for each item, then `event: complete` or `event: error`. Changes of an item
        are comments, which clients ignore. A call that is rejected at once gets an error status instead. The handler
        ends when the client disconnects or its credential expires.
Rule 2: a stream can be resumed if its operation declares `meta={"resume": {"input": "after", "id": "id"}}`: events have
        the item's `id`, and `Last-Event-ID` becomes the input `after`. `"id": ""` stands for the whole item.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import aclosing
from typing import Any

import msgspec

from operations.base.errors import CallError, ErrorCode, cancelled_elsewhere, map_error
from operations.base.json.values import is_object
from operations.base.types import JSONObject
from operations.contract.envelopes import ResponseEnvelope
from operations.contract.specs import OperationSpec
from operations.front.credentials import credential_ended
from operations.front.messages import EVENT_STREAM, REQUEST_ID, meta_text
from operations.front.public_errors import ClientDisconnectedError, malformed, public_wire
from operations.front.request import RequestState
from operations.front.timing import wait_for_disconnect
from operations.io.sse import ALIVE, comment, encoded_event
from operations.openapi.serving.query_arguments import QueryArguments

_MAX_ID = 1024


class Resuming:
    """Defines how the stream of an operation is resumed."""

    def __init__(self, spec: OperationSpec) -> None:
        rule: Any = spec.meta.get("resume")
        self._spec = spec
        self._rule: JSONObject | None = rule if isinstance(rule, dict) else None

    @property
    def is_possible(self) -> bool:
        """Whether the stream can be resumed."""
        return self._rule is not None

    def resume(self, input: Any, headers: Mapping[bytes, bytes]) -> Any:
        """Return the input with the position at which the stream continues.

        Raises:
            RequestError: If the id of the last event is not text.
        """
        last = headers.get(b"last-event-id")
        given: Any = {} if input is None else input
        if self._rule is None or last is None or not is_object(given):
            return input
        name = str(self._rule.get("input", "after"))
        if name in given:
            return given
        try:
            text = last.decode()
        except UnicodeDecodeError:
            raise malformed("Last-Event-ID is not UTF-8") from None
        for parameter in QueryArguments(self._spec.input_schema).parameters:
            if parameter.name == name:
                return {**given, name: parameter.convert(text)}
        return {**given, name: text}

    def event_id(self, data: Any) -> bytes | None:
        """Return the event id of an item; None if it has no valid id."""
        if self._rule is None:
            return None
        name = self._rule.get("id", "id")
        held: Any = data if not name else data.get(name) if is_object(data) else None
        if held is None or isinstance(held, (dict, list)):
            return None
        text = held if isinstance(held, str) else msgspec.json.encode(held).decode()
        is_sendable = len(text) <= _MAX_ID and not any(c in text for c in "\0\r\n")
        return text.encode() if is_sendable else None


_START_SECONDS = 0.05
"""Seconds before the response begins, in which a failure still sets the HTTP status."""

_END_SECONDS = 1.0
"""Seconds that a handler has to end after its client has disconnected."""

_COMPLETE = encoded_event(b"{}", name=b"complete")


async def serve_events(state: RequestState, spec: OperationSpec, input: Any) -> None:
    """Open a subscription and send its items until it ends or the client disconnects.

    Raises:
        CallError: If the subscription failed before the response began.
        ClientDisconnectedError: If the client has disconnected.
    """
    input = Resuming(spec).resume(input, state.headers)  # noqa: A001 - the contract's word
    await serve_items(
        state, spec, lambda: state.front.registry.subscribe(spec.id, input, state.context)
    )


async def serve_items(
    state: RequestState, spec: OperationSpec, open_items: Callable[[], Any]
) -> None:
    """Send the items of a stream that `spec` describes, as `serve_events` does.

    Raises:
        CallError: If the stream failed before the response began.
        ClientDisconnectedError: If the client has disconnected.
    """
    resuming = Resuming(spec)
    response = _Response(state, spec, resuming)
    items = open_items()
    front, streams, end = state.front, state.front.open_streams, response.end
    # When the shutdown begins, clients resume such streams elsewhere; others may finish within the grace period.
    with (
        front.credentials.watching(state.credential, lambda: end(credential_ended())),
        streams.watching(
            lambda: end(_shutting_down()), is_idle=resuming.is_possible and not streams.is_closing
        ),
    ):
        await response.run(items)


def _shutting_down() -> CallError:
    return CallError(ErrorCode.UNAVAILABLE, "The server is shutting down")


class _Response:
    """One response that is being sent."""

    def __init__(self, state: RequestState, spec: OperationSpec, resuming: Resuming) -> None:
        self._state = state
        self._spec = spec
        self._front = state.front
        self._send = state.send
        self._resuming = resuming
        self._started = False
        self._silent = True
        """Whether nothing was sent since the last check."""
        self._ended: CallError | None = None
        self._pump_task: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()

    def end(self, error: CallError) -> None:
        """End the stream with an error."""
        self._ended = error
        if self._pump_task is not None:
            self._pump_task.cancel()

    async def run(self, items: Any) -> None:
        pump = self._pump_task = asyncio.Task(self._pump(items))
        gone = asyncio.Task(wait_for_disconnect(self._state.receive))
        try:
            if await _both_run(pump, gone, _START_SECONDS):
                async with self._turn:
                    await self._start()
            # Checked twice as often, because an item may have been sent just after the last check.
            while await _both_run(pump, gone, self._front.heartbeat / 2):
                if self._silent:
                    await self._write(ALIVE)
                else:
                    self._silent = True
            if pump.cancelled() and self._ended is None:
                self._ended = cancelled_elsewhere(self._spec.id)
        finally:
            gone.cancel()
            pump.cancel()
            await asyncio.wait({pump}, timeout=_END_SECONDS)
            if not pump.done():
                self._front.registry.keep(pump)
        if self._ended is not None:
            if not self._started:
                raise self._ended
            await self._write(self._failure(self._ended), last=True)
            return
        if pump.cancelled() or not pump.done():
            raise ClientDisconnectedError
        pump.result()

    async def _pump(self, items: Any) -> None:
        try:
            async with aclosing(items):
                async for envelope in items:
                    await self._write(self._event(envelope))
                    # Yield to the event loop: a handler that never waits would block it.
                    await asyncio.sleep(0)
        except CallError as error:
            if not self._started:
                raise
            await self._write(self._failure(error), last=True)
        except Exception as error:
            unexpected = map_error(error)
            unexpected.__cause__ = error
            if not self._started:
                raise unexpected from error
            await self._write(self._failure(unexpected), last=True)
        else:
            await self._write(_COMPLETE, last=True)

    def _event(self, envelope: ResponseEnvelope[Any]) -> bytes:
        """Return the event for one item. Encoded JSON has no line breaks, so one `data` line is enough."""
        data, meta = envelope.raise_for_error().data, envelope.meta
        event_id = self._resuming.event_id(data)
        text = encoded_event(msgspec.json.encode(data), event_id=event_id)
        if b"operations-meta" in self._state.headers:
            more = {"encoding": "base64"} if isinstance(data, bytes) else {}
            return comment(b"operations-meta " + meta_text(meta, **more)) + text
        count = meta.changes_count
        return comment(b"operations-changes %d" % count) + text if count else text

    def _failure(self, error: CallError) -> bytes:
        request_id = self._state.context.request_id
        wire = public_wire(error, request_id, expose=self._front.expose_errors)
        return encoded_event(msgspec.json.encode(wire), name=b"error")

    async def _start(self) -> None:
        if self._started:
            return
        self._started = True
        request_id = self._state.scope[REQUEST_ID] = self._state.context.request_id
        await self._send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [*EVENT_STREAM, (b"x-request-id", request_id.encode())],
            }
        )
        # Some servers send the head only with the first bytes of the body.
        await self._send({"type": "http.response.body", "body": b"", "more_body": True})

    async def _write(self, text: bytes, *, last: bool = False) -> None:
        self._silent = False
        async with self._turn:
            await self._start()
            await self._state.send_part(text)
            if last:
                await self._send({"type": "http.response.body", "body": b""})


async def _both_run(pump: "asyncio.Task[None]", gone: "asyncio.Task[None]", seconds: float) -> bool:
    """Return whether both still run after some time; False as soon as one has ended."""
    done, _ = await asyncio.wait({pump, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    return not done
