"""Subscriptions as server-sent events.

    data: <one item's data as JSON>          for every item
    event: complete / data: {}               at the end
    event: error / data: {code, message, details}

Rule 1: a call that is refused at once has its status; once items may flow, an error is an event.
Rule 2: the handler runs in one task from beginning to end, and never ahead of what the client takes.
Rule 3: when the client leaves, the handler ends.
"""

import asyncio
from contextlib import aclosing
from typing import Any

import msgspec

from operations.envelopes import ResponseEnvelope
from operations.errors import CallError, map_error
from operations.server.edge import REQUEST_ID, Edge, Visit
from operations.server.faults import ClientLeftError, Header
from operations.server.replies import SAFE, error_wire
from operations.server.resuming import Resuming
from operations.specs import OperationSpec

_AT_ONCE = 0.05
"""Seconds in which a failure still counts as a refusal; after that the response begins."""

_FAREWELL = 1.0
"""Seconds a handler has to end after its client left."""

_HEADERS: tuple[Header, ...] = (
    (b"content-type", b"text/event-stream"),
    # Proxies must pass events on as they come.
    (b"x-accel-buffering", b"no"),
    *SAFE,
)
_COMPLETE = b"event: complete\ndata: {}\n\n"
_ALIVE = b": alive\n\n"


async def serve_events(edge: Edge, visit: Visit, spec: OperationSpec, input: Any) -> None:
    """Open a subscription and send its items until it ends or the client leaves.

    Raises:
        CallError: If it failed before anything was sent.
        ClientLeftError: If the client is gone.
    """
    # The stream watches its client itself.
    visit.watch.stop()
    resuming = Resuming(spec)
    input = resuming.resume(input, visit.headers)  # noqa: A001 - the contract's word
    with edge.streams.enter(visit.caller):
        response = _Response(edge, visit, resuming)
        subscription = edge.registry.subscribe(spec.id, input, visit.context)
        await response.run(subscription)


class _Response:
    """One response on its way."""

    def __init__(self, edge: Edge, visit: Visit, resuming: Resuming) -> None:
        self._edge = edge
        self._visit = visit
        self._send = visit.send
        self._resuming = resuming
        self._started = False
        self._silent = True
        """Whether nothing was sent since the last look."""
        self._turn = asyncio.Lock()

    async def run(self, items: Any) -> None:
        pump = asyncio.create_task(self._pump(items))
        gone = asyncio.create_task(self._gone())
        try:
            if await _both_run(pump, gone, _AT_ONCE):
                await self._begin()
            while await _both_run(pump, gone, self._edge.settings.heartbeat):
                if self._silent:
                    await self._write(_ALIVE)
                self._silent = True
        finally:
            gone.cancel()
            pump.cancel()
            await asyncio.wait({pump}, timeout=_FAREWELL)
            if not pump.done():
                self._edge.registry.keep(pump)
        if pump.cancelled() or not pump.done():
            raise ClientLeftError
        pump.result()

    async def _gone(self) -> None:
        while (await self._visit.receive())["type"] != "http.disconnect":
            pass

    async def _pump(self, items: Any) -> None:
        try:
            async with aclosing(items):
                async for envelope in items:
                    await self._write(self._event(envelope))
                    # A handler that never waits would keep everybody else from working, and us from noticing
                    # that the client left.
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
        """One item. JSON has no line breaks, so that it is one line of data."""
        data = envelope.raise_for_error().data
        text = b"data: " + msgspec.json.encode(data) + b"\n\n"
        event_id = self._resuming.event_id(data)
        return text if event_id is None else b"id: " + event_id + b"\n" + text

    def _failure(self, error: CallError) -> bytes:
        wire = error_wire(
            error, self._visit.context.request_id, exposed=self._edge.settings.expose_errors
        )
        return b"event: error\ndata: " + msgspec.json.encode(wire) + b"\n\n"

    async def _begin(self) -> None:
        async with self._turn:
            await self._start()

    async def _start(self) -> None:
        if self._started:
            return
        self._started = True
        request_id = self._visit.scope[REQUEST_ID] = self._visit.context.request_id
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
            await self._send({"type": "http.response.body", "body": text, "more_body": not last})


async def _both_run(pump: "asyncio.Task[None]", gone: "asyncio.Task[None]", seconds: float) -> bool:
    """Whether both still run after so long; False as soon as one does not."""
    done, _ = await asyncio.wait({pump, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    return not done
