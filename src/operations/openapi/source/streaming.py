"""Streams of items: decode server-sent events and JSON Lines, and subscribe to them across reconnections.

A stream ends when the server closes it. If the server sends event ids, the stream can be resumed: after a lost
connection, and after a close, the client sends one more request with `Last-Event-ID`. The stream has ended if the
server then responds with 204, sends no new events or, after a close, repeats known events. After a lost connection,
known events are skipped.

Rule 1: an event has at most `max_event_bytes`.
Rule 2: the events of a stream do not depend on the chunks in which its bytes arrive (WHATWG HTML).
"""

import asyncio
from base64 import b64decode
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from secrets import SystemRandom
from typing import Any

from msgspec.structs import replace

from operations.base.errors import CallError, ErrorCode
from operations.base.json.values import MAX_REQUEST_VALUES, Path, count_values, object_of
from operations.contract.context import OperationContext
from operations.contract.envelopes import (
    DescribedEnvelope,
    HTTPResponseMeta,
    ResponseEnvelope,
    add_changes,
    read_changes,
)
from operations.io.http.client import REPEATABLE, Draft, HTTPResponse, merged_headers
from operations.io.lines import JSONLinesDecoder
from operations.io.sse import EventStreamDecoder, ServerSentEvent
from operations.openapi.reading import media
from operations.openapi.reading.expected import EMPTY, ResponseData
from operations.openapi.source.client import ServiceClient
from operations.openapi.source.decoding import JSONReader
from operations.openapi.source.reflected import without_reflected
from operations.openapi.source.responses import WholeResponse, meta_of, read_data, read_in_time
from operations.schema import Schema

MAX_PAUSE = 30.0
"""The longest pause before reconnecting, in seconds, even if the server asks for more."""

_PAUSE = 0.25
_PIECE = 4096
"""Bytes of a stream that are decoded at a time, so that thousands of tiny items do not block the event loop."""

_REMEMBERED = 1000
_SHOWN = 1000
"""The largest number of characters of an incomplete item in an error."""

_SIZED = frozenset({"content-length", "transfer-encoding"})
"""Headers with which the end of a body is known."""

_RANDOM = SystemRandom()
"""What each record of `json-seq` begins with (RFC 7464)."""
DONE = "[DONE]"
"""The data that many APIs send at the end of a stream."""


def read_all(response: WholeResponse, described: ResponseData, reader: JSONReader) -> Any:
    """Return the data of a response that has arrived as a whole: the items of a stream as a list.

    Raises:
        CallError: As `read_data`.
    """
    content, content_type = response.content, response.headers.get("content-type", "")
    if not (described.is_stream and media.is_stream(content_type)) or response.status in EMPTY:
        return read_data(response, described, reader)
    if not media.is_sequence(content_type):
        events = EventStreamDecoder(max_event_bytes=len(content) + 1).feed(content)
        texts = [event.data for event in events if event.data != DONE]
        return [item_data(text, described, reader, (n, ())) for n, text in enumerate(texts)]
    items: list[Any] = []
    for line in JSONLinesDecoder(max_event_bytes=len(content)).feed(content + b"\n"):
        if line.strip() == DONE.encode():
            break
        items.append(reader.read(line, content_type, (len(items), ())))
        reader.max_values -= count_values(items[-1], reader.max_values)
    return items


def item_data(text: str, described: ResponseData, reader: JSONReader, path: Path = ()) -> Any:
    """Return the data of an event: its JSON, or `text` itself if a string is declared or it is not JSON."""
    is_text = described.has_text_items and not described.quotes_text(text)
    known = len(reader.changes)
    data = text if is_text else reader.read_event(text, path=path)
    if described.keeps_text(data):
        del reader.changes[known:]
        return text
    return data


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

    _was_lost: bool = False
    """Whether the connection before the current one was lost."""

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
            count, self._was_lost, lost = 0, lost is not None, None
            try:
                async with aclosing(self._connection()) as items:
                    async for envelope in items:
                        count += 1
                        yield envelope
            except CallError as error:
                is_first = count == 0 and not self._was_lost
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

    async def _connection(self) -> AsyncGenerator[ResponseEnvelope[Any]]:
        """Yield the items of one response; after a lost connection, only new events."""
        draft = self.draft
        if self._last_id:
            draft.headers = merged_headers(draft.headers, {"Last-Event-ID": self._last_id})
        self._has_head = False
        request = self.client.stream(draft, self.context, self._failures)
        async with request as (response, chunks, secrets), aclosing(_pieces(chunks)) as pieces:
            self._has_head = True
            kind = response.headers.get("content-type", "")
            if response.status in EMPTY:
                self._is_over = True
                return
            self._described = self.describe(response.status, kind)
            self._meta = meta_of(response, secrets)
            is_resumable = media.essence(kind) == media.EVENT_STREAM
            if is_resumable:
                items = self._events(pieces)
            elif media.is_sequence(kind):
                items = self._lines(pieces)
            else:
                items = self._single(response)
            async with aclosing(items):
                async for item in items:
                    data = without_reflected(item.data, secrets)
                    yield item if data is item.data else replace(item, data=data)
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
            for line in lines.feed(chunk):
                data, is_raw, reader = self._line(line)
                if is_raw and data == DONE:
                    return
                yield _described(data, meta, described.schema, reader, is_raw=is_raw)
        for line in lines.finish():
            data, is_raw, reader = self._line(line)
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
            yield _described(data, meta, described.schema, reader, is_raw=is_raw)

    def _line(self, line: bytes) -> tuple[Any, bool, JSONReader]:
        """Return the data of a line, whether it is text because it is not JSON, and its reader."""
        reader = self._reader()
        data = reader.read_event(line, "A line")
        if data is line:
            return line.decode(errors="replace").strip(), True, reader
        return data, False, reader

    def _reader(self) -> JSONReader:
        """Return a reader for one event."""
        return JSONReader(MAX_REQUEST_VALUES, self.client.config.max_response_depth)

    async def _single(self, response: HTTPResponse) -> AsyncGenerator[ResponseEnvelope[Any]]:
        """Yield the data of a response that is not a stream."""
        config = self.client.config
        content = await read_in_time(response, config)
        whole = WholeResponse("", response.status, response.headers, content)
        reader = JSONReader(config.response_values, config.max_response_depth)
        data = await asyncio.to_thread(read_data, whole, self._described, reader)
        yield _described(data, self._meta, self._described.schema, reader)

    async def _events(self, chunks: AsyncIterator[bytes]) -> AsyncGenerator[ResponseEnvelope[Any]]:
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
                        if not self._was_lost:
                            self._is_over = True
                            return
                        is_behind = event.last_event_id != self._last_id
                        continue
                    is_resumed = False
                    self._remember(event.last_event_id)
                if self.is_ours and event.event == "error":
                    raise CallError.from_wire(object_of(self._reader().read_event(event.data)))
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
        reader = self._reader()
        ours = reader.read_event if self.is_ours else None
        data = item_data(event.data, described, reader) if ours is None else ours(event.data)
        own = object_of(ours(event.meta)) if ours is not None and event.meta else {}
        if own.get("encoding") == "base64" and isinstance(data, str):
            data = b64decode(data)
        marks = {"sse-event": event.event, "last-event-id": self._last_id}
        envelope = _described(
            data,
            replace(meta, headers={**meta.headers, **marks}, sequence=event.last_event_id or None),
            described.schema,
            reader,
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


async def _pieces(chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
    """Yield chunks in pieces that cannot contain many items, and let other tasks run between them."""
    async for chunk in chunks:
        for start in range(0, len(chunk), _PIECE):
            if start:
                await asyncio.sleep(0)
            yield chunk[start : start + _PIECE]


def _described(
    data: Any,
    meta: HTTPResponseMeta,
    schema: Schema | None,
    reader: JSONReader,
    *,
    is_raw: bool = False,
) -> ResponseEnvelope[Any]:
    """Return the envelope of data that `reader` has decoded."""
    if reader.changes:
        meta = add_changes(meta, reader.changes)
    return DescribedEnvelope(data, meta, schema, is_raw, is_clean=reader.is_deep)
