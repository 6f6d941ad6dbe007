"""Read a response: remove its content coding, decode events, read data by media type, or build the error.

Rule 1: memory stays below the limit, also for compressed responses: decompression runs in bounded steps, and an event
        has at most `max_event_bytes`.
Rule 2: the events of a stream do not depend on the chunks in which its bytes arrive (WHATWG HTML).
"""

import asyncio
import binascii
import codecs
import re
import zlib
from base64 import b64encode
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import aclosing, suppress
from functools import lru_cache
from http.client import responses as PHRASES  # noqa: N812 - a table
from time import monotonic
from typing import Any

import msgspec

from operations._decoding import decode_json
from operations._json import (
    MAX_REQUEST_VALUES,
    MAX_RESPONSE_VALUES,
    JSONLimitError,
    JSONValueError,
    count_values,
)
from operations.envelopes import HTTPResponseMeta
from operations.errors import CallError, ErrorCode, timed_out
from operations.front.public_errors import Redactor, parts_of
from operations.openapi.files import from_base64
from operations.openapi.reading import media
from operations.openapi.reading.expected import EMPTY, ResponseData
from operations.openapi.reading.files import MARKS
from operations.openapi.transport import HTTPResponse
from operations.types import JSONObject

_LINE_END = re.compile(b"\r\n|\n|\r")
_DIGITS = re.compile(b"[0-9]+")

_SEPARATOR = b"\x1e"
"""What each record of `json-seq` begins with (RFC 7464)."""

_QUOTED = re.compile(rb'"(?:[^"\\]|\\.)*+"?')
_DECLARED = re.compile(rb"""<\?xml\s[^>]{0,100}?\sencoding\s*=\s*["']([A-Za-z0-9._-]+)["']""")
"""The encoding that an XML document declares."""

_OPENING = re.compile(rb"[{\[]")
_CLOSING = re.compile(rb"[}\]]")


def over_limit(what: str, limit: int) -> CallError:
    """Return the error for something that exceeds a limit in bytes."""
    return CallError(ErrorCode.RESOURCE_EXHAUSTED, f"{what} is larger than {limit} bytes.")


_META = b"operations-meta "


class ServerSentEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One dispatched event."""

    event: str = "message"

    data: str = ""

    last_event_id: str = ""
    """The id that a reconnecting client sends as `Last-Event-ID`; it stays valid until another event sets it."""

    meta: str = ""
    """The meta of an item as JSON, which an exported registry sends in a comment."""


class EventStreamDecoder:
    """Decodes the bytes of one `text/event-stream` response to events.

    An event without a final blank line at the end of the stream is dropped, as the standard requires.

    Attributes:
        last_event_id: The id of the last finished block, to send when reconnecting.
        retry: The reconnection time that the server requested, in milliseconds; None if it has not.
    """

    def __init__(self, *, last_event_id: str = "", max_event_bytes: int = 1 << 20) -> None:
        self.last_event_id = last_event_id
        self.retry: int | None = None
        self._max = max_event_bytes
        self._at_start = True
        self._after_cr = False
        self._partial = bytearray()
        self._data = bytearray()
        """The data of the current block; every line ends with a line feed."""
        self._event = ""
        self._meta = ""
        self._id = last_event_id

    def feed(self, chunk: bytes) -> list[ServerSentEvent]:
        """Process the next bytes; return the events that they complete.

        Raises:
            CallError: With code `RESOURCE_EXHAUSTED`, if one event is larger than allowed.
        """
        # A line feed at the start of a chunk belongs to the carriage return at the end of the previous chunk.
        if self._after_cr and chunk:
            self._after_cr = False
            chunk = chunk.removeprefix(b"\n")
        if chunk.endswith(b"\r"):
            self._after_cr = True
        events: list[ServerSentEvent] = []
        start = 0
        for end in _LINE_END.finditer(chunk):
            line = chunk[start : end.start()]
            start = end.end()
            if self._partial:
                line = bytes(self._partial + line)
                self._partial.clear()
            self._enforce_size(line)
            self._take(line, events)
        self._partial += chunk[start:]
        self._enforce_size(self._partial)
        return events

    def _enforce_size(self, line: bytes | bytearray) -> None:
        if len(line) + len(self._data) > self._max:
            raise over_limit("One event", self._max)

    def _take(self, line: bytes, events: list[ServerSentEvent]) -> None:
        """Process one complete line."""
        if self._at_start:
            self._at_start = False
            line = line.removeprefix(codecs.BOM_UTF8)
        if not line:
            self._dispatch(events)
            return
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data += value
            self._data += b"\n"
        elif not name:
            if value.startswith(_META):
                self._meta = _utf8(value.removeprefix(_META))
        elif name == b"event":
            self._event = _utf8(value)
        elif name == b"id":
            if b"\0" not in value:
                self._id = _utf8(value)
        elif name == b"retry" and _DIGITS.fullmatch(value):
            # Limit the digits before the conversion: such a number would be too long to wait for.
            self.retry = int(value) if len(value) < 10 else 10**9

    def _dispatch(self, events: list[ServerSentEvent]) -> None:
        """End a block at a blank line; it is an event if it has data."""
        self.last_event_id = self._id
        if self._data:
            events.append(
                ServerSentEvent(
                    event=self._event or "message",
                    data=_utf8(self._data[:-1]),
                    last_event_id=self._id,
                    meta=self._meta,
                )
            )
            self._data.clear()
        self._event = self._meta = ""


def _utf8(value: bytes | bytearray) -> str:
    return value.decode(errors="replace")


class JSONLinesDecoder:
    """Splits the bytes of a response into lines of JSON (JSON Lines, NDJSON, `json-seq`).

    Rules 1 and 2 apply here as well. The last line needs no line end. A record of `json-seq`, which begins with a
    separator, may have several lines; it ends with the line that closes its last bracket, or before the next separator.
    """

    def __init__(self, *, max_event_bytes: int = 1 << 20) -> None:
        self._max = max_event_bytes
        self._at_start = True
        self._rest = bytearray()
        self._in_record = False
        self._line = self._depth = 0
        """Where the last line of a record begins, and the number of open brackets before it."""

    def feed(self, chunk: bytes) -> list[bytes]:
        """Process the next bytes; return the lines that they complete.

        Raises:
            CallError: With code `RESOURCE_EXHAUSTED`, if one line is larger than allowed.
        """
        lines: list[bytes] = []
        for index, part in enumerate(chunk.split(_SEPARATOR)):
            if index:
                self._end(lines)
                self._in_record = True
            for number, piece in enumerate(part.split(b"\n")):
                if number:
                    self._end_line(lines)
                self._rest += piece
                if len(self._rest) > self._max:
                    raise over_limit("One line", self._max)
        return [line for line in lines if line.strip()]

    def finish(self) -> list[bytes]:
        """Return the last line, if it has no line end."""
        return self.feed(_SEPARATOR)

    def _end_line(self, lines: list[bytes]) -> None:
        """Process a line feed: the end of a line, or white space within a record."""
        if self._in_record:
            # No text of JSON contains a line feed.
            line = _QUOTED.sub(b"", self._rest[self._line :])
            self._depth += len(_OPENING.findall(line)) - len(_CLOSING.findall(line))
            if self._depth > 0:
                self._rest += b"\n"
                self._line = len(self._rest)
                return
        self._end(lines)

    def _end(self, lines: list[bytes]) -> None:
        mark, self._at_start = codecs.BOM_UTF8 if self._at_start else b"", False
        lines.append(bytes(self._rest).removeprefix(mark))
        self._rest.clear()
        self._in_record, self._line, self._depth = False, 0, 0


_STEP = 1 << 16
_TURN = 1 << 20

DONE = "[DONE]"
"""The data that many APIs send at the end of a stream."""

_WITHHELD = frozenset({"set-cookie", "set-cookie2", "authorization", "proxy-authorization"})
"""Response headers that are credentials; they are not returned to callers."""

_NO_CODINGS = frozenset({"", "identity", "none", "binary", "utf-8", "aws-chunked"})
"""Values of `Content-Encoding` that do not change the content; some servers send a charset or a transfer coding."""

_SUPERSETS = {
    "gb2312": "gb18030", "gbk": "gb18030", "shift_jis": "cp932", "euc_kr": "cp949", "big5": "big5hkscs",
}  # fmt: skip
"""Charsets whose names servers and browsers use for larger ones (WHATWG Encoding)."""

_WIDTHS = {
    b"\0\0\0\1": "utf-32-be",
    b"\1\0\0\0": "utf-32-le",
    b"\0\1\0\1": "utf-16-be",
    b"\1\0\1\0": "utf-16-le",
}


async def decoded(response: HTTPResponse, *, max_bytes: int | None = None) -> AsyncGenerator[bytes]:
    """Yield the body of a response as it arrives, without its content coding.

    Args:
        response: The response.
        max_bytes: The largest total number of decoded bytes; None for an endless stream.

    Raises:
        CallError: `RESOURCE_EXHAUSTED` if `max_bytes` is exceeded, `EXECUTION_ERROR` for an unknown or invalid coding,
            `UNAVAILABLE` if a stream is cut off.
    """
    listed, chunks = response.headers.get("content-encoding", "").lower(), response.chunks()
    codings = [name for each in listed.split(",") if (name := each.strip()) not in _NO_CODINGS]
    decoder = _Decompressor(", ".join(codings)) if codings else None
    total = turn = 0
    async with aclosing(chunks):
        async for chunk in chunks:
            if not chunk:
                continue
            for piece in decoder.steps(chunk) if decoder else (chunk,):
                total += len(piece)
                if max_bytes is not None and total > max_bytes:
                    raise over_limit("The response", max_bytes)
                yield piece
                if decoder and total > turn:
                    # Compressed data may expand greatly: let other tasks run in between.
                    turn = total + _TURN
                    await asyncio.sleep(0)
    if decoder and not decoder.is_whole:
        # A stream that is cut off can be continued.
        code = ErrorCode.UNAVAILABLE if max_bytes is None else ErrorCode.EXECUTION_ERROR
        raise CallError(code, "The response's compressed content is incomplete.")


class _Decompressor:
    """Decodes one content coding step by step."""

    def __init__(self, name: str) -> None:
        self._is_gzip = name in {"gzip", "x-gzip"}
        if not self._is_gzip and name != "deflate":
            raise CallError(
                ErrorCode.EXECUTION_ERROR,
                f"The response has the content coding {name!r}, which was not requested.",
            )
        self._decoder = zlib.decompressobj(31 if self._is_gzip else 15)
        self._raw_fallback = not self._is_gzip
        self._is_fresh = True

    @property
    def is_whole(self) -> bool:
        """Whether the compressed data is complete, or no data arrived."""
        return self._is_fresh or self._decoder.eof

    def steps(self, chunk: bytes) -> Generator[bytes]:
        waiting = chunk
        while True:
            if self._decoder.eof:
                if not self._is_gzip or not waiting.strip(b"\0"):
                    # Bytes after the end are padding.
                    return
                # A gzip file may consist of several concatenated members.
                self._decoder = zlib.decompressobj(31)
            self._is_fresh = False
            try:
                piece = self._decoder.decompress(waiting, _STEP)
            except zlib.error:
                if not self._raw_fallback:
                    raise CallError(
                        ErrorCode.EXECUTION_ERROR, "The content coding of the response is invalid."
                    ) from None
                # "deflate" means zlib, but some servers send raw deflate.
                self._raw_fallback = False
                self._decoder = zlib.decompressobj(-15)
                continue
            self._raw_fallback = False
            if piece:
                yield piece
            waiting = self._decoder.unconsumed_tail or self._decoder.unused_data
            # After a full step, output may remain even if all input was consumed.
            if not waiting and (self._decoder.eof or len(piece) < _STEP):
                return


async def read_whole(response: HTTPResponse, limit: int) -> bytes:
    """Return the body of a response without its content coding.

    Raises:
        CallError: As `decoded`; also before any byte is read, if the response declares more than `limit` bytes.
    """
    if not response.headers.get("content-encoding"):
        buffered: Callable[[], bytes | None] | None = getattr(response, "buffered", None)
        content = None if buffered is None else buffered()
        length = response.headers.get("content-length", "")
        size = int(length) if content is None and length.isdigit() else len(content or b"")
        if size > limit:
            raise over_limit("The response", limit)
        if content is not None:
            return content
    # Not a list, because many small pieces would take several times their size.
    body = bytearray()
    async with aclosing(decoded(response, max_bytes=limit)) as chunks:
        async for piece in chunks:
            body += piece
    return bytes(body)


async def read_in_time(response: HTTPResponse, limit: int, seconds: float) -> bytes:
    """As `read_whole`, within a time limit, for responses for which the transport does not enforce one.

    Raises:
        CallError: As `read_whole`; `TIMEOUT` if the response does not end in time.
    """
    try:
        async with asyncio.timeout(seconds):
            return await read_whole(response, limit)
    except TimeoutError:
        raise timed_out("The response", seconds, "end") from None


class WholeResponse(msgspec.Struct, frozen=True, gc=False):
    """A successful response with its whole body."""

    url: str
    status: int
    headers: Mapping[str, str]
    content: bytes

    secrets: list[str] = []
    """The credentials of the request, which errors must not contain."""

    saved: int | None = None
    """The size of the body if it was saved to a file; `content` is then empty."""


def shown_headers(headers: Mapping[str, str], secrets: list[str]) -> dict[str, str]:
    """Return the headers that a caller may see, without the credentials of the request."""
    shown = {name: value for name, value in headers.items() if name not in _WITHHELD}
    if secrets:
        # Many servers repeat the query, with its key, in `Link`.
        redactor = _redactor(*secrets)
        return {name: redactor.redact(text) for name, text in shown.items()}
    return shown


def meta_of(response: HTTPResponse | WholeResponse, secrets: list[str]) -> HTTPResponseMeta:
    """Return the part of a response that a caller may see beside the data, without `secrets` of the request."""
    headers = shown_headers(response.headers, secrets)
    return HTTPResponseMeta(
        status_code=response.status,
        headers=headers,
        content_type=headers.get("content-type", ""),
    )


def read_data(
    response: WholeResponse, described: ResponseData, max_values: int = MAX_RESPONSE_VALUES
) -> Any:
    """Return the data of a successful response: JSON, text, bytes, a list of items, or None if it is empty.

    Args:
        response: The response.
        described: What the document declares: JSON, also with another content type; a stream, whose items become a
            list; or text, so that an empty body is empty text.
        max_values: The largest number of JSON values.

    Raises:
        CallError: `EXECUTION_ERROR` if the content type or the document declares JSON and the body is not JSON;
            `RESOURCE_EXHAUSTED` if it has too many values.
    """
    content, content_type = response.content, response.headers.get("content-type", "")
    if response.status in EMPTY or not (
        content or (described.is_stream and media.is_stream(content_type))
    ):
        return "" if described.is_text else None
    if media.is_json(content_type):
        return _json(content, content_type, max_values)
    if described.is_json and (media.is_text(content_type) or media.says_nothing(content_type)):
        try:
            data = _json(content, content_type, max_values)
        except CallError as error:
            if error.code == ErrorCode.RESOURCE_EXHAUSTED or not (
                media.says_nothing(content_type)
                or described.replaces_json(_text(content, content_type), content_type)
            ):
                raise
        else:
            # A text such as `1.10` is not a number if the document declares a string.
            if not (media.is_text(content_type) and described.keeps_text(data)):
                return data
    if described.is_stream and media.is_sequence(content_type):
        items: list[Any] = []
        for line in JSONLinesDecoder(max_event_bytes=len(content)).feed(content + b"\n"):
            if line.strip() == DONE.encode():
                break
            items.append(_json(line, content_type, max_values))
            max_values -= count_values(items[-1], max_values)
        return items
    if described.is_stream and media.essence(content_type) == media.EVENT_STREAM:
        decoder = EventStreamDecoder(max_event_bytes=len(content) + 1)
        events = decoder.feed(content)
        return [item_data(event.data, described) for event in events if event.data != DONE]
    if media.is_text(content_type):
        return _text(content, content_type)
    if described.is_base64:
        # Some servers send the bytes themselves.
        with suppress(binascii.Error):
            return from_base64(content)
    return content


def item_data(text: str, described: ResponseData) -> Any:
    """Return the data of an event: its JSON, or `text` itself if a string is declared or it is not JSON."""
    data = text if described.has_text_items else event_data(text)
    return text if described.keeps_text(data) else data


def event_data(text: str | bytes, what: str = "An event") -> Any:
    """Return the JSON that an event or a line contains; `text` itself if it is not JSON.

    Raises:
        CallError: `RESOURCE_EXHAUSTED` if it holds too many values.
    """
    try:
        return decode_json(text, max_values=MAX_REQUEST_VALUES)
    except JSONValueError as error:
        if isinstance(error, JSONLimitError) and error.limit == "values":
            raise CallError(ErrorCode.RESOURCE_EXHAUSTED, f"{what} {error.reason}.") from None
        return text


def _json(content: bytes, content_type: str, max_values: int) -> Any:
    try:
        try:
            return decode_json(content, max_values=max_values)
        except JSONLimitError:
            raise
        except JSONValueError:
            # Rarely, it is JSON in another charset or with a byte order mark.
            text = _text(content, content_type, errors="strict")
            return decode_json(text, max_values=max_values)
    except (JSONValueError, LookupError, UnicodeError) as error:
        if isinstance(error, JSONLimitError) and error.limit == "values":
            raise CallError(ErrorCode.RESOURCE_EXHAUSTED, f"The response {error.reason}.") from None
        kind = media.essence(content_type) or "without a content type"
        reason = error.reason if isinstance(error, JSONValueError) else f"is not JSON: {error}"
        message = f"The response ({kind}) {reason}."
        raise CallError(ErrorCode.EXECUTION_ERROR, message) from None


def _text(content: bytes, content_type: str, errors: str = "replace") -> str:
    for mark, encoding in MARKS:
        if content.startswith(mark):
            return content[len(mark) :].decode(encoding, errors)
    charset = media.parameter_of(content_type, "charset")
    if not charset and media.is_json(content_type):
        # JSON begins with ASCII, so zeros among the first bytes show the encoding.
        charset = _WIDTHS.get(bytes(byte != 0 for byte in content[:4]), "")
    elif not charset and media.is_xml(content_type):
        found = _DECLARED.match(content)
        charset = found[1].decode() if found is not None else ""
    try:
        text = _decoded_text(content, charset or "utf-8")
        # Some codecs of Python that are no charsets produce text that cannot be encoded.
        text.encode()
    except (LookupError, ValueError):
        # The charset is unknown, or the text is not valid in it.
        if errors == "strict":
            raise
        text = content.decode("utf-8", "replace") if charset else content.decode("latin-1")
    return text


def _decoded_text(content: bytes, charset: str) -> str:
    try:
        return content.decode(charset)
    except UnicodeError:
        return content.decode(_SUPERSETS.get(codecs.lookup(charset).name, charset))


async def read_error(
    response: HTTPResponse, limit: int, end: float, secrets: list[str]
) -> CallError:
    """Return the error for an error response, with the part of its body within the limits of size and time.

    Args:
        response: The response.
        limit: The limit of its body in bytes.
        end: When it must have arrived, by the monotonic clock.
        secrets: The credentials of the request.
    """
    content, is_cut = b"", False
    try:
        async with asyncio.timeout(end - monotonic()), aclosing(decoded(response)) as body:
            async for piece in body:
                content += piece
                if len(content) > limit:
                    break
    except (CallError, TimeoutError):
        # The status decides; an incomplete body does not change the error.
        is_cut = True
    status = response.status
    whole = WholeResponse("", status, response.headers, content, secrets)
    phrase = response.reason.encode(errors="replace").decode() or PHRASES.get(status, "Unknown")
    return CallError(
        ErrorCode.EXECUTION_ERROR,
        f"HTTP {status}: {_redactor(*secrets).redact(phrase)}",
        _details(whole, limit, is_cut=is_cut),
        retryable=status in {429, 502, 503, 504},
    )


def with_response(error: CallError, response: WholeResponse, limit: int) -> CallError:
    """Return `error` with the response in its details, in the form of `read_error`."""
    return CallError(error.code, error.message, _details(response, limit))


@lru_cache(maxsize=64)
def _redactor(*secrets: str) -> Redactor:
    return Redactor(part for secret in secrets for part in parts_of(secret))


def _details(response: WholeResponse, limit: int, *, is_cut: bool = False) -> JSONObject:
    """Return the details of an error: the response, without the credentials of the request."""
    redactor = _redactor(*response.secrets)
    content, is_cut = response.content[:limit], is_cut or len(response.content) > limit
    content_type = response.headers.get("content-type", "")
    details: JSONObject = {
        "statusCode": response.status,
        "headers": shown_headers(response.headers, response.secrets),
        "contentType": redactor.redact(content_type),
        "body": None,
    }
    is_text = not content_type or media.is_json(content_type) or media.is_text(content_type)
    if content and not is_text:
        details |= {"body": b64encode(content).decode(), "encoding": "base64"}
    elif content:
        details["body"] = text = redactor.redact(_text(content, content_type))
        if media.is_json(content_type) and not is_cut:
            with suppress(JSONValueError):
                details["body"] = decode_json(text, max_values=MAX_REQUEST_VALUES)
    if is_cut:
        details["truncated"] = True
    return details
