"""Subscriptions as server-sent events.

    data: <one item's data as JSON>          for every item
    event: complete / data: {}               at the end
    event: error / data: {code, message, details}

A stream can be resumed if its operation declares it: `meta={"resume": {"input": "after", "id": "id"}}`. Each event then
has the item's `id` as its id, and a `Last-Event-ID` header becomes the input `after`, unless the input has a value
there. `"id": ""` stands for the whole item.

Rule 1: a call that is rejected at once has its status; once items may be sent, an error is an event.
Rule 2: the handler runs in one task from beginning to end, and waits until the client has read.
Rule 3: when the client disconnects, or its credential stops being valid, the handler ends.
"""

import asyncio
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any

import msgspec

from operations._json import is_object
from operations.envelopes import ResponseEnvelope
from operations.errors import CallError, ErrorCode, map_error
from operations.front.http import REQUEST_ID, RequestPipeline, RequestState
from operations.front.messages import SAFE
from operations.front.public_errors import ClientDisconnectedError, Header, malformed, public_wire
from operations.front.timing import wait_for_disconnect
from operations.openapi.exporting.query_arguments import QueryArguments
from operations.specs import OperationSpec
from operations.types import JSONObject

_MAX_ID = 1024


class Resuming:
    """How the stream of one operation is resumed, if it can be."""

    def __init__(self, spec: OperationSpec) -> None:
        rule: Any = spec.meta.get("resume")
        self._spec = spec
        self._rule: JSONObject | None = rule if isinstance(rule, dict) else None

    def resume(self, input: Any, headers: Mapping[bytes, bytes]) -> Any:
        """Return the input with the place where the stream goes on.

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
        """Return the id of an item's event; None if it has none that can be sent."""
        if self._rule is None:
            return None
        name = self._rule.get("id", "id")
        held: Any = data if not name else data.get(name) if is_object(data) else None
        if held is None or isinstance(held, (dict, list)):
            return None
        text = held if isinstance(held, str) else msgspec.json.encode(held).decode()
        is_sendable = len(text) <= _MAX_ID and not any(c in text for c in "\0\r\n")
        return text.encode() if is_sendable else None


_AT_ONCE = 0.05
"""Seconds in which a failure still has its own status; after that the response begins."""

_FAREWELL = 1.0
"""Seconds a handler has to end after its client disconnected."""

_HEADERS: tuple[Header, ...] = (
    (b"content-type", b"text/event-stream"),
    # Proxies must pass events on as they come.
    (b"x-accel-buffering", b"no"),
    *SAFE,
)
_COMPLETE = b"event: complete\ndata: {}\n\n"
_ALIVE = b": alive\n\n"


async def serve_events(
    pipeline: RequestPipeline, state: RequestState, spec: OperationSpec, input: Any
) -> None:
    """Open a subscription and send its items until it ends or the client disconnects.

    Raises:
        CallError: If it failed before anything was sent.
        ClientDisconnectedError: If the client has disconnected.
    """
    # The stream watches its client itself.
    state.timeout.stop()
    resuming = Resuming(spec)
    input = resuming.resume(input, state.headers)  # noqa: A001 - the contract's word
    pipeline.take_slot(state, is_stream=True)
    response = _Response(pipeline, state, resuming)
    subscription = pipeline.front.registry.subscribe(spec.id, input, state.context)
    with pipeline.front.credentials.watching(state.credential, response.revoke):
        await response.run(subscription)


class _Response:
    """One response that is being sent."""

    def __init__(self, pipeline: RequestPipeline, state: RequestState, resuming: Resuming) -> None:
        self._pipeline = pipeline
        self._state = state
        self._send = state.send
        self._resuming = resuming
        self._started = False
        self._silent = True
        """Whether nothing was sent since the last heartbeat."""
        self._is_revoked = False
        self._pump_task: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()

    def revoke(self) -> None:
        """End the stream: the caller's credential is no longer valid."""
        self._is_revoked = True
        if self._pump_task is not None:
            self._pump_task.cancel()

    async def run(self, items: Any) -> None:
        pump = self._pump_task = asyncio.create_task(self._pump(items))
        gone = asyncio.create_task(wait_for_disconnect(self._state.receive))
        try:
            if await _both_run(pump, gone, _AT_ONCE):
                await self._begin()
            while await _both_run(pump, gone, self._pipeline.front.heartbeat):
                if self._silent:
                    await self._write(_ALIVE)
                self._silent = True
        finally:
            gone.cancel()
            pump.cancel()
            await asyncio.wait({pump}, timeout=_FAREWELL)
            if not pump.done():
                self._pipeline.front.registry.keep(pump)
        if self._is_revoked:
            error = CallError(ErrorCode.ACCESS_DENIED, "The credential is no longer valid")
            if not self._started:
                raise error
            await self._write(self._failure(error), last=True)
            return
        if pump.cancelled() or not pump.done():
            raise ClientDisconnectedError
        pump.result()

    async def _pump(self, items: Any) -> None:
        try:
            async with aclosing(items):
                async for envelope in items:
                    await self._write(self._event(envelope))
                    # A handler that never waits would block the event loop.
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
        """Return the event of one item. JSON has no line breaks, so it is one line of data."""
        data = envelope.raise_for_error().data
        text = b"data: " + msgspec.json.encode(data) + b"\n\n"
        event_id = self._resuming.event_id(data)
        return text if event_id is None else b"id: " + event_id + b"\n" + text

    def _failure(self, error: CallError) -> bytes:
        wire = public_wire(
            error, self._state.context.request_id, expose=self._pipeline.front.expose_errors
        )
        return b"event: error\ndata: " + msgspec.json.encode(wire) + b"\n\n"

    async def _begin(self) -> None:
        async with self._turn:
            await self._start()

    async def _start(self) -> None:
        if self._started:
            return
        self._started = True
        request_id = self._state.scope[REQUEST_ID] = self._state.context.request_id
        await self._send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [*_HEADERS, (b"x-request-id", request_id.encode())],
            }
        )
        # Some servers send the head with the first bytes only.
        await self._send({"type": "http.response.body", "body": b"", "more_body": True})

    async def _write(self, text: bytes, *, last: bool = False) -> None:
        self._silent = False
        async with self._turn:
            await self._start()
            await self._pipeline.send_part(self._state, text)
            if last:
                await self._send({"type": "http.response.body", "body": b""})


async def _both_run(pump: "asyncio.Task[None]", gone: "asyncio.Task[None]", seconds: float) -> bool:
    """Return whether both still run after some time; False as soon as one has ended."""
    done, _ = await asyncio.wait({pump, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    return not done
