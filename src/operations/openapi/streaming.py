"""Subscriptions to event streams: one envelope per event, across reconnections.

A stream ends when the server closes it. If the server sends event ids, the stream can be resumed: after a lost
connection, and after a close, the client sends one more request with `Last-Event-ID`. The stream has ended if the
server then responds with 204, sends no new events or, after a close, repeats known events. After a lost connection,
known events are skipped.
"""

import asyncio
from base64 import b64decode
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from secrets import SystemRandom
from typing import Any

from msgspec.structs import replace

from operations._json import object_of
from operations.context import OperationContext
from operations.envelopes import (
    DescribedEnvelope,
    HTTPResponseMeta,
    ResponseEnvelope,
    read_changes,
)
from operations.errors import CallError, ErrorCode
from operations.openapi.client import ServiceClient
from operations.openapi.reading import media
from operations.openapi.reading.expected import EMPTY, ResponseData
from operations.openapi.responses import (
    DONE,
    EventStreamDecoder,
    JSONLinesDecoder,
    ServerSentEvent,
    WholeResponse,
    event_data,
    item_data,
    meta_of,
    read_data,
    read_in_time,
)
from operations.openapi.transport import REPEATABLE, Draft, HTTPResponse

MAX_PAUSE = 30.0
"""The longest pause before reconnecting, in seconds, even if the server asks for more."""

_PAUSE = 0.25
_REMEMBERED = 1000
_SHOWN = 1000
"""The largest number of characters of an incomplete item in an error."""

_SIZED = frozenset({"content-length", "transfer-encoding"})
"""Headers with which the end of a body is known."""

_RANDOM = SystemRandom()


@dataclass(slots=True)
class EventStream:
    """One subscription."""

    client: ServiceClient
    draft: Draft
    context: OperationContext

    describe: Callable[[int, str], ResponseData]
    """Returns the description of the data of a response, given its status and content type."""

    is_ours: bool
    """Whether the server is an exported registry, which sends `error` and `complete` events, and the meta of an item as
    a comment."""

    _described: ResponseData = field(init=False)
    """The description of the data of the last response."""

    _meta: HTTPResponseMeta = field(init=False)
    """The meta of the last response."""

    _failures: int = 0
    """The number of lost connections since the last event."""

    _has_head: bool = False
    """Whether the server responded to the last request."""

    _last_id: str = ""
    _pause: float = _PAUSE
    _seen: dict[str, None] = field(default_factory=dict[str, None])
    _is_over: bool = False

    async def envelopes(self) -> AsyncGenerator[ResponseEnvelope[Any]]:
        """Yield the events until the stream ends."""
        retries = self.client.config.retries if self.draft.method in REPEATABLE else 0
        closings = self.client.closings
        lost: CallError | None = None
        while True:
            count, was_lost, lost = 0, lost is not None, None
            try:
                async with aclosing(self._connection(was_lost)) as items:
                    async for envelope in items:
                        count += 1
                        yield envelope
            except CallError as error:
                is_first = count == 0 and not was_lost
                if is_first and self._last_id and error.code == ErrorCode.EXECUTION_ERROR:
                    # The stream had already ended before we reconnected, which is not a failure.
                    return
                if not self._may_reconnect(error, count, closings):
                    raise
                lost = error
            self._failures = 1 if count else self._failures + 1
            if self._is_over:
                return
            if lost is not None:
                # A request without a response has been repeated already.
                if self._failures > retries or not self._has_head:
                    raise lost
            elif not self._last_id or not retries or count == 0:
                return
            pause = min(self._pause * 2 ** (self._failures - 1), MAX_PAUSE)
            await asyncio.sleep(pause * _RANDOM.uniform(0.5, 1))

    def _may_reconnect(self, error: CallError, count: int, closings: int) -> bool:
        """Return whether a new request continues the stream, instead of restarting it or reopening a closed one."""
        continues = count == 0 or bool(self._last_id)
        is_open = closings == self.client.closings
        return error.code == ErrorCode.UNAVAILABLE and continues and is_open

    async def _connection(self, was_lost: bool) -> AsyncGenerator[ResponseEnvelope[Any]]:
        """Yield the items of one response; after a lost connection, only new events."""
        draft = self.draft
        if self._last_id:
            draft.headers["Last-Event-ID"] = self._last_id
        self._has_head = False
        request = self.client.stream(draft, self.context, self._failures)
        async with request as (response, chunks, secrets):
            self._has_head = True
            kind = response.headers.get("content-type", "")
            if response.status in EMPTY:
                self._is_over = True
                return
            self._described = self.describe(response.status, kind)
            self._meta = meta_of(response, secrets)
            is_resumable = media.essence(kind) == media.EVENT_STREAM
            if is_resumable:
                items = self._events(chunks, was_lost=was_lost)
            elif media.is_sequence(kind):
                items = self._lines(chunks)
            else:
                items = self._single(response)
            async with aclosing(items):
                async for item in items:
                    yield item
            if not is_resumable:
                self._is_over = True

    async def _lines(self, chunks: AsyncIterator[bytes]) -> AsyncGenerator[ResponseEnvelope[Any]]:
        """Yield the items of a response with one JSON value per line.

        Raises:
            CallError: `EXECUTION_ERROR` if the last item is cut off.
        """
        described, meta = self._described, self._meta
        lines = JSONLinesDecoder(max_event_bytes=self.client.config.max_event_bytes)
        async for chunk in chunks:
            for data, is_raw in map(_line, lines.feed(chunk)):
                if is_raw and data == DONE:
                    return
                yield DescribedEnvelope(data, meta, described.schema, is_raw)
        for data, is_raw in map(_line, lines.finish()):
            if is_raw and data == DONE:
                return
            if is_raw:
                is_cut = data.startswith(("{", "[", '"')) or not described.takes_text(data)
            else:
                # Without a length, nothing shows that the last digits are missing.
                is_cut = type(data) in {int, float} and _SIZED.isdisjoint(meta.headers)
            if is_cut:
                message = "The stream ended within an item, which is therefore incomplete."
                raise CallError(ErrorCode.EXECUTION_ERROR, message, {"item": str(data)[:_SHOWN]})
            yield DescribedEnvelope(data, meta, described.schema, is_raw)

    async def _single(self, response: HTTPResponse) -> AsyncGenerator[ResponseEnvelope[Any]]:
        """Yield the data of a response that is not a stream."""
        config = self.client.config
        content = await read_in_time(response, config.max_response_bytes, config.timeout)
        whole = WholeResponse("", response.status, response.headers, content)
        data = read_data(whole, self._described, config.max_response_values)
        yield DescribedEnvelope(data, self._meta, self._described.schema)

    async def _events(
        self, chunks: AsyncIterator[bytes], *, was_lost: bool
    ) -> AsyncGenerator[ResponseEnvelope[Any]]:
        """Yield the events of one response."""
        # Use a new decoder, so that it contains only ids from this response.
        decoder = EventStreamDecoder(max_event_bytes=self.client.config.max_event_bytes)
        is_resumed, is_behind = bool(self._last_id), False
        async for chunk in chunks:
            for event in decoder.feed(chunk):
                if event.data == DONE or (self.is_ours and event.event == "complete"):
                    self._is_over = True
                    return
                if event.last_event_id:
                    if is_resumed and self._is_repeated(event, is_behind):
                        if not was_lost:
                            self._is_over = True
                            return
                        is_behind = event.last_event_id != self._last_id
                        continue
                    is_resumed = False
                    self._remember(event.last_event_id)
                if self.is_ours and event.event == "error":
                    raise CallError.from_wire(object_of(event_data(event.data)))
                # An event without data is a heartbeat.
                if event.data or self._described.takes_text(""):
                    yield self._envelope(event)
            if decoder.retry is not None:
                self._pause = min(decoder.retry / 1000, MAX_PAUSE)
        if is_resumed and is_behind:
            raise CallError(ErrorCode.UNAVAILABLE, "The server did not resume the stream.")

    def _envelope(self, event: ServerSentEvent) -> ResponseEnvelope[Any]:
        """Return the envelope of one event."""
        described, meta = self._described, self._meta
        data = event_data(event.data) if self.is_ours else item_data(event.data, described)
        own = object_of(event_data(event.meta)) if self.is_ours and event.meta else {}
        if own.get("encoding") == "base64" and isinstance(data, str):
            data = b64decode(data)
        marks = {"sse-event": event.event, "last-event-id": self._last_id}
        envelope = DescribedEnvelope[Any](
            data,
            replace(meta, headers={**meta.headers, **marks}, sequence=event.last_event_id or None),
            described.schema,
            is_raw=data is event.data and not described.takes_text(event.data),
        )
        return read_changes(envelope, own) if own else envelope

    def _is_repeated(self, event: ServerSentEvent, is_behind: bool) -> bool:
        """Return whether a resumed response repeats a known event; errors of exported registries count as new."""
        if self.is_ours and event.event == "error":
            return False
        is_forgotten = is_behind and len(self._seen) >= _REMEMBERED
        return is_forgotten or event.last_event_id in self._seen

    def _remember(self, event_id: str) -> None:
        self._last_id = event_id
        self._seen[event_id] = None
        if len(self._seen) > _REMEMBERED:
            # A server that restarts repeats the first ids, a server with overlap the last ids, so the ids in between
            # can be dropped.
            del self._seen[list(self._seen)[_REMEMBERED // 2]]


def _line(line: bytes) -> tuple[Any, bool]:
    """Return the data of a line, and whether it is text because it is not JSON."""
    data = event_data(line, "A line")
    return (line.decode(errors="replace").strip(), True) if data is line else (data, False)
